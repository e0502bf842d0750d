"""How an array is sharded over groups of devices.

An `MpmdSharding` says which groups hold an array, whether each of them has all of it or a part, and how it shards that.
It is a value: it owns no memory, compares by content and can be a dictionary key.
"""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import Device, MpmdMesh, NoOneSharding, groups_text, is_local
from mpmd.arrays.specs import SpecLike, as_spec, group_shardings, with_axis, without_axis
from mpmd.arrays.splits import Range, Split, SplitLike, as_split, named_axis
from mpmd.users_frame import users_frame
from scheduler.base.texts import counted

Key = int | tuple[int, int]

_FIELDS = ("mpmd_mesh", "mesh_ids", "spec", "memory_kind", "split", "split_axis")


class GroupPart(NamedTuple):
    """The part of an array that one group holds as one `jax.Array`."""

    key: Key  # the group if it holds the whole array, or its range (start, stop) of a split array
    group: int  # the group
    offset: tuple[int, ...]  # the start of the part, on each array axis
    shape: tuple[int, ...]  # its shape

    @property
    def rows_text(self) -> str:
        """`rows 0:3 in group 2: ` for a split array, for messages; else empty."""
        return f"rows {self.key[0]}:{self.key[1]} in group {self.group}: " if isinstance(self.key, tuple) else ""


class PlacedShard(NamedTuple):
    """The part of an array on one device in one group. `key` is the key of the group's `GroupPart`."""

    device: Device
    index: tuple[slice, ...]  # pyright: ignore[reportIncompatibleMethodOverride]
    replica_id: int
    group: int
    key: Key


