"""The functions that move pytrees of arrays between layouts: their checks, and how much memory they take by default."""

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.boxes import Box, device_boxes
from mpmd.arrays.delegation import is_plain
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from mpmd.arrays.specs import without_axis
from mpmd.errors import ReshardError
from mpmd.job import joining
from mpmd.job.job import Job
from mpmd.pytrees import PyTree
from reshard.moving.execute import execute
from reshard.moving.plan import as_jax_would, describe, place_of, plan_leaves, raise_faults
from reshard.moving.progress import Progress, ProgressCallback, Stats, how_far
from reshard.moving.remote import agree
from reshard.moving.sources import delete
from reshard.places import EveryHost, HostMemory, is_local
from reshard.sizes import threshold_nbytes
from reshard.trees import broadcast, flatten, is_sharding
from scheduler.base.collector import without_collection
from scheduler.base.waiting import waiting

_last_stats: Stats | None = None


def last_stats() -> Stats:
    """Returns the measured statistics of the last reshard in this process."""
    if _last_stats is None:
        raise ValueError("nothing has been resharded in this process yet.")
    return _last_stats


@compat.api_boundary
def spmd_to_mpmd_reshard(
    mpmd_mesh: MpmdMesh,
    spmd_arrays: PyTree,
    mpmd_shardings: PyTree,
    threshold: int | str | None = None,
    donate: bool = True,
    *,
    progress: ProgressCallback | bool | None = None,
) -> PyTree:
    """Moves arrays of any mesh, or numpy arrays, into groups.

    Each device receives every byte that it lacks once; bytes that it has already stay in place. On CPU devices the
    result may be in memory that XLA does not own: the first program that gets it as a donated buffer makes a copy.

    Args:
        mpmd_mesh: the groups.
        spmd_arrays: a pytree of `jax.Array` or numpy arrays.
        mpmd_shardings: the same tree of `MpmdSharding`, or a prefix of it. An array that no group uses (`mesh_ids`
            empty) goes to group 0.
        threshold: a strict bound on the working memory of each device beyond source and target: bytes, or text such as
            `"64MiB"`. None is a third of the least free device memory; 0 is the amount that the largest array alone
            needs, so that large arrays go one at a time.
        donate: whether to free each source shard as soon as its last byte has left; the sources are deleted then.
        progress: a function of `Progress`; True for a bar on standard error; None for one if it takes long;
            False for none.

    Returns:
        The same tree of `MpmdArray`.

    Raises:
        ReshardError: names every array that cannot be moved; nothing was moved or deleted.
        RuntimeError: something failed on the way; says which sources are still valid.

    Examples:
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> w = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh.jax_mesh, PartitionSpec("data")))
        >>> spmd_to_mpmd_reshard(mesh, {"w": w}, MpmdSharding(mesh, 2, PartitionSpec("data")))
        {'w': MpmdArray(float32[8,8], group 2 of 4, P('data',))}
        >>> last_stats().bytes_moved
        0
    """

    def check(source: object, target: object) -> str | None:
        if isinstance(source, MpmdArray):
            return "is an MpmdArray already; use mpmd_to_mpmd_reshard"
        return _fault_of_target(target, mpmd_mesh)

    return _reshard(spmd_arrays, mpmd_shardings, "mpmd_shardings", check, threshold, donate, progress)


@compat.api_boundary
def mpmd_to_spmd_reshard(
    mpmd_mesh: MpmdMesh,
    mpmd_arrays: PyTree,
    spmd_shardings: PyTree,
    threshold: int | str | None = None,
    donate: bool = True,
    *,
    progress: ProgressCallback | bool | None = None,
) -> PyTree:
    """Moves arrays of groups onto any mesh, or to the host as numpy arrays (`reshard.HostMemory()`).

    The arguments and errors are those of `spmd_to_mpmd_reshard`.

    Returns:
        The same tree of `jax.Array`, or numpy arrays.
    """

    def check(source: object, target: object) -> str | None:
        if not isinstance(source, MpmdArray):
            return f"is a {type(source).__name__}, not an MpmdArray"
        if source.mpmd_sharding.mpmd_mesh != mpmd_mesh:
            return f"is on another mesh, {source.mpmd_sharding.mpmd_mesh!r}"
        if isinstance(target, MpmdSharding):
            return "goes to an MpmdSharding; use mpmd_to_mpmd_reshard"
        return None

    return _reshard(mpmd_arrays, spmd_shardings, "spmd_shardings", check, threshold, donate, progress)


@compat.api_boundary
def mpmd_to_mpmd_reshard(
    mpmd_arrays: PyTree,
    mpmd_shardings: PyTree,
    threshold: int | str | None = None,
    donate: bool = True,
    *,
    progress: ProgressCallback | bool | None = None,
) -> PyTree:
    """Moves arrays of groups to other groups, of the same mesh or another one.

    The arguments and errors are those of `spmd_to_mpmd_reshard`.

    Returns:
        The same tree of `MpmdArray`.
    """

    def check(source: object, target: object) -> str | None:
        if not isinstance(source, MpmdArray):
            return f"is a {type(source).__name__}, not an MpmdArray"
        return _fault_of_target(target, None)

    return _reshard(mpmd_arrays, mpmd_shardings, "mpmd_shardings", check, threshold, donate, progress)


