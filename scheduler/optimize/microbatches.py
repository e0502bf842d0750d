"""Finds the order of microbatches of unequal costs that makes the shortest step."""

import math
import random
from collections.abc import Iterator, Sequence

from scheduler.errors import ScheduleError
from scheduler.optimize.bounds import lower_bound
from scheduler.ordering import recomputing
from scheduler.schedules.list_scheduling import Problem
from scheduler.task import Schedule, check_schedule, per_group, reads_of
from scheduler.timing.costs import Costs, check_costs
from scheduler.timing.replay import Replay
from scheduler.timing.simulate import peaks

_CLOSE = 1e-9


def order_microbatches(
    schedule: Schedule,
    costs: Costs,
    *,
    memory_limit: float | Sequence[float] | None = None,
    tries: int = 1000,
    seed: int = 0,
) -> tuple[int, ...]:
    """Returns an order of microbatches that makes a step short: never longer than in the given order.

    The tasks stay in the order of the schedule. Only which microbatch comes first, second, and so on changes. Reorder a
    list of microbatches with ``[documents[i] for i in order]``; sums are made in the order of that list.

    Starts from a few orders (as given, by size, the largest in the middle or at the ends), then swaps two microbatches
    or moves one as long as that helps. A try takes about 0.15 us for each task of the loop.

    Args:
        schedule: The schedule of the loop.
        costs: With ``microbatches``, the costs of each one.
        memory_limit: The most a group may hold, in the unit of ``costs.activation_bytes``: one number, or one a group.
        tries: How many changes to try; 0 only compares the first few orders.
        seed: The seed of the changes. Equal arguments return equal orders, on any machine.

    Returns:
        For each place, the number of the microbatch that goes there.

    Raises:
        ScheduleError: No order that was tried keeps to the memory limit.
        ValueError: The costs have no microbatches, or the schedule is not defined for this number of them.

    Examples:
        >>> from scheduler import Costs, OneFOneB, simulate
        >>> costs = Costs(microbatches=(1, 4, 1, 4, 1, 1))
        >>> order = order_microbatches(OneFOneB(3), costs)
        >>> simulate(OneFOneB(3), 6, costs).makespan, simulate(OneFOneB(3), 6, costs.in_order(order)).makespan
        (65.0, 55.0)
    """
    check_schedule("order_microbatches", schedule)
    check_costs("order_microbatches", costs)
    if not costs.microbatches:
        raise ValueError("order_microbatches: costs has no microbatches; give the costs of each one.")
    most = math.inf if memory_limit is None else memory_limit
    limits = per_group("order_microbatches: memory_limit", most, schedule.num_groups)
    clock = _ListClock(schedule, costs, [limit + _CLOSE for limit in limits])
    best, score = min(((order, clock.score(order)) for order in _first(clock.sizes)), key=lambda found: found[1])
    rng = random.Random(seed)
    for _ in range(tries):
        if score[:2] <= clock.bound:
            break
        other = _changed(best, rng)
        if (found := clock.score(other)) <= score:
            best, score = other, found
    if score[0]:
        raise ScheduleError(
            f"order_microbatches: no order that was tried keeps to memory_limit; a group holds {score[0]:g} more at"
            " least. Raise the limit, or take a schedule in which fewer microbatches are on their way at once."
        )
    return tuple(best)


class _ListClock:
    """Puts orders of microbatches on a clock."""

    def __init__(self, schedule: Schedule, costs: Costs, limits: Sequence[float]) -> None:
        self.costs, self.limits, self.placement = costs, limits, schedule.placement
        m, n, groups = len(costs.microbatches), schedule.num_stages, schedule.num_groups
        self.orders = recomputing(schedule, m, schedule.orders(m), costs.recomputed(n))
        every = costs.of_microbatches(m)
        reads = reads_of(schedule)
        self.replay = Replay(self.orders, self.placement, m, reads)
        columns = {one: _column(one, n) for one in dict.fromkeys(every)}
        self.seconds = [columns[one] for one in every]
        over = {one: [0.0, *one.transfers(n)] for one in columns}
        self.waits = [over[one] for one in every]
        self.sizes = [sum(column) for column in self.seconds]  # For each microbatch, the seconds of all its tasks
        bound = 0.0 if reads else lower_bound(Problem(self.placement, groups, m, costs)).makespan
        self.bound = (0.0, bound * (1 + _CLOSE))  # No score is smaller; none is known for a graph of stages

    def score(self, order: Sequence[int]) -> tuple[float, float, float]:
        """Returns the bytes above the limit, the makespan, and the sum of the groups' ends."""
        seconds, waits = (
            [x for row in zip(*(columns[i] for i in order), strict=True) for x in row]
            for columns in (self.seconds, self.waits)
        )
        ends = self.replay.ends(seconds, waits)
        excess = 0.0
        if any(limit < math.inf for limit in self.limits):
            held = peaks(self.orders, len(self.placement), self.costs.in_order(order), len(order))[1]
            excess = max(0.0, *(nbytes - limit for nbytes, limit in zip(held, self.limits, strict=True)))
        return excess, max(ends), sum(ends)


def _column(costs: Costs, num_stages: int) -> list[float]:
    """Returns the seconds of the tasks of a microbatch: for each stage F, I, W, B, R."""
    seconds, again = costs.seconds(num_stages), costs.per_stage("recompute", num_stages)
    stages = zip(*seconds.values(), again, strict=True)
    return [x for f, i, w, r in stages for x in (f, i, w, i + w, r)]


def _first(sizes: Sequence[float]) -> Iterator[list[int]]:
    """Yields orders to start from: as given, by size, and with the smallest or the largest at the ends."""
    given = list(range(len(sizes)))
    rising = sorted(given, key=sizes.__getitem__)
    yield given
    for up in (rising, rising[::-1]):
        yield up
        yield up[::2] + up[1::2][::-1]


def _changed(order: Sequence[int], rng: random.Random) -> list[int]:
    """Returns the order with two microbatches swapped, or with one in another place."""
    changed = list(order)
    i, j = rng.randrange(len(order)), rng.randrange(len(order))
    if rng.random() < 0.5:
        changed[i], changed[j] = changed[j], changed[i]
    else:
        changed.insert(j, changed.pop(i))
    return changed
