"""Costs of each microbatch: on the clock, in searches and bounds, measured; and the order in which to run them."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler
from scheduler import (
    Costs,
    CustomSchedule,
    GPipe,
    GraphSchedule,
    OneFOneB,
    ScheduleError,
    Task,
    order_microbatches,
    search,
    simulate,
)
from scheduler.optimize.bounds import lower_bound
from scheduler.optimize.microbatches import _ListClock
from scheduler.schedules.list_scheduling import Problem

sizes = st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=6, max_size=8)
names = st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe-v", "eager-1f1b"])


def made(name):
    return scheduler.make(name, num_groups=3)


def bound_of(schedule, costs):
    return lower_bound(Problem(schedule.placement, schedule.num_groups, len(costs.microbatches), costs)).makespan


def test_each_microbatch_takes_its_own_time_and_memory():
    costs = Costs(forward=(1.0, 2.0), weight_grad=0.0, transfer_bytes=1.0, bytes_per_s=2.0, microbatches=[1, 3])
    timeline = simulate(GPipe(2), 2, costs)
    # Down: 0F0 to 1, 1F0 from 1.5 to 3.5; 0F1 to 4, 1F1 from 5.5 to 11.5. Back: 1B0 or 1B1 follow, by the schedule.
    assert dict(timeline.durations)[Task.parse("1F1")] == 6.0 and timeline.ends[1][1] == 11.5
    assert timeline.busy == (1 + 3 + 1 + 3, 2 + 6 + 1 + 3)
    assert simulate(OneFOneB(2), 2, costs).peak_bytes == (4.0, 3.0)
    exact = Costs(microbatches=[Costs(forward=1.0), Costs(forward=(5.0, 7.0))])
    assert dict(simulate(GPipe(2), 2, exact).durations)[Task.parse("1F1")] == 7.0


@settings(deadline=None, max_examples=40)
@given(names, sizes, st.integers(0, 10**6))
def test_the_order_found_is_no_longer_than_the_one_given_and_above_the_bound(name, factors, seed):
    schedule, costs = made(name), Costs(1.0, 1.5, 0.5, transfer_s=0.1, microbatches=factors)
    given_order = simulate(schedule, len(factors), costs).makespan
    order = order_microbatches(schedule, costs, tries=60, seed=seed)
    found = simulate(schedule, len(factors), costs.in_order(order)).makespan
    assert sorted(order) == list(range(len(factors)))
    assert bound_of(schedule, costs) <= found + 1e-9 and found <= given_order + 1e-9
    assert order == order_microbatches(schedule, costs, tries=60, seed=seed)
    clock = _ListClock(schedule, costs, [float("inf")] * 3)
    assert clock.score(order)[1] == pytest.approx(found)


@pytest.mark.parametrize(
    ("schedule", "costs"),
    [
        (GraphSchedule(((), (0,), (0,), (1, 2)), (2, 1, 3, 0)), Costs(transfer_s=0.5, microbatches=(4, 8, 8, 8, 4))),
        (GraphSchedule(((), (), (0, 1)), (0, 1, 0)), Costs(microbatches=(1, 4, 1, 4))),
        (OneFOneB(3), Costs(recompute=(0.0, 2.0, 0.0), transfer_s=0.5, microbatches=(1, 4, 1, 4))),
    ],
)
def test_orders_over_graphs_and_with_recomputing_are_on_the_clock_of_simulate(schedule, costs):
    clock = _ListClock(schedule, costs, [float("inf")] * schedule.num_groups)
    num, order = len(costs.microbatches), order_microbatches(schedule, costs)
    given_order, found = (simulate(schedule, num, one).makespan for one in (costs, costs.in_order(order)))
    assert clock.score(range(num))[1] == pytest.approx(given_order)
    assert clock.score(order)[1] == pytest.approx(found) and found <= given_order


def test_the_best_order_of_few_is_found():
    costs = Costs(transfer_s=0.2, microbatches=[4, 1, 1, 3, 1, 2])
    schedule = OneFOneB(3)
    every = (simulate(schedule, 6, costs.in_order(order)).makespan for order in itertools.permutations(range(6)))
    assert simulate(schedule, 6, costs.in_order(order_microbatches(schedule, costs))).makespan == min(every)


def test_an_order_keeps_to_the_memory():
    costs, schedule = Costs(microbatches=[5, 5, 1, 1, 1, 1]), OneFOneB(3)
    free = simulate(schedule, 6, costs.in_order(order_microbatches(schedule, costs)))
    order = order_microbatches(schedule, costs, memory_limit=8)
    held = simulate(schedule, 6, costs.in_order(order))
    assert max(free.peak_bytes) > 8 >= max(held.peak_bytes)
    with pytest.raises(ScheduleError, match="keeps to memory_limit; a group holds 2 more"):
        order_microbatches(schedule, costs, memory_limit=(5, 5, 5))


def test_a_search_takes_the_costs_of_each_microbatch():
    costs = Costs(activation_bytes=1.0, microbatches=[1, 3, 1, 2, 1, 2])
    found = search(3, 3, 6, costs, seconds=0.3, memory_limit=7)
    timeline = simulate(found, 6, costs)
    assert timeline.makespan <= simulate(OneFOneB(3), 6, costs).makespan and max(timeline.peak_bytes) <= 7
    assert bound_of(CustomSchedule(found.orders(6), found.placement), costs) <= timeline.makespan


def test_costs_are_measured_for_each_shape():
    costs = Costs(forward=(1.0, 2.0), input_grad=2.0, weight_grad=0.0, microbatches=[1, 4, 1, 4])
    seen = simulate(OneFOneB(2), 4, costs)
    measured = Costs.measured(seen, shapes=["short", "long", "short", "long"])
    both = [simulate(OneFOneB(2), 4, one).makespan for one in (costs, measured)]
    assert both[0] == both[1] and len(set(measured.microbatches)) == 2
    with pytest.raises(ValueError, match="no durations"):
        Costs.measured([(Task.parse("0F0"), 1.0)], shapes=["short", "long"])
    with pytest.raises(ValueError, match="shapes has 1 entry, and a task is of microbatch 3; give one for each"):
        Costs.measured([(Task.parse("0F3"), 1.0)], shapes=["short"])


def test_costs_of_microbatches_in_json():
    costs = Costs.from_json('{"forward": [1, 2], "microbatches": [1, 0.5, {"forward": 9}]}')
    assert [one.forward for one in costs.of_microbatches(3)] == [(1, 2), (0.5, 1.0), 9]
    assert costs.of_mean(2).forward == pytest.approx((10.5 / 3, 12 / 3))
    halves = scheduler.schedules.catalogue.split_costs(costs, made_looped())
    assert halves.microbatches[1].forward == (0.25, 0.5, 0.25, 0.5)


def made_looped():
    return scheduler.InterleavedOneFOneB(4, 2)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Costs(microbatches=[1, -1]), "microbatches holds -1"),
        (lambda: Costs(microbatches=3), "microbatches is 3; expected one entry"),
        (lambda: Costs(microbatches=["long"]), "microbatches holds 'long'"),
        (lambda: Costs(microbatches=[Costs(microbatches=[1])]), "has microbatches itself"),
        (lambda: Costs.from_json('{"microbatches": [{"microbatches": [1]}]}'), "has microbatches itself"),
        (lambda: Costs.from_json('{"microbatches": [{"backward": 1}]}'), r"\['backward'\]"),
        (lambda: simulate(GPipe(2), 3, Costs(microbatches=[1, 2])), "2 entries and the loop 3 microbatches"),
        (lambda: order_microbatches(GPipe(2), Costs()), "costs has no microbatches"),
        (lambda: order_microbatches(GPipe(2), Costs(microbatches=[1, 2]), memory_limit=[1]), "1 entry; expected one"),
        (lambda: dataclasses.replace(Costs(), microbatches=[float("nan")]), "holds nan"),
    ],
)
def test_mistakes_are_told(act, message):
    with pytest.raises(ValueError, match=message):
        act()
