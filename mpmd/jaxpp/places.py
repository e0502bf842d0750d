"""JaxPP's meshes, shardings and arrays: ours under its names and argument orders, and the moves between layouts."""

import functools
import importlib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mpmd.arrays.array import MpmdArray as Array
from mpmd.arrays.mesh import Device, MpmdMesh
from mpmd.arrays.sharding import MpmdSharding as Sharding
from mpmd.arrays.specs import SpecLike, as_spec, without_axis
from mpmd.ops import cross_group
from mpmd.pytrees import PyTree


class JaxppMesh(MpmdMesh):
    """`mpmd.MpmdMesh` with the additional names of JaxPP's mesh. `with mesh:` does nothing."""

    def __enter__(self) -> "JaxppMesh":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def _devices(self) -> np.ndarray:
        assert self.jax_mesh is not None
        return self.jax_mesh.devices

    @property
    def mpmd_axis(self) -> int:
        """The position of the mpmd axis among the axes of the mesh."""
        assert self.jax_mesh is not None
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    @functools.cached_property
    def device_coords(self) -> Mapping[Device, tuple[int, ...]]:
        """The coordinates of each device in the mesh."""
        return {device: index for index, device in np.ndenumerate(self._devices)}

    @functools.cached_property
    def device_mpmd_idx(self) -> Mapping[Device, int]:
        """The group of each device."""
        return {device: self.group_of(device) for device in self._devices.flat}

    @property
    def mpmd_idx_for_mesh(self) -> Mapping[Mesh, int]:
        """The group of each group's mesh."""
        return {mesh: group for group, mesh in enumerate(self.groups)}

    def mpmd_indices_for_mesh(self, mesh: Mesh) -> tuple[int, ...] | None:
        """Returns the groups that a mesh consists of, in its order; None if it does not consist of whole groups."""
        if self.mpmd_axis_name not in mesh.axis_names or not set(mesh.devices.flat) <= set(self._devices.flat):
            return None
        axis = mesh.axis_names.index(self.mpmd_axis_name)
        found = [self.group_of(part.flat[0]) for part in np.split(mesh.devices, mesh.devices.shape[axis], axis)]
        return tuple(found) if len(set(found)) == len(found) and self.mpmd_submesh(found).jax_mesh == mesh else None

    @property
    def unstack(self) -> list[Mesh]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The mesh of each group."""
        return list(self.groups)

    def lowering_mesh(self) -> Mesh:
        """Returns the mesh of this process's group; if the process has several groups, the mesh of group 0."""
        return self.groups[self.local_groups[0] if len(self.local_groups) == 1 else 0]

    def mpmd_submesh(  # pyright: ignore[reportIncompatibleMethodOverride]  the argument has another name
        self, mpmd_indices: Iterable[int]
    ) -> "JaxppMesh":
        """Returns a mesh of some groups, in this order."""
        found = super().mpmd_submesh(mpmd_indices)
        assert found.jax_mesh is not None and found.mpmd_axis_name is not None
        return JaxppMesh(found.jax_mesh, found.mpmd_axis_name)


class _Ours(type):
    """Makes a class an alias of another class `of`, for calls and for `isinstance`."""

    of: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.of)


class JaxppSharding(metaclass=_Ours):
    """`mpmd.MpmdSharding` of whole arrays: the mpmd axis in a spec does not split them over groups."""

    of = Sharding

    def __new__(
        cls, mpmd_mesh: MpmdMesh, mesh_ids: Iterable[int], spec: SpecLike, memory_kind: str | None = None
    ) -> Sharding:
        return Sharding(mpmd_mesh, mesh_ids, without_axis(as_spec(spec), mpmd_mesh.mpmd_axis_name), memory_kind)


class JaxppArray(metaclass=_Ours):
    """`mpmd.MpmdArray` that may lack the arrays of some groups of this process. No step accepts it then."""

    of = Array

    def __new__(
        cls,
        partially_addressable_arrays: Iterable[jax.Array],
        mpmd_sharding: Sharding,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
    ) -> Array:
        arrays = list(partially_addressable_arrays)
        if not arrays or len(arrays) >= len(mpmd_sharding.local_groups) or mpmd_sharding.split_axis is not None:
            return Array(arrays, mpmd_sharding, shape, dtype)
        mesh = mpmd_sharding.mpmd_mesh
        groups = [mesh.group_of(next(iter(array.sharding.device_set))) for array in arrays]
        for group, array in zip(groups, arrays, strict=True):  # checks each given array
            Array([array], mpmd_sharding.replace(mesh_ids=mpmd_sharding.mesh_ids & {group} or {group}), shape, dtype)
        if not {*groups} <= mpmd_sharding.mesh_ids or len({*groups}) < len(groups):
            raise ValueError(
                f"MpmdArray: the arrays are in the groups {groups}; {mpmd_sharding!r} has one each of"
                f" {sorted(mpmd_sharding.mesh_ids)}."
            )
        by_group = dict(sorted(zip(groups, arrays, strict=True)))
        return Array._unchecked(by_group, mpmd_sharding, arrays[0].shape, arrays[0].dtype)


