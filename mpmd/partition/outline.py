"""Where everything outside of the loops runs: the step as segments (one group, one executable) and loops.

An equation runs in the group that holds its operands. If several groups hold them, it runs in the one with most of
their bytes (ties go to a group that holds state), and the rest is sent there: usually scalars such as a global norm.
An equation that depends on no placed value runs wherever its result is wanted. A state leaf that the step returns in
the same position stays in the groups that it came from, so that a training loop moves nothing.

The passes are pure, and each returns a value that prints itself: a list of equations and loops (`flat_step`); their
groups, by a forward pass (where operands are) and a backward pass (where results are wanted: `place_segments`); the
equations that can run together before the next transfer (`levels`); and the outline (`assemble`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.partition.loop import LoopPartition
from mpmd.tracing.trace import Trace
from scheduler import Costs, Schedule, Timeline
from scheduler.base.texts import counted
from scheduler.task import Orders, reads_of
from scheduler.timing.simulate import simulate_orders

Groups = frozenset[int]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equations outside of the loops that one group runs as one executable."""

    name: str
    group: int
    level: int
    eqns: tuple[compat.JaxprEqn, ...]
    reads: tuple[compat.Var, ...]  # variables of the step, in the executable's order
    writes: tuple[compat.Var, ...]  # variables of the step, in the executable's order


def is_of_list(name: str) -> bool:
    """Returns whether an argument is an array of any microbatch of a list, by its name (`ops/lists.py`)."""
    return "[*]" in name


@dataclasses.dataclass(frozen=True)
class OutlineTransfer:
    """A variable that goes from one group to another, after all items of its level."""

    var: compat.Var
    source: int
    target: int
    level: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """A pipelined loop between the segments.

    Its operands must be in place when it starts; its accumulators are made in place by the executor.
    """

    number: int
    partition: LoopPartition
    orders: Orders = dataclasses.field(repr=False)  # per group, its tasks in order, as computed once by the schedule

    @property
    def schedule(self) -> Schedule:
        """The schedule that orders its tasks."""
        return self.partition.info.schedule

    def simulated(self, costs: Costs | None = None) -> Timeline:
        """Simulates the loop; by default all tasks take equally long."""
        return self._simulated(self.orders, self.partition.info.num_microbatches, costs)

    def bubble(self, times: int) -> float:
        """Returns the bubble with `times` times the microbatches, if all tasks take equally long."""
        number = times * self.partition.info.num_microbatches
        return self._simulated(self.schedule.orders(number), number).bubble_fraction

    @property
    def forward_only(self) -> bool:
        """Whether no task but forwards computes anything."""
        return all(t.place.kind == "F" or t.is_empty for t in self.partition.tasks)

    def _simulated(self, orders: Orders, number: int, costs: Costs | None = None) -> Timeline:
        if self.forward_only:
            orders = tuple(tuple(t for t in order if t.kind == "F") for order in orders)
        return simulate_orders(orders, tuple(self.schedule.placement), number, costs, reads=reads_of(self.schedule))

    def group(self, place: Place) -> int:
        """Returns the group that runs the stage of `place`."""
        return self.schedule.placement[place.stage]

    def stages_of(self, group: int) -> list[int]:
        """Returns the stages that a group runs."""
        return [stage for stage, own in enumerate(self.schedule.placement) if own == group]

    def needs(self) -> dict[compat.Var, set[int]]:
        """Maps variables of the step to the groups that must have them when the loop starts."""
        found: dict[compat.Var, set[int]] = defaultdict(set)
        for task in self.partition.tasks:
            for v in task.operands:
                found[v].add(self.group(task.place))
        return found


@dataclasses.dataclass(frozen=True, repr=False)
class Outline:
    """The whole step, placed."""

    trace: Trace
    inputs: tuple[Groups, ...]  # per flat argument (and captured constant, first), the groups that must have it
    outputs: tuple[tuple[compat.Var, Groups], ...]  # per flat result, its variable and the groups that hold it
    items: tuple[Segment | OutlineTransfer | Loop, ...]  # segments, transfers and loops in one global order
    donors: tuple[int | None, ...]  # per flat result, the flat argument that it replaces, or None
    names: dict[compat.Var, str]
    committed: tuple[bool, ...]  # per flat result, whether a placed value determines where it is
    packed: dict[compat.Var, int]  # vectors of scalars that cross together, each with its number of scalars

    @property
    def loops(self) -> list[Loop]:
        """The pipelined loops, in order."""
        return [i for i in self.items if isinstance(i, Loop)]

    def __repr__(self):
        loops = [f"{i.schedule}, {counted(i.partition.info.num_microbatches, 'microbatch')}" for i in self.loops]
        around = len(self.items) - len(loops)
        return f"{'; '.join(loops) or 'no loop'}; {around} segments and transfers around"

    def __str__(self):
        lines = []
        for item in self.items:
            if isinstance(item, Segment):
                lines.append(f"{item.name} (group {item.group}): {len(item.eqns)} equations")
            elif isinstance(item, OutlineTransfer):
                size = equations.nbytes(item.var.aval)
                lines.append(f"  send {self.names[item.var]} ({size:,} B) from group {item.source} to {item.target}")
            else:
                microbatches = counted(item.partition.info.num_microbatches, "microbatch")
                lines.append(f"loop {item.number}: {item.schedule}, {microbatches}")
                lines += ["  " + line for line in str(item.partition).splitlines()]
        return "\n".join(lines)


def with_microbatches(outline: Outline, numbers: Mapping[int, int]) -> Outline:
    """Changes the numbers of microbatches of loops, by the number of the loop."""
    return with_changes(outline, {number: {"num_microbatches": count} for number, count in numbers.items()})


def with_changes(outline: Outline, changes: Mapping[int, Mapping[str, object]]) -> Outline:
    """Changes the number of microbatches of loops, or their schedule, by the number of the loop. A new schedule must
    have the same stages and kinds of tasks.
    """

    def changed(loop: Loop) -> Loop:
        if loop.number not in changes:
            return loop
        info = dataclasses.replace(loop.partition.info, **changes[loop.number])
        partition = dataclasses.replace(loop.partition, info=info)
        orders = partition.recomputing(info.schedule.orders(info.num_microbatches))
        return dataclasses.replace(loop, partition=partition, orders=orders)

    items = tuple(changed(item) if isinstance(item, Loop) else item for item in outline.items)
    return dataclasses.replace(outline, items=items)
