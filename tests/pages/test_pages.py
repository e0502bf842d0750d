"""What the pages of docs/ print is true: their programs run as printed, in turn, some of them on a model made here."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import mpmd.jaxpp.experimental
import reshard
import scheduler

ROOT = Path(__file__).parents[2]
TESTED_HERE = (
    "compatibility",
    "compilation",
    "finetuning",
    "inference",
    "inside-a-group",
    "numerics",
    "planning",
    "splitting",
    "stages",
    "tutorial",
)
TESTED_ELSEWHERE = {
    "checkpoints": "checkpoint/test_docs.py", "huggingface": "safetensors/test_huggingface_page.py",
    "mistakes": "pages/test_mistakes_page.py", "multihost": "launcher/test_multihost_page.py",
    "profiling": "report/test_profile.py", "reshard": "reshard/test_reshard_page.py",
    "resilience": "resilience/test_resilient.py", "streams": "reshard/test_stream.py",
}  # fmt: skip


def blocks_of(name: str) -> list[str]:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_each_page_with_a_program_has_a_test():
    pages = {path.stem for path in (ROOT / "docs").glob("*.md") if blocks_of(path.stem)}
    assert pages == {*TESTED_HERE, *TESTED_ELSEWHERE}
    for name, file in TESTED_ELSEWHERE.items():
        assert f"{name}.md" in (ROOT / "tests" / file).read_text()


def test_the_reference_has_each_public_name_once():
    for package in (mpmd, scheduler, reshard):
        page = (ROOT / "docs" / "reference" / f"{package.__name__}.md").read_text()
        found = re.findall(rf"^::: {package.__name__}\.(\w+)$", page, re.MULTILINE)
        assert sorted(found) == sorted(package.__all__)
    page = (ROOT / "docs" / "reference" / "jaxpp.md").read_text()
    names = [*mpmd.jaxpp.__all__, *(f"tasks.{name}" for name in mpmd.jaxpp.tasks.__all__ if name != "MpmdMesh")]
    assert sorted(re.findall(r"^::: mpmd\.jaxpp\.(\S+)$", page, re.MULTILINE)) == sorted(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_examples", "printed"),
    [
        ("numerics", 2, ["wrong by 0.50", "float32 ", "\nrounding\n"]),
        ("splitting", 1, ["as one loop under jax.jit"]),
        ("inference", 6, ["step on MpmdMesh('stage': 4; 4 groups along 'stage')"]),
        (
            "stages",
            10,
            [
                "\n(1,) (3,)\n",
                "with the head in parts, as with a whole one: True",
                "as under jax.jit: True",
                "6 microbatches, as the plain loop: True",
                "layers of each stage: (3, 4, 3, 2)",
                "; no cut is faster",
                "axis 0 split {0: 0:4, 1: 4:8, 2: 8:11, 3: 11:12}",
            ],
        ),
        ("tutorial", 6, ["step on MpmdMesh('stage': 4; 4 groups along 'stage')", "\n(2,)\n", "loss on unseen data: "]),
    ],
)
def test_the_examples_run_as_printed(name, num_examples, printed):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(rf"<!-- {name}: python -->\n+```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == page.count("```python") == num_examples
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], env=environment, text=True, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for text in printed:
        assert text in run.stdout


def test_the_help_of_each_option_says_its_default():
    files = [path for folder in ("mpmd", "reshard", "scheduler", "examples", "benchmarks")
             for path in (ROOT / folder).rglob("*.py") if "add_argument" in path.read_text()]  # fmt: skip
    silent = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("add_argument", "add"):
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if given.get("default", "None") not in ("None", "[]") and "default" not in given.get("help", ""):
                    silent.append(f"{path.name}:{node.lineno}")
    assert len(files) > 20 and not silent


@pytest.mark.slow
def test_the_programs_inside_a_group_print_the_losses_of_the_page_and_those_of_processes_are_the_same(tmp_path):
    *programs, of_processes = blocks_of("inside-a-group")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    alone = clean | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}

    def printed(command, environment):
        run = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        return run.stdout.replace("[0] ", "").splitlines()

    once = printed([sys.executable, "-c", "\n".join(programs)], alone)
    losses = [f"{float(line):.4f}" for line in once if line[0].isdigit()]
    assert losses == ["2.7346", "2.2965", "2.0042"] * 4
    program = tmp_path / "program.py"
    program.write_text(of_processes)
    launched = [str(ROOT / "scripts/launch_multihost.sh"), "-n", "4", "--cpu-devices", "1", "--", sys.executable]
    many = printed([*launched, str(program)], clean | {"PYTHONPATH": str(ROOT)})
    assert len(many) == 3 and many == printed([sys.executable, str(program)], alone)


# --- programs that take the reader's own model ----------------------------------------------------

WIDTH = 8


def init(key):
    return [x / WIDTH for x in jax.random.normal(key, (16, WIDTH, WIDTH))]


def step_of(schedule="1f1b", num_stages=2):
    """A training step over tokens (microbatch, row, position)."""

    def loss(weights, tokens):
        x = jnp.tanh(tokens[..., None] * jnp.ones(WIDTH))
        for i, w in enumerate(weights):
            x = jnp.tanh(x @ w)
            last = (i + 1) * num_stages // len(weights) > i * num_stages // len(weights)
            x = mpmd.mark_stage_end(x) if last and i < len(weights) - 1 else x
        return jnp.mean(x**2)

    def step(weights, tokens):
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), tokens, schedule=schedule)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    return step


def small(schedule, num_microbatches, num_stages=2):
    """The step on two groups of CPU devices, and its arguments."""
    mesh = mpmd.MpmdMesh(jax.make_mesh((num_stages,), ("stage",)), "stage")
    step = mpmd.jit(step_of(schedule, num_stages), mpmd_mesh=mesh)
    return step, (init(jax.random.key(0)), np.ones((num_microbatches, 4, 4), np.int32))


@pytest.mark.slow
def test_the_programs_of_the_page_on_plans_run_on_a_small_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    build, costs, tune, described = blocks_of("planning")
    names = {"jax": jax, "jnp": jnp, "mpmd": mpmd, "NamedSharding": NamedSharding, "P": P, "Path": Path, "init": init}
    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), (AxisType.Auto,) * 2), "stage")
    exec(build, found := names | {"step": step_of()})
    step, (state, tokens) = found["build"](mesh)
    assert step.lower(state, tokens).estimate()[0]["data"] == 32 * 64 * 4096 * 4 // 2

    step, args = small("1f1b", 4)
    exec(costs, names | {"compiled": step.lower(*args).compile()})
    measured = scheduler.Costs.from_json((tmp_path / "costs.json").read_text()).seconds(num_stages=2)
    assert sum(map(sum, measured.values())) > 0  # tasks this short may share a tick of the clock

    exec(tune, found := names | {"build": small})
    assert "best: " in capsys.readouterr().out
    assert np.isfinite(float(found["step"](*found["args"])[1]))

    if not has_compiler_for_gpus():
        return
    abstract = (jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((32, 64, 8), jnp.int32))
    exec(described, names | {"step": step_of(num_stages=16), "abstract": abstract})
    assert "H100" in capsys.readouterr().out


def has_compiler_for_gpus() -> bool:
    """Whether the extra `topology` is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


