"""V schedules for a given memory: about a half and a third of what 1F1B's first group holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.listing import Problem, Ranking, list_schedule
from scheduler.simulate import Costs, simulate_orders
from scheduler.task import Orders, Task, check_count
from scheduler.v_schedules import VSchedule

_PERIOD = 6  # F, I and W of two stages


class _MemoryBound(VSchedule):
    """The best of several orders that all keep to :meth:`memory`, on a clock where every F, I and W takes 1."""

    def memory(self) -> int:
        """The most activations of one stage that a group holds."""
        raise NotImplementedError

    def orders(self, num_microbatches: int) -> Orders:
        check_count(type(self).__name__, "num_microbatches", num_microbatches)
        limits = (float(self.memory()),) * self.num_groups
        problem = Problem(self.placement, self.num_groups, num_microbatches, Costs(), limits)
        best: tuple[float, float] | None = None
        chosen: Orders | None = None
        for orders in self._candidates(problem):
            timeline = simulate_orders(orders, self.placement, num_microbatches)
            if max(timeline.peak_activations) > self.memory():
                continue
            score = (timeline.makespan, sum(timeline.idle_within_span))
            if best is None or score < best:
                best, chosen = score, orders
            if timeline.makespan <= _PERIOD * num_microbatches + self.num_groups - 1:
                break
        assert chosen is not None
        return chosen

    def _candidates(self, problem: Problem) -> Iterator[Orders]:
        for setting in _SETTINGS:
            orders = list_schedule(problem, setting.ranking(self.num_groups))
            if orders is not None:
                yield orders
        yield steady_orders(self.num_groups, problem.num_microbatches)


@dataclass(frozen=True)
class VHalf(_MemoryBound):
    """A V schedule in about half of 1F1B's memory.

    Each group runs, whenever it is free, what is due first of what is ready and fits in 2(⌊p/2⌋ + 1) activations of one
    stage, leaving room for the oldest microbatch to turn and come back. What is due when follows one of a few
    rankings, and new microbatches enter at a given pace once the first few are in; the order kept is the shortest
    of those. Where two stages together take 3 a microbatch, the makespan is about 3m + 1.4p
    (3m + 2.5, 8.5, 20.5 for p = 4, 8, 16 at m = 2p), and no group ever holds more than 2(⌊p/2⌋ + 1). Any m.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.

    Example:
        >>> from scheduler import simulate
        >>> timeline = simulate(VHalf(4), 8)
        >>> timeline.makespan, max(timeline.peak_activations)
        (53.0, 6)
    """

    def memory(self) -> int:
        return 2 * (self.num_groups // 2 + 1)


@dataclass(frozen=True)
class VMin(_MemoryBound):
    """A V schedule in about a third of 1F1B's memory, the least that keeps the groups busy in steady state.

    Every microbatch follows the one before after 6 tasks' time, in the same pattern: straight down the groups, straight
    up, and the gradients straight back, with a pause of two tasks at each turn where p is a multiple of 3 (else two
    tasks would meet in a group); W takes the first slots left. Where a list schedule within the same memory is shorter
    (few microbatches), that is kept. With two stages together taking 3 a microbatch, the makespan is at most
    3m + 2p - 5/2 (1 more where p is a multiple of 3), and no group holds more than 2⌈(p + 2)/3⌉. Any m.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.

    Example:
        >>> from scheduler import simulate
        >>> timeline = simulate(VMin(4), 16)
        >>> timeline.makespan, max(timeline.peak_activations)
        (107.0, 4)
    """

    def memory(self) -> int:
        return 2 * -(-(self.num_groups + 2) // 3)


def steady_orders(num_groups: int, num_microbatches: int) -> Orders:
    """The orders in which every microbatch repeats one pattern, six tasks' time after the one before.

    In group r of p the pattern is F down at r, F up at 2p - 1 - r, I up at 2p + r, I down at 4p - 1 - r, with pauses
    at the turns if two of those would fall on the same time modulo 6 (that is where p is a multiple of 3).
    """
    p = num_groups
    pause_up = 0 if 2 * p % _PERIOD else 2
    pause_down = pause_up + (0 if (4 * p + pause_up) % _PERIOD else 2)
    orders = []
    for group in range(p):
        down, up = group, 2 * p - 1 - group
        times = {
            Task(down, "F", 0): group,
            Task(up, "F", 0): 2 * p - 1 - group,
            Task(up, "I", 0): 2 * p + group + pause_up,
            Task(down, "I", 0): 4 * p - 1 - group + pause_down,
        }
        free = sorted(set(range(_PERIOD)) - {time % _PERIOD for time in times.values()})
        choices = []
        for slots in (free, free[::-1]):
            choice = dict(times)
            for stage, slot in zip((down, up), slots, strict=True):
                ready = times[Task(stage, "I", 0)] + 1
                choice[Task(stage, "W", 0)] = ready + (slot - ready) % _PERIOD
            order = _repeat(choice, num_microbatches)
            choices.append((_peak(order), sum(choice.values()), order))
        orders.append(min(choices)[2])
    return tuple(orders)


def _repeat(times: dict[Task, int], num_microbatches: int) -> tuple[Task, ...]:
    events = [
        (time + _PERIOD * microbatch, task._replace(microbatch=microbatch))
        for task, time in times.items()
        for microbatch in range(num_microbatches)
    ]
    return tuple(task for _, task in sorted(events))


def _peak(order: tuple[Task, ...]) -> int:
    live = peak = 0
    for task in order:
        live += {"F": 1, "I": 0, "W": -1}[task.kind]
        peak = max(peak, live)
    return peak


class _Setting(NamedTuple):
    """What is due when, in tasks' time. Turns are in units of the number of groups."""

    pace: float
    turn_up: float
    turn_back: float
    turn_down: float
    weights_up: float
    weights_down: float
    weights_last: bool
    weights_by_group: float
    interval: float
    burst: float

    def ranking(self, num_groups: int) -> Ranking:
        p = num_groups
        stages = range(2 * p)
        return Ranking(
            due={
                "F": [stage + (self.turn_up * p if stage >= p else 0.0) for stage in stages],
                "I": [4 * p - 1 - stage + p * (self.turn_down if stage < p else self.turn_back) for stage in stages],
                "W": [
                    4 * p
                    - stage
                    + p * (self.weights_down if stage < p else self.weights_up)
                    + self.weights_by_group * min(stage, 2 * p - 1 - stage)
                    for stage in stages
                ],
            },
            pace=self.pace,
            weights_last=self.weights_last,
            interval=self.interval,
            burst=int(self.burst * p),
        )


