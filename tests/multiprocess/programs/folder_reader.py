"""Reads the newest version of a folder again and again, without JAX: prints `read NUMBER VALUE` for each.

folder_reader.py PLACE    tensor K of a version is to be full of 8 VALUE + K; what is not, ends it with a message
"""

import json
import mmap
import sys
import time
from pathlib import Path

import numpy as np


def tensors(path: Path):
    """The names of a file's tensors, and their values in its memory."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            assert about["dtype"] == "F32" and start + end <= len(data), (path, name, about)
            yield name, np.frombuffer(data, np.float32, (end - begin) // 4, start + begin)


def opened(place: Path):
    folder = (place / "latest").resolve(strict=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1, index
    found = dict(x for file in sorted(set(index.values())) for x in tensors(folder / file))
    assert set(found) == set(index), (found, index)
    return int(folder.name), found


last = -1
while True:
    try:
        number, found = opened(Path(sys.argv[1]))
    except FileNotFoundError:  # none yet, or removed meanwhile
        continue
    if number == last:
        time.sleep(0.001)
        continue
    time.sleep(0.05)  # meanwhile it may be removed; what is mapped stays
    value = int(found["w0"][0]) // 8
    for name, x in found.items():
        assert (x == 8 * value + int(name[1:])).all(), (number, value, name, np.unique(x))
    assert number > last and "jax" not in sys.modules, (number, last)
    last = number
    print(f"read {number} {value}", flush=True)
