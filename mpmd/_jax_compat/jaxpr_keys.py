"""Hashable keys of jaxprs: equal if they compile to the same program."""

from collections.abc import Callable, Hashable, Mapping

import numpy as np
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from mpmd._jax_compat.jaxprs import PLAIN, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from mpmd._jax_compat.parameters import opened

# The parts of an equation's context that change the program, besides its mesh.
_CONTEXT = ("compute_type", "threefry_partitionable", "xla_metadata")


def jaxpr_key(closed: ClosedJaxpr) -> Hashable:
    """Returns a hashable key: equal for jaxprs that compile to the same program (names and source lines apart)."""
    return _Key().jaxpr(closed.jaxpr), tuple(map(id, closed.consts))


def equation_key(eqn: JaxprEqn) -> Hashable:
    """Returns a hashable key: equal for equations that do the same with operands of the same types."""
    return _Key().equation(eqn, lambda v: _Key().atom(v) if isinstance(v, Literal) else _Key().aval(v.aval))


class _Key:
    def __init__(self):
        self.numbers: dict[Var, int] = {}

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
            return x
        if isinstance(x, ClosedJaxpr):
            return _Key().jaxpr(x.jaxpr), tuple(map(id, x.consts))
        if isinstance(x, Jaxpr):
            return _Key().jaxpr(x)
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
            tuple(operand(v) for v in eqn.invars),
            tuple((operand(v), self.aval(v.aval)) for v in eqn.outvars),
            tuple((k, self.value(v)) for k, v in sorted(eqn.params.items()) if k not in ("name", "debug_info")),
            tuple(self.value(getattr(eqn.ctx, name, None)) for name in _CONTEXT),
        )
