"""Descriptions of arrays: shape, dtype and the groups that they go to."""

from typing import Any

import jax
import jax.numpy as jnp

from mpmd.arrays.array import MpmdArray
from mpmd.errors import ReshardError
from reshard.trees import broadcast


def abstract(tree: Any, shardings: Any = None) -> Any:
    """The tree of descriptions that says what a checkpoint is to be restored into.

    It is what Orbax's own `StandardRestore(...)` and `checkpoint_utils.construct_restore_args(...)` take.

    Args:
        tree: arrays of any kind, or descriptions of them (`jax.eval_shape(init, key)`).
        shardings: `MpmdSharding`s or JAX shardings, the same tree or a prefix of it; None takes those of the leaves.

    Returns:
        The same tree of `jax.ShapeDtypeStruct`, each with its sharding; leaves that are no arrays as they are.

    Raises:
        ReshardError: `shardings` is no prefix of the tree.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [None] * len(leaves) if shardings is None else broadcast(shardings, tree, "shardings")
    return jax.tree.unflatten(treedef, [_describe(leaf, s) for leaf, s in zip(leaves, places, strict=True)])


def _describe(leaf: Any, sharding: Any) -> Any:
    if sharding is None:
        sharding = leaf.mpmd_sharding if isinstance(leaf, MpmdArray) else getattr(leaf, "sharding", None)
    if sharding is None:
        return leaf
    shape, dtype = jnp.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not isinstance(sharding, jax.sharding.Sharding):
        raise ReshardError(f"abstract: {sharding!r} is a {type(sharding).__name__}, not a sharding.")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
