"""Units that run as one executable (tasks and fused pairs), numbered in the order of the groups, with dependencies."""

from __future__ import annotations  # `array[int]` is no expression before Python 3.12

from array import array
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from scheduler.engine import blocked, run_until_blocked
from scheduler.errors import ScheduleError
from scheduler.ordering import LoopTasks, Numbers, coverage_faults, deadlock, paired, raise_faults
from scheduler.programs.instructions import TaskGraph
from scheduler.task import Orders, Schedule, Task

DURATION = {"F": 1, "R": 1, "I": 1, "W": 1, "B": 2}
PARTS = {"F": ("F",), "R": ("R",), "I": ("I",), "W": ("W",), "B": ("I", "W")}
Slot = tuple[int, str]
"""Stage and kind, F, R, I or W: the tasks of all microbatches."""


class Shape(NamedTuple):
    """All that a unit's values depend on except its microbatches: (stage, kind, which microbatch) for each task.

    The lower of its microbatches is 0, the other one 1.
    """

    tasks: tuple[tuple[int, str, int], ...]

    @classmethod
    def of(cls, unit: tuple[Task, ...]) -> Shape:
        """Returns the shape of one task, or of a fused pair."""
        low = min(task.microbatch for task in unit)
        return cls(tuple((task.stage, task.kind, int(task.microbatch > low)) for task in unit))

    @property
    def slots(self) -> list[tuple[Slot, int]]:
        """Its tasks in kinds F, R, I and W, each with which microbatch."""
        return [((stage, part), which) for stage, kind, which in self.tasks for part in PARTS[kind]]


class TaskUnits:
    """Tasks grouped into units that run as one executable, numbered so that each group's order ascends."""

    def __init__(self, task_graph: TaskGraph, schedule: Schedule, num_microbatches: int, orders: Orders) -> None:
        pairs = schedule.fused(num_microbatches)
        if task_graph.forward_only:
            orders = tuple(tuple(task for task in order if task.kind == "F") for order in orders)
            pairs = frozenset(pair for pair in pairs if pair[0].kind == pair[1].kind == "F")
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.graph = task_graph
        forward_only, recomputed = task_graph.forward_only, task_graph.recomputed
        self.tasks = LoopTasks(schedule.num_stages, num_microbatches, forward_only, recomputed)
        self.units: list[tuple[Task, ...]] = []
        self.first, second = [0], dict(pairs)  # `first`: for each group, its first unit; and the number of units
        for order in orders:
            self.units += paired(order, second)
            self.first.append(len(self.units))
        self.unit_of = self._numbers() or self._refuse(orders)  # For stage and kind (F, R, I or W), then microbatch
        if len(self.units) + len(pairs) > sum(map(len, orders)):
            together = {tasks for tasks in self.units if len(tasks) == 2}
            raise_faults(
                "lower: pairs to be fused",
                [f"{a} and {b} are not neighbours in an order" for a, b in sorted(set(pairs) - together)],
            )
        working = self.unit_of.keys() - task_graph.empty
        # The edges of the graph, without tasks that are not there or do nothing.
        self.edges = [
            edge._replace(consumers=tuple(end for end in edge.consumers if end in working))
            for edge in task_graph.edges
            if edge.producer in working
        ]
        self._sources = self._units_read()

    def _numbers(self) -> dict[Slot, array[int]] | None:
        """Returns, for each slot and microbatch, its unit; None if tasks are missing, repeated or misplaced."""
        numbers = Numbers(self.tasks)
        for group, place in enumerate(pairwise(self.first)):
            for unit in range(*place):
                for task in self.units[unit]:
                    if not numbers.add(task, unit) or self.schedule.placement[task.stage] != group:
                        return None
        return None if numbers.left else numbers.of

    def _refuse(self, orders: Orders) -> dict[Slot, array[int]]:
        runs = [(group, task) for group, order in enumerate(orders) for task in order]
        faults = coverage_faults(runs, self.schedule.placement, self.tasks)
        raise_faults("lower: the schedule's orders", faults)
        raise AssertionError("orders that miss, repeat or misplace a task have a fault")

    def _units_read(self) -> dict[tuple[int, str], list[array[int]]]:
        """Returns, by stage and kind of task and then microbatch, the units that make its inputs, perhaps its own."""
        producers: dict[Slot, set[Slot]] = defaultdict(set)
        for edge in self.edges:
            for end in edge.consumers:
                producers[end].add(edge.producer)
        return {
            (stage, kind): [self.unit_of[slot] for slot in set().union(*(producers[stage, part] for part in parts))]
            for stage in range(self.graph.num_stages)
            for kind, parts in PARTS.items()
        }

    def needs(self, unit: int) -> set[int]:
        """Returns the units that this one waits for."""
        found = {units[i] for stage, kind, i in self.units[unit] for units in self._sources[stage, kind]}
        found.discard(unit)
        return found

    def duration(self, unit: int) -> int:
        """Returns how long a unit takes on the clock that puts instructions in order."""
        return sum(DURATION[task.kind] for task in self.units[unit])

    def starts(self) -> array[int]:
        """Returns when each unit starts, each group as fast as it can; raises a ScheduleError at a deadlock."""
        starts, ends = array("q", [-1]) * len(self.units), array("q", [-1]) * len(self.units)
        clock = [0] * (len(self.first) - 1)

        def do(group: int, unit: int, happened: Callable[[int], None]) -> int | None:
            start = clock[group]
            for need in self.needs(unit):
                end = ends[need]
                if end < 0:
                    return need
                start = max(start, end)
            starts[unit] = start
            ends[unit] = clock[group] = start + self.duration(unit)
            happened(unit)
            return None

        lists = [range(begin, end) for begin, end in pairwise(self.first)]
        if blocked(run_until_blocked(lists, do), lists):
            self._refuse_deadlock()
        return starts

    def _refuse_deadlock(self) -> None:
        names = ["+".join(map(str, tasks)) for tasks in self.units]
        cycle = deadlock(
            [names[begin:end] for begin, end in pairwise(self.first)],
            {name: [names[need] for need in sorted(self.needs(unit))] for unit, name in enumerate(names)},
        )
        raise ScheduleError(f"lower: the schedule's orders deadlock: {cycle}.")
