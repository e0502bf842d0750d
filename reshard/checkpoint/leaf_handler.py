"""Makes Orbax save and restore `MpmdArray`s: the handler of their leaves.

Orbax hands each leaf of a tree to the handler of its type. The handler for `jax.Array` is replaced by one that does
the same for a `jax.Array` and knows an `MpmdArray` too, so that both are written in one go, under the same names, and
stored as the same kind: whoever reads the checkpoint sees arrays, and no groups.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path as File
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box
from mpmd.arrays.delegation import is_plain
from mpmd.arrays.sharding import MpmdSharding
from mpmd.errors import ReshardError
from mpmd.job import joining
from mpmd.pytrees import PyTree
from reshard._orbax_compat import (
    GLOBAL_TYPE_HANDLER_REGISTRY,
    RANDOM_KEY_IMPL,
    ArrayHandler,
    BasePyTreeSaveArgs,
    around,
    asyncio_utils,
    future,
    in_v1,
    replica_slices,
    write_slices,
)
from reshard.checkpoint import orbax_calls
from reshard.checkpoint.alike import about_arrays
from reshard.checkpoint.failures import known_failure
from reshard.checkpoint.matching import check_names, tree_path
from reshard.checkpoint.meeting import meetings
from reshard.checkpoint.reading import IN_FLIGHT_NBYTES, read_requests
from reshard.checkpoint.requests import Request, abstract
from reshard.checkpoint.write_plan import HostCopy, Writing, WrittenLeaf, plan_writing, start_copies
from reshard.storage import checksums, event_loops, stored
from reshard.storage.arrays import Reads
from reshard.storage.identity import identity
from reshard.storage.paths import Key
from scheduler.base.texts import type_text

Infos = Sequence[ocp.type_handlers.ParamInfo]


@dataclasses.dataclass
class _Uncompressed(ocp.SaveArgs):
    """Stores arrays as they are. For arrays that have checksums, which find more damage than a decompressor."""


class MpmdLeaves(ArrayHandler):
    """Writes and reads `MpmdArray`s as well as `jax.Array`s. Mixed in front of the previous handler of `jax.Array`."""

    gives_numpy = False  # whether an array becomes numpy's if neither the reader nor a file names a sharding for it

    async def serialize(
        self, values: Sequence[jax.Array], infos: Infos, args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[Any]:
        """Copies this process's part of the arrays to the host; the returned futures write it."""
        if not any(isinstance(value, MpmdArray) for value in values):
            return await super().serialize(values, infos, args)
        joining.settle()
        args = args or [ocp.SaveArgs()] * len(values)
        _check_savable(values, infos)
        if (call := meetings.call) is not None and "the tree" not in call.about:
            call.about |= about_arrays((info.name, x) for info, x in zip(infos, values, strict=True))
        for info, arg in zip(infos, args, strict=True):
            if isinstance(arg, _Uncompressed):
                info.use_compression = False
        impls = [keys.implementation(value.dtype) for value in values]
        on_host = self._to_host([keys.to_data(value) for value in values], infos, args)
        write = self._write(on_host, infos, args, impls)
        return [future.CommitFutureAwaitingContractedSignals(write, name="array_type_handler")]

    async def _write(
        self, on_host: Sequence[Any], infos: Sequence[Any], args: Sequence[ocp.SaveArgs], impls: Sequence[str | None]
    ) -> None:
        # No sharding file is written: devices and groups of this run would mean nothing to another run.
        written = write_slices(
            on_host,
            infos,
            args,
            primary_host=self._primary_host,
            metadata_key=self._metadata_key,
            array_metadata_store=self._array_metadata_store,
            enable_replica_parallel_separate_folder=False,
            use_replica_parallel=self._use_replica_parallel,
            ext_metadata={i.name: {RANDOM_KEY_IMPL: n} for i, n in zip(infos, impls, strict=True) if n is not None},
        )
        await infos[0].await_path_creation()
        sums = checksums.write(
            infos[0].parent_dir,
            jax.process_index(),
            [
                (info.name, [(Box.from_slices(s.index, x.global_shape), s.unsliced_data) for s in x.replica_slices])
                for info, arg, x in zip(infos, args, on_host, strict=True)
                if arg.dtype is None or arg.dtype == x.dtype
            ],
        )
        try:
            await asyncio.gather(written, sums)
        except Exception as error:  # storage raises many kinds of errors
            if (known := known_failure(error, infos[0].parent_dir)) is not None:
                raise known from error
            raise

    def _to_host(
        self, data: Sequence[Any], infos: Infos, args: Sequence[ocp.SaveArgs]
    ) -> list[replica_slices.ReplicaSlices]:
        ours = [i for i, x in enumerate(data) if isinstance(x, MpmdArray)]
        theirs = [i for i, x in enumerate(data) if not isinstance(x, MpmdArray)]
        leaves = [
            WrittenLeaf(data[i].shape, data[i].dtype.itemsize, data[i].mpmd_sharding, args[i].chunk_byte_size)
            for i in ours
        ]
        plans = plan_writing(tuple(leaves))
        started = [start_copies(data[i], plan) for i, plan in zip(ours, plans, strict=True)]
        copied = replica_slices.transfer_arrays_to_host(
            [data[i] for i in theirs],
            self._replica_id,
            self._use_replica_parallel,
            self._min_slice_bytes_for_replica_parallel,
            self._max_replicas_for_replica_parallel,
            enable_pinned_host_transfer=infos[0].enable_pinned_host_transfer,
        )
        on_host = dict(zip(theirs, copied, strict=True))
        for i, pieces, plan in zip(ours, started, plans, strict=True):
            on_host[i] = _chunks_on_host(data[i], pieces, plan)
        return [on_host[i] for i in range(len(data))]

    async def deserialize(self, infos: Infos, args: Sequence[ocp.RestoreArgs] | None = None) -> Any:
        """Reads arrays that go to an `MpmdSharding`, or only to other processes (Orbax 0.12 makes no array of these).
        The previous handler reads the rest.
        """
        args = args or [ocp.RestoreArgs()] * len(infos)
        has_file = not self.gives_numpy or (infos[0].parent_dir / "_sharding").exists()
        shardings = [getattr(arg, "sharding", None) for arg in args]
        ours = [i for i, s in enumerate(shardings) if _is_ours(s) or (s is None and not has_file)]
        theirs = [i for i in range(len(args)) if i not in set(ours)]
        results: dict[int, object] = {}
        if theirs:
            found = await super().deserialize([infos[i] for i in theirs], [args[i] for i in theirs])
            results = dict(zip(theirs, found, strict=True))
        if ours:
            found = await self._read([infos[i] for i in ours], [args[i] for i in ours], infos)
            results |= zip(ours, found, strict=True)
        return [results[i] for i in range(len(args))]

    async def _read(self, infos: Sequence[Any], args: Sequence[Any], every: Sequence[Any]) -> list[object]:
        """Reads some leaves; `every` leaf of the call is the same in all processes, which `infos` need not be."""
        info = infos[0]
        await asyncio.gather(*(info.await_path_creation() for info in infos))
        extras = await asyncio.to_thread(stored.extras, info.parent_dir)
        here = stored.Checkpoint(
            info.parent_dir,
            item=None,
            step=None,
            ocdbt=bool(info.is_ocdbt_checkpoint),
            format="zarr3" if info.use_zarr3 else "zarr",
            fill_missing=not info.raise_array_data_missing_error,
            leaves=(),
            metadata_key=self._metadata_key,
        )
        wanted = [
            (stored.Leaf((Key(info.name),), "jax.Array", extra=extras.get(info.name)), _request(info.name, arg))
            for info, arg in zip(infos, args, strict=True)
        ]
        if (call := meetings.call) is not None:
            number = await asyncio.to_thread(identity, here, [(info.name,) for info in every])
            call.about["the checkpoint"], call.place_read = f"as {number:08x}", str(info.parent_dir)
        return await read_requests(here, wanted, Reads(), getattr(info.byte_limiter, "max_bytes", None))


