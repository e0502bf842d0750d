"""One logical array that exists in one or more groups.

An `MpmdArray` is an argument or a result of a step. Per group of this process it holds one `jax.Array` (one for each
range of rows, if the array is split over groups); for other groups it holds only shape, dtype and sharding. Where this
process can read it, it behaves like the array it holds.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mpmd import _jax_compat as compat
from mpmd._jax_compat import explain_mismatches, register_array_type, typed_as
from mpmd.arrays import reading
from mpmd.arrays.delegation import ReadableArray
from mpmd.arrays.group_arrays import Arrays, arrays_by_key, check_arrays, whole_shape
from mpmd.arrays.mesh import Device
from mpmd.arrays.sharding import MpmdSharding


@dataclasses.dataclass(frozen=True)
class MpmdShard:
    """The part of an `MpmdArray` on one device.

    Shaped like `jax.Shard`, with `group` in addition. Over all groups and processes, the shards of one index have the
    replica ids 0, 1, 2, …; number 0 is in the lowest group that has this index. `data` is None in other processes.
    """

    device: Device
    index: tuple[slice, ...]
    replica_id: int
    group: int
    data: Any = dataclasses.field(repr=False)  # a jax.Array; None in other processes


class MpmdArray(ReadableArray):
    """One logical array that exists in one or more groups: each has all of it, or its own part, sharded alike.

    It is a pytree leaf. A process without a shard knows its shape, dtype and sharding; reading it there raises a
    RuntimeError that names its groups. Reading an array that is split over groups joins its pieces, in the lowest group
    of this process or on the host; a single row comes from the group that has it.

    Args:
        arrays: the arrays of this process's groups, in any order: each finds its group by its mesh. If groups share
            devices, equal meshes are filled in ascending order; or pass a mapping from group to array. Empty if this
            process has none of `mpmd_sharding.mesh_ids`, or should hold nothing of the array: then no step takes it
            here. For a split array: one array for each range, a group's ranges in the order of their rows, or a
            mapping from (start, stop) to array.
        mpmd_sharding: the groups of the array, and its sharding in them.
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

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_committed",
        "_dtype",
        "_gone",
        "_made_by",
        "_mpmd_sharding",
        "_shape",
        "_weak_type",
    )

    _arrays: dict[Any, jax.Array]  # by `Part.key`
    _mpmd_sharding: MpmdSharding
    _shape: tuple[int, ...]
    _dtype: np.dtype
    _weak_type: bool
    _gone: str | None
    _committed: bool
    _made_by: int  # numbers the call and the result, alike in all processes of a job; 0 for other arrays

    @compat.api_boundary
    def __init__(
        self,
        arrays: Arrays,
        mpmd_sharding: MpmdSharding,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
    ):
        full_shape = whole_shape(arrays, mpmd_sharding, shape)
        if full_shape is None or (dtype is None and not arrays):
            raise ValueError(
                f"MpmdArray: this process holds no shard ({mpmd_sharding!r}), so shape and dtype must be given; "
                f"received shape={shape}, dtype={dtype}."
            )
        by_key = arrays_by_key(arrays, mpmd_sharding, full_shape)
        first = next(iter(by_key.values()), None)
        self._arrays = by_key
        self._mpmd_sharding = mpmd_sharding
        self._shape = full_shape
        self._dtype = _canonical_dtype(dtype) if dtype is not None else first.dtype  # pyright: ignore[reportOptionalMemberAccess]
        self._weak_type = getattr(first, "weak_type", False)
        self._gone = None
        self._committed = True
        self._made_by = 0
        check_arrays(by_key, mpmd_sharding, full_shape, self._dtype)

    @classmethod
    def _unchecked(
        cls,
        arrays: dict[Any, jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: tuple[int, ...],
        dtype: np.dtype,
        weak_type: bool = False,
        committed: bool = True,
        made_by: int = 0,
    ) -> Self:
        """Makes an array without checks. `arrays` has keys (`Part.key`) in ascending order and is kept, not copied."""
        self = cls.__new__(cls)
        self._arrays = arrays
        self._mpmd_sharding = mpmd_sharding
        self._shape = shape
        self._dtype = dtype
        self._weak_type = weak_type
        self._gone = None
        self._committed = committed
        self._made_by = made_by
        return self

    # Properties known in every process.

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype:
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

    # Its placement.

    @property
    def mpmd_sharding(self) -> MpmdSharding:
        return self._mpmd_sharding

    @property
    def spec(self) -> PartitionSpec:
        """How each group shards the array."""
        return self._mpmd_sharding.spec

    @property
    def sharding(self) -> NamedSharding:
        """Over all devices of `mpmd_idxs`, alike in every process. (`MpmdSharding.group_sharding`: in one group.)"""
        return self._mpmd_sharding.sharding

    @property
    def device(self) -> Device | NamedSharding:
        """The device if there is only one, else the sharding. Like `jax.Array.device`."""
        devices = self.devices()
        return next(iter(devices)) if len(devices) == 1 else self.sharding

    @property
    def aval(self) -> compat.Aval:
        """The type that JAX sees when this process reads the array: on Explicit axes, with one group's sharding."""
        return typed_as(self, self._group_sharding())

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The groups that hold the array, ascending."""
        return tuple(sorted(self._mpmd_sharding.mesh_ids))

    @property
    def is_mpmd_replicated(self) -> bool:
        """Whether more than one group has all of the array."""
        return len(self._mpmd_sharding.mesh_ids) > 1 and not self._is_split

    @property
    def is_partially_addressable(self) -> bool:
        """Whether this process has a shard of the array."""
        return bool(self._arrays) if self._gone is None else bool(self._mpmd_sharding.local_groups)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has every shard of the array, in every group."""
        return len(self._arrays) == len(self._mpmd_sharding.parts(self._shape)) and all(
            array.is_fully_addressable for array in self._arrays.values()
        )

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device that holds the array has all of it."""
        return self._mpmd_sharding.is_fully_replicated

    @property
    def committed(self) -> bool:
        """Whether the array's place was chosen. If not (zeros that a step made without operands), a step that takes the
        array puts it where it reads it, as `jax.jit` does with uncommitted arrays.
        """
        return self._committed

    def devices(self) -> set[Device]:
        """Returns the devices of all groups that hold the array, of other processes too."""
        return set(self._mpmd_sharding.device_set)

    # The arrays of this process.

    @property
    def _is_split(self) -> bool:
        return self._mpmd_sharding.split_axis is not None

    @property
    def pieces(self) -> dict[tuple[int, int], jax.Array]:
        """The pieces of a split array in this process, by the range (start, stop) of their rows; else empty."""
        self._check_not_gone()
        return {key: array for key, array in self._arrays.items() if isinstance(key, tuple)}

    @compat.api_boundary
    def array_in(self, group: int) -> jax.Array:
        """Returns the array of one group, which must belong to this process.

        Raises:
            RuntimeError: the array is not in that group, or not in this process, or deleted, or a split array has
                several ranges there (see `pieces`).
        """
        key: Any = group
        if self._is_split:
            mine = [part.key for part in self._mpmd_sharding.parts(self._shape) if part.group == group]
            if len(mine) > 1:
                raise RuntimeError(
                    f"{self!r} has {len(mine)} ranges in group {group}; use .pieces, which has them all."
                )
            key = mine[0] if mine else None
        array = self._arrays.get(key)
        if array is None or self._gone is not None:
            self._check_not_gone()
            raise RuntimeError(f"{self!r} has no shard of group {group} in process {jax.process_index()}.")
        return array

    @property
    def to_mpmd_local_array(self) -> jax.Array | list[jax.Array] | None:
        """Returns this process's array, a list of them for several groups or ranges, None if there is none."""
        self._check_not_gone()
        arrays = list(self._arrays.values())
        return arrays[0] if len(arrays) == 1 else arrays or None

    @property
    def first_mpmd_replica(self) -> jax.Array | None:
        """The array of the lowest group that holds it, if that group belongs to this process, else None.

        Also None for a split array: no group has all of it.
        """
        self._check_not_gone()
        return self._arrays.get(self._mpmd_sharding.groups[0])

    @property
    def global_shards(self) -> list[MpmdShard]:
        """The parts on all devices, in the same order in every process; parts in other processes have no data."""
        self._check_not_gone()
        data = {(key, s.device): s.data for key, array in self._arrays.items() for s in array.addressable_shards}
        placed = self._mpmd_sharding.shards(self._shape)
        return [MpmdShard(p.device, p.index, p.replica_id, p.group, data.get((p.key, p.device))) for p in placed]

    @property
    def addressable_shards(self) -> list[MpmdShard]:
        """The parts on this process's devices."""
        return [shard for shard in self.global_shards if shard.data is not None]

    def addressable_data(self, index: int) -> jax.Array:
        """Returns the part of `addressable_shards[index]`, as an array on its device."""
        return self.addressable_shards[index].data

    def _group_sharding(self) -> NamedSharding:
        """Returns the sharding in the group that is read here, or in the lowest group if this process has none."""
        return self._mpmd_sharding.group_sharding(self._lowest_group())

    def _lowest_group(self) -> int:
        if not self._is_split:
            return next(iter(self._arrays), self._mpmd_sharding.groups[0])  # pyright: ignore[reportReturnType]
        return next(iter(self._mpmd_sharding.local_groups), self._mpmd_sharding.groups[0])

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
        """Marks the array as deleted without deleting buffers: a step took them over."""
        if self._gone is None:
            self._gone = "donated"
            self._arrays = {}

    def is_deleted(self) -> bool:
        if self._gone is not None:
            return True
        return any(array.is_deleted() for array in self._arrays.values())

    def copy(self) -> Self:
        """Returns the same values in new buffers, in the same groups."""
        self._check_not_gone()
        copies: dict[int, jax.Array] = {}  # groups on one mesh may share an array
        for array in self._arrays.values():
            if id(array) not in copies:
                copies[id(array)] = jax.device_put(array, array.sharding, may_alias=False)
        arrays = {key: copies[id(array)] for key, array in self._arrays.items()}
        return self._unchecked(arrays, self._mpmd_sharding, self._shape, self._dtype, self._weak_type, self._committed)

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: each process has just its own shards.\n"
            "  For its values, which can be, use numpy.asarray(x), or mpmd.device_get(tree) for a whole tree."
        )

    # Reading it as an array.

    def _check_not_gone(self, name: str = "") -> None:
        """Raises an error if the array was donated or deleted; `name` is the user's name for it."""
        if self.is_deleted():
            what = "was donated to a step, which reused its memory; use the step's output"
            begin = f"{name}: " if name else ""
            raise RuntimeError(f"{begin}{self!r} {what if self._gone == 'donated' else 'has been deleted'}.")

    def _held(self) -> jax.Array:
        """Returns the array of the lowest local group; raises the user's error if this process has none."""
        self._check_not_gone()
        if not self._arrays:
            raise reading.unreadable(self, "no shard of it", self._mpmd_sharding.groups)
        return reading.joined(self, self._lowest_group()) if self._is_split else next(iter(self._arrays.values()))

    def _readable(self) -> jax.Array:
        """Returns `_held` as JAX computes with it."""
        found = self._held()
        return found if not self._weak_type or found.weak_type else reading.as_weak(found)

    def _host_readable(self) -> jax.Array | np.ndarray:
        """Returns an array with all its values in this process."""
        self._check_not_gone()
        return reading.on_host(self)

    def __getitem__(self, index: object) -> jax.Array:
        self._check_not_gone()
        if self._is_split and (found := reading.row(self, index)) is not None:
            return found
        return self._readable()[index]

    def __iter__(self) -> Iterator[jax.Array]:
        if self.ndim and self._mpmd_sharding.split_axis == 0:
            return (self[row] for row in range(self._shape[0]))
        return iter(self._readable())

    def copy_to_host_async(self) -> None:
        """Starts the copy to the host of the arrays that this process reads."""
        self._check_not_gone()
        for array in self._arrays.values() if self._is_split else [self._held()]:
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        """Returns whether the arrays that this process reads have been computed."""
        self._check_not_gone()
        arrays: Any = self._arrays.values() if self._is_split else [self._held()]
        return all(array.is_ready() for array in arrays)

    def _operands(self, other: object) -> tuple[jax.Array, object]:
        """Returns both sides of an operator as arrays of one group, the lowest that has both."""
        self._check_not_gone()
        return reading.operands(self, other)

    def __str__(self) -> str:
        return str(self._host_readable()) if reading.is_here(self) else repr(self)

    def __repr__(self) -> str:
        sharding = self._mpmd_sharding
        name = self._dtype.name if hasattr(self._dtype, "name") else str(self._dtype)
        if self.is_deleted():
            here = f", {self._gone or 'deleted'}"
        else:
            here = "" if self._arrays else ", not in this process"
        shape = ",".join(map(str, self._shape))
        return f"MpmdArray({reading.few_values(self)}{name}[{shape}], {sharding.summary}{here})"


register_array_type(
    MpmdArray,
    MpmdArray.__jax_array__,
    MpmdArray._group_sharding,
    lambda x, *places: reading.mismatch(x.mpmd_sharding.mpmd_mesh, *places),
)
explain_mismatches(reading.mismatch_of_groups)


def _canonical_dtype(dtype: Any) -> np.dtype:
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
