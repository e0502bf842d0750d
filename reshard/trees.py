"""Pytrees of arrays and pytree prefixes of shardings, as flat lists with names."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mpmd.arrays.array import MpmdArray
from mpmd.arrays.sharding import MpmdSharding
from mpmd.errors import ReshardError
from mpmd.pytrees import PyTree, TreeDef
from reshard.places import EveryHost, HostMemory
from scheduler.base.texts import counted


def is_sharding(x: object) -> bool:
    """Returns whether a value says where an array is: JAX's shardings, those of groups, and the memory of hosts."""
    return isinstance(x, (MpmdSharding, jax.sharding.Sharding, HostMemory, EveryHost))


def sharding_of(leaf: Any) -> Any:
    """Returns the sharding of an array; None if it has none."""
    return leaf.mpmd_sharding if isinstance(leaf, MpmdArray) else getattr(leaf, "sharding", None)


def flatten(tree: PyTree) -> tuple[list[str], list[Any], TreeDef]:
    """Returns the names of all leaves as they are written after the tree's own name, the leaves, and the structure."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in with_paths], [leaf for _, leaf in with_paths], treedef


def broadcast(shardings: PyTree, tree: PyTree, name: str, is_leaf: Callable[[object], bool] = is_sharding) -> list[Any]:
    """Returns a sharding for each leaf of `tree`, from a prefix of it with shardings (or values that pass `is_leaf`).
    Raises a ReshardError if the structures differ.
    """
    try:
        full = jax.tree.broadcast(shardings, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ReshardError(f"{name}: its structure is not that of the arrays, nor a prefix of it.\n  {error}") from None
    return jax.tree.leaves(full, is_leaf=is_leaf)


def fault_of_sharding(sharding: Any, shape: tuple[int, ...]) -> str | None:
    """Returns why an array of this shape cannot lie under this sharding; None if it can."""
    if isinstance(sharding, (HostMemory, EveryHost)):
        return None
    if not is_sharding(sharding):
        return f"{sharding!r} is a {type(sharding).__name__}, not a sharding"
    shardings = [(sharding, shape, "")]
    if isinstance(sharding, MpmdSharding):
        try:
            shardings = [(sharding.group_sharding(p.group), p.shape, p.rows_text) for p in sharding.parts(shape)]
        except ValueError as error:
            return str(error)
    for one, part_shape, rows in shardings:
        if isinstance(one, NamedSharding) and PartitionSpec.UNCONSTRAINED in tuple(one.spec):
            return f"spec {one.spec} is unconstrained; where the array goes must be said in full"
        if isinstance(one, NamedSharding) and len(one.spec) > len(shape):
            found = counted(len(one.spec), "entry")
            return f"spec {one.spec} has {found}, but the array has {counted(len(shape), 'axis')}"
        try:
            one.shard_shape(part_shape)
        except Exception as error:  # JAX's errors for specs share no base class
            return f"{rows}{error}"
    return None
