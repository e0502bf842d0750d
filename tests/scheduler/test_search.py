"""The search: never worse than the built-in schedules, within memory, deterministic, and honest about the bound."""

from __future__ import annotations

import itertools
import random
import sys
import types

import pytest

import scheduler
from scheduler import Costs, CustomSchedule, OneFOneB, ScheduleError, VMin, ZeroBubbleV, investigate, search, simulate
from scheduler.optimize.annealing import _compiled, can_compile, improve
from scheduler.ordering import order_faults
from scheduler.schedules.building_block import blocks_within, in_order, repeat, straight
from scheduler.schedules.list_scheduling import Problem
from scheduler.schedules.v_shaped import v_placement


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch):
    """No test depends on how busy the machine is: the number of tries follows from `seconds`, and all are made."""
    monkeypatch.setattr(sys.modules["scheduler.optimize.search"], "time", types.SimpleNamespace(monotonic=lambda: 0.0))


def _clock_that_runs(monkeypatch):
    seconds = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(sys.modules["scheduler.optimize.search"], "time", clock)


def uneven(num_stages, seed=0):
    rng = random.Random(seed)

    def each():
        return tuple(1 + rng.uniform(-0.2, 0.2) for _ in range(num_stages))

    return Costs(each(), each(), each())


def test_a_schedule_at_the_bound_is_returned_at_once():
    found = investigate(8, 4, 8, placement="v", seconds=100)
    assert found.at_bound
    assert found.seed_name == "zb-v"
    assert found.tries < 10
    assert "at the bound 51" in str(found)


@pytest.mark.slow
def test_building_blocks_between_the_built_in_ones_are_repeated():
    in_little_memory = investigate(16, 8, 16, placement="v", memory_limit=VMin(8).memory(), seconds=3)
    assert in_little_memory.seed_makespan == 123
    assert in_little_memory.timeline.makespan <= 119
    assert max(in_little_memory.timeline.peak_bytes) <= VMin(8).memory()
    assert investigate(16, 8, 16, placement="v", memory_limit=12, seconds=10).at_bound


@pytest.mark.parametrize("num_groups", [1, 4, 6])
def test_building_blocks_keep_to_a_memory(num_groups):
    memory = VMin(num_groups).memory() + 1
    blocks = list(blocks_within(num_groups, 12, memory))
    assert straight(num_groups) in blocks and len(set(blocks)) == len(blocks)
    for block in blocks:
        orders = in_order(repeat(block, 12))
        assert order_faults(orders, v_placement(num_groups), 12) == []
        timeline = simulate(CustomSchedule(orders, v_placement(num_groups)), 12)
        assert max(timeline.peak_activations) <= memory


def test_uneven_stages_are_ordered_better_than_by_any_built_in_schedule():
    costs = uneven(8)
    found = investigate(8, 4, 8, costs, placement="v", memory_limit=6, seconds=2)
    assert found.timeline.makespan < found.seed_makespan
    assert max(found.timeline.peak_bytes) <= 6
    assert found.timeline.makespan >= found.bound.makespan
    assert simulate(found.schedule, 8, costs).makespan == pytest.approx(found.timeline.makespan)
    assert order_faults(found.schedule.orders(8), v_placement(4), 8) == []


def test_equal_arguments_find_equal_orders():
    costs = uneven(4, seed=3)
    results = [search(4, 2, 5, costs, placement="v", memory_limit=3, seconds=0.5, seed=7) for _ in range(2)]
    assert results[0] == results[1]


def test_any_placement_is_searched():
    found = investigate(3, 2, 4, Costs(), placement=(0, 1, 1), seconds=0.3)
    assert found.seed_name == ""
    assert "no built-in schedule fits" in str(found)
    assert simulate(found.schedule, 4).makespan == found.timeline.makespan


def test_one_stage_a_group_keeps_to_a_limit_for_each_group():
    found = investigate(4, 4, 8, Costs(transfer_s=0.3), memory_limit=[4, 3, 2, 1], seconds=1)
    assert all(peak <= limit for peak, limit in zip(found.timeline.peak_bytes, (4, 3, 2, 1), strict=True))
    assert found.timeline.makespan <= simulate(OneFOneB(4), 8, Costs(transfer_s=0.3)).makespan


@pytest.mark.parametrize("microbatches", [((10.0, 1.0), (1.0, 10.0)), ((1.0, 10.0), (10.0, 1.0))])
def test_microbatches_that_fit_one_by_one_are_ordered(microbatches):
    costs = Costs(microbatches=[Costs(activation_bytes=held) for held in microbatches])
    found = investigate(2, 1, 2, costs, memory_limit=11, seconds=0.1)
    assert found.timeline.peak_bytes == (11.0,)
    with pytest.raises(ScheduleError, match="alone needs 11 in group 0"):
        search(2, 1, 2, costs, memory_limit=10)


