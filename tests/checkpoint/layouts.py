"""Trees and layouts that the checkpoint tests share, in one process and in many."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh, PartitionSpec
from scenarios import random_values

from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding

__all__ = ["random_values"]


def mesh_of(num_groups: int, axes: Sequence[int] = (-1,), names: Sequence[str] = ("data",)) -> MpmdMesh:
    """All devices, in order, as groups of one shape."""
    devices = np.array(jax.devices())
    return MpmdMesh(Mesh(devices.reshape(num_groups, *axes), ("stage", *names)), "stage")


def place(values: Any, sharding: Any) -> Any:
    """An array with these values; in many processes each makes its own shards."""
    values = np.asarray(values)
    values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)

    def made(one: Any, part: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(part.shape, one, lambda index: part[index])

    if not isinstance(sharding, MpmdSharding):
        return made(sharding, values)
    arrays = {
        part.key: made(sharding.group_sharding(part.group), values[Box.whole(part.shape).shifted(part.offset).slices])
        for part in sharding.local_parts(values.shape)
    }
    return MpmdArray(arrays, sharding, values.shape, values.dtype)


def check_equal(array: Any, values: np.ndarray) -> int:
    """Compares every shard that this process has; returns how many there are."""
    shards = [array] if isinstance(array, np.ndarray) else array.addressable_shards
    if isinstance(array, np.ndarray):
        np.testing.assert_array_equal(array, values)
        return 1
    assert array.shape == values.shape
    assert array.dtype == values.dtype
    for shard in shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
    return len(shards)


def shardings_for(mesh: MpmdMesh, data: str | None = "data") -> dict[str, Any]:
    """Where `random_values` lies in a pipeline on these groups: layers spread, the rest in several groups."""
    last = mesh.num_groups - 1
    return {
        "layers": [
            {
                "w": MpmdSharding(mesh, i * mesh.num_groups // 4, PartitionSpec(data)),
                "b": MpmdSharding(mesh, i * mesh.num_groups // 4),
            }
            for i in range(4)
        ],
        "stack": MpmdSharding(mesh, last, PartitionSpec(None, data)),
        "split": in_a_v(mesh, 16, PartitionSpec(None, data)),
        "tied": MpmdSharding(mesh, {0, last}, PartitionSpec(None, data)),
        "step": MpmdSharding(mesh, range(mesh.num_groups)),
    }


def in_a_v(mesh: MpmdMesh, rows: int, spec: PartitionSpec) -> MpmdSharding:
    """Stacked layers, folded like a V: each group has two ranges, the first group the first layers and the last."""
    each = rows // (2 * mesh.num_groups)
    ranges = {g: ((g * each, (g + 1) * each), (rows - (g + 1) * each, rows - g * each)) for g in range(mesh.num_groups)}
    return MpmdSharding(mesh, range(mesh.num_groups), spec, split=ranges)


def place_all(values: Any, shardings: Any) -> Any:
    return jax.tree.map(place, values, shardings)


def bytes_read() -> int:
    """Bytes that tensorstore has read from files so far in this process."""
    return sum(
        value.get("value", 0)
        for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        for value in metric["values"]
    )


def nbytes(values: Any) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(values))