@pytest.mark.slow
def test_the_folder_of_the_page_on_fine_tuning_can_be_restored(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (block,) = blocks_of("finetuning")
    exec(block, {})
    weight = jax.ShapeDtypeStruct((2048, 128), np.float32)
    like = {"model": {"embed_tokens": {"weight": weight}}}
    assert np.isfinite(reshard.restore("DIR", like, partial=True)["model"]["embed_tokens"]["weight"]).all()


def test_the_setting_of_the_page_on_compilation_is_one():
    (block,) = blocks_of("compilation")
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        exec(block, {"jax": jax})
        assert jax.config.values["jax_compilation_cache_dir"] == "/shared/cache"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_ways_to_sum_gradients_once_give_those_of_plain_jax(number):
    block = blocks_of("compatibility")[number]
    kinds = (AxisType.Explicit if number == 0 else AxisType.Auto,) * 2
    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), kinds), "stage")
    w = jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) / WIDTH
    params = {"first": {"w": w[0]}, "last": {"w": w[1]}}
    xs = jax.random.normal(jax.random.key(1), (4, 8, WIDTH))

    def plain(params, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ params["first"]["w"]) @ params["last"]["w"]) ** 2)

    def step(params, batch):
        names = {"jax": jax, "jnp": jnp, "mpmd": mpmd, "P": P, "params": params, "batch": batch, "num_devices": 2}
        names |= {"schedule": "1f1b", "local_stage": lambda p, x: jnp.tanh(x @ p["w"][0])}
        names["loss_fn"] = lambda p, x: jnp.sum(
            stage(names, p["last"], mpmd.mark_stage_end(stage(names, p["first"], x))) ** 2
        )
        exec(block, names)
        return names["loss"], names["grads"]

    def stage(names, p, x):
        return jnp.tanh(x @ p["w"]) if number == 0 else names["stage"](p, x)

    rows = mpmd.MpmdSharding(mesh, (0, 1), P(None, "data"))
    whole = mpmd.MpmdSharding(mesh, (0, 1), P())
    compiled = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(whole, rows)).lower(params, xs).compile()
    value, grads = compiled(params, xs)
    wanted = [jax.value_and_grad(plain)(params, x) for x in xs]
    summed = jax.tree.map(lambda *parts: sum(parts), *wanted)
    for got, want in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)
    assert "a step, around the loops: " in compiled.explain()
