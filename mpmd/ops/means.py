"""Means as sums that are divided after the loop: by weights, or by a number that belongs to the call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mpmd.errors import StageError
from mpmd.ops.reductions import (
    Add,
    Mean,
    Operation,
    broadcast_operation,
    dtype_of_sum,
    output_leaves,
)
from mpmd.pytrees import PyTree, TreeDef


class Means:
    """The function of a loop, with means turned into sums.

    Args:
      weights: maps a microbatch to its weight; None if all count alike.
      number: of the microbatches.
    """

    def __init__(self, fun: Callable, operation: PyTree, weights: Callable | None, number: int | jax.Array):
        self._fun, self._operation, self._weights, self._number = fun, operation, weights, number
        self.operations: list[Operation] = []  # for the results of `sums`, after its first call
        # The dtype of each mean before it is weighted; None for other outputs.
        self._dtypes: list[np.dtype | None] = []
        self._tree: TreeDef = None

    def sums(self, x: PyTree) -> list:
        """Returns the leaves of `fun(x)`, with the terms of sums for means; the weight of the microbatch comes last."""
        outs, self._tree = output_leaves(self._fun(x), "treduce")
        given = broadcast_operation(self._operation, self._tree, "treduce")
        are_means = [type(op) is Mean for op in given]
        self.operations[:] = [Add(once=op.once) if type(op) is Mean else op for op in given]
        outs = [self._to_sum(out) if mean else out for out, mean in zip(outs, are_means, strict=True)]
        self._dtypes = [out.dtype if mean else None for out, mean in zip(outs, are_means, strict=True)]
        if self._weights is None:
            return outs
        if outs and not any(are_means):
            raise StageError(
                f"treduce: weights are for means, and operation is {self._operation!r}. Pass operation=mpmd.Mean, or"
                " multiply by the weight inside of fun."
            )
        weight = self._weight_of(x)
        self.operations.append(Add())
        return [*(_scaled(out, weight) if mean else out for out, mean in zip(outs, are_means, strict=True)), weight]

    def _to_sum(self, x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        return x.astype(dtype_of_sum(x.dtype))

    def _weight_of(self, x: PyTree) -> jax.Array:
        given = self._weights(x)  # pyright: ignore[reportOptionalCall]
        dtype = getattr(given, "dtype", type(given))
        is_number = any(jnp.issubdtype(dtype, of) for of in (jnp.integer, jnp.floating))
        weight = jnp.asarray(given) if is_number else None
        if weight is None or weight.shape:
            what = repr(given) if weight is None and not isinstance(given, jax.Array) else jax.typeof(given).str_short()
            raise StageError(
                f"treduce: weights returns {what:.60} for a microbatch. It must return a scalar, an integer or a float."
            )
        if weight.dtype.itemsize < 4:  # sums of token counts are large
            weight = weight.astype(np.int32 if jnp.issubdtype(weight.dtype, jnp.integer) else np.float32)
        return weight

    def of(self, reduced: list) -> PyTree:
        """Returns the outputs of the loop, from the reduced results of `sums`."""
        reduced = list(reduced)
        number, widened = (self._number, False) if self._weights is None else (reduced.pop(), True)
        pairs = zip(reduced, self._dtypes, strict=True)
        outs = [x if dtype is None else _divided(_widened(x) if widened else x, number, dtype) for x, dtype in pairs]
        return jax.tree.unflatten(self._tree, outs)


def _scaled(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns a term of a weighted sum: in float32 if the sum may be too large for the dtype of `x`."""
    scaled = (wide := _widened(x)) * _like(wide, weight)
    return scaled.astype(x.dtype) if x.dtype == jnp.bfloat16 else scaled


def _divided(x: jax.Array, number: int | jax.Array, dtype: np.dtype) -> jax.Array:
    mean = Mean().finish(x, _like(x, number))
    return mean.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else mean


def _widened(x: jax.Array) -> jax.Array:
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(np.float32) if is_narrow else x


def _like(x: jax.Array, number: Any) -> Any:
    """Returns a number in the dtype of a float array, so that the array keeps its dtype."""
    return number.astype(x.dtype) if hasattr(number, "astype") and jnp.issubdtype(x.dtype, jnp.inexact) else number
