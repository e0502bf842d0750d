"""Moves values between groups.

In one process a value is put on the consumer's devices by `jax.device_put`, which takes any sharding to any
sharding. Between processes it goes in pieces, one for each part of a target shard that one source shard has, by
pulls of `jax.experimental.transfer`. Neither waits for the value to be computed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from mpmd import _jax_compat as compat
from mpmd.boxes import Box, device_boxes
from mpmd.distributed import Job
from mpmd.mesh import Device


def mover(source: NamedSharding, target: NamedSharding, dtype) -> Callable[[jax.Array], jax.Array]:
    """What moves an array from one group's sharding to another's."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and (copy := compat.put(source, target)) is not None:
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


def memory_kind(sharding) -> str | None:
    """The memory kind of a sharding where it is not the default one of its devices."""
    kind = sharding.memory_kind
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    device = next(iter(sharding.device_set))
    return None if kind == device.default_memory().kind else kind


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


class Wire:
    """Carries arrays of one device to other processes, by pulls of `jax.experimental.transfer`.

    A value is offered under a number that is used once, and pulled by that number. The offer keeps its buffer
    alive until it is taken; the buffer must not be deleted or donated before.
    """

    def __init__(self, job: Job):
        self._job = job
        self._server = compat.start_transfer_server(job.address)
        self._connections: dict[int, Any] = {}
        job.store.key_value_set(f"mpmd/address/{job.rank}", self._server.address())

    def offer(self, number: int, array: jax.Array) -> None:
        """Lets another process pull `array`."""
        self._server.await_pull(number, [array])

    def pull(self, rank: int, number: int, shape: Sequence[int], dtype, device: Device) -> jax.Array:
        """What `rank` offers under a number, on a device of this process; does not wait for it."""
        connection = self._connections.get(rank) or self.connect(rank)
        return connection.pull(number, _wanted(tuple(shape), dtype, device))[0]

    def connect(self, rank: int) -> Any:
        """The connection to a rank, made at its first use."""
        job = self._job
        with job.watchdog.during("agreeing", f"finding the address of rank {rank}", [rank]):
            address = None
            while address is None:
                try:
                    address = job.store.blocking_key_value_get(f"mpmd/address/{rank}", 1000)
                except jax.errors.JaxRuntimeError as e:
                    if "DEADLINE" not in str(e):
                        raise
        self._connections[rank] = self._server.connect(address)
        return self._connections[rank]


@functools.lru_cache(maxsize=4096)
def _wanted(shape: tuple[int, ...], dtype, device: Device) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))]


