"""Decides who sends which box to whom, for one pair of layouts.

The source and target cuts together make a lattice of cells, each of which is wholly inside or outside of every
shard. Each device that wants a cell and lacks it gets it once. A cell crosses to a host once, then to each process on
the host once, then to the devices of the process. The sender is always a device that has the cell by then, the one
that sends least so far. At the end cells that travel together are merged into boxes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from reshard.moving.shards import Grid, Layout
from reshard.places import Place, host_of

T = TypeVar("T")


class Places:
    """All devices of a plan, numbered; their processes and hosts, numbered too; and the bytes that each has to send."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        numbers: dict[Place, int] = {}
        # For each layout, the number of each shard's device.
        self.of = {layout: _numbered(layout.devices, numbers) for layout in dict.fromkeys(layouts)}
        self.devices = list(numbers)
        self.process = _numbered([getattr(d, "process_index", 0) for d in self.devices], {})
        self.host = _numbered([host_of(d) for d in self.devices], {})
        self.sent = np.zeros(len(self.devices))


def _numbered(keys: Iterable[T], numbers: dict[T, int]) -> np.ndarray:
    """Returns the number of each key; a key that has none gets the next one."""
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """The pieces that bring an array from one layout to another, in units of the lattice.

    Piece i goes from shard `sender[i]` to target shard `receiver[i]`. Pieces of hop 0 are read from the source;
    those of a later hop from the target shard `sender[i]`, which earlier hops have filled. `kept` pairs source
    and target shards that are the same box on the same device.
    """

    source: Layout
    target: Layout
    kept: tuple[tuple[int, int], ...]
    hop: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    sender_place: np.ndarray
    receiver_place: np.ndarray
    missing: int
    missing_on_hosts: int

    @functools.cached_property
    def elements(self) -> np.ndarray:
        return (self.stop - self.start).prod(axis=1)

    @functools.cached_property
    def moves(self) -> np.ndarray:
        """Which pieces cross from one device to another."""
        return self.sender_place != self.receiver_place

    @functools.cached_property
    def whole_source(self) -> np.ndarray:
        """Which pieces are all of their source shard: these are sent without being cut out first."""
        source = (self.source.stop - self.source.start).prod(axis=1)
        of_sender = source[np.where(self.hop == 0, self.sender, 0)]
        return (self.hop == 0) & (self.elements == of_sender)

    @functools.cached_property
    def whole_target(self) -> np.ndarray:
        """Which pieces are all of their target shard: these become it, without being written into it."""
        return self.moves & (self.elements == (self.target.stop - self.target.start).prod(axis=1)[self.receiver])


def build(source: Layout, target: Layout, places: Places, weight: float) -> Route:
    """Builds the route between two layouts of one unit shape.

    Args:
        places: the places of the devices; the bytes that they send are added up there.
        weight: bytes for each element of the lattice, over all arrays that will take this route.
    """
    source_place, target_place = places.of[source], places.of[target]
    lattice = _Lattice((*source.grids, *target.grids), source, target)
    num_places = len(places.devices)
    kept = _kept(source, target, source_place, target_place)
    cell, shard = lattice.pairs(source.grids)
    holders = _Holders(cell, source_place[shard], shard, np.zeros(len(cell), np.int64))
    wants = _wants(target, target_place, lattice, kept)

    here = holders.find(wants.keys(num_places), num_places)  # cells that devices have already, in another shard
    stay, wants = holders.deliver(wants.take(here >= 0), here[here >= 0]), wants.take(here < 0)
    again, wants = _wanted_again(wants, num_places)
    missing = int(lattice.volume[wants.cell].sum())
    come, holders, missing_on_hosts = _from_other_places(wants, holders, places, lattice, weight)
    steps = [stay, *come]
    if len(again.cell):
        steps.append(holders.deliver(again, holders.find(again.keys(num_places), num_places)))

    hop, sender, receiver, start, stop = lattice.merged(steps)
    sender_place = np.where(
        hop == 0,
        source_place[np.where(hop == 0, sender, 0)],
        target_place[np.where(hop == 0, 0, sender)],
    )
    return Route(
        source, target, kept, hop, sender, receiver, start, stop, sender_place, target_place[receiver],
        missing, missing_on_hosts,
    )  # fmt: skip


