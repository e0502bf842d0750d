"""Checks that a batch has microbatches, all of them on one axis, and describes one of them."""

from collections.abc import Sequence

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays.specs import trimmed
from mpmd.errors import StageError
from mpmd.ops.reductions import explicit_sharding

# The number of leaves that a message names.
_MAX_SHOWN = 4


def check_microbatch_axis(names: list[str], leaves: list[jax.Array], axis: int) -> int:
    """Returns the number of microbatches, if all leaves have an axis for them, whole on each device.

    Raises:
      StageError: the leaves do not fit each other or the axis.
    """
    if not leaves:
        raise StageError("treduce: xs holds no array. To loop without data use treduce_i(fun, n, ...).")
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise StageError(f"treduce: axis is {axis!r}. Pass one int: the microbatch axis of every leaf of xs.")
    flat = [n for n, x in zip(names, leaves, strict=True) if not -x.ndim <= axis < x.ndim]
    if flat:
        shapes = dict(zip(names, (x.shape for x in leaves), strict=True))
        faults = "\n".join(f"  {n} has shape {shapes[n]}" for n in flat[:8])
        faults += f"\n  … and {len(flat) - 8} more" if len(flat) > 8 else ""
        raise StageError(
            f"treduce: these leaves of xs have no axis {axis}:\n{faults}\n"
            "  Every leaf needs a microbatch axis; close over values that microbatches share."
        )
    sizes = [x.shape[axis] for x in leaves]
    for name, size in zip(names, sizes, strict=True):
        if size != sizes[0]:
            is_tuple = axis == 0 and names[0].startswith("xs[0]")
            raise StageError(f"treduce: {names[0]} has {sizes[0]} rows on axis {axis} but {name} has {size}.\n"
                             f"  All leaves of xs need the same number of microbatches on axis {axis}."
                             + " If each entry of xs is a microbatch, pass a list of them." * is_tuple)  # fmt: skip
    if sizes[0] == 0:
        raise StageError(f"treduce: {names[0]} has 0 rows on axis {axis}. At least one microbatch is needed.")
    for name, x in zip(names, leaves, strict=True):
        _check_microbatches_are_whole(name, jax.typeof(x), axis % x.ndim)
    return sizes[0]


def _check_microbatches_are_whole(name: str, aval: compat.Aval, axis: int) -> None:
    """Checks that no array is sharded between microbatches: on Explicit axes none could be taken out of it."""
    sharding = explicit_sharding(aval)
    entry = None if sharding is None else sharding.spec[axis]
    if sharding is None or aval.shape[axis] == sharding.shard_shape(aval.shape)[axis]:
        return
    size = aval.shape[axis] // sharding.shard_shape(aval.shape)[axis]
    spec = [None if a == axis else e for a, e in enumerate(sharding.spec.partitions)]
    free = (a for a, e in enumerate(spec) if a != axis and e is None and aval.shape[a] % size == 0)
    if (rows := next(free, None)) is not None:
        spec[rows] = entry
    wanted = f"P({', '.join(map(repr, trimmed(spec)))})"
    raise StageError(
        f"treduce: {name} is {aval.str_short(short_dtypes=True)}, sharded over {entry!r} on axis {axis}, its microbatch"
        f" axis.\n  Every device needs its rows of each microbatch: jax.reshard(x, {wanted}) before treduce, or"
        f" in_shardings={wanted} where it is an argument of the step."
    )


def may_be_of_shapes(error: Exception) -> bool:
    """Returns whether an error may come from a batch that was not divided; Flax has error classes of its own."""
    kinds = TypeError, ValueError, IndexError, AssertionError
    return (isinstance(error, kinds) and not isinstance(error, StageError)) or "Shape" in type(error).__name__


def what_fun_sees(names: Sequence[str], leaves: Sequence[jax.Array], sliced: Sequence[jax.Array], axis: int) -> str:
    """Returns a note for a shape error in the user's function: which axis is gone there."""
    seen = [f"  {n} has shape {x.shape}: fun sees {y.shape}" for n, x, y in zip(names, leaves, sliced, strict=True)]
    more = [f"  … and {len(seen) - 4} more"] if len(seen) > 4 else []
    return "\n".join((f"treduce: axis {axis} of xs is the microbatch axis, which fun does not see.", *seen[:4], *more))


def doubt_of(names: Sequence[str], types: Sequence[tuple[tuple[int, ...], np.dtype]]) -> str | None:
    """Describes a microbatch if it looks like a row of a batch that was not divided into microbatches; else None.

    The arrays of a microbatch share their first axis, its rows; arrays of several ranks with the same first axis have
    rows. A row with its label has a scalar next to arrays. If these may have rows, only an integer counts as a label:
    a float may be the weight of a microbatch. Keys count as neither.
    """
    plain = [
        (name, shape, dtype)
        for name, (shape, dtype) in zip(names, types, strict=True)
        if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and (dtype != np.uint32 or shape not in ((2,), (4,)))
    ]
    scalars = [dtype for _, shape, dtype in plain if not shape]
    arrays = [shape for _, shape, _ in plain if shape]
    share, ranks = len(arrays) > 1 and len({shape[0] for shape in arrays}) == 1, set(map(len, arrays))
    may_have_rows = share or max(ranks, default=0) > 1
    labels = [d for d in scalars if not may_have_rows or jax.dtypes.issubdtype(d, np.integer)]
    if not labels or not arrays or (share and len(ranks) > 1):
        return None
    shown = [f"{name} {np.dtype(dtype).name}[{','.join(map(str, shape))}]" for name, shape, dtype in plain]
    return ", ".join(shown[:_MAX_SHOWN]) + (f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else "")
