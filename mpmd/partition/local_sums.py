"""Equations that sum over sharded rows: how each device sums its own rows, in a `shard_map`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.specs import names_of
from mpmd.graphs.axis_rules import Factor, factors
from mpmd.graphs.sharded_axes import Axes, Dims, ShardedAxes, dims_of
from mpmd.ops.reductions import explicit_sharding
from mpmd.tracing.new_equations import Atom


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
    found = _summed(eqn, [sharded.of(v) for v in eqn.invars])
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


def _summed(eqn: compat.JaxprEqn, ins: Sequence[Dims]) -> list[dict[int, Axes]] | None:
    """Per operand, the axes that are summed over and what shards them; None if operands differ."""
    found: list[dict[int, Axes]] = [{} for _ in ins]
    for factor in _sums(eqn):
        pairs = [(k, a) for k, a in enumerate(factor.ins) if a is not None]
        named = {ins[k][a] for k, a in pairs} - {()}
        if len(named) > 1:
            return None
        for k, a in pairs if named else ():
            found[k][a] = next(iter(named))
    return found


def _sums(eqn: compat.JaxprEqn) -> Iterator[Factor]:
    """The factors along which an equation adds up. Those of a scatter are no pieces: the operand is added once."""
    if eqn.primitive.name == "scatter-add":
        window = eqn.params["dimension_numbers"].update_window_dims
        rows = [a for a in range(eqn.invars[2].aval.ndim) if a not in window]
        yield from (Factor((None, k, a), (None,), jax.lax.add) for k, a in enumerate(rows))
    yield from (f for f in factors(eqn) if f.combine is jax.lax.add)
