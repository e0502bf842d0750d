"""List scheduling: orders made by letting each group, whenever it is free, take what is due first of what it can do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from scheduler.simulate import Costs
from scheduler.task import Kind, Orders, Task

_LAST = 1e9
_SLACK = 1e-9


@dataclass(frozen=True)
class Problem:
    """What is to be ordered: stages in their places, microbatches, what tasks cost, and the memory of each group."""

    placement: tuple[int, ...]
    num_groups: int
    num_microbatches: int
    costs: Costs
    limits: tuple[float, ...] = ()
    """For each group, the most activation bytes it may hold. Empty means no limit."""

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def limit(self, group: int) -> float:
        return self.limits[group] if self.limits else math.inf

    def stages_of(self, group: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.placement) if owner == group]

    def needed_to_start(self) -> list[float]:
        """For each stage, the room that its F must find: for itself and for the later stages of its group.

        Younger microbatches leave the room that the oldest needs to get through, so the groups cannot starve each
        other.
        """
        held = self.costs.per_stage("activation_bytes", self.num_stages)
        need = list(held)
        later = [0.0] * self.num_groups
        for stage in reversed(range(self.num_stages)):
            later[self.placement[stage]] += held[stage]
            need[stage] = later[self.placement[stage]]
        return need


@dataclass(frozen=True)
class Ranking:
    """What is due when: the task of kind k, stage s and microbatch j at ``due[k][s] + pace * j``, least first.

    Args:
        due: For each kind, one number for each stage.
        pace: What a microbatch adds.
        weights_last: W goes only where neither F nor I can.
        patience: How long a group waits for something that is due earlier and on its way.
        interval: The least time between two starts of the first stage's F, once ``burst`` of them have started.
            Where memory is tight, a microbatch that starts too early only occupies it for longer.
        burst: How many microbatches may start without an interval.
        noise: For each kind, numbers that are added to each stage and microbatch in turn. Empty means none.
    """

    due: dict[Kind, Sequence[float]]
    pace: float
    weights_last: bool = True
    patience: float = 0.0
    interval: float = 0.0
    burst: int = 0
    noise: dict[Kind, Sequence[float]] = field(default_factory=dict)


def list_schedule(problem: Problem, ranking: Ranking, prefix: Orders = ()) -> Orders | None:
    """Orders of tasks F, I and W by a ranking, each stage's microbatches in order; None if memory does not suffice.

    Linear in tasks, times the number of stages in a group. With ``prefix``, groups first run those tasks.
    """
    m, num_stages, costs = problem.num_microbatches, problem.num_stages, problem.costs
    place, pace, patience = problem.placement, ranking.pace, ranking.patience
    forward, input_grad = costs.per_stage("forward", num_stages), costs.per_stage("input_grad", num_stages)
    weight_grad = costs.per_stage("weight_grad", num_stages)
    held, early = costs.per_stage("activation_bytes", num_stages), costs.per_stage("released_at_input_grad", num_stages)
    over = costs.transfers(num_stages)
    for stage in range(num_stages - 1):
        if place[stage] == place[stage + 1]:
            over[stage] = 0.0
    due_f, due_i = ranking.due["F"], ranking.due["I"]
    due_w = [due + (_LAST if ranking.weights_last else 0.0) for due in ranking.due["W"]]
    noise = ranking.noise
    noise_f, noise_i, noise_w = noise.get("F"), noise.get("I"), noise.get("W")
    need = problem.needed_to_start()
    stages = [problem.stages_of(group) for group in range(problem.num_groups)]
    limit = [problem.limit(group) + _SLACK for group in range(problem.num_groups)]
    forward_at = [[math.inf] * m for _ in range(num_stages)]  # when the input of F is there
    input_at = [[math.inf] * m for _ in range(num_stages)]  # when the gradient for I is there
    forward_at[0] = [0.0] * m
    input_at[-1] = [0.0] * m
    next_f, next_i, next_w = [0] * num_stages, [0] * num_stages, [0] * num_stages
    live, free_at = [0.0] * problem.num_groups, [0.0] * problem.num_groups
    orders: list[list[Task]] = [[] for _ in range(problem.num_groups)]
    heap = [(0.0, group) for group in range(problem.num_groups)]
    left = 3 * num_stages * m
    while heap:
        now, group = heappop(heap)
        if now < free_at[group]:
            continue
        horizon = now + patience
        wake = best = math.inf
        only = prefix[group][len(orders[group])] if prefix and len(orders[group]) < len(prefix[group]) else None
        chosen: tuple[str, int, int, float] | None = None
        for stage in stages[group] if only is None else (only.stage,):
            j = next_f[stage]
            room = live[group] + need[stage] <= limit[group] if only is None else only.kind == "F"
            if j < m and room:
                ready = forward_at[stage][j]
                if ready <= horizon:
                    key = due_f[stage] + pace * j
                    if noise_f is not None:
                        key += noise_f[stage * m + j]
                    if key < best:
                        best, chosen = key, ("F", stage, j, ready)
                elif ready < wake:
                    wake = ready
            j = next_i[stage]
            if j < next_f[stage] and (only is None or only.kind == "I"):
                ready = input_at[stage][j]
                if ready <= horizon:
                    key = due_i[stage] + pace * j
                    if noise_i is not None:
                        key += noise_i[stage * m + j]
                    if key < best:
                        best, chosen = key, ("I", stage, j, ready)
                elif ready < wake:
                    wake = ready
            j = next_w[stage]
            if j < next_i[stage] and (only is None or only.kind == "W"):
                key = due_w[stage] + pace * j
                if noise_w is not None:
                    key += noise_w[stage * m + j]
                if key < best:
                    best, chosen = key, ("W", stage, j, now)
        if chosen is None:
            if wake < math.inf:
                heappush(heap, (wake, group))
            continue
        kind, stage, j, ready = chosen
        start = ready if ready > now else now
        if kind == "F":
            end = start + forward[stage]
            next_f[stage] = j + 1
            live[group] += held[stage]
            if not stage and j >= ranking.burst and j + 1 < m:
                forward_at[0][j + 1] = start + ranking.interval
            if stage + 1 < num_stages:
                arrival = forward_at[stage + 1][j] = end + over[stage]
                heappush(heap, (arrival, place[stage + 1]))
        elif kind == "I":
            end = start + input_grad[stage]
            next_i[stage] = j + 1
            live[group] -= early[stage]
            if stage:
                arrival = input_at[stage - 1][j] = end + over[stage - 1]
                heappush(heap, (arrival, place[stage - 1]))
        else:
            end = start + weight_grad[stage]
            next_w[stage] = j + 1
            live[group] -= held[stage] - early[stage]
        free_at[group] = end
        orders[group].append(Task(stage, kind, j))  # type: ignore[arg-type]
        left -= 1
        heappush(heap, (end, group))
    return None if left else tuple(map(tuple, orders))
