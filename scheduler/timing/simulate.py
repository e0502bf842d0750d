"""A schedule on a clock: how long it takes, where it idles, and what it holds in memory."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from scheduler.files import parse_json
from scheduler.ordering import chain_needs
from scheduler.task import Kind, Orders, Pairs, Schedule, Task, check_schedule
from scheduler.timing.clock import Clock, without_collector

PerStage = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """What tasks take and hold. Each is one number, or a tuple with one for each stage.

    Any unit of time and of memory will do, if it is the same throughout.

    Args:
        forward: Seconds of F.
        input_grad: Seconds of I.
        weight_grad: Seconds of W. B takes input_grad + weight_grad.
        transfer_s: Seconds from the end of a task until another group can read its result; for stage s, over the
            boundary between s and s + 1, in either direction. Transfers cost the devices nothing and never queue.
        transfer_bytes: Bytes that cross that boundary for each microbatch and direction.
        bytes_per_s: Bandwidth: transfers take transfer_s + transfer_bytes / bytes_per_s.
        activation_bytes: What a stage holds of a microbatch from its F until its B or W.
        released_at_input_grad: The part of activation_bytes that is let go after I already.

    Example:
        >>> Costs(forward=(1.0, 2.0)).duration("F", 1)
        2.0
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    transfer_s: PerStage = 0.0
    activation_bytes: PerStage = 1.0
    released_at_input_grad: PerStage = 0.0
    transfer_bytes: PerStage = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        faults = []
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, one.name, value)
            for number in value if isinstance(value, tuple) else (value,):
                most = math.inf if one.name == "bytes_per_s" else sys.float_info.max
                if not isinstance(number, int | float) or not 0 <= number <= most:
                    faults.append(f"{one.name} holds {number!r}")
        if isinstance(self.bytes_per_s, tuple):
            faults.append("bytes_per_s is not one number for all")
        elif not self.bytes_per_s:
            faults.append("bytes_per_s is 0")
        if faults:
            wanted = "numbers of at least 0 (bytes_per_s: above 0), or one for each stage"
            raise ValueError(f"Costs: {'; '.join(faults)}. Expected {wanted}.")
        self._check_released()

    def _check_released(self) -> None:
        held, early = self.activation_bytes, self.released_at_input_grad
        num = max([len(one) for one in (held, early) if isinstance(one, tuple)], default=1)
        pairs = zip(*(one if isinstance(one, tuple) else (one,) * num for one in (held, early)), strict=False)
        for all_of_it, part in pairs:
            if part > all_of_it:
                raise ValueError(
                    f"Costs: released_at_input_grad holds {part!r} where activation_bytes holds {all_of_it!r}; "
                    "what is let go after I is a part of what is held, so it cannot be more."
                )

    def per_stage(self, name: str, num_stages: int) -> list[float]:
        """The cost called ``name`` as a list with one number for each stage."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return [value] * num_stages
        if len(value) != num_stages:
            raise ValueError(
                f"Costs: {name} has {len(value)} entries and the schedule {num_stages} stages; "
                "give one number or one for each stage."
            )
        return list(value)

    def duration(self, kind: Kind, stage: int) -> float:
        """Seconds of a task."""

        def of(value: PerStage) -> float:
            return value[stage] if isinstance(value, tuple) else value

        if kind == "B":
            return of(self.input_grad) + of(self.weight_grad)
        return of({"F": self.forward, "I": self.input_grad, "W": self.weight_grad}[kind])

    def transfers(self, num_stages: int) -> list[float]:
        """Seconds over the boundary behind each stage."""
        latency, nbytes = self.per_stage("transfer_s", num_stages), self.per_stage("transfer_bytes", num_stages)
        return [one + size / self.bytes_per_s for one, size in zip(latency, nbytes, strict=True)]

    @classmethod
    def measured(cls, durations: Timeline | Iterable[tuple[Task, float]], **others: Any) -> Costs:
        """Costs from what tasks took in a real run: the median for each kind and stage.

        Where a run has B and no I and W, half of B counts for each. A stage without a task of some kind takes 0.

        Args:
            durations: The timeline of a run, or pairs of task and seconds; leave out the first microbatches of a cold
                run.
            **others: The costs that a timeline does not show (transfer_s, activation_bytes, …).

        Raises:
            ValueError: There are no durations.

        Example:
            >>> seen = [("0F0", 1.0), ("0F1", 1.2), ("0F2", 5.0), ("0B0", 3.0)]
            >>> costs = Costs.measured((Task.parse(name), seconds) for name, seconds in seen)
            >>> costs.forward, costs.input_grad, costs.weight_grad
            ((1.2,), (1.5,), (1.5,))
        """
        seconds: dict[tuple[int, str], list[float]] = {}
        for task, duration in durations.durations if isinstance(durations, Timeline) else durations:
            seconds.setdefault((task.stage, task.kind), []).append(duration)
        if not seconds:
            raise ValueError("Costs.measured: received no durations; expected pairs of Task and seconds.")
        num_stages = 1 + max(stage for stage, _ in seconds)

        def median(kind: str) -> tuple[float, ...]:
            found = []
            for stage in range(num_stages):
                own, whole = seconds.get((stage, kind)), seconds.get((stage, "B"))
                if own is None and kind != "F" and whole is not None:
                    own = [duration / 2 for duration in whole]
                found.append(statistics.median(own or [0.0]))
            return tuple(found)

        return cls(forward=median("F"), input_grad=median("I"), weight_grad=median("W"), **others)

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Costs from JSON: an object with the arguments' names, or a Chrome trace with events named as tasks.

        Raises:
            ValueError: The text is not JSON, or neither of these two.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ValueError(f"Costs: this is not JSON: {error}.") from None
        if isinstance(data, dict) and "traceEvents" not in data:
            known = {one.name for one in fields(cls)}
            if unknown := sorted(set(data) - known):
                raise ValueError(
                    f"Costs: unknown names {unknown}; expected some of {sorted(known)}, or a Chrome trace."
                )
            return cls(**data)
        events = data["traceEvents"] if isinstance(data, dict) else data
        if not isinstance(events, list):
            raise ValueError("Costs: the JSON is neither an object with costs nor a Chrome trace.")
        durations = []
        for event in events:
            if isinstance(event, dict) and event.get("ph") == "X" and isinstance(event.get("dur"), int | float):
                try:
                    durations.append((Task.parse(str(event.get("name"))), event["dur"] / 1e6))
                except (ValueError, OverflowError):
                    continue
        if not durations:
            raise ValueError("Costs: the Chrome trace has no complete event (ph X, with dur) named like a task, 2F0.")
        stages = 1 + max(task.stage for task, _ in durations)
        if stages > 10 * len(durations) + 1000:
            raise ValueError(f"Costs: the Chrome trace names stage {stages - 1}, and holds {len(durations)} tasks.")
        return cls.measured(durations)


@dataclass(frozen=True, repr=False)
class Timeline:
    """When each task of a schedule starts and ends, and what follows from it. ``str()`` draws it.

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
        counts: list[dict[tuple[Kind, int], int]] = []
        for order in self.orders:
            count: dict[tuple[Kind, int], int] = {}
            for stage, kind, _ in order:
                count[kind, stage] = count.get((kind, stage), 0) + 1
            counts.append(count)
        return tuple(sum(n * self.costs.duration(*key) for key, n in count.items()) for count in counts)

    @property
    def bubble_fraction(self) -> float:
        """The share of all groups' time, from the first start to the last end, in which they do nothing."""
        total = self.num_groups * self.makespan
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def idle_within_span(self) -> tuple[float, ...]:
        """For each group, the time it does nothing between its own first start and its own last end.

        What counts where steps follow each other without a barrier.
        """
        spans = (
            ends[-1] - starts[0] if len(ends) else 0.0 for starts, ends in zip(self.starts, self.ends, strict=True)
        )
        return tuple(max(0.0, span - busy) for span, busy in zip(spans, self.busy, strict=True))

    @cached_property
    def critical_path(self) -> tuple[Task, ...]:
        """A chain of tasks, each waiting for the one before, that is as long as the makespan."""
        return _critical_path(self)

    def __str__(self) -> str:
        from scheduler.timing.pictures import to_text

        return to_text(self)

    __repr__ = object.__repr__

    def to_svg(self) -> str:
        """The picture as SVG: groups as rows, stages in colours, kinds also told apart by shade and pattern."""
        from scheduler.timing.pictures import to_svg

        return to_svg(self)

    def to_chrome_trace(self) -> str:
        """The timeline as Chrome-trace JSON, which Perfetto opens."""
        from scheduler.timing.pictures import to_chrome_trace

        return to_chrome_trace(self)


