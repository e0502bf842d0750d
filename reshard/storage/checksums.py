"""Sums of what was written, so that a damaged file is an error and not a wrong number.

Neither Zarr 2 nor OCDBT stores a checksum of the data, and a compressor notices just some of the bits that flip. So
beside the arrays, in a folder that other readers of the checkpoint do not look into, each process leaves the sums of
the boxes that it wrote. A box is checked whenever it is read as a whole.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpmd.arrays.boxes import Box
from scheduler.files import parse_json

FOLDER = "reshard_checksums"
ROW_WORDS = 512

Sums = Mapping[str, Sequence[tuple[Box, int]]]


def checksum(array: np.ndarray) -> int:
    """A 64-bit sum of an array's bytes that changes with any of them and with the order of 4 KiB rows.

    It is meant for accidents, not for attacks, and costs about as much as reading the memory.
    """
    total = RunningSum()
    total.add(array)
    return total.value


class RunningSum:
    """The checksum of an array that comes in parts, in the order of its bytes in C layout."""

    def __init__(self) -> None:
        self._total = self._rows = 0
        self._rest = np.empty(0, np.uint8)

    def add(self, part: np.ndarray) -> None:
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        if self._rest.size:
            data = np.concatenate([self._rest, data])
        rows = data.size // (8 * ROW_WORDS)
        whole = data[: rows * 8 * ROW_WORDS].view(np.uint64).reshape(rows, ROW_WORDS)
        sums = np.add.reduce(whole, axis=1, dtype=np.uint64)
        self._total += int(np.dot(sums, _odd_numbers(self._rows, rows)))
        self._rows += rows
        self._rest = data[rows * 8 * ROW_WORDS :].copy()

    @property
    def value(self) -> int:
        rest = self._rest.astype(np.uint64)
        total = self._total + int(np.dot(rest, _odd_numbers(0, rest.size) << np.uint64(7)))
        return (total + self._rows * 8 * ROW_WORDS + rest.size) % 2**64


def _odd_numbers(first: int, count: int) -> np.ndarray:
    return np.arange(2 * first + 1, 2 * (first + count) + 1, 2, dtype=np.uint64)


async def write(folder: Any, process: int, parts: Iterable[tuple[str, Iterable[tuple[Box, np.ndarray]]]]) -> None:
    """Leaves the sums of what a process writes of each array."""
    found = await asyncio.to_thread(
        lambda: {
            name: [[*zip(box.start, box.stop, strict=True), checksum(x)] for box, x in boxes] for name, boxes in parts
        }
    )
    directory = folder / FOLDER
    await asyncio.to_thread(lambda: directory.mkdir(parents=True, exist_ok=True))
    await asyncio.to_thread((directory / f"process_{process}.json").write_text, json.dumps(found))


async def read(folder: Any) -> Sums:
    """The sums that all processes left, by the names of the arrays; nothing for a checkpoint without them."""

    def load() -> Sums:
        sums: dict[str, list[tuple[Box, int]]] = {}
        directory = folder / FOLDER
        for file in sorted(directory.glob("process_*.json")) if directory.exists() else ():
            for name, entries in parse_json(file.read_text()).items():
                for *ends, total in entries:
                    box = Box(tuple([a for a, _ in ends]), tuple([b for _, b in ends]))
                    sums.setdefault(name, []).append((box, total))
        return sums

    return await asyncio.to_thread(load)


def damaged(data: np.ndarray, box: Box, sums: Iterable[tuple[Box, int]]) -> Box | None:
    """The first box inside of what was read that is not what was written."""
    for part, total in sums:
        if part in box and checksum(data[part.relative_to(box).slices]) != total:
            return part
    return None
