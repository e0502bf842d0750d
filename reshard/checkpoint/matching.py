"""Finds the stored leaf of each leaf of a wanted tree, and everything about the two that does not fit."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mpmd.arrays import keys
from mpmd.errors import ReshardError
from mpmd.pytrees import PyTree, TreeDef
from reshard.checkpoint.reading import key_dtype
from reshard.checkpoint.requests import Request, abstract
from reshard.storage.paths import parts_of, show
from reshard.storage.stored import Checkpoint, Leaf, value_types
from reshard.trees import broadcast, fault_of_sharding
from scheduler.base.texts import a, type_text

Stored = Mapping[tuple[str, ...], Leaf]
NUMBERS = {bool: np.bool_, int: np.integer, float: np.floating}


@dataclasses.dataclass(frozen=True)
class Part:
    """Stands in `like` for a leaf that the checkpoint has as a part of a larger array.

    Layers that were saved as one stack are restored one by one, each process reading only its own.

    Args:
        of: the name of the stored array: its keys with slashes between; a slash within a key is written %2F.
        index: an int or a slice without a step, or a tuple of them for the leading axes.
        like: shape, dtype and perhaps sharding of the part.

    Examples:
        >>> Part("layers/w", 3, jax.ShapeDtypeStruct((64, 64), np.float32)).shape
        (64, 64)
    """

    of: str
    index: int | slice | tuple[int | slice, ...]
    like: jax.ShapeDtypeStruct | jax.Array | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)


def tree_path(keys: tuple[object, ...]) -> tuple[str, ...]:
    """Returns the keys of a leaf as strings, as a checkpoint names them."""
    return tuple(map(str, ocp.utils.tuple_path_from_keypath(keys)))


def type_of(leaf: Leaf) -> tuple[tuple[int, ...], Any]:
    """Returns shape and dtype of a stored array; for typed keys, of the keys and not of their data."""
    dtype = key_dtype(leaf.extra) or leaf.dtype
    return keys.shape_of_data(leaf.shape, dtype), dtype


def leaves_by_name(checkpoint: Checkpoint) -> dict[tuple[str, ...], Leaf]:
    """Returns the stored arrays, numbers and texts by name; empty containers are not leaves of a tree."""
    return {leaf.names: leaf for leaf in checkpoint.leaves if leaf.is_array or leaf.value_type == "string"}


def _text(leaf: Leaf) -> str:
    return type_text(*type_of(leaf)) if leaf.is_array else "a string"


def requests_of(like: PyTree, shardings: PyTree) -> tuple[list[Request], TreeDef]:
    """Returns a request for each leaf of `like`, and its structure. Raises a ReshardError if `shardings` differs."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    places = [None] * len(with_paths) if shardings is None else broadcast(shardings, like, "restore: shardings")
    requests: list[Request] = []
    for (where, given), place in zip(with_paths, places, strict=True):
        path = tree_path(where)
        leaf, source, index = given, path, ()
        if isinstance(given, Part):
            leaf, source = given.like, tuple(parts_of(given.of))
            index = given.index if isinstance(given.index, tuple) else (given.index,)
        sharding = place if place is not None else getattr(abstract(leaf), "sharding", None)
        kind, shape, dtype = type(leaf), (), None
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            kind, shape, dtype = None, tuple(leaf.shape), leaf.dtype
            if isinstance(leaf, np.ndarray):  # stored in the byte order of the machine
                dtype = dtype.newbyteorder("=")
        sharding = sharding if kind is None else None
        requests.append(Request("/".join(path), shape, dtype, sharding, index, source=source, kind=kind))
    return requests, treedef


