"""Copies stored arrays into others chunk by chunk, within a bound of memory that holds whatever the array sizes.

A target chunk is put together in memory from the parts of source chunks that it takes, and written whole. A batch of
such chunks is one commit. All memory is drawn from one budget: what a batch, its encoded form and the copies that
tensorstore makes of it take (`_WRITING` bytes a byte), what reading takes (a chunk encoded, decoded, the part
cut out of it, and what checking a cast takes), and decoded source chunks that are kept for the next target chunks.
"""

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.edits.edited import copy_cast
from reshard.edits.entries import Entry, Origin
from reshard.storage import checksums
from reshard.storage.arrays import StoredArray
from reshard.storage.paths import Path, dotted, show
from reshard.storage.stored import Checkpoint, Leaf, all_of, open_array, reading_context, said
from scheduler.base.texts import bar, human

_WRITING = 4
_READING = 4
# What is worth having: larger batches and chunks make nothing faster.
_LARGEST_BATCH = 256 << 20
_LARGEST_CHUNK = 64 << 20
_LARGEST_CACHE = 1 << 30

Written = tuple[Entry, Box, np.ndarray]


class Stopped(Exception):
    """The copy was asked to stop, and did so between two batches."""


@dataclasses.dataclass(frozen=True)
class TargetChunk:
    """One target chunk, or the part of it within the array."""

    entry: Entry
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.nbytes(self.entry.itemsize)

    def pieces(self) -> Iterator[Origin]:
        """What it takes of which array."""
        return self.entry.parts(self.box)


@dataclasses.dataclass(frozen=True)
class CopyPlan:
    """How the memory is divided; `threshold` is all of it."""

    threshold: int
    cache_nbytes: int
    batch_nbytes: int
    reading_nbytes: int
    chunks: tuple[TargetChunk, ...]

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclasses.dataclass
class CopyStats:
    """What a copy did; `peak_nbytes` is the most of its budget that it had taken at once."""

    bytes_read: int = 0
    bytes_written: int = 0
    peak_nbytes: int = 0


