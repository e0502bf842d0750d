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