def _is_ours(sharding: object) -> bool:
    is_mpmd = isinstance(sharding, MpmdSharding)
    return is_mpmd or (isinstance(sharding, jax.sharding.Sharding) and not sharding.addressable_devices)


def _request(name: str, arg: Any) -> Request:
    shape = arg.shape if arg.global_shape is None else arg.global_shape
    return Request(name, None if shape is None else tuple(shape), arg.dtype, arg.sharding, strict=arg.strict)


def _chunks_on_host(array: MpmdArray, pieces: Sequence[HostCopy], plan: Writing) -> replica_slices.ReplicaSlices:
    """Returns the part of an array that this process writes, chunk by chunk, without another copy."""
    slices = []
    for piece in pieces:
        data = np.asarray(piece.data)
        for chunk in piece.box.grid(plan.chunk_shape):
            view = np.asarray(data[chunk.relative_to(piece.held).slices])
            slices.append(replica_slices.ReplicaSlice(chunk.slices, view, None))
    return replica_slices.ReplicaSlices(
        global_shape=array.shape,
        local_shape=plan.chunk_shape,
        sharding=array.mpmd_sharding.group_sharding(array.mpmd_sharding.groups[0]),
        dtype=array.dtype,
        is_on_host=True,
        replica_slices=slices,
    )