def _wants(
    target: Layout, target_place: np.ndarray, lattice: "_Lattice", kept: tuple[tuple[int, int], ...]
) -> "_Wants":
    """Returns the wants of the target shards, except for kept ones: their source shards show that devices have them."""
    cell, shard = lattice.pairs(target.grids)
    wanted = ~_among(shard, np.array([t for _, t in kept], np.int64)) & (lattice.volume[cell] > 0)
    cell, shard = cell[wanted], shard[wanted]
    return _Wants(cell, target_place[shard], shard)


def _wanted_again(wants: "_Wants", num_places: int) -> tuple["_Wants", "_Wants"]:
    """Splits off second wants of a cell by a device (in shards of two groups): it copies the cell. Copies first."""
    _, first = np.unique(wants.keys(num_places), return_index=True)
    again = np.ones(len(wants.cell), bool)
    again[first] = False
    return wants.take(again), wants.take(np.sort(first))


def _from_other_places(
    wants: "_Wants", holders: "_Holders", places: Places, lattice: "_Lattice", weight: float
) -> tuple[list["_Delivery"], "_Holders", int]:
    """Brings cells to each host once, from there to its processes, from there to their devices.

    Returns the steps, the holders after them, and the number of elements that have come to hosts without any of them.
    """
    num_places = len(places.devices)
    everywhere = np.zeros(num_places, np.int64)
    steps: list[_Delivery] = []
    missing_on_hosts = 0
    for domain, wider in (
        (places.host, everywhere),
        (places.process, places.host),
        (np.arange(num_places), places.process),
    ):
        lacking = wants.take(~holders.present(wants, domain))
        if not len(lacking.cell):
            continue
        entries = lacking.take(lacking.one_per(domain, places.sent))
        volume = lattice.volume[entries.cell]
        if wider is everywhere:
            missing_on_hosts = int(volume.sum())
        chosen = holders.choose(entries, wider, places, volume * weight)
        steps.append(holders.deliver(entries, chosen))
        wants = wants.without(entries, num_places)
        holders = holders.with_entries(entries, holders.hop[chosen] + 1)
    assert not len(wants.cell), "cells that nobody has"
    return steps, holders, missing_on_hosts


