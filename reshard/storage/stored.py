"""Finds an Orbax checkpoint (also by step and item) and reads what is in it: tree, shapes, dtypes and chunks.

Read from what lies on disk (Orbax's `_METADATA` and the headers of the zarr arrays), with tensorstore alone and
without touching a byte of the arrays: an inspection of a terabyte takes as long as that of a megabyte.
"""

import asyncio
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Awaitable, Iterable
from pathlib import Path as File
from typing import Any
from urllib.parse import quote

import numpy as np
import tensorstore as ts
from etils import epath

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.storage import event_loops
from reshard.storage.arrays import Reads, StoredArray, ZarrArray
from reshard.storage.paths import Key, Path, dotted, show
from scheduler.base.files import parse_json, read_text

ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")
EMPTY_TYPES = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": None}
METADATA = "_METADATA"
TENSORS_INDEX = "model.safetensors.index.json"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
UNFINISHED = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:.*_)?(\d+)")
_OPEN_AT_ONCE = 256
_INDEX_NBYTES = 8 << 20
_LONGEST_NAME = 4096
_MOST_NBYTES = 256 << 20  # of a file of metadata


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf as it is stored. A leaf that is no array (empty container, None, text) has only a path and a type.

    `chunk` is the least that is read of it at once, `extra` what Orbax keeps beside it (the kind of a PRNG key). What
    is in plain files, `files`, is read by its bytes: `chunk` is then a suggestion for how to cut it.
    """

    path: Path
    value_type: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    chunk: tuple[int, ...] = ()
    extra: str | None = None
    files: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([key.name for key in self.path])

    @property
    def is_array(self) -> bool:
        return self.value_type in ARRAY_TYPES

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize if self.dtype is not None else 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize if self.is_array else 0

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one whole chunk in memory."""
        return math.prod(self.chunk) * self.itemsize

    @property
    def num_chunks(self) -> int:
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True)) if self.is_array else 0

    @property
    def read_chunk(self) -> tuple[int, ...]:
        """What is read as a whole: of plain files, each element by itself."""
        return (1,) * len(self.shape) if self.files else self.chunk

    def cells(self, box: Box) -> Box:
        """The part of the array that its chunks make of a box: what is really read when the box is wanted."""
        return box.aligned(self.read_chunk) & Box.whole(self.shape)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A tree that Orbax saved, as far as its metadata says."""

    folder: File
    item: str | None
    step: int | None
    ocdbt: bool
    zarr3: bool
    fill_missing: bool
    leaves: tuple[Leaf, ...]
    other_items: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """How the arrays are stored: zarr, zarr3 or safetensors."""
        return "zarr3" if self.zarr3 else "zarr"

    @property
    def driver(self) -> str:
        return self.format + (" in OCDBT" if self.ocdbt else ", one folder an array")

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def stored_nbytes(self) -> int:
        """Bytes of the files, compressed as they are."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    @functools.cached_property
    def _texts(self) -> Any:
        return _read_json(self.folder / "_strings.json")

    def spec(self, path: Path) -> dict[str, Any]:
        """What tensorstore needs to open one array; it opens nothing for writing."""
        root = f"{self.folder}/" if "://" in str(self.folder) else f"file://{quote(str(self.folder))}/"
        name = dotted(path) + "/" if path else ""
        if self.ocdbt:
            store: Any = {"driver": "ocdbt", "base": root, "path": name, "cache_pool": "cache_pool#index"}
        else:
            store = root + quote(name)
        return {
            "driver": "zarr3" if self.zarr3 else "zarr",
            "kvstore": store,
            "fill_missing_data_reads": self.fill_missing,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }

    async def array(self, path: Path, context: ts.Context, reads: Reads) -> StoredArray:
        """Opens one array; what is read of it is counted."""
        opened = await ts.open(self.spec(path), read=True, open=True, context=context)
        return ZarrArray(opened, show(path), reads)

    def text(self, path: Path) -> str:
        """The value of a leaf that is text.

        Raises:
            ReshardError: it cannot be read.
        """
        try:
            return self._texts[dotted(path)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            file = self.folder / "_strings.json"
            raise ReshardError(f"{file}: the text of {show(path)} cannot be read: {said(error)}") from None


def absolute(path: Any) -> File:
    """The path of a folder: absolute, unless it is in a store of objects (`gs://…`); its methods are the same."""
    return epath.Path(path) if "://" in str(path) else File(path).expanduser().absolute()  # pyright: ignore


def find(folder: str | File, step: int | None = None, item: str | None = None) -> Checkpoint:
    """Opens a checkpoint folder, a folder of a `CheckpointManager` (its latest step), or one of its steps.

    Args:
        folder: what was given to `save`, or to the manager.
        step: which step, if it is a manager's folder.
        item: which of a step's items, if there are several trees.

    Raises:
        ReshardError: it is none of these, is unfinished, or its metadata cannot be read; the folder is named.
    """
    path = absolute(folder)
    if is_folder(path):
        from reshard.storage.huggingface import open_folder

        if step is not None or item is not None:
            raise ReshardError(f"{path} holds safetensors: it has neither steps nor items.")
        return open_folder(path)
    if not path.is_dir():
        what = "is a file, not a checkpoint folder" if path.exists() else "does not exist"
        raise ReshardError(f"{path} {what}.")
    try:
        return _find(path, step, item)
    except OSError as error:
        raise ReshardError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from None


def is_folder(path: File) -> bool:
    """Whether it is a Hugging Face folder, or one safetensors file."""
    if path.suffix == ".safetensors":
        return path.is_file()
    if not path.is_dir() or (path / METADATA).exists() or UNFINISHED in path.name:
        return False
    return (path / TENSORS_INDEX).exists() or any(path.glob("*.safetensors"))


def _find(folder: File, step: int | None, item: str | None) -> Checkpoint:
    if UNFINISHED in folder.name:
        raise ReshardError(f"{folder} is unfinished: its name says that Orbax was still writing when it ended.")
    is_tree, items = (folder / METADATA).is_file(), _items(folder)
    if is_tree or items:
        if step is not None:
            raise ReshardError(f"{folder} is one checkpoint, not a manager's folder: it has no step {step}.")
        named = None if is_tree else _STEP.fullmatch(folder.name)
        return _open_step(folder, item, int(named[1]) if named else None)
    found = steps(folder)
    if not found:
        from reshard.storage.huggingface import missing_weights

        raise ReshardError(
            missing_weights(folder)
            or f"{folder} is not an Orbax checkpoint: it has no {METADATA}, no items that have one, and no steps.\n"
            f"  It holds {_listing(folder)}."
        )
    if step is None:
        step = max(found)
    if step not in found:
        raise ReshardError(f"{folder} has no step {step}; it has {', '.join(map(str, sorted(found)))}.")
    return _open_step(found[step], item, step)


def _listing(folder: File) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return shown or "nothing"


def _items(folder: File) -> tuple[str, ...]:
    """The trees of one step. What has Orbax's second metadata file itself is a checkpoint of its own, not an item."""
    is_step = (folder / CHECKPOINT_METADATA).is_file()
    return tuple(
        sorted(
            entry.name
            for entry in folder.iterdir()
            if (entry / METADATA).is_file() and (is_step or not (entry / CHECKPOINT_METADATA).is_file())
        )
    )


def steps(folder: File) -> dict[int, File]:
    """The steps in a `CheckpointManager`'s folder, by their names."""
    found = {}
    for entry in folder.iterdir():
        named = _STEP.fullmatch(entry.name)
        if named and entry.is_dir() and ((entry / METADATA).is_file() or _items(entry)):
            found[int(named[1])] = entry
    return found


def _open_step(folder: File, item: str | None, step: int | None) -> Checkpoint:
    if (folder / METADATA).is_file():
        if item is not None:
            raise ReshardError(f"{folder} is one tree: it has no items, so not {item!r} either.")
        return open_tree(folder, None, step, ())
    items = _items(folder)
    if item is None:
        first, *more = items
        if more and "default" not in items:
            raise ReshardError(f"{folder} has {len(items)} trees; say which with --item: {', '.join(items)}.")
        item = "default" if more else first
    if item not in items:
        raise ReshardError(f"{folder} has no item {item!r}; it has {', '.join(items)}.")
    folder_names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    others = tuple(sorted(name for name in folder_names if name != item and not name.startswith(("_", "."))))
    return open_tree(folder / item, item, step, others)


def open_tree(
    folder: File, item: str | None = None, step: int | None = None, others: tuple[str, ...] = ()
) -> Checkpoint:
    """Opens the tree whose metadata is in a folder: all leaves with their headers, no values.

    Raises:
        ReshardError: the metadata or a header cannot be read.
    """
    file = folder / METADATA
    _check_files(folder)
    try:
        metadata = _read_json(file)
        leaves = tuple([_leaf(entry) for entry in metadata["tree_metadata"].values()])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReshardError(
            f"{file} is not the metadata of an Orbax checkpoint: {type(error).__name__}: {said(error)}."
        ) from None
    has_manifest = (folder / "manifest.ocdbt").exists()
    ocdbt = metadata.get("use_ocdbt")
    if ocdbt is None:
        ocdbt = has_manifest
    if ocdbt and not has_manifest and any(leaf.is_array for leaf in leaves):
        raise ReshardError(f"{folder} has metadata but no data: manifest.ocdbt is missing, so it is unfinished.")
    fill_missing = not metadata.get("store_array_data_equal_to_fill_value", False)
    checkpoint = Checkpoint(folder, item, step, ocdbt, bool(metadata.get("use_zarr3")), fill_missing, leaves, others)
    return dataclasses.replace(checkpoint, leaves=tuple(event_loops.run(_with_headers(checkpoint))))


def _read_json(file: File) -> Any:
    return parse_json(file.read_text() if "://" in str(file) else read_text(file, _MOST_NBYTES))


def _check_files(folder: File) -> None:
    """Tensorstore would wait for ever for a pipe that nobody writes to."""
    for place, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(place, name)
            if os.path.exists(file) and not os.path.isfile(file):
                raise ReshardError(f"{file} is a pipe or a device, not a file of a checkpoint.")


def _leaf(entry: Any) -> Leaf:
    path = tuple([Key(str(key["key"]), key["key_type"] == 1) for key in entry["key_metadata"]])
    if not all(key.name.isprintable() for key in path) or len(show(path)) > _LONGEST_NAME:
        raise ValueError(
            f"{show(path)[:80]!r} is no name of a leaf: it is too long, or has characters for no one to see"
        )
    value_type = entry["value_metadata"]["value_type"]
    if value_type not in (*ARRAY_TYPES, *EMPTY_TYPES, "string"):
        raise ValueError(f"{show(path)} is of type {value_type!r}, which is no array, number, text or empty container")
    return Leaf(path, value_type)


def extras(folder: File) -> dict[str, str]:
    """What Orbax keeps beside arrays, as JSON: for a typed PRNG key its kind."""
    found = {}
    for file in sorted((folder / "array_metadatas").glob("process_*")):
        try:
            for entry in _read_json(file)["array_metadatas"]:
                one = entry["array_metadata"]
                if one.get("ext_metadata"):
                    found[one["param_name"]] = json.dumps(one["ext_metadata"], sort_keys=True)
        except (ValueError, KeyError, TypeError) as error:
            raise ReshardError(f"{file} is not the array metadata of an Orbax checkpoint: {said(error)}.") from None
    return found


def reading_context(cache_nbytes: int, index_nbytes: int = _INDEX_NBYTES) -> ts.Context:
    """Where tensorstore keeps what it has read: so many bytes of chunks, and of OCDBT's index what is used often.

    It reads no more files at a time than there are cores: fewer chunks are on their way, in memory that is used again.
    """
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": cache_nbytes},
            "cache_pool#index": {"total_bytes_limit": index_nbytes},
            "file_io_concurrency": {"limit": max(2, os.cpu_count() or 1)},
        }
    )


