"""Equations that sum over sharded rows: how each device sums its own rows, in a `shard_map`."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.specs import names_of
from mpmd.graphs.sharded_axes import Axes, Dims, ShardedAxes, dims_of, merged
from mpmd.ops.reductions import explicit_sharding
from mpmd.tracing.new_equations import Atom

# --- sums over rows -------------------------------------------------------------------------------


class Local(NamedTuple):
    """How an equation that sums over sharded axes runs on each device's rows.

    Attributes:
      in_specs: per operand, how it is sharded.
      out_spec: of the parts.
      axes: the mesh axes that are summed over.
      manual: the mesh axes that these specs are about.
    """

    in_specs: tuple[PartitionSpec, ...]
    out_spec: PartitionSpec
    axes: Axes
    manual: set[str]


def local_sum(eqn: compat.JaxprEqn, sharded: ShardedAxes) -> Local | None:
    """How an equation runs on each device's rows; None if it sums over no sharded axis, or types forbid it."""
    rule = _ROWS.get(eqn.primitive.name)
    found = rule(eqn, [sharded.of(v) for v in eqn.invars]) if rule else None
    axes = tuple(dict.fromkeys(n for d in found[-1].values() for n in d)) if found else ()
    if not found or not axes or any(_shards_twice(list(d.values())) for d in found):
        return None
    for v, dims in zip(eqn.invars, found, strict=True):
        shape, known = v.aval.shape, sharded.of(v)
        if any(shape[i] % math.prod(sharded.sizes[n] for n in d) for i, d in dims.items()):
            return None
        if any(set(d).intersection(axes) for i, d in enumerate(known) if i not in dims):
            return None
        if explicit_sharding(v.aval) is not None and any(known[i] != d for i, d in dims.items()):
            return None
    out = explicit_sharding(eqn.outvars[0].aval)
    if out is not None and (out.spec.unreduced or set(axes).intersection(names_of(out.spec))):
        return None
    manual = {*axes, *(n for n, size in sharded.mesh.shape.items() if size == 1)}
    typed = [_typed_dims(v) for v in eqn.invars]
    if all(set(axes).issuperset(n for d in dims for n in d) for dims in typed):
        specs = [
            _spec([dims.get(i, ()) for i in range(len(v.aval.shape))])
            for v, dims in zip(eqn.invars, found, strict=True)
        ]
        return Local(tuple(specs), PartitionSpec(axes), axes, manual)
    # Types say that other axes are sharded too: `shard_map` has to know.
    result = _typed_dims(eqn.outvars[0])
    if eqn.primitive.name not in ("dot_general", "reduce_sum") or sharded.results(eqn, typed)[0] != result:
        return None
    manual.update(n for dims in typed for d in dims for n in d)
    specs = [
        _spec([(*t, *(n for n in dims.get(i, ()) if n not in t)) for i, t in enumerate(of_type)])  # rows on Auto axes
        for of_type, dims in zip(typed, found, strict=True)
    ]
    return Local(tuple(specs), _spec([axes, *result]), axes, manual)


def _typed_dims(v: Atom) -> Dims:
    """The mesh axes that the type of a value names, per axis."""
    sharding = explicit_sharding(v.aval)
    return ((),) * len(v.aval.shape) if sharding is None else dims_of(sharding.spec, len(v.aval.shape))


def _shards_twice(dims: Sequence[Axes]) -> bool:
    """Whether a mesh axis shards two axes of an array."""
    names = [n for d in dims for n in d]
    return len(names) > len(set(names))


def _spec(dims: Iterable[Axes]) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in dims))


_Rows = list[dict[int, Axes]]  # per operand, the axes that are summed over and what shards them


def _dot_rows(eqn: compat.JaxprEqn, ins: Sequence[Any]) -> _Rows | None:
    (lhs, rhs), _ = eqn.params["dimension_numbers"]
    return _pairs(list(zip(lhs, rhs, strict=True)), ins)


def _conv_rows(eqn: compat.JaxprEqn, ins: Sequence[Any]) -> _Rows | None:
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1:
        return None
    return _pairs([(numbers.lhs_spec[1], numbers.rhs_spec[1])], ins)


def _pairs(pairs: Sequence[tuple[int, int]], ins: Sequence[Any]) -> _Rows | None:
    axes = merged([(ins[0][i], ins[1][j]) for i, j in pairs])
    if axes is None:
        return None
    return [{pair[side]: a for pair, a in zip(pairs, axes, strict=True) if a} for side in (0, 1)]


def _reduce_rows(eqn: compat.JaxprEqn, ins: Sequence[Any]) -> _Rows | None:
    return [{i: ins[0][i] for i in eqn.params["axes"] if ins[0][i]}]


def _scatter_rows(eqn: compat.JaxprEqn, ins: Sequence[Any]) -> _Rows | None:
    """Updates and their indices have the rows; an axis that the operand has too is none of them."""
    numbers = eqn.params["dimension_numbers"]
    updates = [i for i in range(len(ins[2])) if i not in numbers.update_window_dims]
    kept = numbers.scatter_indices_batching_dims
    axes = merged((ins[1][k], ins[2][i]) for k, i in enumerate(updates))
    if axes is None or any(axes[k] for k in kept):
        return None
    rows = [(k, i, a) for (k, i), a in zip(enumerate(updates), axes, strict=True) if a]
    return [{}, {k: a for k, _, a in rows}, {i: a for _, i, a in rows}]


_ROWS: dict[str, Callable[[compat.JaxprEqn, Sequence[Any]], _Rows | None]] = {
    "dot_general": _dot_rows,
    "conv_general_dilated": _conv_rows,
    "reduce_sum": _reduce_rows,
    "scatter-add": _scatter_rows,
}
