"""The versions that a process sends: copies in host memory, each kept until nobody can want it any more."""

import json
import sys
import threading
from collections import Counter
from typing import NamedTuple

import numpy as np

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.places import aligned_empty
from reshard.storage.casts import copy_cast

CLOSED = "it has been closed by its sender."


class Shelved(NamedTuple):
    """One process's part of one version."""

    version: int  # its number
    description: str  # the tree, its tensors and the boxes that this process sends to others, as JSON
    values: dict[int, list[tuple[Box, object]]]  # per tensor: the boxes that lie here, each with its host array

    def read(self, leaf: int, box: Box, dtype: np.dtype) -> np.ndarray:
        """Returns a box's values in one piece of memory, cast to a dtype. Raises a ReshardError for too large ones."""
        held, value = next((held, value) for held, value in self.values.get(leaf, ()) if box in held)
        part = np.asarray(np.asarray(value)[box.relative_to(held).slices])
        if part.dtype == dtype:
            return np.ascontiguousarray(part).reshape(part.shape)
        cast = aligned_empty(box.shape, dtype)
        copy_cast(part, cast, lambda: json.loads(self.description)["leaves"][leaf][0])
        return cast


class Shelf:
    """The versions of one tree that lie in this process; threads that serve receivers read them."""

    def __init__(self):
        self._changed = threading.Condition()
        self._versions: dict[int, Shelved] = {}
        self._holds: Counter[int] = Counter()
        self._is_closed = False
        self._oldest_of_use = 0

    def put(self, shelved: Shelved) -> None:
        """Adds a version that this process has sent."""
        with self._changed:
            self._versions[shelved.version] = shelved
            self._drop()  # if it has been forgotten
            self._changed.notify_all()

    def drop_below(self, version: int) -> None:
        """Drops versions older than this one, which all senders have, as soon as nobody holds them."""
        with self._changed:
            self._oldest_of_use = max(version, self._oldest_of_use)
            self._drop()

    def versions(self, after: int, wait_s: float) -> list[int]:
        """Returns the versions after `after`; waits up to `wait_s` for one. Raises a ReshardError if none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or any(v > after for v in self._versions), wait_s)
            if found := [v for v in self._versions if v > after]:
                return found
            if self._is_closed and wait_s:
                raise ReshardError(CLOSED)
            return []

    def close(self) -> None:
        """Ends all waiting: no version will come any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def forget(self) -> None:
        """Closes the shelf and drops its versions, as soon as nobody holds them: another shelf takes its place."""
        self.close()
        self.drop_below(sys.maxsize)

    @property
    def is_closed(self) -> bool:
        """Whether no version will come any more."""
        return self._is_closed

    def hold(self, version: int | None) -> Shelved | None:
        """Keeps a version until it is released, and returns it; None if it is gone."""
        with self._changed:
            shelved = None if version is None else self._versions.get(version)
            if shelved is not None:
                self._holds[shelved.version] += 1
            return shelved

    def release(self, version: int) -> None:
        """Releases a version: the inverse of `hold`."""
        with self._changed:
            self._holds[version] -= 1
            self._drop()

    def _drop(self) -> None:
        for version in [v for v in self._versions if v < self._oldest_of_use and self._holds[v] <= 0]:
            del self._versions[version], self._holds[version]
