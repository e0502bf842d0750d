"""Many steps of a small pipeline in one process: nothing that a step makes stays behind."""

import gc
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import slow_first

import mpmd
import scheduler


def _held() -> dict[str, int]:
    """What this process holds after a collection."""
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "arrays": len(jax.live_arrays()),
        "bytes": tracemalloc.get_traced_memory()[0],
        "threads": threading.active_count(),
    }


@pytest.mark.parametrize("num_steps", slow_first(1_000, 10_000), ids=str)
@pytest.mark.parametrize("shape", slow_first([2, 2], [2, 1]), ids=str)
def test_many_steps_leave_nothing_behind(shape, num_steps):
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = mpmd.MpmdMesh(jax.make_mesh(shape, ("stage", "data"), devices=devices), "stage")

    def loss(w, x):
        return jnp.sum((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)

    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=0)
    def step(w, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(2), operation=mpmd.Mean
        )
        return jax.tree.map(lambda p, g: p - 0.01 * g, w, grads), value

    w, xs = [np.eye(4, dtype=np.float32)] * 2, np.ones((2, 2, 4), np.float32)
    tracemalloc.start()
    try:
        for index in range(num_steps):
            w, value = step(w, xs)
            if index % 50 == 49:
                value.block_until_ready()
            if index == 199:
                before = _held()
        after = _held()
    finally:
        tracemalloc.stop()
    assert np.isfinite(float(value))
    assert after["arrays"] == before["arrays"] and after["threads"] == before["threads"], (before, after)
    assert after["objects"] - before["objects"] < 200, (before, after)
    assert after["bytes"] - before["bytes"] < 100_000, (before, after)
