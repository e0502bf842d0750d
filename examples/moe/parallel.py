"""How the state lies on devices: the groups of the pipeline, and in a group the axes `data` and `expert`.

Both axes divide the rows of a microbatch. `expert` divides the experts; a parameter that all tokens take is stored in
parts along both (FSDP).
"""

import sys
from typing import Any

import jax
import numpy as np
from experts import STORED
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd

FSDP = ("data", "expert")
WIDTH = {"embed": 1, "head": 0, "query": 1, "key": 1, "value": 1, "output": 3, "gate": 1, "up": 1, "down": 2}
"""Which axis of a parameter has the model's width; stacked layers are axis 0."""


def spec_of(path: tuple, shape: tuple[int, ...], mesh: Any) -> P:
    """The spec in a group of a parameter, or of what the optimizer keeps of it, by its path in the tree."""
    names = [key.key for key in path if hasattr(key, "key")]
    if not names or names[-1] not in WIDTH or len(shape) < 2:
        return P()
    if "experts" in names:
        wanted: list[Any] = [None, *STORED[names[-1]]]
    else:
        wanted = [FSDP if axis == WIDTH[names[-1]] else None for axis in range(len(shape))]

    def size(name: Any) -> int:
        return int(np.prod([mesh.shape[axis] for axis in ((name,) if isinstance(name, str) else name or ())]))

    return P(*(name if n % size(name) == 0 else None for name, n in zip(wanted, shape, strict=False)))


def typed(mesh: Any, tree: Any, host: str = "") -> Any:
    """A tree of types with their layout in a group; what is below a key `host` is kept in the memory of the host."""

    def one(path, x):
        kind = "pinned_host" if host and path[0].key == host and x.ndim else None
        sharding = NamedSharding(mesh, spec_of(path, x.shape, mesh), memory_kind=kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(one, tree)


def make_mesh(groups: int, data: int, expert: int, axis_type: AxisType = AxisType.Explicit) -> mpmd.MpmdMesh:
    """Groups of data × expert devices. With too few devices, groups share them."""
    inside, devices = data * expert, np.array(jax.devices())
    if len(devices) < inside:
        sys.exit(f"a group of --data {data} × --expert {expert} needs {inside} devices; there are {len(devices)}")
    if len(devices) >= groups * inside:
        grid = devices[: groups * inside].reshape(groups, data, expert)
        return mpmd.MpmdMesh(Mesh(grid, ("stage", "data", "expert"), axis_types=(axis_type,) * 3), "stage")
    parts = devices[: len(devices) // inside * inside].reshape(-1, data, expert)
    meshes = [Mesh(part, ("data", "expert"), axis_types=(axis_type,) * 2) for part in parts]
    return mpmd.MpmdMesh.from_groups([meshes[g * len(meshes) // groups] for g in range(groups)])