if TYPE_CHECKING:
    MpmdArray = Array
    MpmdSharding = Sharding
else:
    MpmdArray = JaxppArray
    MpmdSharding = JaxppSharding


def to_global_jax_array(mpmd_array: Array) -> jax.Array:
    """Returns the shards of all groups that hold an array, as one `jax.Array` on their devices. Copies nothing."""
    shards = [shard.data for shard in mpmd_array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        mpmd_array.shape, mpmd_array.sharding, shards, dtype=mpmd_array.dtype
    )


# --- moves: `reshard` imports this package, so it is loaded when one of them is called -----------------


def _reshard() -> types.ModuleType:
    return importlib.import_module("reshard")


def _bound(threshold: int | None, tree: PyTree) -> int | None:
    """Returns the threshold for `reshard`: 0 if an array exceeds JaxPP's threshold, so that this array goes alone."""
    largest = max((x.nbytes for x in jax.tree.leaves(tree)), default=0)
    return threshold if threshold is None or threshold >= largest else 0


def spmd_to_mpmd_reshard(
    mpmd_mesh: MpmdMesh, spmd_arrays: PyTree, mpmd_shardings: PyTree, threshold: int | None = None
) -> PyTree:
    """Calls `reshard.spmd_to_mpmd_reshard`, which uses up the sources. An array larger than `threshold` goes alone."""
    return _reshard().spmd_to_mpmd_reshard(mpmd_mesh, spmd_arrays, mpmd_shardings, _bound(threshold, spmd_arrays))


def mpmd_to_spmd_reshard(
    mpmd_mesh: MpmdMesh, mpmd_arrays: PyTree, spmd_shardings: PyTree, threshold: int | None = None
) -> PyTree:
    """Calls `reshard.mpmd_to_spmd_reshard`, which uses up the sources. An array larger than `threshold` goes alone."""
    return _reshard().mpmd_to_spmd_reshard(mpmd_mesh, mpmd_arrays, spmd_shardings, _bound(threshold, mpmd_arrays))


def mpmd_to_mpmd_reshard(mpmd_arrays: PyTree, mpmd_shardings: PyTree, threshold: int | None = None) -> PyTree:
    """Calls `reshard.mpmd_to_mpmd_reshard`, which uses up the sources. An array larger than `threshold` goes alone."""
    return _reshard().mpmd_to_mpmd_reshard(mpmd_arrays, mpmd_shardings, _bound(threshold, mpmd_arrays))


def logically_stacked(
    array: jax.Array, comm_mesh: Mesh, mesh_axis_name: str, array_axis: int = 0, strict: bool = False
) -> jax.Array:
    """Calls `reshard.logically_stacked`."""
    return _reshard().logically_stacked(array, comm_mesh, mesh_axis_name, array_axis, strict)


# --- values of several groups, inside of a step --------------------------------------------------------


def cross_mpmd_all_reduce(*args: jax.Array) -> jax.Array:
    """Calls `mpmd.cross_mpmd_all_reduce`, with one argument for each group that has an array."""
    return cross_group.cross_mpmd_all_reduce(list(args))


def cross_mpmd_stack(arrays: Sequence[jax.Array], axis: int = 0) -> jax.Array:
    """Stacks like `mpmd.cross_mpmd_stack`, along any axis of the result."""
    stacked = cross_group.cross_mpmd_stack(list(arrays))
    return stacked if axis == 0 else cross_mpmd_all_reduce(jnp.moveaxis(stacked, 0, axis))


def _gathered(*args: jax.Array, axis: int = 0) -> jax.Array:
    axis %= args[0].ndim
    stacked = cross_mpmd_stack(args, axis)
    return cross_mpmd_all_reduce(stacked.reshape(*stacked.shape[:axis], -1, *stacked.shape[axis + 2 :]))


# In JaxPP these are primitives, called by `.bind`.
add_multi_p = types.SimpleNamespace(bind=cross_mpmd_all_reduce)
gather_multi_p = types.SimpleNamespace(bind=_gathered)


def place_with(value: PyTree, with_value: object) -> PyTree:
    """Returns `value`. In JaxPP this places it with another value; here a value goes to the groups that read it."""
    del with_value
    return value
