"""The safetensors file: eight bytes of length, a header in JSON that says where each tensor is, and the tensors.

The format is read and written here. The package `safetensors` maps files into memory, so that a file that shrinks
kills the process, and it writes whole tensors from memory. Here any box of a tensor is read by its byte ranges, which
are counted, and files are filled piece by piece, by several processes at once.
"""

import dataclasses
import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.places import aligned_empty, bytes_of
from scheduler.base.files import parse_json

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "C64": np.dtype(np.complex64),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"  # no tensor has this name
MOST_HEADER_NBYTES = 32 << 20
_MOST_AXES = 32
_LONGEST_NAME = 4096


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file; `start` is where its bytes begin in the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: File) -> tuple[Tensor, ...]:
    """Reads the tensors of a file, from its header alone; checks all of the header.

    Raises:
        ReshardError: it is not a plain file, cannot be read, or has no valid header; in one line.
    """
    try:
        return tuple(_tensors(file))
    except OSError as error:
        raise ReshardError(f"{file} cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise ReshardError(f"{file} is damaged: its header is nested too deeply.") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = " ".join(str(error).split())[:300].removesuffix(".")
        raise ReshardError(f"{file} is damaged, or no safetensors file: {said}.") from None


def _tensors(file: File) -> Iterator[Tensor]:
    descriptor, size = _open(file)
    try:
        start = os.pread(descriptor, 32, 0)
        if start.startswith(b"version https://git-lfs"):
            raise ValueError("it is only a pointer of Git LFS; `git lfs pull` in its folder fetches the file")
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"its header has {length} bytes, but the file has {size}")
        if length > MOST_HEADER_NBYTES:
            raise ValueError(f"its header has {length >> 20} MiB; at most {MOST_HEADER_NBYTES >> 20} are read")
        header = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    entries = parse_json(header.decode("utf-8"))
    if not isinstance(entries, dict):
        raise ValueError("its header is not an object of JSON")
    entries.pop(METADATA, None)
    end = 0
    spans = sorted((_span(name, entry), name) for name, entry in entries.items())
    for (start, stop), name in spans:
        if start != end:
            raise ValueError(f"the bytes of {name!r} {'overlap with' if start < end else 'do not follow'} others")
        end = stop
        entry = entries[name]
        yield Tensor(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start)
    if 8 + length + end != size:
        raise ValueError(f"it has {size} bytes, but its header says {8 + length + end}: it is cut off or too long")


def is_name(name: str) -> bool:
    """Returns whether a tensor may have this name."""
    return bool(name) and name.isprintable() and len(name) <= _LONGEST_NAME


def _span(name: str, entry: Any) -> tuple[int, int]:
    if not is_name(name):
        raise ValueError(f"{name[:80]!r} is no name of a tensor: it is empty, too long, or not printable")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name!r} has the dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPES)}")
    numbers = [*shape, *offsets]
    if len(offsets) != 2 or not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers) or len(shape) > _MOST_AXES:
        raise ValueError(f"shape and offsets of {name!r} are {str(shape)[:80]} and {str(offsets)[:80]}")
    start, stop = offsets
    if stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name!r} is {dtype}{shape}, which does not take the bytes from {start} to {stop}")
    return start, stop


def _open(file: File) -> tuple[int, int]:
    """Opens a plain file and returns a descriptor and the size; does not wait for a pipe without a writer."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(file))
    return descriptor, state.st_size


def _runs(box: Box, shape: Sequence[int], itemsize: int) -> tuple[np.ndarray, int]:
    """Returns where the runs of a box's bytes begin in an array in C order, and the length of a run."""
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis, run = len(shape), itemsize
    while axis and (axis == len(shape) or box.shape[axis] == shape[axis]):
        axis -= 1
        run *= box.shape[axis]
    offsets = np.array([sum(a * s for a, s in zip(box.start, strides, strict=True))])
    for k in range(axis):
        offsets = (offsets[:, None] + np.arange(box.shape[k]) * strides[k]).reshape(-1)
    return offsets, run


def read_box(file: File, tensor: Tensor, box: Box) -> np.ndarray:
    """Reads the values of a box of a tensor: its bytes and no others. Raises an OSError if they cannot be read, or the
    file has become shorter.
    """
    data = aligned_empty(box.shape, tensor.dtype)
    if not box.size:
        return data
    view = bytes_of(data).data
    offsets, run = _runs(box, tensor.shape, tensor.dtype.itemsize)
    descriptor, _ = _open(file)
    try:
        for i, offset in enumerate(offsets.tolist()):
            transfer(os.preadv, descriptor, view[i * run : (i + 1) * run], tensor.start + offset, file)
    finally:
        os.close(descriptor)
    return data


def write_box(descriptor: int, tensor: Tensor, box: Box, data: np.ndarray) -> None:
    """Writes the values of a box of a tensor into a file that is open for writing. Raises an OSError if that fails."""
    if not box.size:
        return
    view = bytes_of(data).data
    offsets, run = _runs(box, tensor.shape, tensor.dtype.itemsize)
    for i, offset in enumerate(offsets.tolist()):
        transfer(os.pwritev, descriptor, view[i * run : (i + 1) * run], tensor.start + offset, None)


def transfer(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, view: memoryview, offset: int, file: File | None
) -> None:
    """Reads or writes all of `view`; the system may do less at a time."""
    while view:
        done = call(descriptor, [view], offset)
        if not done:
            raise OSError(errno.EIO, "it has become shorter while it was read", str(file))
        view, offset = view[done:], offset + done


def header_of(
    tensors: Iterable[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[Tensor, ...]]:
    """Returns the first bytes of a file, length and header, and the places of its tensors.

    The order is as in the package `safetensors`: wide dtypes first, then by name. So a file that the package wrote is
    written again byte for byte.
    """
    order = list(NAMES)
    ordered = sorted(tensors, key=lambda t: (-order.index(t[1]), t[0]))
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    placed, end = [], 0
    for name, dtype, shape in ordered:
        placed.append(Tensor(name, dtype, shape, end))
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + placed[-1].nbytes]}
        end += placed[-1].nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    return first, tuple([dataclasses.replace(tensor, start=len(first) + tensor.start) for tensor in placed])
