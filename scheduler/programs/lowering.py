"""Makes the instructions of each group from a task graph and a schedule."""

from __future__ import annotations  # `array[int]` is no expression before Python 3.12

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from scheduler.base.collector import without_collection
from scheduler.errors import ScheduleError
from scheduler.ordering import recomputing
from scheduler.programs.instructions import Free, Instruction, Program, Recv, Run, Send, TaskGraph, Value
from scheduler.programs.task_units import Shape, Slot, TaskUnits
from scheduler.schedules.catalogue import make
from scheduler.task import Orders, Schedule, Task, check_schedule, orders_of


def lower(
    task_graph: TaskGraph, schedule: Schedule | str, num_microbatches: int, orders: Orders | None = None
) -> Program:
    """Returns the instructions of each group: tasks in the schedule's order, and the transfers and frees between them.

    All groups' orders are first run once on a clock where F, R, I and W take 1 and B takes 2. The result is one order
    of events for the whole pipeline: a task at its start, its transfers at its end, transfers first where times are
    equal. Each transfer is one event that puts a Send in the sender's list and the Recv in the receiver's. Hence there
    is no deadlock, even if a send blocks until its receive is posted and a receive until its value is there: take the
    first event of this order that has not happened; each group that takes part has nothing before it in its list, so
    the event happens.

    A value goes once to each group that reads it, is freed right after its last use in each group, and is not written
    at all if nobody reads it. Linear in tasks and edges.

    Args:
        task_graph: The values that the tasks of one microbatch hand to each other.
        schedule: The order of each group, and the pairs that become one Run. A name of the catalogue, such as
            ``"1f1b"``, means that schedule for the graph's number of stages.
        num_microbatches: How often the loop body runs.
        orders: The schedule's orders, if they are known already: some schedules take seconds to find them. If the graph
            has an R, the orders of `recomputing`.

    Returns:
        The program of one loop, as input for :func:`check`.

    Raises:
        ScheduleError: The orders miss, repeat or misplace tasks, or deadlock (with the cycle), or a fused pair is not
            adjacent.

    Examples:
        >>> from scheduler import OneFOneB
        >>> program = lower(TaskGraph.chain(2), OneFOneB(2), 4)
        >>> print(*program.groups[1][:3], sep="; ")
        recv a0[0] from group 0; run 1F0(a0[0]) -> r1[0]; free a0[0]
    """
    if isinstance(schedule, str):
        schedule = make(schedule, task_graph.num_stages)
    check_schedule("lower", schedule)
    if task_graph.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"lower: the task graph has {task_graph.num_stages} stages and the schedule "
            f"{schedule.num_stages}; expected the same."
        )
    with without_collection():
        if not orders:
            found = orders_of(schedule, num_microbatches)
            orders = recomputing(schedule, num_microbatches, found, task_graph.recomputed)
        units = TaskUnits(task_graph, schedule, num_microbatches, orders)
        return Program(
            groups=_instructions(units),
            placement=tuple(schedule.placement),
            tasks=(units.tasks,),
            nbytes={edge.name: edge.nbytes for edge in task_graph.edges},
        )


def _instructions(units: TaskUnits) -> tuple[tuple[Instruction, ...], ...]:
    groups: list[list[Instruction]] = [[] for _ in units.first[1:]]
    flows = _Flows(units)
    for group, is_start, unit in _events(units):
        tasks = units.units[unit]
        flow, low, high = flows.of(tasks)
        append = groups[group].append
        if is_start:
            reads = tuple([values[high if which else low] for values, which, _ in flow.reads])
            writes = tuple([values[high if which else low] for values, which, _, _ in flow.writes])
            append(Run(tasks[0], reads, writes, (), tasks[1:]))
            for value, (_, which, others) in zip(reads, flow.reads, strict=True):
                if not others or all(numbers[high if which else low] < unit for numbers in others):
                    append(Free(value))
            continue
        for values, which, readers, is_read_here in flow.writes:
            value = values[high if which else low]
            for reader in readers:
                append(Send(value, reader))
                groups[reader].append(Recv(value, group))
            if not is_read_here:
                append(Free(value))
    return tuple(map(tuple, groups))


def _events(units: TaskUnits) -> Iterator[tuple[int, bool, int]]:
    """Yields group, whether it is a start, and unit: starts and ends in order of time.

    At equal times ends come first, then the lower group. A group's own events keep their order: its units ascend.
    """
    starts, total = units.starts(), len(units.units)
    group_of = array("q", [group for group, end in enumerate(units.first[1:]) for _ in range(units.first[group], end)])
    # One number for each event: time, then end or start, then unit; units ascend with their groups.
    events = [(2 * start + 1) * total + unit for unit, start in enumerate(starts)]
    events += [2 * (start + units.duration(unit)) * total + unit for unit, start in enumerate(starts)]
    for event in sorted(events):
        time, unit = divmod(event, total)
        yield group_of[unit], bool(time % 2), unit


class _UnitValues(NamedTuple):
    """The values that units of one shape read and write.

    Attributes:
        reads: The values by microbatch, which of the unit's microbatches, and the units of the other tasks that read it
            in this group: the last of these units frees the value.
        writes: The values by microbatch, which of the unit's microbatches, the other groups that read it, and whether
            this group does.
    """

    reads: list[tuple[list[Value], int, list[array[int]]]]
    writes: list[tuple[list[Value], int, list[int], bool]]


class _Flows:
    """The values that units read and write, found once for each shape."""

    def __init__(self, units: TaskUnits) -> None:
        self.units = units
        self.values = [[Value(edge.name, m) for m in range(units.num_microbatches)] for edge in units.edges]
        self.edges_at: dict[Slot, list[int]] = {}
        for number, edge in enumerate(units.edges):
            for end in {edge.producer, *edge.consumers}:
                self.edges_at.setdefault(end, []).append(number)
        self.flows: dict[Slot | Shape, _UnitValues] = {}

    def of(self, tasks: tuple[Task, ...]) -> tuple[_UnitValues, int, int]:
        """Returns a unit's values, and its lower and higher microbatch."""
        if len(tasks) == 1:
            stage, kind, low = tasks[0]
            key, high = (stage, kind), low
        else:
            key, (low, high) = Shape.of(tasks), sorted(task.microbatch for task in tasks)
        if key not in self.flows:
            self.flows[key] = self._find(Shape.of(tasks))
        return self.flows[key], low, high

    def _find(self, shape: Shape) -> _UnitValues:
        placement = self.units.schedule.placement
        group = placement[shape.tasks[0][0]]
        flow = _UnitValues([], [])
        touched = {(number, which) for slot, which in shape.slots for number in self.edges_at.get(slot, ())}
        for number, which in sorted(touched):
            edge, values = self.units.edges[number], self.values[number]
            mine = {slot for slot, one in shape.slots if one == which}
            others = [slot for slot in edge.consumers if slot not in mine]
            here = [slot for slot in others if placement[slot[0]] == group]
            if edge.producer in mine:
                if others:
                    away = {placement[slot[0]] for slot in others} - {group}
                    flow.writes.append((values, which, sorted(away), bool(here)))
            elif not mine.isdisjoint(edge.consumers):
                flow.reads.append((values, which, [self.units.unit_of[slot] for slot in here]))
        return flow
