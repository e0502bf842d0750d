"""Lower bounds of the makespan, whatever the order: a search that reaches one may stop."""

import math
from dataclasses import dataclass

from scheduler.schedules.list_scheduling import Problem


@dataclass(frozen=True)
class Bound:
    """A lower bound of the makespan, and where it comes from."""

    makespan: float
    reason: str

    def __str__(self) -> str:
        return f"{self.makespan:g} ({self.reason})"

    def above(self, makespan: float) -> float:
        """How far a makespan is above the bound, as a fraction of the bound."""
        return makespan / self.makespan - 1 if self.makespan else 0.0


def lower_bound(problem: Problem) -> Bound:
    """The largest of four lower bounds of the makespan; none depends on the order.

    - One microbatch's way: every F down, every I back, and the last W.
    - A group's work after the first microbatch has reached it.
    - Before its first I a group runs only F, as many as memory takes. All its other work comes after that I.
    - After its last I a group runs only W, as many as memory held. The I of all stages before still follow.
    """
    n, m, costs = problem.num_stages, problem.num_microbatches, problem.costs
    forward, input_grad, weight_grad = costs.seconds(n).values()
    memory, over = costs.memory(n), costs.transfers_between(problem.placement)
    head = [0.0] * n  # before F can start
    for stage in range(1, n):
        head[stage] = head[stage - 1] + forward[stage - 1] + over[stage - 1]
    back = [0.0] * n  # before I can start
    back[-1] = head[-1] + forward[-1]
    for stage in reversed(range(n - 1)):
        back[stage] = back[stage + 1] + input_grad[stage + 1] + over[stage]
    tail = [weight_grad[0]] * n  # after the end of I
    for stage in range(1, n):
        tail[stage] = max(weight_grad[stage], over[stage - 1] + input_grad[stage - 1] + tail[stage - 1])
    bounds = [Bound(back[0] + input_grad[0] + weight_grad[0], "one microbatch's way")]
    for group in range(problem.num_groups):
        stages = problem.stages_of(group)
        if not stages:
            continue
        work = m * sum(forward[s] + input_grad[s] + weight_grad[s] for s in stages)
        first = min(head[s] for s in stages)
        limit = problem.limit(group)
        before = _most(m, [(forward[s], memory["F"][s]) for s in stages], limit)
        after = _most(m, [(weight_grad[s], -memory["W"][s]) for s in stages], limit)
        bounds += [
            Bound(first + work, f"work of group {group}"),
            Bound(min(back[s] for s in stages) + work - before, f"work of group {group} after its first gradient"),
            Bound(first + work - after + min(tail[s] for s in stages), f"the way back from group {group}"),
        ]
    return max(bounds, key=lambda bound: bound.makespan)


def _most(num_microbatches: int, items: list[tuple[float, float]], limit: float) -> float:
    """The most time that tasks, given as (time, bytes), can take while their bytes are all held."""
    everything = num_microbatches * sum(time for time, _ in items)
    if math.isinf(limit) or any(nbytes <= 0 for _, nbytes in items):
        return everything
    best = 0.0
    room = limit
    for time, nbytes in sorted(items, key=lambda item: -item[0] / item[1]):
        count = min(num_microbatches, room / nbytes)
        if not room > 0:
            break
        best += count * time
        room -= count * nbytes
    return min(everything, best)
