"""An array in files, as everything that reads one sees it."""

import collections
import threading
from typing import Protocol

import numpy as np
import tensorstore as ts

from mpmd.arrays.boxes import Box


class StoredArray(Protocol):
    """An array in files, open for reading. Its bytes come in chunks: a box costs all chunks that it touches."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def chunk(self) -> tuple[int, ...]: ...

    async def read(self, box: Box) -> np.ndarray:
        """The values of a box.

        Raises:
            ValueError, OSError: they cannot be read.
        """
        ...


class Reads:
    """Counts the bytes that are read: of safetensors for each file, of an Orbax checkpoint for each array.

    Attributes:
        by_name: the bytes, by the name of the file or array.
        nbytes_expected: of the arrays that have been opened, how much will be read.
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


class ZarrArray:
    """An array that tensorstore reads."""

    def __init__(self, array: ts.TensorStore, name: str = "", reads: Reads | None = None):
        self._array, self._name, self._reads = array, name, reads or Reads()
        self.shape = tuple(array.shape)
        self.dtype: np.dtype = array.dtype.numpy_dtype
        self.chunk = tuple([int(c or 1) for c in array.chunk_layout.read_chunk.shape or ()])

    async def read(self, box: Box) -> np.ndarray:
        data = await self._array[box.slices].read()
        self._reads.add(self._name, data.nbytes)
        return data
