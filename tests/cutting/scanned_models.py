"""Models that scan over stacked layers, as plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from programs.parts import normal

import mpmd

WIDTH = 8
TOKENS = 16


def scanned_params(key, num_layers):
    """An embedding, `num_layers` stacked layers, a bias that all of them share, and a head."""
    k = jax.random.split(key, 4)
    scale = WIDTH**-0.5
    return {
        "embedding": normal(k[0], TOKENS, WIDTH) * scale,
        "layers": {
            "up": normal(k[1], num_layers, WIDTH, 4 * WIDTH) * scale,
            "down": normal(k[2], num_layers, 4 * WIDTH, WIDTH) * scale / 2,
            "norm": jnp.ones((num_layers, WIDTH)),
        },
        "shared": jnp.full((4 * WIDTH,), 0.1),
        "head": normal(k[3], WIDTH, TOKENS) * scale,
    }


def layer(h, p, shared, table, key):
    """A residual block, with dropout if there is a key; `table` is a constant of the scan."""
    x = h * p["norm"] / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6) + table
    x = jax.nn.gelu(x @ p["up"] + shared)
    x = x if key is None else jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0)
    return h + x @ p["down"]


def scanned_loss(params, batch, *, mark=mpmd.mark_layer_end, checkpointed=True, scanned=True):
    """Mean cross entropy of `batch["tokens"]`; with `scanned=False` the layers are a Python loop."""
    tokens, num_layers = batch["tokens"], params["layers"]["norm"].shape[0]
    table = jnp.sin(jnp.arange(tokens.shape[-1])[:, None] / jnp.arange(1, WIDTH + 1))
    keys = jax.random.split(batch["key"], num_layers) if "key" in batch else None
    one = jax.checkpoint(layer) if checkpointed else layer

    def body(h, scanned):
        p, key = scanned
        h = one(h, p, params["shared"], table, key)
        return mark(h), jnp.mean(h**2)

    h = params["embedding"][tokens]
    if scanned:
        h, norms = lax.scan(body, h, (params["layers"], keys))
    else:
        norms = []
        for i in range(num_layers):
            h, norm = body(h, jax.tree.map(lambda x: x[i], (params["layers"], keys)))  # noqa: B023
            norms.append(norm)
        norms = jnp.stack(norms)
    logits = jax.nn.log_softmax(h @ params["head"])
    loss = -jnp.mean(jnp.take_along_axis(logits, jnp.roll(tokens, 1, -1)[..., None], -1))
    return loss + 1e-3 * jnp.mean(norms), norms


def batches(key, num_microbatches=4, dropout=False):
    """Tokens for each microbatch, and a key."""
    tokens = jax.random.randint(key, (num_microbatches, 2, 6), 0, TOKENS)
    return {"tokens": tokens} | ({"key": jax.random.split(key, num_microbatches)} if dropout else {})
