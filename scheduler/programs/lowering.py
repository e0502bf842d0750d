"""Makes the instructions of each group from a task graph and a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.errors import ScheduleError
from scheduler.ordering import coverage_faults, expected_tasks, find_cycle, raise_faults, start_times
from scheduler.programs.instructions import Free, Instruction, Program, Recv, Run, Send, TaskGraph, Value
from scheduler.schedules.catalogue import make
from scheduler.task import Orders, Schedule, Task, check_schedule

DURATION = {"F": 1, "I": 1, "W": 1, "B": 2}


def lower(
    task_graph: TaskGraph, schedule: Schedule | str, num_microbatches: int, orders: Orders | None = None
) -> Program:
    """The instructions of each group: tasks in the schedule's order, and the transfers and frees between them.

    All groups' orders are first run once on a clock where F, I and W take 1 and B takes 2. That gives one line of
    events for the whole pipeline: a task at its start, its transfers at its end, transfers first where times are
    equal. Each transfer is one event that puts a Send in the sender's list and the Recv in the receiver's. Hence no
    deadlock, even if a send blocks until its receive is posted and a receive until its value is there: take the first
    event of the line that has not happened; each group that takes part has nothing before it in its list, so it
    happens.

    A value goes once to each group that reads it, is freed right after its last use in each group, and is not written
    at all if nobody reads it. Linear in tasks and edges.

    Args:
        task_graph: What the tasks of one microbatch hand to each other.
        schedule: The order of each group, and the pairs that become one Run. A name of the catalogue, such as
            ``"1f1b"``, is that schedule for the graph's number of stages.
        num_microbatches: How often the loop body runs.
        orders: The schedule's orders, if they are known already: some schedules take seconds to find them.

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
    plan = _Units.of(task_graph, schedule, num_microbatches, orders or schedule.orders(num_microbatches))
    starts = plan.starts()
    groups: list[list[Instruction]] = [[] for _ in range(schedule.num_groups)]
    flow = _Flow.of(task_graph, plan)
    for _, is_start, unit in _events(plan, starts):
        tasks = plan.units[unit]
        group = plan.group[unit]
        if is_start:
            groups[group].append(Run(tasks[0], flow.reads[unit], flow.writes[unit], also=tasks[1:]))
            groups[group].extend(Free(value) for value in flow.reads[unit] if flow.last_use[group, value] == unit)
            continue
        for value in flow.writes[unit]:
            for reader in flow.destinations[value]:
                if reader != group:
                    groups[group].append(Send(value, reader))
                    groups[reader].append(Recv(value, group))
            if flow.last_use[group, value] == unit:
                groups[group].append(Free(value))
    return Program(
        groups=tuple(map(tuple, groups)),
        placement=tuple(schedule.placement),
        tasks=(expected_tasks(schedule.num_stages, num_microbatches, task_graph.forward_only),),
        nbytes={edge.name: edge.nbytes for edge in task_graph.edges},
    )


class _Event(NamedTuple):
    time: int
    is_start: bool
    unit: int


def _events(plan: _Units, starts: dict[int, int]) -> Iterable[_Event]:
    """Starts and ends of units in order of time: ends first, then by group; a group's own events keep their order."""
    events = []
    for unit, start in starts.items():
        events.append((start, 1, plan.group[unit], unit))
        events.append((start + plan.duration(unit), 0, plan.group[unit], unit))
    events.sort()
    return [_Event(time, bool(phase), unit) for time, phase, _, unit in events]


