"""Schedules for two stages a group, folded like a V: the last stage is in the same group as the first."""

from collections import deque
from dataclasses import dataclass, field

from scheduler.task import Kind, Orders, Pairs, Schedule, Task, check_count


@dataclass(frozen=True)
class VSchedule(Schedule):
    """Two stages a group: stages 0 to p - 1 go down the groups, stages p to 2p - 1 come back up."""

    num_groups: int
    num_stages: int = field(init=False, repr=False, compare=False)
    placement: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count(type(self).__name__, "num_groups", self.num_groups)
        object.__setattr__(self, "num_stages", 2 * self.num_groups)
        object.__setattr__(self, "placement", v_placement(self.num_groups))


def v_placement(num_groups: int) -> tuple[int, ...]:
    """Returns the group of each stage, down and up again: (0, 1, 1, 0) for two groups."""
    return (*range(num_groups), *reversed(range(num_groups)))


class _OrderBuilder:
    """One group's order under construction: each call appends the next microbatch of a kind, on its way down or up."""

    def __init__(self, num_groups: int, group: int, num_microbatches: int) -> None:
        self.stages = (group, 2 * num_groups - 1 - group)
        self.num_microbatches = num_microbatches
        self.order: list[Task] = []
        self.count: dict[tuple[Kind, int], int] = {(kind, leg): 0 for kind in ("F", "I") for leg in (0, 1)}
        self.waiting: deque[Task] = deque()

    def left(self, kind: Kind, leg: int) -> int:
        """Returns how many microbatches of this kind are still to come."""
        return self.num_microbatches - self.count[kind, leg]

    def warm_up(self, num_groups: int, group: int) -> None:
        """Appends the forwards before the group's first gradient arrives: down, then down and up in turn."""
        for _ in range(2 * (num_groups - 1 - group)):
            self.forward(0)
        for _ in range(group + 1):
            self.forward(0)
            self.forward(1)

    def forward(self, leg: int) -> None:
        if self.left("F", leg):
            self._next("F", leg)

    def input_grad(self, leg: int) -> None:
        task = self._next("I", leg)
        self.waiting.append(task._replace(kind="W"))

    def backward(self, leg: int) -> None:
        self.order[-1] = self._next("I", leg)._replace(kind="B")

    def weight_grad(self) -> None:
        if self.waiting:
            self.order.append(self.waiting.popleft())

    def _next(self, kind: Kind, leg: int) -> Task:
        task = Task(self.stages[leg], kind, self.count[kind, leg])
        self.count[kind, leg] += 1
        self.order.append(task)
        return task


@dataclass(frozen=True)
class ZeroBubbleV(VSchedule):
    """No bubble between the first and the last task of a group, at the memory of 1F1B's first group.

    The first stage of a group is its stage down, the second its stage up. W is always the one that has waited longest.
    Group r of p runs

    1. F down, 2(p - 1 - r) times;
    2. F down and F up, r + 1 times; then the first gradient arrives;
    3. I up, W and F up, p - 1 - r times;
    4. I up, W, F down, I down, W and F up, until no F is left; then I up and W once more;
    5. I down and I up in turn, with W in place of I up when none is left; then the remaining W.

    With m < 2p - 1 - r, a group postpones its first 2p - 1 - r - m weight gradients. If two stages together take 3 per
    microbatch, the makespan is 3m + (p - 1)/2 for m ≥ p. For m ≥ 2p - 1 no group idles between its first and its last
    task. A group holds 2p activations of one stage, as much as p activations of 1F1B's larger stages. Any m.

    With fewer than 2p - 1 microbatches, every order of this placement has idle time. The last stage is in group 0, and
    its first F starts only when 2p - 1 stages have run theirs. Until then group 0 has only its m forwards of the first
    stage, so it waits at least the time of 2p - 1 - m tasks. For m ≥ p it waits no longer in this schedule, and group r
    waits 2p - 1 - r - m. An exact solver proves for p = 2 to 5 and m = p that within this makespan and memory the
    groups together cannot wait less (``tests/scheduler/test_least_idle.py``).

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6.

    Examples:
        >>> print(*ZeroBubbleV(1).orders(2)[0])
        0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """

    def orders(self, num_microbatches: int) -> Orders:
        check_count("ZeroBubbleV", "num_microbatches", num_microbatches)
        return tuple(self._order(group, num_microbatches) for group in range(self.num_groups))

    def _order(self, group: int, num_microbatches: int) -> tuple[Task, ...]:
        p = self.num_groups
        build = _OrderBuilder(p, group, num_microbatches)

        # With few microbatches memory is not full after the warmup, and these weight gradients can wait.
        postponed = max(0, 2 * p - 1 - group - num_microbatches)

        def backward(leg: int) -> None:
            nonlocal postponed
            if build.left("I", leg):
                build.input_grad(leg)
                if postponed:
                    postponed -= 1
                else:
                    build.weight_grad()

        build.warm_up(p, group)
        for _ in range(p - 1 - group):
            backward(1)
            build.forward(1)
        while build.left("F", 1):
            backward(1)
            build.forward(0)
            backward(0)
            build.forward(1)
        backward(1)
        while build.left("I", 0):
            build.input_grad(0)
            if build.left("I", 1):
                build.input_grad(1)
            else:
                build.weight_grad()
        while build.waiting:
            build.weight_grad()
        return tuple(build.order)


