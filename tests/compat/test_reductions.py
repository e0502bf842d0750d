"""Gradients are summed over the data axis once per step, after the last microbatch, where the step says so."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs.parts import WIDTH, dense_params, normal, squared_error
from programs.pipelines import in_turns, make_mesh
from programs.program import assert_same, host

import mpmd
import scheduler
from mpmd.report.explain import collectives

ROWS = 4


def _arguments():
    params = [dense_params(k) for k in jax.random.split(jax.random.key(0), 2)]
    return params, {name: normal(jax.random.key(i), 4, ROWS, WIDTH) for i, name in enumerate("xy")}


def _stages(params, m, layer, rows):
    x, y = rows(m["x"]), rows(m["y"])
    for stage, p in enumerate(params):
        x = x if stage == 0 else mpmd.mark_stage_end(x)
        x = x + jnp.tanh(layer(p, x))
    return x, y


def _plain(params, batch, schedule=None, operation=mpmd.Mean):
    def loss(params, m):
        return squared_error(*_stages(params, m, lambda p, x: x @ p["w"] + p["b"], lambda x: x))

    value, grads = mpmd.treduce(
        lambda m: jax.value_and_grad(loss)(params, m), batch, schedule=schedule, operation=operation
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


# --- Explicit axes: unreduced gradients -----------------------------------------------------------


def _unreduced(params, batch, schedule, operation=mpmd.Mean):
    def layer(p, x):
        h = x @ p["w"]
        return h + jax.reshard(jnp.broadcast_to(p["b"], h.shape), P("data", None))

    def loss(params, m):
        return squared_error(*_stages(params, m, layer, lambda x: jax.reshard(x, P("data", None))))

    once = jax.tree.map(lambda p: jax.reshard(p, P(reduced={"data"})), params)
    value, grads = mpmd.treduce(
        lambda m: jax.value_and_grad(loss)(once, m), batch, schedule=schedule, operation=operation
    )
    grads = jax.tree.map(lambda g: jax.reshard(g, P()), grads)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


# --- any axes: one gradient for each device -------------------------------------------------------


def _per_device(params, batch, schedule, operation=mpmd.Mean):
    """Parameters with an axis of devices in front: `shard_map` gives each its own gradient, summed after the loop."""

    def local(p, x):
        return x + jnp.tanh(x @ p["w"][0] + p["b"][0])

    rows, own = P("data", None), P("data")

    def loss(params, m):
        x, y = (_put(m[name], rows) for name in "xy")
        for stage, p in enumerate(params):
            x = x if stage == 0 else mpmd.mark_stage_end(x)
            x = jax.shard_map(local, in_specs=(own, rows), out_specs=rows)(p, x)
        return squared_error(x, y)

    copies = jax.tree.map(lambda p: _put(jnp.broadcast_to(p, (2, *p.shape)), own), params)
    value, grads = mpmd.treduce(
        lambda m: jax.value_and_grad(loss)(copies, m), batch, schedule=schedule, operation=operation
    )
    return jax.tree.map(lambda p, g: p - 0.1 * jnp.sum(g, 0), params, grads), value


def _put(x, spec):
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.reshard(x, spec) if explicit else jax.lax.with_sharding_constraint(x, spec)


@pytest.mark.parametrize(
    ("step", "axis_type", "schedule", "operation"),
    in_turns(
        [(_unreduced, AxisType.Explicit), (_per_device, AxisType.Explicit), (_per_device, AxisType.Auto)],
        [(scheduler.OneFOneB(2), mpmd.Add), (scheduler.ZeroBubbleH1(2), mpmd.Mean)],
    ),
)
def test_gradients_are_reduced_once_a_step(step, axis_type, schedule, operation):
    mesh = mpmd.MpmdMesh(make_mesh(2, axis_type, ("data",)), "stage")
    params, batch = _arguments()
    compiled = mpmd.jit(lambda p, b: step(p, b, schedule, operation), mpmd_mesh=mesh).lower(params, batch).compile()
    expected = jax.jit(lambda p, b: _plain(p, b, None, operation))(params, batch)
    assert_same(host(compiled(params, batch)), host(expected), 2e-5)
    found = collectives(compiled._programs)
    tasks = {name: count for name, count in found.items() if not name.startswith("segment")}
    assert tasks in ({}, {"F1": {"all-reduce": 1}}), found  # the loss
    after = [count.get("all-reduce", 0) for name, count in found.items() if name.startswith("segment")]
    assert len(after) == 2 and all(1 <= n <= 2 for n in after), found  # each group sums what it has
    text = compiled.explain()
    assert re.search(r"^collectives a step, around the loops: [24] all-reduce \(segment", text, re.MULTILINE), text


def test_as_written_gradients_are_reduced_for_each_microbatch_and_explain_says_so():
    mesh = mpmd.MpmdMesh(make_mesh(2, AxisType.Explicit, ("data",)), "stage")
    params, batch = _arguments()

    def step(params, batch):
        rows = jax.tree.map(lambda x: jax.reshard(x, P(None, "data", None)), batch)
        return _plain(params, rows, scheduler.OneFOneB(2), mpmd.Mean(once=False))

    compiled = mpmd.jit(step, mpmd_mesh=mesh).lower(params, batch).compile()
    found = collectives(compiled._programs)
    assert "all-reduce" in found["B0"] and "all-reduce" in found["B1"], found
    (line,) = [line for line in compiled.explain().splitlines() if line.startswith("collectives a microbatch")]
    assert "B0" in line and "B1" in line and "all-reduce" in line


def test_an_unreduced_gradient_of_a_tied_weight_is_summed_once_too():
    mesh = mpmd.MpmdMesh(make_mesh(2, AxisType.Explicit, ("data",)), "stage")
    key = jax.random.key(0)
    w, batch = normal(key, WIDTH, WIDTH, scale=0.3), _arguments()[1]

    def step(w, batch, schedule, unreduced=True):
        def rows(x):
            return jax.reshard(x, P("data", None)) if unreduced else x

        def loss(w, m):
            x = mpmd.mark_stage_end(jnp.tanh(rows(m["x"]) @ w))
            return squared_error(x @ w.T, rows(m["y"]))

        once = jax.reshard(w, P(reduced={"data"})) if unreduced else w
        grad = mpmd.treduce(lambda m: jax.grad(loss)(once, m), batch, schedule=schedule)
        return w - 0.1 * (jax.reshard(grad, P()) if unreduced else grad)

    compiled = mpmd.jit(lambda w, b: step(w, b, scheduler.OneFOneB(2)), mpmd_mesh=mesh).lower(w, batch).compile()
    expected = jax.jit(lambda w, b: step(w, b, None, unreduced=False))(w, batch)
    assert_same(host(compiled(w, batch)), host(expected), 2e-5)
    assert not [n for n in collectives(compiled._programs) if not n.startswith("segment")]
