"""One executable per distinct task or segment, with shardings found in data-flow order.

What a program's inputs are sharded like is known from the user, from the program that made them, or (the
first use of an argument) chosen by XLA; its outputs tell the next program. The whole step is never compiled
as one. Equal programs are compiled once and loaded on the devices of each group that runs them.
"""

import dataclasses
import warnings
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd import costs


@dataclasses.dataclass(frozen=True)
class Executable:
    """A compiled program on one group's devices.

    Attributes:
      call: takes and returns flat arrays.
      in_shardings, out_shardings: `NamedSharding`s on the group's mesh.
      key: equal for executables that were compiled once and loaded several times.
    """

    name: str
    call: jax.stages.Compiled
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    key: int


class Compiler:
    """Compiles jaxprs for groups, each distinct one once. Counts what it did."""

    def __init__(self, traced_on: AbstractMesh):
        self.traced_on = traced_on
        self.num_compiled = 0
        self.num_loaded = 0
        self._compiled: dict = {}
        self._kept: list = []

    def compile(
        self,
        name: str,
        closed: compat.ClosedJaxpr,
        mesh: Mesh,
        in_shardings: Sequence[NamedSharding | None],
        out_shardings: Sequence[NamedSharding | None],
        donate: Sequence[int] = (),
    ) -> Executable:
        """`closed` (traced on the whole mesh) for the group `mesh`.

        Args:
          name: for HLO dumps and profiles.
          in_shardings, out_shardings: None lets XLA choose.
          donate: arguments whose memory the program may take over.
        """
        closed = compat.rebase(closed, mesh.abstract_mesh, self.traced_on)
        replicated = NamedSharding(mesh, PartitionSpec())
        ins = [_input_sharding(s, v.aval, mesh) for s, v in zip(in_shardings, closed.jaxpr.invars, strict=True)]
        outs = list(out_shardings)
        if mesh.size == 1:
            ins = [s or replicated for s in ins]
            outs = [s or replicated for s in outs]
        elif not any(ins) and not any(outs):
            ins, outs = (([replicated, *ins[1:]], outs) if ins else (ins, [replicated for _ in outs]))
        key = (
            compat.jaxpr_key(closed), mesh.axis_names, mesh.devices.shape, mesh.axis_types,
            tuple(map(_spec, ins)), tuple(map(_spec, outs)), tuple(donate), mesh.devices.flat[0].platform,
        )  # fmt: skip
        found = self._compiled.setdefault(key, {})
        if mesh not in found:
            found[mesh] = self._loaded(found, mesh) or self._build(name, closed, mesh, ins, outs, donate)
        compiled = found[mesh]
        self._kept.append(closed)  # keys hold identities of its constants
        return Executable(
            name,
            compiled,
            tuple(_on(mesh, s) for s in compiled.input_shardings[0]),
            tuple(_on(mesh, s) for s in compiled.output_shardings),
            id(found),
        )

    def _loaded(self, found, mesh):
        for compiled in found.values():
            if (loaded := compat.load_on(compiled, mesh)) is not None:
                self.num_loaded += 1
                return loaded
            break
        return None

    def _build(self, name, closed, mesh, ins, outs, donate):
        self.num_compiled += 1
        fun = compat.jaxpr_as_fun(closed)

        def program(*args):
            return fun(*args)

        program.__name__ = program.__qualname__ = name
        args = [_abstract(v.aval, s) for v, s in zip(closed.jaxpr.invars, ins, strict=True)]
        with compat.use_mesh(mesh), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            jitted = jax.jit(program, out_shardings=outs, donate_argnums=tuple(donate), keep_unused=True)
            return jitted.lower(*args).compile()


def _abstract(aval, sharding):
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _input_sharding(sharding, aval, mesh: Mesh) -> NamedSharding | None:
    """The known sharding of an argument; types on Explicit axes and scalars always have one."""
    if sharding is not None:
        return sharding
    typed = getattr(aval, "sharding", None)
    if typed is not None and all(t == jax.sharding.AxisType.Explicit for t in mesh.axis_types):
        return NamedSharding(mesh, typed.spec)
    return NamedSharding(mesh, PartitionSpec()) if costs.size(aval) <= 1 else None


def _spec(sharding):
    return None if sharding is None else (str(sharding.spec), sharding.memory_kind)


def _on(mesh: Mesh, sharding) -> NamedSharding:
    """Whatever kind of sharding XLA reports, as a spec on the group's mesh."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, sharding.spec, memory_kind=_kind(sharding))
    if mesh.size == 1 or sharding.is_fully_replicated:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=_kind(sharding))
    return compat.named_sharding(sharding, mesh)


def _kind(sharding):
    """The memory kind where it is not the default one."""
    kind = sharding.memory_kind
    device = next(iter(sharding.device_set))
    return None if kind == device.default_memory().kind else kind


def segment_jaxpr(name, reads, writes, eqns) -> compat.ClosedJaxpr:
    """A segment or task as a jaxpr of its own."""
    return compat.make_jaxpr(reads, writes, eqns, name)
