"""One logical array that exists in one or more groups.

An `MpmdArray` is what a step takes and gives back: per group of this process one `jax.Array`, and for groups
elsewhere just shape, dtype and sharding. Where this process can read it, it behaves like the array it holds.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpmd._jax_compat import register_array_type
from mpmd._readable import ReadableArray
from mpmd.mesh import Device, MpmdSharding, groups_text


@dataclasses.dataclass(frozen=True)
class MpmdShard:
    """The part of an `MpmdArray` on one device of this process.

    Shaped as `jax.Shard`, and `group` beside it. Over all groups and processes, exactly one shard of each index
    has `replica_id` 0; it is in the lowest group that holds the array.
    """

    device: Device
    index: tuple[slice, ...]
    replica_id: int
    group: int
    data: jax.Array = dataclasses.field(repr=False)


class MpmdArray(ReadableArray):
    """One logical array that exists in one or more groups; each of them has all of it, sharded alike.

    A leaf for `jax.tree`. In a process without a shard of it, it has shape, dtype and sharding, and reading it
    raises a RuntimeError that says which groups have it.

    Args:
        arrays: the arrays of this process's groups: a sequence in ascending order of the groups, or a mapping from
            group to array. Empty if this process has none of `mpmd_sharding.mesh_ids`.
        mpmd_sharding: where the array lies.
        shape: needed if `arrays` is empty.
        dtype: needed if `arrays` is empty.

    Raises:
        ValueError: the arrays do not fit the sharding or each other.

    Example:
        >>> from mpmd.mesh import MpmdMesh
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> sharding = MpmdSharding(mesh, 1, PartitionSpec("data"))
        >>> MpmdArray([jax.device_put(jnp.arange(4.0), sharding.group_sharding(1))], sharding)
        MpmdArray(float32[4], group 1 of 4, P('data',))
    """

    __slots__ = ("__weakref__", "_arrays", "_committed", "_dtype", "_gone", "_mpmd_sharding", "_shape", "_weak_type")

    _arrays: dict[int, jax.Array]
    _mpmd_sharding: MpmdSharding
    _shape: tuple[int, ...]
    _dtype: Any
    _weak_type: bool
    _gone: str | None
    _committed: bool

    def __init__(
        self,
        arrays: Sequence[jax.Array] | Mapping[int, jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
    ):
        by_group = _by_group(arrays, mpmd_sharding)
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
        _check_arrays(self)

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
        """The sharding inside one group: the one that is read here, or the lowest if this process has none."""
        sharding = self._mpmd_sharding
        return sharding.group_sharding(next(iter(self._arrays), sharding.groups[0]))

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
        return bool(self._arrays) if self._gone is None else bool(_local_groups(self._mpmd_sharding))

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has every shard of it, in every group."""
        return len(self._arrays) == len(self._mpmd_sharding.groups) and all(
            array.is_fully_addressable for array in self._arrays.values()
        )

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device that holds it has all of it."""
        sharding = self._mpmd_sharding
        return all(sharding.group_sharding(group).is_fully_replicated for group in sharding.groups)

    @property
    def committed(self) -> bool:
        """Whether something says where it lies. If nothing did (zeros that a step made by itself), a step that takes
        it puts it where it reads it, as `jax.jit` does with uncommitted arrays.
        """
        return self._committed

    def devices(self) -> set[Device]:
        """The devices of all groups that hold it, of other processes too."""
        sharding = self._mpmd_sharding
        return set().union(*(sharding.group_sharding(group).device_set for group in sharding.groups))

    # The arrays of this process.

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
    def addressable_shards(self) -> list[MpmdShard]:
        """The parts on this process's devices, group by group."""
        self._check_not_gone()
        sharding = self._mpmd_sharding
        shards: list[MpmdShard] = []
        replicas_before = 0
        for group in sharding.groups:
            if (array := self._arrays.get(group)) is not None:
                shards += [
                    MpmdShard(s.device, s.index, s.replica_id + replicas_before, group, s.data)
                    for s in array.addressable_shards
                ]
            replicas_before += sharding.group_sharding(group).num_devices
        return shards

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
        if not isinstance(other, MpmdArray):
            return self._readable(), other
        mine, theirs = self._readable(), other._readable()
        for group, array in self._arrays.items():
            if group in other._arrays:
                return array, other._arrays[group]
        if mine.sharding.device_set == theirs.sharding.device_set:
            return mine, theirs
        raise ValueError(
            f"operands are in different groups: {self!r} and {other!r}.\n"
            "  Compute with them inside a step, or read both with numpy.asarray(x) or float(x)."
        )

    def __str__(self) -> str:
        readable = not self.is_deleted() and any(
            array.is_fully_addressable or array.is_fully_replicated for array in self._arrays.values()
        )
        return str(self._host_readable()) if readable else repr(self)

    def __repr__(self) -> str:
        sharding = self._mpmd_sharding
        name = self._dtype.name if hasattr(self._dtype, "name") else str(self._dtype)
        where = f"{groups_text(sharding.mesh_ids)} of {sharding.mpmd_mesh.num_groups}"
        memory = "" if sharding.memory_kind is None else f", {sharding.memory_kind}"
        if self.is_deleted():
            here = f", {self._gone or 'deleted'}"
        else:
            here = "" if self._arrays else ", not in this process"
        return f"MpmdArray({name}[{','.join(map(str, self._shape))}], {where}, {sharding.spec}{memory}{here})"


