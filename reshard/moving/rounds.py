"""Packs pieces into rounds, so that no device ever needs more working memory than the threshold.

A piece needs working memory where it is cut out of a shard and where it waits to be written into one: its bytes on
the sender unless it is a whole source shard, and its bytes on the receiver unless it becomes a whole target shard.
An array whose pieces fit goes into one round as it is; the pieces of a larger one are cut into chunks of half the
threshold, so that a device can send one and receive one at the same time. Rounds follow each other; each device
takes part in one as soon as it has room, so that arrays for different groups travel side by side.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from mpmd.arrays.boxes import Box
from reshard.moving.route import Route


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The part of an array that one round moves: some pieces uncut, or chunks, with the piece and the box of each."""

    array: int
    pieces: np.ndarray
    boxes: tuple[Box, ...] = ()  # of chunks, in elements of the array


Round = tuple[Batch, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """The need of pieces at some places: bytes of working memory, and bytes that arrive without needing any."""

    places: np.ndarray
    working: np.ndarray
    arriving: np.ndarray

    def times(self, factor: int) -> "Load":
        return Load(self.places, self.working * factor, self.arriving * factor)


class Loads:
    """The loads of a route's pieces in elements of its lattice: of all at once, or divided into batches."""

    def __init__(self, route: Route, num_places: int):
        self._route = route
        self._num_places = num_places
        self._batches: dict[int, tuple[float, list[tuple[int, np.ndarray, Load]]]] = {}
        self._cut = np.where(route.moves & ~route.whole_source, route.elements, 0)
        self._wait = np.where(route.whole_target, 0, route.elements)
        self._come = np.where(route.whole_target, route.elements, 0)
        self.pieces = np.arange(len(route.hop), dtype=np.int32)
        self.whole = self.of(self.pieces)

    def of(self, pieces: np.ndarray) -> Load:
        working = self._sum(self._route.sender_place, self._cut, pieces)
        working += self._sum(self._route.receiver_place, self._wait, pieces)
        arriving = self._sum(self._route.receiver_place, self._come, pieces)
        places = np.flatnonzero((working > 0) | (arriving > 0))
        return Load(places, working[places], arriving[places])

    def _sum(self, place: np.ndarray, elements: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        return np.bincount(place[pieces], elements[pieces], self._num_places)

    def batches(self, limit: float) -> list[tuple[int, np.ndarray, Load]]:
        """Divides all pieces into batches that need at most `limit` anywhere: (hop, pieces, load), hops in order.

        No single piece may need more than half of `limit`.
        """
        num = math.ceil(self.whole.working.max(initial=0) / limit)
        while True:
            if num not in self._batches:
                batches = self._split(num)
                self._batches[num] = max((load.working.max(initial=0) for *_, load in batches), default=0.0), batches
            most, batches = self._batches[num]
            if most <= limit:
                return batches
            num = num + num // 2 + 1

    def _split(self, num: int) -> list[tuple[int, np.ndarray, Load]]:
        batches: list[tuple[int, np.ndarray, Load]] = []
        for hop in np.unique(self._route.hop):
            pieces = np.flatnonzero(self._route.hop == hop)
            if num >= len(pieces):
                parts = list(pieces[:, None])
            else:
                # Pieces are sorted by receiver. A receiver's pieces are dealt out in turn, starting at another batch.
                receiver = self._route.receiver[pieces]
                rank = np.arange(len(pieces)) - np.searchsorted(receiver, receiver)
                batch = (rank + receiver) % num
                order = np.argsort(batch, kind="stable")
                parts = np.split(pieces[order], np.searchsorted(batch[order], np.arange(1, num)))
            batches += [(int(hop), part.astype(np.int32), self.of(part)) for part in parts if len(part)]
        return batches


class Packer:
    """Rounds under construction. Remembers for each place the last round it takes part in and its load there."""

    def __init__(self, num_places: int, threshold: int | None):
        self._limit = math.inf if threshold is None else threshold
        self._round = np.zeros(num_places, np.int64)
        self._working = np.zeros(num_places)
        self._arriving = np.zeros(num_places)
        self._rounds: dict[int, list[Batch]] = defaultdict(list)
        self.peak = 0

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple([tuple(self._rounds[number]) for number in range(max(self._rounds, default=-1) + 1)])

    def add(self, array: int, loads: Loads, route: Route, scale: Sequence[int], itemsize: int) -> None:
        """Finds rounds for all pieces of an array, cut into chunks as far as the threshold requires."""
        unit_bytes = math.prod(scale) * itemsize
        whole = loads.whole.times(unit_bytes)
        if whole.working.max(initial=0) <= self._limit:
            self._add_batch(Batch(array, loads.pieces), whole, 0)
            return
        needs_cut = ~(route.whole_source & route.whole_target)
        if route.elements[needs_cut].max(initial=0) * unit_bytes > self._limit // 2:
            self._add_chunks(array, route, scale, itemsize)
            return
        after = last = hop_before = 0
        for hop, pieces, load in loads.batches(self._limit / unit_bytes):
            if hop > hop_before:  # reads what earlier hops have written
                hop_before, after = hop, last
            last = max(last, self._add_batch(Batch(array, pieces), load.times(unit_bytes), after))

    def _add_batch(self, batch: Batch, load: Load, after: int) -> int:
        places = load.places
        number = int(self._round[places].max(initial=after))
        working, arriving = self._at(number, places)
        # Arriving bytes need no working memory, but their source is not free until they are there: they count as well,
        # unless they are alone.
        crowded = (arriving > 0) & (arriving + load.arriving > self._limit)
        if (working + load.working > self._limit).any() or crowded.any():
            number += 1
            working, arriving = self._at(number, places)
        self._put(number, places, working + load.working, arriving + load.arriving)
        self._rounds[number].append(batch)
        return number

    def _add_chunks(self, array: int, route: Route, scale: Sequence[int], itemsize: int) -> None:
        most = max(1, int(self._limit) // 2 // itemsize)
        factor = np.array(scale, np.int64)
        starts, stops = (route.start * factor).tolist(), (route.stop * factor).tolist()
        chunks: dict[int, list[tuple[int, Box]]] = defaultdict(list)
        after = last = hop = 0
        # Plain lists: this goes chunk by chunk, of which there may be millions.
        places = _RoundLoads(self._round.tolist(), self._working.tolist(), self._limit)
        columns = (route.hop, route.sender_place, route.receiver_place, route.moves, route.whole_source)
        rows = zip(*(column.tolist() for column in columns), route.whole_target.tolist(), strict=True)
        for piece, (at_hop, sender, receiver, moves, whole_source, whole_target) in enumerate(rows):
            if at_hop > hop:
                hop, after = at_hop, last
            whole = Box(tuple(starts[piece]), tuple(stops[piece]))
            parts = [(whole, whole.size)] if whole_source and whole_target else list(whole.split_sized(most))
            uncut = len(parts) == 1
            cuts = moves and not (uncut and whole_source)
            waits = not (uncut and whole_target)
            for box, size in parts:
                nbytes = size * itemsize
                number = places.add(sender, nbytes if cuts else 0, receiver, nbytes if waits else 0, after)
                last = max(last, number)
                chunks[number].append((piece, box))
        arriving = np.where(self._round == places.round, self._arriving, 0)
        everywhere = np.arange(len(self._round))
        self._put(places.round, everywhere, np.array(places.working), arriving)
        self.peak = max(self.peak, places.peak)
        for number in sorted(chunks):
            pieces, boxes = zip(*chunks[number], strict=True)
            self._rounds[number].append(Batch(array, np.array(pieces, np.int32), boxes))

    def _at(self, number: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        here = self._round[places] == number
        return np.where(here, self._working[places], 0), np.where(here, self._arriving[places], 0)

    def _put(self, number: int | list[int], places: np.ndarray, working: np.ndarray, arriving: np.ndarray) -> None:
        assert not (working > self._limit).any(), "a round over the threshold"
        self._round[places] = number
        self._working[places] = working
        self._arriving[places] = arriving
        self.peak = max(self.peak, int(working.max(initial=0)))


@dataclasses.dataclass
class _RoundLoads:
    """The state of a `Packer` while one array is cut: the last round of each place and its load there."""

    round: list[int]
    working: list[float]
    limit: float
    peak: int = 0

    def add(self, sender: int, sent: int, receiver: int, received: int, after: int) -> int:
        """Returns the first round from `after` on that has room for a chunk; takes the room."""
        first, working = self.round, self.working
        number = max(after, first[sender], first[receiver])
        at_sender = working[sender] if first[sender] == number else 0
        at_receiver = working[receiver] if first[receiver] == number else 0
        if at_sender + sent > self.limit or at_receiver + received > self.limit:
            number += 1
            at_sender = at_receiver = 0
        if sender == receiver:
            sent = received
        first[sender] = first[receiver] = number
        working[sender] = at_sender + sent
        working[receiver] = at_receiver + received
        self.peak = max(self.peak, int(working[sender]), int(working[receiver]))
        return number
