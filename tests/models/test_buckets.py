"""examples/llama: documents in buckets by length, dealt so that the work is even; every token comes once in a pass."""

import collections
import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FOLDER = str(Path(__file__).parents[2] / "examples" / "llama")


@pytest.fixture(scope="module", autouse=True)
def example():
    """The modules of the example, which lie beside each other and not in a package."""
    pytest.importorskip("grain")
    sys.path.insert(0, FOLDER)
    try:
        yield importlib.import_module("buckets")
    finally:
        sys.path.remove(FOLDER)
        for name in ("model", "attention", "data", "buckets", "balance"):
            sys.modules.pop(name, None)


def cost(tokens):
    return 1000 * tokens + tokens**2


@settings(max_examples=50)
@given(st.lists(st.integers(0, 500), max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_each_document_is_dealt_once_and_loads_differ_by_one_document_at_most(lengths, microbatches, data):
    balance = importlib.import_module("balance")
    dealt = balance.deal_documents(lengths, cost, microbatches, data)
    assert dealt == balance.deal_documents(lengths, cost, microbatches, data)
    assert [len(parts) for parts in dealt] == [data] * microbatches
    parts = [part for microbatch in dealt for part in microbatch]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert max(map(len, parts)) <= -(-len(lengths) // len(parts))
    loads = [sum(cost(lengths[i]) for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(map(cost, lengths), default=0) * (1 + 1e-6)


def test_the_most_loaded_part_is_close_to_the_mean():
    balance, rng = importlib.import_module("balance"), np.random.default_rng(0)
    for parts, each in ((4, 8), (16, 8), (64, 16)):
        lengths = np.minimum(rng.lognormal(5, 1, parts * each).astype(int), 512)
        loads = [sum(cost(lengths[i]) for i in part) for part in balance.deal([cost(n) for n in lengths], parts)]
        in_order = [sum(map(cost, lengths[k : k + each])) for k in range(0, parts * each, each)]
        assert max(loads) < 1.02 * sum(loads) / parts < 0.8 * max(in_order)


def test_microbatches_of_all_lengths_cost_about_as_much():
    rows = importlib.import_module("balance").rows_of((64, 128, 256, 1024), cost, 4, data=2)
    assert rows == {64: 122, 128: 58, 256: 26, 1024: 4}
    works = [n * cost(length) for length, n in rows.items()]
    assert max(works) / min(works) < 1.05


@pytest.fixture
def text(tmp_path):
    """Documents of 1 to 99 bytes, among them long ones; each has bytes of its own."""
    rng = np.random.default_rng(0)
    for i in range(130):
        (tmp_path / f"{i:03}.txt").write_bytes(bytes([i + 1]) * int(rng.integers(1, 100)))
    return tmp_path


def pairs(batch):
    """How often each pair of a token and its target counts."""
    found = collections.Counter()
    for microbatch in batch:
        counts = microbatch["weights"] == 1
        assert (counts | (microbatch["weights"] == 0)).all()
        assert (np.diff(counts.astype(int)) <= 0).all()  # padding is behind
        found.update(zip(microbatch["tokens"][counts].tolist(), microbatch["targets"][counts].tolist(), strict=True))
    return found


def test_every_token_comes_once_in_a_pass_and_a_step_says_all(example, text):
    rows = {16: 8, 32: 4, 48: 2}
    tokens = importlib.import_module("data").Bytes()
    batches = example.BatchesByLength([str(text)], tokens, rows, cost, 4, data=2)
    files = sorted(text.iterdir())
    for held_out in (False, True):
        expected = collections.Counter()
        for i, file in enumerate(files):
            if (i % 20 == 0) == held_out:
                content = [*file.read_bytes(), 0]
                expected.update(itertools.pairwise(content))
        one = batches.held_out if held_out else batches.train
        steps = len(one.order)  # 4 passes, since a step has 4 microbatches
        seen = sum((pairs(batches.at(step, held_out)) for step in range(steps)), collections.Counter())
        assert seen == collections.Counter({pair: 4 * count for pair, count in expected.items()})
    shapes = {microbatch["tokens"].shape for step in range(9) for microbatch in batches.at(step)}
    assert shapes == {(8, 16), (4, 32), (2, 48)} == {x["tokens"].shape for x in batches.at(0)}
    again = example.BatchesByLength([str(text)], tokens, rows, cost, 4, data=2)
    for step in (7, 3):
        for one, other in zip(again.at(step), batches.at(step), strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
    real = np.mean([sum(x["weights"].sum() for x in batches.at(step)) for step in range(len(batches.train.order))])
    assert batches.per_step(float) == pytest.approx(real)


def test_sources_are_mixed_by_their_weights_in_tokens(example, tmp_path):
    for name, size in (("a", 40), ("b", 10)):
        (tmp_path / name).mkdir()
        for i in range(60):
            (tmp_path / name / f"{i:02}.txt").write_bytes(name.encode() * size)
    tokens = importlib.import_module("data").Bytes()
    sources = [f"{tmp_path}/a", f"{tmp_path}/b=3"]
    batches = example.BatchesByLength(sources, tokens, {16: 8, 48: 2}, cost, 4)
    seen = sum((pairs(batches.at(step)) for step in range(len(batches.train.order))), collections.Counter())
    of = [sum(n for (token, _), n in seen.items() if token == ord(name)) for name in "ab"]
    assert of[1] / of[0] == pytest.approx(3, rel=0.05)
