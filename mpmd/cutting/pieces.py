"""Rows: how an array is cut along one axis, and the two primitives that cut it and put it together again.

`split_rows_p` makes pieces of an array, `join_rows_p` an array from its pieces. The pass `split_scans` inserts them
into a step, and the pass `split_rows` moves them to its arguments and results. Those that remain become slices and
concatenations.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.tracing.new_equations import Atom


@dataclasses.dataclass(frozen=True)
class Rows:
    """How an array is cut along `axis`: piece k has the rows `bounds[k] … bounds[k + 1]`."""

    axis: int
    bounds: tuple[int, ...]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """`(start, stop)` of each piece."""
        return tuple(itertools.pairwise(self.bounds))

    def on(self, axis: int) -> "Rows":
        """Returns the same cut on another axis."""
        return Rows(axis, self.bounds)

    def reshaped(self, shape: Sequence[int], new: Sequence[int]) -> "Rows | None":
        """Returns the cut after a reshape that merges its axis with those behind, or divides it; None after others."""
        row = math.prod(shape[self.axis + 1 :])
        for axis, size in enumerate(new):
            new_row = math.prod(new[axis + 1 :])
            is_same = size > 1 and math.prod(shape[: self.axis]) == math.prod(new[:axis])
            if is_same and all(b * row % new_row == 0 for b in self.bounds):
                return Rows(axis, tuple(b * row // new_row for b in self.bounds))
        return None

    def fits(self, aval: compat.Aval) -> bool:
        """Returns whether an array of this type can be cut like this."""
        shape = getattr(aval, "shape", ())
        return self.axis < len(shape) and shape[self.axis] == self.bounds[-1]

    def avals(self, aval: compat.Aval) -> list[compat.Aval]:
        """Returns the types of the pieces of an array."""
        return [with_rows(aval, self.axis, stop - start) for start, stop in self.ranges]

    def __str__(self):
        return f"axis {self.axis} at {', '.join(map(str, self.bounds))}"


def with_rows(aval: compat.Aval, axis: int, rows: int) -> compat.Aval:
    """Returns the type `aval` with another number of rows."""
    return aval.update(shape=(*aval.shape[:axis], rows, *aval.shape[axis + 1 :]))


def cut(x: jax.Array, rows: Rows) -> list[jax.Array]:
    """Returns the pieces of an array."""
    return [jax.lax.slice_in_dim(x, start, stop, axis=rows.axis) for start, stop in rows.ranges]


def pieces_of(x: jax.Array | np.ndarray, rows: Rows) -> Sequence[jax.Array | np.ndarray]:
    """Returns the pieces of an array, which are NumPy arrays if it is one."""
    if not isinstance(x, np.ndarray):
        return cut(x, rows)
    return [x[(*[slice(None)] * rows.axis, slice(start, stop))] for start, stop in rows.ranges]


split_rows_p = compat.Primitive("split_rows")
split_rows_p.multiple_results = True
split_rows_p.def_impl(lambda x, *, rows: cut(x, rows))
split_rows_p.def_abstract_eval(lambda x, *, rows: rows.avals(x))
compat.mlir.register_lowering(
    split_rows_p, compat.mlir.lower_fun(lambda x, *, rows: cut(x, rows), multiple_results=True)
)


def _joined(*pieces: jax.Array, rows: Rows) -> jax.Array:
    return jax.lax.concatenate(pieces, rows.axis)


join_rows_p = compat.Primitive("join_rows")
join_rows_p.def_impl(_joined)
join_rows_p.def_abstract_eval(lambda *pieces, rows: with_rows(pieces[0], rows.axis, rows.bounds[-1]))
compat.mlir.register_lowering(join_rows_p, compat.mlir.lower_fun(_joined, multiple_results=False))


def split_eqn(like: compat.JaxprEqn, x: Atom, rows: Rows) -> compat.JaxprEqn:
    """Returns the equation that cuts `x`, at the place of `like` in the user's code."""
    return _eqn(like, split_rows_p, [x], [compat.Var(a) for a in rows.avals(x.aval)], {"rows": rows})


def join_eqn(like: compat.JaxprEqn, pieces: Sequence[Atom], rows: Rows, out: compat.Var) -> compat.JaxprEqn:
    """Returns the equation that joins pieces to `out`."""
    return _eqn(like, join_rows_p, list(pieces), [out], {"rows": rows})


def _eqn(
    like: compat.JaxprEqn, primitive: compat.Primitive, invars: list, outvars: list, params: dict
) -> compat.JaxprEqn:
    return like.replace(primitive=primitive, invars=invars, outvars=outvars, params=params, effects=frozenset())


def plain(eqn: compat.JaxprEqn) -> Callable:
    """Returns the function that a left-over `split_rows` or `join_rows` computes."""
    return functools.partial(_joined if eqn.primitive is join_rows_p else cut, rows=eqn.params["rows"])
