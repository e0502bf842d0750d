"""A schedule on a clock: how long it takes, where it idles, what it holds in memory, and its critical path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scheduler.ordering import chain_needs
from scheduler.task import Kind, Orders, Pairs, Task
from scheduler.timing import pictures
from scheduler.timing.costs import Costs


@dataclass(frozen=True, repr=False)
class Timeline:
    """When each task of a schedule starts and ends, with the figures that follow. ``str()`` draws it.

    Attributes:
        orders: For each group, its tasks in order.
        starts, ends: For each group, the times of those tasks, in the unit of the costs.
        placement: For each stage, its group.
        costs: The costs that made it.
        peak_activations: For each group, the most activations of a stage and microbatch held at once: from F to B or W.
        peak_bytes: For each group, the same in bytes, with what is released at I let go there.
    """

    orders: Orders
    starts: tuple[Sequence[float], ...] = field(repr=False)
    ends: tuple[Sequence[float], ...] = field(repr=False)
    placement: tuple[int, ...]
    costs: Costs
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    fused: Pairs = frozenset()
    name: str = "schedule"

    @property
    def num_groups(self) -> int:
        return len(self.orders)

    @property
    def durations(self) -> Iterator[tuple[Task, float]]:
        """Each task and how long it took, group by group: what :meth:`Costs.measured` takes."""
        for order, starts, ends in zip(self.orders, self.starts, self.ends, strict=True):
            for task, start, end in zip(order, starts, ends, strict=True):
                yield task, end - start

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((ends[-1] for ends in self.ends if len(ends)), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each group, the time it works."""
        counts: list[Counter[tuple[Kind, int]]]
        counts = [Counter((kind, stage) for stage, kind, _ in order) for order in self.orders]
        return tuple(sum(n * self.costs.duration(*key) for key, n in count.items()) for count in counts)

    @property
    def bubble_fraction(self) -> float:
        """The share of all groups' time, from the first start to the last end, in which they do nothing."""
        total = self.num_groups * self.makespan
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def idle_within_span(self) -> tuple[float, ...]:
        """For each group, the time it does nothing between its own first start and its own last end.

        This is the figure that counts where steps follow each other without a barrier.
        """
        spans = (
            ends[-1] - starts[0] if len(ends) else 0.0 for starts, ends in zip(self.starts, self.ends, strict=True)
        )
        return tuple(max(0.0, span - busy) for span, busy in zip(spans, self.busy, strict=True))

    @cached_property
    def critical_path(self) -> tuple[Task, ...]:
        """A chain of tasks as long as the makespan. Each waits for the one before."""
        return _critical_path(self)

    def __str__(self) -> str:
        return pictures.to_text(self)

    __repr__ = object.__repr__

    def to_svg(self) -> str:
        """The picture as SVG: groups as rows, stages in colours, kinds also told apart by shade and pattern."""
        return pictures.to_svg(self)

    def to_chrome_trace(self) -> str:
        """The timeline as Chrome-trace JSON, which Perfetto opens."""
        return pictures.to_chrome_trace(self)


def _critical_path(timeline: Timeline) -> tuple[Task, ...]:
    where = {task: (group, index) for group, order in enumerate(timeline.orders) for index, task in enumerate(order)}
    if not where:
        return ()
    num_stages = len(timeline.placement)
    over = timeline.costs.transfers_between(timeline.placement)
    second = {then: first for first, then in timeline.fused}
    first_of = dict(timeline.fused)

    def end(task: Task) -> float:
        group, index = where[task]
        return timeline.ends[group][index]

    task = max(where, key=lambda one: (end(one), one))
    path = [task]
    while True:
        group, index = where[task]
        start = timeline.starts[group][index]
        if index and timeline.ends[group][index - 1] >= start:
            task = timeline.orders[group][index - 1]
            path.append(task)
            continue
        candidates: list[tuple[float, Task]] = []
        unit = [task, *([second[task]] if task in second else []), *([first_of[task]] if task in first_of else [])]
        for one in unit:
            for need in chain_needs(one, num_stages, where.__contains__):
                late = 0.0 if need.stage == one.stage else over[min(need.stage, one.stage)]
                last = first_of.get(need, need)
                candidates.append((end(last) + late, last))
        if not candidates or start <= 0:
            return tuple(reversed(path))
        task = max(candidates)[1]
        path.append(task)
