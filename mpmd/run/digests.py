"""Digests of arrays, made on their devices: any flipped bit changes them, so they show whether arrays are equal."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mpmd.arrays import keys


@jax.jit
def digests(*arrays: jax.Array) -> jax.Array:
    """Returns two numbers for each array, which any flipped bit changes."""
    return jnp.stack([_digest(x) for x in arrays]) if arrays else jnp.zeros((0, 2), jnp.uint32)


@jax.jit
def copies_with_digests(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns copies of arrays, and their digests."""
    return *(jnp.copy(x) for x in arrays), digests(*arrays)


def _digest(x: jax.Array) -> jax.Array:
    """Returns two sums over the words of an array. Each word has its own odd factor, so no flipped bit can vanish.

    One reduction makes both: where XLA fuses two reductions, its loops for CPUs are several times slower.
    """
    words = _words_of(x)
    odd = 2 * lax.iota(jnp.uint32, words.size) + 1
    mixed = (words ^ (words >> 15) ^ (odd << 7)) * jnp.uint32(0x2C9277B5)
    zero = jnp.uint32(0)
    add = lambda x, y: (x[0] + y[0], x[1] + y[1])  # noqa: E731
    return jnp.stack(lax.reduce((words * odd, (mixed ^ (mixed >> 13)) * odd), (zero, zero), add, (0,)))


def _words_of(x: jax.Array) -> jax.Array:
    """Returns the bits of an array, as words of 32 bits."""
    x = keys.to_data(x) if keys.is_key(x.dtype) else x
    x = jax.device_put(x, jax.memory.Space.Device)  # programs cannot compute on arrays in host memory
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or _is_small(x.dtype):
        x = x.astype(jnp.int8) if not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    width = x.dtype.itemsize
    word = {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)
    return lax.bitcast_convert_type(x, word).astype(jnp.uint32).ravel()


def _is_small(dtype: DTypeLike) -> bool:
    """Returns whether a value takes less than a byte."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits < 8
