"""Cuts an array into pieces: one for each part of a target shard that one source shard has.

The plan depends only on the shardings, so that every process makes the same plan.
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
    """Returns the pieces that bring an array from one sharding to another: every target shard, cut by source shards.

    The answer is the same in all processes. From several replicas, it takes the one on the target's device, else one
    in the target's process, else each in turn.
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
    """The part of one process in moving the pieces of an array."""

    num_pieces: int  # the number of pieces of all processes
    mine: tuple[Piece, ...]  # from or to a device of this process, in the order that all processes share
    sources: Mapping[Device, Box]  # per device of the source sharding, the box that it holds
    targets: Mapping[Device, Box]  # per device of this process, the box that it receives
    starts: Mapping[Device, tuple[tuple[int, ...], ...]]  # per such device, the starts of its pieces in its box
    only: Piece | None  # the single piece of this process, if it arrives from elsewhere and needs no assembly

    @property
    def sends(self) -> bool:
        """Whether this process sends a piece to another one."""
        return any(not is_local(p.target) for p in self.mine)


@functools.lru_cache(maxsize=4096)
def share(source: jax.sharding.Sharding, target: NamedSharding, shape: tuple[int, ...]) -> Share:
    """Returns this process's part in moving an array from one sharding to another."""
    found = pieces(source, target, shape)
    mine = tuple(p for p in found if is_local(p.source) or is_local(p.target))
    targets = {d: box for d, box in device_boxes(target, shape).items() if is_local(d)}
    starts = {
        d: tuple(p.box.relative_to(box).start for p in mine if p.target == d) for d, box in targets.items()
    }  # fmt: skip
    is_whole = len(mine) == 1 and not is_local(mine[0].source) and mine[0].box == targets.get(mine[0].target)
    only = mine[0] if is_whole and target.mesh.size == 1 and memory_kind(target) is None else None
    return Share(len(found), mine, device_boxes(source, shape), targets, starts, only)
