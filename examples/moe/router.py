"""Which experts a token goes to, what keeps them evenly busy, and how busy they were."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """The choice of one layer for tokens (rows, length).

    Attributes:
      weights: of each chosen expert's result, (rows, length, k), float32; they add up to one.
      chosen: the experts, (rows, length, k).
      balance: a loss that is smallest, 1, where all experts get the same share. Source: arXiv:2101.03961.
      z: a loss that keeps the logits small, so that they stay exact in bfloat16. Source: arXiv:2202.08906.
      used: how many tokens each expert was chosen for, (experts,), whole numbers.
    """

    weights: jax.Array
    chosen: jax.Array
    balance: jax.Array
    z: jax.Array
    used: jax.Array


def route(router: jax.Array, x: jax.Array, k: int) -> Routing:
    """Each token of x (rows, length, width) chooses k experts. The router (width, experts) computes in float32."""
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision="highest")
    experts = logits.shape[-1]
    top, chosen = jax.lax.top_k(logits, k)
    used = (chosen[..., None] == jnp.arange(experts)).sum((0, 1, 2), dtype=jnp.int32)
    probability = jax.nn.softmax(logits).mean((0, 1))
    balance = experts * (used / chosen.size * probability).sum()
    z = (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
    return Routing(jax.nn.softmax(top), chosen, balance, z, used)


def statistics(used: jax.Array, dropped: jax.Array) -> dict[str, jax.Array]:
    """What a step reports of its routers, from the counts of all its microbatches.

    Args:
      used: (layers, experts).
      dropped: (layers,), how many of them an expert had no room for.
    """
    share = used / used.sum(-1, keepdims=True)
    return {
        "tokens_per_expert": used,
        "entropy": -jax.scipy.special.xlogy(share, share).sum(-1) / jnp.log(used.shape[-1]),  # 1: all alike
        "busiest": share.max(-1) * used.shape[-1],  # 1: all alike
        "dropped": dropped / used.sum(-1),
    }
