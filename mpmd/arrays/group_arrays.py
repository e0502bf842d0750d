"""Finds the group of each array that an `MpmdArray` is made of, and checks that it fits."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mpmd.arrays.delegation import is_plain
from mpmd.arrays.mesh import MpmdSharding, groups_text


def arrays_by_group(
    arrays: Sequence[jax.Array] | Mapping[int, jax.Array], sharding: MpmdSharding
) -> dict[int, jax.Array]:
    """The array of each group of this process, from a mapping by group or a sequence in any order.

    Raises:
      ValueError: the arrays are not one for each group of this process that `sharding` names.
    """
    if not isinstance(sharding, MpmdSharding):
        raise ValueError(f"MpmdArray: mpmd_sharding is a {type(sharding).__name__}, not an MpmdSharding.")
    local = sharding.local_groups
    if isinstance(arrays, Mapping):
        if sorted(arrays) != local:
            raise ValueError(
                f"MpmdArray: arrays has {groups_text(arrays)}, but of {sharding!r} this process "
                f"holds {groups_text(local)}."
            )
        return {group: arrays[group] for group in local}
    if isinstance(arrays, (jax.Array, np.ndarray)):
        raise ValueError("MpmdArray: arrays is one array; give a sequence with one array for each group: [array].")
    if len(arrays) != len(local):
        raise ValueError(
            f"MpmdArray: arrays has {len(arrays)} entries, but of {sharding!r} this process holds "
            f"{groups_text(local)}; one array for each is needed."
        )
    return _in_their_groups(list(arrays), local, sharding)


def _in_their_groups(arrays: list[Any], local: list[int], sharding: MpmdSharding) -> dict[int, Any]:
    """The array of each group: the first one on its mesh, else on its devices, else one that fits nowhere."""
    found: dict[int, Any] = {}
    for fits in (_is_on_mesh, _is_on_devices, lambda array, mesh: True):
        for group in local:
            mesh = sharding.mpmd_mesh.groups[group]
            i = next((i for i, array in enumerate(arrays) if group not in found and fits(array, mesh)), None)
            if i is not None:
                found[group] = arrays.pop(i)
    return {group: found[group] for group in local}


def _is_on_mesh(array: Any, mesh: Mesh) -> bool:
    return getattr(getattr(array, "sharding", None), "mesh", None) == mesh


def _is_on_devices(array: Any, mesh: Mesh) -> bool:
    placed = getattr(array, "sharding", None)
    return placed is not None and placed.device_set == set(mesh.devices.flat)


def check_arrays(arrays: Mapping[int, Any], sharding: MpmdSharding, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises one ValueError that names everything about the arrays that does not fit."""
    faults: list[str] = []
    for group, part in arrays.items():
        if not is_plain(part) or not hasattr(part, "addressable_shards"):
            faults.append(f"group {group}: a {type(part).__name__}, not a concrete jax.Array")
            continue
        if part.shape != shape:
            faults.append(f"group {group}: shape {part.shape}, expected {shape}")
        if part.dtype != dtype:
            faults.append(f"group {group}: dtype {part.dtype}, expected {dtype}")
        if part.is_deleted():
            faults.append(f"group {group}: the array has been deleted")
    if len(sharding.spec) > len(shape):
        faults.append(f"spec {sharding.spec} has {len(sharding.spec)} entries, but the array has {len(shape)} axes")
    for group in sharding.groups if len(sharding.spec) <= len(shape) else ():
        expected = sharding.group_sharding(group)
        try:
            expected.shard_shape(shape)
        except Exception as error:  # JAX's errors for specs share no base class
            faults.append(f"group {group}: {error}")
            continue
        part = arrays.get(group)
        if part is not None and not faults and not part.sharding.is_equivalent_to(expected, len(shape)):
            faults.append(f"group {group}: sharding {part.sharding}, expected one equivalent to {expected}")
    if faults:
        raise ValueError(f"MpmdArray: the arrays do not fit {sharding!r}:\n" + "\n".join(f"  {f}" for f in faults))
