"""Cuts an array into pieces: one for each part of a target shard that one source shard has.

Planned from the shardings alone, alike in every process.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from mpmd.arrays.boxes import Box, device_boxes
from mpmd.arrays.layouts import memory_kind
from mpmd.arrays.mesh import Device, is_local


class Piece(NamedTuple):
    """A box of an array that goes from one device to another; `number` is its place in a transfer."""

    number: int
    source: Device
    target: Device
    box: Box


@functools.lru_cache(maxsize=4096)
def pieces(source: jax.sharding.Sharding, target: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """How an array goes from one sharding to another: every target shard, cut by the source shards.

    All processes come to the same answer. Of several replicas, one on the target's device is taken, else one of its
    process, else they take turns.
    """
    holders: dict[Box, list[Device]] = {}
    for device, box in device_boxes(source, shape).items():
        holders.setdefault(box, []).append(device)
    found: list[Piece] = []
    for turn, (device, wanted) in enumerate(device_boxes(target, shape).items()):
        for held, devices in holders.items():
            part = held & wanted
            if part.size:
                of_process = [d for d in devices if d.process_index == device.process_index]
                near = [device] if device in devices else of_process or devices
                chosen = near[turn % len(near)]
                found.append(Piece(len(found), chosen, device, part))
    return tuple(found)


class Share(NamedTuple):
    """What one process has to do with the pieces of an array.

    Attributes:
      num_pieces: of all processes.
      mine: those that come from or go to a device of this process, in the order that all processes share.
      sources: per device of the source sharding, the box that it holds.
      targets: per device of this process, the box that it gets.
      starts: per such device, where its pieces begin in its box.
      only: a piece from elsewhere that is all that this process gets or gives: there is nothing to put together.
    """

    num_pieces: int
    mine: tuple[Piece, ...]
    sources: Mapping[Device, Box]
    targets: Mapping[Device, Box]
    starts: Mapping[Device, tuple[tuple[int, ...], ...]]
    only: Piece | None

    @property
    def sends(self) -> bool:
        """Whether this process sends a piece to another one."""
        return any(not is_local(p.target) for p in self.mine)


@functools.lru_cache(maxsize=4096)
def share(source: jax.sharding.Sharding, target: NamedSharding, shape: tuple[int, ...]) -> Share:
    """The share of this process in an array's way from one sharding to another."""
    found = pieces(source, target, shape)
    mine = tuple(p for p in found if is_local(p.source) or is_local(p.target))
    targets = {d: box for d, box in device_boxes(target, shape).items() if is_local(d)}
    starts = {
        d: tuple(p.box.relative_to(box).start for p in mine if p.target == d) for d, box in targets.items()
    }  # fmt: skip
    is_whole = len(mine) == 1 and not is_local(mine[0].source) and mine[0].box == targets.get(mine[0].target)
    only = mine[0] if is_whole and target.mesh.size == 1 and memory_kind(target) is None else None
    return Share(len(found), mine, device_boxes(source, shape), targets, starts, only)
