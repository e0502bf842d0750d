"""Tells which part of an array each device has, numbered as one `jax.Array` over all devices would number it."""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AxisType, Mesh

from mpmd._jax_compat import Device

Index = tuple[slice, ...]


class PlacedShard(NamedTuple):
    """Which part of an array one device has in one group. `key` is that of the `Part` which the group holds."""

    device: Device
    index: Index  # pyright: ignore[reportIncompatibleMethodOverride]
    replica_id: int
    group: int
    key: int | tuple[int, int]


def placed_shards(
    parts: Iterable[tuple[Device, Index, int, int | tuple[int, int]]], order: Sequence[Device] | None
) -> tuple[PlacedShard, ...]:
    """The parts on all devices of all groups. Those of one index have the replica ids 0, 1, 2, …

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
    """One mesh over meshes of one shape, with an axis of them in front that no spec of theirs names."""
    first = meshes[0]
    name = "mpmd"
    while name in first.axis_names:
        name += "_"
    axis_types = (first.axis_types[0] if first.axis_types else AxisType.Auto, *first.axis_types)
    return Mesh(np.stack([mesh.devices for mesh in meshes]), (name, *first.axis_names), axis_types=axis_types)
