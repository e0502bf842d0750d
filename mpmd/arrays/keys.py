"""Typed PRNG keys and the integers that represent them.

Arrays of keys are cut, sent, stored and hashed as integers (their data), which have the axes of one key behind those of
the array. All functions accept any other dtype too, and leave its arrays, shapes and shardings unchanged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mpmd.arrays.array import MpmdArray
from mpmd.arrays.sharding import MpmdSharding

Shape = tuple[int, ...]


def is_key(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype is that of typed keys."""
    return not isinstance(dtype, np.dtype) and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=64)
def _shape_of_one(dtype: DTypeLike | None) -> Shape:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape


def data_shape(shape: Shape, dtype: DTypeLike) -> Shape:
    """Returns the shape of the data of an array."""
    return (*shape, *_shape_of_one(dtype)) if is_key(dtype) else tuple(shape)


def shape_of_data(shape: Shape, dtype: DTypeLike | None) -> Shape:
    """Returns the shape of an array from the shape of its data: the inverse of `data_shape`."""
    return tuple(shape[: len(shape) - len(_shape_of_one(dtype))]) if is_key(dtype) else tuple(shape)


def data_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of the data of an array."""
    return np.dtype(np.uint32 if is_key(dtype) else dtype)


def data_sharding(sharding: Any, shape: Shape, dtype: DTypeLike) -> Any:
    """Returns the sharding of the data of an array of this shape, in the same places."""
    if not is_key(dtype) or not isinstance(sharding, NamedSharding | MpmdSharding):
        return sharding
    missing = len(data_shape(shape, dtype)) - len(sharding.spec)
    spec = PartitionSpec(*sharding.spec, *[None] * missing)
    if isinstance(sharding, MpmdSharding):
        return sharding.replace(spec=spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def to_data(x: Any) -> Any:
    """Returns the data of an array, in the same places."""
    if not is_key(x.dtype):
        return x
    if not isinstance(x, MpmdArray):
        return jax.random.key_data(x)
    arrays = {group: jax.random.key_data(array) for group, array in x._arrays.items()}
    sharding = data_sharding(x.mpmd_sharding, x.shape, x.dtype)
    return MpmdArray(arrays, sharding, data_shape(x.shape, x.dtype), data_dtype(x.dtype))


def from_data(data: Any, dtype: Any, sharding: MpmdSharding | None = None) -> Any:
    """Returns the array of a dtype from its data: the inverse of `to_data`; an `MpmdArray` has this sharding."""
    if not is_key(dtype):
        return data
    if not isinstance(data, MpmdArray):
        return jax.random.wrap_key_data(data, dtype=dtype)
    assert sharding is not None
    arrays = {group: jax.random.wrap_key_data(array, dtype=dtype) for group, array in data._arrays.items()}
    return MpmdArray(arrays, sharding, shape_of_data(data.shape, dtype), dtype)


def zeros(shape: Shape, dtype: DTypeLike, device: Any = None) -> jax.Array:
    """Returns zeros of any dtype, or keys with zeros as their data."""
    return from_data(jnp.zeros(data_shape(shape, dtype), data_dtype(dtype), device=device), dtype)


@functools.lru_cache(maxsize=64)
def implementation(dtype: DTypeLike) -> str | None:
    """Returns the name of a key dtype's implementation (the inverse is `jax.random.key_dtype`); None for others."""
    if not is_key(dtype):
        return None
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.random.key_dtype(name) == dtype:
            return name
    raise ValueError(f"keys of dtype {dtype} are of no implementation that JAX has built in.")