# Found by random search over groups and microbatches; each is the best for some of them.
_SETTINGS = (
    _Setting(3.0, 0.0, 0.37, 0.0, 2.2, 0.94, False, 1.0, 4.0, 0.5),
    _Setting(2.5, 0.0, -0.36, 0.0, 4.1, 3.75, False, 0.0, 5.0, 0.75),
    _Setting(3.0, 0.0, 0.0, 0.0, 2.2, 0.94, False, 1.0, 0.0, 0.5),
    _Setting(3.0, 0.0, 0.37, -0.17, 2.2, 0.94, False, 1.0, 4.0, 0.5),
    _Setting(2.0, 0.0, 0.0, -1.52, 3.46, 0.07, False, 0.0, 4.0, 0.5),
    _Setting(3.0, -0.92, 1.15, -1.19, 0.66, 2.82, True, 0.5, 4.0, 0.75),
    _Setting(2.0, 0.0, 0.0, -1.52, 3.46, 0.07, True, 0.0, 5.0, 0.5),
    _Setting(2.0, 0.0, 0.76, 0.0, 1.2, 2.46, True, 0.0, 4.0, 0.75),
    _Setting(3.0, 0.0, 0.0, -0.19, 3.56, 4.52, True, 0.0, 5.0, 0.25),
    _Setting(10.0, 0.0, 0.0, 0.0, 1.98, 3.73, True, 0.0, 7.0, 0.75),
    _Setting(6.0, -0.73, -0.3, 0.0, 4.2, 4.05, False, 1.0, 4.0, 0.5),
)