def simulate(schedule: Schedule, num_microbatches: int, costs: Costs | None = None, *, fuse: bool = False) -> Timeline:
    """Runs a schedule on a clock: each group in order, each task as soon as what it waits for has arrived.

    Linear in tasks.

    Args:
        schedule: Any schedule.
        num_microbatches: How often the loop body runs.
        costs: What tasks take and hold; by default 1 for F, I and W each, and transfers nothing.
        fuse: Count each pair that the schedule wants fused as one unit, which starts when both could and hands on its
            results at its end. By default the pair's tasks run one after the other.

    Raises:
        ScheduleError: The orders deadlock; the message has the cycle.
        ValueError: The schedule is not defined for this number of microbatches, or a cost has the wrong length.

    Example:
        >>> from scheduler import OneFOneB
        >>> timeline = simulate(OneFOneB(4), 8)
        >>> timeline.makespan, timeline.peak_activations
        (33.0, (4, 3, 2, 1))
    """
    check_schedule("simulate", schedule)
    with without_collector():
        orders = schedule.orders(num_microbatches)
    pairs = schedule.fused(num_microbatches) if fuse else frozenset()
    return simulate_orders(orders, schedule.placement, num_microbatches, costs, pairs, type(schedule).__name__)


def simulate_orders(
    orders: Orders,
    placement: Sequence[int],
    num_microbatches: int,
    costs: Costs | None = None,
    fused: Pairs = frozenset(),
    name: str = "schedule",
) -> Timeline:
    """What :func:`simulate` does, for orders at hand."""
    costs = Costs() if costs is None else costs
    starts, ends = _clock(placement, num_microbatches, costs).run(orders, dict(fused))
    counts, nbytes = _memory(orders, len(placement), costs)
    return Timeline(orders, starts, ends, tuple(placement), costs, counts, nbytes, fused, name)


