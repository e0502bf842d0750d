"""The values that this process expects from others, or has promised to them."""

import collections
import dataclasses
import operator
import threading
import time
from typing import Any, NamedTuple

from mpmd.job.verdict import STILL_S

# How many sent values to remember.
_REMEMBERED = 1 << 16


@dataclasses.dataclass
class Times:
    """The times (of `time.monotonic`) of the last movement in this process, and of the begin of its current wait."""

    moved: float = dataclasses.field(default_factory=time.monotonic)
    waits_since: float = dataclasses.field(default_factory=time.monotonic)

    def move(self) -> None:
        """Notes a movement: the next wait counts from now on."""
        self.moved = self.waits_since = time.monotonic()


class Awaited(NamedTuple):
    """An array that will come from `ranks`, or (without ranks) was promised to another rank."""

    array: Any
    what: str
    ranks: tuple[int, ...]
    number: int | None

    @property
    def is_there(self) -> bool:
        """Whether the array is computed, or deleted."""
        # `is_ready` of a deleted buffer crashes, and the main thread may delete it at any time. So C code makes the
        # two calls: Python does not switch threads between them.
        return any(map(operator.call, (self.array.is_deleted, self.array.is_ready)))


class Expected:
    """Arrays that are on their way, in the order in which they were announced. Any thread may use it.

    Each array is held only until it is there. Its arrival counts as a movement.
    """

    def __init__(self, times: Times):
        self._times = times
        self._lock = threading.Lock()
        self._awaited: collections.deque[Awaited] = collections.deque()
        self._sent: collections.deque[int | None] = collections.deque(maxlen=_REMEMBERED)

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def add(self, awaited: Awaited) -> None:
        """Adds an array that is on its way."""
        with self._lock:
            if not self._awaited:
                self._times.waits_since = time.monotonic()
            self._awaited.append(awaited)
            self._prune()

    def forget(self) -> None:
        """Drops all arrays: none is expected any more."""
        with self._lock:
            self._awaited.clear()

    def prune(self) -> None:
        """Drops the arrays at the front that are there."""
        with self._lock:
            self._prune()

    def are_to_come(self) -> bool:
        """Returns whether values from other ranks are still to come."""
        with self._lock:
            self._prune()
            return any(awaited.ranks for awaited in self._awaited)

    def oldest(self) -> Awaited | None:
        """Returns the oldest array that is not there yet. Later promised ones may have been sent already."""
        with self._lock:
            if self._awaited and time.monotonic() - self._times.waits_since > STILL_S:
                self._awaited = collections.deque(m for m in self._awaited if m.ranks or not self._is_done(m))
            return self._awaited[0] if self._awaited else None

    def sent_among(self, numbers: set[int]) -> tuple[int, ...]:
        """Returns the numbers, among some, under which this rank has sent a value."""
        with self._lock:
            return tuple(sorted(numbers.intersection(self._sent))) if numbers else ()

    def _prune(self) -> None:
        while self._awaited and self._is_done(self._awaited[0]):
            self._awaited.popleft()
            self._times.move()

    def _is_done(self, awaited: Awaited) -> bool:
        """Returns whether the array is there. If it was promised to another rank, it counts as sent from now on."""
        is_there = awaited.is_there
        if is_there and not awaited.ranks:
            self._sent.append(awaited.number)
        return is_there
