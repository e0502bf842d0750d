"""A measured run: when everything of some steps ran on every rank, beside the same steps on a simulated clock."""

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mpmd.observe.records import Moved, Ran, RecordedTimes
from mpmd.report import profile_pictures, profile_texts
from scheduler import Costs, Timeline
from scheduler.task import Orders
from scheduler.timing.simulate import simulate_orders, timeline_of


@dataclasses.dataclass(frozen=True)
class LoopFacts:
    """What a profile has to know of a pipelined loop.

    Attributes:
      placement: per stage, its group.
      orders: per group, the tasks that it should run, in order.
      flops: of a task of a stage and kind, on all devices of its group.
      labels: per stage, its name; empty if it has none.
    """

    number: int
    schedule: str
    placement: tuple[int, ...]
    orders: Orders
    num_microbatches: int
    flops: Mapping[tuple[int, str], float]
    labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Spent:
    """How a group spent a step, in seconds; together the step's length.

    Attributes:
      busy: a program ran.
      waiting: nothing to do until another group had computed what came next: the bubble.
      exposed: what came next was computed, and on its way.
      late: everything was there, but the process had not started the program yet.
    """

    busy: float
    waiting: float
    exposed: float
    late: float


@dataclasses.dataclass(frozen=True)
class Step:
    """Everything of one step, by time.

    Attributes:
      runs, moves: of all ranks.
      sent: per transfer, when its value was on offer.
      num_groups: how many there are.
    """

    runs: tuple[Ran, ...]
    moves: tuple[Moved, ...]
    sent: Mapping[Any, float]
    num_groups: int

    @functools.cached_property
    def start(self) -> float:
        """When the first process began to start something."""
        return min((r.dispatched for r in self.runs), default=0.0)

    @functools.cached_property
    def end(self) -> float:
        """When the last result was there."""
        return max((r.end for r in (*self.runs, *self.moves)), default=0.0)

    @property
    def seconds(self) -> float:
        """From the start to the end."""
        return self.end - self.start

    @functools.cached_property
    def by_group(self) -> tuple[tuple[Ran, ...], ...]:
        """Per group, what its slowest rank ran."""
        found: list[dict[int, list[Ran]]] = [defaultdict(list) for _ in range(self.num_groups)]
        for r in self.runs:
            found[r.group][r.rank].append(r)
        return tuple(tuple(max(ranks.values(), key=_busy, default=())) for ranks in found)

    @functools.cached_property
    def spent(self) -> tuple[Spent, ...]:
        """Per group, how it spent the step."""
        return tuple(self._spent(runs) for runs in self.by_group)

    def _spent(self, runs: Sequence[Ran]) -> Spent:
        busy = waiting = exposed = late = 0.0
        free = self.start
        for r in runs:
            offered = min(max(free, self.sent.get(r.by, free)), r.start) if r.by is not None else free
            there = min(max(offered, r.ready), r.start)
            waiting, exposed, late = waiting + offered - free, exposed + there - offered, late + r.start - there
            busy += r.end - r.start
            free = r.end
        return Spent(busy, waiting + self.end - free if runs else self.seconds, exposed, late)


def _busy(runs: Sequence[Ran]) -> float:
    return sum(r.end - r.start for r in runs)


@dataclasses.dataclass(frozen=True, repr=False)
class Profile:
    """What `Compiled.profile` measured. `str()` says what took how long and why.

    Attributes:
      name: of the step.
      steps: each measured step, in order.
      ranks: per group, its processes.
      loops: the pipelined loops of the step.
      clock_error_s: how far the clocks of two processes may be apart.
      result: of the last step, as a call returns it.
    """

    name: str
    steps: tuple[Step, ...]
    ranks: tuple[tuple[int, ...], ...]
    loops: tuple[LoopFacts, ...]
    clock_error_s: float
    result: Any = None

    @functools.cached_property
    def typical(self) -> Step:
        """The step of median length."""
        return sorted(self.steps, key=lambda s: s.seconds)[(len(self.steps) - 1) // 2]

    def timeline(self, loop: int = -1, step: Step | None = None) -> Timeline:
        """A loop of a step (of the typical one) as a `scheduler.Timeline`; its costs are the median durations."""
        facts = self.loops[loop]
        step = self.typical if step is None else step
        runs = [r for group in step.by_group for r in group if r.tasks and r.loop == facts.number]
        return timeline_of(((r.group, r.tasks, r.start, r.end) for r in runs), facts.placement, "measured")

    def costs(self, loop: int = -1) -> Costs:
        """What a loop took, over all steps: medians by stage and kind of task, means of transfers by pair of groups."""
        facts = self.loops[loop]
        durations = [
            (task, (r.end - r.start) / len(r.tasks))
            for s in self.steps for group in s.by_group for r in group if r.loop == facts.number for task in r.tasks
        ]  # fmt: skip
        seconds: dict[frozenset[int], list[float]] = defaultdict(list)
        for s in self.steps:
            for m in s.moves:
                if m.is_in_loop:
                    seconds[frozenset((m.way.source, m.way.target))].append(m.end - m.start)
        pairs = [frozenset(pair) for pair in zip(facts.placement, facts.placement[1:], strict=False)]
        transfers = tuple(statistics.fmean(seconds.get(pair, [0.0])) for pair in pairs)
        measured = Costs.measured(durations)
        have = [getattr(measured, name) for name in ("forward", "input_grad", "weight_grad")]
        num = len(facts.placement)
        padded = [(*value, *[0.0] * (num - len(value))) for value in have]
        return Costs(*padded, transfer_s=(*transfers, 0.0))

    def simulated(self, costs: Costs | None = None, loop: int = -1) -> Timeline:
        """The loop on a clock, with these costs for its tasks; by default those that were measured."""
        facts = self.loops[loop]
        runs = [r for group in self.typical.by_group for r in group if r.loop == facts.number]
        kinds = {task.kind for r in runs for task in r.tasks}
        orders = tuple(tuple(t for t in order if kinds - {"F"} or t.kind == "F") for order in facts.orders)
        fused = frozenset((r.tasks[0], r.tasks[1]) for r in runs if len(r.tasks) == 2)
        costs = self.costs(loop) if costs is None else costs
        return simulate_orders(orders, facts.placement, facts.num_microbatches, costs, fused, facts.schedule)

    def __str__(self) -> str:
        return profile_texts.text_of(self)

    __repr__ = object.__repr__

    def to_svg(self) -> str:
        """The typical step as SVG: what ran, what was on its way, who waited for what; below it the simulated loop."""
        return profile_pictures.to_svg(self)

    def to_chrome_trace(self) -> str:
        """All steps as Chrome-trace JSON, which Perfetto opens: one process a rank."""
        return profile_pictures.to_chrome_trace(self)


def steps_of(rows: RecordedTimes, num_groups: int) -> tuple[Step, ...]:
    """The rows of all processes, step by step."""
    numbers = sorted({r.step for r in rows.runs})
    return tuple(
        Step(
            tuple(r for r in rows.runs if r.step == n),
            tuple(m for m in rows.moves if m.step == n),
            {**{m.way: m.start for m in rows.moves if m.step == n}, **{s.way: s.at for s in rows.sends if s.step == n}},
            num_groups,
        )
        for n in numbers
    )
