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

# Pieces of all steps of a program are numbered from its own number, shifted so far.
NUMBER_BITS = 44
# A transfer has a number of 64 bits. Half of them are for steps, the others for what is done with when it returns.
NUM_NUMBERS = 1 << (63 - NUMBER_BITS)
# Of a step whose microbatches have several shapes, a number of their order stands from here on.
ORDER_BITS = 32
# NCCL 2.30.7 hangs where programs of several groups send to each other, 2.31.2 does not (NVIDIA/jaxpp#11).
_NCCL_WANTED = (2, 31)


class Wire(Protocol):
    """Carries arrays of one device to a device of another process.

    All processes come to the transfers that they have a part in, sends and receives alike, in one order that they
    share (of a step that of `scheduler.merge`). So a call may block until the other end makes its own, without waiting
    in a circle; it never blocks until the value is computed. A sent buffer must not be deleted or donated before it is
    taken.

    Attributes:
      name: the part of JAX that does it, for `explain()`.
      is_ordered: whether transfers are told apart by their order alone.
    """

    name: str
    is_ordered: bool

    def send(self, number: int, array: jax.Array, target: Device) -> None:
        """Sends an array of this process under a number that is used once."""
        ...

    def receive(self, number: int, shape: Sequence[int], dtype: DTypeLike, source: Device, target: Device) -> jax.Array:
        """What is sent under a number from `source` to `target`, a device of this process."""
        ...

    def interrupt(self) -> None:
        """This process has not made all the calls that the others wait for."""
        ...

    def sever(self) -> None:
        """Lets all that is on its way fail, here and at the other end; any thread may call it."""
        ...


class Member(Protocol):
    """What a wire asks of a `Job`."""

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
    """Receives a piece over the job's wire; the watchdog expects it from now on, under the name `text`."""
    data = job.wire.receive(number, shape, dtype, source, target)
    job.activity.expect(data, text, (source.process_index,), number)
    return data


def wire_class(job: Member) -> "type[PutWire] | type[PullWire]":
    """The fastest wire that the job's devices have; the same in every process."""
    if not compat.has_cross_host_put():
        return PullWire
    told = [job.find(f"mpmd/devices/{rank}", "finding the devices", rank) for rank in range(job.num_ranks)]
    return PullWire if "" in told or are_shared(map(json.loads, told)) else PutWire


def expected_wire(platform: str) -> str:
    """In words, what goes between processes whose devices are not here."""
    return f"{PutWire.name} (by pulls where processes share a GPU)" if platform == "gpu" else PullWire.name


def hardware() -> str:
    """The host and the GPUs of this process, for `are_shared` in every other."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = set()
    for device in jax.local_devices():
        number = getattr(device, "local_hardware_id", None) or 0
        named = visible[number] if number < len(visible) else ""
        gpus.add(compat.pci_bus_id(device) or named or str(number))
    return json.dumps([socket.gethostname(), sorted(gpus)])


def are_shared(told: Iterable[tuple[str, list[str]]]) -> bool:
    """Whether two processes use one GPU, so that NCCL would refuse to connect them."""
    gpus = [(host, gpu) for host, numbers in told for gpu in numbers]
    return len(set(gpus)) < len(gpus)


class PullWire:
    """Pulls of `jax.experimental.transfer`: an offer keeps the buffer until the receiver has pulled it."""

    name = "jax.experimental.transfer"
    is_ordered = False

    def __init__(self, job: Member):
        self._job = job
        self._server = compat.start_transfer_server(job.address)
        self._connections: dict[int, Any] = {}
        self._others: list[str] = []  # the addresses that it has connected to
        self._folder = f"mpmd/address/{job.epoch}"
        job.store.key_value_set(f"{self._folder}/{job.rank}", self._server.address())

    def send(self, number: int, array: jax.Array, target: Device) -> None:
        """Lets the target's process pull `array`."""
        self._server.await_pull(number, [array])

    def receive(self, number: int, shape: Sequence[int], dtype: DTypeLike, source: Device, target: Device) -> jax.Array:
        """Pulls what the source's process offers."""
        rank = source.process_index
        connection = self._connections.get(rank) or self.connect(rank)
        return connection.pull(number, _wanted(tuple(shape), dtype, target))[0]

    def interrupt(self) -> None:
        """Does not matter: what is left is under numbers that nobody asks for."""

    def sever(self) -> None:
        """Ends its connections."""
        sever(self._server.address(), list(self._others))

    def connect(self, rank: int) -> Any:
        """The connection to a rank, made at its first use."""
        address = self._job.find(f"{self._folder}/{rank}", "finding the address", rank)
        self._others.append(address)
        self._connections[rank] = self._server.connect(address)
        return self._connections[rank]


class NoWire(PullWire):
    """What is received is an array that fails whoever reads it, at once; what is sent goes nowhere."""

    name = "nothing"

    def __init__(self, job: Member):
        self._server = compat.start_transfer_server("127.0.0.1")
        self._connections = {}
        self._ended = self._server.connect(self._server.address())
        sever(self._server.address(), [self._server.address()])

    def send(self, number: int, array: jax.Array, target: Device) -> None:
        """Nobody asks for it."""

    def sever(self) -> None:
        """Nothing is on its way."""

    def connect(self, rank: int) -> Any:
        """A connection that has ended."""
        return self._ended


@functools.lru_cache(maxsize=4096)
def _wanted(shape: tuple[int, ...], dtype: DTypeLike, device: Device) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))]


class PutWire:
    """`jax.device_put` to a device of another process, called at both ends; numbers do not matter, the order does.

    The first call for two devices connects them, for which each end waits for the other.
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
        if not array.committed:  # JAX would send nothing, and say nothing
            array = jax.device_put(array, SingleDeviceSharding(source))
        self._put(array, source, target, target)

    def receive(self, number: int, shape: Sequence[int], dtype: DTypeLike, source: Device, target: Device) -> jax.Array:
        """Puts the source's array, of which this process has nothing, on the target."""
        self._check()
        return self._put(_away(tuple(shape), dtype, source), source, target, source)

    def interrupt(self) -> None:
        """From now on sends and receives would meet those of something else, so there are none."""
        self._is_interrupted = True

    def sever(self) -> None:
        """What GPUs wait for cannot be broken off."""

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
