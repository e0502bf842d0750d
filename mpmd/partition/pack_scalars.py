"""Packs the scalars that cross outside of the loops: one transfer per pair of groups and level.

Norms, metrics and counters are many (often one per parameter) and small, and a transfer costs the same for four bytes
as for a thousand. The group that makes them joins their bits in one vector of words. The group that reads them unpacks
them, if possible in a segment that it runs anyway.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.partition.outline import OutlineTransfer
from mpmd.tracing.new_equations import trace_equations

# Per variable and group, the levels at which it is read there.
Readers = dict[tuple[compat.Var, int], set[int]]


class Packed(NamedTuple):
    """Transfers with packed scalars, and the equations that pack and unpack them."""

    transfers: list[OutlineTransfer]  # all transfers that remain
    last: dict[tuple[int, int], list[compat.JaxprEqn]]  # per (level, group), equations that a segment runs at its end
    first: dict[tuple[int, int], list[compat.JaxprEqn]]  # likewise, at its beginning
    readers: Readers  # per (packed vector, group), the level at which it is read
    sizes: dict[compat.Var, int]  # per packed vector, its number of scalars


def pack_scalars(
    transfers: list[OutlineTransfer], readers: Readers, segments: set[tuple[int, int]], loop_levels: set[int]
) -> Packed:
    """Packs the scalars among transfers; `segments` has the (level, group) of each segment."""
    together: dict[tuple, list[OutlineTransfer]] = defaultdict(list)
    for t in transfers:
        until = min(readers[t.var, t.target])
        if t.level < 0 or not _is_packable(t.var.aval):
            continue
        if _unpack_level(t, until, segments, loop_levels) is not None:
            together[t.source, t.target, t.level, _axis_types(t.var.aval)].append(t)
    packed = Packed([], defaultdict(list), defaultdict(list), {}, {})
    vectors: dict[tuple, compat.Var] = {}
    gone: set[OutlineTransfer] = set()
    for (source, target, level, _), members in together.items():
        if len(members) < 2:
            continue
        gone.update(members)
        values = tuple(t.var for t in members)
        if (source, level, values) not in vectors:
            eqns, (vector,) = trace_equations(_join, *values)
            assert isinstance(vector, compat.Var)
            packed.last[level, source] += eqns
            vectors[source, level, values] = vector
            packed.sizes[vector] = len(values)
        vector = vectors[source, level, values]
        until = min(min(readers[t.var, target]) for t in members)
        at = _unpack_level(members[0], until, segments, loop_levels)
        assert at is not None
        split = _splitter(tuple(np.dtype(v.aval.dtype) for v in values))
        packed.first[at, target] += trace_equations(split, vector).named(values)
        packed.readers[vector, target] = {at}
        packed.transfers.append(OutlineTransfer(vector, source, target, level))
    packed.transfers[:0] = [t for t in transfers if t not in gone]
    return packed


def _unpack_level(t: OutlineTransfer, until: int, segments: set[tuple[int, int]], loop_levels: set[int]) -> int | None:
    """Returns the level at which the target unpacks its scalars: in its next segment, if no reader is before that."""
    own = sorted(level for level, g in segments if g == t.target and t.level < level <= until)
    if own:
        return own[0]
    level = t.level + 1
    while level in loop_levels:
        level += 1
    return level if level <= until else None


_WORDS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float16", "bfloat16", "float32", "float64"}  # fmt: skip


def _is_packable(aval: compat.Aval) -> bool:
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return (
        getattr(aval, "shape", None) == ()
        and str(aval.dtype) in _WORDS
        and compat.memory_kind(aval) is None
        and not (spec is not None and (spec.unreduced or spec.reduced))
    )


def _axis_types(aval: compat.Aval) -> tuple:
    """Returns the axis types of a value's mesh. They differ inside of `auto_axes`, and no equation may mix them."""
    return tuple(aval.sharding.mesh.axis_types or ()) if getattr(aval, "sharding", None) is not None else ()


def _join(*scalars: jax.Array) -> jax.Array:
    return jnp.concatenate([_to_words(x) for x in scalars])


def _to_words(x: jax.Array) -> jax.Array:
    if x.dtype == np.bool_:
        return x.astype(np.uint32)[None]
    bits = x.dtype.itemsize * 8
    if bits == 64:
        return jax.lax.bitcast_convert_type(x, np.uint32)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(np.uint32)[None]


def _from_words(words: jax.Array, dtype: np.dtype) -> jax.Array:
    if dtype == np.bool_:
        return words[0] != 0
    bits = dtype.itemsize * 8
    if bits == 64:
        return jax.lax.bitcast_convert_type(words, dtype)
    return jax.lax.bitcast_convert_type(words[0].astype(f"uint{bits}"), dtype)


@functools.lru_cache(maxsize=256)
def _splitter(dtypes: tuple[np.dtype, ...]) -> Callable[[jax.Array], list[jax.Array]]:
    """Returns the function that unpacks scalars of these types: always one object, so that JAX traces it once."""

    def split(vector):
        found, start = [], 0
        for dtype in dtypes:
            num = 2 if dtype.itemsize == 8 else 1
            found.append(_from_words(vector[start : start + num], dtype))
            start += num
        return found

    return split
