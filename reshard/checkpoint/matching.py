"""Finds the stored leaf of each leaf of a wanted tree, and everything about the two that does not fit."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mpmd.arrays import keys
from mpmd.errors import ReshardError
from reshard.checkpoint.abstract import abstract
from reshard.checkpoint.reading import TreePath, key_dtype
from reshard.checkpoint.requests import Request, index_text
from reshard.storage.stored import Checkpoint, Leaf
from reshard.trees import broadcast, fault_of_sharding
from scheduler.base.texts import a, type_text

NUMBERS = {bool: np.bool_, int: np.integer, float: np.floating}


@dataclasses.dataclass(frozen=True)
class Part:
    """Stands in `like` for a leaf that the checkpoint has as a part of a larger array.

    Layers that were saved as one stack are restored one by one, each process reading only its own.

    Args:
        of: the name of the stored array: its keys with slashes between.
        index: an int or a slice, or a tuple of them for the leading axes.
        like: shape, dtype and perhaps sharding of the part.

    Examples:
        >>> Part("layers/w", 3, jax.ShapeDtypeStruct((64, 64), np.float32)).shape
        (64, 64)
    """

    of: str
    index: Any
    like: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)


@dataclasses.dataclass(frozen=True)
class Want:
    """One leaf of `like`.

    Attributes:
        name: where it is in `like`.
        source: the stored leaf that it stands for.
        leaf: a description of an array, or a Python value of the type that is wanted.
        index: the part of the stored array, ints and slices; () is all of it.
        sharding: where it goes; None is a numpy array.
    """

    name: str
    source: TreePath
    leaf: Any
    index: tuple[int | slice, ...]
    sharding: Any

    @property
    def is_array(self) -> bool:
        return hasattr(self.leaf, "shape") and hasattr(self.leaf, "dtype")

    @property
    def expected(self) -> str:
        what = type_text(self.leaf.shape, self.leaf.dtype) if self.is_array else a(type(self.leaf))
        return f"{what} at {'/'.join(self.source)}{index_text(self.index)}" if self.index else what

    def request(self, stored: Leaf) -> Request:
        """What to read for it. A number is read as an array and converted by `value`."""
        if not self.is_array:
            return Request((), stored.dtype, None)
        shape, _ = type_of(stored)
        return Request(tuple(self.leaf.shape), self.leaf.dtype, self.sharding, resolved(self.index, shape))

    def value(self, found: Any) -> Any:
        """The leaf, of what was read for its request."""
        return found if self.is_array or isinstance(self.leaf, str) else type(self.leaf)(found.item())


def tree_path(keys: Any) -> TreePath:
    """The keys of a leaf as strings, the way a checkpoint names them."""
    return tuple(map(str, ocp.utils.tuple_path_from_keypath(keys)))


def type_of(leaf: Leaf) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a stored array; of typed keys those of the keys, not of their data."""
    dtype = key_dtype(leaf.extra) or leaf.dtype
    return keys.shape_of_data(leaf.shape, dtype), dtype


def leaves_by_name(checkpoint: Checkpoint) -> dict[TreePath, Leaf]:
    """The stored arrays, numbers and texts; empty containers are none of a tree's leaves."""
    return {leaf.names: leaf for leaf in checkpoint.leaves if leaf.is_array or leaf.value_type == "string"}


def _text(leaf: Leaf) -> str:
    return type_text(*type_of(leaf)) if leaf.is_array else "a string"


