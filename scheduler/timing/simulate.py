"""Runs a schedule on a clock."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.base.collector import without_collection
from scheduler.task import Orders, Pairs, Schedule, check_schedule
from scheduler.timing.clock import Clock
from scheduler.timing.costs import Costs
from scheduler.timing.timeline import Timeline


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

    Examples:
        >>> from scheduler import OneFOneB
        >>> timeline = simulate(OneFOneB(4), 8)
        >>> timeline.makespan, timeline.peak_activations
        (33.0, (4, 3, 2, 1))
    """
    check_schedule("simulate", schedule)
    with without_collection():
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
    """The same as :func:`simulate`, for orders at hand."""
    costs = Costs() if costs is None else costs
    starts, ends = _clock(placement, num_microbatches, costs).run(orders, dict(fused))
    counts, nbytes = _memory(orders, len(placement), costs)
    return Timeline(orders, starts, ends, tuple(placement), costs, counts, nbytes, fused, name)


def _clock(placement: Sequence[int], num_microbatches: int, costs: Costs) -> Clock:
    seconds = costs.seconds(len(placement))
    seconds["B"] = [one + other for one, other in zip(seconds["I"], seconds["W"], strict=True)]
    return Clock(placement, num_microbatches, seconds, costs.transfers_between(placement))


def _memory(orders: Orders, num_stages: int, costs: Costs) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The most activations and the most bytes that each group holds. They follow from its order alone."""
    added = costs.memory(num_stages)
    added["B"] = [-nbytes for nbytes in added["F"]]
    counts, nbytes = [], []
    for order in orders:
        count = most = 0
        size = largest = 0.0
        for stage, kind, _ in order:
            size += added[kind][stage]
            if kind == "F":
                count += 1
                if count > most:
                    most = count
                if size > largest:
                    largest = size
            elif kind != "I":
                count -= 1
        counts.append(most)
        nbytes.append(largest)
    return tuple(counts), tuple(nbytes)
