"""Tells which part of an array each device has, numbered as one `jax.Array` over all devices would number it."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType, Mesh

Device = Any
Index = tuple[slice, ...]


class PlacedShard(NamedTuple):
    """Which part of an array one device has in one group."""

    device: Device
    index: Index  # pyright: ignore[reportIncompatibleMethodOverride]
    replica_id: int
    group: int


def placed_shards(
    indices: Mapping[int, Mapping[Device, Index]], order: Sequence[Device] | None
) -> tuple[PlacedShard, ...]:
    """The parts on all devices of all groups. Those of one index have the replica ids 0, 1, 2, …

    Args:
        indices: per group, ascending, the part that each of its devices has.
        order: the devices in the order of one mesh over all groups; None is group after group.
    """
    placed = [(device, index, group) for group, parts in indices.items() for device, index in parts.items()]
    if order is not None:
        position = {device: i for i, device in enumerate(order)}
        placed.sort(key=lambda part: position[part[0]])
    seen: collections.Counter[Any] = collections.Counter()
    shards: list[PlacedShard] = []
    for device, index, group in placed:
        key = tuple([(part.start, part.stop) for part in index])
        shards.append(PlacedShard(device, index, seen[key], group))
        seen[key] += 1
    return tuple(shards)


def stacked(meshes: Sequence[Mesh]) -> Mesh:
    """One mesh over meshes of one shape, with an axis of them in front that no spec of theirs names."""
    first = meshes[0]
    name = "mpmd"
    while name in first.axis_names:
        name += "_"
    axis_types = (first.axis_types[0] if first.axis_types else AxisType.Auto, *first.axis_types)
    return Mesh(np.stack([mesh.devices for mesh in meshes]), (name, *first.axis_names), axis_types=axis_types)
