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
    """On `time.monotonic`'s clock, when something last moved in this process, and since when it has waited."""

    moved: float = dataclasses.field(default_factory=time.monotonic)
    waits_since: float = dataclasses.field(default_factory=time.monotonic)

    def move(self) -> None:
        """Something moves now, and what is waited for next is waited for from now on."""
        self.moved = self.waits_since = time.monotonic()


class Mark(NamedTuple):
    """An array that comes from `ranks`, or (none) that was promised to another rank."""

    array: Any
    what: str
    ranks: tuple[int, ...]
    number: int | None

    @property
    def is_there(self) -> bool:
        """Whether the array is computed, or deleted."""
        # `is_ready` of a deleted buffer crashes, and the main thread may delete it at any time: the two calls are
        # made by C code, between which Python does not change threads.
        return any(map(operator.call, (self.array.is_deleted, self.array.is_ready)))


class Expected:
    """Arrays that are on their way, in the order in which they were announced. Any thread may call it.

    Each is held only until it is there, which shows that things move.
    """

    def __init__(self, times: Times):
        self._times = times
        self._lock = threading.Lock()
        self._marks: collections.deque[Mark] = collections.deque()
        self._sent: collections.deque[int | None] = collections.deque(maxlen=_REMEMBERED)

    def __bool__(self) -> bool:
        return bool(self._marks)

    def add(self, mark: Mark) -> None:
        """One more is on its way."""
        with self._lock:
            if not self._marks:
                self._times.waits_since = time.monotonic()
            self._marks.append(mark)
            self._prune()

    def prune(self) -> None:
        """Lets go of those at the front that are there."""
        with self._lock:
            self._prune()

    def are_to_come(self) -> bool:
        """Whether values from other ranks are still to come."""
        with self._lock:
            self._prune()
            return any(mark.ranks for mark in self._marks)

    def oldest(self) -> Mark | None:
        """The oldest that is not there yet. What was promised after it may have been sent all the same."""
        with self._lock:
            if self._marks and time.monotonic() - self._times.waits_since > STILL_S:
                self._marks = collections.deque(m for m in self._marks if m.ranks or not self._is_done(m))
            return self._marks[0] if self._marks else None

    def pending(self) -> list[Mark]:
        """All that are not there yet, the oldest first."""
        with self._lock:
            return [mark for mark in self._marks if not mark.is_there]

    def sent_among(self, numbers: set[int]) -> tuple[int, ...]:
        """Those of some numbers under which this rank has sent a value."""
        with self._lock:
            return tuple(sorted(numbers.intersection(self._sent))) if numbers else ()

    def _prune(self) -> None:
        while self._marks and self._is_done(self._marks[0]):
            self._marks.popleft()
            self._times.move()

    def _is_done(self, mark: Mark) -> bool:
        """Whether it is there; if it was promised to another rank, it counts as sent from now on."""
        is_there = mark.is_there
        if is_there and not mark.ranks:
            self._sent.append(mark.number)
        return is_there