def fault_of_array(array: jax.Array | np.ndarray) -> str | None:
    """Returns the reason why an array cannot be saved; None if it can."""
    what = type_text(array.shape, array.dtype)
    if not isinstance(array, np.ndarray) and array.is_deleted():
        return f"{what} has been deleted, or donated to a step: save what the step returned"
    if isinstance(array, MpmdArray) and array.mpmd_sharding.local_groups and not array.is_partially_addressable:
        return f"{what} was made without the arrays of this process"
    if (fault := stored.fault_of_type(array.shape, array.dtype)) is not None:
        return fault
    if jax.process_count() > 1 and is_plain(array) and array.is_fully_addressable:
        return (
            f"{what} is a jax.Array of process {jax.process_index()} alone, and others have their own; "
            "make it an MpmdArray, a global array, or a numpy array (of which process 0's is saved)"
        )
    return None


def _check_savable(values: Sequence[jax.Array], infos: Infos) -> None:
    named = [(info.name, fault_of_array(value)) for value, info in zip(values, infos, strict=True)]
    if faults := [f"  {name}: {fault}" for name, fault in named if fault is not None]:
        raise ReshardError("the tree cannot be saved:\n" + "\n".join(faults))


def all_processes() -> ocp.options.MultiprocessingOptions:
    """Names the processes. Then Orbax waits for them with a time limit, and without a computation on their devices."""
    several = set(range(jax.process_count())) if jax.process_count() > 1 else None
    return ocp.options.MultiprocessingOptions(active_processes=several)