@dataclass
class _Units:
    """Tasks grouped into what runs as one executable, numbered so that each group's order ascends."""

    units: list[tuple[Task, ...]]
    group: list[int]
    orders: list[range]
    unit_of: dict[tuple[int, str], dict[int, int]]
    """For stage and kind (F, I or W) and then microbatch, the unit that does the task."""
    needs: dict[int, set[int]]

    @classmethod
    def of(cls, task_graph: TaskGraph, schedule: Schedule, num_microbatches: int, orders: Orders) -> _Units:
        pairs = schedule.fused(num_microbatches)
        if task_graph.forward_only:
            orders = tuple(tuple(task for task in order if task.kind == "F") for order in orders)
            pairs = frozenset(pair for pair in pairs if pair[0].kind == pair[1].kind == "F")
        expected = expected_tasks(schedule.num_stages, num_microbatches, task_graph.forward_only)
        runs = [(group, task) for group, order in enumerate(orders) for task in order]
        raise_faults(ScheduleError, "lower: the schedule's orders", coverage_faults(runs, schedule.placement, expected))
        second = dict(pairs)
        units: list[tuple[Task, ...]] = []
        group_of: list[int] = []
        ranges: list[range] = []
        found = 0
        for group, order in enumerate(orders):
            begin = len(units)
            previous = None
            for task in order:
                if previous is not None and second.get(previous) == task:
                    units[-1] = (previous, task)
                    found += 1
                    previous = None
                    continue
                units.append((task,))
                group_of.append(group)
                previous = task
            ranges.append(range(begin, len(units)))
        unit_of: dict[tuple[int, str], dict[int, int]] = {}
        for unit, tasks in enumerate(units):
            for part in (part for task in tasks for part in task.parts):
                unit_of.setdefault((part.stage, part.kind), {})[part.microbatch] = unit
        if found < len(pairs):
            together = {tasks for tasks in units if len(tasks) == 2}
            apart = sorted(pair for pair in pairs if pair not in together)
            raise_faults(
                ScheduleError,
                "lower: pairs to be fused",
                [f"{first} and {then} are not neighbours in an order" for first, then in apart],
            )
        plan = cls(units, group_of, ranges, unit_of, {})
        for _, _, source, readers in plan.uses(task_graph):
            for reader in readers:
                plan.needs.setdefault(reader, set()).add(source)
        return plan

    def uses(self, task_graph: TaskGraph) -> Iterable[tuple[str, int, int, set[int]]]:
        """Each edge, one microbatch after the other: its name, the microbatch, the unit that writes it, its readers.

        Values that no other unit reads are left out.
        """
        for edge in task_graph.edges:
            consumers = [self.unit_of.get(end, {}) for end in edge.consumers if end not in task_graph.empty]
            written = {} if edge.producer in task_graph.empty else self.unit_of.get(edge.producer, {})
            for microbatch, source in sorted(written.items()):
                readers = {units[microbatch] for units in consumers if microbatch in units} - {source}
                if readers:
                    yield edge.name, microbatch, source, readers

    def duration(self, unit: int) -> int:
        return sum(DURATION[task.kind] for task in self.units[unit])

    def starts(self) -> dict[int, int]:
        starts, position = start_times(self.orders, self.needs, self.duration)
        if len(starts) < len(self.units):
            names = ["+".join(map(str, tasks)) for tasks in self.units]
            cycle = find_cycle(
                [[names[unit] for unit in order] for order in self.orders],
                {names[unit]: [names[need] for need in sorted(needs)] for unit, needs in self.needs.items()},
                position,
            )
            raise ScheduleError(f"lower: the schedule's orders deadlock: {cycle}.")
        return starts


@dataclass
class _Flow:
    """The values that each unit reads and writes, and the last unit that uses each."""

    reads: list[tuple[Value, ...]]
    writes: list[tuple[Value, ...]]
    destinations: dict[Value, list[int]]
    """For each value, the groups that read it, in ascending order."""
    last_use: dict[tuple[int, Value], int]
    """For each group and value, the last unit that reads it there; in the writer's group the writer, if nobody does."""

    @classmethod
    def of(cls, task_graph: TaskGraph, plan: _Units) -> _Flow:
        reads: list[dict[Value, None]] = [{} for _ in plan.units]
        writes: list[list[Value]] = [[] for _ in plan.units]
        destinations: dict[Value, list[int]] = {}
        last_use: dict[tuple[int, Value], int] = {}
        for name, microbatch, source, readers in plan.uses(task_graph):
            value = Value(name, microbatch)
            writes[source].append(value)
            last_use[plan.group[source], value] = source
            for reader in sorted(readers):
                reads[reader][value] = None
                group = plan.group[reader]
                last_use[group, value] = max(reader, last_use.get((group, value), reader))
            destinations[value] = sorted({plan.group[reader] for reader in readers})
        return cls(list(map(tuple, reads)), list(map(tuple, writes)), destinations, last_use)
