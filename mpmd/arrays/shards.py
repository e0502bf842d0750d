"""Computes the part of an array on each device, numbered as one `jax.Array` over all devices would number it."""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AxisType, Mesh

from mpmd._jax_compat import Device

Index = tuple[slice, ...]


class PlacedShard(NamedTuple):
    """The part of an array on one device in one group. `key` is the key of the group's `Part`."""

    device: Device
    index: Index  # pyright: ignore[reportIncompatibleMethodOverride]
    replica_id: int
    group: int
    key: int | tuple[int, int]


def placed_shards(
    parts: Iterable[tuple[Device, Index, int, int | tuple[int, int]]], order: Sequence[Device] | None
) -> tuple[PlacedShard, ...]:
    """Returns the parts on all devices of all groups. Parts of one index have the replica ids 0, 1, 2, …

    Args:
        parts: device, index, group and key of each, group after group.
        order: the devices in the order of one mesh over all groups; None is the order of `parts`.
    """
    placed = list(parts)
    if order is not None:
        position = {device: i for i, device in enumerate(order)}
        placed.sort(key=lambda part: position[part[0]])
    seen: collections.Counter[object] = collections.Counter()
    shards: list[PlacedShard] = []
    for device, index, group, key in placed:
        box = tuple([(part.start, part.stop) for part in index])
        shards.append(PlacedShard(device, index, seen[box], group, key))
        seen[box] += 1
    return tuple(shards)


def stacked(meshes: Sequence[Mesh]) -> Mesh:
    """Returns one mesh over meshes of one shape, with a new axis in front that none of their specs names."""
    first = meshes[0]
    name = "mpmd"
    while name in first.axis_names:
        name += "_"
    axis_types = (first.axis_types[0] if first.axis_types else AxisType.Auto, *first.axis_types)
    return Mesh(np.stack([mesh.devices for mesh in meshes]), (name, *first.axis_names), axis_types=axis_types)
