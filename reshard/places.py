"""Describes where memory is: devices that need not exist, and the host.

A layout for 1,024 GPUs is planned on a laptop: `describe_mesh` makes an ordinary `jax.sharding.Mesh` of devices
that are only names, which `NamedSharding`, `MpmdMesh` and `MpmdSharding` take like any other mesh.
"""

import dataclasses
import math
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mpmd.arrays.mesh import Device
from scheduler.base.texts import counted

# XLA's CPU runtime takes over numpy memory of this alignment as it is.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class DescribedDevice:
    """A device that is used in plans and never touched."""

    id: int
    process_index: int
    host: int
    platform: str = "gpu"
    device_kind: str = "described"
    client: ClassVar = types.SimpleNamespace(process_index=lambda: -1)  # a runtime that this process is not in

    def __repr__(self) -> str:
        return f"DescribedDevice({self.id}, host {self.host})"


def describe_mesh(
    axes: Mapping[str, int],
    *,
    devices_per_host: int = 8,
    devices_per_process: int | None = None,
    first_device: int = 0,
    axis_types: tuple[AxisType, ...] | None = None,
) -> Mesh:
    """Returns a mesh of devices that need not exist, to plan with.

    Args:
        axes: name and size of each mesh axis, outermost first; devices are numbered in row-major order.
        devices_per_host: how many devices a host has.
        devices_per_process: how many devices a process owns; by default all of a host.
        first_device: the number of the first device, so that two meshes may have different devices.
        axis_types: as in `jax.make_mesh`.

    Raises:
        ValueError: the size of an axis is not a positive integer.

    Examples:
        >>> mesh = describe_mesh({"stage": 8, "data": 128})
        >>> mesh.size, mesh.devices[7, 127].host
        (1024, 127)
    """
    if wrong := {name: size for name, size in axes.items() if not isinstance(size, int | np.integer) or size < 1}:
        raise ValueError(f"describe_mesh: the sizes of axes are positive integers; got {wrong}.")
    ids = range(first_device, first_device + math.prod(axes.values()))
    devices = [DescribedDevice(i, i // (devices_per_process or devices_per_host), i // devices_per_host) for i in ids]
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes), axis_types=axis_types)


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """The memory of one process's host as a place that holds numpy arrays whole. Used like a sharding."""

    process_index: int = 0

    @property
    def host(self) -> Hashable:
        return ("process", self.process_index)

    def __repr__(self) -> str:
        return f"HostMemory(process {self.process_index})"


@dataclasses.dataclass(frozen=True)
class EveryHost:
    """The memory of every process's host: the place of host arrays that all processes were given alike."""

    num_processes: int

    def __repr__(self) -> str:
        return f"EveryHost({counted(self.num_processes, 'process')})"


# The place of a whole array, and of one shard: a device, also a `DescribedDevice`.
Placement = jax.sharding.Sharding | HostMemory | EveryHost
Place = Device | HostMemory


def host_of(device: Place) -> Hashable:
    """Returns the host of a device. JAX does not tell hosts apart, so each process is its own host unless specified."""
    return getattr(device, "host", ("process", device.process_index))


def is_local(device: Place) -> bool:
    """Returns whether this process can touch the device's memory."""
    if isinstance(device, HostMemory):
        return device.process_index == jax.process_index()
    return device.process_index == device.client.process_index()


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialised array that a CPU device can take over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def bytes_of(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array in C order, in the array's own memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
