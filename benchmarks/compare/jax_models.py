"""The models of the comparison in JAX. A library says where a stage ends through `end_stage`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import problem


def make_loss(name: str, end_stage: Callable[[jax.Array], jax.Array] = lambda x: x) -> Callable:
    """`loss(params, x, y)`: the mean loss of some rows."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for stage, weights in enumerate(params):
            x = apply(name, weights, x)
            if stage + 1 < len(params):
                x = end_stage(x)
        if name == "toy":
            return jnp.mean((x - y) ** 2)
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    return loss


def apply(name: str, weights: Any, x: jax.Array) -> jax.Array:
    """One stage: activations (or, in the first stage of a GPT, bytes) in, activations (or logits) out."""
    if name == "toy":
        return jnp.tanh(x @ weights["w"])
    if "embed" in weights:
        x = weights["embed"][x] + weights["positions"]
    for layer in weights["layers"]:
        x = _layer(layer, x)
    return _rms_norm(x, weights["norm"]) @ weights["head"] if "head" in weights else x


def _layer(layer: Any, x: jax.Array) -> jax.Array:
    qkv = (_rms_norm(x, layer["attention_norm"]) @ layer["qkv"]).reshape(*x.shape[:2], 3, -1, problem.HEAD_SIZE)
    attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    x = x + attended.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(_rms_norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
