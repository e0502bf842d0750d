"""Groups of devices, and how an array is sharded over them.

A pipeline runs stage by stage on *groups* of devices. `MpmdMesh` cuts one mesh along one of its axes into
such groups, or takes separate meshes as they are; `MpmdSharding` says which groups hold an array and how
each of them shards it. Both are values: they own no memory, compare by content and can be dictionary keys.
"""

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.shards import Device, PlacedShard, placed_shards, stacked
from mpmd.arrays.specs import SpecLike, as_spec, group_shardings, quoted, without_axis


def _check_joined() -> None:
    """A program under the launcher that forgets to join the others would run as often as there are processes."""
    count = os.environ.get("MPMD_NUM_PROCESSES", "1")
    if count != "1" and compat.distributed_client() is None:
        raise RuntimeError(
            f"MpmdMesh: the launcher has started {count} processes, but this one is alone."
            " Call mpmd.initialize() first, before any other use of JAX."
        )


class MpmdMesh:
    """A mesh that is partitioned along one axis into groups of devices, one program each.

    Every group is a `jax.sharding.Mesh` that keeps the partitioned axis at size 1, so that specs which name it
    stay valid, and keeps the axis types (Auto, Explicit, Manual) of the whole. A process may own several groups
    and a group may span several processes.

    Args:
        jax_mesh: the whole mesh.
        mpmd_axis_name: the axis to cut along; its size is the number of groups.

    Raises:
        ValueError: `mpmd_axis_name` is not an axis of `jax_mesh`.

    Examples:
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> mesh.num_groups
        4
        >>> mesh.groups[1].shape["data"]
        2
    """

    jax_mesh: Mesh | None
    mpmd_axis_name: str | None
    groups: tuple[Mesh, ...]

    @compat.api_boundary
    def __init__(self, jax_mesh: Mesh, mpmd_axis_name: str):
        _check_joined()
        if not isinstance(jax_mesh, Mesh):
            raise ValueError(
                f"MpmdMesh: jax_mesh is a {type(jax_mesh).__name__}, not a jax.sharding.Mesh.\n"
                "  For separate meshes, one per group, use MpmdMesh.from_groups([mesh0, mesh1, ...])."
            )
        if mpmd_axis_name not in jax_mesh.axis_names:
            raise ValueError(
                f"MpmdMesh: mpmd_axis_name={mpmd_axis_name!r} is not an axis of the mesh, which has "
                f"{quoted(jax_mesh.axis_names)}."
            )
        self.jax_mesh = jax_mesh
        self.mpmd_axis_name = mpmd_axis_name
        axis = jax_mesh.axis_names.index(mpmd_axis_name)
        self.groups = tuple(
            Mesh(np.take(jax_mesh.devices, [i], axis=axis), jax_mesh.axis_names, axis_types=jax_mesh.axis_types)
            for i in range(jax_mesh.devices.shape[axis])
        )
        self._key = (jax_mesh, mpmd_axis_name)
        self._hash = hash(self._key)

    @classmethod
    @compat.api_boundary
    def from_groups(cls, groups: Iterable[Mesh]) -> "MpmdMesh":
        """A mesh of groups that are meshes of their own.

        They may differ in shape, axis names and axis types, and may share devices: all groups on one device is how
        a laptop or a single GPU runs every group. `.jax_mesh` and `.mpmd_axis_name` are None.

        Raises:
            ValueError: there is no group, or one of them is not a `jax.sharding.Mesh`.
        """
        _check_joined()
        groups = tuple(groups)
        if not groups:
            raise ValueError("MpmdMesh.from_groups: no groups given; at least one mesh is needed.")
        for i, group in enumerate(groups):
            if not isinstance(group, Mesh):
                raise ValueError(
                    f"MpmdMesh.from_groups: groups[{i}] is a {type(group).__name__}, not a jax.sharding.Mesh.\n"
                    "  A single device becomes a mesh by jax.sharding.Mesh([device], ('data',))."
                )
        mesh = cls.__new__(cls)
        mesh.jax_mesh = None
        mesh.mpmd_axis_name = None
        mesh.groups = groups
        mesh._key = groups
        mesh._hash = hash(groups)
        return mesh

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, MpmdMesh) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        if self.jax_mesh is not None:
            axes = ", ".join(f"{name!r}: {size}" for name, size in self.jax_mesh.shape.items())
            return f"MpmdMesh({axes}; {self.num_groups} groups along {self.mpmd_axis_name!r})"
        shapes = ["(" + ", ".join(f"{name!r}: {size}" for name, size in g.shape.items()) + ")" for g in self.groups]
        if len(set(shapes)) == 1:
            text = f"{self.num_groups} groups of {shapes[0]}"
        else:
            text = "groups " + ", ".join(shapes)
        return f"MpmdMesh({text}{', on shared devices' if self.groups_share_devices else ''})"

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self.groups)

    mpmd_dim = num_groups

    @property
    def unstack(self) -> tuple[Mesh, ...]:
        """The groups; another name for `.groups`."""
        return self.groups

    @functools.cached_property
    def _group_of(self) -> dict[Device, int]:
        lowest: dict[Device, int] = {}
        for group, mesh in enumerate(self.groups):
            for device in mesh.devices.flat:
                lowest.setdefault(device, group)
        return lowest

    @compat.api_boundary
    def group_of(self, device: Device) -> int:
        """The group that has this device, the lowest one if several share it."""
        try:
            return self._group_of[device]
        except KeyError:
            raise ValueError(f"{device} is in no group of {self!r}.") from None

    @functools.cached_property
    def groups_share_devices(self) -> bool:
        """Whether some device is in more than one group."""
        return len(self._group_of) < sum(mesh.size for mesh in self.groups)

    @functools.cached_property
    def is_described(self) -> bool:
        """Whether the devices are only described (`topology_mesh`): programs are compiled for them, not called."""
        return any(compat.is_described(mesh.devices.flat[0]) for mesh in self.groups)

    @functools.cached_property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """Per group, the indices of the processes that own its devices, ascending."""
        return tuple(tuple(sorted({d.process_index for d in mesh.devices.flat})) for mesh in self.groups)

    @functools.cached_property
    def local_groups(self) -> tuple[int, ...]:
        """The groups with at least one device of this process, ascending."""
        return tuple(
            group for group, mesh in enumerate(self.groups) if any(_is_local(device) for device in mesh.devices.flat)
        )

    @property
    def my_mpmd_axis_index(self) -> int:
        """The one group of this process.

        Raises:
            ValueError: this process has no group or several; use `.local_groups` there.
        """
        if len(self.local_groups) != 1:
            raise ValueError(
                f"this process has {len(self.local_groups) or 'no'} groups of {self!r}, not exactly one.\n"
                "  Use .local_groups, which may have any number."
            )
        return self.local_groups[0]

    @property
    def my_mpmd_group_mesh(self) -> Mesh:
        """The mesh of this process's one group; see `my_mpmd_axis_index`."""
        return self.groups[self.my_mpmd_axis_index]

    def lowering_mesh(self) -> Mesh:
        """The mesh of one group, with the mpmd axis at size 1: what a stage is compiled for."""
        return self.groups[0]

    def tracing_mesh(self) -> Mesh:
        """The mesh under which steps are traced: the whole mesh, or the first of separate groups."""
        return self.groups[0] if self.jax_mesh is None else self.jax_mesh

    @compat.api_boundary
    def mpmd_submesh(self, ids: Iterable[int]) -> "MpmdMesh":
        """The groups `ids` alone, in that order, renumbered from 0."""
        ids = [int(i) for i in ids]
        bad = [i for i in ids if not 0 <= i < self.num_groups]
        if bad or not ids or len(set(ids)) < len(ids):
            raise ValueError(
                f"mpmd_submesh: ids={ids} must be one or more different groups out of 0..{self.num_groups - 1}."
            )
        if self.jax_mesh is None:
            return MpmdMesh.from_groups(self.groups[i] for i in ids)
        assert self.mpmd_axis_name is not None
        axis = self.jax_mesh.axis_names.index(self.mpmd_axis_name)
        devices = np.take(self.jax_mesh.devices, ids, axis=axis)
        return MpmdMesh(
            Mesh(devices, self.jax_mesh.axis_names, axis_types=self.jax_mesh.axis_types), self.mpmd_axis_name
        )

    def mesh_over(self, ids: Sequence[int]) -> Mesh:
        """One mesh over the devices of some groups; over separate groups it has one more axis, in front.

        Raises:
            ValueError: the groups' meshes differ in shape or axes, or share some of their devices.
        """
        meshes = [self.groups[i] for i in ids]
        if all(mesh == meshes[0] for mesh in meshes):
            return meshes[0]
        if self.jax_mesh is not None:
            mesh = self.mpmd_submesh(ids).jax_mesh
            assert mesh is not None
            return mesh
        if len({(mesh.devices.shape, mesh.axis_names) for mesh in meshes}) > 1:
            fault = "differ in shape or axes"
        elif len({device for mesh in meshes for device in mesh.devices.flat}) < sum(mesh.size for mesh in meshes):
            fault = "share some of their devices"
        else:
            return stacked(meshes)
        raise ValueError(
            f"{groups_text(ids)} of {self!r} {fault}, so that no one sharding covers them.\n"
            "  Use mpmd_sharding.group_sharding(group), for each group."
        )