def nbytes_written() -> int:
    """Returns the bytes that TensorStore has written to files so far in this process."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_written")
    return sum(value.get("value", 0) for metric in metrics for value in metric["values"])


def write_tree(folder: File, tree: PyTree, *, use_zarr3: bool, use_compression: bool) -> None:
    """Writes a checkpoint with bounded memory and returns when it is finished."""
    processes = all_processes()
    # A limiter waits for less than its bound; Orbax writes a jax.Array in units of a shard.
    largest = max((x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if is_plain(x)), default=0)
    handler = ocp.BasePyTreeCheckpointHandler(
        save_concurrent_bytes=max(IN_FLIGHT_NBYTES, largest + 1), use_zarr3=use_zarr3, multiprocessing_options=processes
    )
    args = None if use_compression else jax.tree.map(lambda _: _Uncompressed(), tree)
    with ocp.Checkpointer(handler, multiprocessing_options=processes) as checkpointer:
        checkpointer.save(folder, args=BasePyTreeSaveArgs(tree, args))


def register() -> None:
    """Makes Orbax's own checkpointers take MpmdArrays. A second call does nothing."""
    registry = GLOBAL_TYPE_HANDLER_REGISTRY
    before = registry.get(jax.Array)
    if isinstance(before, MpmdLeaves):
        return
    handler = _beside(before)
    registry.add(jax.Array, handler, func=lambda kind: issubclass(kind, jax.Array), override=True, ignore_warnings=True)
    _let_standard_handler_describe()
    _let_trees_be_compared()
    orbax_calls.register()
    _let_v1_know()
    if hasattr(asyncio_utils, "_run_sync_via_new_loop"):
        asyncio_utils._run_sync_via_new_loop = event_loops.run


def _beside(before: object) -> MpmdLeaves:
    """Returns a handler that works like `before`, with its options and store of metadata, and knows MpmdArrays too."""
    bases = (MpmdLeaves,) if type(before) is ArrayHandler else (MpmdLeaves, type(before))
    kind = type("MpmdArrayHandler", bases, {})
    handler = kind.__new__(kind)
    vars(handler).update(vars(before))
    return handler


def _described(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: abstract(leaf) if isinstance(leaf, MpmdArray) else leaf, tree)


def _let_v1_know() -> None:
    """Puts our handler inside Orbax's own for `jax.Array`, in the table of classes that Orbax's v1 makes handlers from.

    With the documented way, a registry in an `ocp.Context`, each user would have to write it around each call.
    """
    registry, arrays = in_v1("_src.serialization.registry"), in_v1("_src.serialization.array_leaf_handler")
    table: list[Any] | None = getattr(registry, "STANDARD_TYPE_AND_ABSTRACT_TYPE_AND_TYPESTR_TO_HANDLER", None)
    base: Any = getattr(arrays, "ArrayLeafHandler", None)
    where = [i for i, entry in enumerate(table or ()) if entry[-1] is base]
    if table is None or not where:  # another release: v1 then refuses MpmdShardings
        return

    class ArrayLeafHandler(base):
        def __init__(self, **options: object):
            super().__init__(**options)
            self._handler_impl = _beside(self._handler_impl)
            self._handler_impl.gives_numpy = True  # as the older API does anyway

        async def deserialize(self, params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            params = [dataclasses.replace(p, value=_described(p.value)) for p in params]
            return await super().deserialize(params, *args, **kwargs)

    table[where[0]] = (*table[where[0]][:-1], ArrayLeafHandler)


def _let_standard_handler_describe() -> None:
    """Describes the targets of `StandardCheckpointHandler`, which makes one `jax.Array` in each array's `.sharding`."""

    @around(ocp.StandardCheckpointHandler, "restore")
    def restore_described(restore: Any, self: Any, directory: Any, item: Any = None, args: Any = None) -> Any:
        if args is not None:
            args = dataclasses.replace(args, item=_described(args.item))
        return restore(self, directory, _described(item), args)


def _let_trees_be_compared() -> None:
    """Checks names in the handler that all others, v1's too, read trees with. Orbax would show whole branches."""

    @around(ocp.BasePyTreeCheckpointHandler, "restore")
    def restore_compared(restore: Any, self: Any, directory: Any, args: Any = None) -> Any:
        targets = [getattr(arg, "abstract_leaf", arg) for arg in jax.tree.leaves(getattr(args, "restore_args", None))]
        if any(isinstance(getattr(_described(target), "sharding", None), MpmdSharding) for target in targets):
            leaves = jax.tree_util.tree_leaves_with_path(args.item)
            is_partial = args.partial_restore or any(leaf is ... for _, leaf in leaves)
            check_names({tree_path(keys): leaf for keys, leaf in leaves}, directory, is_partial)
        return restore(self, directory, args)
