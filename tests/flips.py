"""Devices that compute wrong: a bit of the first floating-point result of each of their programs is flipped."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mpmd.compile.executable import DistinctProgram


@contextlib.contextmanager
def flipping(device: Any, is_now: Callable[[str], bool]) -> Iterator[None]:
    """Steps that are compiled meanwhile run with a faulty device.

    Args:
      is_now: whether it is faulty when a program of this name runs.
    """
    plain = DistinctProgram.on

    def on(self: DistinctProgram, mesh: Any) -> Any:
        found = plain(self, mesh)
        return _Faulty(found, self.program.name, is_now) if device in mesh.devices.flat else found

    DistinctProgram.on = on
    try:
        yield
    finally:
        DistinctProgram.on = plain


class _Faulty:
    def __init__(self, program: Any, name: str, is_now: Callable[[str], bool]):
        self._program, self._name, self._is_now = program, name, is_now

    def __call__(self, *args: Any) -> list[Any]:
        results = list(self._program(*args))
        if self._is_now(self._name):
            k = next(k for k, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.floating))
            results[k] = _flipped(results[k])
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


@jax.jit
def _flipped(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    where = (0,) * x.ndim
    return jax.lax.bitcast_convert_type(bits.at[where].set(bits[where] ^ 1), x.dtype)


def flip_in_memory(x: jax.Array) -> None:
    """Flips a bit of an array of a CPU device where it lies."""
    byte = ctypes.c_uint8.from_address(x.addressable_shards[0].data.unsafe_buffer_pointer())
    byte.value ^= 1
