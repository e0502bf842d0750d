"""Schedules of stages that are no chain: two towers that are joined, an encoder with several decoders, a reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from scheduler.base.texts import counted
from scheduler.ordering import graph_needs, longest_paths, readers_of
from scheduler.schedules.adaptive import Adaptive
from scheduler.task import Kind, Orders, Reads, Schedule, Task, check_count
from scheduler.timing.costs import Costs

RULES = ("1f1b", "gpipe")
_TICKS = 1000  # the time of the longest task


@dataclass(frozen=True)
class GraphSchedule(Schedule):
    """1F1B, or GPipe, over a graph of stages.

    A stage's forward waits for those of the stages that it reads, its backward for those of its readers. With
    ``"1f1b"`` a stage starts no more microbatches than there are stages on the longest way from it to an end of the
    graph. Whenever a group is free, it runs one of its tasks that are ready: of the stage with the least work, for
    others wait for it and it is soon done; else a backward, else the oldest microbatch. So a stage that hangs on the
    last one alone, as a critic does, holds one or two activations wherever it stands in the list. On a chain with a
    stage a group it is 1F1B. With ``"gpipe"`` all forwards come first.

    The orders are found on a clock. They cannot deadlock: a task that was free to run there, in this order, has all
    that it waits for in the lists before it. Near linear in tasks.

    Args:
        reads: For each stage, the earlier stages that it exchanges values with.
        placement: For each stage, its group; a group may have any number of stages.
        rule: ``"1f1b"`` or ``"gpipe"``.
        num_groups: The number of groups, if some have no stage.
        costs: The times of tasks on the clock; transfers, memory and single microbatches do not count. By default all
            are equal; `mpmd.jit` takes the times of its loop's tasks by the roofline of the devices.

    Raises:
        TypeError: `reads` or `placement` has no entries for stages.
        ValueError: There is no such rule, a stage reads a later one, or the numbers do not fit each other.

    Examples:
        >>> towers = GraphSchedule(reads=((), (), (0, 1)), placement=(0, 1, 2))   # stage 2 reads both others
        >>> print(*towers.orders(3)[0])
        0F0 0F1 0B0 0F2 0B1 0B2
        >>> towers.orders(3)[0] == tuple(t._replace(stage=0) for t in towers.orders(3)[1])
        True
    """

    reads: Reads = field()  # pyright: ignore[reportIncompatibleVariableOverride]
    placement: tuple[int, ...]
    rule: str = "1f1b"
    num_groups: int = 0
    costs: Costs | None = None
    num_stages: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            reads = tuple(tuple(sorted(set(one))) for one in self.reads)
            placement = tuple(self.placement)
        except TypeError:
            raise TypeError(
                f"GraphSchedule: reads is {self.reads!r} and placement {self.placement!r}; expected, for each stage,"
                " the stages that it reads and its group, as in GraphSchedule(((), (0,)), (0, 1))."
            ) from None
        groups = max(placement, default=-1) + 1
        values = {"reads": reads, "placement": placement, "num_stages": len(placement)}
        for name, value in (*values.items(), ("num_groups", self.num_groups or groups)):
            object.__setattr__(self, name, value)
        if self.rule not in RULES:
            raise ValueError(f"GraphSchedule: rule is {self.rule!r}; expected one of {', '.join(RULES)}.")
        if not placement or len(reads) != len(placement):
            raise ValueError(
                f"GraphSchedule: reads has {counted(len(reads), 'entry')} and placement {len(placement)}; expected"
                " one for each"
                " stage, of at least one stage."
            )
        if wrong := [g for g in placement if g not in range(self.num_groups)]:
            raise ValueError(
                f"GraphSchedule: a stage is placed in group {wrong[0]!r}; expected 0 to {self.num_groups - 1}."
            )
        for stage, own in enumerate(reads):
            if wrong := [one for one in own if one not in range(stage)]:
                raise ValueError(
                    f"GraphSchedule: stage {stage} reads stage {wrong[0]!r}; a stage reads earlier ones only."
                )

    def __str__(self) -> str:
        return f"GraphSchedule({counted(self.num_stages, 'stage')}, {self.rule!r})"

    def orders(self, num_microbatches: int) -> Orders:
        check_count("GraphSchedule", "num_microbatches", num_microbatches)
        most = longest_paths(self.reads) if self.rule == "1f1b" else [num_microbatches] * self.num_stages
        return _orders(self, num_microbatches, most)


def _orders(schedule: GraphSchedule, num_microbatches: int, most: Sequence[int]) -> Orders:
    """Finds the orders on a clock.

    Each entry of the heap is a group at a time at which something may have become ready for it: its own last end, or
    the end of another group's task. A task adds at most as many entries as there are groups, so it ends.

    Args:
        most: For each stage, how many microbatches it may have started and not finished.
    """
    place, reads, num_groups = schedule.placement, schedule.reads, schedule.num_groups
    ticks, needs_of = _ticks(schedule.costs or Costs(), schedule.num_stages), graph_needs(reads, schedule.num_stages)
    turn: dict[Kind, list[int]] = {kind: [0] * schedule.num_stages for kind in ticks}  # the next microbatch
    ends: dict[Task, int] = {}  # when each task that has run ended
    stages_of = [[stage for stage, owner in enumerate(place) if owner == group] for group in range(num_groups)]
    # For each stage, the groups that may wait for one of its tasks, its own among them.
    neighbours = enumerate(zip(reads, readers_of(reads), strict=True))
    waiting = [{place[one] for one in (stage, *before, *after)} for stage, (before, after) in neighbours]

    def next_task(stage: int, kind: Kind, now: int) -> Task | None:
        task = Task(stage, kind, turn[kind][stage])
        if task.microbatch == num_microbatches:
            return None
        if kind == "F" and task.microbatch - turn["B"][stage] >= most[stage]:
            return None
        needs = (need for need in needs_of(task) if need.kind in ticks)
        return task if all(ends.get(need, now + 1) <= now for need in needs) else None

    def rank(task: Task) -> tuple[int, bool, int, int]:
        work = ticks["F"][task.stage] + ticks["B"][task.stage]
        return work, task.kind == "F", task.microbatch, -task.stage

    def chosen(group: int, now: int) -> Task | None:
        """Returns the task that a free group runs, if any is ready; of equals, the last stage's."""
        kinds: tuple[Kind, ...] = ("F", "B")
        if schedule.rule == "gpipe":
            kinds = ("F",) if any(turn["F"][stage] < num_microbatches for stage in stages_of[group]) else ("B",)
        ready = [task for stage in stages_of[group] for kind in kinds if (task := next_task(stage, kind, now))]
        return min(ready, key=rank, default=None)

    orders: list[list[Task]] = [[] for _ in range(num_groups)]
    free_at = [0] * num_groups
    heap = [(0, group) for group in range(num_groups)]
    while heap:
        now, group = heappop(heap)
        if now < free_at[group] or (task := chosen(group, now)) is None:
            continue
        turn[task.kind][task.stage] += 1
        orders[group].append(task)
        ends[task] = free_at[group] = end = now + ticks[task.kind][task.stage]
        for one in waiting[task.stage]:
            heappush(heap, (end, one))
    assert len(ends) == 2 * schedule.num_stages * num_microbatches
    return tuple(map(tuple, orders))


def _ticks(costs: Costs, num_stages: int) -> dict[Kind, list[int]]:
    """Returns the times of F and B of each stage as whole numbers: their sums are equal where the times are."""
    found: dict[Kind, list[float]] = {"F": costs.per_stage("forward", num_stages)}
    halves = (costs.per_stage(name, num_stages) for name in ("input_grad", "weight_grad"))
    found["B"] = [sum(pair) for pair in zip(*halves, strict=True)]
    unit = max(map(max, found.values())) / _TICKS or 1.0
    return {kind: [round(seconds / unit) for seconds in row] for kind, row in found.items()}


def graph_of(schedule: Schedule) -> GraphSchedule | None:
    """Returns the schedule, or the one inside an adaptive schedule, if it is over a graph."""
    schedule = schedule.schedule if isinstance(schedule, Adaptive) else schedule  # type: ignore[assignment]
    return schedule if isinstance(schedule, GraphSchedule) else None


def with_graph(schedule: Schedule, graph: GraphSchedule) -> Schedule:
    """Replaces the graph schedule, inside an adaptive one too, by this one."""
    return replace(schedule, schedule=graph) if isinstance(schedule, Adaptive) else graph
