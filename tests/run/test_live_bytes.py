"""The bytes that are alive while a step runs are those of its plan: nothing is held twice or for longer than needed."""

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpmd
import scheduler
from mpmd.report import memory


def _live(mesh: mpmd.MpmdMesh) -> dict[int, int]:
    """Bytes of all arrays that are alive, on a device of each group."""
    group_of = {device: group for group, part in enumerate(mesh.groups) for device in part.devices.flat}
    found = dict.fromkeys(range(len(mesh.groups)), 0)
    for array in jax.live_arrays():
        group = group_of.get(next(iter(array.sharding.device_set)))
        if group is not None and not array.is_deleted():
            found[group] += int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
    return found


def _loss(params: Any, x: jax.Array) -> jax.Array:
    for index, (w, b) in enumerate(params):
        x = jnp.tanh(x @ w + b)
        if index % 2 and index + 1 < len(params):
            x = mpmd.mark_stage_end(x)
    return jnp.mean(x * x)


@pytest.mark.parametrize(
    ("schedule", "devices_per_group"),
    [(scheduler.OneFOneB(3), 1), (scheduler.ZeroBubbleH1(3), 2)],
    ids=type,
)
@pytest.mark.slow
def test_the_bytes_that_are_alive_are_at_most_those_of_the_plan_and_reach_them(schedule, devices_per_group):
    shape = (3, devices_per_group)
    mesh = mpmd.MpmdMesh(jax.make_mesh(shape, ("stage", "data"), devices=jax.devices()[: np.prod(shape)]), "stage")
    optimizer = optax.adam(1e-3)

    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=0)
    def step(state, xs):
        params, moments = state
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(_loss)(params, x), xs, schedule=schedule, operation=mpmd.Mean
        )
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = [(np.eye(32, dtype=np.float32), np.zeros(32, np.float32)) for _ in range(6)]
    state = params, jax.tree.map(np.array, optimizer.init(params))
    compiled = step.lower(state, np.ones((6, 64, 32), np.float32)).compile()
    gc.collect()  # arrays of earlier tests would go in the middle of this one
    before = _live(mesh)  # other tests' arrays, and the numbers of the microbatches
    placed = mpmd.jit(lambda *xs: xs, mpmd_mesh=mesh, out_shardings=compiled.input_shardings[0])
    state, xs = placed(state, np.ones((6, 64, 32), np.float32))
    most = dict(before)

    def watched(act: Callable) -> Callable:
        def call(*args):
            result = act(*args)
            for group, nbytes in _live(mesh).items():
                most[group] = max(most[group], nbytes)
            return result

        return call

    executor = compiled._executor
    executor._instructions = [(code, act and watched(act), *others) for code, act, *others in executor._instructions]
    state, value = compiled(state, xs)
    assert np.isfinite(float(value))

    programs = compiled._programs
    sizes = memory.Sizes(programs.outline, mesh, programs.layouts)
    planned = {g: memory.peaks(compiled.program, g, sizes, lambda _: 0)["peak"] for g in mesh.local_groups}
    assert {g: most[g] - before[g] for g in planned} == planned
    reported = compiled.memory_analysis()  # which counts the temporaries of the executables too
    assert all(planned[g] <= reported[g]["peak"] <= planned[g] + reported[g]["temporaries"] for g in planned)