class MpmdSharding(jax.sharding.Sharding):
    """Which groups hold an array, and how each of them shards it.

    It says where an array is wherever JAX only asks (`jax.ShapeDtypeStruct(shape, dtype, sharding=…)`); where JAX
    would make an array of its own (`jax.device_put`, `jax.jit(out_shardings=…)`), the error names what to call instead.

    Args:
        mpmd_mesh: the groups.
        mesh_ids: the groups that hold the array, each a full copy; an int is one group. Empty means that no
            group uses it; such an array is placed in group 0.
        spec: how a group shards it. The mpmd axis may be named and is dropped: a group has one slice of it.
        memory_kind: as in `jax.sharding.NamedSharding`.

    Raises:
        ValueError: a group that does not exist, a spec that names axes which a group lacks, or a memory kind
            that its devices lack.

    Examples:
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> MpmdSharding(mesh, {0, 3}, PartitionSpec("data"))
        MpmdSharding(groups {0, 3} of 4, P('data',))
    """

    @compat.api_boundary
    def __init__(
        self,
        mpmd_mesh: MpmdMesh,
        mesh_ids: int | Iterable[int],
        spec: SpecLike = PartitionSpec(),  # noqa: B008 (immutable)
        memory_kind: str | None = None,
    ):
        if not isinstance(mpmd_mesh, MpmdMesh):
            raise ValueError(f"MpmdSharding: mpmd_mesh is a {type(mpmd_mesh).__name__}, not an MpmdMesh.")
        if isinstance(mesh_ids, (int, np.integer)):
            mesh_ids = (int(mesh_ids),)
        ids = frozenset(int(i) for i in mesh_ids)
        self._key = (mpmd_mesh, ids, without_axis(as_spec(spec), mpmd_mesh.mpmd_axis_name), memory_kind)
        self._hash = hash(self._key)
        _check_mesh_ids(mpmd_mesh, ids)
        self._group_shardings = group_shardings({g: mpmd_mesh.groups[g] for g in self.groups}, self.spec, memory_kind)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, MpmdSharding) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return MpmdSharding, self._key

    def __repr__(self) -> str:
        memory = "" if self.memory_kind is None else f", {self.memory_kind}"
        return f"MpmdSharding({groups_text(self.mesh_ids)} of {self.mpmd_mesh.num_groups}, {self.spec}{memory})"

    @property
    def mpmd_mesh(self) -> MpmdMesh:
        return self._key[0]

    @property
    def mesh_ids(self) -> frozenset[int]:
        """The groups that hold the array; empty if no group uses it."""
        return self._key[1]

    @property
    def spec(self) -> PartitionSpec:
        """How each group shards the array."""
        return self._key[2]

    @property
    def memory_kind(self) -> str | None:
        return self._key[3]

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups that hold the array, ascending; group 0 if `mesh_ids` is empty."""
        return tuple(sorted(self.mesh_ids)) or (0,)

    @property
    def local_groups(self) -> list[int]:
        """Those of them that have a device of this process."""
        return [group for group in self.groups if group in self.mpmd_mesh.local_groups]

    def group_sharding(self, group: int) -> NamedSharding:
        """The sharding of the array inside one group, which need not be one of `mesh_ids`."""
        sharding = self._group_shardings.get(group)
        if sharding is None:
            sharding = NamedSharding(self.mpmd_mesh.groups[group], self.spec, memory_kind=self.memory_kind)
            self._group_shardings[group] = sharding
        return sharding

    @functools.cached_property
    def sharding(self) -> NamedSharding:
        """The sharding of a `jax.Array` over all devices of these groups, alike in every process.

        Raises:
            ValueError: the groups' meshes differ in shape or axes, or share some of their devices.
        """
        return NamedSharding(self.mpmd_mesh.mesh_over(self.groups), self.spec, memory_kind=self.memory_kind)

    def shards(self, shape: Sequence[int]) -> tuple[PlacedShard, ...]:
        """Which part of an array of this shape each device has, in the order of `.sharding`, alike in every process.

        Of the shards of one index exactly one has `replica_id` 0, in the lowest group that has this index. Where
        there is no such sharding, and where groups share devices, the order is that of the groups.
        """
        return _shards(self, tuple(shape))

    @compat.api_boundary
    def replace(self, **changes: Any) -> "MpmdSharding":
        """The same sharding with some fields changed."""
        fields = {name: getattr(self, name) for name in ("mpmd_mesh", "mesh_ids", "spec", "memory_kind")}
        return MpmdSharding(**(fields | changes))

    def with_memory_kind(self, kind: str) -> "MpmdSharding":
        return self.replace(memory_kind=kind)

    def is_equivalent_to(self, other: jax.sharding.Sharding, ndim: int) -> bool:
        """Whether both place an array of this rank in the same way, however their specs are written."""
        if self == other:
            return True
        return (
            isinstance(other, MpmdSharding)
            and self.mpmd_mesh == other.mpmd_mesh
            and self.groups == other.groups
            and all(self.group_sharding(g).is_equivalent_to(other.group_sharding(g), ndim) for g in self.groups)
        )

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part, in the lowest group that holds the array."""
        return self.group_sharding(self.groups[0]).shard_shape(tuple(global_shape))

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        """Raises a ValueError if an array of this shape has fewer axes than the spec has entries."""
        for group in self.groups:
            self.group_sharding(group).check_compatible_aval(tuple(aval_shape))

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
        return all(self.group_sharding(group).is_fully_replicated for group in self.groups)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all these devices are this process's."""
        return all(_is_local(device) for device in self.device_set)

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, tuple[slice, ...]]:
        """Per device, the part of an array that it has; of a device that groups share, the lowest group's."""
        found: dict[Device, tuple[slice, ...]] = {}
        for shard in self.shards(global_shape):
            found.setdefault(shard.device, shard.index)
        return found

    # What makes one `jax.Array` of a sharding asks for one of these.

    def _no_single_array(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"{self!r} is where an MpmdArray lies, as one array in each group; jax.device_put and jax.jit make a"
            " jax.Array.\n  Bring an array there by reshard.spmd_to_mpmd_reshard(mpmd_mesh, x, sharding), or compute it"
            " there by mpmd.jit(fun, mpmd_mesh=mpmd_mesh, out_shardings=sharding).\n"
            "  JAX takes sharding.sharding, the NamedSharding over all devices of these groups."
        )

    _device_assignment = _internal_device_list = property(_no_single_array)  # pyright: ignore[reportIncompatibleMethodOverride]
    _to_xla_hlo_sharding = _to_sdy_sharding = _no_single_array


@functools.lru_cache(maxsize=4096)
def _shards(sharding: MpmdSharding, shape: tuple[int, ...]) -> tuple[PlacedShard, ...]:
    indices = {group: sharding.group_sharding(group).devices_indices_map(shape) for group in sharding.groups}
    whole = sharding.mpmd_mesh.jax_mesh
    return placed_shards(indices, None if whole is None else list(whole.devices.flat))


def groups_text(groups: Iterable[int]) -> str:
    """`group 2`, `groups {0, 3}` or `no group`, for messages."""
    groups = sorted(groups)
    if not groups:
        return "no group"
    return f"group {groups[0]}" if len(groups) == 1 else "groups {" + ", ".join(map(str, groups)) + "}"


def _is_local(device: Device) -> bool:
    return compat.is_described(device) or device.process_index == device.client.process_index()


def _check_mesh_ids(mesh: MpmdMesh, mesh_ids: frozenset[int]) -> None:
    bad = sorted(i for i in mesh_ids if not 0 <= i < mesh.num_groups)
    if bad:
        raise ValueError(
            f"MpmdSharding: mesh_ids has {', '.join(map(str, bad))}, but {mesh!r} has groups 0..{mesh.num_groups - 1}."
        )
