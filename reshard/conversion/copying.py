"""Copies stored arrays into others chunk by chunk, within a bound of memory that holds whatever the array sizes.

A target chunk is put together in memory from parts of source chunks, and written whole. A batch of such chunks is
one commit. One budget covers all memory: for writing, a batch, its encoded form and tensorstore's copies of it
(`_WRITING` bytes a byte); for reading, a chunk encoded and decoded, the part cut out of it, and the check of a cast;
and decoded source chunks that are kept for the next target chunks.
"""

import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.edits.edited import EditedArray, SourceReader
from reshard.edits.entries import Entry
from reshard.places import bytes_of
from reshard.storage import checksums
from reshard.storage.arrays import ByteLimit, Reads
from reshard.storage.paths import dotted, show
from reshard.storage.stored import Checkpoint, Leaf, all_of, reading_context
from scheduler.base.texts import bar, human

_WRITING = 4
_READING = 4
# Larger batches and chunks make nothing faster.
_LARGEST_BATCH = 256 << 20
_LARGEST_CHUNK = 64 << 20
_LARGEST_CACHE = 1 << 30
_MOST_IN_BATCH = 1024

T = TypeVar("T")
# A chunk of a new array, or the part of it within the array.
TargetChunk = tuple[Entry, Box]
Written = tuple[Entry, Box, np.ndarray]


class Stopped(Exception):
    """The copy was asked to stop, and did so between two batches."""


@dataclasses.dataclass(frozen=True)
class CopyPlan:
    """The division of the memory; `threshold` is all of it."""

    threshold: int
    cache_nbytes: int
    batch_nbytes: int
    reading_nbytes: int
    chunks: tuple[TargetChunk, ...]

    def batches(self) -> Iterator[list[TargetChunk]]:
        """Yields the chunks of each commit."""
        batch: list[TargetChunk] = []
        left = self.batch_nbytes
        for chunk in self.chunks:
            nbytes = _nbytes([chunk])
            if batch and (nbytes > left or len(batch) == _MOST_IN_BATCH):
                yield batch
                batch, left = [], self.batch_nbytes
            batch.append(chunk)
            left -= nbytes
        if batch:
            yield batch


@dataclasses.dataclass
class CopyStats:
    """Statistics of a copy; `peak_nbytes` is the most of its budget that was taken at once."""

    bytes_read: int = 0
    bytes_written: int = 0
    peak_nbytes: int = 0


