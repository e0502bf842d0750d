"""Hashable keys of jaxprs: equal if they compile to the same program."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Mapping

import numpy as np
from jax._src import core
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from mpmd._jax_compat.jaxprs import PLAIN, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from mpmd._jax_compat.parameters import opened

_MOST_NBYTES = 1 << 20  # of constants that are compared by content
# The parts of an equation's context that change the program, besides its mesh.
_CONTEXT = ("compute_type", "threefry_partitionable", "xla_metadata")


def jaxpr_key(closed: ClosedJaxpr) -> Hashable:
    """Returns a hashable key: equal for jaxprs that compile to the same program (names and source lines apart)."""
    return _Key().closed(closed)


def traced_again_key(closed: ClosedJaxpr) -> Hashable:
    """Returns a hashable key: equal for jaxprs that tracing the same Python code twice may have made.

    Unlike in `jaxpr_key`, functions that both traces define (a callback's lambda) and constants are equal if their
    content is. Only one of such programs may run: each function may have a state of its own.
    """
    return _TracedAgain().closed(closed)


def equation_key(eqn: JaxprEqn) -> Hashable:
    """Returns a hashable key: equal for equations that do the same with operands of the same types."""
    key = _Key()
    return key.equation(eqn, lambda v: key.atom(v) if isinstance(v, Literal) else key.aval(v.aval))


@functools.lru_cache(maxsize=256)
def _context(ctx: core.JaxprEqnContext) -> Hashable:
    return tuple(_Key().value(getattr(ctx, name, None)) for name in _CONTEXT)


class _Key:
    def __init__(self):
        self.numbers: dict[Var, int] = {}

    def closed(self, x: ClosedJaxpr) -> Hashable:
        return type(self)().jaxpr(x.jaxpr), tuple(map(self.constant, x.consts))

    def constant(self, x: object) -> Hashable:
        return id(x)

    def atom(self, v: Var | Literal) -> Hashable:
        if isinstance(v, Literal):
            if not isinstance(v.aval.dtype, np.dtype):  # a typed PRNG key, which a program with this key keeps alive
                return "lit", id(v.val), self.aval(v.aval)
            return "lit", np.asarray(v.val).tobytes(), self.aval(v.aval)
        if isinstance(v, DropVar):
            return "_"
        return self.numbers.setdefault(v, len(self.numbers))

    def aval(self, aval: object) -> Hashable:
        if isinstance(aval, ShapedArray):
            return aval  # JAX keeps one object for all equal ones
        sharding = getattr(aval, "sharding", None)
        return (
            getattr(aval, "shape", None),
            str(getattr(aval, "dtype", aval)),
            getattr(aval, "weak_type", False),
            None if sharding is None else self.value(sharding),
            str(aval) if getattr(aval, "vma", None) or getattr(aval, "memory_space", None) is not None else None,
        )

    def value(self, x: object) -> Hashable:
        if type(x) in PLAIN:
            # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
            return (type(x), repr(x)) if type(x) in (bool, float, complex) else x
        if type(x) is tuple:  # as most other parameters are
            return tuple, *map(self.value, x)
        if isinstance(x, ClosedJaxpr):
            return self.closed(x)
        if isinstance(x, Jaxpr):
            return type(self)().jaxpr(x)
        if isinstance(x, NamedSharding):
            return self.value(x.mesh), str(x.spec), x.memory_kind
        if isinstance(x, (Mesh, AbstractMesh)):
            return tuple(x.shape.items()), tuple(map(str, x.axis_types))
        if (parts := opened(x)) is not None:
            return (*(x if isinstance(x, Mapping) else (type(x),)), *map(self.value, parts))
        if isinstance(x, np.ndarray):
            return x.shape, str(x.dtype), x.tobytes()
        if isinstance(x, ShapedArray):
            return self.aval(x)
        try:
            hash(x)
        except TypeError:
            return id(x)
        return x

    def jaxpr(self, jaxpr: Jaxpr) -> Hashable:
        head = tuple((self.atom(v), self.aval(v.aval)) for v in (*jaxpr.constvars, *jaxpr.invars))
        eqns = tuple(self.equation(eqn, self.atom) for eqn in jaxpr.eqns)
        return head, eqns, tuple(self.atom(v) for v in jaxpr.outvars)

    def equation(self, eqn: JaxprEqn, operand: Callable[[Var | Literal], Hashable]) -> Hashable:
        return (
            eqn.primitive.name,
            tuple(map(operand, eqn.invars)),
            tuple([(operand(v), self.aval(v.aval)) for v in eqn.outvars]),
            tuple([(k, self.value(eqn.params[k])) for k in sorted(eqn.params) if k not in ("name", "debug_info")]),
            _context(eqn.ctx),
        )


class _TracedAgain(_Key):
    def __init__(self):
        super().__init__()
        self.inside: list[object] = []  # the functions whose content is being read: one may hold itself

    def constant(self, x: object) -> Hashable:
        return self.value(x) if isinstance(x, np.ndarray) and x.nbytes <= _MOST_NBYTES else id(x)

    def value(self, x: object) -> Hashable:
        parts: tuple[object, ...] | None = None
        match x:
            case types.FunctionType():
                parts = x.__code__, x.__defaults__, x.__kwdefaults__, *(x.__closure__ or ())
            case types.CellType():
                with contextlib.suppress(ValueError):  # a name that is not bound yet
                    parts = (x.cell_contents,)
            case types.MethodType():
                parts = x.__func__, x.__self__
            case functools.partial():
                parts = x.func, x.args, x.keywords
            case _ if callable(x) and dataclasses.is_dataclass(x) and type(x).__module__.startswith("jax."):
                parts = tuple(getattr(x, f.name) for f in dataclasses.fields(x))
        if parts is None:
            return super().value(x)
        if any(x is y for y in self.inside):
            return "itself"
        self.inside.append(x)
        found = type(x), *map(self.value, parts)
        self.inside.pop()
        return found
