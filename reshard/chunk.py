"""Packing pieces into rounds, so that no device ever needs more working memory than the threshold.

A piece needs working memory where it is cut out of a shard and where it waits to be written into one: its bytes on
the sender unless it is a whole source shard, and its bytes on the receiver unless it becomes a whole target shard.
An array whose pieces fit goes into one round as it is; the pieces of a larger one are cut into chunks of half the
threshold, so that a device can send one and receive one at the same time. Rounds follow each other; each device
takes part in one as soon as it has room, so that arrays for different groups travel side by side.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mpmd.boxes import Box
from reshard.route import Route


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one piece of a route; `box` counts in the elements of the array."""

    piece: int
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What one round moves of one array: some chunks, or every piece uncut (`chunks` is None)."""

    array: int
    chunks: tuple[Chunk, ...] | None = None


Round = tuple[Batch, ...]


@dataclasses.dataclass(frozen=True)
class Load:
    """One array's need at each place: bytes of working memory, and bytes that arrive without needing any."""

    working: np.ndarray
    arriving: np.ndarray

    @classmethod
    def of(cls, route: Route, num_places: int) -> "Load":
        """In elements of the lattice."""
        waits = ~route.whole_target
        cut = route.moves & ~route.whole_source

        def total(place: np.ndarray, which: np.ndarray) -> np.ndarray:
            return np.bincount(place[which], route.elements[which], num_places)

        return cls(
            total(route.sender_place, cut) + total(route.receiver_place, waits),
            total(route.receiver_place, route.whole_target),
        )


class Packer:
    """Rounds under construction. Remembers for each place the last round it takes part in and its load there."""

    def __init__(self, num_places: int, threshold: int | None):
        self._limit = math.inf if threshold is None else threshold
        self._round = np.zeros(num_places, np.int64)
        self._working = np.zeros(num_places)
        self._arriving = np.zeros(num_places)
        self._rounds: list[list[Batch]] = []
        self.peak = 0

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(map(tuple, self._rounds))

    def add_whole(self, array: int, load: Load) -> bool:
        """Puts all pieces of an array into one round; False if no round has room for them."""
        if load.working.max(initial=0) > self._limit:
            return False
        places = np.flatnonzero((load.working > 0) | (load.arriving > 0))
        number = int(self._round[places].max(initial=0))
        working, arriving = self._at(number, places)
        # What arrives needs no working memory, but its source is not free before it is there: it counts as well,
        # unless it is alone.
        crowded = (arriving > 0) & (arriving + load.arriving[places] > self._limit)
        if (working + load.working[places] > self._limit).any() or crowded.any():
            number += 1
            working, arriving = self._at(number, places)
        self._put(number, places, working + load.working[places], arriving + load.arriving[places])
        self._batch(number, Batch(array))
        return True

    def add_chunks(self, array: int, route: Route, scale: Sequence[int], itemsize: int) -> None:
        """Cuts the pieces of an array and puts each chunk into the first round with room for it."""
        most = max(1, int(self._limit) // 2 // itemsize)
        factor = np.array(scale, np.int64)
        chunks: dict[int, list[Chunk]] = {}
        after = 0
        last = 0
        level = 0
        for piece in range(len(route.level)):
            if route.level[piece] > level:  # reads what earlier levels have written
                level, after = int(route.level[piece]), last
            whole = Box(tuple((route.start[piece] * factor).tolist()), tuple((route.stop[piece] * factor).tolist()))
            direct = route.whole_source[piece] and route.whole_target[piece]
            parts = [whole] if direct else list(whole.split(most))
            uncut = len(parts) == 1
            sender, receiver = int(route.sender_place[piece]), int(route.receiver_place[piece])
            cuts = route.moves[piece] and not (uncut and route.whole_source[piece])
            waits = not (uncut and route.whole_target[piece])
            for box in parts:
                nbytes = box.nbytes(itemsize)
                number = self._add(sender, nbytes * int(cuts), receiver, nbytes * int(waits), after)
                chunks.setdefault(number, []).append(Chunk(piece, box))
                last = max(last, number)
        for number in sorted(chunks):
            self._batch(number, Batch(array, tuple(chunks[number])))

    def _add(self, sender: int, sent: int, receiver: int, received: int, after: int) -> int:
        places = np.array([sender, receiver] if sender != receiver else [sender])
        need = np.array([sent, received] if sender != receiver else [received])
        number = max(after, int(self._round[places].max()))
        working, arriving = self._at(number, places)
        if (working + need > self._limit).any():
            number += 1
            working, arriving = self._at(number, places)
        self._put(number, places, working + need, arriving)
        return number

    def _at(self, number: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        here = self._round[places] == number
        return np.where(here, self._working[places], 0), np.where(here, self._arriving[places], 0)

    def _put(self, number: int, places: np.ndarray, working: np.ndarray, arriving: np.ndarray) -> None:
        assert not (working > self._limit).any(), "a round over the threshold"
        self._round[places] = number
        self._working[places] = working
        self._arriving[places] = arriving
        self.peak = max(self.peak, int(working.max(initial=0)))

    def _batch(self, number: int, batch: Batch) -> None:
        while len(self._rounds) <= number:
            self._rounds.append([])
        self._rounds[number].append(batch)
