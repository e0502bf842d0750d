"""Plans equations that sum over sharded rows: each device sums its own rows, in a `shard_map`."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.specs import names_of
from mpmd.graphs.axis_rules import Factor, factors
from mpmd.graphs.sharded_axes import Axes, Dims, ShardedAxes, dims_of
from mpmd.ops.reductions import explicit_sharding
from mpmd.tracing.new_equations import Atom

_ANY = PartitionSpec.UNCONSTRAINED


class Local(NamedTuple):
    """The plan by which an equation that sums over sharded axes runs on each device's rows."""

    in_specs: tuple[PartitionSpec, ...]  # per operand, its spec
    out_spec: PartitionSpec  # the spec of the parts
    axes: Axes  # the mesh axes that are summed over
    manual: set[str]  # the mesh axes that these specs use
    gathered: tuple[PartitionSpec | None, ...]  # per operand, the spec to constrain it to before; None: as it is


def local_sum(eqn: compat.JaxprEqn, sharded: ShardedAxes, refused: Collection[str] = ()) -> Local | None:
    """Plans an equation on each device's rows, with no parts over `refused` mesh axes; None if it sums over no sharded
    axis, or if types forbid it.
    """
    if (found := _summed(eqn, [sharded.of(v) for v in eqn.invars])) is None:
        return None
    found, gathered = _gathered(eqn, found, sharded, refused)
    axes = tuple(dict.fromkeys(n for d in found[-1].values() for n in d)) if found else ()
    if not axes or set(axes).intersection(refused) or any(_shards_twice(list(d.values())) for d in found):
        return None
    for v, dims in zip(eqn.invars, found, strict=True):
        shape, known = v.aval.shape, sharded.of(v)
        if any(shape[i] % math.prod(sharded.sizes[n] for n in d) for i, d in dims.items()):
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
        return Local(tuple(specs), PartitionSpec(axes), axes, manual, gathered)
    # The types have further sharded axes, which `shard_map` has to know.
    result = _typed_dims(eqn.outvars[0])
    if eqn.primitive.name not in ("dot_general", "reduce_sum") or sharded.results(eqn, typed)[0] != result:
        return None
    manual.update(n for dims in typed for d in dims for n in d)
    specs = [
        _spec([(*t, *(n for n in dims.get(i, ()) if n not in t)) for i, t in enumerate(of_type)])  # rows on Auto axes
        for of_type, dims in zip(typed, found, strict=True)
    ]
    return Local(tuple(specs), _spec([axes, *result]), axes, manual, gathered)


def _gathered(
    eqn: compat.JaxprEqn, found: Sequence[dict[int, Axes]], sharded: ShardedAxes, refused: Collection[str]
) -> tuple[list[dict[int, Axes]], tuple[PartitionSpec | None, ...]]:
    """Leaves out mesh axes that also shard another axis of an operand: over these, no device has rows of its own, so
    the operands are gathered.

    Examples are sequences that are sharded like the columns of the other operand, which XLA gathers for a product; and
    the updates of a table that is sharded like their sequences, if they are smaller than the table.

    Returns:
      Per operand, the rest of `found`; and the operand's new spec, None if nothing changes.
    """
    known = [sharded.of(v) for v in eqn.invars]
    pairs = list(zip(known, found, strict=True))
    others = {n for d, dims in pairs for i, axes in enumerate(d) if i not in dims for n in axes}
    if eqn.primitive.name == "scatter-add" and sharded.nbytes(eqn.invars[2]) <= sharded.nbytes(eqn.invars[0]):
        others.update(refused)
    left = [{i: tuple(n for n in axes if n not in others) for i, axes in dims.items()} for _, dims in pairs]
    specs: list[PartitionSpec | None] = []
    for d, dims in zip(known, left, strict=True):
        kept = [dims.get(i, axes) or (None if i in dims else _ANY) for i, axes in enumerate(d)]
        specs.append(PartitionSpec(*kept) if any(others.intersection(d[i]) for i in dims) else None)
    return left, tuple(specs)


def _typed_dims(v: Atom) -> Dims:
    """Returns, per axis, the mesh axes in the type of a value."""
    sharding = explicit_sharding(v.aval)
    return ((),) * len(v.aval.shape) if sharding is None else dims_of(sharding.spec, len(v.aval.shape))


def _shards_twice(dims: Sequence[Axes]) -> bool:
    """Returns whether a mesh axis shards two axes of an array."""
    names = [n for d in dims for n in d]
    return len(names) > len(set(names))


def _spec(dims: Iterable[Axes]) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in dims))


def _summed(eqn: compat.JaxprEqn, ins: Sequence[Dims]) -> list[dict[int, Axes]] | None:
    """Returns, per operand, the axes that are summed over, and their mesh axes; None if operands differ."""
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
    """Yields the factors along which an equation adds up; in a scatter, of its updates: the operand counts once."""
    if eqn.primitive.name == "scatter-add":
        window = eqn.params["dimension_numbers"].update_window_dims
        rows = [a for a in range(eqn.invars[2].aval.ndim) if a not in window]
        yield from (Factor((None, k, a), (None,), jax.lax.add) for k, a in enumerate(rows))
    yield from (f for f in factors(eqn) if f.combine is jax.lax.add)
