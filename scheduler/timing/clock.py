"""Orders on a clock: when each task of a pipeline starts and ends."""

from array import array
from collections.abc import Callable, Sequence
from operator import add, methodcaller

from scheduler.base.collector import without_collection
from scheduler.engine import blocked, run_until_blocked
from scheduler.errors import ScheduleError
from scheduler.ordering import chain, deadlock, graph_needs, paired, readers_of
from scheduler.task import Kind, Orders, Pairs, Reads, Task
from scheduler.timing.costs import Costs

Times = tuple[array, ...]


def run_on_clock(
    orders: Orders,
    fused: Pairs,
    placement: Sequence[int],
    num_microbatches: int,
    costs: Costs,
    reads: Reads | None,
) -> tuple[Times, Times]:
    """Returns the starts and the ends of every group's tasks, each as soon as all that it waits for has arrived.

    A fused pair starts when both tasks could, and hands on all results at its end.

    Args:
        fused: Pairs of tasks, of which the second must come next.
        reads: For each stage, the stages that it exchanges values with; None for a chain.

    Raises:
        ScheduleError: The orders deadlock; with the cycle.
    """
    m, n, second = num_microbatches, len(placement), dict(fused)
    size = n * m
    waits = _what_tasks_wait_for(placement, m, chain(n) if reads is None else reads)
    # The time of each kind of task, and over the boundary after a stage: at stage times microbatches plus microbatch.
    names: dict[Kind, str] = {"F": "forward", "I": "input_grad", "W": "weight_grad", "R": "recompute"}
    seconds: dict[Kind, list[float]] = {}
    for kind, name in names.items():
        seconds[kind] = costs.flat(m, methodcaller("per_stage", name, n))
    seconds["B"] = list(map(add, seconds["I"], seconds["W"]))
    over = costs.flat(m, lambda one: one.transfers(n) if reads else one.transfers_between(placement))
    # When each event has happened, -1 before. The end of F is the event at stage times microbatches plus microbatch,
    # the end of I or B is that plus `size`. W and R have no event: no other group waits for them.
    happened = array("d", [-1.0]) * (2 * size)
    starts: Times = tuple(array("d") for _ in orders)
    ends: Times = tuple(array("d") for _ in orders)
    clock = [0.0] * len(orders)

    # A large simulation spends its time here.
    def do(group: int, unit: tuple[Task, ...], happens: Callable[[int], None]) -> int | None:
        now = clock[group]
        for stage, kind, microbatch in unit:
            for event, late in waits[stage, kind]:
                arrival = happened[event + microbatch]
                if arrival < 0:
                    if len(unit) > 1 and event + microbatch in map(event_of, unit):
                        continue
                    return event + microbatch
                if late >= 0:
                    arrival += over[late + microbatch]
                if arrival > now:
                    now = arrival
        for stage, kind, microbatch in unit:
            starts[group].append(now)
            now += seconds[kind][stage * m + microbatch]
            ends[group].append(now)
        clock[group] = now
        for stage, kind, microbatch in unit:
            if kind != "W" and kind != "R":
                event = stage * m + microbatch + (0 if kind == "F" else size)
                happened[event] = now
                happens(event)
        return None

    def event_of(task: Task) -> int:
        at = task.stage * m + task.microbatch
        return at if task.kind == "F" else -1 if task.kind in "WR" else size + at

    with without_collection():
        units = [list(paired(order, second)) for order in orders]
        position = run_until_blocked(units, do)
    if blocked(position, units):
        raise ScheduleError(f"simulate: the orders deadlock: {_stuck(units, reads, n)}.")
    return starts, ends


def _what_tasks_wait_for(
    placement: Sequence[int], num_microbatches: int, reads: Reads
) -> dict[tuple[int, Kind], list[tuple[int, int]]]:
    """Returns, for each stage and kind, the events that its task waits for, and the places of their times in ``over``.

    Both are for microbatch 0; the latter is -1 within a group. A skip over stages takes the time over its sender's own
    boundary.
    """
    m, size = num_microbatches, len(placement) * num_microbatches
    found: dict[tuple[int, Kind], list[tuple[int, int]]] = {}
    for stage, readers in enumerate(readers_of(reads)):
        own, home = (stage * m, -1), placement[stage]
        later = [(size + s * m, -1 if placement[s] == home else stage * m) for s in readers]
        found[stage, "F"] = [(s * m, -1 if placement[s] == home else s * m) for s in reads[stage]]
        found[stage, "B"] = found[stage, "I"] = [own, *later]
        found[stage, "R"], found[stage, "W"] = [own], [(size + stage * m, -1)]
    return found


def _stuck(units: Sequence[Sequence[tuple[Task, ...]]], reads: Reads | None, num_stages: int) -> str | None:
    """Returns why no group can continue; a fused pair waits as one."""
    name = {task: "+".join(map(str, unit)) for row in units for unit in row for task in unit}
    waits_for = graph_needs(reads, num_stages)

    def is_needed(need: Task) -> bool:
        """Returns whether a need is real: of B and I, which stand for each other, only the one that some group runs."""
        other = need._replace(kind="I" if need.kind == "B" else "B")
        return need in name or need.kind not in "BI" or other not in name

    needs = {
        name[unit[0]]: [
            name.get(need, str(need))
            for task in unit
            for need in waits_for(task)
            if need not in unit and is_needed(need)
        ]
        for row in units
        for unit in row
    }
    return deadlock([[name[unit[0]] for unit in row] for row in units], needs)
