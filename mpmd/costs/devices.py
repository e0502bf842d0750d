"""The speed and the memory of the devices of a mesh, to compare cuts before anything has run."""

import dataclasses
import math

from mpmd.arrays.mesh import MpmdMesh, is_local
from mpmd.arrays.targets import GB, TB, Target
from mpmd.costs.machine import Machine

# A device without a data sheet (a CPU, say): operations and bytes in the ratio of a common processor. Only the ratio
# matters for the choice of a cut.
_UNKNOWN = Target(
    "unknown", "a device without a data sheet", "cpu", 1 << 60, 20 * GB, 0.2 * TB, 0.2 * TB, 2 * GB, 1 * GB
)


_WORK_ALONE = Machine(
    dataclasses.replace(_UNKNOWN, link_bandwidth=math.inf, network_bandwidth=math.inf),
    latency_s=0,
    launch_s=0,
)


def machine_for_cuts(mesh: MpmdMesh) -> Machine:
    """Returns the machine by which cuts are compared. Without a data sheet, its transfers and program starts take no
    time: then a small model on a CPU is cut like a large one of the same shape.
    """
    machine = machine_of(mesh)
    return _WORK_ALONE if is_unknown(machine) else machine


def machine_of(mesh: MpmdMesh) -> Machine:
    """Returns the machine of the devices' data sheet, or the default one."""
    device = mesh.groups[0].devices.flat[0]
    target = mesh.target or next((t for t in Target.known.values() if t.description == device.device_kind), None)
    return Machine(_UNKNOWN) if target is None else Machine(target)


def is_unknown(machine: Machine) -> bool:
    """Returns whether these devices have no data sheet."""
    return machine.target.name == _UNKNOWN.name


def memory_limit(mesh: MpmdMesh, machine: Machine) -> float | None:
    """Returns the bytes that a group may use on each of its devices, which it may share; None if they are not known."""
    if mesh.is_described:
        return None if is_unknown(machine) else float(machine.usable_nbytes)
    local = {device: groups for device, groups in mesh.groups_by_device.items() if is_local(device)}
    if not local:
        return None
    limits = [stats["bytes_limit"] for d in [*local][:1] if (stats := d.memory_stats()) and "bytes_limit" in stats]
    if not limits and is_unknown(machine):
        return None
    return float(limits[0] if limits else machine.usable_nbytes) / max(map(len, local.values()))
