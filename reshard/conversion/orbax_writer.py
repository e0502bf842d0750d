"""Writes a tree as an ordinary Orbax checkpoint whose arrays somebody else fills.

Orbax makes the folder, its metadata and the arrays' headers, merges and finishes it as it does for `jax.Array`; in
between, the open arrays are handed out to be filled bit by bit. Nothing is ever in memory whole. What a conversion
needs of Orbax's internals is in here.
"""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path as File
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mpmd.arrays.boxes import Box
from reshard._orbax_compat import ArrayMetadata, Store
from reshard.storage.stored import all_of

# Small nodes, so that a commit that adds a few chunks does not write the index of all chunks again.
_INDEX_NODE_NBYTES = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class Array:
    """A leaf to be filled; `extra` is JSON that Orbax keeps beside it."""

    name: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    extra: str | None = None

    @property
    def nbytes(self) -> int:
        return 0  # what Orbax would count as held in memory


class _JaxArray(Array): ...


class _NumpyArray(Array): ...


class _Scalar(Array): ...


ARRAYS: dict[str, type[Array]] = {"jax.Array": _JaxArray, "np.ndarray": _NumpyArray, "scalar": _Scalar}

Fill = Callable[[dict[Any, ts.TensorStore]], Awaitable[None]]


async def write_boxes(targets: dict[Any, ts.TensorStore], written: Iterable[tuple[Any, Box, np.ndarray]]) -> None:
    """Writes boxes of arrays, given by the `id` of what names them, in one commit."""
    transaction = ts.Transaction()
    writes = []
    for entry, box, data in written:
        target = targets[id(entry)].with_transaction(transaction)
        writes.append(target[box.slices].write(data, can_reference_source_data_indefinitely=True).copy)
    await all_of(writes)
    await transaction.commit_async()


def write(folder: File, tree: Any, fill: Fill, *, zarr3: bool) -> None:
    """Saves a tree of `Array`, text and empty containers.

    Args:
        folder: the checkpoint; it must not exist. While it is written it is beside its place under Orbax's name for
            unfinished ones.
        tree: dicts and lists; arrays of a type from `ARRAYS`.
        fill: gets all arrays by `Array.name`, open for writing, and fills them.
        zarr3: whether to write zarr version 3 instead of 2; both go into OCDBT.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Array)]
    gathering = _Gathering(len({type(leaf) for leaf in leaves}), fill)
    store = Store()
    handlers = {kind: _Handler(name, store, gathering) for name, kind in ARRAYS.items()}
    # Orbax looks for the store of array metadata at the handler of jax.Array.
    registry = ocp.type_handlers.create_type_handler_registry(
        *handlers.items(), (str, ocp.type_handlers.StringHandler()), (jax.Array, handlers[_JaxArray])
    )
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, ocp.args.PyTreeSave(tree))


class _Gathering:
    """Waits until each kind of array has been opened, then has them filled together."""

    def __init__(self, num_kinds: int, fill: Fill) -> None:
        self.missing = num_kinds
        self.fill = fill
        self.arrays: dict[Any, ts.TensorStore] = {}

    async def add(self, arrays: dict[Any, ts.TensorStore]) -> None:
        self.arrays |= arrays
        self.missing -= 1
        if not self.missing:
            await self.fill(self.arrays)


class _Handler(ocp.type_handlers.TypeHandler):
    """Makes the arrays of one kind; Orbax reads them back with its own handlers."""

    def __init__(self, name: str, store: Store, gathering: _Gathering) -> None:
        self._name = name
        self._array_metadata_store = store
        self._gathering = gathering

    def typestr(self) -> str:
        return self._name

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("this handler writes")

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        raise NotImplementedError("this handler writes")

    async def serialize(
        self, values: Sequence[Array], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for info in infos:
            await info.await_path_creation()
        opened = await asyncio.gather(*map(_create, values, infos))
        if self._name == "jax.Array":
            described = [_described(value, info) for value, info in zip(values, infos, strict=True)]
            await self._array_metadata_store.write(infos[0].parent_dir, described, process_index=0)
        await self._gathering.add({value.name: array for value, array in zip(values, opened, strict=True)})
        return []


async def _create(value: Array, info: Any) -> ts.TensorStore:
    # The whole array as one chunk, as Orbax writes what lies on one device; then our chunks in place of that one.
    spec = ocp.type_handlers.get_json_tspec_write(
        info, use_ocdbt=True, global_shape=value.shape, local_shape=value.shape, dtype=value.dtype, process_index=0
    )
    if info.use_zarr3:
        spec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"] = value.chunk
        spec["metadata"]["codecs"][0]["configuration"]["chunk_shape"] = value.chunk
    else:
        spec["metadata"]["chunks"] = value.chunk
    spec["kvstore"]["config"]["max_decoded_node_bytes"] = _INDEX_NODE_NBYTES
    return await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)


def _described(value: Array, info: Any) -> ArrayMetadata:
    return ArrayMetadata(
        param_name=info.name,
        shape=value.shape,
        dtype=value.dtype,
        write_shape=value.chunk,
        chunk_shape=value.chunk,
        ext_metadata=json.loads(value.extra) if value.extra else None,
        use_ocdbt=True,
        use_zarr3=info.use_zarr3,
    )
