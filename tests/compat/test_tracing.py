"""A step is traced and lowered once for all devices of a shape, and compiled once for all processes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from programs.parts import regression_batch, residual, squared_error, stages_params
from programs.program import assert_same, host

import mpmd
import scheduler

ROOT = Path(__file__).parent.parent.parent

SECOND_START = """
import jax, jax.numpy as jnp, mpmd, scheduler

counts = {"hits": 0, "compiled": 0}
def listen(event, **_):
    counts["hits"] += event == "/jax/compilation_cache/cache_hits"
    counts["compiled"] += event == "/jax/compilation_cache/cache_misses"
jax.monitoring.register_event_listener(listen)
mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data")), "stage")
def loss(w, x): return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)
def step(w, xs):
    grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(2))
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
w = mpmd.jit(step, mpmd_mesh=mesh)([jnp.eye(4)] * 2, jnp.ones((4, 2, 4)))
print(counts["hits"], counts["compiled"], float(w[0].first_mpmd_replica.sum()))
"""


def test_the_second_start_finds_every_program_in_jaxs_compilation_cache(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SECOND_START],
            env=environment,
            text=True,
            capture_output=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        runs.append(done.stdout.split())
    (hits, compiled, value), (hits_again, compiled_again, value_again) = runs
    assert int(compiled) > 4
    assert (int(compiled_again), int(hits_again)) == (0, int(hits) + int(compiled))
    assert value == value_again


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_same_step_on_other_devices_of_the_same_shape_is_not_traced_again(axis_type):
    traces = 0

    def loss(params, m):
        nonlocal traces
        traces += 1
        x = mpmd.mark_stage_end(residual(params[0], m["x"]))
        return squared_error(residual(params[1], x), m["y"])

    def step(params, batch):
        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, m), batch, schedule=scheduler.OneFOneB(2)
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    devices = jax.devices()
    meshes = [
        mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), (axis_type,) * 2, devices=devices[i : i + 4]), "stage")
        for i in (0, 4)
    ]
    arguments = stages_params(jax.random.key(0), 2), regression_batch(jax.random.key(1))
    jitted = mpmd.jit(step, mpmd_mesh=meshes[0])
    traced = jitted.trace(*arguments)
    before = traces
    results = [traced.lower(mpmd_mesh=mesh).compile()(*arguments) for mesh in meshes]
    assert traces == before
    assert_same(host(results[1]), host(results[0]), 0)
    for mesh, (params, _) in zip(meshes, results, strict=True):
        assert params[1]["w"].first_mpmd_replica is None or params[1]["w"].mpmd_sharding.mpmd_mesh == mesh
        assert params[1]["w"].to_mpmd_local_array.devices() == set(mesh.groups[1].devices.flat)
    again = mpmd.jit(step, mpmd_mesh=meshes[1]).trace(*arguments)
    assert traces == before and repr(again) == ("Traced(step: 9 equations; OneFOneB(num_stages=2), 4 microbatches)")
    other = mpmd.MpmdMesh(jax.make_mesh((2, 1), ("stage", "data"), devices=devices[:2]), "stage")
    with pytest.raises(ValueError) as raised:
        traced.lower(mpmd_mesh=other)
    assert str(raised.value) == (
        "Traced.lower: the step was traced for MpmdMesh('stage': 2, 'data': 2; 2 groups along 'stage'), which has"
        " another shape or other axes than MpmdMesh('stage': 2, 'data': 1; 2 groups along 'stage').\n"
        "  Trace it again: mpmd.jit(step, mpmd_mesh=...).trace(*args)."
    )
    assert jnp.isfinite(results[0][1].first_mpmd_replica)


def test_a_step_whose_surroundings_have_changed_is_traced_again():
    schedule, factor, calls = scheduler.OneFOneB(2), 2.0, 0

    def scaled(x):
        return factor * x

    def step(w, xs):
        nonlocal calls
        calls += 1
        return mpmd.treduce(
            lambda x: jnp.sum(scaled(mpmd.mark_stage_end(x * w)) * w), xs, schedule=schedule, operation=mpmd.Add
        )

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    w, xs = jnp.ones(3), jnp.ones((4, 3))

    def run():
        return float(mpmd.jit(step, mpmd_mesh=mesh)(w, xs))

    assert (run(), run(), calls) == (24.0, 24.0, 1)
    factor = 3.0
    assert (run(), calls) == (36.0, 2)
    schedule = scheduler.GPipe(2)
    assert "GPipe" in repr(mpmd.jit(step, mpmd_mesh=mesh).trace(w, xs)) and calls == 3
