"""Schedules that split the backward and fill bubbles with weight gradients: zero bubble, and Kimi K2's."""

from dataclasses import dataclass

from scheduler.schedules.one_f_one_b import ChainSchedule, LoopSchedule, in_turn, rounds_of
from scheduler.task import Orders, check_count


@dataclass(frozen=True)
class ZeroBubbleH1(ChainSchedule):
    """1F1B with the backward split in two: a third of 1F1B's bubble, at the memory of 1F1B's first group.

    Group r of p first runs p - 1 - r forwards, then F and I in turn. From its r-th I on (counted from 0), it runs after
    each I the W that has waited longest. So r weight gradients wait at any time, and they fill the bubble at the end.
    The makespan is 3m + p - 1 for m ≥ p, and every group holds min(m, p) activations. Any m.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.

    Examples:
        >>> print(*ZeroBubbleH1(2).orders(3)[1])
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """

    def orders(self, num_microbatches: int) -> Orders:
        check_count("ZeroBubbleH1", "num_microbatches", num_microbatches)
        groups = range(self.num_groups)
        return in_turn(self, (num_microbatches,), groups[::-1], groups)


@dataclass(frozen=True)
class ZeroBubbleH2(ChainSchedule):
    """No bubble between the first and the last task of a group, for twice the activations of 1F1B.

    Group r of p first runs 2(p - 1 - r) forwards, so many that it is still busy when its first gradient comes. Then
    it runs F and I in turn, and 2r weight gradients wait at any time. For m ≥ 2p - 1 no group idles between its first
    and its last task. The makespan is that of ZB-H1, 3m + p - 1 for m ≥ p, so there is a gain only if the first tasks
    of the next step follow without a barrier. Every group holds min(m, 2p - 1) activations. Any m.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.

    Examples:
        >>> print(*ZeroBubbleH2(2).orders(3)[0])
        0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    """

    def orders(self, num_microbatches: int) -> Orders:
        m, p = check_count("ZeroBubbleH2", "num_microbatches", num_microbatches), self.num_groups
        waiting = min(m, 2 * p - 1) - 1
        warmups = [min(2 * later, waiting) for later in reversed(range(p))]
        return in_turn(self, (m,), warmups, [waiting - warmup for warmup in warmups])


@dataclass(frozen=True)
class InterleavedZeroBubble(LoopSchedule):
    """Interleaved 1F1B with the backward split in two.

    Each of p groups has v stages. Microbatches go in rounds of p, as in interleaved 1F1B. Group r first runs
    (v - 1)p + p - 1 - r forwards, then F and I in turn, and r weight gradients wait at any time. If v stages together
    take 3 per microbatch, the makespan is 3m + (p - 1)/v for m ≥ p, and every group holds min(vm, vp) activations of
    one stage.

    The number of microbatches must be a multiple of num_groups, or less than num_groups.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.

    Examples:
        >>> print(*InterleavedZeroBubble(4, 2).orders(2)[1])
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """

    def orders(self, num_microbatches: int) -> Orders:
        rounds = rounds_of("InterleavedZeroBubble", num_microbatches, self.num_groups)
        groups, earlier = range(self.num_groups), (self.num_chunks - 1) * rounds[0]
        return in_turn(self, rounds, [earlier + self.num_groups - 1 - group for group in groups], groups)


@dataclass(frozen=True)
class KimiK2(LoopSchedule):
    """Interleaved 1F1B with one more forward at the start and a separate W, to overlap communication with compute.

    Each of p groups has v stages. Group r first runs (v - 1)p + 2(p - 1 - r) + 1 forwards, then F, I, W in turn.
    Because of the extra forward, the exchange between experts for one microbatch can overlap with the compute of
    another. W comes directly after I, so it overlaps with the transfer of I's result. If v stages together take 3 per
    microbatch, the makespan is 3m + 2(p - 1)/v for m ≥ p, and group r holds min(vm, (v - 1)p + 2(p - 1 - r) + 2)
    activations of one stage.

    The number of microbatches must be a multiple of num_groups, or less than num_groups.

    Source: Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, section on training infrastructure.

    Examples:
        >>> print(*KimiK2(2, 2).orders(2)[1])
        1F0 1F1 1I0 1W0 1I1 1W1
    """

    def orders(self, num_microbatches: int) -> Orders:
        rounds = rounds_of("KimiK2", num_microbatches, self.num_groups)
        most = self.num_stages + self.num_groups - 1
        warmups = [most - 2 * group for group in range(self.num_groups)]
        return in_turn(self, rounds, warmups, [0] * self.num_groups)
