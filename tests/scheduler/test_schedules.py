"""Every built-in schedule: complete, free of deadlock, and as long and as large as its closed form says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler import (
    Costs,
    DualPipeV,
    EagerOneFOneB,
    GPipe,
    InterleavedGPipe,
    InterleavedOneFOneB,
    InterleavedZeroBubble,
    KimiK2,
    OneFOneB,
    TaskGraph,
    VHalf,
    VMin,
    ZeroBubbleH1,
    ZeroBubbleH2,
    ZeroBubbleV,
    check,
    lower,
    merge,
    order_microbatches,
    simulate,
)
from scheduler.ordering import order_faults
from scheduler.schedules.building_block import (
    half_speed_down,
    in_order,
    repeat,
    squeeze,
    straight,
)
from scheduler.schedules.catalogue import on_groups
from scheduler.timing.simulate import simulate_orders

groups = st.integers(1, 9)
microbatches = st.integers(1, 30)
chunks = st.integers(1, 4)


def spans(timeline):
    return timeline.makespan, timeline.peak_activations


@settings(deadline=None, max_examples=12)
@given(groups, microbatches, chunks)
def test_every_schedule_is_complete_and_runs_or_says_which_numbers_work(p, m, v):
    for schedule in on_groups(p, v).values():
        try:
            orders = schedule.orders(m)
        except ValueError as error:
            assert "num_microbatches is" in str(error)
            assert "Use " in str(error)
            continue
        assert order_faults(orders, schedule.placement, m) == []


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 3))
def test_every_schedule_lowers_to_a_right_program(p, m, v):
    for schedule in on_groups(p, v).values():
        try:
            program = lower(TaskGraph.chain(schedule.num_stages), schedule, m)
        except ValueError:
            continue
        check(program)
        assert len(merge(program)) == sum(map(len, program.groups))


@given(groups, microbatches)
def test_gpipe_has_its_closed_forms(p, m):
    assert spans(simulate(GPipe(p), m)) == (3 * (m + p - 1), (m,) * p)


@given(groups, microbatches)
def test_1f1b_has_its_closed_forms(p, m):
    assert spans(simulate(OneFOneB(p), m)) == (3 * (m + p - 1), tuple(min(m, p - r) for r in range(p)))


@given(groups, microbatches)
def test_eager_1f1b_has_its_closed_forms(p, m):
    peaks = tuple(min(m, 2 * (p - r) - 1) for r in range(p))
    assert spans(simulate(EagerOneFOneB(p), m)) == (3 * (m + p - 1), peaks)


@given(groups, st.integers(1, 5), chunks)
def test_interleaved_1f1b_has_its_closed_forms(p, rounds, v):
    m = rounds * p
    peaks = tuple(min(v * m, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p))
    assert spans(simulate(InterleavedOneFOneB(p * v, p), m)) == (3 * m * v + 3 * (p - 1), peaks)


@given(groups, microbatches, chunks)
def test_interleaved_gpipe_has_its_closed_forms(p, m, v):
    makespan, peaks = spans(simulate(InterleavedGPipe(p * v, p), m))
    assert peaks == (v * m,) * p
    assume(m >= p)
    assert makespan == 3 * m * v + 3 * (p - 1)


@given(groups, st.integers(1, 5), chunks)
def test_kimi_k2_has_its_closed_forms(p, rounds, v):
    m = rounds * p
    peaks = tuple(min(v * m, (v - 1) * p + 2 * (p - 1 - r) + 2) for r in range(p))
    assert spans(simulate(KimiK2(p * v, p), m)) == (3 * m * v + 2 * (p - 1), peaks)


@given(groups, st.integers(1, 5), chunks)
def test_interleaved_zero_bubble_has_its_closed_forms(p, rounds, v):
    m = rounds * p
    expected = (3 * m * v + p - 1, (min(v * m, v * p),) * p)
    assert spans(simulate(InterleavedZeroBubble(p * v, p), m)) == expected


@given(groups, microbatches)
def test_zb_h1_has_its_closed_forms(p, m):
    makespan, peaks = spans(simulate(ZeroBubbleH1(p), m))
    assert peaks == (min(m, p),) * p
    assume(m >= p)
    assert makespan == 3 * m + p - 1


@given(groups, microbatches)
def test_zb_h2_has_its_closed_forms(p, m):
    timeline = simulate(ZeroBubbleH2(p), m)
    assert timeline.peak_activations == (min(m, 2 * p - 1),) * p
    assume(m >= p)
    assert timeline.makespan == 3 * m + p - 1
    assume(m >= 2 * p - 1)
    assert not any(timeline.idle_within_span)


@given(groups, microbatches)
def test_zb_v_has_its_closed_forms(p, m):
    timeline = simulate(ZeroBubbleV(p), m)
    assert max(timeline.peak_activations) <= 2 * p
    assume(m >= p)
    assert timeline.makespan == 6 * m + p - 1
    assume(m >= 2 * p - 1)
    assert timeline.peak_activations == (2 * p,) * p
    assert not any(timeline.idle_within_span)


@given(groups, microbatches)
def test_dualpipe_v_has_its_closed_forms_with_pairs_in_turn_and_as_one_unit(p, more):
    m = 2 * p + more - 1
    timeline = simulate(DualPipeV(p), m)
    assert spans(timeline) == (6 * m + p - 1, (2 * p + 1,) * p)
    assert simulate(DualPipeV(p), m, fuse=True).makespan == 6 * m + 2 * (p - 1)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(groups, microbatches)
def test_v_min_keeps_to_its_memory_and_its_makespan_is_bounded(p, m):
    timeline = simulate(VMin(p), m)
    assert max(timeline.peak_activations) <= 2 * -(-(p + 2) // 3)
    assert timeline.makespan <= 6 * m + max(4 * p - 5, 0) + (2 if p % 3 == 0 else 0)


@settings(deadline=None, max_examples=25)
@given(groups, microbatches)
@pytest.mark.slow
def test_v_half_keeps_to_its_memory_and_is_not_longer_than_v_min(p, m):
    timeline = simulate(VHalf(p), m)
    assert max(timeline.peak_activations) <= 2 * (p // 2 + 1)
    assert timeline.makespan <= simulate(VMin(p), m).makespan


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 6), st.integers(1, 3))
def test_the_closed_forms_hold_when_a_groups_stages_share_its_work(p, rounds):
    m = rounds * p
    half = Costs(0.5, 0.5, 0.5)
    assert simulate(InterleavedZeroBubble(2 * p, p), m, half).makespan == 3 * m + (p - 1) / 2
    assert simulate(ZeroBubbleV(p), m, half).makespan == 3 * m + (p - 1) / 2


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(1, 20), st.booleans())
def test_drawing_both_ends_together_keeps_orders_complete_and_within_its_memory(p, m, half):
    block = half_speed_down(p) if half else straight(p)
    placement = ZeroBubbleV(p).placement
    memory = (VHalf if half else VMin)(p).memory()
    slots = repeat(block, m)
    before = simulate_orders(in_order(slots), placement, m)
    memory = max(memory, *before.peak_activations)
    orders = in_order(squeeze(slots, block, m, memory))
    assert order_faults(orders, placement, m) == []
    timeline = simulate_orders(orders, placement, m)
    assert max(timeline.peak_activations) <= memory
    assert timeline.makespan <= before.makespan


def test_placements_go_round_and_fold():
    assert InterleavedOneFOneB(6, 3).placement == (0, 1, 2, 0, 1, 2)
    assert ZeroBubbleV(3).placement == (0, 1, 2, 2, 1, 0)
    assert (VMin(3).num_stages, VMin(3).num_groups) == (6, 3)


def test_fused_pairs_are_neighbours_of_the_two_stages_of_a_group():
    schedule = DualPipeV(3)
    orders, pairs = schedule.orders(8), schedule.fused(8)
    neighbours = {pair for order in orders for pair in itertools.pairwise(order)}
    assert pairs <= neighbours
    assert {(first.kind, then.kind) for first, then in pairs} == {("F", "B")}
    assert all(first.stage + then.stage == 5 for first, then in pairs)
    check(lower(TaskGraph.chain(6), schedule, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPipe(0), "GPipe: num_stages is 0; expected a whole number of at least 1."),
        (lambda: ZeroBubbleV(True), "ZeroBubbleV: num_groups is True; expected a whole number of at least 1."),
        (
            lambda: KimiK2(7, 2),
            "KimiK2: num_stages is 7 and num_groups 2; every group needs the same number of stages. Use 8 stages.",
        ),
        (lambda: OneFOneB(np.int64(0)), "OneFOneB: num_stages is np.int64(0); expected a whole number of at least 1."),
        (
            lambda: simulate(OneFOneB(2), 2.5),
            "simulate: num_microbatches is 2.5; expected a whole number of at least 1.",
        ),
        (lambda: simulate(OneFOneB(2), 2, {}), "simulate: costs is {}; expected scheduler.Costs(...)."),
        (
            lambda: order_microbatches(OneFOneB(2), None),
            "order_microbatches: costs is None; expected scheduler.Costs(...).",
        ),
        (lambda: OneFOneB(2).orders(0), "OneFOneB: num_microbatches is 0; expected a whole number of at least 1."),
        (
            lambda: InterleavedOneFOneB(8, 4).orders(6),
            (
                "InterleavedOneFOneB: num_microbatches is 6 and num_groups 4; microbatches go in rounds of one for "
                "each group, so more than one round must be a multiple of 4. Use 4 or 8."
            ),
        ),
        (
            lambda: DualPipeV(4).orders(7),
            (
                "DualPipeV: num_microbatches is 7 and num_groups 4; the pairs need two microbatches a group. "
                "Use at least 8."
            ),
        ),
    ],
)
def test_wrong_numbers_are_refused_with_advice(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message
    assert OneFOneB(np.int64(2)) == OneFOneB(2)
