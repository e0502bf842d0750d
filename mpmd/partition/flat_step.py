"""A step as a list of equations and loops, before anything is placed."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import MpmdMesh
from mpmd.errors import StageError
from mpmd.graphs import equations
from mpmd.graphs.sharded_axes import ShardedAxes
from mpmd.ops.cross_group import place_p
from mpmd.ops.loop_primitive import treduce_p
from mpmd.ops.stage_end import mark_p, with_each
from mpmd.partition.loop import partition_loop
from mpmd.partition.outline import Groups, Loop
from mpmd.tracing.new_equations import copy_equations
from mpmd.tracing.state import match_state
from mpmd.tracing.trace import Trace
from scheduler import Schedule
from scheduler.base.texts import counted
from scheduler.schedules.graph import graph_of, with_graph
from scheduler.task import orders_of

Item = Any  # a compat.JaxprEqn or a Loop
Asked = Sequence[Groups | None]


@dataclasses.dataclass(frozen=True)
class FlatStep:
    """The items of a step, in order, and the requirements on its arguments and results."""

    trace: Trace
    items: tuple[Item, ...]  # equations, and loops with their equations before and after them; dead ones are dropped
    outvars: tuple[compat.Var, ...]  # the flat results
    in_groups: tuple[Groups | None, ...]  # per input (captured constants first), the groups that must hold it, or None
    out_groups: tuple[Groups | None, ...]  # per result, the groups that must hold it, or None
    donors: tuple[int | None, ...]  # per result, the input that it replaces, or None
    everywhere: Groups  # all groups

    @classmethod
    def of(
        cls,
        trace: Trace,
        mesh: MpmdMesh,
        in_groups: Asked,
        out_groups: Asked,
        forwarded: Iterable[int] = (),
        in_specs: Sequence[PartitionSpec | None] = (),
        ahead: bool = True,
    ) -> "FlatStep":
        """Reads a trace and cuts its loops into tasks; for the arguments see `place_segments.outline_step`."""
        everywhere = frozenset(range(mesh.num_groups))
        items, outvars = _items(trace, mesh, forwarded, _sharded_axes(trace, mesh, in_specs), ahead)
        items = [_with_groups(i, everywhere) if _is_place(i) else i for i in items]
        num_consts = len(trace.consts)
        return cls(
            trace,
            tuple(items),
            tuple(outvars),
            (*[None] * num_consts, *(g if g is None else g or frozenset([0]) for g in in_groups)),
            tuple(g if g is None else g or frozenset([0]) for g in out_groups),
            tuple(d if d is None else d + num_consts for d in match_state(trace)),
            everywhere,
        )

    @property
    def invars(self) -> list[compat.Var]:
        """The inputs: captured constants, then the flat arguments."""
        return self.trace.jaxpr.invars

    @functools.cached_property
    def next_of(self) -> dict[compat.Var, compat.Var]:
        """Maps each argument that is state to the result that replaces it."""
        return {self.invars[d]: v for d, v in zip(self.donors, self.outvars, strict=True) if d is not None}

    @functools.cached_property
    def placed_by_user(self) -> dict[compat.Var, Groups]:
        """The values that the user placed."""
        return {i.outvars[0]: i.params["groups"] for i in self.items if _is_place(i)}

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """The pipelined loops."""
        return [i for i in self.items if isinstance(i, Loop)]

    def __str__(self):
        return "\n".join(f"loop {i.number}" if isinstance(i, Loop) else str(i) for i in self.items)


def _is_place(item: Item) -> bool:
    return not isinstance(item, Loop) and item.primitive is place_p


def _sharded_axes(trace: Trace, mesh: MpmdMesh, in_specs: Sequence[PartitionSpec | None]) -> ShardedAxes | None:
    """Returns the known shardings of arguments inside of groups; None if groups differ or have one device."""
    shape = mesh.groups[0].abstract_mesh
    if shape.size == 1 or any(g.abstract_mesh != shape for g in mesh.groups):
        return None
    known = zip(trace.arguments, in_specs, strict=False)  # there may be no specs
    return ShardedAxes(shape, {v: spec for v, spec in known if spec is not None})


def _items(
    trace: Trace, mesh: MpmdMesh, forwarded: Iterable[int], sharded: ShardedAxes | None, ahead: bool
) -> tuple[list[Item], list[compat.Var]]:
    """Returns the items of a step, and its results, each of which has its own variable."""
    items: list[Item] = []
    jaxpr = with_each(trace.jaxpr, lambda eqn: None if eqn.primitive is mark_p else eqn)
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            items += _loop_items(eqn, mesh, sum(isinstance(i, Loop) for i in items), sharded, ahead)
        else:
            items.append(eqn)
            if sharded is not None:
                sharded.read([eqn])
    outvars: list[compat.Var] = []
    arguments = trace.arguments
    taken = set(trace.jaxpr.invars) - {arguments[i] for i in forwarded}
    for v in jaxpr.outvars:
        if isinstance(v, compat.Literal) or v in taken:
            # A copy in its own memory, since a later step may take it over.
            eqns, (v,) = copy_equations(v)
            items += eqns
        assert isinstance(v, compat.Var)
        outvars.append(v)
        taken.add(v)
    return _live(items, outvars), outvars


def _loop_items(
    eqn: compat.JaxprEqn, mesh: MpmdMesh, number: int, sharded: ShardedAxes | None, ahead: bool
) -> list[Item]:
    info = eqn.params["info"]
    _check_groups(info.schedule, mesh, eqn)
    orders = orders_of(info.schedule, info.num_microbatches)
    split = any(task.kind in "IW" for order in orders for task in order)
    partition = partition_loop(eqn, split, sharded, ahead)
    if (graph := graph_of(info.schedule)) is not None:
        schedule = with_graph(info.schedule, dataclasses.replace(graph, reads=partition.reads()))
        partition = dataclasses.replace(partition, info=dataclasses.replace(info, schedule=schedule))
        orders = schedule.orders(info.num_microbatches)
    return [*partition.before, Loop(number, partition, partition.recomputing(orders)), *partition.after]


def _check_groups(schedule: Schedule, mesh: MpmdMesh, eqn: compat.JaxprEqn) -> None:
    if schedule.num_groups != mesh.num_groups:
        other = "MpmdMesh.mpmd_submesh"
        if mesh.num_groups < schedule.num_groups:
            other = f"more groups, which may share devices: MpmdMesh.from_groups([mesh] * {schedule.num_groups})"
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: {schedule} runs on {counted(schedule.num_groups, 'group')},"
            f" but {mesh} has {mesh.num_groups}.\n"
            f"  Use a schedule for {counted(mesh.num_groups, 'group')}, or {other}."
        )


def _with_groups(eqn: compat.JaxprEqn, everywhere: Groups) -> compat.JaxprEqn:
    """Returns a `place` with the groups that it names, or with all groups if it names none."""
    groups = eqn.params["groups"] or everywhere
    if wrong := sorted(groups - everywhere):
        raise StageError(
            f"place at {compat.source_line(eqn)}: group {wrong[0]} is not there; the mesh has groups"
            f" 0..{len(everywhere) - 1}."
        )
    return eqn.replace(params={**eqn.params, "groups": groups})


def _live(items: Sequence[Item], outvars: Sequence[compat.Var]) -> list[Item]:
    needed = set(equations.variables(outvars))
    kept: list[Item] = []
    for item in reversed(items):
        if isinstance(item, Loop):
            needed.update(item.needs())
            kept.append(item)
        elif item.effects or any(v in needed for v in item.outvars):
            if item.primitive.name in ("cond", "scan", "while"):  # their live results determine their parts
                item = item.replace(outvars=[v if v in needed else compat.DropVar(v.aval) for v in item.outvars])
            needed.update(equations.variables(item.invars))
            kept.append(item)
    return kept[::-1]
