"""V schedules for a given memory: about half and a third of the memory of 1F1B's first group."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.schedules.building_block import BuildingBlock, half_speed_down, orders_of, straight
from scheduler.schedules.list_scheduling import Problem, list_schedule
from scheduler.schedules.rankings import ranking_from
from scheduler.schedules.v_shaped import VSchedule
from scheduler.task import Orders, check_count
from scheduler.timing.costs import Costs
from scheduler.timing.simulate import simulate_orders


class _MemoryBound(VSchedule):
    """The best of several orders that all keep to :meth:`memory`.

    The best order is the shortest on a clock where every F, I and W takes 1. Among equally short orders, it is the one
    that suffers least from transfers, from a heavier last stage and from stages that differ by up to a fifth.
    """

    def memory(self) -> int:
        """Returns the most activations of one stage that a group holds."""
        raise NotImplementedError

    def orders(self, num_microbatches: int) -> Orders:
        check_count(type(self).__name__, "num_microbatches", num_microbatches)
        limits = (float(self.memory()),) * self.num_groups
        problem = Problem(self.placement, self.num_groups, num_microbatches, Costs(), limits)
        shortest, best = math.inf, list[Orders]()
        for orders in filter(None, dict.fromkeys(self._candidates(problem))):
            timeline = simulate_orders(orders, self.placement, num_microbatches)
            if max(timeline.peak_activations) > self.memory() or timeline.makespan > shortest:
                continue
            if timeline.makespan < shortest:
                shortest, best = timeline.makespan, []
            best.append(orders)
        others = _other_costs(self.num_stages)

        def elsewhere(orders: Orders) -> float:
            return sum(simulate_orders(orders, self.placement, num_microbatches, costs).makespan for costs in others)

        return min(best, key=elsewhere)

    def _candidates(self, problem: Problem) -> Iterator[Orders | None]:
        """Yields orders to choose from; None where memory did not suffice."""
        for setting in _SETTINGS:
            genes = {"patience": 0.0, "noise": 0.0, **dict(zip(_NAMES, setting, strict=True))}
            yield list_schedule(problem, ranking_from(problem, genes))
        for block in self._blocks():
            yield from orders_of(block, problem, self.memory())

    def _blocks(self) -> Iterator[BuildingBlock]:
        yield straight(self.num_groups)


def _other_costs(num_stages: int) -> tuple[Costs, ...]:
    """Returns slow transfers, a heavier last stage, and six times stages that differ, spread by the golden ratio."""
    last = (*[1.0] * (num_stages - 1), 1.5)

    def spread(sample: int) -> tuple[float, ...]:
        return tuple(0.8 + 0.4 * ((stage + 1 + sample * num_stages) * 0.6180339887 % 1) for stage in range(num_stages))

    uneven = (Costs(spread(sample), spread(sample + 1), spread(sample + 2)) for sample in range(0, 18, 3))
    return Costs(1.0, 1.1, 0.8, transfer_s=0.2), Costs(last, last, last), *uneven


@dataclass(frozen=True)
class VHalf(_MemoryBound):
    """A V schedule in about half of 1F1B's memory.

    Every microbatch starts 6 task times after the previous one, in the same pattern: down the groups at half speed,
    up at full speed, and the gradients in the same way. If p is even, there is a pause of three task times at the
    turn. W takes the free slots. The beginning and the end are compressed as far as memory allows. If a list schedule
    within the same memory is shorter (with few microbatches), it is used instead. Of several orders that are equally
    short, the one is used that is shortest on average with slow transfers and uneven stages. If two stages together
    take 3 per microbatch, the makespan is 3m + 2.5, 3m + 8.5 and 3m + 20.5 for p = 4, 8 and 16 at m = 2p. No group
    ever holds more than 2(⌊p/2⌋ + 1) activations of one stage. Any m.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.

    Examples:
        >>> from scheduler import simulate
        >>> timeline = simulate(VHalf(4), 8)
        >>> timeline.makespan, max(timeline.peak_activations)
        (53.0, 6)
    """

    def memory(self) -> int:
        return 2 * (self.num_groups // 2 + 1)

    def _blocks(self) -> Iterator[BuildingBlock]:
        yield half_speed_down(self.num_groups)
        yield straight(self.num_groups)


@dataclass(frozen=True)
class VMin(_MemoryBound):
    """A V schedule in about a third of 1F1B's memory, the least that keeps the groups busy in steady state.

    Every microbatch starts 6 task times after the previous one, in the same pattern: straight down the groups,
    straight up, and the gradients straight back. If p is a multiple of 3, there is a pause of two task times at the
    turn, because otherwise two tasks would meet in a group. W takes the free slots. If a list schedule within the
    same memory is shorter (with few microbatches), it is used instead. If two stages together take 3 per microbatch,
    the makespan is at most 3m + 2p - 5/2 (p > 1; 1 more if p is a multiple of 3). No group holds more than 2⌈(p + 2)/3⌉
    activations of one stage. Any m.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.

    Examples:
        >>> from scheduler import simulate
        >>> timeline = simulate(VMin(4), 16)
        >>> timeline.makespan, max(timeline.peak_activations)
        (107.0, 4)
    """

    def memory(self) -> int:
        return 2 * -(-(self.num_groups + 2) // 3)


# Genes, found by random search over groups and microbatches; each row is the best for some of them.
_NAMES = (
    "pace", "turn_up", "turn_back", "turn_down", "weights", "weights_early", "by_group", "weights_last", "interval",
    "burst",
)  # fmt: skip
_SETTINGS = (
    (1 / 2, 0.0, 0.185, 0.0, 0.4575, 0.235, 1.0, False, 4 / 6, 0.5),
    (5 / 12, 0.0, -0.18, 0.0, 1.115, 0.9375, 0.0, False, 5 / 6, 0.75),
    (1 / 2, 0.0, 0.0, 0.0, 0.55, 0.235, 1.0, False, 0.0, 0.5),
    (1 / 2, 0.0, 0.185, -0.085, 0.4575, 0.2775, 1.0, False, 4 / 6, 0.5),
    (1 / 3, 0.0, 0.0, -0.76, 0.865, 0.3975, 0.0, False, 4 / 6, 0.5),
    (1 / 2, -0.46, 0.575, -0.595, -0.1225, 1.0025, 0.5, True, 4 / 6, 0.75),
    (1 / 3, 0.0, 0.0, -0.76, 0.865, 0.3975, 0.0, True, 5 / 6, 0.5),
    (1 / 3, 0.0, 0.38, 0.0, 0.11, 0.615, 0.0, True, 4 / 6, 0.75),
    (1 / 2, 0.0, 0.0, -0.095, 0.89, 1.1775, 0.0, True, 5 / 6, 0.25),
    (5 / 3, 0.0, 0.0, 0.0, 0.495, 0.9325, 0.0, True, 7 / 6, 0.75),
    (1.0, -0.365, -0.15, 0.0, 1.125, 1.0125, 1.0, False, 4 / 6, 0.5),
)