class Route:
    """How one value goes between two shardings, as far as this process takes part.

    Args:
      first: the number of the transfer's first piece, among all of a program.
      keep: the source may be donated or deleted by the user later, so that copies of it are sent.
    """

    def __init__(self, job: Job, source: NamedSharding, target: NamedSharding, aval, first: int, keep: bool, what: str):
        self.job, self.target, self.aval, self.what, self._keep = job, target, aval, what, keep
        self._is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
        self._memory = memory_kind(target)
        self.sources = device_boxes(source, tuple(aval.shape))
        self.targets = {d: b for d, b in device_boxes(target, tuple(aval.shape)).items() if is_mine(d)}
        self.all = pieces(source, target, tuple(aval.shape))
        self.num_pieces = len(self.all)
        self.first = first
        self.outgoing = [p for p in self.all if is_mine(p.source) and not is_mine(p.target)]
        self.incoming = {d: [p for p in self.all if p.target == d] for d in self.targets}
        whole = [
            p for ps in self.incoming.values() for p in ps if not is_mine(p.source) and p.box == self.targets[p.target]
        ]
        # One piece that is all there is: nothing to put together.
        self._all_in_one = whole[0] if whole and target.mesh.size == 1 and self._memory is None else None

    def send(self, x: jax.Array, base: int) -> None:
        """Offers this process's pieces to the others."""
        shards = _shards(x)
        expect = self.job.watchdog.expect
        for piece in self.outgoing:
            part = self._cut(shards[piece.source], piece)
            if part is shards[piece.source] and self._keep:
                part = _copied(part)
            if self._is_key:
                part = jax.random.key_data(part)
            number = base + self.first + piece.number
            self.job.wire.offer(number, part)
            expect(part, self.what, (), number)

    def receive(self, x: jax.Array | None, base: int) -> jax.Array:
        """The value on this process's target devices.

        Args:
          x: this process's part of the source, if it has one.
        """
        if self._all_in_one is not None:
            return self._pull(self._all_in_one, base)
        shards = {} if x is None else _shards(x)
        arrived = []
        for device, box in self.targets.items():
            parts = []
            for piece in self.incoming[device]:
                if is_mine(piece.source):
                    parts.append(jax.device_put(self._cut(shards[piece.source], piece), device, may_alias=False))
                else:
                    parts.append(self._pull(piece, base))
            if len(parts) == 1 and parts[0].shape == box.shape:
                arrived.append(parts[0])
            else:
                starts = tuple(
                    tuple(a - b for a, b in zip(p.box.start, box.start, strict=True)) for p in self.incoming[device]
                )
                arrived.append(_assemble(box.shape, self.aval.dtype, starts, device, parts))
        if len(arrived) == 1 and self.target.mesh.size == 1 and self._memory is None:
            value = arrived[0]
        elif self._memory is not None:
            place = self.target.with_memory_kind("device")
            value = jax.make_array_from_single_device_arrays(self.aval.shape, place, arrived)
            value = jax.device_put(value, self.target)
        else:
            value = jax.make_array_from_single_device_arrays(self.aval.shape, self.target, arrived)
        return value

    def _pull(self, piece: Piece, base: int) -> jax.Array:
        shape, dtype = piece.box.shape, self.aval.dtype
        rank, number = piece.source.process_index, base + self.first + piece.number
        if self._is_key:
            shape, dtype = (*shape, *compat.key_shape(dtype)), np.uint32
        data = self.job.wire.pull(rank, number, shape, dtype, piece.target)
        self.job.watchdog.expect(data, self.what, (rank,), number)
        return jax.random.wrap_key_data(data, impl=compat.key_impl(self.aval.dtype)) if self._is_key else data

    def _cut(self, shard: jax.Array, piece: Piece) -> jax.Array:
        held = self.sources[piece.source]
        if shard.sharding.memory_kind not in (None, piece.source.default_memory().kind):
            shard = jax.device_put(shard, piece.source)
        if held == piece.box:
            return shard
        start = tuple(a - b for a, b in zip(piece.box.start, held.start, strict=True))
        return _cut(shard, start, piece.box.shape)


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
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            empty = jnp.zeros((*shape, *compat.key_shape(dtype)), np.uint32, device=device)
            return jax.random.wrap_key_data(empty, impl=compat.key_impl(dtype))
        return jnp.zeros(shape, dtype, device=device)
    return _join(shape, starts, parts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _join(shape, starts, parts):
    if jax.dtypes.issubdtype(parts[0].dtype, jax.dtypes.prng_key):
        data = [jax.random.key_data(p) for p in parts]
        tail = data[0].shape[len(shape) :]
        starts = [(*s, *(0 for _ in tail)) for s in starts]
        return jax.random.wrap_key_data(
            _join((*shape, *tail), tuple(starts), data), impl=compat.key_impl(parts[0].dtype)
        )
    whole = jnp.zeros(shape, parts[0].dtype)
    for start, part in zip(starts, parts, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, part, start)
    return whole


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
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        boxes = device_boxes(sharding, x.shape)
        impl = compat.key_impl(x.dtype)
        shards = [
            jax.random.wrap_key_data(jax.device_put(data[box.slices], d), impl=impl)
            for d, box in boxes.items() if is_mine(d)
        ]  # fmt: skip
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
