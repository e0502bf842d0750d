"""Wires carry an array of one device to another process, by cross-host `device_put` or `jax.experimental.transfer`.

GPUs have cross-host `device_put`. CPU devices, and processes that share a GPU, pull.
"""

import contextlib
import functools
import json
import os
import socket
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, Protocol

import jax
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import Device
from mpmd.job.activity import Activity
from mpmd.job.spares import sever

# The numbers of the pieces in all steps of a program begin at the program's number, shifted by this many bits.
NUMBER_BITS = 44
# A transfer has a number of 64 bits. Half of the numbers are for steps, the others for calls that are over on return.
NUM_NUMBERS = 1 << (63 - NUMBER_BITS)
# For microbatches of several shapes, the bits from here on hold a number of their order.
ORDER_BITS = 32
# NCCL 2.30.7 hangs where programs of several groups send to each other; 2.31.2 does not (NVIDIA/jaxpp#11).
_NCCL_WANTED = (2, 31)


class Wire(Protocol):
    """A carrier of arrays from one device to a device of another process.

    All processes make their sends and receives in one common order (in a step, the order of `scheduler.merge`). So a
    call may block until the other end makes its own call, without a deadlock; it never blocks until the value is
    computed. A sent buffer must not be deleted or donated before the receiver has it.
    """

    name: str  # the part of JAX that does it, for `explain()`
    is_ordered: bool  # whether only their order tells transfers apart

    def send(self, number: int, array: jax.Array, target: Device) -> None:
        """Sends an array of this process under a number that is used once."""
        ...

    def receive(self, number: int, shape: Sequence[int], dtype: DTypeLike, source: Device, target: Device) -> jax.Array:
        """Receives the array of a number from `source` on `target`, a device of this process."""
        ...

    def interrupt(self) -> None:
        """Notes that this process has not made all the calls that the others wait for."""
        ...

    def sever(self) -> None:
        """Makes all transfers on their way fail, here and at the other end. Any thread may call it."""
        ...


class Member(Protocol):
    """The part of a `Job` that a wire uses."""

    rank: int
    num_ranks: int
    address: str
    epoch: int
    store: compat.KeyValueStore
    activity: Activity

    @property
    def wire(self) -> Wire: ...

    def find(self, key: str, what: str, rank: int) -> str: ...


def receive_piece(
    job: Member, number: int, shape: Sequence[int], dtype: DTypeLike, source: Device, target: Device, text: str
) -> jax.Array:
    """Receives a piece over the job's wire. The watchdog expects it from now on, under the name `text`."""
    data = job.wire.receive(number, shape, dtype, source, target)
    job.activity.expect(data, text, (source.process_index,), number)
    return data


def wire_class(job: Member) -> "type[PutWire] | type[PullWire]":
    """Returns the fastest wire that the job's devices have; the same in every process."""
    if not compat.has_cross_host_put():
        return PullWire
    told = [job.find(f"mpmd/devices/{rank}", "finding the devices", rank) for rank in range(job.num_ranks)]
    return PullWire if "" in told or are_shared(map(json.loads, told)) else PutWire


def expected_wire(platform: str) -> str:
    """Returns the name of the wire between processes with devices that are not here."""
    return f"{PutWire.name} (by pulls where processes share a GPU)" if platform == "gpu" else PullWire.name


def hardware() -> str:
    """Returns the host and the GPUs of this process, for `are_shared` in every other."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = set()
    for device in jax.local_devices():
        number = getattr(device, "local_hardware_id", None) or 0
        named = visible[number] if number < len(visible) else ""
        gpus.add(compat.pci_bus_id(device) or named or str(number))
    return json.dumps([socket.gethostname(), sorted(gpus)])


def are_shared(told: Iterable[tuple[str, list[str]]]) -> bool:
    """Returns whether two processes use the same GPU, so that NCCL would refuse to connect them."""
    gpus = [(host, gpu) for host, numbers in told for gpu in numbers]
    return len(set(gpus)) < len(gpus)


class PullWire:
    """A wire of `jax.experimental.transfer`: the sender keeps the buffer until the receiver has pulled it."""

    name = "jax.experimental.transfer"
    is_ordered = False

    def __init__(self, job: Member):
        self._job = job
        self._server = compat.start_transfer_server(job.address)
        self._connections: dict[int, Any] = {}
        self._others: list[str] = []  # the addresses that this process has connected to
        self._folder = f"mpmd/address/{job.epoch}"
        job.store.key_value_set(f"{self._folder}/{job.rank}", self._server.address())

    def send(self, number: int, array: jax.Array, target: Device) -> None:
        """Offers `array` to the target's process."""
        self._server.await_pull(number, [array])

    def receive(self, number: int, shape: Sequence[int], dtype: DTypeLike, source: Device, target: Device) -> jax.Array:
        """Pulls the array that the source's process offers."""
        rank = source.process_index
        connection = self._connections.get(rank) or self.connect(rank)
        return connection.pull(number, _wanted(tuple(shape), dtype, target))[0]

    def interrupt(self) -> None:
        """Does nothing: nobody asks for the numbers of the remaining arrays."""

    def sever(self) -> None:
        """Ends the connections of this process."""
        sever(self._server.address(), list(self._others))

    def connect(self, rank: int) -> Any:
        """Connects to a rank; later calls of `receive` use the same connection."""
        address = self._job.find(f"{self._folder}/{rank}", "finding the address", rank)
        self._others.append(address)
        self._connections[rank] = self._server.connect(address)
        return self._connections[rank]


