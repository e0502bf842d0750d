"""Sums of gradients round, overflow and count as those of plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler


def pipelined(step, *args):
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    return mpmd.jit(step, mpmd_mesh=mesh)(*args)


def reshaped(w, x, scale):
    """Master weights of float32, cast and cut in rows that two stages read."""
    rows = w.astype(jnp.bfloat16).reshape(2, 2, 4)
    h = mpmd.mark_stage_end(x.astype(jnp.bfloat16) * rows[0, 0] * rows[0, 1])
    return jnp.sum((h * rows[1, 0] * rows[1, 1]).astype(jnp.float32))


def scaled(w, x, scale):
    narrow = w.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    return jnp.sum((mpmd.mark_stage_end(x.astype(jnp.bfloat16) * narrow) * narrow).astype(jnp.float32))


@pytest.mark.parametrize("loss", [reshaped, scaled])
def test_gradients_of_stages_that_are_cast_are_summed_as_wide_as_they_are(loss):
    def step(w, xs, scale):
        return mpmd.treduce(lambda x: jax.grad(loss)(w, x, scale), xs, schedule=scheduler.OneFOneB(2))

    args = jnp.ones(16 if loss is reshaped else 4), jnp.ones((1024, 4)), jnp.ones(4)
    np.testing.assert_array_equal(pipelined(step, *args), jax.jit(step)(*args))


def test_float16_is_scaled_before_it_is_summed():
    def step(w, xs, scale):
        def f(x):
            grad = jax.grad(lambda w: jnp.sum((mpmd.mark_stage_end(x * w) * w).astype(jnp.float32)))(w)
            return grad * scale

        return mpmd.treduce(f, xs, schedule=scheduler.OneFOneB(2))

    args = jnp.ones(4, jnp.float16), jnp.full((64, 4), 3000, jnp.float16), jnp.float16(1 / 1024)
    got, want = pipelined(step, *args), jax.jit(step)(*args)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got, want)


def test_the_index_of_an_output_that_no_microbatch_changes_is_an_int32():
    class Indexed(mpmd.Operation):
        def init(self, aval, num_microbatches):
            return self.full(aval, 0, dtype=np.int32)

        def update(self, acc, x, index):
            return acc + x * index

    def step(w, xs):
        fun = lambda x: (jnp.sum(mpmd.mark_stage_end(x * w)), jnp.full((2,), 100, jnp.int8))  # noqa: E731
        return mpmd.treduce(fun, xs, schedule=scheduler.OneFOneB(2), operation=(mpmd.Add, Indexed()))

    assert pipelined(step, jnp.ones(3), jnp.ones((6, 3)))[1].tolist() == [1500, 1500]


@pytest.mark.slow
def test_means_of_sums_of_small_integers_wrap_as_they_are_written():
    def counts(w, x):
        grads = jax.grad(lambda w: jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2))(w)
        few = [(g > 0.0).sum().astype(jnp.uint8) for g in grads]
        return few[1] - few[0], jnp.uint8(9) * few[0] + jnp.uint8(9) * few[1]

    def step(w, xs):
        return mpmd.treduce(lambda x: counts(w, x), xs, schedule="1f1b", operation=mpmd.Mean)

    args = list(jax.random.normal(jax.random.key(0), (2, 8, 8))), jax.random.normal(jax.random.key(1), (4, 2, 8))
    for got, want in zip(pipelined(step, *args), jax.jit(step)(*args), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("loss", ["used a thousand times", "of many paths"])
def test_a_gradient_of_very_many_summands_takes_no_time_to_cut(loss):
    """Each smoothing doubles the paths to the first value: 2²⁴ of them."""

    def value(params, x):
        s = params["s"]
        if loss == "of many paths":
            for _ in range(24):
                s = (s[1:] + s[:-1]) / 2
            x = x.sum() * s
        for _ in range(1100 if loss == "used a thousand times" else 0):
            x = x * s
        return ((mpmd.mark_stage_end(x) + params["t"]) ** 2).mean() + params["s"].sum()

    def step(params, xs):
        return mpmd.treduce(lambda x: jax.grad(value)(params, x), xs, schedule="1f1b")

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    args = {"s": jnp.arange(30.0), "t": jnp.ones(())}, jnp.ones((4, 30))
    lowered = mpmd.jit(step, mpmd_mesh=mesh).lower(*args)
    if loss == "of many paths":
        got, want = lowered.compile()(*args), jax.jit(step)(*args)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, want)
