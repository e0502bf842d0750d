"""A mixture of experts that drops no token: rows sorted by expert, `ragged_dot` inside of `shard_map`."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_and_pipelined import stage_mesh, train_both
from programs.parts import normal

import mpmd

WIDTH, HIDDEN, EXPERTS, CHOSEN, ROWS, NUM_MICROBATCHES, NUM_LAYERS = 16, 32, 4, 2, 8, 4, 4
AXIS = "expert"


def _experts(p, x, weights, chosen):
    """One device's experts: it computes the rows that chose them, and all devices add up."""
    local = len(p["up"])
    first = jax.lax.axis_index(AXIS) * local
    flat = chosen.reshape(-1) - first
    flat = jnp.where((flat >= 0) & (flat < local), flat, local)  # the others come last
    order = jnp.argsort(flat)
    rows = jnp.repeat(x, CHOSEN, 0)[order]
    sizes = jnp.bincount(flat, length=local)
    h = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    y = jax.lax.ragged_dot(h, p["down"], sizes)
    y = jnp.where((flat[order] < local)[:, None], y, 0)[jnp.argsort(order)]
    y = (y.reshape(*chosen.shape, -1) * weights[..., None]).sum(1)
    return jax.lax.psum(y, AXIS)


def _layer(mesh, p, x):
    h = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    scores = jax.nn.softmax(h @ p["router"])
    weights, chosen = jax.lax.top_k(scores, CHOSEN)
    weights = weights / weights.sum(-1, keepdims=True)
    specs = {"gate": P(AXIS), "up": P(AXIS), "down": P(AXIS)}
    experts = {name: p[name] for name in specs}
    run = jax.shard_map(_experts, mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=P(), check_vma=False)
    used = jax.nn.one_hot(chosen, EXPERTS).mean((0, 1))
    return x + run(experts, h, weights, chosen), EXPERTS * (used * scores.mean(0)).sum()


def _params():
    def one(key):
        r, g, u, d = jax.random.split(key, 4)
        return {
            "router": normal(r, WIDTH, EXPERTS) / WIDTH**0.5,
            "gate": normal(g, EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5,
            "up": normal(u, EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5,
            "down": normal(d, EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5,
        }

    return {f"layer{i}": one(k) for i, k in enumerate(jax.random.split(jax.random.key(0), NUM_LAYERS))}


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(AxisType.Explicit, id="explicit", marks=pytest.mark.slow),
        pytest.param(AxisType.Auto, id="auto", marks=pytest.mark.exhaustive),
    ],
)
def test_experts_are_sharded_inside_of_their_stages(axes):
    """Each layer's auxiliary loss is part of the loss; the plain step runs on one group's devices."""
    mesh = stage_mesh(2, axes, expert=2)
    alone = jax.make_mesh((1, 2), ("stage", AXIS), (axes,) * 2, devices=jax.devices()[:2])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-4))
    params = jax.jit(_params)()

    def step(state, batch, schedule):
        params, opt = state

        def loss(params, m):
            x, y = m
            auxiliary = 0.0
            for i in range(NUM_LAYERS):
                x = mpmd.mark_stage_end(x) if i == NUM_LAYERS // 2 else x
                x, more = _layer(mesh if schedule else alone, params[f"layer{i}"], x)
                auxiliary = auxiliary + more
            error = ((x - y) ** 2).mean()
            return error + 0.01 * auxiliary, {"error": error, "auxiliary": auxiliary}

        (_, metrics), grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss, has_aux=True)(params, m), batch, schedule=schedule, operation=mpmd.Mean
        )
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), metrics

    def spec(path, leaf):
        return P(AXIS) if leaf.ndim == 3 else P()

    state = params, jax.jit(optimizer.init)(params)
    specs = jax.tree.map_with_path(spec, state)
    shapes = (2, NUM_MICROBATCHES, ROWS, WIDTH)
    batches = [tuple(normal(k, *shapes)) for k in jax.random.split(jax.random.key(1), 3)]
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), (specs, P()))
    plain_shardings = jax.tree.map(lambda s: NamedSharding(alone, s), (specs, P()))
    train_both(
        step, state, batches, mesh, rtol=2e-4, in_shardings=shardings, plain=plain_shardings,
        home=lambda path: int(re.search(r"layer(\d)", path)[1]) // 2 if "layer" in path else None,
    )  # fmt: skip
