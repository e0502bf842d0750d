"""A checkpoint as changes make it: its leaves are read through what they are made of."""

import asyncio
import dataclasses
from collections.abc import Mapping as Map
from typing import Any

import numpy as np
import tensorstore as ts

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.edits.entries import Entry
from reshard.edits.tree_edits import Change
from reshard.places import aligned_empty
from reshard.storage.arrays import Reads, StoredArray
from reshard.storage.huggingface import natural
from reshard.storage.paths import Path, show
from reshard.storage.stored import Checkpoint

_SLAB_NBYTES = 2 << 20


def edited(checkpoint: Checkpoint, change: Change) -> Checkpoint:
    """The checkpoint as a change makes it; its leaves are read through it."""
    entries = [_with_files(entry) for entry in change([Entry.of(leaf) for leaf in checkpoint.leaves])]
    entries.sort(key=lambda e: natural(e.path))
    fields: dict[str, Any] = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(Checkpoint)}
    by_path = {entry.path: entry for entry in entries}
    fields["leaves"] = tuple(entries)
    return Edited(**fields, stored=checkpoint, entries=by_path)


def _with_files(entry: Entry) -> Entry:
    files = {file for origin in entry.origins for file in origin.leaf.files}
    return dataclasses.replace(entry, files=tuple(sorted(files)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edited(Checkpoint):
    """A checkpoint whose leaves are made of those of another one.

    Attributes:
        stored: the other one.
        entries: what each leaf is made of, by path.
    """

    stored: Checkpoint
    entries: Map[Path, Entry]

    @property
    def format(self) -> str:
        return self.stored.format

    @property
    def driver(self) -> str:
        return self.stored.driver

    def stored_nbytes(self) -> int:
        return self.stored.stored_nbytes()

    async def array(self, path: Path, context: ts.Context, reads: Reads) -> StoredArray:
        return EditedArray(self.stored, self.entries[path], context, reads)

    def text(self, path: Path) -> str:
        return self.stored.text(self.entries[path].origins[0].leaf.path)


class EditedArray:
    """An array that is put together from stored ones when a box of it is read."""

    def __init__(self, stored: Checkpoint, entry: Entry, context: ts.Context, reads: Reads):
        assert entry.dtype is not None
        self.shape, self.dtype = entry.shape, entry.dtype
        self.chunk = entry.read_chunk
        self._stored, self._entry, self._context, self._reads = stored, entry, context, reads

    async def read(self, box: Box) -> np.ndarray:
        data = aligned_empty(box.shape, self.dtype)
        for part in self._entry.parts(box):
            array = await self._stored.array(part.leaf.path, self._context, self._reads)
            # In slabs, so that what is read on the way to its place takes little memory.
            for cell, _ in part.source.split_sized(max(1, _SLAB_NBYTES // part.leaf.itemsize)):
                for piece in part.taking(cell):
                    view = data[(*piece.target.relative_to(box).slices, ...)]
                    found = await array.read(piece.source)
                    await asyncio.to_thread(copy_cast, piece.arranged(found), view, show(self._entry.path))
        return data


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
