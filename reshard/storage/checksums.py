"""Writes and compares checksums, so that a damaged file is an error and not a wrong number.

Neither Zarr 2 nor OCDBT stores a checksum of the data, and a compressor notices only some of the bits that flip. So
each process writes the sums of its boxes into a folder next to the arrays, which other readers of the checkpoint
ignore. The boxes are made of chunks, which storage reads as a whole anyway. A box is checked whenever it is read.
"""

import asyncio
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as File

import numpy as np

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.places import bytes_of
from scheduler.base.files import parse_json

FOLDER = "reshard_checksums"
FILES = "crc32_of_process_{}.json"  # an older format had other sums, in files of other names, which are ignored

Sums = Mapping[str, Sequence[tuple[Box, int]]]


def checksum(array: np.ndarray, before: int = 0) -> int:
    """Returns the CRC-32 of an array's bytes in C order; `before` is the CRC-32 of bytes that come before them.

    It detects accidents, not attacks.
    """
    return zlib.crc32(bytes_of(array).data, before)


async def write(folder: File, process: int, parts: Iterable[tuple[str, Iterable[tuple[Box, np.ndarray]]]]) -> None:
    """Writes the sums of the boxes that a process writes of each array."""
    found = await asyncio.to_thread(
        lambda: {
            name: [[*zip(box.start, box.stop, strict=True), checksum(x)] for box, x in boxes] for name, boxes in parts
        }
    )
    directory = folder / FOLDER
    await asyncio.to_thread(lambda: directory.mkdir(parents=True, exist_ok=True))
    # Partial saves of one tree have other names, and their folders are merged.
    number = f"{process}.{zlib.crc32(json.dumps(sorted(found)).encode()):08x}"
    await asyncio.to_thread(_write_lastingly, directory / FILES.format(number), json.dumps(found))


def _write_lastingly(file: File, text: str) -> None:
    """Writes a file that survives a crash of the machine, as the arrays do: without it they could not be read."""
    file.write_text(text)
    if "://" not in str(file):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


async def read(folder: File) -> Sums:
    """Reads the sums of all processes, by the names of the arrays; empty for a checkpoint without them. A ReshardError
    names a damaged file of sums.
    """

    def load() -> Sums:
        sums: dict[str, list[tuple[Box, int]]] = {}
        directory = folder / FOLDER
        for file in sorted(directory.glob(FILES.format("*"))) if directory.exists() else ():
            try:
                for name, entries in parse_json(file.read_text()).items():
                    for *ends, total in entries:
                        box = Box(tuple([a for a, _ in ends]), tuple([b for _, b in ends]))
                        sums.setdefault(name, []).append((box, total))
            except (ValueError, TypeError, AttributeError) as error:
                raise ReshardError(f"{file} does not hold the checksums of a checkpoint: {error}.") from None
        return sums

    return await asyncio.to_thread(load)


def rounded_out(box: Box, sums: Iterable[tuple[Box, int]]) -> Box:
    """Returns the box with all checksummed boxes that it touches, which must be read for it to be checked."""
    return Box.bounding([box, *(part for part, _ in sums if (part & box).size)])


def damaged(data: np.ndarray, box: Box, sums: Iterable[tuple[Box, int]]) -> Box | None:
    """Returns the first box inside the read one with other values than were written; None if there is none."""
    for part, total in sums:
        if part in box and checksum(data[part.relative_to(box).slices]) != total:
            return part
    return None