def check_fit(requests: Sequence[Request], folder: File, stored: Stored, partial: bool) -> None:
    """Raises one ReshardError that names every leaf that differs from what was expected."""
    faults = [f"{want.name or 'the tree'}: {fault}" for want in requests if (fault := _fault(want, stored)) is not None]
    known = {want.source for want in requests}
    extra = [] if partial else [leaf for leaf in stored.values() if leaf.names not in known]
    faults += [f"{'/'.join(leaf.names)}: expected nothing, but the checkpoint has {_text(leaf)}" for leaf in extra]
    hints = []
    if (renamed := _renamed(requests, stored, extra)) is not None:
        want, leaf = renamed
        old, like = show(leaf.path), f"jax.ShapeDtypeStruct({want.shape}, '{want.dtype}')"
        hints.append(f"If {old} was renamed, put Part('{old}', (), {like}) for {want.name} into `like`.")
    if extra:
        hints.append("To restore some of its leaves alone, give partial=True.")
    _refuse(folder, faults, hints)


def _refuse(folder: File, faults: Sequence[str], hints: Sequence[str]) -> None:
    if faults:
        lines = [f"restore: the checkpoint at {folder} is not what was expected:", *faults, *hints]
        raise ReshardError("\n  ".join(lines))


def check_names(wanted: Mapping[tuple[str, ...], object], folder: File, partial: bool) -> None:
    """Raises a ReshardError that names all leaves of only one tree. Orbax's restore then checks shapes and dtypes."""
    there = value_types(folder)
    faults = [
        f"{'/'.join(name) or 'the tree'}: expected {_wanted_text(leaf)}, but the checkpoint has nothing there"
        for name, leaf in wanted.items()
        if name not in there
    ]
    extra = [] if partial else [name for name in there if name not in wanted]
    faults += [f"{'/'.join(name)}: expected nothing, but the checkpoint has a {there[name]}" for name in extra]
    hint = (
        "To restore some of its leaves alone, use reshard.checkpoint.restore(path, like, partial=True), or in"
        " Orbax PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like),"
        " partial_restore=True), in its v1 a context with pytree.loading.partial_load = True."
    )
    _refuse(folder, faults, [hint] if extra else [])


def _wanted_text(leaf: Any) -> str:
    has_type = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return type_text(leaf.shape, leaf.dtype) if has_type else a(type(leaf))


def _renamed(requests: Sequence[Request], stored: Stored, extra: Sequence[Leaf]) -> tuple[Request, Leaf] | None:
    """Finds the first array that is missing, and an array of the same type that nobody asked for."""
    missing = [want for want in requests if want.kind is None and want.name and want.source not in stored]
    pairs = ((want, leaf) for want in missing for leaf in extra if leaf.is_array)
    return next((p for p in pairs if type_of(p[1]) == (p[0].shape, p[0].dtype)), None)


def _fault(want: Request, stored: Stored) -> str | None:
    if want.kind not in (None, *NUMBERS, str):
        return f"{a(want.kind)} in `like` describes no array, number or string"
    leaf = stored.get(want.source)
    fault = f"expected {want.expected}, but the checkpoint has {_text(leaf) if leaf else 'nothing there'}"
    if leaf is None:
        return fault
    if not leaf.is_array or want.kind is not None:
        return None if _value_fits(want.kind, leaf) else fault
    stored_shape, stored_dtype = type_of(leaf)
    if part_shape(want.index, stored_shape) != want.shape or stored_dtype != want.dtype:
        return fault
    return None if want.sharding is None else fault_of_sharding(want.sharding, want.shape or ())


def _value_fits(kind: type | None, leaf: Leaf) -> bool:
    if kind is str or not leaf.is_array:
        return kind is str and not leaf.is_array
    shape, dtype = type_of(leaf)
    return kind is not None and shape == () and jax.dtypes.issubdtype(dtype, NUMBERS[kind])


def part_shape(index: Sequence[int | slice], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the shape of a part of an array; None if the array has no such part."""
    if any(isinstance(entry, slice) and entry.step not in (None, 1) for entry in index):
        return None
    try:
        return np.broadcast_to(np.int8(0), shape)[tuple(index)].shape if index else tuple(shape)  # takes no memory
    except (IndexError, ValueError):
        return None
