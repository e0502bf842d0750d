"""A checkpoint as changes make it: its leaves are read through what they are made of."""

import asyncio
import dataclasses
from collections.abc import Iterator
from collections.abc import Mapping as Map
from typing import Any

import numpy as np
import tensorstore as ts

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.edits.entries import Entry
from reshard.edits.tree_edits import Change
from reshard.storage.arrays import Reads, StoredArray, empty
from reshard.storage.huggingface import natural
from reshard.storage.paths import Path, show
from reshard.storage.stored import Checkpoint, Leaf

_SLAB_NBYTES = 2 << 20


def edited(checkpoint: Checkpoint, change: Change) -> Checkpoint:
    """The checkpoint as a change makes it; its leaves are read through it."""
    entries = change([Entry.of(leaf) for leaf in checkpoint.leaves])
    by_path = {entry.path: entry for entry in entries}
    leaves = tuple([_leaf(entry) for entry in sorted(entries, key=lambda e: natural(e.path))])
    return Edited(**{**_fields(checkpoint), "leaves": leaves}, stored=checkpoint, entries=by_path)


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(Checkpoint)}


def _leaf(entry: Entry) -> Leaf:
    files = sorted({file for origin in entry.origins for file in origin.leaf.files})
    return Leaf(entry.path, entry.value_type, entry.shape, entry.dtype, entry.chunk, entry.extra, tuple(files))


@dataclasses.dataclass(frozen=True)
class Edited(Checkpoint):
    """A checkpoint whose leaves are made of those of another one.

    Attributes:
        stored: the other one.
        entries: what each leaf is made of, by path.
    """

    stored: Checkpoint | None = None
    entries: Map[Path, Entry] = dataclasses.field(default_factory=dict)

    @property
    def format(self) -> str:
        assert self.stored is not None
        return self.stored.format

    @property
    def driver(self) -> str:
        assert self.stored is not None
        return self.stored.driver

    def stored_nbytes(self) -> int:
        assert self.stored is not None
        return self.stored.stored_nbytes()

    async def array(self, path: Path, context: ts.Context, reads: Reads) -> StoredArray:
        assert self.stored is not None
        return EditedArray(self.stored, self.entries[path], context, reads)

    def text(self, path: Path) -> str:
        assert self.stored is not None
        return self.stored.text(self.entries[path].origins[0].leaf.path)


class EditedArray:
    """An array that is put together from stored ones when a box of it is read."""

    def __init__(self, stored: Checkpoint, entry: Entry, context: ts.Context, reads: Reads):
        assert entry.dtype is not None
        self.shape, self.dtype = entry.shape, entry.dtype
        self.chunk = _leaf(entry).read_chunk
        self._stored, self._entry, self._context, self._reads = stored, entry, context, reads

    async def read(self, box: Box) -> np.ndarray:
        data = empty(box.shape, self.dtype)
        for part in self._entry.parts(box):
            array = await self._stored.array(part.leaf.path, self._context, self._reads)
            for cell in _slabs(part.source, part.leaf.itemsize):
                for piece in part.taking(cell):
                    view = data[(*piece.target.relative_to(box).slices, ...)]
                    found = await array.read(piece.source)
                    await asyncio.to_thread(copy_cast, piece.arranged(found), view, show(self._entry.path))
        return data


def _slabs(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in parts, so that what is read on the way to its place takes little memory."""
    if not box.ndim:
        yield box
        return
    for part, _ in box.split_sized(max(1, _SLAB_NBYTES // itemsize)):
        yield part


def copy_cast(data: np.ndarray, view: np.ndarray, name: str) -> None:
    """Copies values, cast to the dtype of where they go.

    Raises:
        ReshardError: finite values do not fit that dtype.
    """
    if data.dtype == view.dtype:
        view[...] = data
        return
    with np.errstate(over="ignore"):
        np.copyto(view, data, casting="unsafe")
    lost = np.count_nonzero(np.isfinite(data)) - np.count_nonzero(np.isfinite(view))
    if lost:
        raise ReshardError(f"{name}: {lost} values of {data.dtype} are too large for {view.dtype}.")
