"""Puts arrays on the devices of groups: the user's arguments, and values of this process that go to another group.

It neither waits for a value to be computed nor asks another process.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.boxes import device_boxes
from mpmd.arrays.layouts import memory_kind
from mpmd.arrays.mesh import Device, is_local


def mover(source: NamedSharding, target: NamedSharding, dtype: DTypeLike) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that moves an array from one group's sharding to another's."""
    if not keys.is_key(dtype) and (copy := compat.put(source, target)) is not None:
        return copy
    return functools.partial(jax.device_put, device=target_of(target))


def target_of(sharding: NamedSharding) -> Device | NamedSharding:
    """Returns the target for `jax.device_put`: a bare device where that means the same, at half the cost."""
    if sharding.mesh.size == 1 and memory_kind(sharding) is None:
        return compat.devices(sharding).flat[0]
    return sharding


def is_alias(source: NamedSharding, target: NamedSharding, ndim: int) -> bool:
    """Returns whether two shardings of groups that share devices put the same block on each device."""
    return compat.devices(source).tolist() == compat.devices(target).tolist() and source.is_equivalent_to(target, ndim)


def put_copy(x: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """Puts a host array or an array of this process on the devices of one group, in new memory: the user may write
    into `x`, or donate it. (`may_alias=False` does not help: an array on CPU devices may still share numpy's memory.)
    """
    placed = jax.device_put(x.copy() if isinstance(x, jax.Array) else np.array(x), sharding)
    if isinstance(getattr(placed, "sharding", None), SingleDeviceSharding):  # float0 has none
        placed = jax.device_put(placed, sharding)
    return placed


def place_all(values: Sequence[ArrayLike], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Puts host arrays and arrays of this process on the devices of groups, which may span other processes.

    For a group that does, every process passes the same values, as with `jax.make_array_from_callback`. An array that
    is on the group already, and perhaps elsewhere too, is not moved.
    """
    placed: list[Any] = [None] * len(values)
    local, plain = [], []
    for i, (x, sharding) in enumerate(zip(values, shardings, strict=True)):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            if _is_there(x, sharding):
                shards = compat.shards(x)
                mine = [shards[d] for d in device_boxes(sharding, x.shape) if d in shards]
                placed[i] = jax.make_array_from_single_device_arrays(x.shape, sharding, mine)
                continue
            x = x.addressable_data(0)  # the whole array, as `is_placeable` has checked
        if sharding.is_fully_addressable:
            is_plain = type(x) is np.ndarray and sharding.mesh.size == 1 and x.dtype != jax.dtypes.float0
            (plain if is_plain else local).append((i, x))
        else:
            placed[i] = _place_everywhere(x, sharding)
    for put_all, some in ((jax.device_put, local), (compat.put_on_one_device, plain)):
        if some:
            moved = put_all([x for _, x in some], [shardings[i] for i, _ in some])
            for (i, _), x in zip(some, moved, strict=True):
                placed[i] = x
    return placed


def is_placeable(x: jax.Array, sharding: NamedSharding) -> bool:
    """Returns whether `place_all` can put an array on the devices of a group without asking another process."""
    return x.is_fully_addressable or x.is_fully_replicated or _is_there(x, sharding)


def _is_there(x: jax.Array, sharding: NamedSharding) -> bool:
    """Returns whether an array over many processes has the wanted blocks on a group's devices already."""
    held = device_boxes(x.sharding, x.shape)
    wanted = device_boxes(sharding, x.shape)
    return all(held.get(d) == box for d, box in wanted.items()) and x.sharding.memory_kind == sharding.memory_kind


def _place_everywhere(x: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """Puts an array that every process has on devices of several processes."""
    if isinstance(x, jax.Array) and keys.is_key(x.dtype):
        data = np.asarray(keys.to_data(x))
        boxes = {d: box for d, box in device_boxes(sharding, x.shape).items() if is_local(d)}
        shards = [keys.from_data(jax.device_put(data[box.slices], d), x.dtype) for d, box in boxes.items()]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