async def open_array(
    checkpoint: Checkpoint, path: Path, context: ts.Context, reads: Reads | None = None
) -> StoredArray:
    """Opens an array to read it.

    Raises:
        ReshardError: it cannot be opened.
    """
    try:
        return await checkpoint.array(path, context, reads or Reads())
    except (ValueError, OSError) as error:
        raise ReshardError(f"{checkpoint.folder}: the array {show(path)} cannot be opened: {said(error)}.") from None


async def _with_headers(checkpoint: Checkpoint) -> list[Leaf]:
    """The leaves; arrays with what their headers say, and what Orbax keeps beside them."""
    context, beside = reading_context(0), extras(checkpoint.folder)
    slots = asyncio.Semaphore(_OPEN_AT_ONCE)

    async def complete(leaf: Leaf) -> Leaf:
        if not leaf.is_array:
            return leaf
        async with slots:
            array = await open_array(checkpoint, leaf.path, context)
        extra = beside.get(dotted(leaf.path))
        return dataclasses.replace(leaf, shape=array.shape, dtype=array.dtype, chunk=array.chunk, extra=extra)

    return await all_of(map(complete, checkpoint.leaves))


async def all_of(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    """Waits for all of them even if one fails, so that nothing is still under way when the error is handled."""
    results = await asyncio.gather(*map(_awaited, awaitables), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def said(error: BaseException) -> str:
    """An error's first line, without what storage adds: ` [tensorstore_spec='…']`, positions in source files."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.split(r"\s*\[(?:source locations|[a-z_]+=)", text)[0].removesuffix(".") or type(error).__name__
