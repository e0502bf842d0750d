"""Reads an `MpmdArray` as one array: the array of a group, or the joined pieces of a split array."""

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mpmd._jax_compat import Tracer, no_mesh, trace_state_clean
from mpmd.arrays.delegation import is_plain
from mpmd.arrays.mesh import Device, MpmdMesh, groups_text, meshes_in_use
from scheduler.base.texts import counted

Array = Any  # an MpmdArray, which is defined on top of this module
Devices = Collection[Device] | int  # or their number


def is_here(x: Array) -> bool:
    """Returns whether this process has every value."""
    if x.is_deleted():
        return False
    readable = [_is_readable(array) for array in x._arrays.values()]
    if x._is_split:
        return all(readable) and len(readable) == len(x.mpmd_sharding.parts(x.shape))
    return any(readable)


def _is_readable(array: jax.Array) -> bool:
    return array.is_fully_addressable or array.is_fully_replicated


def as_weak(x: jax.Array) -> jax.Array:
    """Returns the array with a weak type, on the same devices."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    x = x if x.dtype == dtype else x.astype(dtype)  # as JAX does with 64 bits outside of `jax_enable_x64`
    return _weakly(x.shape, dtype, x.sharding if x.committed else None)(x)  # pyright: ignore[reportAttributeAccessIssue]


@functools.lru_cache(maxsize=256)
def _weakly(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None) -> Callable[[jax.Array], jax.Array]:
    like = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=True)
    # Without the mesh of the user's context, whose devices may be others.
    with no_mesh() if trace_state_clean() else contextlib.nullcontext():
        return jax.jit(lambda x: x).lower(like).compile()


def on_host(x: Array) -> jax.Array | np.ndarray:
    """Returns the values for numpy: an array of one group, or the pieces, joined on the host.

    Raises:
        RuntimeError: this process lacks some of them.
    """
    if not x._arrays:
        return x._readable()
    if not is_here(x):
        raise unreadable(x, "just a part of it")
    if not x._is_split:
        return next(array for array in x._arrays.values() if _is_readable(array))
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x._readable()
    x.copy_to_host_async()
    return np.concatenate([np.asarray(piece) for piece in x.pieces.values()], x.mpmd_sharding.split_axis)


def joined(x: Array, group: int) -> jax.Array:
    """Returns a split array as a whole one in one group; its pieces must be in this process, and are copied there."""
    if not x.is_fully_addressable:
        raise unreadable(x, "just a part of it")
    axis, target, pieces = x.mpmd_sharding.split_axis, x.mpmd_sharding.group_sharding(group), list(x.pieces.values())
    entries = list(target.spec)
    if axis < len(entries):
        entries[axis] = None  # a piece may have too few rows for the axes that shard them
    pieces = jax.device_put(pieces, NamedSharding(target.mesh, PartitionSpec(*entries)))
    return jax.device_put(jnp.concatenate(pieces, axis) if len(pieces) > 1 else pieces[0], target)


def row(x: Array, index: Any) -> jax.Array | None:
    """Returns one row of a split array from its piece, if the index selects one row; else None.

    Raises:
        IndexError: there is no such row.
        RuntimeError: another process has it.
    """
    axis, entries = x.mpmd_sharding.split_axis, index if isinstance(index, tuple) else (index,)
    if not axis < len(entries) <= x.ndim or not all(_is_basic(entry) for entry in entries):
        return None
    if isinstance(entries[axis], slice):
        return None
    wanted, num_rows = operator.index(entries[axis]), x.shape[axis]
    if not -num_rows <= wanted < num_rows:
        raise IndexError(
            f"index {wanted} is out of bounds for axis {axis} of {x!r}, which has {counted(num_rows, 'row')}."
        )
    wanted %= num_rows
    held = next(r for r in x.mpmd_sharding.ranges(num_rows) if r.start <= wanted < r.stop)
    piece = x._arrays.get((held.start, held.stop))
    if piece is None:
        raise unreadable(x, f"no shard of row {wanted}", [held.group])
    return piece[(*entries[:axis], wanted - held.start, *entries[axis + 1 :])]


def _is_basic(entry: object) -> bool:
    return isinstance(entry, (int, np.integer, slice)) and not isinstance(entry, bool)


def operands(x: Array, other: Any) -> tuple[jax.Array, Any]:
    """Returns both sides of an operator as arrays of one group, the lowest that has both."""
    if isinstance(other, type(x)):
        mine = _near(x, other)
        theirs = _near(other, mine[0])
    elif is_plain(other) and not isinstance(other, Tracer) and other.committed:
        mine, theirs = _near(x, other), [other]
    else:
        return x._readable(), other
    for array in mine:
        for one in theirs:
            if array.sharding.device_set == one.sharding.device_set:
                return array, one
    mesh = x.mpmd_sharding.mpmd_mesh
    there = repr(other) if isinstance(other, type(x)) else f"an array in {_place(mesh, other.devices())}"
    raise ValueError(
        f"operands are in different groups: {x!r} and {there}.\n"
        "  Compute with them in a step (mpmd.jit), or read them first: mpmd.device_get(x), float(x)."
    )


def _near(x: Array, other: Any) -> list[jax.Array]:
    """Returns the arrays that `x` can be read as; a split one is read only in the group of the other operand."""
    if not x._is_split:
        first = x._readable()
        return [first, *x._arrays.values()]
    devices = (other._group_sharding() if isinstance(other, type(x)) else other.sharding).device_set
    near = [g for g, mesh in enumerate(x.mpmd_sharding.mpmd_mesh.groups) if set(mesh.devices.flat) == devices]
    return [joined(x, near[0] if near else x._lowest_group())]


def unreadable(x: Array, what: str, groups: Sequence[int] = ()) -> RuntimeError:
    """Returns the error for values that this process lacks, with the groups that have them."""
    where = ""
    if groups:
        processes = sorted({p for group in groups for p in x.mpmd_sharding.mpmd_mesh.processes[group]})
        on = f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
        where = f": it is in {groups_text(groups)}, on {on}"
    return RuntimeError(
        f"{x!r} cannot be read in process {jax.process_index()}, which has {what}{where}.\n"
        "  Call mpmd.device_get(x) in every process to get its values everywhere."
    )


def few_values(x: Array) -> str:
    """Returns the values of a scalar or a short vector, if readable, so that a printed tree of metrics shows them."""
    if x.ndim > 1 or x.size > 16 or jnp.issubdtype(x.dtype, jax.dtypes.extended) or not is_here(x):
        return ""
    try:
        values = np.asarray(on_host(x))
        return (np.array2string(values, separator=", ") if x.ndim else str(values)) + ", "
    except Exception:  # its computation failed; reading the array will raise the error
        return ""


def mismatch_of_groups(devices: Devices, other_devices: Devices) -> str | None:
    """Returns the error for a JAX function with arguments in several groups of a known mesh; else None."""
    if isinstance(devices, int) or isinstance(other_devices, int):
        return None
    for mesh in meshes_in_use():  # the arrays do not name their mesh
        if {frozenset(devices), frozenset(other_devices)} <= {frozenset(group.devices.flat) for group in mesh.groups}:
            return mismatch(mesh, devices, other_devices)
    return None


def mismatch(mesh: MpmdMesh, devices: Devices, other_devices: Devices) -> str:
    """Returns the error for a JAX function with arguments in several groups of a mesh."""
    return (
        f"jax.jit: the arguments are on different devices: {_place(mesh, devices)} and {_place(mesh, other_devices)}.\n"
        "  A function of JAX runs on the devices of one group. Make it a step, mpmd.jit(fun, mpmd_mesh=...), which runs"
        " where its arguments are; or bring all values to the host first, mpmd.device_get(tree)."
    )


def _place(mesh: MpmdMesh, devices: Devices) -> str:
    """Returns the groups of some devices, for messages."""
    if isinstance(devices, int):
        return f"a mesh of {devices} devices"
    try:
        return groups_text({mesh.group_of(device) for device in devices})
    except (TypeError, ValueError):  # one of them is in no group
        return ", ".join(map(str, devices))
