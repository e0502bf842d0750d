"""Moves a jaxpr from its mesh at tracing, and from others that it names, to the mesh of one group."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.effects import JaxprInputEffect
from jax._src.state.types import AbstractRef
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpmd._jax_compat.jaxprs import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from mpmd._jax_compat.parameters import mapped

# The parts of an equation's context: more since JAX 0.11.
_CONTEXT = [name for name in core.JaxprEqnContext.__slots__ if name not in ("configs", "__weakref__")]
_KERNELS = ("pallas_call", "mpmd_map")  # Pallas compiles their bodies


def rebase(
    jaxpr: ClosedJaxpr, group_mesh: AbstractMesh, whole: AbstractMesh, axis: str | None = None, *, is_last: bool = False
) -> ClosedJaxpr:
    """Returns `jaxpr`, traced on the `whole` mesh, for a group's mesh.

    Every mesh in types, parameters and contexts is replaced, inside inner jaxprs too; a mesh with other
    axis names is the user's own and is left alone. Pure: nothing is traced again.

    Args:
      axis: left out of entries of a spec that name all axes of the mesh. JAX writes these for the residuals of a
        `shard_map` with a derivative that was traced before, on the mesh of a group.
      is_last: whether the program is compiled for this mesh: then a `shard_map` over axes of other sizes is an error
        (ValueError). Before, the mpmd axis may have another size, over which nothing is split or summed.
    """
    return _Rebase(group_mesh, whole, axis, is_last).closed(jaxpr)


class _Rebase:
    def __init__(self, group_mesh: AbstractMesh, whole: AbstractMesh, axis: str | None, is_last: bool):
        self.group, self.axis, self.is_last = group_mesh, axis, is_last
        self.names = whole.axis_names
        self.whole_types = dict(zip(whole.axis_names, whole.axis_types, strict=True))
        self.types = dict(zip(group_mesh.axis_names, group_mesh.axis_types, strict=True))
        self.vars: dict[Var, Var] = {}
        self.meshes: dict[Mesh | AbstractMesh, AbstractMesh] = {}
        self.avals: dict[ShapedArray, ShapedArray] = {}
        self.contexts: dict[core.JaxprEqnContext, core.JaxprEqnContext] = {}
        self.is_in_kernel = False

    def mesh(self, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        if mesh.axis_names != self.names:
            return mesh
        if mesh not in self.meshes:
            changed = {n: t for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t != self.whole_types[n]}
            types = tuple(changed.get(n, t) for n, t in self.types.items())  # Manual in shard_map, Auto in auto_axes
            self.meshes[mesh] = self.group.update(axis_types=types)
        return self.meshes[mesh]

    def aval(self, aval: Any) -> Any:
        if isinstance(aval, AbstractRef):  # in the body of a kernel
            return aval.update(inner_aval=self.aval(aval.inner_aval))
        sharding = getattr(aval, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != self.names:
            return aval
        if aval not in self.avals:
            self.avals[aval] = aval.update(sharding=self.leaf(sharding))
        return self.avals[aval]

    def context(self, ctx: core.JaxprEqnContext) -> core.JaxprEqnContext:
        mesh = ctx.cur_abstract_mesh
        if mesh.axis_names != self.names:
            return ctx
        if ctx not in self.contexts:
            parts = {name: getattr(ctx, name) for name in _CONTEXT}
            parts["cur_abstract_mesh"] = self.mesh(mesh)
            if ctx.xla_metadata is not None:
                parts["xla_metadata"] = tuple(sorted(ctx.xla_metadata.items()))
            self.contexts[ctx] = core.JaxprEqnContext._create(*parts.values())
        return self.contexts[ctx]

    def value(self, x: object) -> object:
        """Returns a parameter of an equation, rebased."""
        return mapped(x, self.leaf)

    def leaf(self, x: object) -> object:
        if isinstance(x, NamedSharding):
            return NamedSharding(self.mesh(x.mesh), self.spec(x.spec), memory_kind=x.memory_kind)
        if isinstance(x, PartitionSpec):
            return self.spec(x)
        if isinstance(x, (Mesh, AbstractMesh)):
            return self.mesh(x)
        if isinstance(x, ClosedJaxpr):
            return self.closed(x)
        if isinstance(x, Jaxpr):
            return self.jaxpr(x)
        return self.aval(x) if isinstance(x, (ShapedArray, AbstractRef)) else x

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        if self.axis is None or self.names not in spec.partitions:
            return spec
        others = tuple(n for n in self.names if n != self.axis) or None
        entries = [others if entry == self.names else entry for entry in spec.partitions]
        return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)

    def closed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(self.jaxpr(closed.jaxpr), closed.consts)

    def var(self, v: Var | Literal) -> Var | Literal:
        if isinstance(v, Literal):
            # A constant with a type carries the mesh under which it was made. A kernel may index by its constants, and
            # asks whether they are Python's integers; other numbers need their type.
            value = v.val
            if hasattr(value, "aval") and isinstance(v.aval.dtype, np.dtype):
                value = np.asarray(value, v.aval.dtype)
                if self.is_in_kernel and not value.ndim:
                    value = value.item() if value.dtype == jax.dtypes.canonicalize_dtype(np.int64) else value[()]
            return Literal(value, self.aval(v.aval))
        if v not in self.vars:
            aval = self.aval(v.aval)
            self.vars[v] = v if aval is v.aval else DropVar(aval) if isinstance(v, DropVar) else Var(aval)
        return self.vars[v]

    def effects(self, found: Any) -> Any:
        """Renames the variables in effects: reading and writing a ref are effects that name its variable."""
        if not any(isinstance(e, JaxprInputEffect) for e in found):
            return found
        return type(found)(
            e.replace(self.var(e.input)) if isinstance(e, JaxprInputEffect) and isinstance(e.input, Var) else e
            for e in found
        )

    def check_sizes(self, mesh: AbstractMesh, manual_axes: Iterable[str]) -> None:
        """Raises a ValueError for a `shard_map` on axes of other sizes: its body holds shapes of one device's part."""
        if mesh.axis_names != self.names:
            return
        for name in sorted(manual_axes):
            size, own = mesh.shape[name], self.group.shape.get(name)
            if own is not None and own != size:
                raise ValueError(
                    f"A shard_map over {name!r} was traced for {size} devices along it, and the group has {own}."
                )

    def eqn(self, eqn: JaxprEqn) -> JaxprEqn:
        if self.is_last and eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            self.check_sizes(mesh, eqn.params.get("manual_axes", mesh.axis_names))
        outside, self.is_in_kernel = self.is_in_kernel, self.is_in_kernel or eqn.primitive.name in _KERNELS
        params = {k: None if k == "concrete_mesh" else self.value(v) for k, v in eqn.params.items()}
        self.is_in_kernel = outside
        return eqn.replace(
            invars=[self.var(v) for v in eqn.invars],
            outvars=[self.var(v) for v in eqn.outvars],
            params=params,
            effects=self.effects(eqn.effects),
            ctx=self.context(eqn.ctx),
        )

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(
            constvars=[self.var(v) for v in jaxpr.constvars],
            invars=[self.var(v) for v in jaxpr.invars],
            outvars=[self.var(v) for v in jaxpr.outvars],
            eqns=[self.eqn(e) for e in jaxpr.eqns],
            effects=self.effects(jaxpr.effects),
        )