class MpmdSharding(jax.sharding.Sharding):
    """Which groups hold an array, all of it or a part each, and how each of them shards it.

    It describes an array wherever JAX only asks (`jax.ShapeDtypeStruct(shape, dtype, sharding=…)`). Where JAX would
    make a single array (`jax.device_put`, `jax.jit(out_shardings=…)`), the error names the function to call instead.

    Args:
        mpmd_mesh: the groups.
        mesh_ids: the groups that hold the array; an int is one group. Empty means that no group uses it; such an array
            is placed in group 0.
        spec: how a group shards the array. Without the mpmd axis each group has a full copy. If the spec names the mpmd
            axis, the array is *split* there: each group has an equal range of that array axis, in the order of the
            groups, and nothing else of the array. With one group the name is dropped.
        memory_kind: as in `jax.sharding.NamedSharding`.
        split: the ranges of each group, `{group: ((start, stop), ...)}`, for parts that are not equal or not in
            order. Every row must be in exactly one range.
        split_axis: the array axis that is split. It is needed only if the spec does not name the mpmd axis and
            the array is not split along axis 0.

    Raises:
        ValueError: a group does not exist, the spec names axes that a group lacks, the devices lack the memory
            kind, or the ranges do not make up an array.

    Examples:
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> MpmdSharding(mesh, {0, 3}, PartitionSpec("data"))
        MpmdSharding(groups {0, 3} of 4, P('data',))
        >>> MpmdSharding(mesh, range(4), PartitionSpec("stage", "data"))
        MpmdSharding(groups {0, 1, 2, 3} of 4, axis 0 split evenly, P(None, 'data'))
        >>> MpmdSharding(mesh, {0, 1}, split={0: ((0, 3), (5, 8)), 1: ((3, 5),)})
        MpmdSharding(groups {0, 1} of 4, axis 0 split {0: 0:3 5:8, 1: 3:5}, P())
    """

    @compat.api_boundary
    def __init__(
        self,
        mpmd_mesh: MpmdMesh,
        mesh_ids: int | Iterable[int],
        spec: SpecLike = PartitionSpec(),  # noqa: B008 (immutable)
        memory_kind: str | None = None,
        *,
        split: SplitLike = None,
        split_axis: int | None = None,
    ):
        if not isinstance(mpmd_mesh, MpmdMesh):
            raise ValueError(f"MpmdSharding: mpmd_mesh is a {type(mpmd_mesh).__name__}, not an MpmdMesh.")
        if isinstance(mesh_ids, (int, np.integer)):
            mesh_ids = (int(mesh_ids),)
        ids = frozenset(int(i) for i in mesh_ids)
        _check_mesh_ids(mpmd_mesh, ids)
        whole_spec, axis_name = as_spec(spec), mpmd_mesh.mpmd_axis_name
        self._groups = groups = tuple(sorted(ids)) or (0,)
        named = named_axis(whole_spec, axis_name)
        if named is not None and len(groups) == 1 and split is None:
            warnings.warn(
                f"MpmdSharding: {whole_spec} names the mpmd axis {axis_name!r}, but the array is in one group,"
                f" {groups[0]}, which has all of it: {axis_name!r} is left out. To give each group its own rows, name"
                f" the groups: MpmdSharding(mesh, range({mpmd_mesh.num_groups}), {whole_spec}).",
                stacklevel=users_frame(),
            )
        self._split = as_split(split, groups, ids, split_axis, named)
        self._key = (mpmd_mesh, ids, without_axis(whole_spec, axis_name), memory_kind, self._split)
        self._hash = hash(self._key)
        self._group_shardings = group_shardings({g: mpmd_mesh.groups[g] for g in self.groups}, self.spec, memory_kind)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, MpmdSharding) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[functools.partial["MpmdSharding"], tuple[()]]:
        return functools.partial(MpmdSharding, **self._fields()), ()

    def __repr__(self) -> str:
        return f"MpmdSharding({self._text('' if self._split is None else str(self._split))})"

    @property
    def summary(self) -> str:
        """`groups {0, 1} of 4, axis 0 split evenly, P('data',)`, for messages; many ranges are only counted."""
        return self._text(self.split_summary)

    @property
    def split_summary(self) -> str:
        """`axis 0 split evenly`, or empty."""
        return "" if self._split is None else self._split.summary

    def _text(self, split: str) -> str:
        memory = "" if self.memory_kind is None else f", {self.memory_kind}"
        split = split and f", {split}"
        return f"{groups_text(self.mesh_ids)} of {self.mpmd_mesh.num_groups}{split}, {self.spec}{memory}"

    @property
    def mpmd_mesh(self) -> MpmdMesh:
        return self._key[0]

    @property
    def mesh_ids(self) -> frozenset[int]:
        """The groups that hold the array; empty if no group uses it."""
        return self._key[1]

    @property
    def spec(self) -> PartitionSpec:
        """How each group shards its part; the mpmd axis is left out."""
        return self._key[2]

    @property
    def memory_kind(self) -> str | None:
        return self._key[3]

    @property
    def split_axis(self) -> int | None:
        """The array axis along which the array is split over its groups; None if each of them has all of it."""
        return None if self._split is None else self._split.axis

    @property
    def split(self) -> dict[int, tuple[tuple[int, int], ...]] | None:
        """The ranges of each group as they were given; None if the array is split evenly, or not at all."""
        return None if self._split is None else self._split.by_group()

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups that hold the array, ascending; group 0 if `mesh_ids` is empty."""
        return self._groups

    @property
    def local_groups(self) -> list[int]:
        """The groups that hold the array and have a device of this process."""
        return [group for group in self.groups if group in self.mpmd_mesh.local_groups]

    def group_sharding(self, group: int) -> NamedSharding:
        """Returns the sharding of a group's part inside the group, which need not be one of `mesh_ids`.

        Each range of a split array is an array of its own, and has this sharding.
        """
        sharding = self._group_shardings.get(group)
        if sharding is None:
            sharding = NamedSharding(self.mpmd_mesh.groups[group], self.spec, memory_kind=self.memory_kind)
            self._group_shardings[group] = sharding
        return sharding

    def ranges(self, num_rows: int) -> tuple[Range, ...]:
        """Returns the ranges of a split array, each with its group, sorted by their start.

        Args:
            num_rows: the length of the array along `split_axis`.

        Raises:
            ValueError: the array is not split, or cannot be split this way.
        """
        if self._split is None:
            raise ValueError(f"{self!r} does not split an array: each group has all of it.")
        try:
            return self._split.ranges(num_rows)
        except ValueError as error:
            raise ValueError(f"{self!r}: {error}.") from None

    def parts(self, shape: Sequence[int]) -> tuple[GroupPart, ...]:
        """Returns the parts of an array of this shape: one for each group, or for each range of a split array.

        Raises:
            ValueError: an array of this shape cannot be split this way.
        """
        return _parts(self, tuple(shape))

    def local_parts(self, shape: Sequence[int]) -> list[GroupPart]:
        """Returns the `parts` in groups of this process."""
        return [part for part in self.parts(shape) if part.group in self.mpmd_mesh.local_groups]

    @functools.cached_property
    def sharding(self) -> NamedSharding:
        """The sharding of a `jax.Array` over all devices of these groups, alike in every process.

        Raises:
            ValueError: the groups' meshes differ in shape or axes, or share some of their devices; or the ranges of a
                split array differ in length or are not in the order of the groups.
        """
        mesh, spec = self.mpmd_mesh.mesh_over(self.groups), self.spec
        if self._split is not None and len(self.groups) > 1:
            if not self._split.is_regular or mesh == self.mpmd_mesh.groups[self.groups[0]]:
                raise NoOneSharding(
                    f"{self!r}: no one sharding says this. An even split over devices of their own, in the order of the"
                    " groups, has one.\n  Use mpmd_sharding.shards(shape), for what each device has."
                )
            axis_name = self.mpmd_mesh.mpmd_axis_name or mesh.axis_names[0]
            spec = with_axis(spec, axis_name, self._split.axis)
        return NamedSharding(mesh, spec, memory_kind=self.memory_kind)

    def shards(self, shape: Sequence[int]) -> tuple[PlacedShard, ...]:
        """Returns each device's part of an array of this shape, in the order of `.sharding`, alike in every process.

        Among the shards of one index exactly one has `replica_id` 0, in the lowest group that has this index. Without a
        `.sharding`, and if groups share devices, the order is that of the groups.
        """
        return _shards(self, tuple(shape))

    # `dataclasses.replace`, which code ported from JaxPP calls, asks for the names of the fields here.
    __dataclass_fields__ = dataclasses.make_dataclass("_Fields", _FIELDS).__dataclass_fields__

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    @compat.api_boundary
    def replace(self, **changes: Any) -> "MpmdSharding":
        """Returns this sharding with some fields changed. A spec that names the mpmd axis replaces `split_axis` too."""
        fields = self._fields()
        mesh = changes.get("mpmd_mesh", self.mpmd_mesh)
        if named_axis(as_spec(changes.get("spec")), mesh.mpmd_axis_name) is not None:
            del fields["split_axis"]
        return MpmdSharding(**(fields | changes))

    __replace__ = replace  # `copy.replace`

    def with_memory_kind(self, kind: str) -> "MpmdSharding":
        return self.replace(memory_kind=kind)

    def is_equivalent_to(self, other: jax.sharding.Sharding, ndim: int) -> bool:
        """Returns whether both place an array of this rank in the same way, however their specs are written."""
        if self == other:
            return True
        return (
            isinstance(other, MpmdSharding)
            and self.mpmd_mesh == other.mpmd_mesh
            and self.groups == other.groups
            and _is_same_split(self._split, other._split)
            and all(self.group_sharding(g).is_equivalent_to(other.group_sharding(g), ndim) for g in self.groups)
        )

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one device's part, in the lowest group that holds the array.

        Raises:
            ValueError: the ranges of a split array differ in length, and so do its shards.
        """
        parts = self.parts(global_shape)
        if len({part.shape for part in parts}) > 1:
            raise ValueError(
                f"{self!r}: the shards of shape {tuple(global_shape)} differ, as the ranges differ in length.\n"
                "  Use mpmd_sharding.shards(shape), for what each device has."
            )
        return self.group_sharding(self.groups[0]).shard_shape(parts[0].shape)

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        """Raises a ValueError if an array of this shape has fewer axes than the spec has entries."""
        for part in self.parts(aval_shape):
            self.group_sharding(part.group).check_compatible_aval(part.shape)

    @functools.cached_property
    def device_set(self) -> set[Device]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The devices of all groups that hold the array, of other processes too."""
        return set().union(*(self.group_sharding(group).device_set for group in self.groups))

    @property
    def num_devices(self) -> int:
        return len(self.device_set)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device that holds the array has all of it."""
        if self._split is not None and (self._split.given is None or len(self._split.given) > 1):
            return False
        return all(self.group_sharding(group).is_fully_replicated for group in self.groups)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all these devices belong to this process."""
        return all(is_local(device) for device in self.device_set)

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, tuple[slice, ...]]:
        """Returns each device's part of an array; for a device that groups share, the lowest group's part.

        Raises:
            ValueError: a device has several parts of a split array.
        """
        found: dict[Device, tuple[slice, ...]] = {}
        shards = self.shards(global_shape)
        for shard in shards:
            found.setdefault(shard.device, shard.index)
        if self._split is not None and len(found) < len(shards):
            raise ValueError(
                f"{self!r}: a device has several parts of this array.\n"
                "  Use mpmd_sharding.shards(shape), which has them all."
            )
        return found

    # JAX reads one of these to make one `jax.Array` of a sharding.

    def _no_single_array(self, *_: object, **__: object) -> NoReturn:
        raise ValueError(
            f"{self!r} is where an MpmdArray lies, as one array in each group; jax.device_put and jax.jit make a"
            " jax.Array.\n  Bring an array there by reshard.spmd_to_mpmd_reshard(mpmd_mesh, x, sharding), or compute it"
            " there by mpmd.jit(fun, mpmd_mesh=mpmd_mesh, out_shardings=sharding).\n"
            "  JAX takes sharding.sharding, the NamedSharding over all devices of these groups."
        )

    _device_assignment = _internal_device_list = property(_no_single_array)  # pyright: ignore[reportIncompatibleMethodOverride]
    _to_xla_hlo_sharding = _to_sdy_sharding = _no_single_array


@functools.lru_cache(maxsize=4096)
def _parts(sharding: MpmdSharding, shape: tuple[int, ...]) -> tuple[GroupPart, ...]:
    axis = sharding.split_axis
    if axis is None:
        return tuple([GroupPart(group, group, (0,) * len(shape), shape) for group in sharding.groups])
    if axis >= len(shape):
        raise ValueError(f"{sharding!r} splits axis {axis}, but the array has {counted(len(shape), 'axis')}.")
    before, after = shape[:axis], shape[axis + 1 :]
    zeros = [0] * len(after)
    return tuple(
        [
            GroupPart((r.start, r.stop), r.group, (*[0] * axis, r.start, *zeros), (*before, r.stop - r.start, *after))
            for r in sharding.ranges(shape[axis])
        ]
    )


@functools.lru_cache(maxsize=4096)
def _shards(sharding: MpmdSharding, shape: tuple[int, ...]) -> tuple[PlacedShard, ...]:
    placed = [
        (device, _moved(index, part, shape), part)
        for part in sharding.parts(shape)
        for device, index in sharding.group_sharding(part.group).devices_indices_map(part.shape).items()
    ]
    if (whole := sharding.mpmd_mesh.jax_mesh) is not None:  # number them as one `jax.Array` over all devices does
        position = {device: i for i, device in enumerate(whole.devices.flat)}
        placed.sort(key=lambda one: position[one[0]])
    seen: collections.Counter[object] = collections.Counter()
    shards: list[PlacedShard] = []
    for device, index, part in placed:
        box = tuple([(s.start, s.stop) for s in index])
        shards.append(PlacedShard(device, index, seen[box], part.group, part.key))
        seen[box] += 1
    return tuple(shards)


def _moved(index: tuple[slice, ...], part: GroupPart, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Converts an index in a part to one in the array: a slice of a whole axis is written as JAX writes it."""
    if part.shape == shape:
        return index
    ends = [
        (s.indices(length)[0] + first, s.indices(length)[1] + first)
        for s, first, length in zip(index, part.offset, part.shape, strict=True)
    ]
    return tuple(
        [slice(None) if (a, b) == (0, size) else slice(a, b) for (a, b), size in zip(ends, shape, strict=True)]
    )


def _is_same_split(one: Split | None, other: Split | None) -> bool:
    """Returns whether two splits put the same rows into the same groups: an even split may be written out."""
    if one is None or other is None or one.axis != other.axis or one.given == other.given:
        return one == other
    num_rows = next(split.given[-1].stop for split in (one, other) if split.given)
    try:
        return one.ranges(num_rows) == other.ranges(num_rows)
    except ValueError:
        return False


def _check_mesh_ids(mesh: MpmdMesh, mesh_ids: frozenset[int]) -> None:
    bad = sorted(i for i in mesh_ids if not 0 <= i < mesh.num_groups)
    if bad:
        raise ValueError(
            f"MpmdSharding: mesh_ids has {', '.join(map(str, bad))}, but {mesh!r} has groups 0..{mesh.num_groups - 1}."
        )
