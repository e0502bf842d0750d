"""How Orbax writes and reads the arrays of a pipeline: the handler of their leaves.

Orbax hands each leaf of a tree to the handler of its type. The handler for `jax.Array` is replaced by one that does
the same for a `jax.Array` and knows an `MpmdArray` too, so that both are written in one go, under the same names, and
stored as the same kind: whoever reads the checkpoint sees arrays, and no groups.
"""

import asyncio
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box
from mpmd.arrays.delegation import is_plain
from mpmd.arrays.mesh import MpmdSharding
from mpmd.errors import ReshardError
from reshard._orbax_compat import (
    GLOBAL_TYPE_HANDLER_REGISTRY,
    RANDOM_KEY_IMPL,
    ArrayHandler,
    BasePyTreeSaveArgs,
    asyncio_utils,
    future,
    jax_array_handlers,
    limits,
    multihost,
    replica_slices,
    tensorstore_utils,
)
from reshard.checkpoint.abstract import abstract
from reshard.checkpoint.read_plan import Request, Target, in_storage, index_text, plan_reads
from reshard.checkpoint.write_plan import Leaf, Piece, Writing, plan_writing, start_copies
from reshard.storage import checksums, event_loops


@dataclasses.dataclass
class ReadArgs(ocp.RestoreArgs):
    """Asks for any number of parts of one stored array; the handler returns a list of them."""

    restore_type: Any = jax.Array
    requests: tuple[Request, ...] = ()
    limiter: Any = None