def _fault_of_target(target: object, mpmd_mesh: MpmdMesh | None) -> str | None:
    if not isinstance(target, MpmdSharding):
        return f"goes to a {type(target).__name__}, not an MpmdSharding"
    if mpmd_mesh is not None and target.mpmd_mesh != mpmd_mesh:
        return f"goes to another mesh, {target.mpmd_mesh!r}"
    return None


@compat.no_mesh()
@without_collection()
def _reshard(
    tree: PyTree,
    shardings: PyTree,
    name: str,
    check: Callable[[object, object], str | None],
    threshold: int | str | None,
    donate: bool,
    progress: ProgressCallback | bool | None,
) -> PyTree:
    global _last_stats
    paths, sources, treedef = flatten(tree)
    job = joining.current()
    sources = [_on_host(source, job) for source in sources]
    targets = [
        target.replace(mesh_ids={0}) if isinstance(target, MpmdSharding) and not target.mesh_ids else target
        for target in broadcast(shardings, tree, name)
    ]
    bound = threshold_nbytes(threshold)
    faults = [
        _fault_of_source(source, job) or check(source, target) or _fault_of_place(target, job)
        for source, target in zip(sources, targets, strict=True)
    ]
    raise_faults([f"{path or 'the array'}: {fault}" for path, fault in zip(paths, faults, strict=True) if fault])
    places = [
        EveryHost(job.num_ranks) if job is not None and _is_everywhere(source) else place_of(source)
        for source in sources
    ]
    leaves = describe(paths, sources, places, targets)
    bound = default_threshold() if bound is None else bound
    # A key array that occurs twice has one object of key data, so a second move of it is noticed.
    data = {id(source): _data(source, job) for source in sources}
    if job is not None:
        bound = agree(job, leaves, bound, [data[id(source)] for source in sources])
    plan = plan_leaves(leaves, bound)
    latest: deque[Progress] = deque(maxlen=1)
    told = progress if callable(progress) else latest.append
    line = (
        contextlib.nullcontext()
        if callable(progress) or progress is False
        else waiting(lambda: how_far(latest, "reshard"), patience_s=0.0 if progress else None)
    )
    with line:
        given = [data[id(source)] for source in sources]
        moved, _last_stats = execute(plan, given, donate=donate, progress=told, job=job)
    if progress is True:
        print(latest[-1], file=sys.stderr)
    results = [
        x if x is None else keys.from_data(x, source.dtype, target)  # None: in the memory of another host
        for x, source, target in zip(moved, sources, targets, strict=True)
    ]
    for source in sources if donate else ():
        delete(source)
    return jax.tree.unflatten(treedef, results)


def _on_host(source: Any, job: Job | None) -> Any:
    """Returns a host value as JAX would have it. In a job, an array on this process's devices alone becomes one too."""
    if job is not None and is_plain(source) and source.is_fully_addressable and not source.is_deleted():
        return source if keys.is_key(source.dtype) else np.asarray(source)
    return as_jax_would(source)


def _fault_of_source(source: object, job: Job | None) -> str | None:
    if isinstance(source, np.ndarray):
        known = source.dtype == bool or (
            jnp.issubdtype(source.dtype, np.number) and source.dtype.type not in (np.longdouble, np.clongdouble)
        )
        return None if known else f"has the dtype {source.dtype}, which JAX has no arrays of"
    if not isinstance(source, jax.Array) or not hasattr(source, "is_deleted"):
        return f"is a {type(source).__name__}, not an array"
    if source.is_deleted():
        return "has been deleted"
    if not source.is_fully_addressable and job is None:
        return "has shards in other processes"
    return None


def _fault_of_place(target: Any, job: Job | None) -> str | None:
    if isinstance(target, HostMemory):
        devices = {target}
    elif is_sharding(target):
        devices = target.device_set
    else:
        return f"goes to {target!r}, which is a {type(target).__name__}, not a sharding"
    if job is not None:
        exist = all(0 <= d.process_index < job.num_ranks for d in devices)
        return None if exist else "goes to devices that do not exist"
    elsewhere = sum(not is_local(d) for d in devices)
    return f"goes to {elsewhere} devices of other processes" if elsewhere else None


def _is_everywhere(x: object) -> bool:
    """Returns whether each process has the value: as a host array, or as keys on a device of its own."""
    return isinstance(x, np.ndarray) or (is_plain(x) and x.is_fully_addressable)


def _data(source: jax.Array | np.ndarray, job: Job | None) -> jax.Array | np.ndarray:
    """Returns the data to move: the array, or the key data of typed keys, which is on the host in a job."""
    data = keys.to_data(source)
    return np.asarray(data) if job is not None and keys.is_key(source.dtype) and _is_everywhere(source) else data


