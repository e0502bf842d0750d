"""Writes a Hugging Face folder piece by piece: full-size files first, then any box by any process, the index last."""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as File

import numpy as np

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.storage import safetensors
from reshard.storage.huggingface import SINGLE, TENSORS_INDEX, is_folder, natural, open_folder, path_of
from reshard.storage.paths import dotted, show
from reshard.storage.safetensors import Tensor
from reshard.storage.stored import Leaf
from scheduler.base.texts import first_of

FILE_NBYTES = 5_000_000_000
_METADATA = {"format": "pt"}  # without it `transformers` does not load a file
_WEIGHTS = re.compile(
    r"\..*|.*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|index\.json|lock)", re.IGNORECASE | re.DOTALL
)

Described = tuple[str, np.dtype, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class TensorTarget:
    """The options of a new folder."""

    beside: File | None = None  # has other files to copy, such as config.json; tensors are divided among files as there
    file_nbytes: int = FILE_NBYTES  # the largest size of a file


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """The place of each tensor: for each file its first bytes and its tensors. `beside` is as in `TensorTarget`."""

    files: Mapping[str, tuple[bytes, tuple[Tensor, ...]]]
    beside: File | None = None

    def finish(self, folder: File) -> None:
        """Completes the folder: adds the other files of `beside`, then the index.

        Raises:
            OSError: the folder cannot be written.
            ReshardError: a file of `beside` cannot be read.
        """
        if self.beside is not None:
            for file in self.beside.iterdir():  # configuration, tokenizer, licence
                if file.is_file() and not _WEIGHTS.fullmatch(file.name):
                    (folder / file.name).write_bytes(_content(file))
        if len(self.files) > 1:
            where = {tensor.name: file for file, (_, tensors) in self.files.items() for tensor in tensors}
            all_tensors = [tensor for _, tensors in self.files.values() for tensor in tensors]
            num_parameters = sum(math.prod(tensor.shape) for tensor in all_tensors)
            totals = {"total_parameters": num_parameters, "total_size": sum(tensor.nbytes for tensor in all_tensors)}
            index = {"metadata": totals, "weight_map": dict(sorted(where.items()))}
            with open(folder / TENSORS_INDEX, "w") as file:
                file.write(json.dumps(index, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _content(file: File) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ReshardError(
            f"{file}, which belongs to the folder's other files, cannot be read: {error.strerror}."
        ) from None


@dataclasses.dataclass(frozen=True)
class TensorWriter:
    """The files of a folder, open for writing: for each tensor the descriptor of its file, and its place there."""

    places: Mapping[str, tuple[int, Tensor]]

    def write(self, name: str, box: Box, data: np.ndarray) -> None:
        """Writes a box of a tensor."""
        safetensors.write_box(*self.places[name], box, data)


@contextlib.contextmanager
def writing(folder: File, plan: TensorFiles) -> Iterator[TensorWriter]:
    """Opens the files of a folder in a `with` block; several processes may have them open. If the block does not fail,
    the files survive a crash of the machine.
    """
    places, descriptors = dict[str, tuple[int, Tensor]](), []
    with contextlib.ExitStack() as closing:
        for name, (first, tensors) in plan.files.items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            closing.callback(os.close, descriptor)
            descriptors.append(descriptor)
            os.ftruncate(descriptor, len(first) + sum(tensor.nbytes for tensor in tensors))
            safetensors.transfer(os.pwritev, descriptor, memoryview(first), 0, None)
            places |= {tensor.name: (descriptor, tensor) for tensor in tensors}
        yield TensorWriter(places)
        for descriptor in descriptors:
            os.fsync(descriptor)


def plan_folder(arrays: Iterable[Leaf], target: TensorTarget) -> TensorFiles:
    """Divides the tensors that arrays become among files. A ReshardError lists the arrays that cannot be tensors."""
    faults, found = [], dict[str, Described]()
    for leaf in arrays:
        name, dtype = dotted(leaf.path), leaf.dtype
        if dtype is None:
            faults.append(f"{show(leaf.path)} is text")
        elif leaf.extra is not None:
            faults.append(f"{show(leaf.path)} has typed keys")
        elif dtype not in safetensors.NAMES:
            faults.append(f"{show(leaf.path)} is of {dtype}, which the format does not have")
        elif name == safetensors.METADATA:
            faults.append(f"{show(leaf.path)} has a name that the format keeps for itself")
        elif not safetensors.is_name(name):
            faults.append(f"{show(leaf.path)} has a name that is empty, too long or not printable")
        elif name in found:
            faults.append(f"{show(leaf.path)} would be a second tensor {name}")
        else:
            found[name] = name, dtype, leaf.shape
    if faults:
        raise ReshardError(f"safetensors hold arrays of numbers alone; leave the others out:\n{first_of(faults)}")
    if not found:
        raise ReshardError("nothing is left: there is no array to write.")
    like = None if target.beside is None else file_of_each_tensor(target.beside)
    return dataclasses.replace(plan_files(found.values(), target.file_nbytes, like), beside=target.beside)


# At most, of a tensor's entry in a header, without its name and shape.
_ENTRY_NBYTES = 128


def plan_files(
    tensors: Iterable[Described], file_nbytes: int = FILE_NBYTES, like: Mapping[str, str] | None = None
) -> TensorFiles:
    """Divides tensors among files.

    Args:
        file_nbytes: the most bytes of tensors in a file, unless it has only one tensor.
        like: the file of each tensor in another folder; it is followed if that folder has the same tensors.
    """
    ordered = sorted(tensors, key=lambda tensor: natural(path_of(tensor[0])))
    if like is not None and like.keys() == {name for name, _, _ in ordered}:
        files: dict[str, list[Described]] = {}
        for tensor in ordered:
            files.setdefault(like[tensor[0]], []).append(tensor)
        return TensorFiles({name: safetensors.header_of(files[name], _METADATA) for name in sorted(files)})
    parts: list[list[Described]] = [[]]
    nbytes = header_nbytes = 0
    for tensor in ordered:
        size = Box.whole(tensor[2]).nbytes(tensor[1].itemsize)
        entry = _ENTRY_NBYTES + len(tensor[0].encode()) + 20 * len(tensor[2])
        if parts[-1] and (nbytes + size > file_nbytes or header_nbytes + entry > safetensors.MOST_HEADER_NBYTES):
            parts.append([])
            nbytes = header_nbytes = 0
        parts[-1].append(tensor)
        nbytes += size
        header_nbytes += entry
    n = len(parts)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return TensorFiles({name: safetensors.header_of(part, _METADATA) for name, part in zip(names, parts, strict=True)})


def file_of_each_tensor(folder: File) -> dict[str, str] | None:
    """Returns each tensor's file in a folder; None if it has no tensors. Raises a ReshardError if it is damaged."""
    if not is_folder(folder):
        return None
    return {tensor.name: file.name for file, tensor in open_folder(folder).tensors.values()}
