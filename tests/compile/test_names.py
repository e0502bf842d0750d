"""What programs are called in dumps and in profiles, and their text."""

import glob
import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler

NUM_STAGES = 4


def _mesh():
    devices = jax.devices()[:NUM_STAGES]
    return mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=[d]) for d in devices])


def _loss(weights, x):
    for stage, w in enumerate(weights):
        x = jnp.tanh(x @ w)
        if stage < NUM_STAGES - 1:
            x = mpmd.mark_stage_end(x, name="encoder" if stage == 0 else None)
    return jnp.mean(x**2)


def gpt(weights, xs):
    schedule = scheduler.OneFOneB(NUM_STAGES)
    grads = mpmd.treduce(lambda x: jax.grad(_loss)(weights, x), xs, schedule=schedule)
    return jax.tree.map(lambda p, g: p - 0.1 * g, weights, grads)


ARGUMENTS = [np.eye(8, dtype=np.float32)] * NUM_STAGES, np.ones((3, 4, 8), np.float32)


@pytest.fixture(scope="module")
def compiled():
    return mpmd.jit(gpt, mpmd_mesh=_mesh()).lower(*ARGUMENTS).compile()


def _modules(text, word="HloModule"):
    return re.findall(rf"^{word} @?(\w+)", text, re.M)


def test_a_tasks_program_is_called_after_step_stage_mark_and_kind(compiled):
    assert _modules(compiled.as_text(stage=0)) == ["jit_gpt_stage0_encoder_F", "jit_gpt_stage0_encoder_B"]
    assert _modules(compiled.as_text(stage=3, kind="B")) == ["jit_gpt_stage3_B"]


def test_equal_stages_share_a_program_and_the_text_says_whose_it_is(compiled):
    text = compiled.as_text(stage=2, kind="F")
    assert text.startswith("// gpt_stage2_F runs the same program as gpt_stage1_F\nHloModule jit_gpt_stage1_F")
    assert compiled.as_text(stage=1, kind="F").startswith("// gpt_stage1_F\nHloModule jit_gpt_stage1_F")


def test_stablehlo_is_what_xla_was_given_with_shardys_annotations(compiled):
    text = compiled.as_text(stage=2, kind="F", dialect="stablehlo")
    assert _modules(text, "module") == ["jit_gpt_stage2_F"]
    assert "sdy.mesh" in text and "stablehlo.dot_general" in text


def test_segments_are_called_after_the_place_where_they_stand(compiled):
    modules = _modules(compiled.as_text(dialect="stablehlo"), "module")
    assert modules[-NUM_STAGES:] == [f"jit_gpt_after_loop_group{g}" for g in range(NUM_STAGES)]
    assert compiled.as_text().startswith("loop 0: OneFOneB(num_stages=4), 3 microbatches")


def test_a_step_without_a_loop_has_the_groups_in_its_names():
    predict = mpmd.jit(
        lambda x: {"y": x * 2}, mpmd_mesh=_mesh(), out_shardings=mpmd.MpmdSharding(_mesh(), [2], jax.P())
    )
    compiled = predict.lower(ARGUMENTS[1]).compile()
    assert _modules(compiled.as_text(dialect="hlo")) == ["jit__lambda__group2"]


def test_what_as_text_cannot_show_is_said(compiled):
    faults = {
        ("stage", 9): "as_text: no task has stage=9. The step has F0, F1, F2, F3, B3, B2, B1, B0.",
        ("kind", "X"): "as_text: no task has kind='X'. The step has F0, F1, F2, F3, B3, B2, B1, B0.",
        ("dialect", "x"): "as_text: dialect='x'. Pass one of 'hlo', 'stablehlo'.",
    }
    for (name, value), message in faults.items():
        with pytest.raises(ValueError) as e:
            compiled.as_text(**{name: value})
        assert str(e.value) == message


def test_a_marks_name_is_shown_and_must_be_a_string(compiled):
    assert "stage 0 (encoder): 64 parameters" in compiled.explain()
    assert "\n  F0 (encoder): " in compiled.as_text()
    with pytest.raises(TypeError) as e:
        mpmd.mark_stage_end(jnp.ones(2), jnp.ones(2))
    assert str(e.value) == (
        "mark_stage_end: name is of type ArrayImpl, Array([1., 1.], dtype=float32), not a string."
        " Pass all values that cross the boundary as one tuple: mark_stage_end((a, b))."
    )


def test_a_profile_shows_stage_kind_and_microbatch_of_each_call(compiled, tmp_path):
    state = compiled(*ARGUMENTS)
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(compiled(state, ARGUMENTS[1]))
    (path,) = glob.glob(f"{tmp_path}/**/*.trace.json.gz", recursive=True)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    shown = [e["args"] | {"name": e["name"]} for e in events if "microbatch" in e.get("name", "")]
    assert sorted((e["stage"], e["kind"], e["microbatch"]) for e in shown) == sorted(
        (str(s), k, str(m)) for s in range(NUM_STAGES) for k in "FB" for m in range(3)
    )
    assert {e["name"] for e in shown} >= {"gpt_stage0_encoder_F microbatch 2", "gpt_stage2_F microbatch 1"}
    assert any(e.get("name") == "the transfer of F0.0[2] from group 0 to 1" for e in events)


def test_a_stage_may_have_compiler_options_of_its_own():
    last = {"xla_backend_optimization_level": 1}
    step = mpmd.jit(gpt, mpmd_mesh=_mesh(), compiler_options={"xla_backend_optimization_level": 0, 1: last})
    compiled = step.lower(*ARGUMENTS).compile()
    levels = {
        d.program.name: d.program.options["xla_backend_optimization_level"]
        for d in compiled._programs.compiler._distinct.values()
        if d.parts is None
    }
    assert levels and all((level == 1) == ("stage1" in name) for name, level in levels.items()), levels
    assert set(levels.values()) == {0, 1}
    plain = mpmd.jit(gpt, mpmd_mesh=_mesh())(*ARGUMENTS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        *map(mpmd.device_get, (compiled(*ARGUMENTS), plain)),
    )
    step = mpmd.jit(gpt, mpmd_mesh=_mesh(), compiler_options={9: last})
    with pytest.raises(ValueError, match=r"gpt: compiler_options are given for stage 9, of 4 stages\."):
        step.lower(*ARGUMENTS).compile()
    with pytest.raises(ValueError, match=r"mpmd\.jit: compiler_options has True: "):
        mpmd.jit(gpt, mpmd_mesh=_mesh(), compiler_options={True: last})
    with pytest.raises(ValueError, match=r"mpmd\.jit: compiler_options is 'xla_a=1'; give a dict"):
        mpmd.jit(gpt, mpmd_mesh=_mesh(), compiler_options="xla_a=1")


def test_compiler_options_reach_xla():
    step = mpmd.jit(gpt, mpmd_mesh=_mesh(), compiler_options={"xla_no_such_option": 1})
    lowered = step.lower(*ARGUMENTS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such_option'"):
        lowered.compile()
    plain = mpmd.jit(gpt, mpmd_mesh=_mesh()).lower(*ARGUMENTS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such_option'"):
        plain.compile(compiler_options={"xla_no_such_option": 1})
    small = mpmd.jit(gpt, mpmd_mesh=_mesh(), compiler_options={"xla_llvm_disable_expensive_passes": True})
    fast = small.lower(*ARGUMENTS).compile(compiler_options={"xla_llvm_disable_expensive_passes": False})
    np.testing.assert_array_equal(np.asarray(fast(*ARGUMENTS)[0]), np.asarray(small(*ARGUMENTS)[0]))
