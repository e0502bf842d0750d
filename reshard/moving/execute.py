"""Carries out a plan: round by round, freeing each source shard when its last byte has left.

The plan says what moves when; here are the arrays themselves: which buffers are read, filled, kept, given up.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box
from mpmd.arrays.mesh import MpmdSharding
from mpmd.job.job import Job
from reshard.moving.in_place import Kept, take_over
from reshard.moving.local import LocalCarrier, Sink, open_sink
from reshard.moving.plan import PlannedArray, ReshardPlan
from reshard.moving.remote import WireCarrier
from reshard.moving.rounds import Batch
from reshard.places import HostMemory, is_local
from reshard.texts import bar

# How much may be under way before what has left is freed, if the threshold allows more.
_WINDOW_BYTES = 64 << 20


@dataclasses.dataclass
class Stats:
    """What a reshard really did, counted where it was done."""

    bytes_moved: int = 0
    bytes_copied_on_device: int = 0
    num_transfers: int = 0
    num_rounds: int = 0
    peak_working_bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a reshard is; bytes count everything that is copied, on one device or between two."""

    bytes_done: int
    bytes_total: int
    arrays_done: int
    arrays_total: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes_done / max(self.seconds, 1e-9) / 2**30
        how_far = bar(self.bytes_done, self.bytes_total)
        return f"reshard {how_far}  {self.arrays_done}/{self.arrays_total} arrays  {rate:.1f} GiB/s"


ProgressCallback = Callable[[Progress], None]


def print_bar(progress: Progress) -> None:
    """Draws the state of a reshard over the last one, on the terminal."""
    end = "\n" if progress.arrays_done == progress.arrays_total else ""
    print(f"\r{progress}", end=end, file=sys.stderr, flush=True)


def execute(
    plan: ReshardPlan,
    sources: Sequence[Any],
    *,
    donate: bool,
    progress: ProgressCallback | None = None,
    num_threads: int | None = None,
    job: Job | None = None,
) -> tuple[list[Any], Stats]:
    """Moves the arrays as planned.

    Args:
        plan: as made for exactly these arrays.
        sources: jax.Array, MpmdArray or numpy arrays; typed keys as their key data.
        donate: whether to free the sources on the way; afterwards they are deleted.
        progress: called after each round, and when enough has been moved in between.
        job: the processes that all carry out this plan, each its own part of it.

    Raises:
        RuntimeError: something failed on the way; says which sources are still valid.
    """
    run = _Run(plan, sources, donate, progress, num_threads or min(8, os.cpu_count() or 1), job)
    try:
        with contextlib.nullcontext() if job is None else job.as_a_whole():
            return run(), run.stats
    except Exception as error:
        raise RuntimeError(run.what_is_left()) from error
    finally:
        run.carrier.close()


class _Moving:
    """One array on its way."""

    def __init__(self, planned: PlannedArray, source: Any, shards: list[Any]):
        self.planned = planned
        self.source = source
        self.source_shards = shards
        route = planned.route
        self.sinks: dict[int, Sink] = {}
        self.parts: dict[int, Any] = {}
        self.started = False
        self.left = 0
        self.factor = np.array(planned.scale, np.int64)
        self.kept = {t: s for s, t in route.kept}

    def box_of_piece(self, piece: int) -> Box:
        route = self.planned.route
        start, stop = route.start[piece] * self.factor, route.stop[piece] * self.factor
        return Box(tuple(start.tolist()), tuple(stop.tolist()))

    def scaled(self, box: Box) -> Box:
        return box.scaled(self.planned.scale)

    def sink(self, t: int) -> Sink:
        if t not in self.sinks:
            target, leaf = self.planned.route.target, self.planned.leaf
            kind = getattr(leaf.target, "memory_kind", None)
            shape = self.scaled(target.boxes[t]).shape
            self.sinks[t] = open_sink(target.devices[t], shape, leaf.dtype, kind)
        return self.sinks[t]


