"""The examples of the libraries train. That such models equal plain JAX is in test_libraries."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("train_nnx", "flax"), ("train_equinox", "equinox")])
def test_an_example_trains(name, package, capsys):
    pytest.importorskip(package)
    losses = importlib.import_module(name).main(["--steps", "12"])
    assert losses[-1] < 0.8 * losses[0], losses
    assert capsys.readouterr().out.splitlines()[-1] == f"step   11  loss {losses[-1]:.4f}"


_SMALL = "--stages 2 --layers 2 --d-model 32".split()


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["here", "before"])
def test_requests_in_flight_get_the_text_that_they_get_one_at_a_time(trained, tmp_path, capsys):
    pytest.importorskip("optax")
    if trained == "before":
        train = [
            *_SMALL,
            *"--steps 3 --batch 4 --microbatches 2 --seq-len 16".split(),
            "--checkpoint-dir",
            str(tmp_path),
        ]
        assert importlib.import_module("train_gpt").main(train) == 0
        capsys.readouterr()
    source = ["--steps", "2"] if trained == "here" else ["--checkpoint-dir", str(tmp_path)]
    status = importlib.import_module("generate").main([*_SMALL, *source, *"--requests 2 --rows 2 --length 5".split()])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert [line.partition(":")[0] for line in lines if line.endswith("tokens/s")] == [
        "one request at a time", "2 requests in flight"
    ]  # fmt: skip
    assert "the same text" in lines
    assert sum(line.startswith("def ") for line in lines) == 2


@pytest.mark.slow
def test_answers_get_better_by_rewards_alone_with_the_numbers_of_jit(capsys):
    pytest.importorskip("optax")
    assert importlib.import_module("grpo").main(["--steps", "40", "--check-against-jit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rewards = [float(line.split("reward ")[1].split()[0]) for line in lines[:-1]]
    assert lines[-1] == "rewards and losses are those of jax.jit"
    assert rewards[0] < 0.15 and rewards[-1] > 0.25
