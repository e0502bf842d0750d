"""How the outputs of a microbatch loop are reduced: the start of an accumulator, its update, and the final result."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import AbstractValue
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from mpmd import _jax_compat as compat
from mpmd.errors import StageError
from mpmd.pytrees import PyTree, TreeDef
from mpmd.users_frame import users_frame
from scheduler.base.texts import counted


class Operation:
    """How one output of a microbatch loop is reduced: `operation=mpmd.Mean`, or an instance, `mpmd.Concat(axis=1)`.

    A subclass is a user-defined reduction. Its methods are traced and run where the output is made: the values of the
    microbatches never leave their stage. They are accumulated in microbatch order; the accumulator is one array.
    Instances with equal attributes are equal, and attributes must be hashable.

    Attributes:
      reads_index: whether `update` may read its `index`.
      reads_number: whether `init` or `finish` may read `num_microbatches`. If not, lists of any length share a trace.
      is_elementwise: whether each element of the result depends only on the same element of the outputs.
      has_parts: whether `x` of `update` may be another accumulator, of the microbatches that come next. Then the
        result of `init` is neutral, and from the type of an accumulator `init` makes an array of the same type.

    Examples:
      >>> import jax.numpy as jnp, mpmd
      >>> class Product(mpmd.Operation):
      ...     def init(self, aval: jax.core.ShapedArray, num_microbatches: int) -> jax.Array:
      ...         return self.full(aval, 1)
      ...     def update(self, acc: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
      ...         return acc * x
      >>> float(mpmd.treduce(lambda x: x, jnp.array([2.0, 3.0, 4.0]), schedule=None, operation=Product))
      24.0
    """

    reads_index = reads_number = True
    is_elementwise = has_parts = False

    def __init_subclass__(cls, **kwargs: object):
        """Resets attributes in a subclass that redefines methods: those of its base class need not hold for them."""
        super().__init_subclass__(**kwargs)
        if {"init", "update", "finish"} & vars(cls).keys():
            for name in ("reads_index", "reads_number", "is_elementwise", "has_parts"):
                if name not in vars(cls):
                    setattr(cls, name, vars(Operation)[name])

    def init(self, aval: compat.Aval, num_microbatches: int) -> jax.Array:
        """Returns the accumulator before the first microbatch; `aval` is the type of the output of `fun`."""
        return self.full(aval, 0)

    def update(self, acc: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        """Returns the accumulator after microbatch `index` (an int32 scalar), with output `x`."""
        raise NotImplementedError(f"{type(self).__name__}.update")

    def finish(self, acc: jax.Array, num_microbatches: int) -> jax.Array:
        """Returns the reduced value, from the last accumulator."""
        return acc

    @staticmethod
    def full(
        aval: compat.Aval, value: ArrayLike, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None
    ) -> jax.Array:
        """Returns an array of one value, by default of the shape and dtype of `aval`, sharded like it on Explicit axes.

        Further axes of `shape` come first.
        """
        full: tuple[int, ...] = aval.shape if shape is None else tuple(shape)
        return _full(aval, value, full, range(len(full) - len(aval.shape)), dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        """A key for comparison: 2, 2.0 and True are equal in Python, as are 0.0 and -0.0, but their results differ."""
        return type(self), *((name, _told_apart(x)) for name, x in sorted(vars(self).items()))

    def __repr__(self):
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return type(self).__name__ + (f"({values})" if values else "")


def _told_apart(x: object) -> object:
    if isinstance(x, tuple):
        return type(x), *map(_told_apart, x)
    if isinstance(x, frozenset):
        return type(x), frozenset(map(_told_apart, x))
    return type(x), repr(x) if isinstance(x, float | complex) else x


class Add(Operation):
    """The sum over microbatches.

    Args:
      once: if the rows of a microbatch are sharded over the devices of a group, a gradient is a sum over these
        devices. By default this sum is done once, after the last microbatch. With False it is done for each
        microbatch, as the step is written. The results differ by rounding.
    """

    reads_index = reads_number = False
    is_elementwise = has_parts = once = True

    def __init__(self, *, once: bool = True):
        if not isinstance(once, bool):
            raise StageError(f"{type(self).__name__}: once is {once!r}. Pass True or False.")
        if not once:
            self.once = False

    def update(self, acc: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return acc + x if acc.dtype != np.bool_ else acc | x


class Mean(Add):
    """The sum over microbatches divided by their number. For booleans: the share of True.

    Integers of less than 32 bits are summed in int32, floats in their own type, as with `Add`: with many microbatches,
    a bfloat16 or float16 output loses digits. Return a loss in float32.

    Args:
      once: as in `Add`.
    """

    reads_index = False
    reads_number = is_elementwise = has_parts = True

    def init(self, aval: compat.Aval, num_microbatches: int) -> jax.Array:
        return self.full(aval, 0, dtype=dtype_of_sum(aval.dtype))

    def update(self, acc: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return acc + x

    def finish(self, acc: jax.Array, num_microbatches: int) -> jax.Array:
        sharding = explicit_sharding(jax.typeof(acc))
        if sharding is not None and sharding.spec.unreduced:  # not yet summed over devices: JAX cannot divide it
            share = jnp.asarray(1 / num_microbatches, acc.dtype)
            return acc * jax.reshard(share, PartitionSpec(reduced=sharding.spec.unreduced))
        return acc / num_microbatches


class Max(Operation):
    """The elementwise maximum over microbatches."""

    reads_index = reads_number = False
    is_elementwise = has_parts = True

    def init(self, aval: compat.Aval, num_microbatches: int) -> jax.Array:
        return self.full(aval, _extreme(aval.dtype, lowest=True))

    def update(self, acc: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return lax.max(acc, x)


class Min(Operation):
    """The elementwise minimum over microbatches."""

    reads_index = reads_number = False
    is_elementwise = has_parts = True

    def init(self, aval: compat.Aval, num_microbatches: int) -> jax.Array:
        return self.full(aval, _extreme(aval.dtype, lowest=False))

    def update(self, acc: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return lax.min(acc, x)


class Concat(Operation):
    """All outputs, stacked along a new axis of length `num_microbatches`.

    Args:
      axis: the position of the new axis in the result; a negative one counts from the end of the result's axes.
    """

    def __init__(self, axis: int = 0):
        self.axis = axis

    def init(self, aval: compat.Aval, num_microbatches: int) -> jax.Array:
        axis = self._axis(len(aval.shape))
        return _full(aval, 0, (*aval.shape[:axis], num_microbatches, *aval.shape[axis:]), [axis])

    def update(self, acc: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(acc, jnp.asarray(x, acc.dtype), index, self._axis(acc.ndim - 1))

    def _axis(self, ndim: int) -> int:
        """Returns the new axis of a stack of arrays with `ndim` axes."""
        try:
            return range(ndim + 1)[self.axis]
        except (IndexError, TypeError):
            raise StageError(
                f"treduce: {self!r} stacks an output with {ndim} axes. Pass an int from {-ndim - 1} to {ndim}."
            ) from None


def dtype_of_sum(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which a mean is summed: sums of booleans and small integers would overflow their own."""
    is_small = dtype == np.bool_ or (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4)
    return np.dtype(np.int32) if is_small else dtype


def explicit_sharding(aval: AbstractValue) -> NamedSharding | None:
    """Returns the sharding that is part of a type (None on a mesh without Explicit axes)."""
    sharding = getattr(aval, "sharding", None)
    return None if sharding is None or sharding.mesh.empty or sharding.mesh.are_all_axes_auto else sharding


def result_types(fun: Callable, *avals: compat.Aval | jax.ShapeDtypeStruct) -> list:
    """Returns the types of the results of `fun`, with their shardings: `jax.eval_shape` omits these on a mesh of Auto
    and Explicit axes.
    """
    return jax.make_jaxpr(fun)(*avals).out_avals


def _full(
    aval: compat.Aval, value: ArrayLike, shape: Sequence[int], new_axes: Iterable[int], dtype: DTypeLike | None = None
) -> jax.Array:
    """Returns an array of one value, sharded on Explicit axes like `aval`, but not along new axes."""
    dtype = dtype or aval.dtype
    sharding = explicit_sharding(aval)
    if sharding is None:
        return lax.full(shape, value, dtype)
    old = sharding.spec
    entries = [*old.partitions, *[None] * (len(aval.shape) - len(old.partitions))]
    for axis in new_axes:
        entries.insert(axis, None)
    spec = PartitionSpec(*entries, unreduced=old.unreduced, reduced=old.reduced)
    return lax.full(shape, value, dtype, sharding=NamedSharding(sharding.mesh, spec))


def _extreme(dtype: DTypeLike, lowest: bool) -> float:
    if dtype == np.bool_:
        return not lowest
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return info.min if lowest else info.max
    if not np.isinf(np.array(np.inf).astype(dtype)):  # some floats of 8 bits and fewer have no infinity
        return float(jnp.finfo(dtype).min if lowest else jnp.finfo(dtype).max)
    return -np.inf if lowest else np.inf


# --- the user's arguments -------------------------------------------------------------------------


def _is_operation(x: object) -> bool:
    return isinstance(x, (type, Operation))


def is_number_or_array(x: object) -> bool:
    """Returns whether JAX can compute with it: an array or a number."""
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def output_leaves(outs: PyTree, name: str) -> tuple[list, TreeDef]:
    """Returns the leaves of a loop function's result, and their structure; raises a StageError if one is no array."""
    found, tree = jax.tree_util.tree_flatten_with_path(outs)
    for path, x in found:
        if not is_number_or_array(x) and not hasattr(x, "__jax_array__"):
            raise StageError(
                f"{name}: fun returns result{jax.tree_util.keystr(path)}, a {type(x).__name__}, {x!r:.40}, which is no"
                " array.\n  Return arrays, numbers and None in dicts, lists, tuples or registered dataclasses."
            )
    return [x for _, x in found], tree


def broadcast_operation(operation: PyTree, out_tree: TreeDef, name: str) -> tuple[Any, ...]:
    """Returns the operation of each output, from a pytree prefix; each class becomes one instance."""
    out = jax.tree.unflatten(out_tree, list(range(out_tree.num_leaves)))
    try:
        pairs = jax.tree.map(lambda op, part: [op] * len(jax.tree.leaves(part)), operation, out, is_leaf=_is_operation)
    except ValueError as e:
        raise StageError(
            f"{name}: operation {operation} is not a prefix of what fun returns, {out_tree}.\n  {e}"
        ) from None
    found = jax.tree.leaves(pairs, is_leaf=_is_operation)
    made = {id(op): op() if isinstance(op, type) and issubclass(op, Operation) else op for op in found}
    return tuple(made[id(op)] for op in found)


def check_operations(operations: Sequence[object], out_avals: Sequence[compat.Aval], name: str) -> None:
    """Raises a StageError if an object is not an operation, or if an operation cannot reduce its output."""
    for op, aval in zip(operations, out_avals, strict=True):
        if not isinstance(op, Operation):
            raise StageError(
                f"{name}: operation holds {op!r}. Pass mpmd.Add, Mean, Max, Min or Concat, or a subclass of"
                " mpmd.Operation."
            )
        try:
            hash(op)
        except TypeError as error:
            raise StageError(
                f"{name}: {op!r} has no hash: {error}. Of a dataclass, write @dataclasses.dataclass(frozen=True)."
            ) from None
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
                what, instead = "a PRNG key", "jax.random.key_data of it"
            else:
                what = f"an array of {aval.dtype}"
                instead = "it as floats (jax.lax.convert_element_type), with operation=mpmd.Max for scales of FP8"
            raise StageError(f"{name}: fun returns {what}, which cannot be reduced. Return {instead}.")
        _check_accumulator(op, aval, name)
        if type(op) is Add and aval.dtype == np.bool_:
            warnings.warn(
                f"{name}: fun returns booleans, and Add of booleans says whether one of the microbatches has True."
                " mpmd.Mean gives the share of True, and mpmd.Max says 'any'; for their number return"
                " x.astype(jnp.int32).",
                stacklevel=users_frame(),
            )


def in_each_task(operation: Operation) -> Operation:
    """Returns a sum that is done over the devices of a group for each microbatch; other operations as they are."""
    if not isinstance(operation, Add):
        return operation
    operation = copy.copy(operation)
    operation.once = False
    return operation


def check_alike(first: Sequence[compat.Aval], others: Sequence[compat.Aval], operations: Sequence[Operation]) -> None:
    """Raises a StageError where two microbatches of a list have outputs of different types."""
    for one, other, op in zip(first, others, operations, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise StageError(
                f"treduce: fun returns {one.str_short()} for one microbatch of the list and {other.str_short()} for"
                f" another, and {op!r} reduces outputs of one shape.\n"
                "  Reduce over the axes that differ inside of fun, or pad what it returns to one shape."
            )


def _one_array(types: Sequence[compat.Aval], op: Operation, method: str, name: str) -> compat.Aval:
    if len(types) != 1:
        raise StageError(f"{name}: {op!r}.{method} returns {counted(len(types), 'array')}; it must return one.")
    return types[0]


def _check_accumulator(op: Operation, aval: compat.Aval, name: str) -> None:
    """Checks that a user-defined operation keeps the type of its accumulator."""
    if type(op).__module__ == __name__:
        return
    acc = _one_array(result_types(functools.partial(op.init, aval, 1)), op, "init", name)
    _one_array(result_types(lambda x: op.finish(x, 1), acc), op, "finish", name)
    new = result_types(op.update, acc, aval, jax.ShapeDtypeStruct((), np.int32))
    if [(x.shape, x.dtype) for x in new] != [(acc.shape, acc.dtype)]:
        got = ", ".join(x.str_short() for x in new)
        raise StageError(
            f"{name}: {op!r}.update makes {got} of the accumulator {acc.str_short()}.\n"
            "  It must return one array of the accumulator's shape and dtype, which init chooses."
        )