class NoWire(PullWire):
    """A wire that sends nothing. It receives arrays that raise at once when they are read."""

    name = "nothing"

    def __init__(self, job: Member):
        self._server = compat.start_transfer_server("127.0.0.1")
        self._connections = {}
        self._ended = self._server.connect(self._server.address())
        sever(self._server.address(), [self._server.address()])

    def send(self, number: int, array: jax.Array, target: Device) -> None:
        """Does nothing: nobody asks for the array."""

    def sever(self) -> None:
        """Does nothing: no transfer is on its way."""

    def connect(self, rank: int) -> Any:
        """Returns a connection that has ended."""
        return self._ended


@functools.lru_cache(maxsize=4096)
def _wanted(shape: tuple[int, ...], dtype: DTypeLike, device: Device) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))]


class PutWire:
    """A wire of `jax.device_put` to a device of another process, called at both ends. The order tells transfers apart.

    The first call for two devices connects them: each end waits for the other.
    """

    name = "cross-host jax.device_put"
    is_ordered = True

    def __init__(self, job: Member):
        if jax.local_devices()[0].platform == "gpu":
            _warn_of_old_nccl()
        self._job = job
        self._connected: set[tuple[Device, Device]] = set()
        self._is_interrupted = False

    def send(self, number: int, array: jax.Array, target: Device) -> None:
        """Puts `array` on the target."""
        self._check()
        source = next(iter(array.devices()))
        if not array.committed:  # JAX would silently send nothing
            array = jax.device_put(array, SingleDeviceSharding(source))
        self._put(array, source, target, target)

    def receive(self, number: int, shape: Sequence[int], dtype: DTypeLike, source: Device, target: Device) -> jax.Array:
        """Puts the source's array, which has no data in this process, on the target."""
        self._check()
        return self._put(_away(tuple(shape), dtype, source), source, target, source)

    def interrupt(self) -> None:
        """Makes all later sends and receives raise: they would be matched with the wrong calls of other processes."""
        self._is_interrupted = True

    def sever(self) -> None:
        """Does nothing: a transfer that GPUs wait for cannot be broken off."""

    def _check(self) -> None:
        if self._is_interrupted:
            raise RuntimeError(
                "mpmd: a step, a reshard or a device_get of this process ended on the way with an error, and what"
                " other processes send since then cannot be told apart. Restart the job."
            )

    def _put(self, array: jax.Array, source: Device, target: Device, other: Device) -> jax.Array:
        place = SingleDeviceSharding(target)
        if (source, target) in self._connected:
            return jax.device_put(array, place)
        rank = other.process_index
        with self._job.activity.during("agreeing", f"connecting {source} to {target} of rank {rank}", [rank]):
            put = jax.device_put(array, place)
        self._connected.add((source, target))
        return put


@functools.lru_cache(maxsize=4096)
def _away(shape: tuple[int, ...], dtype: DTypeLike, device: Device) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, SingleDeviceSharding(device), [], dtype=dtype)


def _warn_of_old_nccl() -> None:
    for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            version = metadata.version(package)
            if tuple(map(int, version.split(".")[:2])) < _NCCL_WANTED:
                warnings.warn(
                    f"mpmd: {package} {version} is installed. NCCL 2.30.7 has hung in programs that send between"
                    f" groups of GPUs, and 2.31.2 has not: pip install -U '{package}>=2.31.2'.",
                    stacklevel=2,
                )
