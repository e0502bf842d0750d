"""List scheduling: whenever a group is free, it takes the task that is due first among those it can run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from scheduler.task import Kind, Orders, Task
from scheduler.timing.costs import Costs

_KINDS: tuple[Kind, ...] = ("F", "I", "W")
_LAST = 1e9
_SLACK = 1e-9


@dataclass(frozen=True)
class Problem:
    """The tasks to order: the group of each stage, the microbatches, the costs, and the memory of each group."""

    placement: tuple[int, ...]
    num_groups: int
    num_microbatches: int
    costs: Costs
    limits: tuple[float, ...] = ()
    """For each group, the most activation bytes it may hold. Empty means no limit."""

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def of_microbatches(self) -> list[Costs]:
        """Returns the costs of each microbatch."""
        return self.costs.of_microbatches(self.num_microbatches)

    def limit(self, group: int) -> float:
        return self.limits[group] if self.limits else math.inf

    def stages_of(self, group: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.placement) if owner == group]

    @property
    def num_tasks(self) -> int:
        """The number of tasks of kinds F, I and W."""
        return 3 * self.num_stages * self.num_microbatches

    def needed_to_start(self) -> list[list[float]]:
        """Returns, for each microbatch and stage, the room of its F and of the F of the group's later stages."""
        return [self._with_later(held) for held in self._held()]

    def room_to_start(self) -> list[list[float]]:
        """Returns the room that F waits for: the room of the largest microbatches, if memory has so much.

        Then younger microbatches leave the room that the oldest needs to get through, so groups cannot starve each
        other.
        """
        most = self._with_later(list(map(max, zip(*self._held(), strict=True))))
        fits = [room <= self.limit(group) + _SLACK for room, group in zip(most, self.placement, strict=True)]
        return [[m if fit else x for m, fit, x in zip(most, fits, own, strict=True)] for own in self.needed_to_start()]

    def _held(self) -> list[list[float]]:
        return [one.per_stage("activation_bytes", self.num_stages) for one in self.of_microbatches()]

    def _with_later(self, held: Sequence[float]) -> list[float]:
        """Returns, for each stage, what it and the later stages of its group hold."""
        later, found = [0.0] * self.num_groups, list(held)
        for stage in reversed(range(self.num_stages)):
            later[self.placement[stage]] += held[stage]
            found[stage] = later[self.placement[stage]]
        return found


