"""The interface of an array in files for everything that reads one, and limits on how much is read at a time."""

import asyncio
import collections
import contextlib
import math
import mmap
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

import numpy as np
import tensorstore as ts

from mpmd.arrays.boxes import Box

IN_FLIGHT_NBYTES = 256 << 20  # are read at a time, if nothing else is said
_LEAST_MAPPED = 1 << 20


class StoredArray(Protocol):
    """An array in files, open for reading. Its bytes come in chunks: a box costs all chunks that it touches."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def chunk(self) -> tuple[int, ...]: ...

    async def read(self, box: Box) -> np.ndarray:
        """Reads the values of a box. Raises a ValueError or an OSError if they cannot be read."""
        ...


class Reads:
    """A counter of the bytes read: of safetensors for each file, of an Orbax checkpoint for each array.

    Attributes:
        by_name: the bytes, by the name of the file or array.
        nbytes_expected: the bytes that will be read of the arrays opened so far.
    """

    def __init__(self) -> None:
        self.by_name: collections.Counter[str] = collections.Counter()
        self.nbytes_expected = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self.by_name.total()

    def add(self, name: str, nbytes: int) -> None:
        with self._lock:
            self.by_name[name] += nbytes

    def expect(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes_expected += nbytes


def plan_reads(wanted: Iterable[Box], chunk_shape: tuple[int, ...], most: int) -> list[tuple[Box, tuple[Box, ...]]]:
    """Returns the boxes that one process reads, each with the wanted boxes inside it.

    A stored array is cut into chunks, and a chunk is read as a whole. So boxes that share chunks are joined, if reading
    them together needs no more memory than one by one: each chunk is read once for each process, not once for each of
    its devices. Joined boxes have at most `most` elements, or those of the largest box.
    """
    wanted = list(wanted)
    most = max([most, *(box.size for box in wanted)])
    reads: list[tuple[Box, tuple[Box, ...]]] = []
    for box in dict.fromkeys(box for box in wanted if box.size):
        inside = (box,)
        while (other := next((read for read in reads if _joinable(read[0], box, chunk_shape, most)), None)) is not None:
            reads.remove(other)
            box, inside = Box.bounding((other[0], box)), other[1] + inside
        reads.append((box, inside))
    return reads


def _joinable(a: Box, b: Box, chunk_shape: tuple[int, ...], most: int) -> bool:
    fits = Box.bounding((a, b)).size <= min(most, a.size + b.size)
    return fits and bool((a.aligned(chunk_shape) & b.aligned(chunk_shape)).size)


class ByteLimit:
    """A limit on the bytes held at once (None: no limit). Others wait their turn; more than the limit goes alone."""

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = nbytes
        self.peak = self._held = 0  # the most that were held; what is held now
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def held(self, nbytes: int) -> AsyncIterator[None]:
        """Holds so many bytes in an `async with` block, as soon as they are free."""
        if self.nbytes is None:
            yield
            return
        most = max(1, self.nbytes)
        nbytes = min(nbytes, most)
        async with self._changed:
            await self._changed.wait_for(lambda: self._held + nbytes <= most)
            self._held += nbytes
            self.peak = max(self.peak, self._held)
        try:
            yield
        finally:
            async with self._changed:
                self._held -= nbytes
                self._changed.notify_all()


class HeldArray:
    """An array whose file has been read as a whole."""

    def __init__(self, data: np.ndarray, name: str, reads: Reads):
        self._data, self._name, self._reads = data, name, reads
        self.shape, self.dtype, self.chunk = data.shape, data.dtype, data.shape

    async def read(self, box: Box) -> np.ndarray:
        self._reads.add(self._name, box.nbytes(self.dtype.itemsize))
        return self._data[(*box.slices, ...)]


class ZarrArray:
    """An array that tensorstore reads."""

    def __init__(self, array: ts.TensorStore, name: str = "", reads: Reads | None = None):
        self._array, self._name, self._reads = array, name, reads or Reads()
        self.shape = tuple(array.shape)
        self.dtype: np.dtype = array.dtype.numpy_dtype
        self.chunk = tuple([int(c or 1) for c in array.chunk_layout.read_chunk.shape or ()])

    async def read(self, box: Box) -> np.ndarray:
        if box.nbytes(self.dtype.itemsize) < _LEAST_MAPPED:
            data = await self._array[box.slices].read()
        else:
            data = _mapped(box.shape, self.dtype)
            await ts.array(data).write(self._array[box.slices])
        self._reads.add(self._name, data.nbytes)
        return data


def _mapped(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates memory that begins with a page: a CPU device takes it over as it is, where it copies other memory.

    numpy's own allocation asks for huge pages, which the system may first have to put together.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.ndarray(shape, dtype, memory)
