"""A step is traced and lowered once for all devices of a shape, and compiled once for all processes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs.parts import regression_batch, residual, squared_error, stages_params
from programs.pipelines import make_mesh
from programs.program import assert_same, host
from samples import slow_first

import mpmd
import scheduler
from mpmd.errors import StageError

ROOT = Path(__file__).parent.parent.parent

STARTED = """
import jax, jax.numpy as jnp, mpmd, scheduler

counts = {"hits": 0, "compiled": 0}
def listen(event, **_):
    counts["hits"] += event == "/jax/compilation_cache/cache_hits"
    counts["compiled"] += event == "/jax/compilation_cache/cache_misses"
jax.monitoring.register_event_listener(listen)
mesh = mpmd.MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
def loss(w, x):
    for i, p in enumerate(w): x = jnp.tanh((mpmd.mark_stage_end(x) if i else x) @ p)
    return jnp.mean(jnp.sort(x) ** 2)
def step(w, xs):
    grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(4))
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
w, xs = [jnp.eye(4) + i for i in range(4)], jnp.ones((4, 2, 4))
compiled = mpmd.jit(step, mpmd_mesh=mesh).lower(w, xs).compile()
for _ in range(2): w = compiled(w, xs)
loaded = compiled.explain().split(" copies of these")[0].split()[-1]
print(counts["hits"], counts["compiled"], loaded, *(float(p.first_mpmd_replica.sum()) for p in w))
"""


def _started(**environment):
    """A process with JAX's defaults beside `environment`: cache hits, programs written, loaded, and the results."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", STARTED],
        env=kept | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT), **environment},
        text=True,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    hits, written, loaded, *values = done.stdout.split()
    return int(hits), int(written), int(loaded), values


@pytest.mark.slow
def test_equal_stages_are_loaded_by_jaxs_defaults_and_with_a_cache_folder_at_every_start(tmp_path):
    hits, written, loaded, values = _started()
    assert (hits, written) == (0, 0) and loaded > 4
    runs = [_started(JAX_COMPILATION_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    (_, compiled, *first), (hits, compiled_again, *second) = runs
    assert (compiled_again, hits) == (0, compiled) and compiled > 4
    assert first == second == [loaded, values]


@pytest.mark.parametrize("axis_type", slow_first(AxisType.Explicit, AxisType.Auto), ids=str)
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


def test_arguments_in_star_args_are_named_by_position_in_errors():
    def step(w, *more, **options):
        return w, more

    mesh = mpmd.MpmdMesh(make_mesh(2, AxisType.Auto, ("data",)), "stage")
    for fun, name in ((step, "args[1]['x']"), (lambda *a, **k: a, "args[1]['x']"), (lambda a, b, *, c=0: b, "b['x']")):
        with pytest.raises(ValueError) as raised:
            mpmd.jit(fun, mpmd_mesh=mesh, in_shardings=(None, P("data"))).lower(jnp.ones(2), {"x": jnp.ones(3)})
        assert str(raised.value).startswith(
            f"mpmd.jit: the sharding P('data',) of {name} does not fit its shape (3,) in group 0.\n"
        )


@pytest.mark.parametrize("is_named", [True, False])
def test_a_function_of_shard_map_can_be_called_after_a_step_as_before(is_named):
    """JAX keeps the mesh of a call in the function; the mesh of a step has no devices."""
    whole = jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=whole if is_named else None, in_specs=P("data"), out_specs=P()
    )
    x, w = np.arange(8, dtype=np.float32).reshape(4, 2), np.eye(2, dtype=np.float32)

    def step(w, x):
        return summed(mpmd.mark_stage_end(x @ w)) * 2

    pipelined = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(whole, "stage"))
    got = pipelined(w, x)
    with jax.set_mesh(whole):
        np.testing.assert_array_equal(mpmd.device_get(got), jax.jit(step)(w, x))
        np.testing.assert_array_equal(summed(x), x[:2] + x[2:])
    np.testing.assert_array_equal(mpmd.device_get(pipelined(w, x)), mpmd.device_get(got))


def test_a_shard_map_in_a_group_with_an_axis_of_another_size_is_refused():
    groups = [jax.sharding.Mesh(np.array(jax.devices()[i:j]), ("data",)) for i, j in ((0, 2), (2, 6))]
    mean = jax.shard_map(
        lambda x: jax.lax.pmean(jax.lax.pcast(x, "data", to="varying"), "data"), in_specs=P(), out_specs=P()
    )
    step = mpmd.jit(lambda x: mean(mpmd.mark_stage_end(x * 2) + 1), mpmd_mesh=mpmd.MpmdMesh.from_groups(groups))
    with pytest.raises(
        StageError, match="A shard_map over 'data' was traced for 2 devices along it, and the group has 4"
    ):
        step(np.ones(4, np.float32))