@dataclass(frozen=True)
class Ranking:
    """When tasks are due: kind k, stage s and microbatch j at ``due[k][s] + pace * j``, least first.

    Args:
        interval: The least time between two starts of the first stage's F, once ``burst`` of them have started.
            If memory is tight, a microbatch that starts too early only occupies it for longer.
        noise: For each kind, numbers that are added to each stage and microbatch in turn. Empty means none.
    """

    due: dict[Kind, Sequence[float]]  # For each kind, one number for each stage
    pace: float  # The time that each microbatch adds
    weights_last: bool = True  # W runs only if neither F nor I can
    patience: float = 0.0  # How long a group waits for a result that is on its way and due earlier
    interval: float = 0.0
    burst: int = 0  # How many microbatches may start without an interval
    noise: dict[Kind, Sequence[float]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Lane:
    """A stage's tasks of one kind, one for each microbatch in turn.

    Args:
        results: The lane that waits for this lane's results, the time that each microbatch's result takes to arrive,
            and that lane's group.
    """

    stage: int
    kind: Kind
    seconds: Sequence[float]  # For each microbatch, how long its task takes
    due: float
    noise: Sequence[float] | None
    ready: list[float]  # For each microbatch, when its input from another stage has arrived
    open: int  # The number of microbatches that have run the stage's task of the kind before this one
    room: Sequence[float]  # For each microbatch, the bytes that memory must have room for; only F needs some
    holds: Sequence[float]  # For each microbatch, the bytes that its task adds to the memory that is held
    next: int = 0  # The microbatch whose turn it is
    follower: "_Lane | None" = None  # The lane of the stage's task after this one
    results: "tuple[_Lane, Sequence[float], int] | None" = None


def list_schedule(problem: Problem, ranking: Ranking, prefix: Orders = ()) -> Orders | None:
    """Returns orders of F, I and W by a ranking, each stage's microbatches in order; None if memory does not suffice.

    Linear in tasks, times the number of stages in a group. With ``prefix``, groups first run those tasks.
    """
    groups, by_stage = range(problem.num_groups), _lanes(problem, ranking)
    lanes_of = [[lane for s in problem.stages_of(group) for lane in by_stage[s]] for group in groups]
    limits = [problem.limit(group) + _SLACK for group in groups]
    live, free_at = [0.0] * len(groups), [0.0] * len(groups)
    orders: list[list[Task]] = [[] for _ in groups]
    heap = [(0.0, group) for group in groups]

    def choose(group: int, now: float) -> tuple[_Lane | None, float]:
        """Returns the lane of the task that a free group runs next; if there is none, when there may be one."""
        lanes, held, limit, pace = lanes_of[group], live[group], limits[group], ranking.pace
        horizon = now + ranking.patience
        if prefix and len(orders[group]) < len(prefix[group]):
            only = prefix[group][len(orders[group])]
            lanes, held = [by_stage[only.stage][_KINDS.index(only.kind)]], -math.inf
        wake = best = math.inf
        chosen = None
        for lane in lanes:
            microbatch = lane.next
            if microbatch >= lane.open or held + lane.room[microbatch] > limit:
                continue
            ready = lane.ready[microbatch]
            if ready > horizon:
                if ready < wake:
                    wake = ready
                continue
            key = lane.due + pace * microbatch
            if lane.noise is not None:
                key += lane.noise[microbatch]
            if key < best:
                best, chosen = key, lane
        return chosen, wake

    def take(lane: _Lane, group: int, now: float) -> None:
        """Runs the next task of a lane, and wakes the groups that wait for its result."""
        microbatch = lane.next
        start = max(now, lane.ready[microbatch])
        free_at[group] = end = start + lane.seconds[microbatch]
        lane.next += 1
        live[group] += lane.holds[microbatch]
        orders[group].append(Task(lane.stage, lane.kind, microbatch))
        heappush(heap, (end, group))
        if lane.follower is not None:
            lane.follower.open += 1
        if lane.results is not None:
            there, seconds, to_group = lane.results
            there.ready[microbatch] = arrival = end + seconds[microbatch]
            heappush(heap, (arrival, to_group))
        if lane.kind == "F" and not lane.stage and ranking.burst <= microbatch < len(lane.ready) - 1:
            lane.ready[microbatch + 1] = start + ranking.interval

    while heap:
        now, group = heappop(heap)
        if now < free_at[group]:
            continue
        lane, wake = choose(group, now)
        if lane is not None:
            take(lane, group, now)
        elif wake < math.inf:
            heappush(heap, (wake, group))
    complete = all(lane.next == problem.num_microbatches for lanes in by_stage for lane in lanes)
    return tuple(map(tuple, orders)) if complete else None


def _lanes(problem: Problem, ranking: Ranking) -> list[tuple[_Lane, _Lane, _Lane]]:
    """Returns, for each stage, the lanes of F, I and W, linked to the lanes that wait for them."""
    n, m, every = problem.num_stages, problem.num_microbatches, problem.of_microbatches()
    need = list(zip(*problem.room_to_start(), strict=True))
    seconds, memory = [one.seconds(n) for one in every], [one.memory(n) for one in every]
    over = list(zip(*(one.transfers_between(problem.placement) for one in every), strict=True))

    def lane(s: int, kind: Kind) -> _Lane:
        due = ranking.due[kind][s] + (_LAST if kind == "W" and ranking.weights_last else 0.0)
        noise = ranking.noise[kind][s * m : (s + 1) * m] if kind in ranking.noise else None
        sent = (kind == "F" and s) or (kind == "I" and s + 1 < n)
        ready = [math.inf if sent else 0.0] * m
        open_, room = (m, need[s]) if kind == "F" else (0, [-math.inf] * m)
        own = ([row[kind][s] for row in rows] for rows in (seconds, memory))
        return _Lane(s, kind, next(own), due, noise, ready, open_, room, next(own))

    lanes = [(lane(s, "F"), lane(s, "I"), lane(s, "W")) for s in range(n)]
    for s, (f, i, w) in enumerate(lanes):
        f.follower, i.follower = i, w
        if s + 1 < n:
            f.results = lanes[s + 1][0], over[s], problem.placement[s + 1]
        if s:
            i.results = lanes[s - 1][1], over[s - 1], problem.placement[s - 1]
    return lanes
