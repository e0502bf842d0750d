"""Programs for GPUs that are not here (needs the extra `topology`), and what is said without it."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plugins import HAS_CUDA, needs_libtpu, needs_plugin

import mpmd
import scheduler
from mpmd import _jax_compat as compat
from mpmd.__main__ import main
from mpmd.costs.machine import Machine
from mpmd.planning.plan import plan_step

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(HAS_CUDA, reason="the compiler for GPUs is installed")
def test_without_the_compiler_the_error_says_what_to_install():
    with pytest.raises(ModuleNotFoundError) as caught:
        mpmd.topology_mesh("h100", (4, 8), ("stage", "data"), "stage")
    assert str(caught.value) == (
        "topology_mesh: h100 needs XLA's compiler for GPUs (no GPU, no driver): pip install -e '.[topology]'"
        " in the clone of jax-mpmd, into an environment of its own."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("h9000", (4, 8)),
            "there is no target 'h9000'. Known are a100, h100, h200, b200, gb200, v5e, v5p, or pass an mpmd.Target.",
        ),
        (("h100", (3, 5)), "topology_mesh: 15 devices do not fill hosts of 8 (devices_per_host)."),
        (("h100", (3, 5, 2)), "topology_mesh: axis_shapes is (3, 5, 2) for the axes ('stage', 'data')."),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError) as caught:
        mpmd.topology_mesh(*arguments, ("stage", "data"), "stage")
    assert str(caught.value) == message


def test_a_slice_of_tpus_that_cannot_be_is_refused(monkeypatch):
    def described(topology):
        raise jax.errors.JaxRuntimeError(f'INVALID_ARGUMENT: Topology layout "{topology}" is not divisible')

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compat, "described_tpus", described)
    with pytest.raises(ValueError) as caught:
        mpmd.topology_mesh("v5e", (2, 1), ("stage", "data"), "stage", devices_per_host=2)
    assert str(caught.value) == (
        "topology_mesh: libtpu knows no v5e:1x2; take another number of devices."
        ' INVALID_ARGUMENT: Topology layout "v5e:1x2" is not divisible'
    )


def loss(weights, x):
    for w in weights[:-1]:
        x = mpmd.mark_stage_end(jax.nn.relu(x @ w))
    return jnp.mean((x @ weights[-1]).astype(jnp.float32) ** 2)


def step(weights, xs):
    value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule="1f1b")
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def compiled_for(groups, microbatches, target="h100", devices=8):
    mesh = mpmd.topology_mesh(target, (groups, devices), ("stage", "data"), "stage", devices_per_host=devices)
    rows = NamedSharding(mesh.tracing_mesh(), P(None, "data"))
    weights = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * groups
    xs = jax.ShapeDtypeStruct((microbatches, 64, 512), jnp.bfloat16, sharding=rows)
    return mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0).lower(weights, xs).compile()


@pytest.fixture(scope="module")
def compiled():
    return compiled_for(4, 8)


@needs_plugin
def test_all_questions_to_a_step_for_gpus_are_answered(compiled):
    before = jax.devices()
    assert compiled.memory_analysis()[3]["parameters"] == 512 * 512 * 2
    cost, products = compiled.cost_analysis(), 8 * 11  # each reads or writes a whole weight, and rows twice
    assert cost["flops"] >= products * 2 * 64 * 512 * 512
    assert cost["bytes accessed"] >= products * 2 * (512 * 512 + 2 * 64 * 512)
    text = compiled.explain()
    assert "group 3 on" in text
    assert text.endswith("between processes by cross-host jax.device_put (by pulls where processes share a GPU)")
    assert len(compiled.program.groups) == 4
    assert jax.devices() == before
    assert jax.devices()[0].platform == "cpu"


@needs_plugin
def test_gathers_of_one_task_go_on_beside_the_products_of_the_other_in_a_fused_pair():
    """Alone, each forward and each backward of a stage waits for its first gather."""
    mesh = mpmd.topology_mesh("h100", (2, 8), ("stage", "data"), "stage")

    def loss(weights, x):
        for number, (up, down) in enumerate(weights):
            for _ in range(2):
                x = x + jnp.tanh(jax.lax.with_sharding_constraint(x @ up, P("data"))) @ down
            x = mpmd.mark_stage_end(x) if number < 3 else x
        return jnp.mean(x**2)

    def step(weights, xs):
        schedule = scheduler.DualPipeV(2)
        return mpmd.treduce(lambda x: jax.grad(loss)(weights, x), xs, schedule=schedule)

    weights = [(jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2] * 4
    xs = jax.ShapeDtypeStruct((8, 8192, 4096), jnp.bfloat16)
    shardings = P("data"), P(None, "data")
    jitted = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=shardings, out_shardings=P("data"))
    compiled = jitted.lower(weights, xs).compile()
    (line,) = [t for t in compiled.explain().splitlines() if t.startswith("collectives of two tasks that run as one")]
    assert "(F0+B3 1 all-gather, 3 all-gather beside products, " in line, line
    lines = str(plan_step(compiled._programs, compiled.program, Machine(mpmd.Target.named("h100")))).splitlines()
    (line,) = [line for line in lines if line.startswith("  F+B of stage 0+3")]
    assert re.search(r": 4 all-gather \((.*) MB, (.*) MB beside products\), ", line), line


@needs_plugin
def test_a_call_says_that_the_devices_are_not_here(compiled):
    with pytest.raises(RuntimeError) as caught:
        compiled([jnp.zeros((512, 512), jnp.bfloat16)] * 4, jnp.zeros((8, 64, 512), jnp.bfloat16))
    assert str(caught.value) == (
        "mpmd: this step was compiled for devices that are not here (topology_mesh). It can be asked, not called."
    )


@needs_plugin
@pytest.mark.slow
def test_more_groups_and_microbatches_are_no_more_programs(compiled):
    assert compiled_for(8, 32)._programs.compiler.num_compiled == compiled._programs.compiler.num_compiled


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("target", ["a100", "h200", "b200", "gb200"])
def test_each_gpu_is_a_target(target):
    mesh = mpmd.topology_mesh(target, (2, 2), ("stage", "data"), "stage", devices_per_host=4)
    sharding = NamedSharding(mesh.groups[0], P("data"))
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=sharding)
    options = {"xla_gpu_autotune_level": 0}
    assert (
        "bf16"
        in jax.jit(lambda x: x @ jnp.ones((256, 8), x.dtype), compiler_options=options).lower(x).compile().as_text()
    )


@needs_libtpu
@pytest.mark.parametrize("target", ["v5e", "v5p"])
def test_each_tpu_is_a_target(target):
    compiled = compiled_for(2, 4, target, 4)
    assert compiled.memory_analysis()[1]["parameters"] == 512 * 512 * 2
    assert "input_output_alias" in compiled.as_text(stage=1, kind="B")
    assert "transfers by jax.device_put in a process" in compiled.explain()
    plan = plan_step(compiled._programs, compiled.program, Machine(mpmd.Target.named(target), 4))
    assert plan.faults == []
    assert [c.kind for g in plan.groups for t in g.tasks.values() for c in t.collectives] == []
    assert {c.kind for g in plan.groups for c in g.once} == {"all-reduce"}


@needs_plugin
def test_a_mesh_may_have_axes_of_any_type():
    mesh = mpmd.topology_mesh("h100", (2, 4), ("stage", "data"), "stage", axis_types=(AxisType.Auto,) * 2)
    assert mesh.groups[0].axis_types == (AxisType.Auto,) * 2
    assert mesh.num_groups == 2


@needs_plugin
def test_the_command_plans_the_example_and_its_status_says_that_it_does_not_fit():
    command = [sys.executable, "-m", "mpmd", "plan", "examples/plan_llama.py:tiny", "--groups", "2", "--json"]
    command += ["--devices-per-group", "4", "--devices-per-host", "4", "--memory-fraction", "1e-5"]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert run.returncode == 3, run.stderr
    document = json.loads(run.stdout)
    assert document["faults"]
    assert document["step"]["hardware_utilization"] > document["step"]["utilization"] > 0  # its layers are recomputed


with_plugin = functools.partial(pytest.param, marks=needs_plugin)
STEPS = """
import jax, mpmd
def fine(mesh): return (lambda x: x * 2), (jax.ShapeDtypeStruct((4,), "float32"),)
def failing(mesh): return {}["layers"]
def other(mesh): return 3
def of_jax(mesh): return jax.jit(lambda x: x * 2), (jax.ShapeDtypeStruct((4,), "float32"),)
def elsewhere(mesh):
    cpus = mpmd.MpmdMesh(jax.make_mesh((1,), ("stage",), devices=jax.devices("cpu")[:1]), "stage")
    return mpmd.jit(lambda x: x * 2, mpmd_mesh=cpus), (jax.ShapeDtypeStruct((4,), "float32"),)
