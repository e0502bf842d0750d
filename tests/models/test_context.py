"""Rows of examples/llama that devices divide: the numbers of attention on one device, whoever holds the keys."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from programs.parts import normal

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama.attention import attend
from llama.context import AXIS, attend_in_ring, zigzag

sys.path.pop(0)

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 64, 4, 2, 8


def test_each_device_has_a_chunk_of_the_beginning_and_one_of_the_end():
    assert zigzag(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert zigzag(3, 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("parts", "window", "packed", "cap"),
    [
        pytest.param(2, 0, False, None, marks=pytest.mark.slow, id="whole rows"),
        pytest.param(4, 13, True, 2.0, marks=pytest.mark.slow, id="documents"),
    ],
)
def test_the_values_and_gradients_are_those_of_one_device(monkeypatch, parts, window, packed, cap):
    monkeypatch.setattr("llama.context.CHUNK", 4)
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    *operands, weights = (normal(k, ROWS, LENGTH, n, SIZE) for k, n in zip(keys, heads, strict=True))
    documents = jnp.array(np.sort(np.random.default_rng(0).integers(0, 5, (ROWS, LENGTH)), axis=1)) if packed else None

    def of(function, order):
        def value(*operands):
            q, k, v = (x[:, order] for x in operands)
            segments = documents[:, order] if packed else None
            seen = function(q, k, v, scale=SIZE**-0.5, window=window, segments=segments, cap=cap)
            return jnp.sum(seen * weights[:, order])

        return jax.jit(jax.value_and_grad(value, (0, 1, 2)))(*operands)

    expected = of(attend, np.arange(LENGTH))
    with jax.set_mesh(jax.make_mesh((parts,), (AXIS,), (AxisType.Auto,))):
        found = of(attend_in_ring, zigzag(LENGTH, parts))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4 if x.ndim == 0 else 1e-5)
