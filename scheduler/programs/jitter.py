"""Runs plans with tasks that take longer or shorter than expected, and finds the tasks that are worth running ahead."""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from statistics import fmean

from scheduler.ordering import chain
from scheduler.programs.ahead import EventPlan, PlanProgress
from scheduler.programs.instructions import TaskGraph
from scheduler.programs.lowering import lower
from scheduler.programs.task_units import DURATION
from scheduler.schedules.adaptive import Adaptive
from scheduler.schedules.custom import CustomSchedule

_JITTER, _TRANSFER = 0.3, 0.1  # of a forward task's time
_NUM_RUNS = 8
_GAIN = 0.01  # the gain of running ahead that is worth the host's work for it
_LOSS = 1.005  # how much slower it may be without jitter
_MOST_TASKS = 300


def makespan(plan: EventPlan, kinds: str | None, seconds: Callable[[int], float]) -> float:
    """Returns how long a plan takes if each group follows `PlanProgress.next`.

    Args:
        kinds: The kinds of tasks that may run ahead; None for the fixed order.
    """
    progress, num_groups = PlanProgress(plan, kinds or ""), len(plan.lists)
    at: dict[int, float] = {}  # when each event ends
    free, in_flight = [0.0] * num_groups, [list[float]() for _ in range(num_groups)]
    now, times = 0.0, [0.0]

    def has_arrived(number: int) -> bool:
        return all(at.get(transfer, now + 1) <= now for transfer in plan.feeds[number])

    while progress.num_left:
        now = heappop(times)
        again = True
        while again:
            again = False
            for group in range(num_groups):
                in_flight[group] = [end for end in in_flight[group] if end > now]
                while (number := progress.next(group, has_arrived, len(in_flight[group]))) is not None:
                    event = plan.events[number]
                    if event.kind:
                        start = max(now, free[group], *(at[transfer] for transfer in plan.feeds[number]))
                        at[number] = free[group] = start + seconds(number)
                        in_flight[group].append(at[number])
                    else:
                        made = max((at.get(e, 0.0) for e in plan.makers[number]), default=0.0)
                        at[number] = max(now, made) + seconds(number)
                    heappush(times, at[number])
                    progress.do(number)
                    again = True
    return max(at.values())


def kinds_ahead(schedule: Adaptive, num_microbatches: int) -> str:
    """Returns the kinds of tasks that groups run ahead: those that the user names, or those that make a step shorter.

    Each choice (none, weight gradients alone, all) runs on a clock with the same random durations. The choice with the
    shortest mean wins, among those that are not slower if all tasks take as long as planned. With many tasks fewer
    microbatches are run, if the schedule allows it.
    """
    if schedule.ahead is not None:
        return schedule.ahead
    most = max(2 * schedule.num_groups, _MOST_TASKS // (3 * schedule.num_stages))
    try:
        plan = _plan(schedule, min(num_microbatches, most - most % schedule.num_groups))
    except ValueError:
        plan = _plan(schedule, num_microbatches)
    even = [sum(map(DURATION.__getitem__, e.kind)) if e.kind else _TRANSFER for e in plan.events]
    planned = makespan(plan, "", even.__getitem__)
    found = {k: list[float]() for k in ("", "W", "FBIW") if makespan(plan, k, even.__getitem__) <= _LOSS * planned}
    for seed in range(_NUM_RUNS):
        rng = random.Random(seed)
        durations = [
            seconds * (rng.lognormvariate(0, _JITTER) if e.kind else 1)
            for seconds, e in zip(even, plan.events, strict=True)
        ]
        for kinds, times in found.items():
            times.append(makespan(plan, kinds, durations.__getitem__))
    fixed, best = fmean(found[""]), min(found, key=lambda kinds: fmean(found[kinds]))
    return best if fmean(found[best]) < (1 - _GAIN) * fixed else ""


def _plan(schedule: Adaptive, num_microbatches: int) -> EventPlan:
    """Returns the plan of an ordinary pipeline, or of a graph of stages; the tasks of pairs are separate."""
    reads = schedule.reads or chain(schedule.num_stages)
    alone = CustomSchedule(schedule.orders(num_microbatches), schedule.placement, reads=schedule.reads)
    return EventPlan.of(lower(TaskGraph.over(reads), alone, num_microbatches))
