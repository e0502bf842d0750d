"""Writes a tree as an ordinary Orbax checkpoint; the caller fills its arrays.

Orbax makes the folder, its metadata and the arrays' headers, and merges and finishes it as for `jax.Array`. In
between, the open arrays are handed out to be filled piece by piece. No array is ever in memory whole. All internals
of Orbax that a conversion needs are used here.
"""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path as File
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mpmd.arrays.boxes import Box
from reshard._orbax_compat import ArrayMetadata, Store
from reshard.edits.entries import Entry
from reshard.storage.stored import ARRAY_TYPES, all_of

# Small nodes, so that a commit that adds a few chunks does not write the index of all chunks again.
_INDEX_NODE_NBYTES = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class Array:
    """A leaf to be filled."""

    entry: Entry
    nbytes = 0  # the bytes that Orbax would count as held in memory


# Orbax finds the handler of a leaf by its Python type.
ARRAYS: dict[str, type[Array]] = {name: type(name, (Array,), {}) for name in ARRAY_TYPES}

Infos = Sequence[ocp.type_handlers.ParamInfo]
Fill = Callable[[dict[int, ts.TensorStore]], Awaitable[None]]


async def write_boxes(targets: dict[int, ts.TensorStore], written: Iterable[tuple[Entry, Box, np.ndarray]]) -> None:
    """Writes boxes of entries in one commit."""
    transaction = ts.Transaction()
    writes = []
    for entry, box, data in written:
        target = targets[id(entry)].with_transaction(transaction)
        writes.append(target[box.slices].write(data, can_reference_source_data_indefinitely=True).copy)
    await all_of(writes)
    await transaction.commit_async()


def write(folder: File, tree: object, fill: Fill, *, zarr3: bool) -> None:
    """Saves a tree of `Array`, text and empty containers.

    Args:
        folder: the checkpoint; it must not exist. Until it is finished, it is next to its place under Orbax's name for
            unfinished ones.
        tree: dicts and lists; arrays of a type from `ARRAYS`.
        fill: gets all arrays, open for writing, by the `id` of their entry, and fills them.
        zarr3: whether to write zarr version 3 instead of 2; both go into OCDBT.
    """
    kinds = {type(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, Array)}
    opened: dict[int, ts.TensorStore] = {}

    async def add(kind: type[Array], arrays: dict[int, ts.TensorStore]) -> None:
        """Adds open arrays of one kind; when all kinds have been opened, fills them together."""
        opened.update(arrays)
        kinds.remove(kind)
        if not kinds:
            await fill(opened)

    store = Store()
    handlers = {kind: _Handler(name, store, functools.partial(add, kind)) for name, kind in ARRAYS.items()}
    # Orbax looks for the store of array metadata at the handler of jax.Array.
    registry = ocp.type_handlers.create_type_handler_registry(
        *handlers.items(), (str, ocp.type_handlers.StringHandler()), (jax.Array, handlers[ARRAYS["jax.Array"]])
    )
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, ocp.args.PyTreeSave(tree))


class _Handler(ocp.type_handlers.TypeHandler):
    """Makes the arrays of one kind; Orbax reads them back with its own handlers."""

    def __init__(self, name: str, store: Store, fill: Fill) -> None:
        self._name = name
        self._array_metadata_store = store
        self._fill = fill

    def typestr(self) -> str:
        return self._name

    async def metadata(self, infos: Infos) -> NoReturn:
        raise NotImplementedError("this handler writes")

    async def deserialize(self, infos: Infos, args: Sequence[ocp.RestoreArgs] | None = None) -> NoReturn:
        raise NotImplementedError("this handler writes")

    async def serialize(
        self, values: Sequence[Array], infos: Infos, args: Sequence[ocp.SaveArgs] | None = None
    ) -> list[Any]:
        for info in infos:
            await info.await_path_creation()
        entries = [value.entry for value in values]
        opened = await asyncio.gather(*map(_create, entries, infos))
        if self._name == "jax.Array":
            described = list(map(_described, entries, infos))
            await self._array_metadata_store.write(infos[0].parent_dir, described, process_index=0)
        await self._fill(dict(zip(map(id, entries), opened, strict=True)))
        return []


async def _create(entry: Entry, info: ocp.type_handlers.ParamInfo) -> ts.TensorStore:
    assert entry.dtype is not None
    # The whole array as one chunk, as Orbax writes arrays on one device; then our chunks replace that one.
    spec = ocp.type_handlers.get_json_tspec_write(
        info, use_ocdbt=True, global_shape=entry.shape, local_shape=entry.shape, dtype=entry.dtype, process_index=0
    )
    if info.use_zarr3:
        spec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"] = entry.chunk
        spec["metadata"]["codecs"][0]["configuration"]["chunk_shape"] = entry.chunk
    else:
        spec["metadata"]["chunks"] = entry.chunk
    spec["kvstore"]["config"]["max_decoded_node_bytes"] = _INDEX_NODE_NBYTES
    return await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)


def _described(entry: Entry, info: Any) -> ArrayMetadata:
    assert entry.dtype is not None
    return ArrayMetadata(
        param_name=info.name,
        shape=entry.shape,
        dtype=entry.dtype,
        write_shape=entry.chunk,
        chunk_shape=entry.chunk,
        ext_metadata=json.loads(entry.extra) if entry.extra else None,
        use_ocdbt=True,
        use_zarr3=info.use_zarr3,
    )
