"""Arrays that are just described: shape, dtype and the groups they are to lie in."""

from typing import Any

import jax
import jax.numpy as jnp

from mpmd.array import MpmdArray
from mpmd.errors import ReshardError
from mpmd.mesh import MpmdSharding
from reshard.tree import broadcast


class MpmdShapeDtypeStruct(jax.ShapeDtypeStruct):
    """A `jax.ShapeDtypeStruct` whose sharding is an `MpmdSharding`: what an `MpmdArray` is before it has values.

    JAX's own class takes just JAX's shardings. Orbax takes it wherever it takes a `jax.ShapeDtypeStruct`.

    Args:
        shape: of the whole array.
        dtype: its dtype, a key dtype for typed PRNG keys.
        sharding: which groups are to hold it, and how.
    """

    __slots__ = ("_mpmd_sharding",)

    def __init__(self, shape: Any, dtype: Any, *, sharding: MpmdSharding):
        super().__init__(shape, dtype)
        object.__setattr__(self, "_mpmd_sharding", sharding)

    @property
    def sharding(self) -> MpmdSharding:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._mpmd_sharding


def abstract(tree: Any, shardings: Any = None) -> Any:
    """The tree of descriptions that says what a checkpoint is to be restored into.

    It is what Orbax's own `StandardRestore(...)` and `checkpoint_utils.construct_restore_args(...)` take.

    Args:
        tree: arrays of any kind, or descriptions of them (`jax.eval_shape(init, key)`).
        shardings: `MpmdSharding`s or JAX shardings, the same tree or a prefix of it; None takes those of the leaves.

    Returns:
        The same tree of `MpmdShapeDtypeStruct` and `jax.ShapeDtypeStruct`; leaves that are no arrays as they are.

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
    if isinstance(sharding, MpmdSharding):
        return MpmdShapeDtypeStruct(shape, dtype, sharding=sharding)
    if not isinstance(sharding, jax.sharding.Sharding):
        raise ReshardError(f"abstract: {sharding!r} is a {type(sharding).__name__}, not a sharding.")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
