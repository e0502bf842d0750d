"""Carries out a plan: round by round, freeing each source shard when its last byte has left.

The plan says what moves when. This file handles the arrays: which buffers are read, filled, kept or freed.
"""

import contextlib
import functools
import os
from collections.abc import Sequence

import jax

from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box
from mpmd.arrays.sharding import GroupPart, Key, MpmdSharding
from mpmd.job.job import Job
from reshard.moving.local import LocalCarrier, Shard, Sink, open_sink
from reshard.moving.plan import ReshardPlan
from reshard.moving.progress import Meter, ProgressCallback, Stats
from reshard.moving.remote import WireCarrier
from reshard.moving.rounds import Round
from reshard.moving.sources import Movement, MovingArray, Sources, ways_of
from reshard.places import Place

# The most bytes in flight before shards that have left are freed, if the threshold allows more.
_WINDOW_BYTES = 64 << 20
# The number of shapes for which the ways of pieces are kept; arrays of one shape mostly follow each other.
_KNOWN_SHAPES = 64


def execute(
    plan: ReshardPlan,
    sources: Sequence[Shard],
    *,
    donate: bool,
    progress: ProgressCallback | None = None,
    job: Job | None = None,
) -> tuple[list[object], Stats]:
    """Moves the arrays as planned.

    Args:
        plan: the plan for exactly these arrays.
        sources: jax.Array, MpmdArray or numpy arrays; typed keys as their key data.
        donate: whether to free the sources on the way; afterwards they are deleted.
        progress: called after each round, and when enough has been moved in between.
        job: the processes that all carry out this plan, each its own part of it.

    Raises:
        RuntimeError: something failed on the way; says which sources are still valid.
    """
    run = _Execution(plan, sources, donate, Meter(plan, progress), job)
    try:
        with contextlib.nullcontext() if job is None else job.as_a_whole():
            return run(), run.meter.stats
    except Exception as error:
        raise RuntimeError(run.sources.what_is_left()) from error
    finally:
        run.carrier.close()


class _Execution:
    """One execution of a plan."""

    def __init__(self, plan: ReshardPlan, sources: Sequence[Shard], donate: bool, meter: Meter, job: Job | None):
        self.plan = plan
        self.meter = meter
        self.rank = 0 if job is None else job.rank
        self.wire = None if job is None else WireCarrier(job)
        self.carrier = LocalCarrier(min(8, os.cpu_count() or 1))
        ways = functools.lru_cache(_KNOWN_SHAPES)(ways_of)
        self.arrays = [MovingArray(planned, source, ways) for planned, source in zip(plan.arrays, sources, strict=True)]
        self.sources = Sources(plan, self.arrays, donate)
        self._under_way: dict[int, int] = {}  # bytes by rank
        self._filled: list[MovingArray] = []

    def __call__(self) -> list[object]:
        for round_ in self.plan.rounds:
            self._move(round_)
        for array in self.arrays:
            self.sources.start(array)
        self.sources.take_over_kept()
        results = [self._assemble(array) for array in self.arrays]
        self.sources.delete()
        self.meter.finish()
        return results

    def _move(self, round_: Round) -> None:
        working: dict[Place, int] = {}
        hop = 0
        for batch in round_:
            array = self.arrays[batch.array]
            self.sources.start(array)
            for way in array.ways(batch):
                if way.hop > 0 and way.hop != hop:
                    self._settle()
                hop = way.hop
                self._carry(array, way, working)
            if max(self._under_way.values(), default=0) >= _WINDOW_BYTES:
                self._settle()
        self._settle()
        stats = self.meter.stats
        stats.peak_working_bytes = max(stats.peak_working_bytes, *working.values(), 0)

    def _rank_of(self, device: Place) -> int:
        return 0 if self.wire is None else device.process_index

    def _sink(self, array: MovingArray, t: int) -> Sink:
        if t not in array.sinks:
            target, leaf = array.planned.route.target, array.planned.leaf
            shape = target.boxes[t].scaled(array.planned.scale).shape
            kind = getattr(leaf.target, "memory_kind", None)
            array.sinks[t] = open_sink(target.devices[t], shape, leaf.dtype, kind)
        return array.sinks[t]

    def _carry(self, array: MovingArray, way: Movement, working: dict[Place, int]) -> None:
        sender_rank, receiver_rank = self._rank_of(way.from_device), self._rank_of(way.to_device)
        if sender_rank != receiver_rank:
            assert self.wire is not None
            sent, received = self.wire.carry(
                (sender_rank, way.from_device),
                (receiver_rank, way.to_device),
                lambda: self._source(array, way),
                lambda: (self._sink(array, way.receiver), way.into),
                array.planned.leaf.dtype,
            )
        elif sender_rank == self.rank:
            sent, received = self.carrier.carry(*self._source(array, way), self._sink(array, way.receiver), way.into)
        else:
            sent = received = 0
        working[way.from_device] = working.get(way.from_device, 0) + sent
        working[way.to_device] = working.get(way.to_device, 0) + received
        if receiver_rank == self.rank:
            self.meter.received(way.nbytes, on_same_device=way.from_device == way.to_device)
        for rank in {sender_rank, receiver_rank}:
            self._under_way[rank] = self._under_way.get(rank, 0) + way.nbytes
        self.meter.bytes_done += way.nbytes
        if way.hop == 0:
            self.sources.leave(array, way.sender)
        array.left -= 1
        if not array.left:
            self._filled.append(array)

    def _source(self, array: MovingArray, way: Movement) -> tuple[Shard, Box]:
        """Returns the shard that is read, and the box of it."""
        shard = self._sink(array, way.sender).contents if way.hop else array.shards[way.sender]
        assert shard is not None, "a shard that is gone, or another process's"
        return shard, way.box

    def _settle(self) -> None:
        """Waits for everything in flight; then frees the shards that have left and closes the ones that are full."""
        self.carrier.wait()
        if self.wire is not None:
            self.wire.settle()
        self._under_way.clear()
        self.sources.settle()
        for array in self._filled:
            array.parts.update({t: sink.finish() for t, sink in array.sinks.items()})
            array.sinks.clear()
            self.meter.arrays_done += 1
        self._filled.clear()
        self.meter.report()

    def _assemble(self, array: MovingArray) -> object:
        leaf, target = array.planned.leaf, array.planned.route.target
        for t, device in enumerate(target.devices):
            if t not in array.parts and self._rank_of(device) == self.rank:  # an array without elements
                array.parts[t] = self._sink(array, t).finish()
        place = leaf.target
        if not isinstance(place, jax.sharding.Sharding):  # of a host
            return array.parts.get(0)
        is_mpmd = isinstance(place, MpmdSharding)
        held = place.parts(leaf.shape) if is_mpmd else [GroupPart(0, 0, (), leaf.shape)]
        arrays: dict[Key, jax.Array] = {}
        made: dict[tuple[jax.sharding.Sharding, tuple[int, ...]], jax.Array] = {}
        for held_part, shards in zip(held, target.parts, strict=True):
            parts = [part for t in shards if isinstance(part := array.parts.get(t), jax.Array)]
            if is_mpmd and not parts:
                continue
            sharding = place.group_sharding(held_part.group) if is_mpmd else place
            if (sharding, shards) not in made:
                made[sharding, shards] = jax.make_array_from_single_device_arrays(
                    held_part.shape, sharding, parts, dtype=leaf.dtype
                )
            arrays[held_part.key] = made[sharding, shards]
        return MpmdArray._unchecked(arrays, place, leaf.shape, leaf.dtype) if is_mpmd else arrays[0]
