"""examples/llama: the pipeline's losses are those of one device, and a run goes on elsewhere with the same losses."""

import csv
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example():
    """The modules of the example, which lie beside each other and not in a package."""
    pytest.importorskip("grain")
    sys.path.insert(0, str(ROOT / "examples" / "llama"))
    try:
        yield importlib.import_module("train")
    finally:
        sys.path.remove(str(ROOT / "examples" / "llama"))
        for name in ("train", "model", "data", "logs"):
            sys.modules.pop(name, None)


FAMILIES = {
    "llama": {"rope_scaling": (8.0, 1.0, 4.0, 16.0)},
    "qwen": {"qk_norm": True, "qkv_bias": True, "tied": True},
    "gemma": {
        "norm_plus_one": True, "post_norms": True, "scale_embedding": True, "tied": True, "activation": "gelu",
        "attention_cap": 50.0, "logit_cap": 30.0, "windows": (8, 0, 8, 0),
    },
    "mixtral": {"experts": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", "--groups 4 --schedule 1f1b"),
        ("qwen", "--groups 2 --data 2 --schedule interleaved-1f1b"),
        ("gemma", "--groups 2 --tensor 2 --schedule zb-h1 --muon"),
        ("mixtral", "--groups 2 --schedule 1f1b --lora 4"),
    ],
)
def test_the_losses_are_those_of_one_device(example, family, options):
    options = example.parse([*options.split(), *"--microbatches 4 --batch 8 --length 32 --steps 20".split()])
    config = example.Config(
        width=64, hidden=96, layers=4, head_dim=16, dtype=jnp.float32, lora_rank=options.lora, **FAMILIES[family]
    )
    batches = example.Batches([], example.tokenizer_of(None), options.batch, options.length, options.microbatches)
    program = example.Program(config, options, example.make_mesh(options))
    abstract, batch = program.abstract()
    compiled = program.step.lower(abstract, batch).compile()
    make = example.mpmd.jit(program.init, mpmd_mesh=program.mesh, out_shardings=compiled.input_shardings[0][0])
    state, plain_state = make(jax.random.key(0)), program.init(jax.random.key(0))
    plain = jax.jit(program._step)
    for step in range(5):
        state, metrics = compiled(state, batches.at(step))
        plain_state, expected = plain(plain_state, batches.at(step))
        np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=2e-5)
        np.testing.assert_allclose(float(metrics["grad_norm"]), float(expected["grad_norm"]), rtol=1e-3)


def test_a_run_goes_on_with_other_groups_and_the_same_examples(tmp_path):
    pytest.importorskip("grain")

    def run(log: str, *options: str) -> dict[int, float]:
        command = [sys.executable, ROOT / "examples" / "llama" / "train.py", "--layers", "4", "--width", "64"]
        small = "--microbatches 4 --batch 8 --length 32 --report-every 1 --eval-every 6 --eval-batches 1".split()
        done = subprocess.run(
            [*command, *small, "--log", tmp_path / log, *options],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            text=True, capture_output=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        rows = list(csv.DictReader((tmp_path / log / "metrics.csv").open()))
        assert any(row["name"] == "held_out_loss" for row in rows)
        return {int(row["step"]): float(row["value"]) for row in rows if row["name"] == "loss"}

    whole = run("whole", "--steps", "6")
    saved = ("--checkpoint-dir", str(tmp_path / "run"), "--lr", "3e-3")
    begun = run("begun", "--steps", "6", "--save-every", "3", "--groups", "4", *saved)
    assert begun == whole
    for step in (4, 5, 6):  # as if the job had ended after step 3
        for newer in (tmp_path / "run").glob(str(step)):
            shutil.rmtree(newer)
    resumed = run("resumed", "--steps", "6", "--groups", "2", "--generate", "import ", *saved)
    assert sorted(resumed) == [4, 5, 6]
    for step, loss in resumed.items():
        assert loss == pytest.approx(whole[step], rel=2e-3)  # bfloat16, in other stages
