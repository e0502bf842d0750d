"""`mpmd.tune`: what it ranks, what fits, what recomputation would change, and `python -m mpmd tune`."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler
from mpmd.__main__ import main
from mpmd.costs.devices import machine_of
from mpmd.report.estimate import draft_of
from mpmd.tuning.cut_again import measured_units, recuts, units_of, with_cuts
from mpmd.tuning.predict import Predictor
from mpmd.tuning.tune import _reason
from scheduler.schedules import catalogue

WIDTH, NUM_LAYERS, ROWS = 32, 6, 256


def build_for(mesh):
    """`build` for a model of equal layers without a head: ROWS rows a step, whatever the number of microbatches."""

    def loss(params, x):
        for p in params:
            x = mpmd.mark_layer_end(x + jnp.tanh(x @ p["up"]) @ p["down"])
        return jnp.mean(x**2)

    def build(schedule, num_microbatches):
        def step(params, xs):
            value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=schedule)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        rows = jax.ShapeDtypeStruct((num_microbatches, ROWS // num_microbatches, WIDTH), jnp.float32)
        return mpmd.jit(step, mpmd_mesh=mesh), ([{"up": matrix, "down": matrix}] * NUM_LAYERS, rows)

    return build


@pytest.fixture(scope="module")
def build():
    return build_for(mpmd.MpmdMesh(jax.make_mesh((3,), ("stage",), devices=jax.devices()[:3]), "stage"))


@pytest.fixture(scope="module")
def tuning(build):
    return mpmd.tune(build, schedules=["gpipe", "interleaved-1f1b", scheduler.OneFOneB(3)], num_microbatches=[8, 16])


def test_every_configuration_is_ranked_and_the_best_one_is_measured(tuning):
    tried = {(str(c.schedule), c.num_microbatches) for c in tuning.configurations}
    names = ("gpipe", "interleaved-1f1b", "OneFOneB(num_stages=3)")
    assert tried == {(name, n) for name in names for n in (8, 16)}
    assert len([c for c in tuning.configurations if not c.is_cut_again]) == 6
    ranks = [c.rank for c in tuning.configurations]
    assert ranks == sorted(ranks)
    assert tuning.best is tuning.configurations[0] and tuning.best.is_measured and tuning.best.measured_s > 0
    assert sum(tuning.best.cuts) == NUM_LAYERS
    predicted = [c.cuts for c in tuning.configurations if c.cuts and not c.is_cut_again]  # the others follow the clock
    assert all(max(cuts) <= 3 for cuts in predicted)


def test_what_cannot_be_scheduled_is_listed_with_the_reason(tuning):
    faults = {c.num_microbatches: c.fault for c in tuning.configurations if c.prediction is None}
    assert list(faults) == [8, 16]
    assert faults[8].startswith("InterleavedOneFOneB: num_microbatches is 8 and num_groups 3;")
    assert "not possible: interleaved-1f1b with 8: InterleavedOneFOneB: num_microbatches is 8" in str(tuning)


def test_the_table_has_predicted_beside_measured(tuning):
    lines = str(tuning).splitlines()
    assert re.fullmatch(
        r"seconds measured for \d of the configurations, the others scaled by these; memory .*", lines[0]
    )
    assert lines[1].split() == "schedule microbatches layers of each stage step idle memory binds measured".split()
    assert re.search(r" group \d computes \d+% of the step +\S+ .?s$", lines[2])
    assert any(
        re.fullmatch(r"best: \S+, \d+ microbatches(, cuts=.*)?; memory of each group: .* KB, .* KB, .* KB", x)
        for x in lines
    )
    answer = json.loads(tuning.as_json())
    assert len(answer["configurations"]) >= 6 and answer["configurations"][0]["measured_s"] > 0


def test_steps_are_compared_by_their_data_not_by_frozen_weights():
    def build(num_microbatches):
        def loss(weights, frozen, x):
            return jnp.mean((mpmd.mark_stage_end(x @ frozen @ weights) @ frozen) ** 2)

        def step(weights, frozen, xs):
            return weights - mpmd.treduce(lambda x: jax.grad(loss)(weights, frozen, x), xs, schedule="1f1b")

        mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
        weights, rows = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((9, 9), (num_microbatches, 4, 9)))
        return mpmd.jit(step, mpmd_mesh=mesh).lower(weights, weights, rows)

    assert [Predictor(x, machine_of(x._mesh)).num_elements for x in map(build, (1, 2))] == [4 * 9, 2 * 4 * 9]


def test_without_a_measurement_more_microbatches_idle_less(build):
    predicted = {}
    for count in (8, 16, 32):
        step, arguments = build("1f1b", count)
        lowered = step.lower(*arguments)
        machine = machine_of(lowered._mesh)
        predicted[count] = Predictor(lowered, machine).predict()
    assert predicted[8].idle > predicted[16].idle > predicted[32].idle


def test_measured_layers_suggest_other_cuts_to_every_schedule_with_as_many_microbatches(build):
    configurations = [("1f1b", 8), ("gpipe", 8), ("1f1b", 16)]
    steps = [build(*c) for c in configurations]
    traced = [step.trace(*arguments) for step, arguments in steps]
    lowered = dict(enumerate(t.lower() for t in traced))
    assert [x.cuts for x in lowered.values()] == [(2, 2, 2)] * 3
    tasks = scheduler.Costs(forward=(2e-3, 2e-3, 8e-3), input_grad=(2e-3, 2e-3, 8e-3), weight_grad=(2e-3, 2e-3, 8e-3))
    units = measured_units(lowered[0], units_of(lowered[0]), tasks)
    found = {again.number: again for again in recuts(units, 0, lowered, None)}
    assert sorted(found) == [0, 1] and found[0].own.forward == pytest.approx(tasks.forward)
    assert found[0].cuts == (4, 1, 1) and max(found[0].costs.forward) == pytest.approx(4e-3, rel=0.15)
    assert with_cuts(traced[0], found[0].cuts).lower().cuts == found[0].cuts


def predictors(build, num_microbatches=16):
    found = {}
    for name in ("gpipe", "1f1b"):
        step, arguments = build(name, num_microbatches)
        lowered = step.lower(*arguments)
        found[name] = Predictor(lowered, machine_of(lowered._mesh))
    return found


@pytest.mark.slow
def test_a_schedule_that_holds_too_much_is_judged_with_recomputation(build):
    found = predictors(build)
    needs = {name: max(p.memory.values()) for name, p in found.items()}
    assert needs["1f1b"] < needs["gpipe"]
    limit = (needs["1f1b"] + needs["gpipe"]) / 2
    assert found["1f1b"].recomputation(limit) == frozenset()
    stages = found["gpipe"].recomputation(limit)
    assert stages and found["gpipe"].recomputation(needs["1f1b"] / 10) is None
    plain, again = found["gpipe"].predict(), found["gpipe"].predict(recomputed=stages)
    assert again.recomputed == tuple(sorted(stages)) and max(again.memory) <= limit
    assert again.seconds > plain.seconds
    tuning = mpmd.tune(build, schedules=["gpipe", "1f1b"], num_microbatches=16, memory_limit=limit)
    assert [c.schedule for c in tuning.configurations if not c.is_cut_again] == ["1f1b", "gpipe"]
    assert f"memory: fits if stages {', '.join(map(str, sorted(stages)))} recompute their forward" in str(tuning)


def test_the_estimate_of_recomputation_is_near_to_what_a_checkpoint_saves():
    mesh = mpmd.MpmdMesh(jax.make_mesh((3,), ("stage",), devices=jax.devices()[:3]), "stage")

    def lowered(wrap):
        stage = wrap(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"] + jnp.sin(x @ p["down"]))

        def loss(params, x):
            for p in params[:-1]:
                x = mpmd.mark_stage_end(stage(p, x))
            return jnp.mean(stage(params[-1], x) ** 2)

        def step(params, xs):
            return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=scheduler.GPipe(3))

        matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        args = [{"up": matrix, "down": matrix}] * 3, jax.ShapeDtypeStruct((16, 64, WIDTH), jnp.float32)
        found = mpmd.jit(step, mpmd_mesh=mesh).lower(*args)
        return Predictor(found, machine_of(mesh))

    plain, checkpointed = lowered(lambda f: f), lowered(jax.checkpoint)
    estimated = plain.predict(recomputed=frozenset([1])).memory[1]
    assert estimated == pytest.approx(checkpointed.memory[1], rel=0.25)


def test_a_lowered_step_is_drafted_once(build, monkeypatch):
    drafted = []
    monkeypatch.setattr("mpmd.stages.draft_of", lambda *args: drafted.append(args) or draft_of(*args))
    step, arguments = build("1f1b", 8)
    lowered = step.lower(*arguments)
    assert lowered.costs().forward and lowered.estimate() == lowered.estimate()
    assert Predictor(lowered, machine_of(lowered._mesh)).memory[0] == lowered.estimate()[0]["peak"]
    assert len(drafted) == 1


def test_nothing_fits_and_says_so(build):
    tuning = mpmd.tune(build, schedules="1f1b", num_microbatches=16, memory_limit=1000.0)
    assert not tuning.fits and "best: none fits" in str(tuning)
    with pytest.raises(ValueError, match="tune: no configuration fits"):
        _ = tuning.best


@pytest.mark.slow
def test_groups_that_share_a_device_need_no_pipeline():
    device = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    tuning = mpmd.tune(build_for(mpmd.MpmdMesh.from_groups([device] * 3)), schedules="1f1b", num_microbatches=8)
    assert str(tuning).endswith("do not pipeline on these devices: groups share them, so they take turns")
    assert tuning.best.prediction.idle > 0.66  # one of three computes at a time


def test_all_schedules_of_the_catalogue_are_tried():
    def build(schedule, num_microbatches):
        raise ValueError("not built")

    tried = {c.schedule for c in mpmd.tune(build, num_microbatches=8).configurations}
    assert tried == set(catalogue.SCHEDULES)


@pytest.mark.slow
def test_what_only_some_numbers_of_microbatches_do_not_allow_is_listed(build):
    def of_a_batch(schedule, num_microbatches):
        jnp.zeros((ROWS, 1)).reshape(num_microbatches, -1)  # as a step may do
        return build(schedule, num_microbatches)

    def faults(schedules, counts):
        found = mpmd.tune(of_a_batch, schedules=schedules, num_microbatches=counts).configurations
        return [c.fault for c in found if not c.is_cut_again]

    good, bad = faults("1f1b", np.array([4, 3]))
    assert good is None and bad.startswith("TypeError: cannot reshape array of shape (256, 1)")
    with pytest.raises(TypeError, match="cannot reshape array"):
        faults("1f1b", np.int64(3))


def test_a_reason_is_a_sentence():
    assert (
        _reason(ValueError("VMin has 6 stages; found 2:\n    step.py:6:12\n  Do so.")) == "VMin has 6 stages; found 2."
    )


@pytest.mark.slow
def test_choices_are_tried_in_each_combination_and_the_best_of_each_is_measured(build):
    def chosen(schedule, num_microbatches, *, scale, kind):
        if kind == "impossible":
            raise ValueError("no such kind")
        step, (params, rows) = build(schedule, num_microbatches)
        wide = jax.ShapeDtypeStruct((num_microbatches, scale * rows.shape[1], WIDTH), rows.dtype)
        return step, (params, wide)

    choices = {"scale": (1, 4), "kind": ["usual", "impossible"]}
    tuning = mpmd.tune(chosen, schedules=["gpipe", "1f1b"], num_microbatches=8, choices=choices)
    own = [c for c in tuning.configurations if not c.is_cut_again]
    assert len(own) == 8 and {c.chosen for c in own if c.fault is None} == {
        "scale=1, kind=usual",
        "scale=4, kind=usual",
    }
    assert {c.choices["scale"] for c in own if c.is_measured} == {1, 4}  # each by programs of its own
    best = tuning.best
    step, _ = chosen(best.schedule, best.num_microbatches, **best.choices)
    assert step.mpmd_mesh.num_groups == 3
    table = str(tuning).splitlines()
    assert table[1].split()[:3] == ["schedule", "microbatches", "choices"]
    assert f", {best.chosen}" in next(line for line in table if line.startswith("best: "))
    assert "not possible: gpipe with 8 and scale=1, kind=impossible, " in str(tuning)
    assert json.loads(tuning.as_json())["configurations"][0]["choices"] == best.choices
    with pytest.raises(ValueError, match=r"tune: choices\['scale'\] is 4\. Pass the values to try: \{'scale': \("):
        mpmd.tune(chosen, choices={"scale": 4})


def test_mistakes_are_named(build):
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'"):
        mpmd.tune(build, schedules="zigzag", num_microbatches=8)
    with pytest.raises(ValueError, match="tune: there is nothing to try"):
        mpmd.tune(build, schedules=[], num_microbatches=[])
    with pytest.raises(TypeError, match=r"tune: build returned 3, expected \(step, arguments\)"):
        mpmd.tune(lambda schedule, n: 3, schedules="1f1b", num_microbatches=8)
    with pytest.raises(TypeError, match=r"tune: num_microbatches has True\. Pass a number, or several"):
        mpmd.tune(build, schedules="1f1b", num_microbatches=True)


def test_the_command_refuses_what_it_cannot_choose(tmp_path, capsys):
    (tmp_path / "steps.py").write_text(
        "def fixed(mesh, schedule): ...\ndef free(mesh, **options): return options['x']\n"
    )
    where = f"{tmp_path}/steps.py:fixed"
    assert main(["tune", where, "--groups", "2"]) == 2
    for counts in "8,x", "8,0":
        assert main(["tune", where, "--groups", "2", "--microbatches", counts]) == 2
    for choice in "x", "x=", "x=1,,2":
        assert main(["tune", where, "--groups", "2", "--choose", choice]) == 2
    for twice in (["x=1", "x=2"], ["schedule=gpipe"]):
        assert main(["tune", where, "--groups", "2", *(word for text in twice for word in ("--choose", text))]) == 2
    assert main(["plan", where, "--groups", "2", "--memory", "1e300"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"python -m mpmd tune: {where} takes no argument num_microbatches, so it cannot be chosen here.",
        "python -m mpmd tune: --microbatches 8,x: expected numbers, as in 8,16,32.",
        "python -m mpmd tune: --microbatches 8,0: expected numbers, as in 8,16,32.",
        *(
            f"python -m mpmd tune: --choose {text}: expected a name and values, as in gathered_once=false,true."
            for text in ("x", "x=", "x=1,,2")
        ),
        *(
            f"python -m mpmd tune: --choose {name}: give each name once; --schedules and --microbatches have their own."
            for name in ("x", "schedule")
        ),
        "python -m mpmd plan: --memory 1e+300: expected a number above 0.",
    ]
    main(["tune", f"{tmp_path}/steps.py:free", "--groups", "2", "--microbatches", "8", "--choose", "z=1"])
    assert "takes no argument" not in capsys.readouterr().err  # it takes any


@pytest.mark.slow
def test_each_loop_counts_with_its_own_measured_seconds():
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")

    def loss(w, x):
        return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)

    def build(schedule, num_microbatches):
        def step(w, xs):
            grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=schedule)
            w = jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
            return w, mpmd.treduce(lambda x: loss(w, x), xs, schedule="1f1b")

        matrix = jax.ShapeDtypeStruct((9, 9), jnp.float32)
        return mpmd.jit(step, mpmd_mesh=mesh), (
            [matrix] * 2,
            jax.ShapeDtypeStruct((num_microbatches, 4, 9), jnp.float32),
        )

    step, arguments = build("1f1b", 4)
    lowered = step.lower(*arguments)
    costs = {0: scheduler.Costs(1.0, 1.0, 1.0), 1: scheduler.Costs(10.0, 0.0, 0.0)}
    predicted = Predictor(lowered, machine_of(lowered._mesh)).predict(measured=costs)
    assert predicted.busy == pytest.approx([4 * 3 + 4 * 10] * 2, rel=1e-3)
    best = mpmd.tune(build, schedules="1f1b", num_microbatches=4).best
    assert best.is_measured and best.cuts == (None, None)
