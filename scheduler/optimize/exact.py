"""The best order where each group has one stage, by constraint programming (needs OR-tools)."""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

from scheduler.schedules.list_scheduling import Problem
from scheduler.task import KINDS, Kind, Orders, Task
from scheduler.timing.simulate import simulate_orders

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

    before = simulate_orders(hint, problem.placement, problem.num_microbatches, problem.costs)
    ticks = _Ticks.of(problem)
    model = cp_model.CpModel()
    horizon = math.ceil(before.makespan / ticks.seconds) + problem.num_tasks
    start = _add_tasks(model, problem, ticks, horizon)
    _add_waits(model, problem, ticks, start, horizon)
    for order, times in zip(before.orders, before.starts, strict=True):
        for task, at in zip(order, times, strict=True):
            model.add_hint(start[task], round(at / ticks.seconds))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.max_time_in_seconds = 2 * seconds
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint, False
    found = _orders_by({task: solver.value(variable) for task, variable in start.items()}, problem.num_stages)
    if simulate_orders(found, problem.placement, problem.num_microbatches, problem.costs).makespan > before.makespan:
        return hint, False
    return found, status == cp_model.OPTIMAL


@dataclass(frozen=True)
class _Ticks:
    """Costs on the solver's clock, in whole ticks.

    Args:
        seconds: The length of a tick.
        time: For each kind, the time of each stage's tasks.
        over: The time over the boundary behind each stage.
    """

    seconds: float
    time: dict[Kind, list[int]]
    over: list[int]

    @classmethod
    def of(cls, problem: Problem) -> "_Ticks":
        n, costs = problem.num_stages, problem.costs
        exact = costs.seconds(n)
        tick = sum(map(sum, exact.values())) / (3 * n) / _RESOLUTION or 1.0
        time: dict[Kind, list[int]] = {kind: [round(value / tick) for value in exact[kind]] for kind in exact}
        return cls(tick, time, [round(value / tick) for value in costs.transfers(n)])


def _add_tasks(model: Any, problem: Problem, ticks: _Ticks, horizon: int) -> dict[Task, Any]:
    """Adds a start for each task: a group runs one task at a time, and microbatches stay in order."""
    start: dict[Task, Any] = {}
    for stage in range(problem.num_stages):
        intervals = []
        for kind, times in ticks.time.items():
            for microbatch in range(problem.num_microbatches):
                task = Task(stage, kind, microbatch)
                start[task] = model.new_int_var(0, horizon, str(task))
                intervals.append(model.new_fixed_size_interval_var(start[task], times[stage], str(task)))
                if microbatch:
                    model.add(start[task] >= start[Task(stage, kind, microbatch - 1)] + times[stage])
        model.add_no_overlap(intervals)
    return start


def _add_waits(model: Any, problem: Problem, ticks: _Ticks, start: dict[Task, Any], horizon: int) -> None:
    """Adds what tasks wait for, results of others and memory, and the objective: the time at which all have ended."""
    n, m, time, over = problem.num_stages, problem.num_microbatches, ticks.time, ticks.over
    held = problem.costs.per_stage("activation_bytes", n)
    makespan = model.new_int_var(0, horizon, "makespan")
    for stage in range(n):
        room = problem.limit(stage) / held[stage] if held[stage] else math.inf
        for microbatch in range(m):
            forward, input_grad, weight_grad = (start[Task(stage, kind, microbatch)] for kind in time)
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


def _orders_by(times: dict[Task, int], num_groups: int) -> Orders:
    """Each group's tasks by their start. Ties, of tasks that take no time, go to the kind that others wait for."""
    orders: list[list[Task]] = [[] for _ in range(num_groups)]
    for task in sorted(times, key=lambda task: (times[task], KINDS.index(task.kind))):
        orders[task.stage].append(task)
    return tuple(map(tuple, orders))
