"""Finds the group or range of each array in an `MpmdArray`, and checks that it fits."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mpmd.arrays.delegation import is_plain
from mpmd.arrays.mesh import groups_text
from mpmd.arrays.sharding import GroupPart, Key, MpmdSharding
from scheduler.base.texts import counted

Arrays = Sequence[jax.Array] | Mapping[Any, jax.Array]


def whole_shape(arrays: Arrays, sharding: MpmdSharding, shape: Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns the shape of the whole array, if it was given or follows from the arrays; None if there are none."""
    if not isinstance(sharding, MpmdSharding):
        raise ValueError(f"MpmdArray: mpmd_sharding is a {type(sharding).__name__}, not an MpmdSharding.")
    if isinstance(arrays, (jax.Array, np.ndarray)):
        raise ValueError("MpmdArray: arrays is one array; give a sequence with one array for each group: [array].")
    if shape is not None:
        return tuple(shape)
    first = next(iter(arrays.values() if isinstance(arrays, Mapping) else arrays), None)
    axis = sharding.split_axis
    if first is None or axis is None or axis >= np.ndim(first):
        return None if first is None else np.shape(first)
    given = sharding.split
    if given is None:
        rows = first.shape[axis] * len(sharding.groups)
    else:
        rows = max(stop for ranges in given.values() for _, stop in ranges)
    return (*first.shape[:axis], rows, *first.shape[axis + 1 :])


def arrays_by_key(arrays: Arrays, sharding: MpmdSharding, shape: tuple[int, ...]) -> dict[Key, jax.Array]:
    """Returns the array of each part that this process holds, from a mapping by key or a sequence in any order. Without
    arrays, no part is held.

    Raises:
      ValueError: the arrays are not one for each part of this process that `sharding` names.
    """
    local = sharding.local_parts(shape) if arrays else []
    keys = [part.key for part in local]
    if isinstance(arrays, Mapping):
        if set(arrays) != set(keys):
            raise ValueError(
                f"MpmdArray: arrays has {_keys_text(arrays)}, but of {sharding!r} this process "
                f"holds {_keys_text(keys)}."
            )
        return {key: arrays[key] for key in keys}
    if len(arrays) != len(local):
        raise ValueError(
            f"MpmdArray: arrays has {counted(len(arrays), 'entry')}, but of {sharding!r} this process holds "
            f"{_keys_text(keys)}; one array for each is needed."
        )
    return _in_their_places(list(arrays), local, sharding)


def _keys_text(keys: Collection[Key]) -> str:
    ranges = [key for key in keys if isinstance(key, tuple)]
    if not ranges:
        return groups_text([key for key in keys if isinstance(key, int)])
    return "the rows " + ", ".join(":".join(map(str, key)) for key in sorted(ranges))


def _in_their_places(arrays: list[jax.Array], local: list[GroupPart], sharding: MpmdSharding) -> dict[Key, jax.Array]:
    """Assigns arrays to parts: the first of its shape on its mesh, else on its devices, else one that fits nowhere."""
    found: dict[Key, jax.Array] = {}

    for fits in (
        lambda array, mesh, part: _is_on_mesh(array, mesh) and np.shape(array) == part.shape,
        lambda array, mesh, part: _is_on_devices(array, mesh) and np.shape(array) == part.shape,
        lambda array, mesh, part: _is_on_devices(array, mesh),
        lambda array, mesh, part: True,
    ):
        for part in local:
            mesh = sharding.mpmd_mesh.groups[part.group]
            if part.key in found:
                continue
            i = next((i for i, array in enumerate(arrays) if fits(array, mesh, part)), None)
            if i is not None:
                found[part.key] = arrays.pop(i)
    return {part.key: found[part.key] for part in local}


def _is_on_mesh(array: object, mesh: Mesh) -> bool:
    return getattr(getattr(array, "sharding", None), "mesh", None) == mesh


def _is_on_devices(array: object, mesh: Mesh) -> bool:
    placed = getattr(array, "sharding", None)
    return placed is not None and placed.device_set == set(mesh.devices.flat)


def check_arrays(
    arrays: Mapping[Key, jax.Array], sharding: MpmdSharding, shape: tuple[int, ...], dtype: DTypeLike
) -> None:
    """Raises one ValueError with all faults of the arrays."""
    faults: list[str] = []
    parts = sharding.parts(shape)
    for part in parts:
        if part.key in arrays:
            faults += _faults_of_array(arrays[part.key], part, dtype)
    if len(sharding.spec) > len(shape):
        faults.append(
            f"spec {sharding.spec} has {counted(len(sharding.spec), 'entry')}, but the array has"
            f" {counted(len(shape), 'axis')}"
        )
        parts = ()
    for part in parts:
        expected = sharding.group_sharding(part.group)
        try:
            expected.shard_shape(part.shape)
        except Exception as error:  # JAX's errors for specs share no base class
            faults.append(f"{_where(part)}: {error}")
            continue
        array = arrays.get(part.key)
        if array is not None and not faults and not array.sharding.is_equivalent_to(expected, len(shape)):
            faults.append(f"{_where(part)}: sharding {array.sharding}, expected one equivalent to {expected}")
    if faults:
        raise ValueError(f"MpmdArray: the arrays do not fit {sharding!r}:\n" + "\n".join(f"  {f}" for f in faults))


def _faults_of_array(array: object, part: GroupPart, dtype: DTypeLike) -> list[str]:
    where = _where(part)
    if not is_plain(array) or not hasattr(array, "addressable_shards"):
        return [f"{where}: a {type(array).__name__}, not a concrete jax.Array"]
    faults: list[str] = []
    if array.shape != part.shape:
        faults.append(f"{where}: shape {array.shape}, expected {part.shape}")
    if array.dtype != dtype:
        faults.append(f"{where}: dtype {array.dtype}, expected {dtype}")
    if array.is_deleted():
        faults.append(f"{where}: the array has been deleted")
    return faults


def _where(part: GroupPart) -> str:
    rows = f", rows {part.key[0]}:{part.key[1]}" if isinstance(part.key, tuple) else ""
    return f"group {part.group}{rows}"
