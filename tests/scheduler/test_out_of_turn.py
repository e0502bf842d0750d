"""What groups may do out of turn: no deadlock, never more memory than planned, whatever they choose."""

import random

import pytest
from samples import slow_first

import scheduler
from scheduler import Adaptive, DualPipeV, EagerOneFOneB, GPipe, OneFOneB, TaskGraph, ZeroBubbleH1, ZeroBubbleV
from scheduler.programs.ahead import EventPlan, PlanProgress
from scheduler.programs.jitter import kinds_ahead, makespan

CASES = [
    (GPipe(2), 5),
    (GPipe(3), 3),
    (OneFOneB(2), 5),
    (OneFOneB(3), 4),
    (OneFOneB(4), 4),
    (EagerOneFOneB(3), 3),
    (ZeroBubbleH1(2), 4),
    (ZeroBubbleH1(3), 3),
    (ZeroBubbleV(2), 3),
    (DualPipeV(2), 4),
    (scheduler.InterleavedOneFOneB(4, 2), 2),
]


def plan_of(schedule, num_microbatches, nbytes=1):
    graph = TaskGraph.chain(schedule.num_stages, nbytes)
    return EventPlan.of(scheduler.lower(graph, schedule, num_microbatches))


def after(plan, done):
    """The progress of a plan of which some events are done."""
    progress = PlanProgress(plan, "FBIWR")
    for number in done:
        progress.do(number)
    return progress


def bytes_held(plan, done):
    """The bytes of each group: of what was written and not freed."""
    held = [0] * len(plan.lists)
    for number in done:
        for group, nbytes in plan.adds[number].items():
            held[group] += nbytes - plan.drops[number][group]
    return held


def choices(plan, done):
    """All events that may happen, of those on which groups decide: transfers that are due or asked for, and tasks."""
    progress = after(plan, done)
    return [number for number in range(len(plan.events)) if progress.may(number)]


@pytest.mark.parametrize(("schedule", "num"), CASES, ids=str)
def test_random_choices_never_deadlock_and_hold_no_more_than_planned(schedule, num):
    plan = plan_of(schedule, num)
    assert [max(1, p) for p in plan.peaks] == plan.peaks  # the chain's values have a byte each
    out_of_turn = 0
    for seed in range(30):
        rng, done = random.Random(seed), []
        progress = PlanProgress(plan, "FBIWR")
        while progress.num_left:
            may = [number for number in range(len(plan.events)) if progress.may(number)]
            assert may, f"deadlock after {done}"
            number = rng.choice(may)
            peaks = [h + plan.adds[number].get(g, 0) for g, h in enumerate(bytes_held(plan, done))]
            assert all(p <= most for p, most in zip(peaks, plan.peaks, strict=True))
            out_of_turn += any(number != next(progress.left(g)) for g in plan.events[number].groups)
            progress.do(number)
            done.append(number)
        assert progress.held == [plan.held[g] + h for g, h in enumerate(bytes_held(plan, done))]
    assert out_of_turn


@pytest.mark.parametrize("nbytes", [1, 0])  # without bytes, memory forbids nothing
@pytest.mark.parametrize(
    ("schedule", "num"),
    [
        *CASES,
        *slow_first((ZeroBubbleV(2), 4), (OneFOneB(4), 5), (GPipe(4), 5), (ZeroBubbleH1(4), 3), (DualPipeV(2), 5)),
    ],
    ids=str,
)
def test_no_state_that_can_be_reached_is_a_deadlock(schedule, num, nbytes):
    plan = plan_of(schedule, num, nbytes)
    start = frozenset()
    known, left = {start}, [start]
    while left:
        done = left.pop()
        may = choices(plan, sorted(done))
        assert may or len(done) == len(plan.events)
        for number in may:
            held = bytes_held(plan, done)
            assert all(h + plan.adds[number].get(g, 0) <= plan.peaks[g] for g, h in enumerate(held))
            following = done | {number}
            if following not in known:
                known.add(following)
                left.append(following)
    assert frozenset(range(len(plan.events))) in known


@pytest.mark.parametrize(
    ("schedule", "num"), [*CASES, (GPipe(8), 32), pytest.param(ZeroBubbleH1(8), 32, marks=pytest.mark.slow)], ids=str
)
def test_the_rule_of_the_executor_ends_and_keeps_the_order_of_each_kind(schedule, num):
    plan = plan_of(schedule, num)
    for seed in range(3):
        rng = random.Random(seed)
        durations = [rng.expovariate(1.0) for _ in plan.events]
        for kinds in ("", "W", "FBIW"):
            assert makespan(plan, kinds, durations.__getitem__) >= max(
                sum(durations[k] for k in own if plan.events[k].kind) for own in plan.lists
            )


def test_without_jitter_no_plan_is_slower():
    for schedule in (GPipe(4), OneFOneB(4), ZeroBubbleH1(4), ZeroBubbleV(4)):
        plan, kinds = plan_of(schedule, 8), kinds_ahead(Adaptive(schedule), 8)
        durations = [{"F": 1, "I": 1, "W": 1, "B": 2}.get(e.kind, 0) for e in plan.events]
        assert makespan(plan, kinds, durations.__getitem__) <= makespan(plan, "", durations.__getitem__)


def test_1f1b_keeps_its_order_and_gpipe_does_not():
    assert kinds_ahead(Adaptive(OneFOneB(4)), 16) == ""
    assert "B" in kinds_ahead(Adaptive(GPipe(4)), 16)
    assert kinds_ahead(Adaptive(OneFOneB(4), "FB"), 16) == "FB"


def test_an_adaptive_schedule_is_its_plan():
    inside = ZeroBubbleV(3)
    schedule = Adaptive(inside)
    assert (schedule.num_stages, schedule.num_groups, schedule.placement) == (6, 3, inside.placement)
    assert schedule.orders(6) == inside.orders(6) and schedule.fused(6) == inside.fused(6)
    assert str(schedule) == "Adaptive(ZeroBubbleV(num_groups=3))"
    assert scheduler.simulate(schedule, 6).makespan == scheduler.simulate(inside, 6).makespan
    scheduler.check(scheduler.lower(TaskGraph.chain(6), schedule, 6))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: Adaptive(Adaptive(OneFOneB(2))),
            (
                "Adaptive: schedule is Adaptive(OneFOneB(num_stages=2)), which is adaptive already."
                " Pass the schedule inside."
            ),
        ),
        (
            lambda: Adaptive(4),
            (
                "Adaptive: schedule is 4; expected a schedule such as scheduler.OneFOneB(4). From a name:"
                " scheduler.make('1f1b', num_stages=4)."
            ),
        ),
        (
            lambda: Adaptive("2f2b"),
            (
                "Adaptive: unknown schedule '2f2b'; expected one of gpipe, 1f1b, eager-1f1b, zb-h1, zb-h2,"
                " interleaved-gpipe, interleaved-1f1b, kimi-k2, interleaved-zb, zb-v, v-half, v-min, dualpipe-v."
            ),
        ),
        (
            lambda: Adaptive(OneFOneB(2), "X"),
            "Adaptive: ahead is 'X'; expected kinds of tasks such as 'W' or 'FBIW', '' or None.",
        ),
        (
            lambda: Adaptive("1f1b").orders(4),
            (
                "Adaptive: '1f1b' is a name, which is a schedule only in a loop of mpmd.treduce: its marks say how many"
                " stages there are. Pass a schedule, such as scheduler.make('1f1b', 4)."
            ),
        ),
    ],
)
def test_what_is_no_plan_is_told(make, told):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == told
