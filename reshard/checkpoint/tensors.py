"""Hugging Face folders: read as the tree that is wanted, and saved by all processes into files that they share."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path as File
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from mpmd.pytrees import PyTree
from reshard.checkpoint.commit import Working
from reshard.checkpoint.matching import tree_path
from reshard.checkpoint.requests import Request
from reshard.checkpoint.write_plan import WrittenLeaf, plan_writing, start_copies
from reshard.edits.edited import edited
from reshard.edits.entries import Entry, Origin
from reshard.edits.mapped import exported, imported_from
from reshard.edits.mapping import Mapping, config_of, read_mapping
from reshard.edits.tree_edits import Entries, cast
from reshard.sizes import nbytes_of
from reshard.storage.casts import copy_cast
from reshard.storage.huggingface import TensorFolder
from reshard.storage.paths import Key, Path, compiled, dotted, show
from reshard.storage.stored import Checkpoint, Leaf
from reshard.storage.tensor_files import FILE_NBYTES, TensorFiles, TensorTarget, TensorWriter, plan_folder, writing

Value = jax.Array | np.ndarray | str | bytes


def as_wanted(checkpoint: Checkpoint, mapping: str | File | Mapping | None, requests: Sequence[Request]) -> Checkpoint:
    """Returns the checkpoint seen through a mapping. Entries that `mapping` stacks stay apart if the tree has them so.

    Floating-point arrays of a Hugging Face folder are cast to the wanted dtypes. Without a mapping, its tensors are
    also found under their undivided names.
    """
    if mapping is None and not isinstance(checkpoint, TensorFolder):
        return checkpoint
    wanted = {request.source: request for request in requests}

    def change(entries: Entries) -> list[Entry]:
        if mapping is not None:
            entries = imported_from(checkpoint.folder, mapping, lambda node: _is_apart(node, wanted))(entries)
        elif any("." in name for source in wanted for name in source):
            entries = [dataclasses.replace(e, path=(Key(dotted(e.path)),)) for e in entries]
        return [_cast(e, wanted.get(tuple([key.name for key in e.path]))) for e in entries]

    return edited(checkpoint, change)


def _is_apart(node: str, wanted: Iterable[tuple[str, ...]]) -> bool:
    """Returns whether a wanted tree has numbered entries below a node; nodes above it may be stacked there."""
    patterns = [compiled(node), compiled(node.replace("/*", ""))]
    for source in wanted:
        for depth, name in enumerate(source):
            text = show([Key(one) for one in source[:depth]])
            if re.fullmatch("[0-9]+", name) and any(pattern.fullmatch(text) for pattern in patterns):
                return True
    return False


def _cast(entry: Entry, request: Request | None) -> Entry:
    if request is None or request.dtype is None or entry.dtype is None:
        return entry
    if jnp.issubdtype(entry.dtype, jnp.floating) and jnp.issubdtype(request.dtype, jnp.floating):
        return dataclasses.replace(entry, dtype=np.dtype(request.dtype))
    return entry


@dataclasses.dataclass(frozen=True)
class TensorFormat:
    """How `save` writes a Hugging Face folder.

    Args:
        mapping: which array becomes which tensor: the name of a built-in mapping (`"llama"`), a file, or "auto" to
            choose by the config.json of `files_of`. None: an array `a/b/c` becomes the tensor `a.b.c`.
        files_of: a folder to copy other files from (config.json, the tokenizer). If it has the same tensors, they are
            divided among files as there.
        dtype: the dtype that floating-point arrays are cast to, such as `"bfloat16"`; None: as they are.
        file_size: the largest size of a file.

    Raises:
        ReshardError: `dtype` is no floating-point dtype, or `file_size` no number of bytes.
    """

    mapping: str | File | Mapping | None = None
    files_of: str | File | None = None
    dtype: DTypeLike | None = None
    file_size: int | str = FILE_NBYTES

    def __post_init__(self) -> None:
        try:
            if self.dtype is not None and not jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating):
                raise TypeError(f"{jnp.dtype(self.dtype)} is no floating-point dtype; other arrays are not cast")
            nbytes_of(self.file_size)
        except (TypeError, ValueError) as error:
            raise ReshardError(f"TensorFormat: {error}") from None


def save_tensors(working: Working, tree: PyTree, how: TensorFormat, timeout_s: int, written: list[int]) -> None:
    """Writes the folder; every process calls it. When it returns, the folder is complete but not yet in place.
    `written` gets the number of bytes of each box of `tree` once it is in its file.
    """
    beside = None if how.files_of is None else File(how.files_of).expanduser().absolute()
    if beside is not None and not beside.is_dir():
        raise ReshardError(f"save: files_of is {beside}, which is no folder.")
    arrays = dict(_arrays(tree))
    entries = _entries(arrays, how, beside)
    files = plan_folder(entries, TensorTarget(beside, nbytes_of(how.file_size)))
    folder = File(working.folder)
    if jax.process_index() == 0:  # no other process makes it again, once an error has removed it
        folder.mkdir(parents=True, exist_ok=True)
    working.wait_for_all("made", timeout_s)
    _write(folder, files, arrays, entries, written)
    working.wait_for_all("written", timeout_s)
    if jax.process_index() == 0:
        files.finish(folder)


def _arrays(tree: PyTree) -> Iterator[tuple[Path, Value]]:
    for where, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple([Key(name) for name in tree_path(where)])
        yield path, leaf if isinstance(leaf, (jax.Array, str, bytes)) else np.asarray(leaf)


def _entries(arrays: dict[Path, Value], how: TensorFormat, beside: File | None) -> list[Entry]:
    entries = [Entry.of(_leaf(path, array)) for path, array in arrays.items()]
    if how.dtype is not None:
        entries = cast(None, np.dtype(jnp.dtype(how.dtype)))(entries)
    if how.mapping is not None:
        entries = exported(read_mapping(how.mapping, beside), config_of(beside))(entries)
    return entries


def _leaf(path: Path, array: Value) -> Leaf:
    if isinstance(array, (str, bytes)):
        return Leaf(path, "string")
    if keys.is_key(array.dtype):
        return Leaf(path, "jax.Array", tuple(array.shape), np.dtype(np.uint32), tuple(array.shape), "key")
    return Leaf(path, "jax.Array", tuple(array.shape), np.dtype(array.dtype), tuple(array.shape))


def _write(
    folder: File, files: TensorFiles, arrays: dict[Path, Value], entries: list[Entry], written: list[int]
) -> None:
    tensors_of = _tensors_of(entries)
    with writing(folder, files) as writer:
        for path, array in arrays.items():
            if path in tensors_of:
                for box, data in _owned(array):
                    _write_box(writer, tensors_of[path], box, data)
                    written.append(data.nbytes)


def _tensors_of(entries: list[Entry]) -> dict[Path, Entry]:
    """Returns each array as an entry that is made of tensors: inverts the origins of the tensors."""
    origins: dict[Path, list[Origin]] = {}
    leaves: dict[Path, Leaf] = {}
    for entry in entries:
        for origin in entry.origins:
            leaves[origin.leaf.path] = origin.leaf
            origins.setdefault(origin.leaf.path, []).append(dataclasses.replace(origin.inverse, leaf=entry))
    return {path: dataclasses.replace(Entry.of(leaves[path]), origins=tuple(o)) for path, o in origins.items()}


def _write_box(writer: TensorWriter, array: Entry, box: Box, data: np.ndarray) -> None:
    for part in array.parts(box):
        values = part.inverse.arranged(data[(*part.target.relative_to(box).slices, ...)])
        if values.dtype != part.leaf.dtype:
            wanted = np.empty(values.shape, part.leaf.dtype)
            copy_cast(values, wanted, show(array.path))
            values = wanted
        writer.write(dotted(part.leaf.path), part.source, values)


def _owned(array: Any) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields the boxes of an array that this process writes, and their values."""
    if isinstance(array, MpmdArray):
        plan = plan_writing((WrittenLeaf(tuple(array.shape), array.dtype.itemsize, array.mpmd_sharding),))[0]
        for copy in start_copies(array, plan):
            yield copy.box, np.asarray(copy.data)[(*copy.box.relative_to(copy.held).slices, ...)]
    elif isinstance(array, jax.Array):
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                yield Box.from_slices(shard.index, array.shape), np.asarray(shard.data)
    elif jax.process_index() == 0:
        yield Box.whole(array.shape), array