class MpmdLeaves(ArrayHandler):
    """Writes and reads `MpmdArray`s beside `jax.Array`s. Mixed in front of whatever handled `jax.Array` before."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Copies to the host what this process has to write; the futures that are returned write it."""
        if not any(isinstance(value, MpmdArray) for value in values):
            return await super().serialize(values, infos, args)
        args = args or [ocp.SaveArgs()] * len(values)
        _check_savable(values, infos)
        impls = [keys.implementation(value.dtype) for value in values]
        on_host = self._to_host([keys.to_data(value) for value in values], infos, args)
        write = self._write(on_host, infos, args, impls)
        return [future.CommitFutureAwaitingContractedSignals(write, name="array_type_handler")]

    async def _write(
        self, on_host: Sequence[Any], infos: Sequence[Any], args: Sequence[Any], impls: Sequence[str | None]
    ) -> None:
        # No sharding file is written: devices and groups of this run would mean nothing to another.
        written = jax_array_handlers._async_serialize_replica_slices(
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
        await asyncio.gather(written, sums)

    def _to_host(self, data: Sequence[Any], infos: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        ours = [i for i, x in enumerate(data) if isinstance(x, MpmdArray)]
        theirs = [i for i, x in enumerate(data) if not isinstance(x, MpmdArray)]
        leaves = [
            Leaf(data[i].shape, data[i].dtype.itemsize, data[i].mpmd_sharding, args[i].chunk_byte_size) for i in ours
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

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Reads what goes to an `MpmdSharding`, and leaves the rest to the handler that was there before."""
        args = args or [ocp.RestoreArgs()] * len(infos)
        requests = {i: found for i, arg in enumerate(args) if (found := _requests(arg))}
        theirs = [i for i in range(len(args)) if i not in requests]
        results: dict[int, Any] = {}
        if theirs:
            found = await super().deserialize([infos[i] for i in theirs], [args[i] for i in theirs])
            results = dict(zip(theirs, found, strict=True))
        if requests:
            impls = await _key_impls(self._array_metadata_store, infos[0].parent_dir)
            sums = await checksums.read(infos[0].parent_dir)
            reads = [
                self._read(
                    infos[i],
                    asked,
                    impls.get(infos[i].name),
                    sums.get(infos[i].name, ()),
                    getattr(args[i], "limiter", None),
                )
                for i, asked in requests.items()
            ]
            for i, values in zip(requests, await _all(reads), strict=True):
                results[i] = values if isinstance(args[i], ReadArgs) else values[0]
        return [results[i] for i in range(len(args))]

    async def _read(
        self, info: Any, requests: Sequence[Request], impl: str | None, sums: Sequence[tuple[Box, int]], limiter: Any
    ) -> list[Any]:
        await info.await_path_creation()
        limiter = limiter or info.byte_limiter

        @functools.cache
        def opened() -> Any:
            spec = tensorstore_utils.build_array_read_spec(
                info,
                use_ocdbt=info.is_ocdbt_checkpoint,
                metadata_key=self._metadata_key,
                raise_array_data_missing_error=info.raise_array_data_missing_error,
            ).json
            return ts.open(ts.Spec(spec), open=True, context=info.ts_context)

        if any(request.shape is None or request.dtype is None for request in requests):
            stored = await opened()
            requests = [request.completed(stored.shape, stored.dtype.numpy_dtype, impl) for request in requests]
        targets = [Target(info.name, request, impl) for request in requests]
        if not any(target.boxes for target in targets):
            return [target.finish() for target in targets]  # this process needs nothing of it: it is not even opened
        stored = await opened()
        for target in targets:
            target.check(stored.shape)

        async def read(box: Box, wanted: Sequence[Box]) -> None:
            nbytes = box.nbytes(stored.dtype.numpy_dtype.itemsize)
            async with limits.reserved_bytes(limiter, _reservable(limiter, nbytes)):
                data = await _read_box(stored, box, f"{info.parent_dir / info.name}")
                puts = [asyncio.to_thread(target.put, box, wanted, data) for target in targets]
                bad, *_ = await asyncio.gather(asyncio.to_thread(checksums.damaged, data, box, sums), *puts)
                if bad is not None:
                    raise ReshardError(
                        f"{info.parent_dir / info.name}: the checkpoint is damaged, {index_text(bad.slices)} of this "
                        "array is not what was written there (its checksum differs)."
                    )

        boxes = [in_storage(box, target.request.index) for target in targets for box in target.boxes.values()]
        await _all([read(r.box, r.wanted) for r in plan_reads(boxes, stored.chunk_layout.read_chunk_template.shape)])
        return [target.finish() for target in targets]


async def _all(coroutines: Iterable[Any]) -> list[Any]:
    """The results of all, when none is running any more; then the first error, if there is one."""
    found = await asyncio.gather(*coroutines, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def _requests(arg: Any) -> tuple[Request, ...]:
    if isinstance(arg, ReadArgs):
        return arg.requests
    sharding = getattr(arg, "sharding", None)
    if not isinstance(sharding, MpmdSharding):
        return ()
    shape = None if arg.global_shape is None else tuple(arg.global_shape)
    return (Request(shape, arg.dtype, sharding, strict=arg.strict),)


def byte_limiter(nbytes: int) -> Any:
    """Bounds the bytes of reads in flight."""
    return limits.get_byte_limiter(nbytes)


def _reservable(limiter: Any, nbytes: int) -> int:
    """A limiter refuses to wait for more than it has; a larger read goes alone."""
    most = getattr(limiter, "max_bytes", None)
    return nbytes if most is None else min(nbytes, most - 1)


async def _read_box(stored: Any, box: Box, name: str) -> np.ndarray:
    """A box of a stored array; zeros where the array ends before the box does."""
    there = box & Box.whole(stored.shape)
    try:
        if there == box:
            return await stored[box.slices].read()
        data = np.zeros(box.shape, stored.dtype.numpy_dtype)
        if there.size:
            data[there.relative_to(box).slices] = await stored[there.slices].read()
        return data
    except Exception as error:  # whatever a damaged file makes the storage raise
        raise ReshardError(
            f"{name}: the checkpoint is damaged, {index_text(box.slices)} of this array cannot be read: "
            f"{first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """What an error says, without the specifications that storage errors repeat: ` [tensorstore_spec='…']`."""
    text = re.split(r" \[[a-z_ ]+=", str(error))[0].strip() or type(error).__name__
    return text.splitlines()[0]


def key_impls(directory: Any) -> dict[str, str]:
    """Which stored arrays are the data of typed keys, and of which implementation."""
    handler = GLOBAL_TYPE_HANDLER_REGISTRY.get(jax.Array)
    return asyncio_utils.run_sync(_key_impls(getattr(handler, "_array_metadata_store", None), directory))


async def _key_impls(store: Any, directory: Any) -> dict[str, str]:
    by_process = await store.read(directory) if store else None
    if not isinstance(by_process, dict):
        return {}
    return {
        meta.param_name: meta.ext_metadata[RANDOM_KEY_IMPL]
        for metas in by_process.values()
        for meta in metas
        if isinstance(meta.ext_metadata, dict) and RANDOM_KEY_IMPL in meta.ext_metadata
    }


def _chunks_on_host(array: MpmdArray, pieces: Sequence[Piece], plan: Writing) -> Any:
    """What this process writes of an array, chunk by chunk, without another copy."""
    slices = []
    for piece in pieces:
        data = np.asarray(piece.data)
        for chunk in plan.chunks(piece.box):
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


def fault_of_array(array: Any) -> str | None:
    """Why an array cannot be saved; None if it can."""
    if not isinstance(array, np.ndarray) and array.is_deleted():
        return f"{type_text(array)} has been deleted, or donated to a step: save what the step returned"
    if array.size == 0:
        return f"{type_text(array)} has no elements, and Orbax stores no empty arrays"
    if jax.process_count() > 1 and is_plain(array) and array.is_fully_addressable:
        return (
            f"{type_text(array)} is a jax.Array of process {jax.process_index()} alone, and others have their own; "
            "make it an MpmdArray, a global array, or a numpy array (of which process 0's is saved)"
        )
    return None


def type_text(array: Any) -> str:
    return f"{getattr(array.dtype, 'name', array.dtype)}[{','.join(map(str, array.shape))}]"


def _check_savable(values: Sequence[Any], infos: Sequence[Any]) -> None:
    named = [(info.name, fault_of_array(value)) for value, info in zip(values, infos, strict=True)]
    if faults := [f"  {name}: {fault}" for name, fault in named if fault is not None]:
        raise ReshardError("the tree cannot be saved:\n" + "\n".join(faults))


def all_processes() -> ocp.options.MultiprocessingOptions:
    """Naming the processes makes Orbax wait for them with a time limit, and without a computation on their devices."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))


def write_tree(folder: Any, tree: Any, *, use_zarr3: bool, in_flight_nbytes: int) -> None:
    """Writes a checkpoint with bounded memory and returns when it is finished."""
    processes = all_processes()
    # A limiter waits for less than its bound; what Orbax writes at once of a jax.Array is a shard.
    largest = max((x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if is_plain(x)), default=0)
    handler = ocp.BasePyTreeCheckpointHandler(
        save_concurrent_bytes=max(in_flight_nbytes, largest + 1),
        use_zarr3=use_zarr3,
        multiprocessing_options=processes,
    )
    with ocp.Checkpointer(handler, multiprocessing_options=processes) as checkpointer:
        checkpointer.save(folder, args=BasePyTreeSaveArgs(tree))


_barriers = itertools.count()  # a barrier's name is used once; every process counts alike


def wait_for_all(folder: Any, timeout_s: int) -> None:
    """Returns when every process has come to save the same folder.

    Raises:
        TimeoutError: one has not, in time.
    """
    if jax.process_count() == 1:
        return
    come = multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
    try:
        come(key=f"reshard.save.{next(_barriers)}:{folder}", timeout_ms=timeout_s * 1000)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TimeoutError(
            f"save: after {timeout_s} s, not all processes had come to save {folder}; nothing was saved.\n  {reason}"
        ) from error


def register() -> None:
    """Makes Orbax's own checkpointers take MpmdArrays. A second call does nothing."""
    registry = GLOBAL_TYPE_HANDLER_REGISTRY
    before = registry.get(jax.Array)
    if isinstance(before, MpmdLeaves):
        return
    bases = (MpmdLeaves,) if type(before) is ArrayHandler else (MpmdLeaves, type(before))
    kind = type("MpmdArrayHandler", bases, {})
    handler = kind.__new__(kind)
    vars(handler).update(vars(before))  # the options of the handler that it replaces, and its store of metadata
    registry.add(jax.Array, handler, func=lambda kind: issubclass(kind, jax.Array), override=True, ignore_warnings=True)
    _let_standard_handler_describe()
    asyncio_utils._run_sync_via_new_loop = event_loops.run


def _let_standard_handler_describe() -> None:
    """`StandardCheckpointHandler` restores what it is given arrays for into their `.sharding`, one `jax.Array` each."""
    handler = ocp.StandardCheckpointHandler
    restore = handler.restore

    def described(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: abstract(leaf) if isinstance(leaf, MpmdArray) else leaf, tree)

    @functools.wraps(restore)
    def restore_described(self: Any, directory: Any, item: Any = None, args: Any = None) -> Any:
        if args is not None:
            args = dataclasses.replace(args, item=described(args.item))
        return restore(self, directory, described(item), args)

    handler.restore = restore_described
