"""Runs fixed orders on a clock again and again with different durations, for a search over durations."""

from collections.abc import Callable, Sequence

from scheduler.engine import run_until_blocked
from scheduler.ordering import chain, readers_of
from scheduler.task import Orders, Reads, Task

_KINDS = {"F": 0, "I": 1, "W": 2, "B": 3, "R": 4}
Event = tuple[int, bool, int]
"""The end of a task that others wait for: its stage, whether it goes back, and its microbatch."""


class Replay:
    """The makespan and the peaks of orders that do not change, for any durations.

    The same clock as :func:`scheduler.simulate`, about ten times as fast: dependencies are found only once.

    Args:
        orders: For each group, its tasks in order; they must not deadlock.
        num_microbatches: For :meth:`ends`, which takes durations for each microbatch. Otherwise they hold for all.
        reads: For each stage, the stages that it exchanges values with; None for a chain.
    """

    def __init__(
        self, orders: Orders, placement: Sequence[int], num_microbatches: int = 1, reads: Reads | None = None
    ) -> None:
        self.placement = tuple(placement)
        self.num_groups, self.num_tasks = len(orders), sum(map(len, orders))
        self._steps = _steps(orders, self.placement, num_microbatches, reads or chain(len(self.placement)))
        self._held = [_counts(order, self.placement, group) for group, order in enumerate(orders)]
        self.counts = [max((c.get(s, 0) for c in self._held[g]), default=0) for s, g in enumerate(self.placement)]
        """For each stage, the most microbatches that it holds at once."""

    def makespan(self, forward: Sequence[float], input_grad: Sequence[float], weight_grad: Sequence[float],
                 over: Sequence[float], after: Sequence[float] = ()) -> float:  # fmt: skip
        """Returns the seconds from the first start to the last end.

        Args:
            forward: Seconds of F of each stage.
            input_grad: Seconds of I.
            weight_grad: Seconds of W; B takes both.
            over: Seconds over the boundary after each stage, in either direction.
            after: Seconds of each group after its last task.
        """
        seconds = [0.0] * (5 * len(forward))
        seconds[0::5], seconds[1::5], seconds[2::5] = forward, input_grad, weight_grad
        seconds[3::5] = [one + other for one, other in zip(input_grad, weight_grad, strict=True)]
        clock = self.ends(seconds, [0.0, *over])
        return max(map(sum, zip(clock, after, strict=True))) if after else max(clock)

    def ends(self, seconds: Sequence[float], waits: Sequence[float]) -> list[float]:
        """Returns when each group ends.

        Args:
            seconds: For tasks, at ((5 * stage) + k) * microbatches + microbatch, with k = 0 for F, 1 for I, 2 for W, 3
                for B and 4 for R.
            waits: For results over the boundary after a stage, to another group, at (stage + 1) * microbatches +
                microbatch. The first ones are 0: within a group there are no transfers.
        """
        clock = [0.0] * self.num_groups
        ends: list[float] = []
        done = ends.append
        for group, kind, needs in self._steps:
            now = clock[group]
            for need, boundary in needs:
                there = ends[need] + waits[boundary]
                if there > now:
                    now = there
            now += seconds[kind]
            clock[group] = now
            done(now)
        return clock

    def peaks(self, activations: Sequence[float]) -> list[float]:
        """Returns each group's most bytes of activations, from the bytes of a microbatch in each stage."""
        return [
            max((sum(n * activations[s] for s, n in counts.items()) for counts in held), default=0.0)
            for held in self._held
        ]


def _steps(
    orders: Orders, placement: tuple[int, ...], num_microbatches: int, reads: Reads
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Returns all tasks in a topological order: for each, its group, the index of its seconds, and for each task of
    another stage that it waits for, that task's position and the index of the transfer's seconds.
    """
    m, readers = num_microbatches, readers_of(reads)
    at: dict[Event, int] = {}
    steps: list[tuple[int, int, list[tuple[int, int]]]] = []

    def do(group: int, task: Task, happened: Callable[[Event], None]) -> Event | None:
        stage, kind, microbatch = task
        is_back = kind in "IB"
        needs = []
        for other in readers[stage] if is_back else reads[stage] if kind == "F" else ():
            if (event := (other, is_back, microbatch)) not in at:
                return event
            way = 0 if placement[other] == placement[stage] else 1 + min(stage, other)
            needs.append((at[event], way * m + microbatch % m))
        if kind == "F" or is_back:
            at[stage, is_back, microbatch] = len(steps)
            happened((stage, is_back, microbatch))
        steps.append((group, (5 * stage + _KINDS[kind]) * m + microbatch % m, needs))
        return None

    run_until_blocked(orders, do)
    assert len(steps) == sum(map(len, orders)), "the orders deadlock"
    return steps


def _counts(order: Sequence[tuple[int, str, int]], placement: tuple[int, ...], group: int) -> list[dict[int, int]]:
    """Returns the largest sets of microbatches that a group holds at once, as numbers for each of its stages."""
    stages = [s for s, g in enumerate(placement) if g == group]
    now = dict.fromkeys(stages, 0)
    found: list[dict[int, int]] = []
    grown = False
    for stage, kind, _ in order:
        if kind == "F":
            now[stage] += 1
            grown = True
        elif kind not in "IR":
            if grown:
                found.append(dict(now))
                grown = False
            now[stage] -= 1
    found.append(dict(now))
    unique = [dict(pairs) for pairs in {tuple(c.items()) for c in found}]
    return [c for c in unique if not any(c is not o and all(o[s] >= c[s] for s in stages) for o in unique)]