def _clock(placement: Sequence[int], num_microbatches: int, costs: Costs) -> Clock:
    num_stages = len(placement)
    seconds = {
        "F": costs.per_stage("forward", num_stages),
        "I": costs.per_stage("input_grad", num_stages),
        "W": costs.per_stage("weight_grad", num_stages),
    }
    seconds["B"] = [one + other for one, other in zip(seconds["I"], seconds["W"], strict=True)]
    over = costs.transfers(num_stages)
    for stage in range(num_stages - 1):
        if placement[stage] == placement[stage + 1]:
            over[stage] = 0.0
    return Clock(placement, num_microbatches, seconds, over)


def _memory(orders: Orders, num_stages: int, costs: Costs) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The peaks of each group. They follow from its order alone."""
    held = costs.per_stage("activation_bytes", num_stages)
    early = costs.per_stage("released_at_input_grad", num_stages)
    kept = [one - other for one, other in zip(held, early, strict=True)]
    counts, nbytes = [], []
    for order in orders:
        count = most = 0
        size = largest = 0.0
        for stage, kind, _ in order:
            if kind == "F":
                count += 1
                size += held[stage]
                if count > most:
                    most = count
                if size > largest:
                    largest = size
            elif kind == "I":
                size -= early[stage]
            else:
                count -= 1
                size -= held[stage] if kind == "B" else kept[stage]
        counts.append(most)
        nbytes.append(largest)
    return tuple(counts), tuple(nbytes)


def _critical_path(timeline: Timeline) -> tuple[Task, ...]:
    where = {task: (group, index) for group, order in enumerate(timeline.orders) for index, task in enumerate(order)}
    if not where:
        return ()
    num_stages = len(timeline.placement)
    over = timeline.costs.transfers(num_stages)
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
                late = (
                    0.0
                    if timeline.placement[need.stage] == timeline.placement[one.stage]
                    else over[min(need.stage, one.stage)]
                )
                last = first_of.get(need, need)
                candidates.append((end(last) + late, last))
        if not candidates or start <= 0:
            return tuple(reversed(path))
        task = max(candidates)[1]
        path.append(task)