def wants_of(like: Any, shardings: Any) -> tuple[list[Want], Any]:
    """The leaves of `like`, each with the place that it goes to, and the structure of the tree.

    Raises:
        ReshardError: the structure of `shardings` is not that of `like`.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    places = [None] * len(with_paths) if shardings is None else broadcast(shardings, like, "restore: shardings")
    wants: list[Want] = []
    for (where, given), place in zip(with_paths, places, strict=True):
        path = tree_path(where)
        leaf, source, index = given, path, ()
        if isinstance(given, Part):
            leaf, source = given.like, tuple(given.of.split("/"))
            index = given.index if isinstance(given.index, tuple) else (given.index,)
        sharding = place if place is not None else getattr(abstract(leaf), "sharding", None)
        wants.append(Want("/".join(path), source, leaf, index, sharding))
    return wants, treedef


def check_fit(wants: Sequence[Want], folder: Any, stored: Mapping[TreePath, Leaf], partial: bool) -> None:
    """Raises one ReshardError that names every leaf which is not as it was expected."""
    faults = [f"{want.name or 'the tree'}: {fault}" for want in wants if (fault := _fault(want, stored)) is not None]
    known = {want.source for want in wants}
    extra = [] if partial else [leaf for leaf in stored.values() if leaf.names not in known]
    faults += [f"{'/'.join(leaf.names)}: expected nothing, but the checkpoint has {_text(leaf)}" for leaf in extra]
    if faults:
        lines = [f"restore: the checkpoint at {folder} is not what was expected:"]
        lines += [f"  {fault}" for fault in faults]
        if (renamed := _renamed(wants, stored, extra)) is not None:
            want, leaf = renamed
            old, like = "/".join(leaf.names), f"jax.ShapeDtypeStruct({tuple(want.leaf.shape)}, '{want.leaf.dtype}')"
            lines.append(f"  If {old} was renamed, put Part('{old}', (), {like}) for {want.name} into `like`.")
        if extra:
            lines.append("  To restore some of its leaves alone, give partial=True.")
        raise ReshardError("\n".join(lines))


def _renamed(wants: Sequence[Want], stored: Mapping[TreePath, Leaf], extra: Sequence[Leaf]) -> tuple[Want, Leaf] | None:
    """The first array that is not there, and one of its type that nobody asked for."""
    missing = [want for want in wants if want.is_array and want.name and want.source not in stored]
    pairs = ((want, leaf) for want in missing for leaf in extra if leaf.is_array)
    return next((p for p in pairs if type_of(p[1]) == (tuple(p[0].leaf.shape), p[0].leaf.dtype)), None)


def resolved(index: Sequence[int | slice], shape: Sequence[int]) -> tuple[int | slice, ...]:
    """The index with both ends of every slice, and no negative number, for an array of this shape."""
    return tuple(
        slice(*i.indices(n)[:2]) if isinstance(i, slice) else int(i) % n for i, n in zip(index, shape, strict=False)
    )


def _fault(want: Want, stored: Mapping[TreePath, Leaf]) -> str | None:
    if not want.is_array and type(want.leaf) not in (*NUMBERS, str):
        return f"{a(type(want.leaf))} in `like` describes no array, number or string"
    leaf = stored.get(want.source)
    if leaf is None:
        return f"expected {want.expected}, but the checkpoint has nothing there"
    if not leaf.is_array or not want.is_array:
        fits = _value_fits(want.leaf, leaf)
        return None if fits else f"expected {want.expected}, but the checkpoint has {_text(leaf)}"
    shape, (stored_shape, stored_dtype) = tuple(want.leaf.shape), type_of(leaf)
    if part_shape(want.index, stored_shape) != shape or stored_dtype != want.leaf.dtype:
        return f"expected {want.expected}, but the checkpoint has {_text(leaf)}"
    return None if want.sharding is None else fault_of_sharding(want.sharding, shape)


def _value_fits(value: Any, leaf: Leaf) -> bool:
    if isinstance(value, str) or not leaf.is_array:
        return isinstance(value, str) and not leaf.is_array
    shape, dtype = type_of(leaf)
    return shape == () and jax.dtypes.issubdtype(dtype, NUMBERS[type(value)])


def part_shape(index: Sequence[int | slice], shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a part of an array; None if it has no such part."""
    if any(isinstance(entry, slice) and entry.step not in (None, 1) for entry in index):
        return None
    try:
        return np.broadcast_to(np.int8(0), shape)[tuple(index)].shape if index else tuple(shape)  # takes no memory
    except (IndexError, ValueError):
        return None
