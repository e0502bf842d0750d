"""Moves the bytes of one piece from one shard into another, in this process.

A sink is a target shard while it is filled; a carrier brings a piece to it: `LocalCarrier` inside this process,
`WireCarrier` (`remote.py`) between two. The executor knows nothing else about where memory is.

Memory that this process can address (CPU devices, pinned host memory, numpy) is filled in place: one copy, no
program to compile, no buffer in between. On other devices a small program cuts a piece out, the piece is sent as an
array, and a second program writes it into a donated buffer, which therefore stays in place.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from mpmd.arrays.boxes import Box
from mpmd.arrays.mesh import Device
from reshard.places import HostMemory, Place, aligned_empty

Shard = jax.Array | np.ndarray

# Copies at least this large are worth a thread.
_THREADED_BYTES = 1 << 18


class HostSink:
    """A shard in memory that this process can address, while it is filled."""

    def __init__(self, device: Place, shape: tuple[int, ...], dtype: np.dtype, memory_kind: str | None):
        self._place = None if isinstance(device, HostMemory) else SingleDeviceSharding(device, memory_kind=memory_kind)
        self._buffer = aligned_empty(shape, dtype)
        self._taken: jax.Array | None = None

    def write(self, box: Box, data: Shard) -> bool:
        """Writes data into a box of the shard; returns whether the data became the shard and needed no other memory."""
        if isinstance(data, jax.Array) and self.takes(data):
            self._taken, self._buffer = data, np.empty(0)
            return True
        self._buffer[box.slices] = np.asarray(data)
        return False

    def takes(self, data: jax.Array) -> bool:
        """Returns whether an array can become the shard as it is."""
        return self._place is not None and data.shape == self._buffer.shape and data.sharding == self._place

    @property
    def contents(self) -> np.ndarray:
        """The data written so far, to be read before the next `write`."""
        return self._buffer if self._taken is None else np.asarray(self._taken)

    def finish(self) -> Shard:
        """Returns the shard as an array on its device; nothing is written afterwards."""
        if self._taken is not None:
            return self._taken
        buffer, self._buffer = self._buffer, np.empty(0)
        return buffer if self._place is None else jax.device_put(buffer, self._place, may_alias=True)


class DeviceSink:
    """A shard that is being filled, on a device with memory that only its own programs can write to."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: np.dtype):
        self.place = SingleDeviceSharding(device)
        self._shape, self._dtype = shape, dtype
        self._buffer: jax.Array | None = None

    def takes(self, data: jax.Array) -> bool:
        return data.shape == self._shape

    def is_beside(self, source: jax.Array) -> bool:
        """Returns whether a source shard on a device is in the same memory."""
        return source.sharding.is_equivalent_to(self.place, source.ndim)

    def write(self, box: Box, data: jax.Array) -> bool:
        if data.shape == self._shape:
            self._buffer = data
            return True
        self._buffer = _write(self.contents, data, box.start)
        return False

    def copy(self, source: jax.Array, box: Box, into: Box) -> None:
        """Copies a box of another array on the same device, in one program and without a buffer in between."""
        self._buffer = _copy(self.contents, source, box.start, into.start, box.shape)

    @property
    def contents(self) -> jax.Array:
        if self._buffer is None:
            self._buffer = jnp.zeros(self._shape, self._dtype, device=self.place)
        return self._buffer

    def wait(self) -> None:
        jax.block_until_ready(self._buffer)

    def finish(self) -> jax.Array:
        return self.contents


Sink = HostSink | DeviceSink


def open_sink(device: Place, shape: tuple[int, ...], dtype: np.dtype, memory_kind: str | None) -> Sink:
    """Opens the kind of sink that fits the memory."""
    if is_host_memory(device) or _is_host_kind(memory_kind):
        return HostSink(device, shape, dtype, memory_kind)
    return DeviceSink(device, shape, dtype)


def is_host_memory(device: Place) -> bool:
    """Returns whether this process can read and write the memory of the device as its own."""
    return isinstance(device, HostMemory) or device.platform == "cpu"


def _is_host_kind(memory_kind: str | None) -> bool:
    return memory_kind is not None and memory_kind.endswith("host")


def _is_on_device(source: Shard) -> TypeGuard[jax.Array]:
    """Returns whether this process cannot read a shard as its own memory."""
    return isinstance(source, jax.Array) and not _is_on_host(source.sharding, is_host_memory)


@functools.lru_cache(maxsize=1024)
def _is_on_host(sharding: jax.sharding.Sharding, is_host: Callable[[Device], bool]) -> bool:
    return is_host(next(iter(sharding.device_set))) or _is_host_kind(sharding.memory_kind)


class LocalCarrier:
    """Moves pieces inside this process."""

    def __init__(self, num_threads: int):
        self._pool = ThreadPoolExecutor(num_threads) if num_threads > 1 else None
        self._copies: list[Future[bool]] = []
        self._written: list[DeviceSink] = []

    def carry(self, source: Shard, box: Box, sink: Sink, into: Box) -> tuple[int, int]:
        """Starts to move box `box` of a source shard into box `into` of a sink.

        The source must stay as it is until `wait` returns. Returns the bytes of working memory on the sender and on the
        receiver.
        """
        nbytes, cut_bytes = box.nbytes(source.dtype.itemsize), 0
        whole = box.shape == tuple(source.shape)
        if not _is_on_device(source):
            data = np.asarray(source)[box.slices]
        elif isinstance(sink, DeviceSink) and not whole and sink.is_beside(source):
            self._written.append(sink)
            sink.copy(source, box, into)
            return nbytes, 0
        else:
            data, cut_bytes = (source, 0) if whole else (cut(source, box), nbytes)
        if isinstance(sink, DeviceSink):
            # The target must be a buffer of its own, even if the data is on that device already.
            arrived = jax.device_put(data, sink.place, may_alias=False if data is source else None)
            becomes_target = sink.write(into, arrived)
            self._written.append(sink)
            return cut_bytes, 0 if becomes_target else nbytes
        self._copy(np.asarray(data), sink, into)
        return cut_bytes, 0

    def _copy(self, data: np.ndarray, sink: HostSink, into: Box) -> None:
        if self._pool is None or data.nbytes < _THREADED_BYTES:
            sink.write(into, data)
        else:
            self._copies.append(self._pool.submit(sink.write, into, data))

    def wait(self) -> None:
        """Waits until everything that was started has arrived."""
        for copy in self._copies:
            copy.result()
        self._copies.clear()
        for sink in self._written:
            sink.wait()
        self._written.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def cut(array: jax.Array, box: Box) -> jax.Array:
    """Cuts a box out of a single-device array, on its device. Compiled once for each shape of box, not each place."""
    return _cut(array, box.start, box.shape)


@functools.partial(jax.jit, static_argnums=2)
def _cut(array: jax.Array, start: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, start, shape)


@functools.partial(jax.jit, static_argnums=4, donate_argnums=0)
def _copy(
    buffer: jax.Array, source: jax.Array, start: tuple[int, ...], into: tuple[int, ...], shape: tuple[int, ...]
) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, jax.lax.dynamic_slice(source, start, shape), into)


@functools.partial(jax.jit, donate_argnums=0)
def _write(buffer: jax.Array, data: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, data, start)
