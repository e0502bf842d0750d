"""Opens a checkpoint to restore it, and reads the parts of its arrays that the devices of this process need."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard._orbax_compat import RANDOM_KEY_IMPL, limits
from reshard.checkpoint.requests import LocalRequest, Request, in_storage, index_text
from reshard.storage import checksums, event_loops, stored
from reshard.storage.arrays import Reads, StoredArray
from reshard.storage.huggingface import missing_weights
from reshard.storage.paths import dotted
from reshard.storage.read_plan import Read, plan_reads
from reshard.storage.stored import Checkpoint, Leaf

IN_FLIGHT_NBYTES = 256 << 20
_INDEX_NBYTES = 100 << 20

TreePath = tuple[str, ...]


def open_checkpoint(path: Any) -> Checkpoint:
    """Opens the tree at `path`, or the one item of a step of a `CheckpointManager`. Reads no values.

    Raises:
        FileNotFoundError: there is no finished checkpoint at `path`; says what is there.
        ReshardError: its description cannot be read.
    """
    given = stored.absolute(path)
    if stored.is_folder(given):
        return stored.find(given)
    folder = _find_item(given)
    try:
        return stored.open_tree(folder)
    except (ReshardError, OSError) as error:
        raise ReshardError(f"the checkpoint at {folder} is damaged: {stored.said(error)}") from error


def _find_item(folder: Any) -> Any:
    if stored.UNFINISHED in folder.name:
        raise FileNotFoundError(f"{folder} is what an unfinished save has left; it is not a checkpoint.")
    if not folder.exists():
        raise FileNotFoundError(f"there is no checkpoint at {folder}.{_hint_beside(folder)}")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is a file; a checkpoint is a folder.")
    if not ocp.utils.is_checkpoint_finalized(folder):
        raise FileNotFoundError(f"the checkpoint at {folder} is unfinished: its save was interrupted.")
    if (folder / stored.METADATA).exists():
        return folder
    items = sorted(entry.name for entry in folder.iterdir() if (entry / stored.METADATA).exists())
    if len(items) == 1 and (folder / stored.CHECKPOINT_METADATA).exists():
        return folder / items[0]
    steps = stored.steps(folder)
    if items:
        hint = f"it has checkpoints in it, {', '.join(items)}; give the path of one of them"
    elif steps:
        known = ", ".join(map(str, sorted(steps)))
        hint = f"it is a CheckpointManager's folder with steps {known}; give {steps[max(steps)]}"
    elif (missing := missing_weights(folder)) is not None:
        raise FileNotFoundError(missing)
    else:
        hint = f"it has no file {stored.METADATA}"
    raise FileNotFoundError(f"{folder} is not a checkpoint: {hint}.")


def _hint_beside(folder: Any) -> str:
    if not folder.parent.is_dir():
        return ""
    if left := sorted(p.name for p in folder.parent.glob(f"{folder.name}{stored.UNFINISHED}*")):
        return f"\n  A save that was not finished has left {', '.join(left)} beside it."
    steps = sorted(stored.steps(folder.parent))
    return f"\n  {folder.parent} has the steps {', '.join(map(str, steps))}." if steps else ""


def read_parts(
    checkpoint: Checkpoint, requests: Mapping[Leaf, Sequence[Request]], reads: Reads, in_flight_nbytes: int
) -> dict[Leaf, list[Any]]:
    """Reads parts of stored arrays.

    Args:
        checkpoint: what `open_checkpoint` gave.
        requests: for each leaf that is wanted, its parts.
        reads: counts what is read.
        in_flight_nbytes: how much is read at a time.

    Returns:
        For each of them the list of its parts; the text of a leaf that is text is each of its parts.

    Raises:
        ReshardError: something cannot be read; names the array.
    """

    async def read() -> list[list[Any]]:
        sums = await checksums.read(checkpoint.folder)
        context, limiter = stored.reading_context(0, _INDEX_NBYTES), limits.get_byte_limiter(in_flight_nbytes)

        async def values_of(leaf: Leaf, asked: Sequence[Request]) -> list[Any]:
            if not leaf.is_array:
                return [checkpoint.text(leaf.path)] * len(asked)
            name = dotted(leaf.path)
            opened = functools.partial(stored.open_array, checkpoint, leaf.path, context, reads)
            where = f"{checkpoint.folder / name}"
            keys, known = key_dtype(leaf.extra), sums.get(name, ())
            return await read_array(opened, name, where, asked, keys, known, limiter, reads.expect)

        return await stored.all_of([values_of(leaf, asked) for leaf, asked in requests.items()])

    try:
        return dict(zip(requests, event_loops.run(read()), strict=True))
    except ReshardError:
        raise
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise ReshardError(f"the checkpoint at {checkpoint.folder} cannot be read: {stored.said(error)}") from error


def key_dtype(extra: str | None) -> Any:
    """The dtype of stored typed keys, by what Orbax keeps beside their data; None for other arrays."""
    impl = json.loads(extra).get(RANDOM_KEY_IMPL) if extra else None
    try:
        return None if impl is None else jax.random.key_dtype(impl)
    except ValueError:
        raise ReshardError(f"the checkpoint has typed keys of the implementation {impl!r}, unknown to JAX.") from None


async def read_array(
    open_array: Callable[[], Awaitable[StoredArray]],
    name: str,
    where: str,
    requests: Sequence[Request],
    keys: Any,
    sums: Sequence[tuple[Box, int]],
    limiter: Any,
    expect: Callable[[int], None] = lambda nbytes: None,
) -> list[Any]:
    """Reads the parts of one stored array that this process's devices want.

    Args:
        open_array: opens it; not called if this process wants nothing of it, and at most once.
        name: what messages about the request call it.
        where: its path, for messages about what is stored.
        requests: the parts, and where each goes.
        keys: the dtype of the typed keys whose data it is; None for other arrays.
        sums: the checksums of its boxes.
        limiter: bounds the bytes of reads in flight.
        expect: told how many bytes will be read, as soon as this is known.
    """
    array = None
    if any(request.shape is None or request.dtype is None for request in requests):
        array = await open_array()
        requests = [request.completed(array.shape, array.dtype, keys) for request in requests]
    targets = [LocalRequest(name, request, keys) for request in requests]
    if not any(target.boxes for target in targets):
        return [target.finish() for target in targets]
    array = array or await open_array()
    for target in targets:
        target.check(array.shape)

    async def read(box: Box, wanted: Sequence[Box]) -> None:
        nbytes = box.nbytes(array.dtype.itemsize)
        async with limits.reserved_bytes(limiter, _reservable(limiter, nbytes)):
            data = await _read_box(array, box, where)
            puts = [asyncio.to_thread(target.put, box, wanted, data) for target in targets]
            bad, *_ = await asyncio.gather(asyncio.to_thread(checksums.damaged, data, box, sums), *puts)
            if bad is not None:
                raise ReshardError(
                    f"{where}: the checkpoint is damaged, {index_text(bad.slices)} of this array is not what was "
                    "written there (its checksum differs)."
                )

    boxes = [in_storage(box, target.request.index) for target in targets for box in target.boxes.values()]
    most = (_most(limiter) or IN_FLIGHT_NBYTES) // array.dtype.itemsize
    reads = list(_checkable(plan_reads(boxes, array.chunk), most, sums))
    expect(sum(one.box.nbytes(array.dtype.itemsize) for one in reads))
    await stored.all_of([read(one.box, one.wanted) for one in reads])
    return [target.finish() for target in targets]


def _checkable(reads: Iterable[Read], most: int, sums: Sequence[tuple[Box, int]]) -> Iterator[Read]:
    """Reads rounded out to boxes that have checksums, except where one would have more elements than `most`."""
    for read in reads:
        box = checksums.rounded_out(read.box, sums)
        yield Read(box, read.wanted) if box.size <= most else read


def _reservable(limiter: Any, nbytes: int) -> int:
    """A limiter refuses to wait for more than it has; a larger read goes alone."""
    most = _most(limiter)
    return nbytes if most is None else min(nbytes, most - 1)


def _most(limiter: Any) -> int | None:
    """The bytes that may be in flight; None without a limit."""
    return getattr(limiter, "max_bytes", None)


async def _read_box(array: StoredArray, box: Box, where: str) -> np.ndarray:
    """A box of a stored array; zeros where the array ends before the box does."""
    there = box & Box.whole(array.shape)
    try:
        if there == box:
            return await array.read(box)
        data = np.zeros(box.shape, array.dtype)
        if there.size:
            data[there.relative_to(box).slices] = await array.read(there)
        return data
    except Exception as error:  # whatever a damaged file makes the storage raise
        raise ReshardError(
            f"{where}: the checkpoint is damaged, {index_text(box.slices)} of this array cannot be read: "
            f"{stored.said(error)}"
        ) from error
