"""Estimates the bytes that a step will need on each device, before anything is compiled.

The walk is the same as in `memory.py`. Shardings are the ones that the partition expects too (`sharded_axes.py`).
Temporaries follow from the live ranges of the values that fusion would not remove.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from jax.sharding import PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.donation import donations
from mpmd.compile.program import step_program
from mpmd.compile.tasks import task_bodies
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.graphs.sharded_axes import ShardedAxes
from mpmd.partition.outline import Loop, Outline, Segment
from mpmd.report.memory import Sizes, peaks
from mpmd.report.roles import Roles
from scheduler import Call, Program, Run


class Draft(NamedTuple):
    """A step that is not compiled: its program, and its estimated bytes."""

    program: Program
    sizes: Sizes
    temporaries: Callable[[Run | Call], int]  # estimates the bytes of an instruction beside its arguments and results

    def memory(self) -> dict[int, dict[str, int]]:
        """Returns estimates for every group, like `memory.measured`."""
        groups = range(len(self.program.groups))
        return {g: peaks(self.program, g, self.sizes, self.temporaries) for g in groups}


def draft_of(outline: Outline, mesh: MpmdMesh, in_layouts: Sequence[Layout | None], donated_args: Set[int]) -> Draft:
    """Returns the program of a step and the sizes of its values, without compiling. `in_layouts` has an entry per flat
    argument; `donated_args` are numbers of flat arguments.
    """
    layouts = {v: layout for v, layout in zip(outline.trace.arguments, in_layouts, strict=True) if layout}
    largest = max(mesh.groups, key=lambda group: group.size)
    sharded = ShardedAxes(largest, {v: spec for v, (spec, _) in layouts.items()})
    batches = {v for v, role in Roles(outline).role.items() if role == "data"}
    inner: dict[str | tuple[int, Place], int] = {}
    for item in outline.items:
        if isinstance(item, Segment):
            sharded.read_both_ways(item.eqns, batches)
            inner[item.name] = _temporaries(item.eqns, item.writes, sharded)
        elif isinstance(item, Loop):
            for body in task_bodies(item):
                results = [item.partition.accumulators[k].value for k in body.accumulates]
                sharded.read_both_ways(body.eqns, batches)
                inner[item.number, body.place] = _temporaries(body.eqns, [*body.writes, *results], sharded)
            for acc in item.partition.accumulators:
                sharded.say_alike(acc.result, acc.value)
    layouts = {v: (PartitionSpec(*(axes or None for axes in dims)), None) for v, dims in sharded.items()} | layouts
    program = step_program(outline, mesh.num_groups, donations(outline, mesh, donated_args))

    def temporaries(instruction: Run | Call) -> int:
        if isinstance(instruction, Call):
            return inner.get(instruction.name, 0)
        return max((inner.get((instruction.loop, Place(t.stage, t.kind)), 0) for t in instruction.tasks), default=0)

    return Draft(program, Sizes(outline, mesh, layouts), temporaries)


def _temporaries(
    eqns: Sequence[compat.JaxprEqn], results: Iterable[compat.Var | compat.Literal], sharded: ShardedAxes
) -> int:
    """Returns the most bytes that an executable holds at once on each device, beside its arguments and results."""
    made = {v: eqn for eqn in eqns for v in equations.outputs(eqn)}
    stored = {v for v, eqn in made.items() if _is_stored(eqn)}
    for eqn in eqns:
        if equations.is_heavy(eqn) and not equations.changes_memory(eqn):
            stored.update(v for v in equations.variables(eqn.invars) if v in made and not equations.is_view(made[v]))
    last: dict[compat.Var, int] = {}  # the end of each live range; a fused value extends the ranges of its inputs
    for position, eqn in reversed(list(enumerate(eqns))):
        until = max([position, *(last[v] for v in eqn.outvars if v in last and v not in stored)])
        last.update((v, max(until, last.get(v, 0))) for v in equations.variables(eqn.invars))
    temporary = stored.intersection(last).difference(equations.variables(results))
    ends: dict[int, int] = defaultdict(int)
    for v in temporary:
        ends[last[v]] += sharded.nbytes(v)
    alive = most = 0
    for position, eqn in enumerate(eqns):
        alive += sum(sharded.nbytes(v) for v in eqn.outvars if v in temporary)
        most = max(most, alive + max((_temporaries(j.eqns, (), s) for j, s in sharded.within(eqn)), default=0))
        alive -= ends[position]
    return most


def _is_stored(eqn: compat.JaxprEqn) -> bool:
    """Returns whether XLA writes the results of an equation to memory rather than fuse them into their readers."""
    if equations.changes_memory(eqn) or equations.is_view(eqn):
        return False
    return equations.is_heavy(eqn) or eqn.primitive.name.startswith(("reduce", "arg", "gather", "random"))
