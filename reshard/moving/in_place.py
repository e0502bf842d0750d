"""Keeps shards in place while the array that they were part of goes away.

Deleting an array deletes its shards, wherever else they are used. A program that returns its donated buffers makes
new arrays in the same memory, which nothing else refers to: one program for each set of devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.arrays.mesh import Device

# Below this a copy takes less time than compiling a program.
_COPIED_BYTES = 1 << 20


@dataclasses.dataclass
class Kept:
    """One shard on one device, and the place of its new array: `parts[key]`."""

    data: jax.Array
    device: Device
    parts: dict[int, jax.Array | np.ndarray]
    key: int


def take_over(shards: Sequence[Kept]) -> None:
    """Moves every shard to a new array in the same memory and deletes the old arrays. Small ones are copied instead."""
    small = [shard for shard in shards if shard.data.nbytes <= _COPIED_BYTES]
    if sum(shard.data.nbytes for shard in small) > _COPIED_BYTES:
        small = []
    programs: dict[tuple[Device, ...], list[dict[Device, Kept]]] = {}
    copied = set(map(id, small))
    for row in _rows([shard for shard in shards if id(shard) not in copied]):
        devices = tuple(sorted(row, key=lambda device: device.id))
        programs.setdefault(devices, []).append(row)
    for devices, rows in programs.items():
        _take_over_on(devices, rows)
    for shard in small:  # last: a program that cannot be compiled leaves them where they are
        shard.parts[shard.key] = jax.device_put(shard.data, shard.data.sharding, may_alias=False)
        shard.data.delete()


def _rows(shards: Sequence[Kept]) -> list[dict[Device, Kept]]:
    """Groups shards of one target and one shape, at most one a device: a row goes through a program as one array."""
    rows: dict[tuple[object, ...], list[dict[Device, Kept]]] = {}
    for shard in shards:
        key = (id(shard.parts), shard.data.shape, shard.data.sharding.memory_kind)
        candidates = rows.setdefault(key, [{}])
        if shard.device in candidates[-1]:
            candidates.append({})
        candidates[-1][shard.device] = shard
    return [row for candidates in rows.values() for row in candidates]


def _take_over_on(devices: tuple[Device, ...], rows: Sequence[dict[Device, Kept]]) -> None:
    mesh = Mesh(np.array(devices), ("device",))
    arrays: list[jax.Array] = []
    for row in rows:
        first = row[devices[0]].data
        # Each device keeps its own content; the sharding calls the values replicas, but nobody reads them as replicas.
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=first.sharding.memory_kind)
        shards = [row[device].data for device in devices]
        arrays.append(jax.make_array_from_single_device_arrays(first.shape, sharding, shards))
    for row, array in zip(rows, _identity(len(arrays))(*arrays), strict=True):
        for part in array.addressable_shards:
            shard = row[part.device]
            shard.parts[shard.key] = part.data


@functools.cache
def _identity(num_arrays: int) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(lambda *arrays: arrays, donate_argnums=tuple(range(num_arrays)))
