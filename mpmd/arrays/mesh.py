"""Groups of devices.

A pipeline runs stage by stage on *groups* of devices. `MpmdMesh` cuts one mesh along one of its axes into
such groups, or takes separate meshes as they are. It is a value: it owns no memory, compares by content and can be
a dictionary key.
"""

import functools
import os
import warnings
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
from jax.sharding import AxisType, Mesh

from mpmd import _jax_compat as compat
from mpmd._jax_compat import Device
from mpmd.arrays.specs import quoted
from mpmd.arrays.targets import Target
from scheduler.base.texts import counted


def _check_joined() -> None:
    """Raises an error if a launched program has not joined the others: each process would run all of it."""
    count = os.environ.get("MPMD_NUM_PROCESSES", "1")
    if count != "1" and compat.distributed_client() is None:
        raise RuntimeError(
            f"MpmdMesh: the launcher has started {count} processes, but this one is alone."
            " Call mpmd.initialize() first, before any other use of JAX."
        )


class NoOneSharding(ValueError, AttributeError):
    """An error: no single `jax.sharding` fits an array. Libraries ask `hasattr(x, "sharding")`, which is then False."""


class MpmdMesh:
    """A mesh that is partitioned along one axis into groups of devices, one program each.

    Every group is a `jax.sharding.Mesh` that keeps the partitioned axis at size 1, so that specs which name it
    stay valid, and keeps the axis types (Auto, Explicit, Manual) of the whole mesh. A process may own several groups,
    and a group may span several processes.

    `with mesh:` is `with mesh.jax_mesh:`, JAX's own context of the whole mesh, for code that asks for the current mesh.
    A step needs no such context.

    Args:
        jax_mesh: the whole mesh.
        mpmd_axis_name: the axis to cut along; its size is the number of groups.

    Raises:
        ValueError: `mpmd_axis_name` is not an axis of `jax_mesh`.

    Examples:
        >>> import jax
        >>> mesh = MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")
        >>> mesh.num_groups
        4
        >>> mesh.groups[1].shape["data"]
        2
    """

    jax_mesh: Mesh | None
    mpmd_axis_name: str | None
    groups: tuple[Mesh, ...]
    target: Target | None = None  # the data sheet of the devices, if `topology_mesh` made them
    is_part: bool = False  # whether `mpmd_submesh` made it: then other processes may have the other groups

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
        self.groups = tuple(_part(jax_mesh, mpmd_axis_name, [i]) for i in range(jax_mesh.shape[mpmd_axis_name]))
        self._key = (jax_mesh, mpmd_axis_name)
        self._hash = hash(self._key)
        _in_use[id(self)] = self

    @classmethod
    @compat.api_boundary
    def from_groups(cls, groups: Iterable[Mesh]) -> "MpmdMesh":
        """Returns a mesh with separate meshes as its groups.

        They may differ in shape, axis names and axis types, and may share devices: with all groups on one device, a
        laptop or a single GPU runs every group. `.jax_mesh` and `.mpmd_axis_name` are None.

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
        _in_use[id(mesh)] = mesh
        return mesh

    def __deepcopy__(self, memo: dict[int, object]) -> "MpmdMesh":
        return self  # devices cannot be copied, and nothing changes a mesh

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, MpmdMesh) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        if self.jax_mesh is not None:
            axes = ", ".join(f"{name!r}: {size}" for name, size in self.jax_mesh.shape.items())
            return f"MpmdMesh({axes}; {counted(self.num_groups, 'group')} along {self.mpmd_axis_name!r})"
        shapes = ["(" + ", ".join(f"{name!r}: {size}" for name, size in g.shape.items()) + ")" for g in self.groups]
        if len(set(shapes)) == 1:
            text = f"{counted(self.num_groups, 'group')} of {shapes[0]}"
        else:
            text = "groups " + ", ".join(shapes)
        return f"MpmdMesh({text}{', on shared devices' if self.groups_share_devices else ''})"

    def __enter__(self) -> "MpmdMesh":
        if self.jax_mesh is None:
            raise ValueError(
                f"{self!r} has groups of separate meshes and no whole one: `with mesh:` has nothing to enter.\n"
                "  Use `with mesh.groups[i]:` for the mesh of one group. A step needs no such context."
            )
        with warnings.catch_warnings():  # JAX prefers `jax.set_mesh`, under which arrays of one group cannot be used
            warnings.simplefilter("ignore", DeprecationWarning)
            self.jax_mesh.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        assert self.jax_mesh is not None
        self.jax_mesh.__exit__(*error)

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self.groups)

    mpmd_dim = num_groups

    @property
    def unstack(self) -> tuple[Mesh, ...]:
        """Returns the groups; another name for `.groups`."""
        return self.groups

    @functools.cached_property
    def groups_by_device(self) -> dict[Device, tuple[int, ...]]:
        """The groups that have each device, ascending."""
        found: dict[Device, tuple[int, ...]] = {}
        for group, mesh in enumerate(self.groups):
            for device in mesh.devices.flat:
                found[device] = (*found.get(device, ()), group)
        return found

    @compat.api_boundary
    def group_of(self, device: Device) -> int:
        """Returns the group that has this device, the lowest one if several share it."""
        try:
            return self.groups_by_device[device][0]
        except KeyError:
            raise ValueError(f"{device} is in no group of {self!r}.") from None

    @functools.cached_property
    def groups_share_devices(self) -> bool:
        """Whether some device is in more than one group."""
        return any(len(groups) > 1 for groups in self.groups_by_device.values())

    @functools.cached_property
    def is_described(self) -> bool:
        """Whether the devices are only described (`topology_mesh`): programs can be compiled for them, not called."""
        return any(compat.is_described(mesh.devices.flat[0]) for mesh in self.groups)

    @functools.cached_property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the processes that own the devices of each group, ascending."""
        return tuple(tuple(sorted({d.process_index for d in mesh.devices.flat})) for mesh in self.groups)

    @functools.cached_property
    def local_groups(self) -> tuple[int, ...]:
        """The groups with at least one device of this process, ascending."""
        return tuple(
            group for group, mesh in enumerate(self.groups) if any(is_local(device) for device in mesh.devices.flat)
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
        """Returns the mesh of one group, with the mpmd axis at size 1, for which stages are compiled."""
        return self.groups[0]

    def tracing_mesh(self) -> Mesh:
        """Returns the mesh that code of a step names as its own: the whole mesh, or the first of separate groups.

        Inside the step the mpmd axis has size 1.
        """
        return self.groups[0] if self.jax_mesh is None else self.jax_mesh

    @compat.api_boundary
    def mpmd_submesh(self, ids: Iterable[int]) -> "MpmdMesh":
        """Returns only the groups `ids`, in that order, renumbered from 0: the place of a role next to other roles.

        Steps of submeshes without a common group run at the same time. Every process makes the calls of all roles; a
        process without a device of a role does nothing there.
        """
        ids = [int(i) for i in ids]
        bad = [i for i in ids if not 0 <= i < self.num_groups]
        if bad or not ids or len(set(ids)) < len(ids):
            raise ValueError(
                f"mpmd_submesh: ids={ids} must be one or more different groups out of 0..{self.num_groups - 1}."
            )
        if self.jax_mesh is None:
            mesh = MpmdMesh.from_groups(self.groups[i] for i in ids)
        else:
            assert self.mpmd_axis_name is not None
            mesh = MpmdMesh(_part(self.jax_mesh, self.mpmd_axis_name, ids), self.mpmd_axis_name)
        mesh.is_part = True
        return mesh

    def mesh_over(self, ids: Sequence[int]) -> Mesh:
        """Returns one mesh over the devices of some groups; over separate groups it has one more axis, in front.

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
            return _stacked(meshes)
        raise NoOneSharding(
            f"{groups_text(ids)} of {self!r} {fault}, so that no one sharding covers them.\n"
            "  Use mpmd_sharding.group_sharding(group), for each group."
        )


def _part(mesh: Mesh, axis_name: str, ids: Sequence[int]) -> Mesh:
    """Returns the mesh of the devices with these indices on an axis."""
    devices = np.take(mesh.devices, ids, axis=mesh.axis_names.index(axis_name))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _stacked(meshes: Sequence[Mesh]) -> Mesh:
    """Returns one mesh over meshes of one shape, with a new axis in front that none of their specs names."""
    first = meshes[0]
    name = "mpmd"
    while name in first.axis_names:
        name += "_"
    axis_types = (first.axis_types[0] if first.axis_types else AxisType.Auto, *first.axis_types)
    return Mesh(np.stack([mesh.devices for mesh in meshes]), (name, *first.axis_names), axis_types=axis_types)


_in_use: weakref.WeakValueDictionary[int, MpmdMesh] = weakref.WeakValueDictionary()


def meshes_in_use() -> list[MpmdMesh]:
    """Returns the meshes of this process, the latest first: for messages about arrays that do not name their mesh."""
    return list(_in_use.values())[::-1]


def groups_text(groups: Iterable[int]) -> str:
    """Returns `group 2`, `groups {0, 3}` or `no group`, for messages."""
    groups = sorted(groups)
    if not groups:
        return "no group"
    return f"group {groups[0]}" if len(groups) == 1 else "groups {" + ", ".join(map(str, groups)) + "}"


def is_local(device: Device) -> bool:
    """Returns whether a device belongs to this process; described devices do."""
    return compat.is_described(device) or device.process_index == device.client.process_index()