@dataclass(frozen=True)
class DualPipeV(VSchedule):
    """Forwards fused with backwards of the other direction, so that the communication of one overlaps with the other.

    The first stage of a group is its stage down, the second its stage up. Group r of p runs

    1. F down, 2(p - 1 - r) times;
    2. F down and F up, r + 1 times;
    3. I up, W and F up, p - 1 - r times;
    4. the fused pairs F down with B up and F up with B down, m - 2p + r + 1 times each, in turn;
    5. B up and the fused pair F up with B down, p - 1 - r times;
    6. the backwards that are left, up and down in turn; the later half of them is split, so that W fills the bubble.

    ``fused`` gives the pairs. If two stages together take 3 per microbatch, the makespan is 3m + (p - 1)/2 where the
    tasks of a pair run one after the other, and 3m + (p - 1) where a pair is one unit that gives its results at its
    end. Every group holds 2p + 1 activations of one stage.

    The number of microbatches must be at least 2 · num_groups.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (DualPipe); Qi et al., "DualPipe could be better without
    the Dual", 2025 (its V form).

    Examples:
        >>> schedule = DualPipeV(1)
        >>> print(*schedule.orders(2)[0])
        0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1
        >>> print(*(f"{forward}+{backward}" for forward, backward in schedule.fused(2)))
        1F1+0B0
    """

    def orders(self, num_microbatches: int) -> Orders:
        return tuple(order for order, _ in self._plans(num_microbatches))

    def fused(self, num_microbatches: int) -> Pairs:
        return frozenset(pair for _, pairs in self._plans(num_microbatches) for pair in pairs)

    def _plans(self, num_microbatches: int) -> list[tuple[tuple[Task, ...], list[tuple[Task, Task]]]]:
        check_count("DualPipeV", "num_microbatches", num_microbatches)
        if num_microbatches < 2 * self.num_groups:
            raise ValueError(
                f"DualPipeV: num_microbatches is {num_microbatches} and num_groups {self.num_groups}; the pairs "
                f"need two microbatches a group. Use at least {2 * self.num_groups}."
            )
        return [self._plan(group, num_microbatches) for group in range(self.num_groups)]

    def _plan(self, group: int, num_microbatches: int) -> tuple[tuple[Task, ...], list[tuple[Task, Task]]]:
        p = self.num_groups
        build = _OrderBuilder(p, group, num_microbatches)
        pairs: list[tuple[Task, Task]] = []

        def pair(forward_leg: int, fuse: bool = True) -> None:
            build.forward(forward_leg)
            build.backward(1 - forward_leg)
            if fuse:
                pairs.append((build.order[-2], build.order[-1]))

        build.warm_up(p, group)
        for _ in range(p - 1 - group):
            build.input_grad(1)
            build.weight_grad()
            build.forward(1)
        for index in range(num_microbatches - 2 * p + group + 1):
            # The last group's first gradient is for the microbatch that it has just run: nothing there could overlap.
            pair(0, fuse=index > 0 or group < p - 1)
            pair(1)
        for _ in range(p - 1 - group):
            build.backward(1)
            pair(1)
        whole = group + 1
        for index in range(2 * (group + 1)):
            (build.backward if index < whole else build.input_grad)(1 - index % 2)
        for _ in range(p - 1 - group):
            build.weight_grad()
            build.input_grad(0)
        while build.waiting:
            build.weight_grad()
        return tuple(build.order), pairs
