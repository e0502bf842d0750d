"""A decoder whose layers have experts: pure functions of a tree of parameters, the names of which are those of Mixtral.

The layers are stacked: each parameter of a layer is one array with an axis of layers in front, and one `scan` runs
them. `mpmd.mark_layer_end` in its body says that a stage may end there. That is all that this file knows of the
pipeline.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from experts import ROWS, SAVED, is_explicit, run_experts, sharded
from jax.sharding import PartitionSpec as P
from router import route
from train_gpt import rms_norm, rotary

import mpmd

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,  # keeps the input of each layer
    "names": jax.checkpoint_policies.save_only_these_names(*SAVED),  # and what the exchanges give
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model, and how it is computed."""

    vocabulary: int = 256
    width: int = 64
    hidden: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    experts: int = 8
    k: int = 2
    shared: int = 0
    """Hidden units of an expert that all tokens take; 0: there is none."""
    exchange: str = "capacity"
    capacity: float = 1.25
    balance: float = 0.01
    z: float = 0.001
    remat: str = "full"
    dtype: Any = jnp.bfloat16


def init(c: Config, key: jax.Array) -> dict[str, Any]:
    """Parameters in float32."""
    keys = iter(jax.random.split(key, 16))

    def normal(*shape, fan_in):
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    def mlp(*shape, hidden):
        return {
            "gate": normal(*shape, c.width, hidden, fan_in=c.width),
            "up": normal(*shape, c.width, hidden, fan_in=c.width),
            "down": normal(*shape, hidden, c.width, fan_in=2 * c.layers * hidden),
        }

    n, d = c.layers, c.width
    layers = {
        "attention_norm": jnp.ones((n, d)),
        "attention": {
            "query": normal(n, d, c.heads, c.head_size, fan_in=d),
            "key": normal(n, d, c.kv_heads, c.head_size, fan_in=d),
            "value": normal(n, d, c.kv_heads, c.head_size, fan_in=d),
            "output": normal(n, c.heads, c.head_size, d, fan_in=2 * n * d),
        },
        "mlp_norm": jnp.ones((n, d)),
        "router": normal(n, d, c.experts, fan_in=d),
        "experts": mlp(n, c.experts, hidden=c.hidden),
    } | ({"shared": mlp(n, hidden=c.shared)} if c.shared else {})
    embed, head = normal(c.vocabulary, d, fan_in=1), normal(d, c.vocabulary, fan_in=d)
    return {"embed": embed, "layers": layers, "norm": jnp.ones(d), "head": head}


def layer(c: Config, p: dict[str, Any], x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One layer: x (rows, length, width), and what its router says."""

    def whole(w):  # FSDP: the devices of a group store parts of a parameter, and compute with all of it
        return sharded(w.astype(c.dtype), P())

    def norm(scale, x):
        return rms_norm(x.astype(jnp.float32), sharded(scale, P())).astype(c.dtype)

    attention, h = jax.tree.map(whole, p["attention"]), norm(p["attention_norm"], x)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, attention[name]) for name in ("query", "key", "value"))
    seen = jax.nn.dot_product_attention(rotary(q).astype(c.dtype), rotary(k).astype(c.dtype), v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", seen, attention["output"])

    h = norm(p["mlp_norm"], x)
    routing = route(sharded(p["router"], P()), h, c.k)
    experts = {name: w.astype(c.dtype) for name, w in p["experts"].items()}
    y, dropped = run_experts(experts, h, routing.weights, routing.chosen, c.exchange, c.capacity)
    if c.shared:
        s = jax.tree.map(whole, p["shared"])
        y = y + (jax.nn.silu(h @ s["gate"]) * (h @ s["up"])) @ s["down"]
    return x + y, {"balance": routing.balance, "z": routing.z, "used": routing.used, "dropped": dropped}


def loss(c: Config, params: dict[str, Any], rows: jax.Array) -> tuple[jax.Array, tuple[dict, dict]]:
    """What is minimised, for rows of tokens (rows, length + 1); beside it its parts and counts, for routers by layer.

    They stay by layer until the loop over microbatches is over: so nothing of them goes from stage to stage in it.
    """
    tokens, targets = (sharded(part, ROWS) for part in (rows[:, :-1], rows[:, 1:]))
    embed = sharded(params["embed"].astype(c.dtype), P())
    x = embed.at[tokens].get(out_sharding=ROWS) if is_explicit() else sharded(embed[tokens], ROWS)

    def body(x, p):
        x, found = layer(c, p, x)
        return mpmd.mark_layer_end(x), found

    policy = REMAT[c.remat]
    x, found = jax.lax.scan(body if policy is None else jax.checkpoint(body, policy=policy), x, params["layers"])
    x = rms_norm(x.astype(jnp.float32), sharded(params["norm"], P())).astype(c.dtype)
    logits = (x @ sharded(params["head"].astype(c.dtype), P())).astype(jnp.float32)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    total = cross_entropy + c.balance * found["balance"].mean() + c.z * found["z"].mean()
    losses = {"loss": cross_entropy, "balance": found["balance"], "z": found["z"]}
    return total, (losses, {"used": found["used"], "dropped": found["dropped"]})
