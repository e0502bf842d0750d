"""Attention of examples/llama in chunks: the numbers of all scores at once, which it never holds."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs.parts import normal

import mpmd

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama.attention import CHUNK, attend, kernel_fault

sys.path.pop(0)

ROWS, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
SHORT, LONG = 40, 2 * CHUNK + 76  # the last chunk is not full


def all_at_once(q, k, v, window=0, segments=None, cap=None):
    at = jnp.arange(q.shape[1])
    seen = at[:, None] >= at
    if window:
        seen &= at[:, None] - at < window
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    weights = jax.nn.softmax(jnp.where(seen.reshape(-1, 1, *seen.shape[-2:]), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def arrays(length):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(ROWS, length, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [normal(key, *shape) for key, shape in zip(keys, shapes, strict=True)]


def documents(length):
    return jnp.array(np.sort(np.random.default_rng(0).integers(0, 5, (ROWS, length)), axis=1))


@pytest.mark.parametrize("length", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("window", "packed", "cap"),
    [
        (0, False, None),
        pytest.param(13, False, None, marks=pytest.mark.exhaustive),
        pytest.param(700, True, None, marks=pytest.mark.slow),
        (13, True, 2.0),
    ],
)
def test_the_values_and_gradients_are_those_of_all_scores_at_once(length, window, packed, cap):
    *operands, weights = arrays(length)
    segments = documents(length) if packed else None

    def of(function, **about):
        value = lambda *x: jnp.sum(function(*x, window=window, segments=segments, cap=cap, **about) * weights)  # noqa: E731
        return jax.jit(jax.value_and_grad(value, (0, 1, 2)))(*operands)

    found, expected = of(attend, scale=SIZE**-0.5), of(all_at_once)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4 if x.ndim == 0 else 1e-5)


@pytest.mark.slow
def test_a_window_may_be_data_so_that_a_scan_over_layers_has_one_for_each():
    q, k, v, _ = arrays(LONG)
    windows = (13, 0, 700)
    found = jax.lax.scan(lambda _, w: (None, attend(q, k, v, scale=SIZE**-0.5, window=w)), None, jnp.array(windows))[1]
    for x, window in zip(found, windows, strict=True):
        np.testing.assert_allclose(x, all_at_once(q, k, v, window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_array_of_the_program_has_two_axes_of_the_length(packed):
    *operands, weights = arrays(LONG)
    segments = documents(LONG) if packed else None

    def program(function):
        value = lambda *x: jnp.sum(function(*x, segments=segments) * weights)  # noqa: E731
        return jax.jit(jax.grad(value, (0, 1, 2))).lower(*operands).compile()

    square = re.compile(rf"\[(\d+,)*{LONG}(,\d+)*,{LONG}(,\d+)*\]")
    chunks = program(lambda *x, segments: attend(*x, scale=1.0, segments=segments))
    whole = program(all_at_once)
    assert not square.search(chunks.as_text())
    assert square.search(whole.as_text())
    scores = ROWS * HEADS * LONG * 4  # bytes, for each query
    assert whole.memory_analysis().temp_size_in_bytes > scores * LONG
    assert chunks.memory_analysis().temp_size_in_bytes < 3.5 * scores * CHUNK


@pytest.mark.slow
def test_stages_of_a_pipeline_give_the_losses_and_gradients_of_one_program():
    mesh = mpmd.MpmdMesh(
        jax.make_mesh((2, 1), ("stage", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2), "stage"
    )
    keys = jax.random.split(jax.random.key(1), 2)
    weights = [normal(key, SIZE, HEADS + 2 * KV_HEADS, SIZE) * SIZE**-0.5 for key in keys]
    xs = normal(jax.random.key(2), 2, ROWS, LONG, SIZE)
    segments = jnp.stack([documents(LONG)] * 2)

    def layer(w, x, segments, window):
        q, k, v = jnp.split(jnp.einsum("btd,dhk->bthk", x, w), [HEADS, HEADS + KV_HEADS], axis=2)
        return x + attend(q, k, v, scale=SIZE**-0.5, window=window, segments=segments).sum(2)

    def loss(weights, x, segments):
        x = mpmd.mark_stage_end(layer(weights[0], x, segments, 0))
        return jnp.mean(layer(weights[1], x, segments, 300) ** 2)

    def step(weights, xs, segments):
        one = lambda batch: jax.value_and_grad(loss)(weights, *batch)  # noqa: E731
        return mpmd.treduce(one, (xs, segments), schedule="1f1b")

    found = mpmd.device_get(mpmd.jit(step, mpmd_mesh=mesh)(weights, xs, segments))
    expected = jax.jit(step)(weights, xs, segments)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


def test_on_other_devices_than_gpus_it_says_that_there_is_no_kernel():
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    assert kernel_fault(mesh, KV_HEADS, SIZE, jnp.bfloat16) == "the devices are no NVIDIA GPUs"