class _Run:
    """One execution of a plan."""

    def __init__(
        self,
        plan: ReshardPlan,
        sources: Sequence[Any],
        donate: bool,
        progress: ProgressCallback | None,
        num_threads: int,
        job: Job | None,
    ):
        self.rank = 0 if job is None else job.rank
        self.wire = None if job is None else WireCarrier(job)
        self.plan = plan
        self.donate = donate
        self.progress = progress
        self.stats = Stats(num_rounds=len(plan.rounds))
        self.carrier = LocalCarrier(num_threads)
        self.moving = [
            _Moving(planned, source, _shards(source, planned))
            for planned, source in zip(plan.arrays, sources, strict=True)
        ]
        self._started_at = time.perf_counter()
        self._under_way: dict[int, int] = {}
        self._done_bytes = 0
        self._reads: dict[tuple[int, int], int] = {}
        self._users: dict[int, int] = {}
        self._consumed: set[int] = set()
        self._unfinished: list[_Moving] = []
        self._finished = 0
        self._leaving: list[tuple[_Moving, int]] = []

    def __call__(self) -> list[Any]:
        for moving in self.moving:
            self._users[id(moving.source)] = self._users.get(id(moving.source), 0) + 1
        for round_ in self.plan.rounds:
            for batch in round_:
                self.moving[batch.array].left += self._count(batch)
        self._count_reads()
        for round_ in self.plan.rounds:
            working: dict[Any, int] = {}
            level = 0
            for batch in round_:
                moving = self.moving[batch.array]
                self._start(moving)
                for piece, box in _chunks(batch, moving):
                    at = int(moving.planned.route.level[piece])
                    if at > 0 and at != level:
                        self._settle()
                    level = at
                    self._carry(moving, piece, box, working)
                if max(self._under_way.values(), default=0) >= _WINDOW_BYTES:
                    self._settle()
            self._settle()
            self.stats.peak_working_bytes = max(self.stats.peak_working_bytes, *working.values(), 0)
        for moving in self.moving:
            self._start(moving)
        self._take_over_kept()
        results = [self._assemble(moving) for moving in self.moving]
        if self.donate:
            for moving in self.moving:
                _delete(moving.source)
        self.stats.seconds = time.perf_counter() - self._started_at
        self._finished = len(self.moving)
        self._report()
        return results

    def _rank_of(self, device: Any) -> int:
        return 0 if self.wire is None else device.process_index

    def _count(self, batch: Batch) -> int:
        if batch.chunks:
            return len(batch.chunks)
        return len(self.moving[batch.array].planned.route.level) if batch.pieces is None else len(batch.pieces)

    def _count_reads(self) -> None:
        for round_ in self.plan.rounds:
            for batch in round_:
                moving = self.moving[batch.array]
                route = moving.planned.route
                pieces = np.array([c.piece for c in batch.chunks], np.int64) if batch.chunks else batch.pieces
                pieces = np.arange(len(route.level)) if pieces is None else pieces
                senders = route.sender[pieces[route.level[pieces] == 0]]
                for shard, count in zip(*np.unique(senders, return_counts=True), strict=True):
                    key = (id(moving.source), int(shard))
                    self._reads[key] = self._reads.get(key, 0) + int(count)

    def _start(self, moving: _Moving) -> None:
        """Frees the shards that nobody reads, just before the first one that somebody reads leaves."""
        if moving.started:
            return
        moving.started = True
        if self._frees(moving):
            kept = set(moving.kept.values())
            for shard in range(len(moving.source_shards)):
                if shard not in kept and not self._reads.get((id(moving.source), shard)):
                    self._free(moving, shard)

    def _frees(self, moving: _Moving) -> bool:
        # A source that is moved to two targets is freed at the end.
        return self.donate and self._users[id(moving.source)] == 1 and not isinstance(moving.source, np.ndarray)

    def _free(self, moving: _Moving, shard: int) -> None:
        self._consumed.add(id(moving.source))
        data = moving.source_shards[shard]
        moving.source_shards[shard] = None
        if data is not None and not data.is_deleted():
            data.delete()

    def _carry(self, moving: _Moving, piece: int, box: Box, working: dict[Any, int]) -> None:
        route = moving.planned.route
        sender, receiver = int(route.sender[piece]), int(route.receiver[piece])
        is_first = route.level[piece] == 0
        from_device = (route.source if is_first else route.target).devices[sender]
        to_device = route.target.devices[receiver]

        def source() -> tuple[Any, Box]:
            if is_first:
                return moving.source_shards[sender], box.relative_to(moving.scaled(route.source.boxes[sender]))
            return moving.sink(sender).contents, box.relative_to(moving.scaled(route.target.boxes[sender]))

        def sink() -> tuple[Sink, Box, np.dtype]:
            into = box.relative_to(moving.scaled(route.target.boxes[receiver]))
            return moving.sink(receiver), into, moving.planned.leaf.dtype

        sender_rank, receiver_rank = self._rank_of(from_device), self._rank_of(to_device)
        if sender_rank != receiver_rank:
            assert self.wire is not None
            sent, received = self.wire.carry(sender_rank, receiver_rank, from_device, to_device, source, sink)
        elif sender_rank == self.rank:
            sent, received = self.carrier.carry(*source(), *sink()[:2])
        else:
            sent = received = 0
        working[from_device] = working.get(from_device, 0) + sent
        working[to_device] = working.get(to_device, 0) + received
        nbytes = box.nbytes(moving.planned.leaf.dtype.itemsize)
        if receiver_rank == self.rank:
            if from_device == to_device:
                self.stats.bytes_copied_on_device += nbytes
            else:
                self.stats.bytes_moved += nbytes
                self.stats.num_transfers += 1
        for rank in {sender_rank, receiver_rank}:
            self._under_way[rank] = self._under_way.get(rank, 0) + nbytes
        self._done_bytes += nbytes
        if route.level[piece] == 0:
            self._leaving.append((moving, sender))
        moving.left -= 1
        if not moving.left:
            self._unfinished.append(moving)

    def _settle(self) -> None:
        """Waits for what is under way; then frees the shards that have left and closes the ones that are full."""
        self.carrier.wait()
        if self.wire is not None:
            self.wire.settle()
        self._under_way.clear()
        for moving, shard in self._leaving:
            key = (id(moving.source), shard)
            self._reads[key] -= 1
            if not self._reads[key] and self._frees(moving) and shard not in moving.kept.values():
                self._free(moving, shard)
        self._leaving.clear()
        for moving in self._unfinished:
            moving.parts.update({t: sink.finish() for t, sink in moving.sinks.items()})
            moving.sinks.clear()
            self._finished += 1
        self._unfinished.clear()
        self._report()

    def _report(self) -> None:
        if self.progress is not None:
            traffic = self.plan.traffic
            kept = sum(a.route.target.boxes[t].size * a.unit_bytes for a in self.plan.arrays for _, t in a.route.kept)
            self.progress(
                Progress(
                    self._done_bytes,
                    traffic.moved + traffic.stays - kept,
                    self._finished,
                    len(self.moving),
                    time.perf_counter() - self._started_at,
                )
            )

    def _take_over_kept(self) -> None:
        """Shards that stay in place: taken over by their new arrays, or copied if the source lives on."""
        taken: list[Kept] = []
        for moving in self.moving:
            frees = self._frees(moving)
            for t, s in moving.kept.items():
                data = moving.source_shards[s]
                if data is None:
                    continue
                if frees:
                    taken.append(Kept(data, moving.planned.route.target.devices[t], moving.parts, t))
                elif isinstance(data, np.ndarray):
                    moving.parts[t] = data.copy()
                else:
                    moving.parts[t] = jax.device_put(data, data.sharding, may_alias=False)
            if frees and moving.kept:
                self._consumed.add(id(moving.source))
        take_over(taken)

    def _assemble(self, moving: _Moving) -> Any:
        leaf, target = moving.planned.leaf, moving.planned.route.target
        for t, device in enumerate(target.devices):
            if t not in moving.parts and self._rank_of(device) == self.rank:  # an array without elements
                moving.parts[t] = moving.sink(t).finish()
        if isinstance(leaf.target, HostMemory):
            return moving.parts.get(0)
        arrays: dict[int, jax.Array] = {}
        made: dict[Any, jax.Array] = {}
        for group, shards in target.groups.items():
            is_mpmd = isinstance(leaf.target, MpmdSharding)
            sharding = leaf.target.group_sharding(group) if is_mpmd else leaf.target
            parts = [moving.parts[t] for t in shards if t in moving.parts]
            if is_mpmd and not parts:
                continue
            if (sharding, shards) not in made:
                made[sharding, shards] = jax.make_array_from_single_device_arrays(
                    leaf.shape, sharding, parts, dtype=leaf.dtype
                )
            arrays[group] = made[sharding, shards]
        if isinstance(leaf.target, MpmdSharding):
            return MpmdArray._unchecked(arrays, leaf.target, leaf.shape, leaf.dtype)
        return arrays[0]

    def what_is_left(self) -> str:
        valid = [m.planned.leaf.path or "the array" for m in self.moving if id(m.source) not in self._consumed]
        gone = [m.planned.leaf.path or "the array" for m in self.moving if id(m.source) in self._consumed]
        lines = ["the reshard failed on the way; see the error above."]
        if gone:
            lines.append(f"  consumed, whole or in part: {', '.join(gone)}")
        lines.append(f"  still valid: {', '.join(valid) or 'none'}")
        return "\n".join(lines)


def _shards(source: Any, planned: PlannedArray) -> list[Any]:
    """The single-device arrays of the source, in the order of its layout; None for those of other processes."""
    layout = planned.route.source
    if isinstance(source, np.ndarray):
        return [source if is_local(memory) else None for memory in layout.devices]
    shards: list[Any] = [None] * len(layout.devices)
    for group, indices in layout.groups.items():
        array = source._arrays.get(group) if isinstance(source, MpmdArray) else source
        by_device = {} if array is None else {s.device: s.data for s in array.addressable_shards}
        for i in indices:
            if shards[i] is None:
                shards[i] = by_device.get(layout.devices[i])
    return shards


def _chunks(batch: Batch, moving: _Moving) -> Iterator[tuple[int, Box]]:
    if batch.chunks:
        for chunk in batch.chunks:
            yield chunk.piece, chunk.box
        return
    pieces = range(len(moving.planned.route.level)) if batch.pieces is None else batch.pieces.tolist()
    for piece in pieces:
        yield piece, moving.box_of_piece(piece)


def _delete(source: Any) -> None:
    if not isinstance(source, np.ndarray) and not source.is_deleted():
        source.delete()
