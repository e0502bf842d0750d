"""ZB-V with few microbatches: where groups must wait, and that no order of its placement lets them wait for less."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Costs, ZeroBubbleV, simulate
from scheduler.schedules.list_scheduling import Problem, list_schedule
from scheduler.schedules.rankings import random_genes, ranking_from
from scheduler.schedules.v_shaped import v_placement
from scheduler.timing.simulate import simulate_orders


@given(st.integers(1, 9), st.integers(0, 9))
def test_groups_wait_for_the_forwards_that_they_lack(p, more):
    m = p + more
    waits = simulate(ZeroBubbleV(p), m).idle_within_span
    assert waits == tuple(max(0, 2 * p - 1 - r - m) for r in range(p))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 10**6))
def test_in_no_order_does_group_0_wait_for_less(p, more, seed):
    m = p + more
    problem = Problem(v_placement(p), p, m, Costs())
    orders = list_schedule(problem, ranking_from(problem, random_genes(random.Random(seed))))
    assert orders is not None
    assert simulate_orders(orders, problem.placement, m).idle_within_span[0] >= max(0, 2 * p - 1 - m)


@pytest.mark.parametrize(
    ("p", "m"),
    [(2, 2), (3, 3), (3, 4), (4, 4), *(pytest.param(*pm, marks=pytest.mark.slow) for pm in [(4, 5), (5, 5)])],
)
def test_all_groups_together_cannot_wait_for_less_in_that_makespan_and_memory(p, m):
    assert _least_idle(p, m) == sum(simulate(ZeroBubbleV(p), m).idle_within_span)


def _least_idle(p, m):
    """The least idle time within all spans in the makespan 6m + p - 1 and with 2p activations, proved by CP-SAT."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model, stages, length = cp_model.CpModel(), range(2 * p), 6 * m + p - 1
    start = {
        (s, kind, j): model.new_int_var(0, length - 1, f"{s}{kind}{j}")
        for s in stages
        for kind in "FIW"
        for j in range(m)
    }
    idle = []
    for group in range(p):
        own = (group, 2 * p - 1 - group)
        model.add_all_different([start[s, kind, j] for s in own for kind in "FIW" for j in range(m)])
        first, last = model.new_int_var(0, length, ""), model.new_int_var(0, length, "")
        model.add_min_equality(first, [start[s, "F", 0] for s in own])
        model.add_max_equality(last, [start[s, "W", m - 1] for s in own])
        idle.append(last + 1 - first - 6 * m)
        held = []
        for s in own:
            for j in range(m):
                size, end = model.new_int_var(1, length, ""), model.new_int_var(0, length, "")
                model.add(end == start[s, "W", j] + 1)
                held.append(model.new_interval_var(start[s, "F", j], size, end, ""))
        model.add_cumulative(held, [1] * len(held), 2 * p)
    for s, kind, j in start:
        needs = [(s, kind, j - 1)] if j else []
        if kind == "F":
            needs += [(s - 1, "F", j)] if s else []
        elif kind == "I":
            needs += [(s, "F", j)] + ([(s + 1, "I", j)] if s + 1 < 2 * p else [])
        else:
            needs += [(s, "I", j)]
        for need in needs:
            model.add(start[s, kind, j] >= start[need] + 1)
    model.minimize(sum(idle))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 120
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)
