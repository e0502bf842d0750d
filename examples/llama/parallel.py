"""How a model lies on devices: the groups of the pipeline, and which mesh axis divides which parameters in a group."""

import sys
from typing import Any

import jax
import numpy as np
from context import AXIS as CONTEXT
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import mpmd

# The names of the parameters' axes, and which axis of the mesh divides each name.

AXES = {
    "embed": ("vocabulary", "width"),
    "head": ("width", "vocabulary"),
    "query": ("width", "heads", None),
    "key": ("width", "heads", None),
    "value": ("width", "heads", None),
    "output": ("heads", None, "width"),
    "gate": ("width", "hidden"),
    "up": ("width", "hidden"),
    "down": ("hidden", "width"),
}
RULES: dict[str, str | None] = dict.fromkeys(("vocabulary", "heads", "hidden", "experts"), "tensor")
RULES["width"] = "data"
"""Width over the data axis is FSDP; heads and hidden over the tensor axis are tensor parallel."""


def spec_of(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """Returns the spec of a parameter in a group, by the last name of its path. Leaves uneven axes whole."""
    names = [key.key for key in path if hasattr(key, "key")]
    axes = AXES.get(names[-1], ()) if names else ()
    if "experts" in names and axes:
        axes = ("experts", *(axis if axis == "width" else None for axis in axes))
    axes = (*(None,) * (len(shape) - len(axes)), *axes)  # axes of stacked layers come first
    wanted = [RULES.get(axis or "") for axis in axes]
    return P(
        *(name if name and size % mesh.shape[name] == 0 else None for name, size in zip(wanted, shape, strict=True))
    )


def make_mesh(groups: int, data: int, tensor: int, context: int = 1) -> mpmd.MpmdMesh:
    """Makes groups of data × context × tensor devices. With too few devices, groups share them."""
    sizes, names = (data, context, tensor), ("data", CONTEXT, "tensor")
    inside = data * context * tensor
    wanted = groups * inside
    if len(jax.devices()) < inside:
        asked = " × ".join(f"--{name} {size}" for name, size in zip(names, sizes, strict=True))
        sys.exit(f"a group of {asked} needs {inside} devices; there are {len(jax.devices())}")
    devices = np.array(jax.devices())
    types = (AxisType.Auto,) * 3
    if len(devices) >= wanted:
        grid = devices[:wanted].reshape(groups, *sizes)
        return mpmd.MpmdMesh(Mesh(grid, ("stage", *names), axis_types=(AxisType.Auto, *types)), "stage")
    meshes = [
        Mesh(devices[i : i + inside].reshape(sizes), names, axis_types=types)
        for i in range(0, len(devices) - inside + 1, inside)
    ]
    return mpmd.MpmdMesh.from_groups([meshes[g * len(meshes) // groups] for g in range(groups)])


def devices_of(mesh: mpmd.MpmdMesh) -> list[Any]:
    """Returns the devices that the groups use, each once."""
    return list(dict.fromkeys(device for group in mesh.groups for device in group.devices.flat))


def peak_flops(mesh: mpmd.MpmdMesh) -> float | None:
    """Returns the bfloat16 FLOP/s of all devices of the groups, where the data sheet is known."""
    devices = devices_of(mesh)
    kind = devices[0].device_kind.lower()
    known = next((name for name in ("h100", "h200", "b200", "a100") if name in kind), None)
    return mpmd.Target.named(known).flops * len(devices) if known else None