@pytest.mark.parametrize(
    ("num_stages", "placement", "costs"),
    [
        (6, "v", Costs(recompute=(0.0, 0.0, 1.0, 0.0, 0.0, 1.0))),
        (3, "loop", Costs(recompute=1.0, microbatches=(1, 3, 1, 2, 1, 1))),
    ],
)
def test_what_is_computed_again_counts(num_stages, placement, costs):
    found = investigate(num_stages, 3, 6, costs, placement=placement, seconds=0.3)
    made = simulate(found.schedule, 6, costs)
    built_in = scheduler.make(found.seed_name.split()[0], num_stages, 3)
    assert found.timeline.makespan == made.makespan >= found.bound.makespan
    assert made.makespan <= found.seed_makespan <= simulate(built_in, 6, costs).makespan


def test_a_limit_that_no_order_keeps_to_is_refused():
    with pytest.raises(ScheduleError) as error:
        search(4, 2, 4, placement="v", memory_limit=1, seconds=0.1)
    assert str(error.value) == (
        "search: no order keeps to memory_limit; the oldest microbatch alone needs 2 in group 0, 2 in "
        "group 1. Raise the limit, or lower activation_bytes (rematerialise)."
    )


def test_a_search_without_any_time_still_finds_an_order(monkeypatch):
    _clock_that_runs(monkeypatch)
    found = investigate(4, 2, 4, uneven(4), placement=(0, 1, 1, 0), memory_limit=2, seconds=0)
    assert max(found.timeline.peak_bytes) <= 2 and found.tries == 16
    assert "time ran out before all planned tries" in str(found)


def test_a_search_that_runs_out_of_time_says_so(monkeypatch):
    _clock_that_runs(monkeypatch)
    monkeypatch.setattr(sys.modules["scheduler.optimize.search"], "list_schedule", lambda problem, ranking: None)
    with pytest.raises(ScheduleError) as error:
        search(3, 2, 4, Costs(), placement=(0, 1, 1), memory_limit=2, seconds=0)
    assert str(error.value) == (
        "search: the time ran out (seconds=0) when 16 orders had been tried, before one was found that keeps to"
        " memory_limit. Allow more seconds, or raise the limit."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "v", "num_stages": 3}, "search: placement 'v' needs two stages a group; received 3 and 2."),
        ({"placement": "w"}, "search: placement is 'w'; expected 'loop', 'v', or a group for each stage."),
        ({"placement": (0, 1, 2, 0)}, "search: placement is (0, 1, 2, 0); expected 4 groups, each from 0 to 1."),
        ({"memory_limit": [1, 2, 3]}, "search: memory_limit has 3 entries; expected one for each of 2 groups."),
        ({"memory_limit": -1}, "search: memory_limit is -1; expected numbers of at least 0."),
        ({"seconds": -1}, "search: seconds is -1; expected a number of at least 0."),
        ({"num_microbatches": 0}, "search: num_microbatches is 0; expected a whole number of at least 1."),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    given = {"num_stages": 4, "num_groups": 2, "num_microbatches": 4} | arguments
    with pytest.raises(ValueError) as error:
        search(**given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.skipif(not can_compile(), reason="numba"))]
)
def test_moves_shorten_orders_and_tell_their_makespan(compiled):
    costs = uneven(6)
    problem = Problem(v_placement(3), 3, 6, costs, (6.0,) * 3)
    before = ZeroBubbleV(3).orders(6)
    makespan, orders = improve(problem, before, steps=800, hot=0.2, cold=0.01, target=0.0, seed=1, compiled=compiled)
    assert order_faults(orders, problem.placement, 6) == []
    assert makespan < simulate(ZeroBubbleV(3), 6, costs).makespan


def test_costs_without_time_are_searched():
    assert "makespan 0, at the bound 0" in str(investigate(4, 4, 4, Costs(0, 0, 0), seconds=0.1))
    transfers = Costs(0, 0, 0, transfer_s=1.0)
    found = investigate(4, 2, 4, transfers, placement="v", memory_limit=3, seconds=0.1)
    assert found.timeline.makespan > found.bound.makespan
    assert max(found.timeline.peak_bytes) <= 3


@pytest.mark.skipif(not can_compile(), reason="numba")
def test_moves_are_compiled_where_no_folder_can_keep_them(monkeypatch):
    from numba.core import caching  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    _compiled.cache_clear()
    costs = uneven(6)
    problem = Problem(v_placement(3), 3, 6, costs, (6.0,) * 3)
    same = {"steps": 50, "hot": 0.2, "cold": 0.01, "target": 0.0, "seed": 1}
    orders = ZeroBubbleV(3).orders(6)
    assert improve(problem, orders, **same, compiled=True) == improve(problem, orders, **same, compiled=False)
    _compiled.cache_clear()


def test_progress_is_told():
    lines = []
    search(6, 3, 6, placement="v", memory_limit=VMin(3).memory(), seconds=0.2, progress=lines.append)
    assert lines[0].startswith("best built-in: v-")
