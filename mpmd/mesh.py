"""Groups of devices, and how an array lies on them.

A pipeline runs stage by stage on *groups* of devices. `MpmdMesh` cuts one mesh along one of its axes into
such groups, or takes separate meshes as they are; `MpmdSharding` says which groups hold an array and how
each of them shards it. Both are values: they own no memory, compare by content and can be dictionary keys.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Device = Any
SpecLike = PartitionSpec | Sequence[Any] | str | None


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

    Example:
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> mesh.num_groups
        4
        >>> mesh.groups[1].shape["data"]
        2
    """

    jax_mesh: Mesh | None
    mpmd_axis_name: str | None
    groups: tuple[Mesh, ...]

    def __init__(self, jax_mesh: Mesh, mpmd_axis_name: str):
        if not isinstance(jax_mesh, Mesh):
            raise ValueError(
                f"MpmdMesh: jax_mesh is a {type(jax_mesh).__name__}, not a jax.sharding.Mesh.\n"
                "  For separate meshes, one per group, use MpmdMesh.from_groups([mesh0, mesh1, ...])."
            )
        if mpmd_axis_name not in jax_mesh.axis_names:
            raise ValueError(
                f"MpmdMesh: mpmd_axis_name={mpmd_axis_name!r} is not an axis of the mesh, which has "
                f"{_quoted(jax_mesh.axis_names)}."
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
    def from_groups(cls, groups: Iterable[Mesh]) -> "MpmdMesh":
        """A mesh of groups that are meshes of their own.

        They may differ in shape, axis names and axis types, and may share devices: all groups on one device is how
        a laptop or a single GPU runs every group. `.jax_mesh` and `.mpmd_axis_name` are None.

        Raises:
            ValueError: there is no group, or one of them is not a `jax.sharding.Mesh`.
        """
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
        """The mesh under which steps are traced: the whole mesh, or the first of separate groups."""
        return self.groups[0] if self.jax_mesh is None else self.jax_mesh

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


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class MpmdSharding:
    """Which groups hold an array, and how each of them shards it.

    Args:
        mpmd_mesh: the groups.
        mesh_ids: the groups that hold the array, each a full copy; an int is one group. Empty means that no
            group uses it; such an array is placed in group 0.
        spec: how a group shards it. The mpmd axis may be named and is dropped: a group has one slice of it.
        memory_kind: as in `jax.sharding.NamedSharding`.

    Raises:
        ValueError: a group that does not exist, a spec that names axes which a group lacks, or a memory kind
            that its devices lack.

    Example:
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> MpmdSharding(mesh, {0, 3}, PartitionSpec("data"))
        MpmdSharding(groups {0, 3} of 4, P('data',))
    """

    mpmd_mesh: MpmdMesh
    mesh_ids: frozenset[int]
    spec: PartitionSpec
    memory_kind: str | None

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
        set_field = functools.partial(object.__setattr__, self)
        set_field("mpmd_mesh", mpmd_mesh)
        set_field("mesh_ids", frozenset(int(i) for i in mesh_ids))
        set_field("spec", _without_axis(_as_spec(spec), mpmd_mesh.mpmd_axis_name))
        set_field("memory_kind", memory_kind)
        _check_mesh_ids(mpmd_mesh, self.mesh_ids)
        set_field("_group_shardings", _checked_group_shardings(self))
        set_field("_hash", hash((mpmd_mesh, self.mesh_ids, self.spec, memory_kind)))

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        memory = "" if self.memory_kind is None else f", {self.memory_kind}"
        return f"MpmdSharding({groups_text(self.mesh_ids)} of {self.mpmd_mesh.num_groups}, {self.spec}{memory})"

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups that hold the array, ascending; group 0 if `mesh_ids` is empty."""
        return tuple(sorted(self.mesh_ids)) or (0,)

    def group_sharding(self, group: int) -> NamedSharding:
        """The sharding of the array inside one group, which need not be one of `mesh_ids`."""
        sharding = self._group_shardings.get(group)  # pyright: ignore[reportAttributeAccessIssue]
        if sharding is None:
            sharding = NamedSharding(self.mpmd_mesh.groups[group], self.spec, memory_kind=self.memory_kind)
            self._group_shardings[group] = sharding  # pyright: ignore[reportAttributeAccessIssue]
        return sharding

    def replace(self, **changes: Any) -> "MpmdSharding":
        """The same sharding with some fields changed."""
        fields = {name: getattr(self, name) for name in ("mpmd_mesh", "mesh_ids", "spec", "memory_kind")}
        return MpmdSharding(**(fields | changes))

    def is_equivalent_to(self, other: "MpmdSharding", ndim: int) -> bool:
        """Whether an array of this rank lies alike under both, however their specs are written."""
        if self == other:
            return True
        return (
            self.mpmd_mesh == other.mpmd_mesh
            and self.groups == other.groups
            and all(self.group_sharding(g).is_equivalent_to(other.group_sharding(g), ndim) for g in self.groups)
        )

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part, in the lowest group that holds the array."""
        return self.group_sharding(self.groups[0]).shard_shape(tuple(shape))


def groups_text(groups: Iterable[int]) -> str:
    """`group 2`, `groups {0, 3}` or `no group`, for messages."""
    groups = sorted(groups)
    if not groups:
        return "no group"
    return f"group {groups[0]}" if len(groups) == 1 else "groups {" + ", ".join(map(str, groups)) + "}"


def _is_local(device: Device) -> bool:
    return device.process_index == device.client.process_index()


def _quoted(names: Iterable[Any]) -> str:
    return ", ".join(repr(name) for name in names) or "no axes"


def _as_spec(spec: SpecLike) -> PartitionSpec:
    if isinstance(spec, PartitionSpec):
        return spec
    if spec is None:
        return PartitionSpec()
    if isinstance(spec, str):
        return PartitionSpec(spec)
    if isinstance(spec, (tuple, list)):
        return PartitionSpec(*spec)
    raise ValueError(f"MpmdSharding: spec={spec!r} is a {type(spec).__name__}, not a jax.sharding.PartitionSpec.")


def _without_axis(spec: PartitionSpec, axis_name: str | None) -> PartitionSpec:
    """The spec with one mesh axis dropped, and each entry in its shortest form."""
    entries: list[Any] = []
    for entry in spec.partitions:
        if isinstance(entry, (tuple, list)):
            names = tuple(name for name in entry if name != axis_name)
            entries.append(names[0] if len(names) == 1 else names or None)
        else:
            entries.append(None if entry is not None and entry == axis_name else entry)
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


def _check_mesh_ids(mesh: MpmdMesh, mesh_ids: frozenset[int]) -> None:
    bad = sorted(i for i in mesh_ids if not 0 <= i < mesh.num_groups)
    if bad:
        raise ValueError(
            f"MpmdSharding: mesh_ids has {', '.join(map(str, bad))}, but {mesh!r} has groups 0..{mesh.num_groups - 1}."
        )


def _checked_group_shardings(sharding: MpmdSharding) -> dict[int, NamedSharding]:
    """The sharding in each group that holds the array; raises one error for all groups where there is none."""
    mesh, spec = sharding.mpmd_mesh, sharding.spec
    if PartitionSpec.UNCONSTRAINED in spec.partitions:
        raise ValueError(f"MpmdSharding: spec={spec} is unconstrained; where an array lies must be said in full.")
    named = {n for e in spec.partitions for n in (e if isinstance(e, tuple) else (e,)) if n is not None}
    faults: list[str] = []
    shardings: dict[int, NamedSharding] = {}
    for group in sharding.groups:
        axis_names = mesh.groups[group].axis_names
        missing = sorted(map(str, named.difference(axis_names)))
        if missing:
            faults.append(f"group {group} has axes {_quoted(axis_names)}, but no {_quoted(missing)}")
            continue
        try:
            shardings[group] = NamedSharding(mesh.groups[group], spec, memory_kind=sharding.memory_kind)
        except Exception as error:  # JAX's errors for specs share no base class
            faults.append(f"group {group}: {error}")
    if faults:
        raise ValueError(f"MpmdSharding: spec={spec} does not fit:\n" + "\n".join(f"  {fault}" for fault in faults))
    return shardings


# jax.sharding.Sharding is not subclassed: its contract (one device assignment) does not hold over groups.
ShardingLike = jax.sharding.Sharding | MpmdSharding
