"""The choice of a cut: exact for small models, never worse than the even one, on the clock of `simulate`."""

import itertools
import math
import random

import pytest
from samples import slow_first

import scheduler
from scheduler.optimize.cuts import choose_cut
from scheduler.optimize.units import CutProblem, Units, even_layers
from scheduler.schedules import catalogue
from scheduler.timing.replay import Replay

NAMES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "v-half", "dualpipe-v")


def schedule_of(name, num_groups):
    return catalogue.make(name, num_groups=num_groups)


def random_units(rng, num_units, spread=2.0):
    """A model whose first and last units carry an embedding and a head, and some of whose layers are heavier."""
    layer = [rng.choice((1.0, 1.0, 1.0, rng.uniform(1, 1 + spread))) for _ in range(num_units)]
    layer[0] += rng.uniform(0, spread)
    layer[-1] = rng.uniform(0, 2 * spread)
    parts = [tuple(x * rng.uniform(0.8, 1.2) for x in layer) for _ in range(3)]
    transfers = tuple(rng.uniform(0, 0.1) for _ in layer)
    once = tuple(rng.choice((0.0, rng.uniform(0, 3))) for _ in layer)
    shared = ((1.0, (0, num_units - 1)),)
    return Units(*parts, transfers, tuple(layer), tuple(layer), once, shared, task_s=0.01)


def all_cuts(num_places, num_stages):
    for stops in itertools.combinations(range(1, num_places + 1), num_stages - 1):
        yield (*(b - a for a, b in itertools.pairwise((0, *stops))), num_places - (stops or (0,))[-1])


def random_problems(seed, count, most_units):
    rng = random.Random(seed)
    while count:
        schedule = schedule_of(rng.choice(NAMES), rng.randint(2, 4))
        if schedule.num_stages > most_units:
            continue
        units = random_units(rng, rng.randint(schedule.num_stages, most_units))
        num_microbatches = schedule.num_groups * rng.randint(1, 4) * (2 if "Dual" in str(schedule) else 1)
        yield rng, units, schedule, num_microbatches
        count -= 1


@pytest.mark.parametrize("is_limited", [False, True], ids=["any memory", "little memory"])
def test_small_models_are_cut_as_by_brute_force(is_limited):
    for rng, units, schedule, num_microbatches in random_problems(int(is_limited), 40, 9):
        limits = None
        if is_limited:
            need = CutProblem(units, schedule, num_microbatches).memory(
                even_layers(units.num_places, schedule.num_stages)
            )
            limits = (max(need) * rng.uniform(0.7, 1.1),) * schedule.num_groups
        problem = CutProblem(units, schedule, num_microbatches, limits)
        excess, makespan = min(map(problem.evaluate, all_cuts(units.num_places, schedule.num_stages)))
        found = choose_cut(units, schedule, num_microbatches, limits)
        assert (found.excess == 0) == (excess == 0)
        if not excess:
            assert found.is_best and found.makespan == pytest.approx(makespan, rel=1e-9)
        assert found.bound <= makespan * (1 + 1e-9) or excess


@pytest.mark.parametrize("num_models", slow_first(15, 60))
def test_random_models_are_cut_within_two_percent_of_the_best_known(num_models):
    worst = 0.0
    for _, units, schedule, num_microbatches in random_problems(2, num_models, 40):
        found = choose_cut(units, schedule, num_microbatches)
        best = found.makespan
        if found.gap > 0.02:
            best = min(best, choose_cut(units, schedule, num_microbatches, budget=2_000_000).makespan)
        assert found.makespan <= found.even_makespan
        worst = max(worst, found.makespan / best - 1)
    assert worst <= 0.02


def test_the_chosen_cut_is_never_worse_than_the_even_one():
    gains = []
    for _, units, schedule, num_microbatches in random_problems(3, 40, 24):
        found = choose_cut(units, schedule, num_microbatches, budget=100_000)
        assert found.bound <= found.makespan <= found.even_makespan
        gains.append(found.even_makespan / found.makespan - 1)
    assert max(gains) > 0.2  # an even cut may be much slower


@pytest.mark.parametrize("name", catalogue.SCHEDULES)
def test_a_replay_runs_on_the_clock_of_simulate(name):
    schedule = schedule_of(name, 4)
    rng = random.Random(4)
    per_stage = lambda: tuple(rng.uniform(0.5, 2) for _ in range(schedule.num_stages))  # noqa: E731
    costs = scheduler.Costs(per_stage(), per_stage(), per_stage(), per_stage(), per_stage())
    replay = Replay(schedule.orders(8), schedule.placement)
    timeline = scheduler.simulate(schedule, 8, costs)
    found = replay.makespan(costs.forward, costs.input_grad, costs.weight_grad, costs.transfer_s)
    assert found == pytest.approx(timeline.makespan, rel=1e-12)
    assert replay.peaks(costs.activation_bytes) == pytest.approx(timeline.peak_bytes, rel=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        scheduler.CustomSchedule((("0F0", "0F1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1"), ()), (0, 1)),
        scheduler.GraphSchedule(((), (), ()), (0, 1, 0)),  # what its stages read is found when they are cut
    ],
    ids=["a group without a stage", "a graph"],
)
def test_a_cut_is_chosen_for_schedules_of_other_kinds(schedule):
    layers = choose_cut(Units(*[(1.0,) * 6] * 3), schedule, 2).layers
    assert len(layers) == schedule.num_stages and sum(layers) == 5