def unequal(mesh): return (lambda x, y: x @ y), (jax.ShapeDtypeStruct((4,), "float32"),)
"""
TO_TUNE = """
import mpmd
def wrong(mesh, schedule, num_microbatches): return mpmd.jit(lambda x: x + "1", mpmd_mesh=mesh), (1.0,)
"""


@pytest.mark.parametrize(
    ("file", "function", "options", "message"),
    [
        (None, "fine", "", "'{file}:fine' names no file; expected FILE.py:FUNCTION."),
        (STEPS, "nope", "", "{file} has no function 'nope'. It has fine, failing, other, of_jax, elsewhere, unequal."),
        (STEPS, "fine", "--matrix-efficiency 2", "a machine cannot be like this: matrix efficiency is 2.0."),
        ("def f(mesh:", "f", "", "loading {file}:f raised SyntaxError in line 1: '(' was never closed"),
        ("import no_such_module", "f", "", "loading {file}:f raised ModuleNotFoundError in line 1: No module named"),
        ("raise SystemExit(0)", "f", "", "loading {file}:f raised SystemExit in line 1: 0"),
        (STEPS, "fine", "--groups 0", "--groups 0: expected 1 or more."),
        (STEPS, "fine", "--devices-per-group -1", "--devices-per-group -1: expected 1 or more."),
        (STEPS, "fine", "--microbatches 0", "--microbatches 0: expected 1 or more."),
        (STEPS, "fine", "--memory inf", "--memory inf: expected a number above 0."),
        (STEPS, "fine", "--link nan", "--link nan: expected a number above 0."),
        (STEPS, "fine", "--link-efficiency 0", "a machine cannot be like this: link efficiency is 0.0."),
        (STEPS, "fine", "--target h9000", "there is no target 'h9000'. Known are a100, h100, "),
        (STEPS, "fine", "--axes stage", "--axes stage: expected different names; 'stage' is the axis of the groups."),
        (STEPS, "fine", "--costs nowhere", "[Errno 2] No such file or directory: 'nowhere'"),
        (STEPS, "fine", "--costs /", "[Errno 21] Is a directory: '/'"),
        (STEPS, "fine", "--costs {file}", "--costs {file}: Costs: this is not JSON"),
        with_plugin(STEPS, "failing", "", "calling {file}:failing raised KeyError in line 4: 'layers'"),
        with_plugin(STEPS, "other", "", "{file}:other returned int, expected (step, abstract arguments)."),
        with_plugin(STEPS, "of_jax", "", "{file}:of_jax returned a step of jaxlib; expected mpmd.jit(step, mpmd_mesh"),
        with_plugin(STEPS, "elsewhere", "", "{file}:elsewhere returned a step for MpmdMesh('stage': 1; 1 group along"),
        with_plugin(STEPS, "unequal", "", "lowering the step of {file}:unequal raised TypeError"),
        with_plugin(STEPS, "fine", "--schedule 1f1b", "{file}:fine takes no argument schedule"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_told_in_one_line(file, function, options, message, tmp_path, capsys):
    path = tmp_path / "step.py"
    if file is not None:
        path.write_text(file)
    assert main(["plan", f"{path}:{function}", "--groups", "2", *options.format(file=path).split()]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert text.startswith(f"python -m mpmd plan: {message.format(file=path)}")


@needs_plugin
def test_a_step_that_cannot_be_traced_is_told_by_tune_too(tmp_path, capsys):
    (path := tmp_path / "step.py").write_text(TO_TUNE)
    options = "--groups 2 --schedules 1f1b,gpipe --microbatches 4".split()
    assert main(["tune", f"{path}:wrong", *options]) == 2
    assert capsys.readouterr().err.startswith(
        f"python -m mpmd tune: tracing the step of {path}:wrong raised TypeError in line 3: unsupported operand"
    )


def test_a_step_in_no_python_file_is_refused(tmp_path, capsys):
    (tmp_path / "step.txt").write_text(STEPS)
    assert main(["plan", f"{tmp_path}/step.txt:fine", "--groups", "2"]) == 2
    assert capsys.readouterr().err == (
        f"python -m mpmd plan: '{tmp_path}/step.txt:fine' names no Python file; expected FILE.py:FUNCTION.\n"
    )
