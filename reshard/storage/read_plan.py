"""Decides which boxes of a stored array one process reads, for `restore` and for the report.

What is stored is cut into chunks, and a chunk is read as a whole. So the boxes that a process's devices want are
joined where they share chunks: each chunk is read once for each process, not once for each device.
"""

import dataclasses
from collections.abc import Iterable

from mpmd.arrays.boxes import Box


@dataclasses.dataclass(frozen=True)
class Read:
    """One request to the storage: the box that is read, and the wanted boxes inside it."""

    box: Box
    wanted: tuple[Box, ...]


def plan_reads(wanted: Iterable[Box], chunk_shape: tuple[int, ...]) -> list[Read]:
    """Joins boxes that share chunks, where reading them together needs no more memory than one by one."""
    reads: list[Read] = []
    for box in dict.fromkeys(box for box in wanted if box.size):
        read = Read(box, (box,))
        while (other := next((one for one in reads if _joinable(one.box, read.box, chunk_shape)), None)) is not None:
            reads.remove(other)
            read = Read(Box.bounding((other.box, read.box)), other.wanted + read.wanted)
        reads.append(read)
    return reads


def _joinable(a: Box, b: Box, chunk_shape: tuple[int, ...]) -> bool:
    fits = Box.bounding((a, b)).size <= a.size + b.size
    return fits and bool((a.aligned(chunk_shape) & b.aligned(chunk_shape)).size)
