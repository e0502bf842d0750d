"""A checkpoint with changes applied: its leaves are read through the stored leaves that they are made of."""

import asyncio
import dataclasses
import functools
from collections.abc import Iterable
from collections.abc import Mapping as Map

import numpy as np
import tensorstore as ts

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.edits.entries import Entry, Origin
from reshard.edits.tree_edits import Change
from reshard.places import aligned_empty
from reshard.storage.arrays import ByteLimit, Reads, StoredArray
from reshard.storage.casts import copy_cast
from reshard.storage.huggingface import natural
from reshard.storage.paths import Path, show
from reshard.storage.stored import Checkpoint, open_array, said

_SLAB_NBYTES = 2 << 20


def edited(checkpoint: Checkpoint, change: Change) -> "Edited":
    """Returns the checkpoint with a change applied; its leaves are read through the change."""
    entries = []
    for entry in change([Entry.of(leaf) for leaf in checkpoint.leaves]):
        files = {file for origin in entry.origins for file in origin.leaf.files}
        entries.append(dataclasses.replace(entry, files=tuple(sorted(files))))
    return Edited.of(checkpoint, sorted(entries, key=lambda e: natural(e.path)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edited(Checkpoint):
    """A checkpoint with entries as its leaves, made of the leaves of another checkpoint."""

    leaves: tuple[Entry, ...]
    stored: Checkpoint  # the other checkpoint

    @classmethod
    def of(cls, stored: Checkpoint, entries: Iterable[Entry]) -> "Edited":
        fields = {field.name: getattr(stored, field.name) for field in dataclasses.fields(Checkpoint)}
        return cls(**fields | {"leaves": tuple(entries), "stored": stored})

    @functools.cached_property
    def _by_path(self) -> Map[Path, Entry]:
        return {entry.path: entry for entry in self.leaves}

    @property
    def driver(self) -> str:
        return self.stored.driver

    def stored_nbytes(self) -> int:
        return self.stored.stored_nbytes()

    async def array(self, path: Path, context: ts.Context, reads: Reads) -> StoredArray:
        return EditedArray(self._by_path[path], SourceReader(self.stored, context, reads))

    def text(self, path: Path) -> str:
        return self.stored.text(self._by_path[path].origins[0].leaf.path)


class SourceReader:
    """A reader of the stored arrays that other arrays are made of; it opens each once.

    Args:
        slab_nbytes: the bytes of a larger part that are read at a time, or one chunk.
        limit: bounds the memory of reads in flight: `copies` times the bytes of the chunks that are read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        context: ts.Context,
        reads: Reads,
        slab_nbytes: int = _SLAB_NBYTES,
        limit: ByteLimit | None = None,
        copies: int = 1,
    ):
        self.slab_nbytes, self._copies = slab_nbytes, copies
        self._checkpoint, self._context, self._reads = checkpoint, context, reads
        self._limit = limit or ByteLimit()
        self._opened: dict[Path, StoredArray] = {}

    async def read(self, path: Path, box: Box) -> np.ndarray:
        """Reads a box of an array. Raises a ReshardError if it cannot be opened or read."""
        if path not in self._opened:
            self._opened[path] = await open_array(self._checkpoint, path, self._context, self._reads)
        try:
            return await self._opened[path].read(box)
        except (ValueError, OSError) as error:
            raise ReshardError(
                f"{self._checkpoint.folder}: {show(path)}{list(box.start)} to {list(box.stop)} cannot be read; "
                f"the data is damaged or missing: {said(error)}"
            ) from None

    async def copy(self, piece: Origin, view: np.ndarray, name: str) -> None:
        """Reads the part of its array that a piece takes, and writes it to the piece's place."""
        async with self._limit.held(self._copies * piece.leaf.cells_nbytes(piece.source)):
            found = await self.read(piece.leaf.path, piece.source)
            await asyncio.to_thread(copy_cast, piece.arranged(found), view, name)
            del found


class EditedArray:
    """An array that is put together from stored ones whenever a box of it is read."""

    def __init__(self, entry: Entry, sources: SourceReader):
        assert entry.dtype is not None
        self.shape, self.dtype, self.chunk = entry.shape, entry.dtype, entry.read_chunk
        self._entry, self._sources = entry, sources

    async def read(self, box: Box) -> np.ndarray:
        data = aligned_empty(box.shape, self.dtype)
        for part in self._entry.parts(box):
            for slab in part.leaf.slabs(part.source, self._sources.slab_nbytes):
                for piece in part.taking(slab):
                    view = data[(*piece.target.relative_to(box).slices, ...)]
                    await self._sources.copy(piece, view, show(self._entry.path))
        return data
