"""The benchmark of published runs: their shapes, its table, and a small run predicted from end to end."""

import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from plugins import needs_plugin

PATH = Path(__file__).parents[2] / "benchmarks" / "published.py"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["published"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["published"]


PARAMETERS = {  # as the names of the models say, in billions
    "gpt3-175b": 175, "llama3.1-70b": 70, "llama2-70b-fsdp": 70, "llama3.1-8b": 8, "nemotron4-15b": 15,
    "nemotron4-340b": 340, "llama3.1-405b": 405, "torchtitan-8b": 8, "marin-67b-a2b": 67,
}  # fmt: skip
TOKENS = {  # of a step: the global batch of the source by its length
    "gpt3-175b": 256 * 2048, "llama3.1-70b": 128 * 8192, "llama2-70b-fsdp": 128 * 4096, "llama3.1-8b": 128 * 8192,
    "nemotron4-15b": 64 * 4096, "nemotron4-340b": 32 * 4096, "llama3.1-405b": 252 * 8192,
    "llama3.1-405b-7layers": 126 * 8192, "torchtitan-8b": 16 * 8192, "torchtitan-8b-128": 256 * 8192,
    "marin-67b-a2b": 256 * 8192, "marin-67b-a2b-16": 128 * 8192,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_run_has_as_many_parameters_as_its_name_says(published, name):
    specs = published.Step(published.RUNS[name], None).specs()
    sizes = [math.prod(shape) for shape, _ in jax.tree.leaves(specs, is_leaf=published._is_entry)]
    assert sum(sizes) / 1e9 == pytest.approx(PARAMETERS[name], rel=0.05)


@pytest.mark.parametrize("name", TOKENS)
def test_a_run_has_the_global_batch_of_its_source(published, name):
    assert published.RUNS[name].tokens == TOKENS[name]


def test_a_prediction_beyond_its_bound_is_bold(published):
    run = published.Run("a paper", "https://x", published.GPT3, data=8, seconds=2.0, memory=10e9, note="why")
    group = SimpleNamespace(memory={"peak": 12_000_000_000})
    plan = SimpleNamespace(step=SimpleNamespace(seconds=2.2), groups=[group])
    cells = published.row("name", run, published.Prediction(plan, (0.5, 0.25, 0.125, 0.125)))
    assert cells == [
        "name",
        "[a paper](https://x)",
        "8 h100",
        "DP8",
        "2",
        "2.2",
        "+10%",
        "10.0 / 12.0",
        "**+20%**",
        "50% 25% 12% 12%",
        "why",
    ]


@needs_plugin
@pytest.mark.slow
def test_a_small_run_is_predicted_from_end_to_end(published):
    shape = published.Model(8, 256, 8, 4, 512, 1024, 256)
    pipeline = {"groups": 2, "virtual": 2, "data": 2, "model": 2, "microbatches": 4, "schedule": "interleaved-1f1b"}
    run = published.Run("nobody", "", shape, **pipeline, seconds=1.0)
    found = published.predict(run)
    assert sum(found.parts) == pytest.approx(1.0)
    tasks = found.plan.groups[1].tasks
    kinds = {name[0]: {c.kind: c.times for c in tasks[name].collectives} for name in ("F1", "B1")}
    of_two_layers = {"all-gather", "reduce-scatter"}  # Megatron's: no gradient is summed over replicas in a task
    assert set(kinds["F"]) == set(kinds["B"]) == of_two_layers