def with_writable_chunks(entries: Sequence[Entry], threshold: int | None, keep: Callable[[Entry], bool]) -> list[Entry]:
    """Cuts the chunks that nobody asked for (`keep` is false) to 64 MiB, or to what is written within a threshold."""
    most = _LARGEST_CHUNK if threshold is None else min(_LARGEST_CHUNK, max(1, threshold // 16))

    def cut(entry: Entry) -> Entry:
        if not entry.is_array or keep(entry):
            return entry
        chunk = [min(c, n) for c, n in zip(entry.chunk, entry.shape, strict=True)]
        for axis in range(len(chunk)):
            num_parts = min(chunk[axis], -(-math.prod(chunk) * entry.itemsize // most))
            chunk[axis] = -(-chunk[axis] // num_parts)
        return dataclasses.replace(entry, chunk=tuple(chunk))

    return [cut(entry) for entry in entries]


def plan_copy(entries: Sequence[Entry], threshold: int | None) -> CopyPlan:
    """Lists the chunks to write, in the order in which the source chunks lie, and divides the memory.

    Args:
        entries: the new tree.
        threshold: bytes of memory for the copy; None takes what is enough to read each source chunk once.

    Raises:
        ReshardError: even one chunk at a time takes more; says which and how much is needed.
    """
    chunks = [chunk for entry in entries if entry.is_array for chunk in _chunks(entry)]
    if not chunks:
        return CopyPlan(threshold or 0, 0, 1, 1, ())
    chunks.sort(key=_source_order({id(e.origins[0].leaf): i for i, e in enumerate(entries)}))
    largest = max(chunks, key=lambda chunk: chunk.nbytes)
    most_elements = max(chunk.box.size for chunk in chunks)

    def read_nbytes(leaf: Leaf) -> int:
        """What has to be read at once; of plain files no more than is written."""
        return min(leaf.chunk_nbytes, most_elements * leaf.itemsize) if leaf.files else leaf.chunk_nbytes

    widest = max((p.leaf for e in entries if e.is_array for p in e.origins), key=read_nbytes)
    least = _WRITING * largest.nbytes + _READING * read_nbytes(widest)
    # A cache that is full to the last byte keeps nothing: its entries are a little larger than their data.
    shared = math.ceil(1.125 * _shared_nbytes(chunks))
    if threshold is None:
        threshold = least + shared + _LARGEST_BATCH
    if threshold < least:
        raise ReshardError(
            f"--threshold {human(threshold)} is too little: chunks are read and written whole.\n"
            f"  {show(widest.path)} is stored in chunks of {human(widest.chunk_nbytes)} {list(widest.chunk)}, "
            f"{show(largest.entry.path)} is to be written in chunks of {human(largest.nbytes)} "
            f"{list(largest.box.shape)}.\n"
            f"  Give at least --threshold {least}" + (f" ({human(least)})" if least >= 1024 else "") + "."
        )
    cache = shared if shared <= threshold - least and shared <= max(_LARGEST_CACHE, threshold // 2) else 0
    rest = threshold - least - cache
    batch = max(largest.nbytes, min(_LARGEST_BATCH, largest.nbytes + rest // 2 // _WRITING))
    reading = threshold - cache - _WRITING * batch
    return CopyPlan(threshold, cache, batch, reading, tuple(chunks))


def _chunks(entry: Entry) -> Iterator[TargetChunk]:
    return (TargetChunk(entry, box) for box in Box.whole(entry.shape).grid(entry.chunk))


def _source_order(order: Mapping[int, int]) -> Callable[[TargetChunk], Any]:
    def key(chunk: TargetChunk) -> Any:
        first = next(chunk.pieces())
        leaf = first.leaf
        return order.get(id(leaf), 0), id(leaf), leaf.cells(first.source).start, chunk.box.start

    return key


def _shared_nbytes(chunks: Sequence[TargetChunk]) -> int:
    """Bytes of the largest set of source chunks that one chunk reads and the next one reads again."""
    largest, previous = 0, set[tuple[int, Box]]()
    for chunk in chunks:
        cells = [(piece.leaf, piece.leaf.cells(piece.source)) for piece in chunk.pieces() if not piece.leaf.files]
        read = {(id(leaf), box) for leaf, box in cells}
        if read & previous:
            nbytes = sum(box.nbytes(leaf.itemsize) for leaf, box in cells)
            largest = max(largest, nbytes)
        previous = read
    return largest


class _ByteBudget:
    """Bytes that may be taken at once; a taker waits until enough is given back."""

    def __init__(self, nbytes: int) -> None:
        self.free = self.total = nbytes
        self.peak = 0
        self._changed = asyncio.Condition()

    async def take(self, nbytes: int) -> None:
        assert nbytes <= self.total, f"{nbytes} bytes of {self.total} can never be had"
        async with self._changed:
            await self._changed.wait_for(lambda: self.free >= nbytes)
            self.free -= nbytes
            self.peak = max(self.peak, self.total - self.free)

    async def give(self, nbytes: int) -> None:
        async with self._changed:
            self.free += nbytes
            self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class CopyProgress:
    """How far a copy is."""

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
        """Hands all data to `write`, in batches: what belongs in which box of which entry."""

        async def batch(chunks: list[TargetChunk]) -> None:
            data = await self._gather(chunks)
            await write([(chunk.entry, chunk.box, one) for chunk, one in zip(chunks, data, strict=True)])
            self.stats.bytes_written += sum(chunk.nbytes for chunk in chunks)

        await self._run("copying", batch)

    async def check_source(self) -> None:
        """Compares the arrays that are copied with the checksums beside them, if this library has left any.

        Raises:
            ReshardError: a box is not what was written there; says which.
        """
        sums = await checksums.read(self.source.folder)
        leaves = {id(p.leaf): p.leaf for chunk in self.plan.chunks for p in chunk.entry.origins}.values()
        boxes = [(leaf, box, total) for leaf in leaves for box, total in sums.get(dotted(leaf.path), ())]
        context, start, done = self._context(), time.monotonic(), 0
        nbytes = sum(box.nbytes(leaf.itemsize) for leaf, box, _ in boxes)
        for leaf, box, expected in boxes:
            if self.should_stop():
                raise Stopped
            self.progress(CopyProgress("checking", done, nbytes, time.monotonic() - start))
            array = await open_array(self.source, leaf.path, context)
            found = 0
            for part in _in_order(box, leaf, self.plan.reading_nbytes // _READING):
                found = checksums.checksum(await _read(self.source, leaf.path, array, part), found)
            if found != expected:
                raise ReshardError(
                    f"{self.source.folder}: {show(leaf.path)}{list(box.start)} to {list(box.stop)} is damaged:"
                    " it is not what was written there (its checksum differs)."
                )
            done += box.nbytes(leaf.itemsize)

    async def compare(self, written: Checkpoint) -> None:
        """Compares what was written, bit by bit, with what it should be.

        Raises:
            ReshardError: they differ; says where.
        """
        context = self._context()
        arrays = {}

        async def batch(chunks: list[TargetChunk]) -> None:
            for chunk, expected in zip(chunks, await self._gather(chunks), strict=True):
                entry = chunk.entry
                if id(entry) not in arrays:
                    arrays[id(entry)] = await open_array(written, entry.path, context)
                found = await _read(written, entry.path, arrays[id(entry)], chunk.box)
                if found.dtype != expected.dtype or not np.array_equal(_bytes(found), _bytes(expected)):
                    raise ReshardError(
                        f"{written.folder}: {show(entry.path)}{list(chunk.box.start)} to {list(chunk.box.stop)} "
                        "is not what was written; the storage cannot be trusted."
                    )

        await self._run("reading", batch)

    async def _run(self, doing: str, batch: Callable[[list[TargetChunk]], Any]) -> None:
        self._budget = _ByteBudget(self.plan.reading_nbytes)
        self._reader = self._context()
        self._sources: dict[int, StoredArray] = {}
        start, done = time.monotonic(), 0
        for chunks in _batches(self.plan):
            if self.should_stop():
                raise Stopped
            self.progress(CopyProgress(doing, done, self.plan.nbytes, time.monotonic() - start))
            await batch(chunks)
            done += sum(chunk.nbytes for chunk in chunks)
            writing = _WRITING * sum(chunk.nbytes for chunk in chunks)
            peak = self.plan.cache_nbytes + writing + self._budget.peak
            self.stats.peak_nbytes = max(self.stats.peak_nbytes, peak)
            self._budget.peak = 0
        assert self.stats.peak_nbytes <= self.plan.threshold, "the copy took more memory than it was given"
        self.progress(CopyProgress(doing, done, self.plan.nbytes, time.monotonic() - start))

    def _context(self) -> ts.Context:
        return reading_context(self.plan.cache_nbytes)

    async def _gather(self, chunks: list[TargetChunk]) -> list[np.ndarray]:
        """The data of each chunk, in the dtype of its target."""
        buffers = [np.empty(chunk.box.shape, chunk.entry.dtype) for chunk in chunks]
        await all_of([self._fill(chunk, buffer) for chunk, buffer in zip(chunks, buffers, strict=True)])
        return buffers

    async def _fill(self, chunk: TargetChunk, buffer: np.ndarray) -> None:
        for piece in chunk.pieces():
            leaf, whole = piece.leaf, piece.leaf.cells(piece.source)
            if _READING * whole.nbytes(leaf.itemsize) <= self.plan.reading_nbytes:
                parts = iter([piece])
            else:
                cells = whole.grid(leaf.chunk)
                parts = itertools.chain.from_iterable(piece.taking(cell) for cell in cells)
            for part in parts:
                cost = _READING * leaf.cells(part.source).nbytes(leaf.itemsize)
                await self._budget.take(cost)
                try:
                    data = await _read(self.source, leaf.path, await self._open(leaf), part.source)
                    self.stats.bytes_read += data.nbytes
                    view = buffer[(*part.target.relative_to(chunk.box).slices, ...)]
                    await asyncio.to_thread(copy_cast, part.arranged(data), view, show(chunk.entry.path))
                    del data
                finally:
                    await self._budget.give(cost)

    async def _open(self, leaf: Leaf) -> StoredArray:
        if id(leaf) not in self._sources:
            self._sources[id(leaf)] = await open_array(self.source, leaf.path, self._reader)
        return self._sources[id(leaf)]


async def _read(checkpoint: Checkpoint, path: Path, array: StoredArray, box: Box) -> np.ndarray:
    try:
        return await array.read(box)
    except (ValueError, OSError) as error:
        raise ReshardError(
            f"{checkpoint.folder}: {show(path)}{list(box.start)} to {list(box.stop)} cannot be read; "
            f"the data is damaged or missing: {said(error)}"
        ) from None


def _in_order(box: Box, leaf: Leaf, nbytes: int, axis: int = 0) -> Iterator[Box]:
    """A box in parts whose bytes follow each other, each of as many chunks as `nbytes` hold."""

    def cost(part: Box) -> int:
        return leaf.cells(part).nbytes(leaf.itemsize)

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


def _batches(plan: CopyPlan) -> Iterator[list[TargetChunk]]:
    batch: list[TargetChunk] = []
    nbytes = 0
    for chunk in plan.chunks:
        if batch and (nbytes + chunk.nbytes > plan.batch_nbytes or len(batch) == 1024):
            yield batch
            batch, nbytes = [], 0
        batch.append(chunk)
        nbytes += chunk.nbytes
    if batch:
        yield batch


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
