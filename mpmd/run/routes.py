"""Moves values between groups.

In one process a value is put on the consumer's devices by `jax.device_put`, which takes any sharding to any
sharding. Between processes it goes in pieces, one for each part of a target shard that one source shard has, over the
job's wire (`wires.py`). Neither waits for the value to be computed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.boxes import Box, device_boxes
from mpmd.arrays.layouts import memory_kind
from mpmd.arrays.mesh import Device
from mpmd.job.job import Job


def mover(source: NamedSharding, target: NamedSharding, dtype) -> Callable[[jax.Array], jax.Array]:
    """What moves an array from one group's sharding to another's."""
    if not keys.is_key(dtype) and (copy := compat.put(source, target)) is not None:
        return copy
    return functools.partial(jax.device_put, device=target_of(target))


def target_of(sharding: NamedSharding):
    """What to hand to `jax.device_put`: a bare device where that means the same, at half the cost."""
    if sharding.mesh.size == 1 and memory_kind(sharding) is None:
        return compat.devices(sharding).flat[0]
    return sharding


def is_alias(source: NamedSharding, target: NamedSharding, ndim: int) -> bool:
    """Whether a value that lies as `source` already lies as `target` (groups that share devices)."""
    return compat.devices(source).tolist() == compat.devices(target).tolist() and source.is_equivalent_to(target, ndim)


def put(x, sharding: NamedSharding) -> jax.Array:
    """A host array or an array of this process on the devices of one group."""
    placed = jax.device_put(x, sharding)
    if isinstance(placed.sharding, SingleDeviceSharding):
        placed = jax.device_put(placed, sharding)
    return placed


# --- between processes ----------------------------------------------------------------------------


def is_local(mesh: Mesh) -> bool:
    """Whether every device of a mesh is this process's."""
    return all(is_mine(d) for d in mesh.devices.flat)


def is_mine(device: Device) -> bool:
    """Whether a device is this process's."""
    return device.process_index == device.client.process_index()


class Piece(NamedTuple):
    """A box of an array that goes from one device to another; `number` is its place in a transfer."""

    number: int
    source: Device
    target: Device
    box: Box


@functools.lru_cache(maxsize=4096)
def pieces(source, target, shape: tuple[int, ...]) -> tuple[Piece, ...]:
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
                near = [d for d in devices if d == device] or [
                    d for d in devices if d.process_index == device.process_index
                ]
                chosen = (near or devices)[turn % len(near or devices)]
                found.append(Piece(len(found), chosen, device, part))
    return tuple(found)


class Route:
    """How one value goes between two shardings, as far as this process takes part.

    Args:
      first: the number of the transfer's first piece, among all of a program.
      keep: the source may be donated or deleted by the user later, so that copies of it are sent.
    """

    def __init__(self, job: Job, source: NamedSharding, target: NamedSharding, aval, first: int, keep: bool, what: str):
        self.job, self.target, self.aval, self.what, self._keep = job, target, aval, what, keep
        self._memory = memory_kind(target)
        self.sources = device_boxes(source, tuple(aval.shape))
        self.targets = {d: b for d, b in device_boxes(target, tuple(aval.shape)).items() if is_mine(d)}
        self.all = pieces(source, target, tuple(aval.shape))
        self.num_pieces = len(self.all)
        self.first = first
        self.mine = [p for p in self.all if is_mine(p.source) or is_mine(p.target)]
        self.outgoing = [p for p in self.mine if not is_mine(p.target)]
        incoming = [p for p in self.mine if is_mine(p.target)]
        self._starts = {
            d: tuple(_relative(p.box, box) for p in incoming if p.target == d) for d, box in self.targets.items()
        }
        is_whole = len(self.mine) == 1 and bool(incoming) and incoming[0].box == self.targets.get(incoming[0].target)
        # One piece from elsewhere that is all there is: nothing to put together.
        self._all_in_one = (
            incoming[0]
            if is_whole and not is_mine(incoming[0].source) and target.mesh.size == 1 and self._memory is None
            else None
        )

    def carry(self, x: jax.Array | None, base: int) -> jax.Array | None:
        """Sends this process's pieces and receives those for its devices, in the order that all processes share.

        Args:
          x: this process's part of the source, if it has one.
          base: added to the pieces' numbers.

        Returns:
          The value on this process's target devices, if it has any.
        """
        if self._all_in_one is not None:
            return self._receive(self._all_in_one, base)
        shards = {} if x is None else _shards(x)
        parts: dict[Device, list[jax.Array]] = {d: [] for d in self.targets}
        for piece in self.mine:
            if not is_mine(piece.source):
                parts[piece.target].append(self._receive(piece, base))
            elif is_mine(piece.target):
                part = self._cut(shards[piece.source], piece)
                parts[piece.target].append(jax.device_put(part, piece.target, may_alias=False))
            else:
                self._send(shards[piece.source], piece, base)
        return self._assembled(parts) if self.targets else None

    def _assembled(self, parts: dict[Device, list[jax.Array]]) -> jax.Array:
        arrived = [
            found[0]
            if len(found) == 1 and found[0].shape == self.targets[device].shape
            else _assemble(self.targets[device].shape, self.aval.dtype, self._starts[device], device, found)
            for device, found in parts.items()
        ]
        if len(arrived) == 1 and self.target.mesh.size == 1 and self._memory is None:
            return arrived[0]
        if self._memory is None:
            return jax.make_array_from_single_device_arrays(self.aval.shape, self.target, arrived)
        place = self.target.with_memory_kind("device")
        value = jax.make_array_from_single_device_arrays(self.aval.shape, place, arrived)
        return jax.device_put(value, self.target)

    def _send(self, shard: jax.Array, piece: Piece, base: int) -> None:
        part = self._cut(shard, piece)
        if part is shard and self._keep:
            part = _copied(part)
        part = keys.to_data(part)
        number = base + self.first + piece.number
        self.job.wire.send(number, part, piece.target)
        self.job.activity.expect(part, self.what, (), number)

    def _receive(self, piece: Piece, base: int) -> jax.Array:
        shape, dtype = keys.data_shape(piece.box.shape, self.aval.dtype), keys.data_dtype(self.aval.dtype)
        number = base + self.first + piece.number
        data = self.job.wire.receive(number, shape, dtype, piece.source, piece.target)
        self.job.activity.expect(data, self.what, (piece.source.process_index,), number)
        return keys.from_data(data, self.aval.dtype)

    def _cut(self, shard: jax.Array, piece: Piece) -> jax.Array:
        held = self.sources[piece.source]
        if shard.sharding.memory_kind not in (None, piece.source.default_memory().kind):
            shard = jax.device_put(shard, piece.source)
        if held == piece.box:
            return shard
        return _cut(shard, _relative(piece.box, held), piece.box.shape)


