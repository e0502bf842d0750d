"""Stacked arrays whose rows a Python loop reads: each group holds the rows of its stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import mpmd
import scheduler

LAYERS, WIDTH = 7, 6
STAGES = ((0, 1), (2,), (3, 4))  # layers 5 and 6 are read by nobody


def loss(params, x):
    shifts, down = jnp.unstack(params["shift"]), params["down"].astype(jnp.bfloat16).astype(jnp.float32)
    for stage, layers in enumerate(STAGES):
        for i in layers:
            x = x + jnp.tanh(x @ params["up"][i] + shifts[i]) @ down[i]
        x = x + params["shared"][0]  # read by all stages
        x = mpmd.mark_stage_end(x) if stage < len(STAGES) - 1 else x
    return (x**2).mean()


def make_step(optimizer, schedule):
    def step(state, xs):
        params, moments = state
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=schedule, operation=mpmd.Mean
        )
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_a_loop_slices_are_in_the_group_that_reads_them(axis_type):
    mesh = mpmd.MpmdMesh(jax.make_mesh((3,), ("stage",), (axis_type,), devices=jax.devices()[:3]), "stage")
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) * 0.3,
        "down": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) * 0.3,
        "shift": jnp.zeros((LAYERS, WIDTH)),
        "shared": jnp.zeros((2, WIDTH)),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    step = make_step(optimizer, scheduler.ZeroBubbleH1(3))
    plain, pipelined = jax.jit(step), mpmd.jit(step, mpmd_mesh=mesh)
    expected = state = (params, optimizer.init(params))
    for seed in range(2):
        xs = np.random.default_rng(seed).normal(size=(4, 2, WIDTH)).astype(np.float32)
        expected, expected_loss = plain(expected, xs)
        state, value = pipelined(state, xs)
    np.testing.assert_allclose(float(value), float(expected_loss), rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        mpmd.device_get(state),
        jax.device_get(expected),
    )
    moments = state[1][1][0]
    for tree in (state[0], moments.mu, moments.nu):
        for name in ("up", "down", "shift"):
            assert tree[name].mpmd_sharding.split == {0: ((0, 2),), 1: ((2, 3),), 2: ((3, LAYERS),)}, name
        assert not tree["shared"].mpmd_sharding.split
