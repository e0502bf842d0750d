"""Copies arrays to the host of every process, wherever the arrays are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import Device
from mpmd.job import joining
from mpmd.job.job import Job
from mpmd.job.notes import note_of_tree, placed_text
from mpmd.job.wires import NUMBER_BITS
from mpmd.pytrees import PyTree
from mpmd.run.routes import ValueRoute


@compat.api_boundary
def device_get(tree: PyTree) -> PyTree:
    """Copies the MpmdArrays and jax.Arrays of a pytree to the host.

    Where there are several processes, each must call it with the same tree, and each gets all values; parts that a
    process lacks come from processes that have them. (Scalars that a step returns are in every process already, and
    can be read without this call.)

    Args:
      tree: a pytree; other leaves are returned as they are.

    Returns:
      The same tree with numpy arrays. All copies are started before the first is waited for.

    Raises:
      RuntimeError: an array was deleted.
      ScheduleError: the processes have called other steps before, or with other values, or come with another tree.

    Examples:
      >>> import jax.numpy as jnp, mpmd
      >>> mpmd.device_get({"loss": jnp.float32(2.0)})["loss"] + 1
      np.float32(3.0)
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [x for _, x in with_paths]
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    job = joining.current() if arrays else None
    away = [i for i in arrays if job is not None and len(_readers(leaves[i])) < job.num_ranks]
    if job is not None and away:
        names = ["tree" + jax.tree_util.keystr(with_paths[i][0]) for i in away]
        for i, value in zip(away, _gather(job, names, [leaves[i] for i in away]), strict=True):
            leaves[i] = value
    here = [x._host_readable() if isinstance(x, MpmdArray) else x for x in leaves]
    return jax.tree.unflatten(treedef, jax.device_get(here))


def _readers(x: MpmdArray | jax.Array) -> set[int]:
    """Returns the processes that have all of an array; the answer is the same in every process."""
    if not isinstance(x, MpmdArray):
        if len({d.process_index for d in x.sharding.device_set}) == 1:
            return set(range(jax.process_count()))  # each process has one of its own
        return _having_all(x.sharding)
    sharding = x.mpmd_sharding
    by_part = [_having_all(sharding.group_sharding(part.group)) for part in sharding.parts(x.shape)]
    return set.union(*by_part) if sharding.split_axis is None else set.intersection(*by_part)


def _having_all(sharding: jax.sharding.Sharding) -> set[int]:
    """Returns the processes that have all of an array with this JAX sharding."""
    processes = {d.process_index for d in sharding.device_set}
    return processes if len(processes) == 1 or sharding.is_fully_replicated else set()


def _gather(job: Job, names: Sequence[str], leaves: Sequence[jax.Array]) -> list[jax.Array | np.ndarray]:
    """Returns each array as a numpy array or an array of this process. Sources live until all processes are done."""
    for x in leaves:
        if x.is_deleted():
            raise RuntimeError(f"device_get: {x!r:.80} has been deleted.")
    ranks = range(job.num_ranks)
    types = dict(zip(names, map(placed_text, leaves), strict=True))
    call = note_of_tree("called mpmd.device_get", job.activity.step, types, {})
    about = ", which every process must call"
    base = job.new_number(ranks, "mpmd.device_get", about, call, is_brief=True) << NUMBER_BITS
    job.calls.settle()
    with job.as_a_whole():
        arriving = _exchanged(job, leaves, base)
    values = [x if isinstance(x, MpmdArray) else x if keys.is_key(x.dtype) else np.asarray(x) for x in arriving]
    job.exchange("finishing device_get", "", ranks)
    return values


def _exchanged(job: Job, leaves: Sequence[jax.Array], base: int) -> list[jax.Array | np.ndarray]:
    """Returns each array, fetched to this process if any part is missing."""
    first_device: dict[int, Device] = {}
    for device in sorted(jax.devices(), key=lambda d: d.id):
        first_device.setdefault(device.process_index, device)
    count, arriving = 0, []
    for x in leaves:
        arrived: list[Any] = []
        for source in _sources(x):
            value = source.array
            for rank in range(job.num_ranks):
                if rank in source.readers:
                    continue
                mesh = Mesh(np.array([first_device[rank]]), ("device",))
                route = ValueRoute(
                    job, source.sharding, NamedSharding(mesh, PartitionSpec()), source.aval, count, False,
                    f"device_get of {x!r:.60}",
                )  # fmt: skip
                count += route.share.num_pieces
                if rank == job.rank:
                    value = route.carry(source.array, base)
                elif route.share.sends:
                    route.carry(source.array, base)
            arrived.append(value)
        arriving.append(x if job.rank in _readers(x) else _joined(x, arrived))
    return arriving


class _Source(NamedTuple):
    """An array that is sent to the processes that lack some of it."""

    array: jax.Array | None  # None in a process that has no shard of it
    sharding: jax.sharding.Sharding
    aval: jax.ShapeDtypeStruct
    readers: set[int]  # the processes that have all of it


def _sources(x: jax.Array) -> list[_Source]:
    """Returns the arrays to send for `x`: the array of its lowest group, or each piece of a split array."""
    if not isinstance(x, MpmdArray):
        return [_Source(x, x.sharding, jax.ShapeDtypeStruct(x.shape, x.dtype), _readers(x))]
    sharding, is_split = x.mpmd_sharding, x.mpmd_sharding.split_axis is not None
    sources: list[_Source] = []
    for part in sharding.parts(x.shape) if is_split else sharding.parts(x.shape)[:1]:
        held = sharding.group_sharding(part.group)
        aval = jax.ShapeDtypeStruct(part.shape, x.dtype)
        sources.append(_Source(x._arrays.get(part.key), held, aval, _having_all(held) if is_split else _readers(x)))
    return sources


def _joined(x: Any, arrived: Sequence[Any]) -> Any:
    """Joins the arrived pieces of an array."""
    if len(arrived) == 1:
        return arrived[0]
    axis = x.mpmd_sharding.split_axis
    if keys.is_key(x.dtype):
        data = np.concatenate([np.asarray(keys.to_data(piece)) for piece in arrived], axis)
        return keys.from_data(jax.numpy.asarray(data), x.dtype)
    return np.concatenate([np.asarray(piece) for piece in arrived], axis)
