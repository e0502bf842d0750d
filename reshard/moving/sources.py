"""Holds the arrays of a reshard on their way: source shards, freed as they leave, and target shards."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box
from reshard.moving.in_place import Kept, take_over
from reshard.moving.local import Shard, Sink
from reshard.moving.plan import PlannedArray, ReshardPlan
from reshard.moving.rounds import Batch
from reshard.moving.route import Route
from reshard.places import Place, is_local


class Movement(NamedTuple):
    """A piece of an array, or a chunk of one, on its way from one shard to another."""

    sender: int  # as in `Route`, like `receiver` and `hop`
    receiver: int
    hop: int
    from_device: Place  # where the sender shard is
    to_device: Place  # where the receiver shard is
    box: Box  # the box of the sent shard, in elements of the array
    into: Box  # the box of the shard that it goes to, likewise
    nbytes: int  # its bytes


def ways_of(route: Route, scale: tuple[int, ...], itemsize: int) -> list[Movement]:
    """Returns the way of each piece of an array's route: the same for all arrays of one route and shape."""
    starts, stops = route.start.tolist(), route.stop.tolist()
    boxes = [Box(tuple(a), tuple(b)).scaled(scale) for a, b in zip(starts, stops, strict=True)]
    return [_way_of(route, scale, itemsize, piece, box) for piece, box in enumerate(boxes)]


def _way_of(route: Route, scale: tuple[int, ...], itemsize: int, piece: int, box: Box) -> Movement:
    """Returns the way of a box of the array, which is a piece of its route or a chunk of one."""
    sender, receiver, hop = int(route.sender[piece]), int(route.receiver[piece]), int(route.hop[piece])
    source = route.target if hop else route.source
    held, wanted = source.boxes[sender].scaled(scale), route.target.boxes[receiver].scaled(scale)
    devices = source.devices[sender], route.target.devices[receiver]
    return Movement(
        sender, receiver, hop, *devices, box.relative_to(held), box.relative_to(wanted), box.nbytes(itemsize)
    )


class MovingArray:
    """One array on its way."""

    def __init__(self, planned: PlannedArray, source: Shard, ways: Callable[..., list[Movement]]):
        self.planned = planned
        self._ways = ways
        self.source = source
        self.shards = _shards(source, planned)  # single-device arrays; None for freed ones and those of other processes
        self.sinks: dict[int, Sink] = {}  # the target shards that are being filled
        self.parts: dict[int, Shard] = {}  # the target shards that are complete
        self.left = 0  # the number of pieces that have not left yet
        self.kept = {t: s for s, t in planned.route.kept}  # for each target shard that stays in place, its source shard
        self.stays = set(self.kept.values())  # these source shards

    @property
    def name(self) -> str:
        return self.planned.leaf.path or "the array"

    def ways(self, batch: Batch) -> Iterable[Movement]:
        """Returns the ways of the parts of a batch."""
        kind, pieces = (self.planned.route, self.planned.scale, self.planned.leaf.dtype.itemsize), batch.pieces.tolist()
        if batch.boxes:
            return (_way_of(*kind, piece, box) for piece, box in zip(pieces, batch.boxes, strict=True))
        ways = self._ways(*kind)
        return [ways[piece] for piece in pieces]