def _relative(box: Box, within: Box) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(box.start, within.start, strict=True))


def _shards(x: jax.Array) -> dict[Device, jax.Array]:
    devices = x.devices()
    if len(devices) == 1 and x.is_fully_addressable:
        return {next(iter(devices)): x}
    return {s.device: s.data for s in x.addressable_shards}


_copied = jax.jit(jnp.copy)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(shard: jax.Array, start: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.slice(shard, start, tuple(a + n for a, n in zip(start, shape, strict=True)))


def _assemble(shape, dtype, starts, device: Device, parts) -> jax.Array:
    if not parts:  # nothing in it
        return keys.zeros(shape, dtype, device)
    return _join(shape, starts, parts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _join(shape, starts, parts):
    dtype = parts[0].dtype
    whole = jnp.zeros(keys.data_shape(shape, dtype), keys.data_dtype(dtype))
    for start, part in zip(starts, map(keys.to_data, parts), strict=True):
        whole = jax.lax.dynamic_update_slice(whole, part, (*start, *[0] * (whole.ndim - len(start))))
    return keys.from_data(whole, dtype)


# --- the user's arrays ----------------------------------------------------------------------------


def place(values: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Host arrays and arrays of this process on the devices of groups, which may span other processes.

    Where a group does, every process gives the same values, as to `jax.make_array_from_callback`; an array that
    lies there already, among other places, is used as it is.
    """
    placed: list[Any] = [None] * len(values)
    local = []
    for i, (x, sharding) in enumerate(zip(values, shardings, strict=True)):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            if lies_as(x, sharding):
                shards = _shards(x)
                mine = [shards[d] for d in device_boxes(sharding, x.shape) if d in shards]
                placed[i] = jax.make_array_from_single_device_arrays(x.shape, sharding, mine)
                continue
            x = x.addressable_data(0)  # all of it, as `is_placeable` has found
        if sharding.is_fully_addressable:
            local.append((i, x))
        else:
            placed[i] = _place_everywhere(x, sharding)
    if local:
        moved = jax.device_put([x for _, x in local], [shardings[i] for i, _ in local])
        for (i, _), x in zip(local, moved, strict=True):
            placed[i] = x
    return placed


def is_placeable(x: jax.Array, sharding: NamedSharding) -> bool:
    """Whether `place` can bring an array to the devices of a group without asking another process."""
    return x.is_fully_addressable or x.is_fully_replicated or lies_as(x, sharding)


def lies_as(x: jax.Array, sharding: NamedSharding) -> bool:
    """Whether an array over many processes has on a group's devices just what is wanted there."""
    held = device_boxes(x.sharding, x.shape)
    wanted = device_boxes(sharding, x.shape)
    return all(held.get(d) == box for d, box in wanted.items()) and x.sharding.memory_kind == sharding.memory_kind


def _place_everywhere(x, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and keys.is_key(x.dtype):
        data = np.asarray(keys.to_data(x))
        boxes = {d: box for d, box in device_boxes(sharding, x.shape).items() if is_mine(d)}
        shards = [keys.from_data(jax.device_put(data[box.slices], d), x.dtype) for d, box in boxes.items()]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
