"""Lower bounds of the makespan for any order: a search that reaches one may stop."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.schedules.list_scheduling import Problem
from scheduler.timing.costs import Costs


@dataclass(frozen=True)
class Bound:
    """A lower bound of the makespan, and its origin."""

    makespan: float
    reason: str

    def __str__(self) -> str:
        return f"{self.makespan:g} ({self.reason})"

    def above(self, makespan: float) -> float:
        """Returns by how much a makespan is above the bound, as a fraction of the bound."""
        return makespan / self.makespan - 1 if self.makespan else 0.0


def lower_bound(problem: Problem) -> Bound:
    """Returns the largest of four lower bounds of the makespan; none depends on the order of tasks or of microbatches.

    - The way of one microbatch: every F down, every I back, and the last W.
    - A group's work after the first microbatch has reached it.
    - Before its first I a group runs only F, as many as memory holds. All its other work comes after that I.
    - After its last I a group runs only W, as many as memory held. The I of all earlier stages still follow.

    An R may run while its group waits for a gradient, so it counts as work of its group only before the last I.
    """
    n, counts = problem.num_stages, Counter(problem.of_microbatches())
    ways = [_way(costs, problem.placement) for costs in counts]
    head, back, tail = (list(map(min, zip(*rows, strict=True))) for rows in zip(*ways, strict=True))
    seconds = {costs: costs.seconds(n) for costs in counts}
    memory = {costs: costs.memory(n) for costs in counts}
    longest = max(b[0] + t["I"][0] + t["W"][0] for (_, b, _), t in zip(ways, seconds.values(), strict=True))
    bounds = [Bound(longest, "one microbatch's way")]
    for group in range(problem.num_groups):
        stages = problem.stages_of(group)
        if not stages:
            continue
        work = sum(
            count * sum(seconds[c][kind][s] for s in stages for kind in ("F", "I", "W")) for c, count in counts.items()
        )
        again = sum(count * c.per_stage("recompute", n)[s] for s in stages for c, count in counts.items())
        first = min(head[s] for s in stages)
        limit = problem.limit(group)
        forward = [(seconds[c]["F"][s], memory[c]["F"][s], count) for c, count in counts.items() for s in stages]
        weights = [(seconds[c]["W"][s], -memory[c]["W"][s], count) for c, count in counts.items() for s in stages]
        bounds += [
            Bound(first + work + again, f"work of group {group}"),
            Bound(
                min(back[s] for s in stages) + work - _most(forward, limit),
                f"work of group {group} after its first gradient",
            ),
            Bound(
                first + work + again - _most(weights, limit) + min(tail[s] for s in stages),
                f"the way back from group {group}",
            ),
        ]
    return max(bounds, key=lambda bound: bound.makespan)


def _way(costs: Costs, placement: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """Returns, for each stage, the least time before F of a microbatch, before its I, and after the end of its I."""
    n, over = len(placement), costs.transfers_between(placement)
    forward, input_grad, weight_grad = costs.seconds(n).values()
    head = [0.0] * n
    for stage in range(1, n):
        head[stage] = head[stage - 1] + forward[stage - 1] + over[stage - 1]
    back = [0.0] * n
    back[-1] = head[-1] + forward[-1]
    for stage in reversed(range(n - 1)):
        back[stage] = back[stage + 1] + input_grad[stage + 1] + over[stage]
    tail = [weight_grad[0]] * n
    for stage in range(1, n):
        tail[stage] = max(weight_grad[stage], over[stage - 1] + input_grad[stage - 1] + tail[stage - 1])
    return head, back, tail


def _most(items: list[tuple[float, float, int]], limit: float) -> float:
    """Returns the most time that tasks, given as (time, bytes, how many), can take while all their bytes are held."""
    everything = sum(time * count for time, _, count in items)
    if math.isinf(limit) or any(nbytes <= 0 for _, nbytes, _ in items):
        return everything
    best = 0.0
    room = limit
    for time, nbytes, count in sorted(items, key=lambda item: -item[0] / item[1]):
        fitting = min(count, room / nbytes)
        if not room > 0:
            break
        best += fitting * time
        room -= fitting * nbytes
    return min(everything, best)