class Sources:
    """Frees each source shard when its last byte has left, if the sources are donated."""

    def __init__(self, plan: ReshardPlan, arrays: Sequence[MovingArray], donate: bool):
        self._donate = donate
        self._arrays = arrays
        memories = [_memories(array) if donate else set() for array in arrays]
        users = Counter(memory for used in memories for memory in used)
        # What is moved to two targets is freed at the end, also as two arrays of the same memory.
        self._shared = {id(a) for a, used in zip(arrays, memories, strict=True) if any(users[m] > 1 for m in used)}
        self._reads: Counter[tuple[int, int]] = Counter()  # for each shard, how many pieces have still to leave
        self._started: set[int] = set()
        self._leaving: list[tuple[MovingArray, int]] = []
        self._consumed: set[int] = set()
        for round_ in plan.rounds:
            for batch in round_:
                self._count(arrays[batch.array], batch)

    def _count(self, array: MovingArray, batch: Batch) -> None:
        route, pieces = array.planned.route, batch.pieces
        array.left += len(pieces)
        senders = route.sender[pieces[route.hop[pieces] == 0]]
        for shard, count in zip(*np.unique(senders, return_counts=True), strict=True):
            self._reads[id(array.source), int(shard)] += int(count)

    def start(self, array: MovingArray) -> None:
        """Frees the shards that nobody reads, just before the first shard that is read leaves."""
        if id(array) in self._started:
            return
        self._started.add(id(array))
        for shard in range(len(array.shards)):
            if not self._reads[id(array.source), shard]:
                self._free(array, shard)

    def leave(self, array: MovingArray, shard: int) -> None:
        """Records that a piece of a shard is in flight."""
        self._leaving.append((array, shard))

    def settle(self) -> None:
        """Records that all pieces in flight have arrived."""
        for array, shard in self._leaving:
            key = (id(array.source), shard)
            self._reads[key] -= 1
            if not self._reads[key]:
                self._free(array, shard)
        self._leaving.clear()

    def _frees(self, array: MovingArray) -> bool:
        return self._donate and id(array) not in self._shared and not isinstance(array.source, np.ndarray)

    def _free(self, array: MovingArray, shard: int) -> None:
        if not self._frees(array) or shard in array.stays:
            return
        self._consumed.add(id(array.source))
        data, array.shards[shard] = array.shards[shard], None
        if isinstance(data, jax.Array) and not data.is_deleted():
            data.delete()

    def take_over_kept(self) -> None:
        """Lets new arrays take over the shards that stay in place, or copies these if the source lives on."""
        taken: list[Kept] = []
        for array in self._arrays:
            frees = self._frees(array)
            for t, s in array.kept.items():
                data = array.shards[s]
                if isinstance(data, np.ndarray):
                    array.parts[t] = data.copy()
                elif data is not None and frees:
                    taken.append(Kept(data, array.planned.route.target.devices[t], array.parts, t))
                elif data is not None:
                    array.parts[t] = jax.device_put(data, data.sharding, may_alias=False)
        take_over(taken)

    def delete(self) -> None:
        """Deletes the sources after everything has arrived."""
        for array in self._arrays if self._donate else ():
            delete(array.source)

    def _is_consumed(self, array: MovingArray) -> bool:
        """Returns whether a shard has been freed, or taken over by a new array."""
        kept = (array.shards[s] for s in array.kept.values())
        gone = any(isinstance(data, jax.Array) and data.is_deleted() for data in kept)
        return id(array.source) in self._consumed or gone

    def what_is_left(self) -> str:
        """Says which sources are still valid, after an error."""
        gone = [array.name for array in self._arrays if self._is_consumed(array)]
        valid = [array.name for array in self._arrays if not self._is_consumed(array)]
        lines = ["the reshard failed on the way; see the error above."]
        if gone:
            lines.append(f"  consumed, whole or in part: {', '.join(gone)}")
        lines.append(f"  still valid: {', '.join(valid) or 'none'}")
        return "\n".join(lines)


def _memories(array: MovingArray) -> set[object]:
    """Returns where the shards of a source lie. `jax.device_put` to an equivalent sharding copies nothing."""
    shards = [shard for shard in array.shards if isinstance(shard, jax.Array)]
    return {id(array.source), *((next(iter(s.devices())), s.unsafe_buffer_pointer()) for s in shards)}


def delete(source: Shard) -> None:
    """Deletes an array, but leaves the memory of a numpy array to its owner."""
    if not isinstance(source, np.ndarray) and not source.is_deleted():
        source.delete()


def _shards(source: Shard, planned: PlannedArray) -> list[Shard | None]:
    """Returns the single-device arrays of the source, in the order of its layout; None for those of other processes."""
    layout = planned.route.source
    if isinstance(source, np.ndarray):
        return [source if is_local(memory) else None for memory in layout.devices]
    shards: list[Shard | None] = [None] * len(layout.devices)
    arrays = [source]
    if isinstance(source, MpmdArray):
        arrays = [source._arrays.get(part.key) for part in source.mpmd_sharding.parts(source.shape)]
    for array, indices in zip(arrays, layout.parts, strict=True):
        by_device = {} if array is None else compat.shards(array)
        for i in indices:
            if shards[i] is None:
                shards[i] = by_device.get(layout.devices[i])
    return shards
