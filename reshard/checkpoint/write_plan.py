"""Decides which process writes which part of each array, in which chunks. Every process derives the same answer.

A checkpoint is a set of arrays, each cut into chunks of one shape; a chunk is the smallest thing that can be read or
written. So each chunk goes to exactly one of the processes that hold it, and chunks never cross the shards of any
group. Within these limits the processes that hold the same data share the work: each takes a contiguous run of
chunks, so long that all have about the same number of bytes to write in the end.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box, held_cells
from mpmd.arrays.sharding import MpmdSharding

Shape = tuple[int, ...]

# A chunk costs an entry in the index and about 0.1 ms; a read costs whole chunks. Between these bounds a
# stacked array has one chunk for each of its layers, so that a stage reads the layers it owns and no others.
SMALLEST_CHUNK_NBYTES = 64 << 10
LARGEST_CHUNK_NBYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class WrittenLeaf:
    """The properties of an array that the plan needs. `max_chunk_nbytes` is the user's bound, None for ours."""

    shape: Shape
    itemsize: int
    sharding: MpmdSharding
    max_chunk_nbytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Writing:
    """The chunks of one array: their shape, and for each process that writes any, the boxes that it writes."""

    chunk_shape: Shape
    boxes: dict[int, tuple[Box, ...]]


def chunk_shape(cell: Shape, itemsize: int, max_nbytes: int | None = None) -> Shape:
    """Returns the chunks of an array with shards made of cells of this shape: an even part of the cell on each axis.

    Arrays of three or more axes are treated as stacks along axis 0: one chunk a layer, or as many layers as make
    `SMALLEST_CHUNK_NBYTES`. Chunks larger than `LARGEST_CHUNK_NBYTES` are cut along the leading axes where that leaves
    chunks of a useful size: a vocabulary of prime size is cut along the model's width. `max_nbytes` is a bound that
    holds wherever even parts allow it.
    """
    chunk = list(cell)

    def nbytes() -> int:
        return math.prod(chunk) * itemsize

    if len(cell) >= 3 and max_nbytes is None and nbytes():
        row = nbytes() // cell[0]
        chunk[0] = next(
            n for n in range(1, cell[0] + 1) if cell[0] % n == 0 and n * row >= min(SMALLEST_CHUNK_NBYTES, nbytes())
        )
    limit = LARGEST_CHUNK_NBYTES if max_nbytes is None else max_nbytes
    smallest_chunks = (min(SMALLEST_CHUNK_NBYTES, limit // 2), 0) if max_nbytes else (SMALLEST_CHUNK_NBYTES,)
    for smallest in smallest_chunks:
        for axis in range(len(cell)):
            if nbytes() <= limit:
                break
            row = nbytes() // chunk[axis]
            wanted = max(1, limit // row)
            part = next(n for n in range(min(wanted, chunk[axis]), 0, -1) if chunk[axis] % n == 0)
            if part * row >= smallest:
                chunk[axis] = part
    return tuple(chunk)


@functools.lru_cache(maxsize=16)
def plan_writing(leaves: tuple[WrittenLeaf, ...]) -> tuple[Writing, ...]:
    """Plans the writing of all arrays of a tree at once; saving the same tree again costs nothing."""
    load: dict[int, int] = {}
    return tuple([_plan_leaf(leaf, load) for leaf in leaves])


def _plan_leaf(leaf: WrittenLeaf, load: dict[int, int]) -> Writing:
    cell, holders = held_cells(leaf.sharding, leaf.shape)
    chunk = chunk_shape(cell, leaf.itemsize, leaf.max_chunk_nbytes)
    runs: dict[int, list[Box]] = {}
    for part, processes in holders.items():
        for process, run in _share(part, chunk, leaf.itemsize, processes, load):
            runs.setdefault(process, []).append(run)
    return Writing(chunk, {process: tuple(boxes) for process, boxes in sorted(runs.items())})


def _share(
    cell: Box, chunk: Shape, itemsize: int, processes: Sequence[int], load: dict[int, int]
) -> Iterator[tuple[int, Box]]:
    """Cuts a cell between the processes that hold it, the least loaded one first, along its first cut axis."""
    shape = cell.shape
    axis = next((a for a in range(len(shape)) if shape[a] > chunk[a]), None)
    rows = 1 if axis is None else shape[axis] // chunk[axis]
    row_nbytes = cell.nbytes(itemsize) // max(rows, 1)
    order = sorted(processes, key=lambda p: (load.get(p, 0), p))
    even = _even_load([load.get(p, 0) for p in order], cell.nbytes(itemsize))
    first = 0
    for i, process in enumerate(order):
        share = math.ceil(max(0, even - load.get(process, 0)) / max(1, row_nbytes))
        count = rows - first if i == len(order) - 1 else min(rows - first, share)
        if not count:
            continue
        load[process] = load.get(process, 0) + count * row_nbytes
        if axis is None:
            yield process, cell
        else:
            start = cell.start[axis] + first * chunk[axis]
            yield process, cell.with_range(axis, start, start + count * chunk[axis])
        first += count


def _even_load(loads: Sequence[int], nbytes: int) -> int:
    """Returns the level that the lowest of the loads (ascending) reach when `nbytes` are poured onto them."""
    even = 0
    for n, load in enumerate(loads, 1):
        even = (sum(loads[:n]) + nbytes) // n
        if n == len(loads) or even <= loads[n]:
            return max(even, load)
    return even


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """A box that this process writes, and the single-device array, on its way to the host, that holds it."""

    box: Box
    held: Box
    data: jax.Array


def start_copies(array: MpmdArray, plan: Writing) -> list[HostCopy]:
    """Starts copying to the host the boxes that this process writes; waits for nothing.

    If several devices have a box, the one that has sent least so far sends it. On a CPU device nothing is copied: the
    array's memory is read directly, and stays as it is until then, even if the array is donated.
    """
    shards = [(Box.from_slices(shard.index, array.shape), shard) for shard in array.addressable_shards]
    given = [0] * len(shards)
    pieces: list[HostCopy] = []
    for box in plan.boxes.get(jax.process_index(), ()):
        index = min((i for i, (held, _) in enumerate(shards) if box in held), key=lambda i: given[i])
        given[index] += box.size
        held, shard = shards[index]
        data = shard.data
        if held != box and shard.device.platform != "cpu":
            with jax.set_mesh(jax.sharding.Mesh(np.array([shard.device]), ("device",))):
                inside = box.relative_to(held)
                data = jax.lax.slice(data, inside.start, inside.stop)
            held = box
        data.copy_to_host_async()
        pieces.append(HostCopy(box, held, data))
    return pieces
