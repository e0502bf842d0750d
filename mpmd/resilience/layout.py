"""Plans which process keeps which part of a state: one of the processes that have a byte keeps it.

A leaf is *shared* if it is an array over the processes: one of the processes that have a box of it keeps that box. All
other leaves (numpy, numbers, arrays on devices of one process) are each process's own. Planning is pure, and all
processes derive the same plan of the shared leaves.
"""

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box, held_cells, part_boxes
from mpmd.arrays.mesh import Device, is_local
from mpmd.arrays.sharding import Key

SHARED, OWN, NUMPY, NUMBER = "shared", "own", "numpy", "number"
_NUMBERS = (bool, int, float, str)
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class KeptLeaf:
    """A leaf of a state as it is kept."""

    name: str  # its path in the tree
    kind: str  # `SHARED`, or the kind of each process's own leaf
    shape: tuple[int, ...] = ()  # of its data; the data of typed keys are integers
    dtype: str = ""  # the name of its data's dtype
    key: str | None = None  # the implementation of typed keys, or None
    weak: bool = False  # whether it is a JAX array of a weak type

    @property
    def text(self) -> str:
        """The type of the leaf, for messages."""
        if self.kind == NUMBER:
            return f"a {self.dtype}"
        return f"{'keys of ' if self.key else ''}{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class KeptPiece:
    """A box of a leaf that this process keeps."""

    leaf: int  # the number of the leaf
    box: Box  # the box in the data of the leaf
    held: Box  # the box of the array that the piece is cut from
    part: Key | None  # the key of this array's part in an `MpmdArray` (else 0); None for an own leaf
    device: Device | None  # the array's device; None for an own leaf
    offset: int  # in the record
    nbytes: int  # in the record


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The part of a state that this process keeps: its leaves, its pieces, and the bytes of its record."""

    leaves: tuple[KeptLeaf, ...]
    pieces: tuple[KeptPiece, ...]
    nbytes: int


def names_of(tree: object) -> list[str]:
    """Returns the paths of a tree's leaves, as the user writes them."""
    return ["state" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def describe(name: str, leaf: object) -> KeptLeaf:
    """Describes a leaf as it is kept. Raises a ValueError if it cannot be kept."""
    if isinstance(leaf, jax.Array):
        is_own = not isinstance(leaf, MpmdArray) and leaf.is_fully_addressable
        shape, dtype = keys.data_shape(leaf.shape, leaf.dtype), keys.data_dtype(leaf.dtype)
        key, weak = keys.implementation(leaf.dtype), bool(getattr(leaf, "weak_type", False))
        return KeptLeaf(name, OWN if is_own else SHARED, shape, dtype.name, key, weak)
    if (type(leaf) is np.ndarray or isinstance(leaf, np.generic)) and (dtype := _text_of(leaf.dtype)) is not None:
        return KeptLeaf(name, NUMPY, leaf.shape, dtype)
    if type(leaf) in _NUMBERS:
        return KeptLeaf(name, NUMBER, (), type(leaf).__name__)
    what = f"{type(leaf).__name__}{f' of {leaf.dtype}' if isinstance(leaf, np.ndarray) else ''}"
    raise ValueError(
        f"mpmd.resilient: {name} is a {what}; the leaves of a state are arrays, numbers and strings."
        "\n  Keep everything else outside of the state, in the function `body`."
    )


def _text_of(dtype: np.dtype) -> str | None:
    """Returns a text from which numpy makes the dtype: its name, else numpy's code. None if neither does."""
    for text in (dtype.name, dtype.str):
        with contextlib.suppress(TypeError):
            if not dtype.hasobject and jax.numpy.dtype(text) == dtype:
                return text
    return None


def signature(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """Returns a key that is equal for leaves with the same layout."""
    return tuple([
        (type(x), x.shape, x.dtype, getattr(x, "weak_type", False),
         x.mpmd_sharding if isinstance(x, MpmdArray) else getattr(x, "sharding", None))
        if hasattr(x, "dtype") else type(x) for x in leaves
    ])  # fmt: skip


def plan(names: Sequence[str], leaves: Sequence[Any], rank: int) -> StateLayout:
    """Plans the part of a state with these leaves that this process, `rank`, keeps."""
    kept = tuple([describe(name, leaf) for name, leaf in zip(names, leaves, strict=True)])
    load: dict[int, int] = {}
    pieces: list[KeptPiece] = []
    end = 0
    for number, (leaf, about) in enumerate(zip(leaves, kept, strict=True)):
        if about.kind == NUMBER:
            continue
        itemsize = np.dtype(jax.numpy.dtype(about.dtype)).itemsize
        if about.kind == SHARED:
            placed = leaf.mpmd_sharding if isinstance(leaf, MpmdArray) else leaf.sharding
            cut = shared_boxes(keys.data_sharding(placed, leaf.shape, leaf.dtype), about.shape, itemsize, rank, load)
        else:
            box = Box.whole(about.shape)
            cut = [(box, box, None, None)]
        for box, held, part, device in cut:
            pieces.append(KeptPiece(number, box, held, part, device, end, box.nbytes(itemsize)))
            end += -(-box.nbytes(itemsize) // _ALIGNMENT) * _ALIGNMENT
    return StateLayout(kept, tuple(pieces), end)


def owners(sharding: Sharding, shape: tuple[int, ...], itemsize: int, load: dict[int, int]) -> dict[Box, int]:
    """Returns the process that keeps each box of an array: among those with the box, the one with the fewest bytes.
    Adds these bytes to `load`, each process's so far.
    """
    owner: dict[Box, int] = {}
    for box, processes in held_cells(sharding, shape)[1].items():
        owner[box] = min(processes, key=lambda p: (load.get(p, 0), p))
        load[owner[box]] = load.get(owner[box], 0) + box.nbytes(itemsize)
    return owner


def shared_boxes(
    sharding: Sharding, shape: tuple[int, ...], itemsize: int, rank: int, load: dict[int, int]
) -> list[tuple[Box, Box, Key, Device]]:
    """Returns the boxes of a shared leaf that this process keeps, each with its shard, the shard's part and device."""
    mine = [box for box, owner in owners(sharding, shape, itemsize, load).items() if owner == rank]
    shards = [
        (held, part, device)
        for part, boxes in part_boxes(sharding, shape).items()
        for device, held in boxes.items()
        if is_local(device)
    ]
    given = [0] * len(shards)  # elements from each shard, so that the devices share the work
    found: list[tuple[Box, Box, Key, Device]] = []
    for box in mine:
        index = min((i for i, shard in enumerate(shards) if box in shard[0]), key=lambda i: given[i])
        given[index] += box.size
        found.append((box, *shards[index]))
    return found


def misfit(kept: Sequence[KeptLeaf], given: Sequence[KeptLeaf]) -> str:
    """Returns the first difference between a kept state and the given one, in words; empty if they fit.

    A number and an array with one element fit: a step may turn a number into an array.
    """
    theirs, ours = [leaf.name for leaf in kept], [leaf.name for leaf in given]
    if more := sorted(set(theirs) - set(ours)):
        return f"the given state has no {more[0]}"
    if more := sorted(set(ours) - set(theirs)):
        return f"it has no {more[0]}"
    if theirs != ours:
        return "its leaves are in another order"
    for mine, theirs in zip(given, kept, strict=True):
        numbers = NUMBER in (mine.kind, theirs.kind)
        same = (mine.dtype, mine.key) == (theirs.dtype, theirs.key) or (numbers and not math.prod(theirs.shape) > 1)
        if mine.shape != theirs.shape or not same:
            return f"{mine.name} is {theirs.text} there, and {mine.text} in the given state"
    return ""
