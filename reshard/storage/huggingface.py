"""Hugging Face folders as checkpoints: safetensors files and the index that says which tensor is in which.

A tensor `model.layers.0.mlp.up_proj.weight` is the leaf of the path `model/layers/0/mlp/up_proj/weight`. Symbolic
links are followed, because the Hugging Face cache is made of them; names that leave the folder are refused.
"""

import asyncio
import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path as File

import numpy as np
import tensorstore as ts

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.storage import safetensors
from reshard.storage.arrays import Reads, StoredArray
from reshard.storage.paths import Key, Path
from reshard.storage.safetensors import Tensor
from reshard.storage.stored import METADATA, UNFINISHED, Checkpoint, Leaf
from scheduler.base.files import parse_json, read_text
from scheduler.base.texts import counted

CONFIG = "config.json"
SINGLE = "model.safetensors"
TENSORS_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_SUGGESTED_CHUNK_NBYTES = 8 << 20
_MOST_FILES = 100_000


@dataclasses.dataclass(frozen=True)
class TensorFolder(Checkpoint):
    """The tensors of a folder, or of one file; `tensors` has, by path, the file of a tensor and its place there."""

    tensors: Mapping[Path, tuple[File, Tensor]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def driver(self) -> str:
        return f"safetensors, {counted(len(self.files()), 'file')}"

    def files(self) -> list[File]:
        """Returns all files of tensors, in order."""
        return sorted({file for file, _ in self.tensors.values()})

    def stored_nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files())

    async def array(self, path: Path, context: ts.Context, reads: Reads) -> StoredArray:
        return TensorArray(*self.tensors[path], reads)


class TensorArray:
    """A tensor in a file, open for reading."""

    def __init__(self, file: File, tensor: Tensor, reads: Reads):
        self.shape, self.dtype, self.chunk = tensor.shape, tensor.dtype, (1,) * len(tensor.shape)
        self._file, self._tensor, self._reads = file, tensor, reads

    async def read(self, box: Box) -> np.ndarray:
        data = await asyncio.to_thread(safetensors.read_box, self._file, self._tensor, box)
        self._reads.add(self._file.name, data.nbytes)
        return data


def path_of(name: str) -> Path:
    """Returns a tensor's name as a path.

    Example:
        >>> [key.name for key in path_of("model.layers.0.weight")]
        ['model', 'layers', '0', 'weight']
    """
    parts = name.split(".")
    return tuple(map(Key, parts)) if all(parts) else (Key(name),)


def natural(path: Path) -> list[tuple[int, str]]:
    """Returns a key that sorts paths as people do: layer 10 after layer 9."""
    return [(int(k.name) if re.fullmatch("[0-9]{1,9}", k.name) else -1, k.name) for k in path]


def is_folder(path: File) -> bool:
    """Returns whether a path is a Hugging Face folder, or one safetensors file."""
    if path.suffix == ".safetensors":
        return path.is_file()
    if not path.is_dir() or (path / METADATA).exists() or UNFINISHED in path.name:
        return False
    return (path / TENSORS_INDEX).exists() or any(path.glob("*.safetensors"))


def open_folder(path: File) -> TensorFolder:
    """Opens a folder, or one safetensors file. Reads only headers. A ReshardError in one line says what is wrong."""
    folder = path if path.is_dir() else path.parent
    files = _files(path)
    tensors: dict[Path, tuple[File, Tensor]] = {}
    leaves = []
    for name, expected in files.items():
        file = folder / name
        found = safetensors.read_header(file)
        if expected is not None and (missing := sorted(expected - {tensor.name for tensor in found})):
            raise ReshardError(f"{file} has no tensor {missing[0]!r}, which {TENSORS_INDEX} says it has.")
        for tensor in found:
            if expected is not None and tensor.name not in expected:
                continue  # the index decides: files may share tensors
            where = path_of(tensor.name)
            if where in tensors:
                raise ReshardError(f"{folder}: {tensors[where][0].name} and {name} both have {tensor.name!r}.")
            tensors[where] = file, tensor
            leaves.append(_leaf(where, tensor, name))
    leaves.sort(key=lambda leaf: natural(leaf.path))
    return TensorFolder(path, None, None, False, "safetensors", False, tuple(leaves), tensors=tensors)


def missing_weights(folder: File) -> str | None:
    """Returns why a folder with the config.json of a Hugging Face folder is not one; None for any other folder."""
    if not (folder / CONFIG).is_file():
        return None
    if any(folder.glob("*.bin")):
        return (
            f"{folder} has its weights in PyTorch's format (*.bin). With `transformers`, AutoModelForCausalLM"
            ".from_pretrained(folder).save_pretrained(other_folder) writes safetensors."
        )
    return f"{folder} is half a Hugging Face folder: it has {CONFIG}, but no *.safetensors. Copy its weights too."


def _leaf(path: Path, tensor: Tensor, file: str) -> Leaf:
    chunk = list(tensor.shape)
    for axis, size in enumerate(tensor.shape):
        row = tensor.nbytes // max(1, math.prod(tensor.shape[: axis + 1]))
        if row * size <= _SUGGESTED_CHUNK_NBYTES:
            break
        chunk[axis] = max(1, _SUGGESTED_CHUNK_NBYTES // max(1, row))
    return Leaf(path, "jax.Array", tensor.shape, tensor.dtype, tuple([max(1, c) for c in chunk]), None, (file,))


def _files(path: File) -> dict[str, set[str] | None]:
    """Returns the names of the files, and the tensors that each must have; None if nothing says so."""
    if path.is_file():
        return {path.name: None}
    if (path / TENSORS_INDEX).exists():
        return dict(_indexed(path / TENSORS_INDEX))
    if (path / SINGLE).exists():
        return {SINGLE: None}
    names = sorted(file.name for file in path.glob("*.safetensors"))
    for name in names:
        part = _PART.fullmatch(name)
        if part and len([n for n in names if (m := _PART.fullmatch(n)) and m[1] == part[1]]) < min(
            int(part[3][:9]), _MOST_FILES
        ):
            raise ReshardError(f"{path} is incomplete: {name} says that there are {int(part[3][:9])} files like it.")
    return dict.fromkeys(names)


def _indexed(index: File) -> dict[str, set[str]]:
    try:
        files: dict[str, set[str]] = {}
        for tensor, file in parse_json(read_text(index))["weight_map"].items():
            if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
                raise ValueError(f"{str(file)[:80]!r} is no name of a safetensors file in the folder")
            files.setdefault(file, set()).add(tensor)
    except OSError as error:
        raise ReshardError(f"{index} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(".")
        raise ReshardError(f"{index} is not the index of a Hugging Face folder: {said}.") from None
    if missing := sorted(name for name in files if not (index.parent / name).exists()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ReshardError(f"{index.parent} is incomplete: {missing[0]}{more}, which its index names, is missing.")
    return files