def _among(keys: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns which keys occur in the table. (`np.isin` hashes large integers, which is many times slower.)"""
    if not len(table):
        return np.zeros(len(keys), bool)
    table = np.sort(table)
    return table[np.minimum(np.searchsorted(table, keys), len(table) - 1)] == keys


def _as_one_key(columns: np.ndarray) -> np.ndarray:
    """Returns a number for each row, the same for equal rows."""
    sizes = [int(n) + 1 for n in columns.max(axis=0)]
    if math.prod(sizes) >= 1 << 62:
        return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)
    return np.asarray(np.ravel_multi_index(tuple(columns.T), sizes))


def _kept(
    source: Layout, target: Layout, source_place: np.ndarray, target_place: np.ndarray
) -> tuple[tuple[int, int], ...]:
    if source.memory_kind != target.memory_kind:
        return ()
    have = {(place, box): i for i, (place, box) in enumerate(zip(source_place.tolist(), source.boxes, strict=True))}
    wanted = zip(target_place.tolist(), target.boxes, strict=True)
    return tuple([(have[key], t) for t, key in enumerate(wanted) if key in have])


class _Delivery(NamedTuple):
    """Wanted cells, and the way of each: the hop of its piece, the shard that it comes from, and where it goes."""

    cell: np.ndarray
    way: np.ndarray


class _Wants(NamedTuple):
    """Cells that places want, each in one target shard."""

    cell: np.ndarray
    place: np.ndarray
    shard: np.ndarray

    def keys(self, num_places: int) -> np.ndarray:
        """Returns a number for each pair of cell and place."""
        return self.cell * num_places + self.place

    def take(self, index: np.ndarray) -> "_Wants":
        return _Wants(*[column[index] for column in self])

    def one_per(self, domain: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """Returns one want for each cell and domain: the domain's places take turns, the least loaded so far first."""
        order = np.lexsort((self.place, sent[self.place], self.cell, domain[self.place]))
        cell, of = self.cell[order], domain[self.place][order]
        new_domain = np.r_[True, of[1:] != of[:-1]]
        first = np.flatnonzero(new_domain | np.r_[True, cell[1:] != cell[:-1]])
        count = np.diff(np.r_[first, len(order)])
        first_of_domain = np.maximum.accumulate(np.where(new_domain[first], np.arange(len(first)), 0))
        turn = np.arange(len(first)) - first_of_domain
        return np.sort(order[first + turn % count])

    def without(self, other: "_Wants", num_places: int) -> "_Wants":
        return self.take(~_among(self.keys(num_places), other.keys(num_places)))


class _Holders(NamedTuple):
    """Cells that places have: in a source shard (hop 0), or in a target shard that earlier steps filled."""

    cell: np.ndarray
    place: np.ndarray
    shard: np.ndarray
    hop: np.ndarray

    def with_entries(self, entries: _Wants, hop: np.ndarray) -> "_Holders":
        return _Holders(*map(np.concatenate, zip(self, (*entries, hop), strict=True)))

    def deliver(self, wants: _Wants, chosen: np.ndarray) -> _Delivery:
        """Brings cells from the chosen holders."""
        return _Delivery(wants.cell, np.stack([self.hop[chosen], self.shard[chosen], wants.shard], axis=1))

    def find(self, keys: np.ndarray, num_places: int) -> np.ndarray:
        """Returns the holder of each key of `_Wants.keys`, -1 where there is none."""
        mine = self.cell * num_places + self.place
        order = np.argsort(mine, kind="stable")
        at = np.minimum(np.searchsorted(mine, keys, sorter=order), len(mine) - 1)
        return np.where(mine[order[at]] == keys, order[at], -1)

    def present(self, wants: _Wants, domain: np.ndarray) -> np.ndarray:
        num = int(domain.max(initial=0)) + 1
        return _among(wants.cell * num + domain[wants.place], self.cell * num + domain[self.place])

    def choose(self, wants: _Wants, domain: np.ndarray, places: Places, nbytes: np.ndarray) -> np.ndarray:
        """Chooses a holder of each wanted cell in the want's domain, so that the places' totals stay even."""
        num = int(domain.max(initial=0)) + 1
        mine = self.cell * num + domain[self.place]
        order = np.argsort(mine, kind="stable")
        mine = mine[order]
        keys = wants.cell * num + domain[wants.place]
        first = np.searchsorted(mine, keys)
        count = np.searchsorted(mine, keys, side="right") - first
        chosen = order[first]
        single = count == 1
        np.add.at(places.sent, self.place[chosen[single]], nbytes[single])
        for size in np.unique(count[~single]):
            which = np.flatnonzero(count == size)
            candidates = order[first[which, None] + np.arange(size)]
            chosen[which] = self._levelled(candidates, places.sent, nbytes[which])
        return chosen

    def _levelled(self, candidates: np.ndarray, sent: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Chooses one of each row's candidates; rows with the same candidate places share them out evenly."""
        at = self.place[candidates]
        rows = np.ascontiguousarray(at).view(np.dtype((np.void, at.dtype.itemsize * at.shape[1]))).reshape(-1)
        _, first, same = np.unique(rows, return_index=True, return_inverse=True)
        by_set = np.argsort(same, kind="stable")
        bounds = np.searchsorted(same[by_set], np.arange(len(first) + 1))
        rank = np.arange(len(rows)) - bounds[same[by_set]]
        size = at.shape[1]
        chosen = np.empty(len(rows), np.int64)
        for turn in range(int(rank.max()) // size + 1):
            now = by_set[rank // size == turn]
            nth = rank[rank // size == turn] % size
            least_first = np.argsort(sent[at[first]], axis=1, kind="stable")
            column = least_first[same[now], nth]
            chosen[now] = candidates[now, column]
            np.add.at(sent, at[now, column], nbytes[now])
        return chosen


class _Lattice:
    """The cells that the cuts of all grids together make."""

    def __init__(self, grids: Sequence[Grid], source: Layout, target: Layout):
        ndim = source.start.shape[1]
        ends = [max(int(lay.stop[:, axis].max()) for lay in (source, target)) for axis in range(ndim)]
        self.starts = [np.unique(np.concatenate([g.starts[axis] for g in grids])) for axis in range(ndim)]
        self.stops = [np.r_[starts[1:], end] for starts, end in zip(self.starts, ends, strict=True)]
        self.shape = tuple(map(len, self.starts))
        lengths = [stops - starts for starts, stops in zip(self.starts, self.stops, strict=True)]
        self.volume = functools.reduce(np.multiply.outer, lengths, np.ones((), np.int64)).reshape(-1)

    def pairs(self, grids: Sequence[Grid]) -> tuple[np.ndarray, np.ndarray]:
        """Returns every cell with every shard that contains it."""
        cells: list[np.ndarray] = []
        shards: list[np.ndarray] = []
        for grid in grids:
            within = grid.within(self.starts)
            rows = grid.at([starts[mine] for starts, mine in zip(self.starts, within, strict=True)])
            cell = np.zeros((), np.int64)
            for mine, length in zip(within, self.shape, strict=True):
                cell = cell[..., None] * length + mine
            cells.append(np.repeat(cell.reshape(-1), rows.shape[1]))
            shards.append(rows.reshape(-1))
        pairs = np.unique(np.stack([np.concatenate(cells), np.concatenate(shards)]), axis=1) if len(grids) > 1 else None
        return (cells[0], shards[0]) if pairs is None else (pairs[0], pairs[1])

    def merged(self, steps: Sequence[_Delivery]) -> tuple[np.ndarray, ...]:
        """Merges cells that go the same way into few boxes, along one axis after the other, the last axis first.

        Returns hop, sender, receiver, start and stop of each box.
        """
        ndim = len(self.shape)
        cell, way = map(np.concatenate, zip(*steps, strict=True))
        low = np.stack(np.unravel_index(cell, self.shape), axis=1) if ndim else np.zeros((len(cell), 0), np.int64)
        high = low + 1
        for axis in reversed(range(ndim)):
            if not len(way):
                break
            other = [a for a in range(ndim) if a != axis]
            same = _as_one_key(np.concatenate([way, low[:, other], high[:, other]], axis=1))
            order = np.lexsort((low[:, axis], same))
            way, low, high, same = way[order], low[order], high[order], same[order]
            joins = (same[1:] == same[:-1]) & (low[1:, axis] == high[:-1, axis])
            first = np.flatnonzero(np.r_[True, ~joins])
            last = np.r_[first[1:], len(order)] - 1
            stop = high[last, axis]
            way, low, high = way[first], low[first], high[first]
            high[:, axis] = stop
        order = np.lexsort((way[:, 2], way[:, 0]))
        way, low, high = way[order], low[order], high[order]
        start, stop = low.copy(), high.copy()
        for axis in range(ndim):
            start[:, axis] = self.starts[axis][low[:, axis]]
            stop[:, axis] = self.stops[axis][high[:, axis] - 1]
        return way[:, 0], way[:, 1], way[:, 2], start, stop
