"""One logical array that exists in one or more groups.

An `MpmdArray` is what a step takes and gives back: per group of this process one `jax.Array`, and for groups
elsewhere only shape, dtype and sharding. Where this process can read it, it behaves like the array it holds.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd._jax_compat import Tracer, register_array_type, typed_as
from mpmd.arrays.delegation import ReadableArray, is_plain
from mpmd.arrays.group_arrays import arrays_by_group, check_arrays
from mpmd.arrays.mesh import MpmdSharding, groups_text
from mpmd.arrays.shards import Device, PlacedShard


@dataclasses.dataclass(frozen=True)
class MpmdShard:
    """The part of an `MpmdArray` on one device.

    Shaped as `jax.Shard`, and `group` beside it. Over all groups and processes, the shards of one index have the
    replica ids 0, 1, 2, …; number 0 is in the lowest group that has this index. `data` is None in other processes.
    """

    device: Device
    index: tuple[slice, ...]
    replica_id: int
    group: int
    data: Any = dataclasses.field(repr=False)  # a jax.Array; None in other processes


class MpmdArray(ReadableArray):
    """One logical array that exists in one or more groups; each of them has all of it, sharded alike.

    A leaf for `jax.tree`. In a process without a shard of it, it has shape, dtype and sharding, and reading it
    raises a RuntimeError that says which groups have it.

    Args:
        arrays: the arrays of this process's groups, in any order: each finds its group by its mesh. Where groups share
            devices, equal meshes are filled in ascending order; or a mapping from group to array says it. Empty if this
            process has none of `mpmd_sharding.mesh_ids`.
        mpmd_sharding: where the array is.
        shape: needed if `arrays` is empty.
        dtype: needed if `arrays` is empty.

    Raises:
        ValueError: the arrays do not fit the sharding or each other.

    Examples:
        >>> from mpmd import MpmdMesh
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> sharding = MpmdSharding(mesh, 1, PartitionSpec("data"))
        >>> MpmdArray([jax.device_put(jnp.arange(4.0), sharding.group_sharding(1))], sharding)
        MpmdArray([0., 1., 2., 3.], float32[4], group 1 of 4, P('data',))
    """

    __slots__ = ("_arrays", "_committed", "_dtype", "_gone", "_mpmd_sharding", "_shape", "_weak_type")

    _arrays: dict[int, jax.Array]
    _mpmd_sharding: MpmdSharding
    _shape: tuple[int, ...]
    _dtype: Any
    _weak_type: bool
    _gone: str | None
    _committed: bool

    @compat.api_boundary
    def __init__(
        self,
        arrays: Sequence[jax.Array] | Mapping[int, jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
    ):
        by_group = arrays_by_group(arrays, mpmd_sharding)
        first = next(iter(by_group.values()), None)
        if first is None and (shape is None or dtype is None):
            raise ValueError(
                f"MpmdArray: this process holds no shard ({mpmd_sharding!r}), so shape and dtype must be given; "
                f"received shape={shape}, dtype={dtype}."
            )
        self._arrays = by_group
        self._mpmd_sharding = mpmd_sharding
        self._shape = tuple(shape) if shape is not None else first.shape  # pyright: ignore[reportOptionalMemberAccess]
        self._dtype = _canonical_dtype(dtype) if dtype is not None else first.dtype  # pyright: ignore[reportOptionalMemberAccess]
        self._weak_type = getattr(first, "weak_type", False)
        self._gone = None
        self._committed = True
        check_arrays(by_group, mpmd_sharding, self._shape, self._dtype)

    @classmethod
    def _unchecked(
        cls,
        arrays: dict[int, jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: tuple[int, ...],
        dtype: Any,
        weak_type: bool = False,
        committed: bool = True,
    ) -> Self:
        """The executor's constructor. `arrays` has its groups in ascending order and is kept, not copied."""
        self = cls.__new__(cls)
        self._arrays = arrays
        self._mpmd_sharding = mpmd_sharding
        self._shape = shape
        self._dtype = dtype
        self._weak_type = weak_type
        self._gone = None
        self._committed = committed
        return self

    # What it is, known in every process.

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def weak_type(self) -> bool:
        return self._weak_type

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the array, however many groups and devices have it."""
        return self.size * self.itemsize

    # Where it is.

    @property
    def mpmd_sharding(self) -> MpmdSharding:
        return self._mpmd_sharding

    @property
    def spec(self) -> PartitionSpec:
        """How each group shards it."""
        return self._mpmd_sharding.spec

    @property
    def sharding(self) -> NamedSharding:
        """Over all devices of `mpmd_idxs`, alike in every process. (`MpmdSharding.group_sharding`: in one group.)"""
        return self._mpmd_sharding.sharding

    @property
    def device(self) -> Any:
        """As `jax.Array.device`: the device if there is only one, else the sharding."""
        devices = self.devices()
        return next(iter(devices)) if len(devices) == 1 else self.sharding

    @property
    def aval(self) -> Any:
        """The type under which JAX sees what this process reads: with the sharding of one group, on Explicit axes."""
        return typed_as(self, self._group_sharding())

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The groups that hold it, ascending."""
        return tuple(sorted(self._mpmd_sharding.mesh_ids))

    @property
    def is_mpmd_replicated(self) -> bool:
        """Whether more than one group has it."""
        return len(self._mpmd_sharding.mesh_ids) > 1

    @property
    def is_partially_addressable(self) -> bool:
        """Whether this process has a shard of it."""
        return bool(self._arrays) if self._gone is None else bool(self._mpmd_sharding.local_groups)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has every shard of it, in every group."""
        return len(self._arrays) == len(self._mpmd_sharding.groups) and all(
            array.is_fully_addressable for array in self._arrays.values()
        )

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device that holds it has all of it."""
        return self._mpmd_sharding.is_fully_replicated

    @property
    def committed(self) -> bool:
        """Whether something says where it is. If nothing did (zeros that a step made by itself), a step that takes
        it puts it where it reads it, as `jax.jit` does with uncommitted arrays.
        """
        return self._committed

    def devices(self) -> set[Device]:
        """The devices of all groups that hold it, of other processes too."""
        return set(self._mpmd_sharding.device_set)

    # The arrays of this process.

    @compat.api_boundary
    def array_in(self, group: int) -> jax.Array:
        """The array of one group, which must be this process's.

        Raises:
            RuntimeError: the array is not in that group, or not in this process, or deleted.
        """
        array = self._arrays.get(group)
        if array is None or self._gone is not None:
            self._check_not_gone()
            raise RuntimeError(f"{self!r} has no shard of group {group} in process {jax.process_index()}.")
        return array

    @property
    def to_mpmd_local_array(self) -> jax.Array | list[jax.Array] | None:
        """This process's array, a list of them if it holds several groups', None if it holds none."""
        self._check_not_gone()
        arrays = list(self._arrays.values())
        return arrays[0] if len(arrays) == 1 else arrays or None

    @property
    def first_mpmd_replica(self) -> jax.Array | None:
        """The array of the lowest group that holds it, if that group is this process's, else None."""
        self._check_not_gone()
        return self._arrays.get(self._mpmd_sharding.groups[0])

    @property
    def global_shards(self) -> list[MpmdShard]:
        """The parts on all devices, in the same order in every process; those of other processes have no data."""
        self._check_not_gone()
        data = {(g, s.device): s.data for g, array in self._arrays.items() for s in array.addressable_shards}
        return [MpmdShard(*placed, data.get((placed.group, placed.device))) for placed in self._placed()]

    @property
    def addressable_shards(self) -> list[MpmdShard]:
        """The parts on this process's devices."""
        return [shard for shard in self.global_shards if shard.data is not None]

    def addressable_data(self, index: int) -> jax.Array:
        """The part of `addressable_shards[index]`, as an array on its device."""
        return self.addressable_shards[index].data

    def _placed(self) -> tuple[PlacedShard, ...]:
        return self._mpmd_sharding.shards(self._shape)

    def _group_sharding(self) -> NamedSharding:
        """The sharding in the group that is read here, or in the lowest if this process has none."""
        return self._mpmd_sharding.group_sharding(next(iter(self._arrays), self._mpmd_sharding.groups[0]))

    # Waiting, deleting, copying.

    def block_until_ready(self) -> Self:
        """Waits until every shard of this process has been computed."""
        self._check_not_gone()
        for array in self._arrays.values():
            array.block_until_ready()
        return self

    def delete(self) -> None:
        """Frees the buffers of this process's groups. A second call does nothing."""
        if self._gone is None:
            self._gone = "deleted"
            for array in self._arrays.values():
                if not array.is_deleted():  # groups that share a device may share the buffer
                    array.delete()

    def _consume(self) -> None:
        """Marks it as deleted without deleting buffers: a step took them over."""
        if self._gone is None:
            self._gone = "donated"
            self._arrays = {}

    def is_deleted(self) -> bool:
        if self._gone is not None:
            return True
        return any(array.is_deleted() for array in self._arrays.values())

    def copy(self) -> Self:
        """The same values in buffers of their own, in the same groups."""
        self._check_not_gone()
        copies: dict[int, jax.Array] = {}
        for array in self._arrays.values():
            if id(array) not in copies:
                copies[id(array)] = jax.device_put(array, array.sharding, may_alias=False)
        arrays = {group: copies[id(array)] for group, array in self._arrays.items()}
        return self._unchecked(arrays, self._mpmd_sharding, self._shape, self._dtype, self._weak_type, self._committed)

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled: each process has just its own shards.\n"
            "  For its values, which can be, use numpy.asarray(x), or mpmd.device_get(tree) for a whole tree."
        )

    # Reading it as an array.

    def _check_not_gone(self) -> None:
        if self.is_deleted():
            what = "was donated to a step, which reused its memory; use the step's output"
            raise RuntimeError(f"{self!r} {what if self._gone == 'donated' else 'has been deleted'}.")

    def _readable(self) -> jax.Array:
        """The array of the lowest local group; the user's error where this process has none."""
        self._check_not_gone()
        if not self._arrays:
            sharding = self._mpmd_sharding
            processes = sorted({p for group in sharding.groups for p in sharding.mpmd_mesh.processes[group]})
            raise RuntimeError(
                f"{self!r} cannot be read in process {jax.process_index()}, which has no shard of it: it is in "
                f"{groups_text(sharding.groups)}, on process{'es' if len(processes) > 1 else ''} "
                f"{', '.join(map(str, processes))}.\n"
                "  Call mpmd.device_get(x) in every process to get its values everywhere."
            )
        return next(iter(self._arrays.values()))

    def _host_readable(self) -> jax.Array:
        """An array whose every value is in this process."""
        array = self._readable()
        for array in self._arrays.values():
            if array.is_fully_addressable or array.is_fully_replicated:
                return array
        raise RuntimeError(
            f"{self!r} cannot be read in process {jax.process_index()}, which has just a part of it.\n"
            "  Call mpmd.device_get(x) in every process to get its values everywhere."
        )

    def _operands(self, other: Any) -> tuple[Any, Any]:
        """Both sides of an operator as arrays of one group, the lowest that has both."""
        mine = self._readable()
        if isinstance(other, MpmdArray):
            theirs = [other._readable(), *other._arrays.values()]
        elif is_plain(other) and not isinstance(other, Tracer) and other.committed:
            theirs = [other]
        else:
            return mine, other
        for array in self._arrays.values():
            for one in theirs:
                if array.sharding.device_set == one.sharding.device_set:
                    return array, one
        there = repr(other) if isinstance(other, MpmdArray) else f"an array in {_place(self, other.devices())}"
        raise ValueError(
            f"operands are in different groups: {self!r} and {there}.\n"
            "  Compute with them in a step (mpmd.jit), or read them first: mpmd.device_get(x), float(x)."
        )

    def __str__(self) -> str:
        return str(self._host_readable()) if self._is_here() else repr(self)

    def __repr__(self) -> str:
        sharding = self._mpmd_sharding
        name = self._dtype.name if hasattr(self._dtype, "name") else str(self._dtype)
        where = f"{groups_text(sharding.mesh_ids)} of {sharding.mpmd_mesh.num_groups}"
        memory = "" if sharding.memory_kind is None else f", {sharding.memory_kind}"
        if self.is_deleted():
            here = f", {self._gone or 'deleted'}"
        else:
            here = "" if self._arrays else ", not in this process"
        shape = ",".join(map(str, self._shape))
        return f"MpmdArray({self._few_values()}{name}[{shape}], {where}, {sharding.spec}{memory}{here})"

    def _few_values(self) -> str:
        """A scalar's or a short vector's values, where they can be read; so that a tree of metrics prints them."""
        if self.ndim > 1 or self.size > 16 or jnp.issubdtype(self._dtype, jax.dtypes.extended) or not self._is_here():
            return ""
        try:
            values = np.asarray(self._host_readable())
            return (np.array2string(values, separator=", ") if self.ndim else str(values)) + ", "
        except Exception:  # its computation failed; reading the array raises the error
            return ""

    def _is_here(self) -> bool:
        """Whether this process has every value."""
        return not self.is_deleted() and any(
            array.is_fully_addressable or array.is_fully_replicated for array in self._arrays.values()
        )


def _mismatch(x: MpmdArray, devices: Any, other_devices: Any) -> str:
    """The error where one function of JAX is called on arrays of several groups."""
    return (
        f"jax.jit: the arguments are on different devices: {_place(x, devices)} and {_place(x, other_devices)}.\n"
        "  A function of JAX runs on the devices of one group. Make it a step, mpmd.jit(fun, mpmd_mesh=...), which runs"
        " where its arguments are; or bring all values to the host first, mpmd.device_get(tree)."
    )


def _place(x: MpmdArray, devices: Any) -> str:
    """The groups of some devices, for messages."""
    if isinstance(devices, int):
        return f"a mesh of {devices} devices"
    try:
        return groups_text({x.mpmd_sharding.mpmd_mesh.group_of(device) for device in devices})
    except ValueError:  # a device of no group
        return ", ".join(map(str, devices))


register_array_type(MpmdArray, MpmdArray.__jax_array__, MpmdArray._group_sharding, _mismatch)


def _canonical_dtype(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
