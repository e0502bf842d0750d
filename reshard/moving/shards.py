"""Turns a layout into numbers: which shard of an array is where. The planner computes with these.

Shards depend on the shape only by a scale: an axis that 4 and 8 divide is cut at multiples of an eighth, however
long it is. So layouts are worked out once on a small *unit shape* (the least common multiple of all cuts on each
axis) and shared by all arrays that differ in scale alone.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from mpmd.arrays.boxes import Box, part_boxes
from mpmd.arrays.sharding import MpmdSharding
from reshard.places import EveryHost, HostMemory, Place, Placement

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """The shards of one part as a regular grid: `shards[cell]` are the replicas that hold that cell of the grid.

    The grid of a part of a split array does not begin at 0 or ends before the array does.
    """

    starts: tuple[np.ndarray, ...]
    stop: tuple[int, ...]
    shards: np.ndarray

    def within(self, points: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns, for each axis, which of these points are in the grid."""
        return [
            np.flatnonzero((axis_points >= starts[0]) & (axis_points < max(stop, starts[0] + 1)))
            for axis_points, starts, stop in zip(points, self.starts, self.stop, strict=True)
        ]

    def at(self, points: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the shards that hold the cells with this lattice of lowest corners, one row a cell."""
        index = np.zeros((), np.int64)
        for starts, axis_points in zip(self.starts, points, strict=True):
            cell = np.searchsorted(starts, axis_points, side="right") - 1
            index = index[..., None] * len(starts) + cell
        return self.shards[index.reshape(-1)]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """All shards of an array; groups that share a device share the shard if they hold the same box there.

    `devices[i]` and `boxes[i]` belong to shard i; `parts` lists, for each part (in the order of `MpmdSharding.parts`),
    its shards in mesh order.
    """

    devices: tuple[Place, ...]
    boxes: tuple[Box, ...]
    grids: tuple[Grid, ...]
    parts: tuple[tuple[int, ...], ...]
    memory_kind: str | None

    @functools.cached_property
    def start(self) -> np.ndarray:
        return np.array([b.start for b in self.boxes], np.int64).reshape(len(self.boxes), -1)

    @functools.cached_property
    def stop(self) -> np.ndarray:
        return np.array([b.stop for b in self.boxes], np.int64).reshape(len(self.boxes), -1)


def cuts(sharding: Placement, shape: Shape) -> Shape | None:
    """Returns how many parts each axis has (the least common multiple over groups), None if they are not regular."""
    if isinstance(sharding, (HostMemory, EveryHost, SingleDeviceSharding)):
        return (1,) * len(shape)
    if isinstance(sharding, MpmdSharding):
        parts = [cuts(sharding.group_sharding(group), shape) for group in sharding.groups]
        found = [math.lcm(*(p[axis] for p in parts if p)) for axis in range(len(shape))]
        axis = sharding.split_axis
        if axis is not None:
            found[axis] = shape[axis] if sharding.split is not None else found[axis] * len(sharding.groups)
        return tuple(found)
    if isinstance(sharding, NamedSharding):
        return _named_cuts(sharding, len(shape))
    return None


@functools.lru_cache(maxsize=65536)
def _named_cuts(sharding: NamedSharding, ndim: int) -> Shape:
    sizes = sharding.mesh.shape
    entries = [e if isinstance(e, tuple) else (e,) for e in sharding.spec]
    parts = [math.prod(sizes[name] for name in names if name is not None) for names in entries]
    return tuple(parts + [1] * (ndim - len(parts)))


@functools.lru_cache(maxsize=65536)
def unit_shape(shape: Shape, *all_cuts: Shape | None) -> Shape:
    """Returns the smallest shape on which both layouts can be written; `shape` itself if one of them is not regular."""
    if any(c is None for c in all_cuts) or 0 in shape:
        return shape
    return tuple(math.lcm(*(c[axis] for c in all_cuts if c is not None)) for axis in range(len(shape)))


@functools.lru_cache(maxsize=4096)
def layout(sharding: Placement, shape: Shape) -> Layout:
    """Returns the shards of an array of this shape under any sharding. Raises a ValueError if it does not fit."""
    if isinstance(sharding, HostMemory):
        by_part, memory_kind = {0: {sharding: Box.whole(shape)}}, None
    elif isinstance(sharding, EveryHost):
        memories = map(HostMemory, range(sharding.num_processes))
        by_part, memory_kind = {0: dict.fromkeys(memories, Box.whole(shape))}, None
    else:
        by_part, memory_kind = part_boxes(sharding, shape), sharding.memory_kind
        if isinstance(sharding, MpmdSharding):
            memory_kind = sharding.group_sharding(sharding.groups[0]).memory_kind
    shards: dict[tuple[Place, Box], int] = {}
    parts = tuple(
        [
            tuple([shards.setdefault((device, box), len(shards)) for device, box in boxes.items()])
            for boxes in by_part.values()
        ]
    )
    boxes = tuple([box for _, box in shards])
    grids = tuple(_grid(indices, boxes) for indices in dict.fromkeys(parts))
    return Layout(tuple([device for device, _ in shards]), boxes, grids, parts, memory_kind)


def _grid(indices: tuple[int, ...], boxes: tuple[Box, ...]) -> Grid:
    ndim = boxes[0].ndim
    starts = tuple(np.array(sorted({boxes[i].start[axis] for i in indices}), np.int64) for axis in range(ndim))
    cells: dict[Shape, list[int]] = {}
    for i in indices:
        cells.setdefault(boxes[i].start, []).append(i)
    # Sorting by corner yields the row-major order of the grid.
    rows = [cells[corner] for corner in sorted(cells)]
    num_replicas = len(rows[0])
    assert all(len(row) == num_replicas for row in rows), "a sharding with unequal numbers of replicas"
    assert len(rows) == math.prod(map(len, starts)), "a sharding whose shards do not form a grid"
    stop = Box.bounding([boxes[i] for i in indices]).stop
    return Grid(starts, stop, np.array(rows, np.int64))