def model(layers, head):
    """Units of layers that cost these numbers, and a head; a backward takes twice as long as a forward."""
    seconds = (*layers, head)
    return Units(seconds, seconds, seconds)


@pytest.mark.parametrize(
    ("units", "num_stages", "published"),
    [
        # Llama 3 405B: 126 layers in 16 stages, the first and the last one short of a layer. By the public shapes
        # (width 16384, 128256 words, 8192 tokens) the head costs 0.61 of a layer.
        (model([1.0] * 126, 0.61), 16, (7, *[8] * 14, 7)),
        # 61 layers in 16 stages, the last of which has the head: 1.3 layers by the shapes of DeepSeek-V3.
        (model([1.0] * 61, 1.3), 16, (4, *[4] * 14, 1)),
        (model([1.3, *[1.0] * 60], 1.3), 16, (3, *[4] * 14, 2)),
    ],
    ids=["llama 3 405b", "61 layers", "61 layers and a heavy embedding"],
)
def test_a_published_split_is_found_or_beaten(units, num_stages, published):
    problem = CutProblem(units, scheduler.OneFOneB(num_stages), 64)
    found = choose_cut(units, scheduler.OneFOneB(num_stages), 64)
    assert sum(published) == units.num_places
    assert found.makespan <= problem.evaluate(published)[1]
    assert found.gap < 0.01


def test_a_cut_that_fits_is_preferred_to_a_faster_one():
    layer = (1.0,) * 9
    units = Units(layer, layer, layer, held=(5.0, *(1.0,) * 8))
    schedule = scheduler.OneFOneB(3)
    fast, small = choose_cut(units, schedule, 6), choose_cut(units, schedule, 6, (6.0,) * 3)
    assert fast.layers == (3, 3, 2) and small.layers[0] == 2
    assert small.makespan > fast.makespan and not small.excess
    lacking = choose_cut(units, schedule, 6, (4.0,) * 3)
    assert lacking.excess == 1.0 and lacking.layers[0] == 1


def test_what_several_units_share_is_held_once_a_group():
    layer = (1.0,) * 5
    problem = CutProblem(Units(layer, layer, layer, shared=((8.0, (0, 4)),)), scheduler.OneFOneB(2), 2)
    assert problem.memory((2, 2)) == [8.0, 8.0] and problem.memory((4, 0)) == [8.0, 8.0]
    assert CutProblem(problem.units, scheduler.GPipe(1), 2).memory((4,)) == [8.0]


def test_measured_tasks_correct_the_costs_of_their_units():
    units = model([1.0, 1.0, 2.0, 0.0], 0.0)
    costs = scheduler.Costs(forward=(4.0, 2.0, 3.0), input_grad=(2.0, 2.0, 0.0), weight_grad=(2.0, 2.0, 1.0))
    found = units.measured([(0, 2), (2, 3), (3, 5)], costs)
    assert found.forward == (2.0, 2.0, 2.0, 1.5, 1.5) and found.input_grad == (1.0, 1.0, 2.0, 0.0, 0.0)
    before = CutProblem(found, scheduler.OneFOneB(3), 4).costs((2, 1, 1))
    assert (before.forward, before.weight_grad) == (costs.forward, costs.weight_grad)


def test_too_few_places_are_refused():
    with pytest.raises(ValueError, match="2 places where a stage may end are too few"):
        choose_cut(model([1.0, 1.0], 1.0), scheduler.OneFOneB(4), 4)


def test_the_bound_of_a_stage_that_does_not_fit_is_infinite():
    layer = (1.0,) * 4
    problem = CutProblem(Units(layer, layer, layer, held=layer), scheduler.OneFOneB(2), 2, (2.5, 2.5))
    assert problem.bound(0, 0, 2) < math.inf == problem.bound(0, 0, 3)


def test_where_the_head_binds_the_other_stages_are_even():
    """Any cut of these layers takes as long; costs are estimates, so no stage comes near the head needlessly."""
    layer = (1.0,) * 15 + (8.0,)
    found = choose_cut(Units(layer, layer, layer), scheduler.OneFOneB(4), 32)
    assert found.layers == (5, 5, 5, 0)
    assert found.makespan == choose_cut(Units(layer, layer, layer), scheduler.OneFOneB(4), 32, budget=0).makespan
