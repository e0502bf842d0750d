"""The content of a checkpoint, in particular of an Orbax checkpoint: tree, shapes, dtypes and chunks.

It is read from the disk (Orbax's `_METADATA` and the headers of the zarr arrays), with tensorstore alone and without
touching a byte of the arrays: inspecting a terabyte takes as long as inspecting a megabyte.
"""

import asyncio
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from jax.typing import DTypeLike

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from reshard.storage import event_loops
from reshard.storage.arrays import HeldArray, Reads, StoredArray, ZarrArray
from reshard.storage.paths import Key, Path, dotted, show
from scheduler.base.files import parse_json, read_text
from scheduler.base.texts import type_text

ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")
EMPTY_TYPES = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": None}
METADATA = "_METADATA"
_AGGREGATE = "checkpoint"  # a file
UNFINISHED = ".orbax-checkpoint-tmp"
_OPEN_AT_ONCE = 256
_INDEX_NBYTES = 8 << 20
_LONGEST_NAME = 4096
_MOST_NBYTES = 256 << 20  # of a file of metadata
_NOT_STORED = ("uint2", "uint4", "float128", "complex256", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf as it is stored. A leaf that is no array (empty container, None, text) has only a path and a type.

    `chunk` is the least of it that is read at once, `extra` is Orbax's entry for it (the kind of a PRNG key). A leaf in
    plain files, `files`, is read by its bytes: `chunk` is then only a suggestion for how to cut it. An aggregated leaf
    lies with others in one file of msgpack, as older releases of Orbax and Flax wrote them.
    """

    path: Path
    value_type: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    chunk: tuple[int, ...] = ()
    extra: str | None = None
    files: tuple[str, ...] = ()
    is_aggregated: bool = False

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
        """The unit of a read: the chunk, or in plain files a single element."""
        return (1,) * len(self.shape) if self.files else self.chunk

    def cells(self, box: Box) -> Box:
        """Returns the part of the array in chunks that a box touches: the part that is really read for the box."""
        return box.aligned(self.read_chunk) & Box.whole(self.shape)

    def cells_nbytes(self, box: Box) -> int:
        return self.cells(box).nbytes(self.itemsize)

    def slabs(self, box: Box, nbytes: int) -> Iterator[Box]:
        """Cuts the box into parts that are read within so many bytes each, or into chunks."""
        if self.cells_nbytes(box) <= nbytes:
            yield box
        elif self.files:
            yield from (part for part, _ in box.split_sized(max(1, nbytes // self.itemsize)))
        else:
            yield from self.cells(box).grid(self.chunk)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A tree that Orbax saved, as far as its metadata says. Its `format` is zarr, zarr3 or safetensors."""

    folder: File
    item: str | None
    step: int | None
    ocdbt: bool
    format: str
    fill_missing: bool
    leaves: tuple[Leaf, ...]
    other_items: tuple[str, ...] = ()
    metadata_key: str | None = None  # the name of the arrays' headers, where it is not zarr's own

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
    def _texts(self) -> Mapping[str, str]:
        return _read_json(self.folder / "_strings.json")

    @functools.cached_property
    def _aggregated(self) -> dict[Path, Any]:
        leaves = [leaf for leaf in self.leaves if leaf.is_aggregated]
        if not leaves:
            return {}
        from orbax.checkpoint import msgpack_utils  # takes a second to import, and few checkpoints need it

        file = self.folder / _AGGREGATE
        try:
            tree, found = msgpack_utils.msgpack_restore(file.read_bytes()), {}
            for leaf in leaves:
                found[leaf.path] = tree
                for key in leaf.path:
                    inside = found[leaf.path]
                    found[leaf.path] = inside[int(key.name)] if isinstance(inside, (list, tuple)) else inside[key.name]
        except Exception as error:  # msgpack raises many kinds of errors
            raise ReshardError(f"{file} does not hold the values of this checkpoint: {said(error)}.") from None
        return found

    def spec(self, path: Path) -> dict[str, Any]:
        """Returns the spec with which tensorstore opens one array, only for reading."""
        root = f"{self.folder}/" if "://" in str(self.folder) else f"file://{quote(str(self.folder))}/"
        name = dotted(path) + "/" if path else ""
        if self.ocdbt:
            store: object = {"driver": "ocdbt", "base": root, "path": name, "cache_pool": "cache_pool#index"}
        else:
            store = root + quote(name)
        named = {} if self.metadata_key is None else {"metadata_key": self.metadata_key}
        return named | {
            "driver": self.format,
            "kvstore": store,
            "fill_missing_data_reads": self.fill_missing,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }

    async def array(self, path: Path, context: ts.Context, reads: Reads) -> StoredArray:
        """Opens one array; its reads are counted."""
        if path in self._aggregated:
            return HeldArray(np.asarray(self._aggregated[path]), show(path), reads)
        opened = await ts.open(self.spec(path), read=True, open=True, context=context)
        return ZarrArray(opened, show(path), reads)

    def text(self, path: Path) -> str:
        """Returns the value of a leaf that is text. Raises a ReshardError if it cannot be read."""
        if path in self._aggregated:
            return str(self._aggregated[path])
        try:
            return self._texts[dotted(path)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            file = self.folder / "_strings.json"
            raise ReshardError(f"{file}: the text of {show(path)} cannot be read: {said(error)}") from None


def fault_of_name(path: Path) -> str | None:
    """Returns why no leaf may have this path; None if one may."""
    if all(key.name.isprintable() for key in path) and len(show(path)) <= _LONGEST_NAME:
        return None
    return f"{show(path)[:80]!r} is no name of a leaf: it is too long, or has characters for no one to see"


def check_target(what: str, folder: File) -> None:
    """Raises a ReshardError if Orbax would not find what it writes there."""
    if found := sorted(set("*?[") & set(str(folder))):
        raise ReshardError(
            f"{what}: {folder} has {' and '.join(found)} in it, which Orbax takes for a pattern: it would not find what"
            " it has written. Give another path."
        )
    if "://" in str(folder):
        try:
            folder.exists()
        except ImportError as error:
            raise ReshardError(f"{what}: {folder} needs another package: {said(error)}.") from None


def absolute(path: str | os.PathLike[str]) -> File:
    """Returns a folder's path: absolute, unless it is in an object store (`gs://…`); its methods are the same.

    Raises a ReshardError for the home of a user who does not exist (`~nobody`).
    """
    try:
        return epath.Path(path) if "://" in str(path) else File(path).expanduser().absolute()  # pyright: ignore
    except RuntimeError as error:
        raise ReshardError(f"{str(path)!r}: {said(error)}.") from None


def open_tree(
    folder: File, item: str | None = None, step: int | None = None, others: tuple[str, ...] = ()
) -> Checkpoint:
    """Opens the tree with its metadata in this folder: all leaves with their headers, no values. Raises a ReshardError
    if the metadata or a header cannot be read.
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
    if ocdbt and not has_manifest and any(leaf.is_array and not leaf.is_aggregated for leaf in leaves):
        raise ReshardError(f"{folder} has metadata but no data: manifest.ocdbt is missing, so it is unfinished.")
    fill_missing = not metadata.get("store_array_data_equal_to_fill_value", False)
    kind = "zarr3" if metadata.get("use_zarr3") else "zarr"
    checkpoint = Checkpoint(folder, item, step, ocdbt, kind, fill_missing, leaves, others)
    return dataclasses.replace(checkpoint, leaves=tuple(event_loops.run(_with_headers(checkpoint))))


def value_types(folder: File) -> dict[tuple[str, ...], str]:
    """Returns the names of a tree's leaves, without empty containers, and the types that Orbax has written for them.
    Raises a ReshardError if the metadata cannot be read.
    """
    file = folder / METADATA
    try:
        found = {
            tuple([str(key["key"]) for key in entry["key_metadata"]]): entry["value_metadata"]["value_type"]
            for entry in _read_json(file)["tree_metadata"].values()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReshardError(f"{file} is not the metadata of an Orbax checkpoint: {said(error)}.") from None
    return {names: kind for names, kind in found.items() if kind not in EMPTY_TYPES}


def _read_json(file: File) -> Any:
    return parse_json(file.read_text() if "://" in str(file) else read_text(file, _MOST_NBYTES))


def _check_files(folder: File) -> None:
    """Refuses pipes: tensorstore would wait for ever for a pipe that nobody writes to."""
    for place, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(place, name)
            if os.path.exists(file) and not os.path.isfile(file):
                raise ReshardError(f"{file} is a pipe or a device, not a file of a checkpoint.")


def _leaf(entry: Any) -> Leaf:
    path = tuple([Key(str(key["key"]), key["key_type"] == 1) for key in entry["key_metadata"]])
    if fault := fault_of_name(path):
        raise ValueError(fault)
    value_type = entry["value_metadata"]["value_type"]
    if value_type not in (*ARRAY_TYPES, *EMPTY_TYPES, "string"):
        raise ValueError(f"{show(path)} is of type {value_type!r}, which is no array, number, text or empty container")
    aggregated = value_type not in EMPTY_TYPES and bool(entry["value_metadata"].get("skip_deserialize"))
    return Leaf(path, value_type, is_aggregated=aggregated)


def extras(folder: File) -> dict[str, str]:
    """Returns Orbax's entries for arrays, as JSON: for a typed PRNG key its kind."""
    found = {}
    for file in sorted((folder / "array_metadatas").glob("process_*")):
        try:
            for entry in _read_json(file)["array_metadatas"]:
                one = entry["array_metadata"]
                if one.get("ext_metadata"):
                    found[one["param_name"]] = json.dumps(one["ext_metadata"], sort_keys=True)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReshardError(f"{file} is not the array metadata of an Orbax checkpoint: {said(error)}.") from None
    return found


def reading_context(cache_nbytes: int, index_nbytes: int = _INDEX_NBYTES) -> ts.Context:
    """Returns a cache for tensorstore: so many bytes of chunks, and the parts of OCDBT's index that are used often.

    It reads no more files at a time than there are cores: fewer chunks are in flight, and their memory is used again.
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
    """Opens an array to read it. Raises a ReshardError if it cannot be opened."""
    try:
        return await checkpoint.array(path, context, reads or Reads())
    except (ValueError, OSError) as error:
        raise ReshardError(f"{checkpoint.folder}: the array {show(path)} cannot be opened: {said(error)}.") from None


async def _with_headers(checkpoint: Checkpoint) -> list[Leaf]:
    """Returns the leaves; arrays with the content of their headers, and Orbax's entries for them."""
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
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def said(error: BaseException) -> str:
    """Returns an error's first line, without storage's additions: ` [tensorstore_spec='…']`, places in source files."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.split(r"\s*\[(?:source locations|[a-z_]+=)", text)[0].removesuffix(".") or type(error).__name__


def fault_of_type(shape: Sequence[int], dtype: DTypeLike) -> str | None:
    """Returns why an array of this type cannot be in a checkpoint; None if it can."""
    known = any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.number, np.bool_, jax.dtypes.extended))
    if not known or str(dtype) in _NOT_STORED:
        return f"{type_text(shape, dtype)} is of a dtype that Orbax does not store"
    return None if math.prod(shape) else f"{type_text(shape, dtype)} has no elements, and Orbax stores no empty arrays"
