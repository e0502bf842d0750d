"""Schedules whose order follows from a rule for each group: GPipe, the 1F1B family, and looped GPipe."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.task import Kind, Orders, Schedule, Task, check_count


@dataclass(frozen=True)
class ChainSchedule(Schedule):
    """One stage a group: stage s lives in group s."""

    num_stages: int
    num_groups: int = field(init=False, repr=False, compare=False)
    placement: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count(type(self).__name__, "num_stages", self.num_stages)
        object.__setattr__(self, "num_groups", self.num_stages)
        object.__setattr__(self, "placement", tuple(range(self.num_stages)))


@dataclass(frozen=True)
class LoopSchedule(Schedule):
    """Several stages a group, dealt out like cards: stage s lives in group s mod num_groups."""

    num_stages: int
    num_groups: int
    placement: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_count(name, "num_groups", self.num_groups)
        check_count(name, "num_stages", self.num_stages)
        if self.num_stages % self.num_groups:
            raise ValueError(
                f"{name}: num_stages is {self.num_stages} and num_groups {self.num_groups}; every group needs the same "
                f"number of stages. Use {-(-self.num_stages // self.num_groups) * self.num_groups} stages."
            )
        object.__setattr__(self, "placement", tuple(stage % self.num_groups for stage in range(self.num_stages)))

    @property
    def num_chunks(self) -> int:
        """The number of stages a group."""
        return self.num_stages // self.num_groups


@dataclass(frozen=True)
class GPipe(ChainSchedule):
    """All forwards, then all backwards.

    Each group runs F of every microbatch in order, then B of every microbatch in order. With p groups and m
    microbatches (F = I = W = 1, B = 2) the makespan is 3(m + p - 1), so the bubble is (p - 1)/(m + p - 1) of the
    time. Every group holds m activations. Any m.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.

    Examples:
        >>> print(*GPipe(2).orders(2)[1])
        1F0 1F1 1B0 1B1
    """

    def orders(self, num_microbatches: int) -> Orders:
        check_count("GPipe", "num_microbatches", num_microbatches)
        return in_turn(self, (num_microbatches,), [num_microbatches] * self.num_groups)


@dataclass(frozen=True)
class OneFOneB(ChainSchedule):
    """One forward, one backward: the fewest activations that keep all groups busy in steady state.

    Group r of p first runs p - 1 - r forwards, then a forward and a backward in turn, then the backwards that are
    left. The makespan is 3(m + p - 1), as with GPipe. Group r holds min(m, p - r) activations. Any m.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019 (with a flush at the
    end: "Memory-Efficient Pipeline-Parallel DNN Training", 2021).

    Examples:
        >>> print(*OneFOneB(2).orders(3)[0])
        0F0 0F1 0B0 0F2 0B1 0B2
    """

    def orders(self, num_microbatches: int) -> Orders:
        check_count("OneFOneB", "num_microbatches", num_microbatches)
        return in_turn(self, (num_microbatches,), reversed(range(self.num_groups)))


@dataclass(frozen=True)
class EagerOneFOneB(ChainSchedule):
    """1F1B with twice the forwards at the start, so that transfers in both directions overlap with compute.

    Group r of p first runs 2(p - 1 - r) forwards, then a forward and a backward in turn, then the backwards that are
    left. The makespan is 3(m + p - 1) if transfers take no time. If they take time, it stays closer to this than the
    makespan of 1F1B. Group r holds min(m, 2(p - r) - 1) activations. Any m.

    Source: Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2023.

    Examples:
        >>> print(*EagerOneFOneB(2).orders(4)[0])
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    """

    def orders(self, num_microbatches: int) -> Orders:
        check_count("EagerOneFOneB", "num_microbatches", num_microbatches)
        return in_turn(self, (num_microbatches,), [2 * later for later in reversed(range(self.num_groups))])


@dataclass(frozen=True)
class InterleavedOneFOneB(LoopSchedule):
    """1F1B with several stages per group: a smaller bubble for more transfers and more activations.

    Each of p groups has v stages. Microbatches go in rounds of p. In each round a group runs the forwards of its
    first stage for p microbatches, then those of its second stage, and so on. Backwards run in the same way from the
    last stage. Group r first runs (v - 1)p + 2(p - 1 - r) forwards, then a forward and a backward in turn, then the
    backwards that are left. If v stages together take 3 per microbatch, the makespan is 3m + 3(p - 1)/v for m ≥ p, and
    group r holds min(vm, (v - 1)p + 2(p - 1 - r) + 1) activations of one stage.

    The number of microbatches must be a multiple of num_groups, or less than num_groups.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.

    Examples:
        >>> print(*InterleavedOneFOneB(4, 2).orders(2)[1])
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """

    def orders(self, num_microbatches: int) -> Orders:
        rounds = rounds_of("InterleavedOneFOneB", num_microbatches, self.num_groups)
        earlier = (self.num_chunks - 1) * self.num_groups
        return in_turn(self, rounds, [earlier + 2 * later for later in reversed(range(self.num_groups))])


@dataclass(frozen=True)
class InterleavedGPipe(LoopSchedule):
    """All forwards, then all backwards, with several stages per group (looped breadth-first).

    Each of p groups has v stages. A group runs the forwards of its first stage for every microbatch, then those of its
    second stage, and so on, then the backwards from the last stage to the first. If v stages together take 3 per
    microbatch, the makespan is 3m + 3(p - 1)/v for m ≥ p, and every group holds vm activations of one stage. A stage is
    finished before the next one begins, so its weights are gathered, and its gradients reduced, once a step. Any m.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.

    Examples:
        >>> print(*InterleavedGPipe(4, 2).orders(2)[1])
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """

    def orders(self, num_microbatches: int) -> Orders:
        check_count("InterleavedGPipe", "num_microbatches", num_microbatches)
        return in_turn(self, (num_microbatches,), [num_microbatches * self.num_chunks] * self.num_groups)


def looped(schedule: Schedule, group: int, kind: Kind, rounds: Iterable[int]) -> list[Task]:
    """Returns a group's tasks of one kind, in rounds of microbatches: stage after stage, backwards from the last.

    Stages are dealt out like cards, as they are in a `ChainSchedule`, one to each group.
    """
    stages = range(group, schedule.num_stages, schedule.num_groups)
    tasks, begin = [], 0
    for size in rounds:
        for stage in stages if kind == "F" else reversed(stages):
            tasks += [Task(stage, kind, microbatch) for microbatch in range(begin, begin + size)]
        begin += size
    return tasks


def in_turn(
    schedule: Schedule, rounds: Sequence[int], warmups: Iterable[int], delays: Sequence[int] | None = None
) -> Orders:
    """Returns, for each group, a warmup of forwards, then forward and backward in turn, then the backwards left.

    With `delays`, the backward is split: I number i is followed by W number i - delay. The W that are left come last.
    """
    orders = []
    for group, warmup in enumerate(warmups):
        forwards = looped(schedule, group, "F", rounds)
        backwards = looped(schedule, group, "B" if delays is None else "I", rounds)
        weights = [] if delays is None else [task._replace(kind="W") for task in backwards]
        delay = 0 if delays is None else delays[group]
        order = forwards[:warmup]
        for index, backward in enumerate(backwards):
            if warmup + index < len(forwards):
                order.append(forwards[warmup + index])
            order.append(backward)
            if weights and index >= delay:
                order.append(weights[index - delay])
        orders.append((*order, *weights[max(0, len(backwards) - delay) :]))
    return tuple(orders)


def rounds_of(name: str, num_microbatches: int, num_groups: int) -> tuple[int, ...]:
    """Returns the sizes of rounds of one microbatch for each group; fewer microbatches are one round.

    Raises:
        ValueError: There is more than one round, and the last one is not full.
    """
    check_count(name, "num_microbatches", num_microbatches)
    if num_microbatches > num_groups and num_microbatches % num_groups:
        below = num_microbatches // num_groups * num_groups
        raise ValueError(
            f"{name}: num_microbatches is {num_microbatches} and num_groups {num_groups}; microbatches go in rounds of "
            f"one for each group, so more than one round must be a multiple of {num_groups}. "
            f"Use {below} or {below + num_groups}."
        )
    return (min(num_microbatches, num_groups),) * -(-num_microbatches // num_groups)
