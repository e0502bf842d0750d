"""The best order where each group has one stage, by constraint programming (needs OR-tools)."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from scheduler.listing import Problem
from scheduler.simulate import simulate_orders
from scheduler.task import KINDS, Orders, Task

_RESOLUTION = 1000  # ticks of the solver's clock in a mean task's time


def can_solve(problem: Problem) -> bool:
    """Whether the problem has the form that :func:`solve` takes, and OR-tools is installed (the extra ``search``)."""
    early = problem.costs.per_stage("released_at_input_grad", problem.num_stages)
    one_each = problem.placement == tuple(range(problem.num_groups))
    return one_each and not any(early) and importlib.util.find_spec("ortools") is not None


def solve(problem: Problem, hint: Orders, seconds: float, seed: int) -> tuple[Orders, bool]:
    """Orders no longer than the hint, and whether they are proved to be the best.

    Microbatches come in order for each kind and stage, so the limit on memory is a plain precedence: with room for k
    activations, F of microbatch j + k starts after W of microbatch j ends.

    Args:
        problem: One stage a group, nothing let go at I.
        hint: Orders of F, I and W that keep to the limits.
        seconds: The time to spend, in the solver's deterministic measure and also by the clock.
        seed: For the solver.
    """
    from ortools.sat.python import cp_model  # pyright: ignore[reportMissingImports]

    n, m, costs = problem.num_stages, problem.num_microbatches, problem.costs
    names = {"F": "forward", "I": "input_grad", "W": "weight_grad"}
    exact = {kind: costs.per_stage(name, n) for kind, name in names.items()}
    tick = sum(map(sum, exact.values())) / (3 * n) / _RESOLUTION or 1.0
    time = {kind: [round(value / tick) for value in values] for kind, values in exact.items()}
    over = [round(value / tick) for value in costs.transfers(n)]
    before = simulate_orders(hint, problem.placement, m, costs)
    horizon = math.ceil(before.makespan / tick) + 3 * n * m
    model = cp_model.CpModel()
    start: dict[Task, Any] = {}
    for stage in range(n):
        boxes = []
        for kind in KINDS:
            if kind == "B":
                continue
            for microbatch in range(m):
                task = Task(stage, kind, microbatch)
                start[task] = model.new_int_var(0, horizon, str(task))
                boxes.append(model.new_fixed_size_interval_var(start[task], time[kind][stage], str(task)))
                if microbatch:
                    model.add(start[task] >= start[Task(stage, kind, microbatch - 1)] + time[kind][stage])
        model.add_no_overlap(boxes)
    held = costs.per_stage("activation_bytes", n)
    makespan = model.new_int_var(0, horizon, "makespan")
    for stage in range(n):
        room = problem.limit(stage) / held[stage] if held[stage] else math.inf
        for microbatch in range(m):
            forward, input_grad, weight_grad = (start[Task(stage, kind, microbatch)] for kind in ("F", "I", "W"))
            if stage:
                earlier = start[Task(stage - 1, "F", microbatch)]
                model.add(forward >= earlier + time["F"][stage - 1] + over[stage - 1])
            model.add(input_grad >= forward + time["F"][stage])
            if stage + 1 < n:
                later = start[Task(stage + 1, "I", microbatch)]
                model.add(input_grad >= later + time["I"][stage + 1] + over[stage])
            model.add(weight_grad >= input_grad + time["I"][stage])
            if room < m and microbatch + int(room + 1e-9) < m:
                next_in = start[Task(stage, "F", microbatch + int(room + 1e-9))]
                model.add(next_in >= weight_grad + time["W"][stage])
        model.add(makespan >= start[Task(stage, "W", m - 1)] + time["W"][stage])
        model.add(makespan >= start[Task(stage, "I", m - 1)] + time["I"][stage])
    model.minimize(makespan)
    for order, times in zip(before.orders, before.starts, strict=True):
        for task, at in zip(order, times, strict=True):
            model.add_hint(start[task], round(at / tick))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.max_time_in_seconds = 2 * seconds
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint, False
    orders: list[list[Task]] = [[] for _ in range(n)]
    for task in sorted(start, key=lambda task: (solver.value(start[task]), KINDS.index(task.kind))):
        orders[task.stage].append(task)
    found = tuple(map(tuple, orders))
    if simulate_orders(found, problem.placement, m, costs).makespan > before.makespan:
        return hint, False
    return found, status == cp_model.OPTIMAL
