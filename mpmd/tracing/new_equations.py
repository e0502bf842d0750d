"""New equations for a jaxpr: those of a function, or of another jaxpr, on existing variables."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh

from mpmd import _jax_compat as compat
from mpmd.ops.reductions import Operation, explicit_sharding
from mpmd.tracing.inline import inline, literals_of

Atom = compat.Var | compat.Literal


class Equations(NamedTuple):
    """Equations with variables of their own, and their results."""

    eqns: list[compat.JaxprEqn]
    outs: list[Atom]

    def named(self, results: Sequence[compat.Var]) -> list[compat.JaxprEqn]:
        """Returns the equations, with other names for their results."""
        return compat.renamed_equations(self.eqns, dict(zip(self.outs, results, strict=True)))


def append(eqns: list[compat.JaxprEqn], like: compat.JaxprEqn, found: Equations) -> Atom:
    """Appends equations with the source line of `like`; returns their only result."""
    eqns += [e.replace(source_info=like.source_info) for e in found.eqns]
    (out,) = found.outs
    return out


def equations_on(closed: compat.ClosedJaxpr, atoms: Sequence[Atom]) -> Equations:
    """Returns the equations of a flat jaxpr on other operands; a cached jaxpr may be used many times."""
    jaxpr = closed.jaxpr
    names = compat.new_vars(jaxpr.eqns) | dict(zip(jaxpr.invars, atoms, strict=True)) | literals_of(closed)
    return Equations(compat.renamed_equations(jaxpr.eqns, names), [compat.renamed(v, names) for v in jaxpr.outvars])


def trace_equations(fun: Callable, *atoms: Atom) -> Equations:
    """Returns the equations of `fun` on `atoms`."""
    avals = tuple(a.aval for a in atoms)
    return equations_on(_trace_on(fun, avals, _mesh_of(avals)), atoms)


def trace_operation(operation: Operation, method: str, atoms: Sequence[Atom], *args: int) -> Equations:
    """Returns the equations of a method of an operation, traced once for all operands of the same types."""
    avals = tuple(a.aval for a in atoms)
    return equations_on(
        _operation_jaxpr(operation, method, avals, args, _mesh_of(avals), compat.trace_context()), atoms
    )


@functools.lru_cache(maxsize=1024)
def _operation_jaxpr(
    operation: Operation,
    method: str,
    avals: tuple[compat.Aval, ...],
    args: tuple[int, ...],
    mesh: AbstractMesh,
    context: Hashable,
) -> compat.ClosedJaxpr:
    return _trace_on(lambda *xs: getattr(operation, method)(*xs, *args), avals, mesh)


def _trace_on(fun: Callable, avals: Sequence[compat.Aval], mesh: AbstractMesh) -> compat.ClosedJaxpr:
    with compat.use_abstract_mesh(mesh):
        closed = jax.make_jaxpr(fun)(*(compat.abstract(a, explicit_sharding(a)) for a in avals))
    return compat.ClosedJaxpr(inline(closed.jaxpr), closed.consts)


def _mesh_of(avals: Sequence[compat.Aval]) -> AbstractMesh:
    """Returns the mesh of the first operand with a mesh in its type, else the current one: `auto_axes` changes it."""
    shardings = (getattr(aval, "sharding", None) for aval in avals)
    meshes = (cast(AbstractMesh, s.mesh) for s in shardings if s is not None and not s.mesh.empty)
    return next(meshes, compat.current_mesh())


def full_equations(result: compat.Var, value: float) -> list[compat.JaxprEqn]:
    """Returns the equations that make `result`, an array of one value."""
    aval = result.aval

    def full() -> jax.Array:
        return jax.lax.full(aval.shape, value, aval.dtype, sharding=explicit_sharding(aval))

    return equations_on(_trace_on(full, (), _mesh_of([aval])), ()).named([result])


def copy_equations(atom: Atom) -> Equations:
    """Returns the equations that copy a variable or a literal."""
    if isinstance(atom, compat.Literal):
        is_array = not jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.extended)
        constant = np.asarray(atom.val, atom.aval.dtype) if is_array else atom.val
        return trace_equations(lambda: jax.lax.copy_p.bind(constant))
    return trace_equations(jax.lax.copy_p.bind, atom)
