"""A DiT: blocks conditioned by adaLN-zero on time and class, noise from a key, an average of the weights."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from plain_and_pipelined import stage_mesh, train_both
from programs.parts import normal

import mpmd

WIDTH, HEADS, SIZE, PATCH, BATCH, NUM_MICROBATCHES, NUM_STAGES, CLASSES = 32, 2, 8, 2, 2, 4, 4, 3
TOKENS = (SIZE // PATCH) ** 2


def _modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class Condition(nn.Module):
    @nn.compact
    def __call__(self, time, label):
        frequencies = jnp.exp(-jnp.log(10_000.0) * jnp.arange(8) / 8)
        angles = time[:, None] * frequencies
        h = nn.Dense(WIDTH)(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1))
        return nn.Dense(WIDTH)(nn.silu(h)) + nn.Embed(CLASSES + 1, WIDTH)(label)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, c):
        small = nn.initializers.normal(0.02)  # zeros in a first step leave nothing to compare
        ada = nn.Dense(6 * WIDTH, kernel_init=small, name="ada")(nn.silu(c))
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = jnp.split(ada, 6, -1)
        h = _modulate(nn.LayerNorm(use_bias=False, use_scale=False)(x), shift_a, scale_a)
        x = x + gate_a[:, None] * nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(h, h)
        h = _modulate(nn.LayerNorm(use_bias=False, use_scale=False)(x), shift_m, scale_m)
        h = nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(h)))
        return x + gate_m[:, None] * h


class DiT(nn.Module):
    @nn.compact
    def __call__(self, images, time, label):
        c = Condition(name="condition")(time, label)
        x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), name="patches")(images).reshape(-1, TOKENS, WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, TOKENS, WIDTH))
        for i in range(NUM_STAGES):
            x = Block(name=f"block{i}")(x if i == 0 else mpmd.mark_stage_end(x), c)
        shift, scale = jnp.split(nn.Dense(2 * WIDTH, name="final_ada")(nn.silu(c)), 2, -1)
        x = _modulate(nn.LayerNorm(use_bias=False, use_scale=False)(x), shift, scale)
        x = nn.Dense(PATCH * PATCH * 3, name="final")(x)
        side = SIZE // PATCH
        x = x.reshape(-1, side, side, PATCH, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, SIZE, SIZE, 3)


def _home(path):
    if found := re.search(r"block(\d)", path):
        return int(found[1])
    return NUM_STAGES - 1 if "final" in path else 0 if re.search("condition|patches|positions", path) else None


@pytest.mark.exhaustive
def test_the_blocks_own_projections_of_the_condition_are_in_the_blocks_stages():
    model = DiT()
    example = jnp.zeros((BATCH, SIZE, SIZE, 3)), jnp.zeros(BATCH), jnp.zeros(BATCH, int)
    params = jax.jit(model.init)(jax.random.key(0), *example)["params"]
    optimizer = optax.adamw(1e-3, eps=1e-4)
    alphas = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))

    def loss(params, m):
        images, label, key = m
        t, n, d = jax.random.split(key, 3)
        time = jax.random.randint(t, (BATCH,), 0, len(alphas))
        noise = jax.random.normal(n, images.shape)
        alpha = alphas[time][:, None, None, None]
        label = jnp.where(jax.random.bernoulli(d, 0.1, label.shape), CLASSES, label)
        noisy = jnp.sqrt(alpha) * images + jnp.sqrt(1 - alpha) * noise
        predicted = model.apply({"params": params}, noisy, time.astype(jnp.float32), label)
        return ((predicted - noise) ** 2).mean()

    def step(state, batch, schedule):
        key, now = jax.random.split(state["key"])
        xs = (*batch, jax.random.split(now, NUM_MICROBATCHES))
        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(state["params"], m), xs, schedule=schedule, operation=mpmd.Mean
        )
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 1e-2)
        return {"params": params, "opt": opt, "average": average, "key": key}, {"loss": value}

    def batch(key):
        images = normal(key, NUM_MICROBATCHES, BATCH, SIZE, SIZE, 3)
        return images, jax.random.randint(key, (NUM_MICROBATCHES, BATCH), 0, CLASSES)

    state = {"params": params, "opt": jax.jit(optimizer.init)(params), "average": params, "key": jax.random.key(2)}
    batches = [jax.jit(batch)(k) for k in jax.random.split(jax.random.key(1), 3)]
    activations = 4 * BATCH * (TOKENS * WIDTH + WIDTH) + 64  # x and c, and a key or the noise's shape
    mesh = stage_mesh(NUM_STAGES, AxisType.Auto)
    train_both(step, state, batches, mesh, home=_home, rtol=2e-4, boundary=activations)
