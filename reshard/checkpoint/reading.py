"""Reads the parts of stored arrays that the devices of this process need."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path as File
from typing import Any

import jax
import numpy as np

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard._orbax_compat import RANDOM_KEY_IMPL
from reshard.checkpoint.requests import LocalRequest, Request, in_storage, index_text
from reshard.storage import checksums, event_loops, stored
from reshard.storage.arrays import IN_FLIGHT_NBYTES, ByteLimit, Reads, StoredArray, plan_reads
from reshard.storage.paths import dotted
from reshard.storage.stored import Checkpoint, Leaf

_INDEX_NBYTES = 100 << 20


def read_parts(
    checkpoint: Checkpoint, wanted: Sequence[tuple[Leaf, Request]], reads: Reads, in_flight_nbytes: int
) -> list[object]:
    """Reads like `read_requests`, from outside an event loop; any error becomes a ReshardError."""
    try:
        return event_loops.run(read_requests(checkpoint, wanted, reads, in_flight_nbytes))
    except ReshardError:
        raise
    except Exception as error:  # a damaged file may make its reader raise anything
        raise ReshardError(f"the checkpoint at {checkpoint.folder} cannot be read: {stored.said(error)}") from error


async def read_requests(
    checkpoint: Checkpoint, wanted: Sequence[tuple[Leaf, Request]], reads: Reads, in_flight_nbytes: int | None
) -> list[object]:
    """Reads parts of stored arrays.

    Args:
        wanted: requests, each with its leaf. If the dtype of a leaf is not known, its shape is not known either.
        in_flight_nbytes: the most bytes that are read at a time; None is no limit.

    Returns:
        The data for each request; for a leaf that is text, the text.

    Raises:
        ReshardError: something cannot be read; names the array.
    """
    by_leaf: dict[Leaf, list[int]] = {}
    for i, (leaf, _) in enumerate(wanted):
        by_leaf.setdefault(leaf, []).append(i)
    sums = await checksums.read(checkpoint.folder)
    reader = _Reader(checkpoint, sums, reads, ByteLimit(in_flight_nbytes))
    found = await stored.all_of([reader.read(leaf, [wanted[i][1] for i in asked]) for leaf, asked in by_leaf.items()])
    values = dict(zip(itertools.chain(*by_leaf.values()), itertools.chain(*found), strict=True))
    return [values[i] for i in range(len(wanted))]


def key_dtype(extra: str | None) -> Any:
    """Returns the dtype of stored typed keys, from Orbax's entry for their data; None for other arrays."""
    impl = json.loads(extra).get(RANDOM_KEY_IMPL) if extra else None
    try:
        return None if impl is None else jax.random.key_dtype(impl)
    except ValueError:
        raise ReshardError(f"the checkpoint has typed keys of the implementation {impl!r}, unknown to JAX.") from None


class _Reader:
    """Reads the parts of stored arrays that this process's devices want."""

    def __init__(self, checkpoint: Checkpoint, sums: checksums.Sums, reads: Reads, limit: ByteLimit):
        self._checkpoint, self._sums, self._reads, self._limit = checkpoint, sums, reads, limit
        self._context = stored.reading_context(0, _INDEX_NBYTES)

    async def read(self, leaf: Leaf, requests: Sequence[Request]) -> list[object]:
        """Reads the parts of one leaf. An array of which this process wants nothing is not opened."""
        if not leaf.is_array:
            return [self._checkpoint.text(leaf.path)] * len(requests)
        keys, array, shape, dtype = key_dtype(leaf.extra), None, leaf.shape, leaf.dtype
        if dtype is None and any(request.shape is None or request.dtype is None for request in requests):
            array = await self._open(leaf)
            shape, dtype = array.shape, array.dtype
        targets = [LocalRequest(request.completed(shape, dtype, keys), keys) for request in requests]
        if any(target.boxes for target in targets):
            await self._fill(targets, array or await self._open(leaf), dotted(leaf.path))
        return [target.finish() for target in targets]

    async def _open(self, leaf: Leaf) -> StoredArray:
        return await stored.open_array(self._checkpoint, leaf.path, self._context, self._reads)

    async def _fill(self, targets: Sequence[LocalRequest], array: StoredArray, name: str) -> None:
        """Reads the boxes of an array that the targets want, each chunk once, and checks boxes that have checksums."""
        for target in targets:
            target.check(array.shape, array.dtype)
        where, sums = self._checkpoint.folder / name, self._sums.get(name, ())

        async def read(box: Box, wanted: Sequence[Box]) -> None:
            async with self._limit.held(box.nbytes(array.dtype.itemsize)):
                data = await _read_box(array, box, where)
                puts = [asyncio.to_thread(target.put, box, wanted, data, len(targets) == 1) for target in targets]
                bad, *_ = await asyncio.gather(asyncio.to_thread(checksums.damaged, data, box, sums), *puts)
                if bad is not None:
                    raise ReshardError(
                        f"{where}: the checkpoint is damaged, {index_text(bad.slices)} of this array is not what was "
                        "written there (its checksum differs)."
                    )

        boxes = [in_storage(box, target.request.index) for target in targets for box in target.boxes.values()]
        most = (self._limit.nbytes or IN_FLIGHT_NBYTES) // array.dtype.itemsize
        # Reads are rounded out to whole boxes with checksums, except where that would be too much.
        joined = plan_reads(boxes, array.chunk, most)
        rounded = [(checksums.rounded_out(box, sums), box, wanted) for box, wanted in joined]
        reads = [(more if more.size <= most else box, wanted) for more, box, wanted in rounded]
        self._reads.expect(sum(box.nbytes(array.dtype.itemsize) for box, _ in reads))
        await stored.all_of([read(box, wanted) for box, wanted in reads])
        for target in targets:
            for box in {in_storage(box, target.request.index) for box in target.boxes.values() if not box.size}:
                target.put(box, [box], np.zeros(box.shape, array.dtype))


async def _read_box(array: StoredArray, box: Box, where: File) -> np.ndarray:
    """Reads a box of a stored array; zeros where the array ends before the box does."""
    there = box & Box.whole(array.shape)
    try:
        if there == box:
            return await array.read(box)
        data = np.zeros(box.shape, array.dtype)
        if there.size:
            data[there.relative_to(box).slices] = await array.read(there)
        return data
    except ReshardError:  # the read succeeded, but the values do not fit the target dtype
        raise
    except Exception as error:  # a damaged file may make the storage raise anything
        raise ReshardError(
            f"{where}: the checkpoint is damaged, {index_text(box.slices)} of this array cannot be read: "
            f"{stored.said(error)}"
        ) from error