def with_writable_chunks(entries: Sequence[Entry], threshold: int | None, keep: Callable[[Entry], bool]) -> list[Entry]:
    """Cuts the chunks that nobody asked for (`keep` is false) to 64 MiB, or to a size that fits the threshold."""
    most = _LARGEST_CHUNK if threshold is None else min(_LARGEST_CHUNK, max(1, threshold // 16))

    def cut(entry: Entry) -> Entry:
        if not entry.is_array or keep(entry):
            return entry
        chunk = [min(c, n) for c, n in zip(entry.chunk, entry.shape, strict=True)]
        for axis in range(len(chunk)):
            num_parts = max(1, min(chunk[axis], -(-math.prod(chunk) * entry.itemsize // most)))
            chunk[axis] = -(-chunk[axis] // num_parts)
        return dataclasses.replace(entry, chunk=tuple(chunk))

    return [cut(entry) for entry in entries]


def plan_copy(entries: Sequence[Entry], threshold: int | None) -> CopyPlan:
    """Lists the chunks to write, in the order in which the source chunks lie, and divides the memory.

    Args:
        threshold: bytes of memory for the copy; None takes enough to read each source chunk once.

    Raises:
        ReshardError: even one chunk at a time needs more; says which one, and how much it needs.
    """
    chunks = [(e, box) for e in entries if e.is_array for box in Box.whole(e.shape).grid(e.chunk)]
    if not chunks:
        return CopyPlan(threshold or 0, 0, 1, 1, ())
    order = {id(e.origins[0].leaf): i for i, e in enumerate(entries)}

    def source_order(chunk: TargetChunk) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        entry, box = chunk
        first = next(entry.parts(box))
        leaf = first.leaf
        return order.get(id(leaf), 0), id(leaf), leaf.cells(first.source).start, box.start

    chunks.sort(key=source_order)
    largest, box = max(chunks, key=lambda chunk: _nbytes([chunk]))
    largest_nbytes, most_elements = _nbytes([(largest, box)]), max(box.size for _, box in chunks)

    def read_nbytes(leaf: Leaf) -> int:
        """Returns the bytes that must be read at once; for plain files no more than is written."""
        return min(leaf.chunk_nbytes, most_elements * leaf.itemsize) if leaf.files else leaf.chunk_nbytes

    widest = max((p.leaf for e in entries if e.is_array for p in e.origins), key=read_nbytes)
    least = _WRITING * largest_nbytes + _READING * read_nbytes(widest)
    # A cache that is full to the last byte keeps nothing: its entries are a little larger than their data.
    shared = math.ceil(1.125 * _shared_nbytes(chunks))
    if threshold is None:
        threshold = least + shared + _LARGEST_BATCH
    if threshold < least:
        raise ReshardError(
            f"--threshold {human(threshold)} is too little: chunks are read and written whole.\n"
            f"  {show(widest.path)} is stored in chunks of {human(widest.chunk_nbytes)} {list(widest.chunk)}, "
            f"{show(largest.path)} is to be written in chunks of {human(largest_nbytes)} {list(box.shape)}.\n"
            f"  Give at least --threshold {least}" + (f" ({human(least)})" if least >= 1024 else "") + "."
        )
    cache = shared if shared <= threshold - least and shared <= max(_LARGEST_CACHE, threshold // 2) else 0
    rest = threshold - least - cache
    batch = max(largest_nbytes, min(_LARGEST_BATCH, largest_nbytes + rest // 2 // _WRITING))
    reading = threshold - cache - _WRITING * batch
    return CopyPlan(threshold, cache, batch, reading, tuple(chunks))


def _nbytes(chunks: Iterable[TargetChunk]) -> int:
    return sum(box.nbytes(entry.itemsize) for entry, box in chunks)


def _shared_nbytes(chunks: Sequence[TargetChunk]) -> int:
    """Returns the bytes of the largest set of source chunks that two consecutive target chunks both read."""
    largest, previous = 0, set[tuple[int, Box]]()
    for entry, target in chunks:
        cells = [(part.leaf, part.leaf.cells(part.source)) for part in entry.parts(target) if not part.leaf.files]
        read = {(id(leaf), box) for leaf, box in cells}
        if read & previous:
            nbytes = sum(box.nbytes(leaf.itemsize) for leaf, box in cells)
            largest = max(largest, nbytes)
        previous = read
    return largest


@dataclasses.dataclass(frozen=True)
class CopyProgress:
    """The progress of a copy."""

    doing: str
    bytes_done: int
    bytes_total: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes_done / max(self.seconds, 1e-9) / 2**20
        how_much = f"{human(self.bytes_done)} of {human(self.bytes_total)}"
        return f"{self.doing:8} {bar(self.bytes_done, self.bytes_total)}  {how_much}, {rate:.0f} MiB/s"


@dataclasses.dataclass
class Copier:
    """Carries out a plan: `copy` writes, `compare` reads both sides again.

    `should_stop` is asked before each batch.
    """

    source: Checkpoint
    plan: CopyPlan
    progress: Callable[[CopyProgress], None] = lambda progress: None
    should_stop: Callable[[], bool] = lambda: False
    stats: CopyStats = dataclasses.field(default_factory=CopyStats)

    async def copy(self, write: Callable[[list[Written]], Awaitable[None]]) -> None:
        """Hands all data to `write`, in batches of boxes: each with its entry and its values."""

        async def batch(written: list[Written]) -> None:
            await write(written)
            self.stats.bytes_written += sum(data.nbytes for *_, data in written)

        await self._run("copying", batch)

    async def check_source(self) -> None:
        """Compares the copied arrays with the checksums of the source, if this library has left any. A ReshardError
        says which box does not have the values that were written.
        """
        sums = await checksums.read(self.source.folder)
        leaves = {id(p.leaf): p.leaf for entry, _ in self.plan.chunks for p in entry.origins}.values()
        boxes = [(leaf, *one) for leaf in leaves for one in sums.get(dotted(leaf.path), ())]
        source = self._reader(self.source)
        for leaf, box, expected in self._steps("checking", boxes, lambda one: one[1].nbytes(one[0].itemsize)):
            found = 0
            for part in _in_order(box, leaf, self._slab_nbytes):
                found = checksums.checksum(await source.read(leaf.path, part), found)
            if found != expected:
                raise ReshardError(
                    f"{self.source.folder}: {show(leaf.path)}{list(box.start)} to {list(box.stop)} is damaged:"
                    " it is not what was written there (its checksum differs)."
                )

    async def compare(self, written: Checkpoint) -> None:
        """Compares the written arrays with the expected ones, bit by bit. A ReshardError says where they differ."""
        target = self._reader(written)

        async def batch(read: list[Written]) -> None:
            for entry, box, expected in read:
                found = await target.read(entry.path, box)
                if found.dtype != expected.dtype or not np.array_equal(bytes_of(found), bytes_of(expected)):
                    raise ReshardError(
                        f"{written.folder}: {show(entry.path)}{list(box.start)} to {list(box.stop)} "
                        "is not what was written; the storage cannot be trusted."
                    )

        await self._run("reading", batch)

    async def _run(self, doing: str, batch: Callable[[list[Written]], Awaitable[None]]) -> None:
        limit, reads, plan = ByteLimit(self.plan.reading_nbytes), Reads(), self.plan
        context = reading_context(plan.cache_nbytes)
        sources = SourceReader(self.source, context, reads, self._slab_nbytes, limit, _READING)
        for chunks in self._steps(doing, list(plan.batches()), _nbytes):
            data = await all_of([EditedArray(entry, sources).read(box) for entry, box in chunks])
            await batch([(*chunk, one) for chunk, one in zip(chunks, data, strict=True)])
            peak = plan.cache_nbytes + _WRITING * _nbytes(chunks) + limit.peak
            self.stats.peak_nbytes = max(self.stats.peak_nbytes, peak)
            limit.peak = 0
        self.stats.bytes_read += reads.nbytes
        assert self.stats.peak_nbytes <= plan.threshold, "the copy took more memory than it was given"

    def _steps(self, doing: str, steps: Sequence[T], nbytes_of: Callable[[T], int]) -> Iterator[T]:
        """Asks before each step whether to continue, and reports the progress."""
        start, done, total = time.monotonic(), 0, sum(map(nbytes_of, steps))
        for step in steps:
            if self.should_stop():
                raise Stopped
            self.progress(CopyProgress(doing, done, total, time.monotonic() - start))
            yield step
            done += nbytes_of(step)
        if steps:
            self.progress(CopyProgress(doing, done, total, time.monotonic() - start))

    @property
    def _slab_nbytes(self) -> int:
        return self.plan.reading_nbytes // _READING

    def _reader(self, checkpoint: Checkpoint) -> SourceReader:
        return SourceReader(checkpoint, reading_context(self.plan.cache_nbytes), Reads())


def _in_order(box: Box, leaf: Leaf, nbytes: int, axis: int = 0) -> Iterator[Box]:
    """Cuts a box into parts of contiguous bytes, each of as many chunks as `nbytes` hold."""
    cost = leaf.cells_nbytes
    if cost(box) <= nbytes or axis == len(leaf.shape):
        yield box
        return
    start, chunk = box.start[axis], leaf.chunk[axis]
    while start < box.stop[axis]:
        layer = box.with_range(axis, start, min((start // chunk + 1) * chunk, box.stop[axis]))
        if (fitting := nbytes // cost(layer)) > 0:
            layer = box.with_range(axis, start, min((start // chunk + fitting) * chunk, box.stop[axis]))
            yield layer
        else:
            for i in range(start, layer.stop[axis]):
                yield from _in_order(box.with_range(axis, i, i + 1), leaf, nbytes, axis + 1)
        start = layer.stop[axis]