def default_threshold() -> int:
    """Returns a third of the least free memory of this process's devices; CPU devices share the machine's memory."""
    devices = jax.local_devices()
    free: list[int] = []
    for device in devices:
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
        else:
            free.append(_free_host_memory() // len(devices))
    return max(min(free) // 3, 1)


def _free_host_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@compat.api_boundary
def logically_stacked(
    array: jax.Array | Sequence[jax.Array], comm_mesh: Mesh, mesh_axis_name: str, array_axis: int = 0,
    strict: bool = False,
) -> jax.Array:  # fmt: skip
    """Stacks the arrays of all groups into one, with a new axis that is sharded over the groups; moves no data.

    Args:
        array: the arrays of this process's groups: one `jax.Array`, a sequence of them, or an `MpmdArray`. If an array
            is split evenly over its groups, its pieces are stacked.
        comm_mesh: a mesh over the devices of all groups.
        mesh_axis_name: the axis of `comm_mesh` along which the groups lie.
        array_axis: where the new axis goes; a negative one counts from the end of the result's axes.
        strict: whether a spec that names `mesh_axis_name` already is an error; otherwise the name is dropped from it.

    Returns:
        An array with `comm_mesh.shape[mesh_axis_name]` slices along `array_axis`, each in its group. One program, a
        reshape, is compiled for each local device.

    Raises:
        ReshardError: the arrays do not lie on the groups of `comm_mesh` in the order of its devices, or differ in
            shape, dtype or spec.
    """
    arrays = array.to_mpmd_local_array if isinstance(array, MpmdArray) else array
    arrays = [arrays] if isinstance(arrays, jax.Array) else list(arrays or ())
    if not arrays:
        raise ReshardError("logically_stacked: this process has none of the arrays.")
    if mesh_axis_name not in comm_mesh.axis_names:
        raise ReshardError(f"logically_stacked: {mesh_axis_name!r} is not an axis of the mesh, {comm_mesh}.")
    first = arrays[0]
    placed = first.sharding
    if not isinstance(placed, NamedSharding):
        raise ReshardError("logically_stacked: the arrays need a NamedSharding.")
    named = {n for e in placed.spec for n in (e if isinstance(e, tuple) else (e,))}
    if strict and mesh_axis_name in named:
        raise ReshardError(f"logically_stacked: the spec {placed.spec} names {mesh_axis_name!r} already.")
    try:
        axis = range(first.ndim + 1)[array_axis]
    except IndexError:
        raise ReshardError(
            f"logically_stacked: array_axis is {array_axis}; the stack of arrays with {first.ndim} axes has "
            f"{first.ndim + 1}, so expected {-first.ndim - 1} to {first.ndim}."
        ) from None
    spec = without_axis(placed.spec, mesh_axis_name)
    entries = [*spec, *[None] * (first.ndim - len(spec))]
    entries.insert(axis, mesh_axis_name)
    shape = list(first.shape)
    shape.insert(axis, comm_mesh.shape[mesh_axis_name])
    sharding = NamedSharding(comm_mesh, PartitionSpec(*entries), memory_kind=placed.memory_kind)
    shards = _shards_of_stack(arrays, sharding, tuple(shape), axis)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)


def _shards_of_stack(
    arrays: Sequence[jax.Array], sharding: NamedSharding, shape: tuple[int, ...], axis: int
) -> list[jax.Array]:
    """Returns the shards of all arrays in the order of the sharding, each with the new axis and on its own device."""
    first, mesh = arrays[0], sharding.mesh
    if any((a.shape, a.dtype) != (first.shape, first.dtype) for a in arrays):
        raise ReshardError("logically_stacked: the arrays differ in shape or dtype.")
    parts = [s for a in arrays for s in a.addressable_shards]
    shards = {s.device: s for s in parts}
    if len(shards) < len(parts):
        raise ReshardError("logically_stacked: a device has shards of several of the arrays; give one for each group.")
    wanted = {d: box for d, box in device_boxes(sharding, shape).items() if is_local(d)}
    if set(wanted) != set(shards):
        raise ReshardError(
            f"logically_stacked: the arrays are on {len(shards)} devices of this process, but {mesh} has "
            f"{len(wanted)} of them; give the array of every local group."
        )
    for device, box in wanted.items():
        here = Box.from_slices(shards[device].index, first.shape)
        there = Box(*[(*ends[:axis], *ends[axis + 1 :]) for ends in (box.start, box.stop)])
        if here != there:
            raise ReshardError(
                f"logically_stacked: {device} has {here!r} of its array, but has {there!r} by {sharding.spec} of "
                f"{mesh}. All arrays need the same spec, and their meshes the devices in the order of this mesh."
            )
    return [jax.lax.expand_dims(shards[device].data, [axis]) for device in wanted]