register_array_type(MpmdArray, MpmdArray.__jax_array__)


def _local_groups(sharding: MpmdSharding) -> list[int]:
    """The groups of this process that hold the array, ascending."""
    return [group for group in sharding.groups if group in sharding.mpmd_mesh.local_groups]


def _canonical_dtype(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


def _by_group(arrays: Sequence[jax.Array] | Mapping[int, jax.Array], sharding: MpmdSharding) -> dict[int, jax.Array]:
    if not isinstance(sharding, MpmdSharding):
        raise ValueError(f"MpmdArray: mpmd_sharding is a {type(sharding).__name__}, not an MpmdSharding.")
    local = _local_groups(sharding)
    if isinstance(arrays, Mapping):
        if sorted(arrays) != local:
            raise ValueError(
                f"MpmdArray: arrays has {groups_text(arrays)}, but of {sharding!r} this process "
                f"holds {groups_text(local)}."
            )
        return {group: arrays[group] for group in local}
    if isinstance(arrays, (jax.Array, np.ndarray)):
        raise ValueError("MpmdArray: arrays is one array; give a sequence with one array for each group: [array].")
    if len(arrays) != len(local):
        raise ValueError(
            f"MpmdArray: arrays has {len(arrays)} entries, but of {sharding!r} this process holds "
            f"{groups_text(local)}; one array for each is needed, in ascending order."
        )
    return dict(zip(local, arrays, strict=True))


def _check_arrays(array: MpmdArray) -> None:
    """Raises one ValueError that names everything about the arrays that does not fit."""
    sharding, shape = array._mpmd_sharding, array._shape
    faults: list[str] = []
    for group, part in array._arrays.items():
        if not isinstance(part, jax.Array) or not hasattr(part, "addressable_shards"):
            faults.append(f"group {group}: a {type(part).__name__}, not a concrete jax.Array")
            continue
        if part.shape != shape:
            faults.append(f"group {group}: shape {part.shape}, expected {shape}")
        if part.dtype != array._dtype:
            faults.append(f"group {group}: dtype {part.dtype}, expected {array._dtype}")
        if part.is_deleted():
            faults.append(f"group {group}: the array has been deleted")
    if len(sharding.spec) > len(shape):
        faults.append(f"spec {sharding.spec} has {len(sharding.spec)} entries, but the array has {len(shape)} axes")
    for group in sharding.groups if len(sharding.spec) <= len(shape) else ():
        expected = sharding.group_sharding(group)
        try:
            expected.shard_shape(shape)
        except Exception as error:  # JAX's errors for specs share no base class
            faults.append(f"group {group}: {error}")
            continue
        part = array._arrays.get(group)
        if part is not None and not faults and not part.sharding.is_equivalent_to(expected, len(shape)):
            faults.append(f"group {group}: sharding {part.sharding}, expected one equivalent to {expected}")
    if faults:
        raise ValueError(f"MpmdArray: the arrays do not fit {sharding!r}:\n" + "\n".join(f"  {f}" for f in faults))
