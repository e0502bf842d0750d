"""Finds stacked arrays whose layers are read by slices (`w[3]`, `for w in ws`), as they are or after a computation."""

import collections
import itertools
from collections.abc import Iterator, Sequence

from mpmd import _jax_compat as compat
from mpmd.cutting.pieces import Rows
from mpmd.ops.stage_end import mark_p

_PASSIVE = frozenset("squeeze reshape convert_element_type transpose broadcast_in_dim copy copy_p".split())
_Readers = dict[compat.Var, list[int]]


def sliced_stacks(eqns: Sequence[compat.JaxprEqn]) -> Iterator[tuple[compat.Var, Rows]]:
    """Yields operands of equations with marks (or values computed from whole operands) that are read only by slices,
    each row in one stage, and how to cut them.

    A slice belongs to the first stage that computes with it. Rows that no stage reads go with the rows before them.
    """
    stages, readers = _stages(eqns), collections.defaultdict(list)
    if not stages or stages[-1] == 0:
        return
    made = {v for eqn in eqns for v in eqn.outvars}
    for i, eqn in enumerate(eqns):
        for v in eqn.invars:
            if not isinstance(v, compat.Literal):
                readers[v].append(i)
    derived = _derived(eqns)
    for v in [v for v in readers if (v not in made or v in derived) and getattr(v.aval, "ndim", 0)]:
        if (rows := _rows(v, eqns, readers, stages, derived)) is not None:
            yield v, rows


def _stages(eqns: Sequence[compat.JaxprEqn]) -> list[int]:
    """Returns the number of forward marks before each equation."""
    found, stage = [], 0
    for eqn in eqns:
        found.append(stage)
        stage += eqn.primitive is mark_p and eqn.params["kind"] == "forward"
    return found


def _derived(eqns: Sequence[compat.JaxprEqn]) -> set[compat.Var]:
    """Returns the values computed from whole operands alone (converted, scaled, masked), not from a part of them."""
    made, derived = {v for eqn in eqns for v in eqn.outvars}, set()
    for eqn in eqns:
        if eqn.primitive is mark_p or eqn.primitive.name in ("slice", "unstack", "dynamic_slice", "gather"):
            continue
        read = [v for v in eqn.invars if not isinstance(v, compat.Literal)]
        if not eqn.effects and all(v in derived or v not in made for v in read):
            derived.update(eqn.outvars)
    return derived


def _rows(
    stack: compat.Var,
    eqns: Sequence[compat.JaxprEqn],
    readers: _Readers,
    stages: Sequence[int],
    derived: set[compat.Var],
) -> Rows | None:
    """Returns how to cut an array with each row read in one stage; None if it is read otherwise."""
    stages_of: dict[int, set[int]] = collections.defaultdict(set)
    axes = set()
    for i in readers.get(stack, ()):
        if not derived.isdisjoint(eqns[i].outvars):
            continue
        parts = _parts(eqns[i])
        if parts is None:
            return None
        for out, axis, start, stop in parts:
            axes.add(axis)
            if (stage := _first_use(out, eqns, readers, stages)) is not None:
                for row in range(start, stop):
                    stages_of[row].add(stage)
    if len(axes) != 1 or any(len(found) > 1 for found in stages_of.values()):
        return None
    (axis,) = axes
    starts = [row for before, row in itertools.pairwise(sorted(stages_of)) if stages_of[before] != stages_of[row]]
    if not starts:
        return None
    return Rows(axis, (0, *starts, stack.aval.shape[axis]))


def _parts(eqn: compat.JaxprEqn) -> list[tuple[compat.Var, int, int, int]] | None:
    """Returns the results of an equation that takes some rows of its operand, with the axis and these rows."""
    shape = eqn.invars[0].aval.shape
    if eqn.primitive.name == "unstack":
        return [(v, eqn.params["axis"], i, i + 1) for i, v in enumerate(eqn.outvars)]
    if eqn.primitive.name != "slice" or any(s != 1 for s in eqn.params["strides"] or ()):
        return None
    ends = zip(eqn.params["start_indices"], eqn.params["limit_indices"], shape, strict=True)
    taken = [(axis, start, stop) for axis, (start, stop, n) in enumerate(ends) if (start, stop) != (0, n)]
    return [(eqn.outvars[0], *taken[0])] if len(taken) == 1 else None


def _first_use(v: compat.Var, eqns: Sequence[compat.JaxprEqn], readers: _Readers, stages: Sequence[int]) -> int | None:
    """Returns the first stage that computes with a value, None if none does."""
    uses, found = list(readers.get(v, ())), []
    while uses:
        i = uses.pop()
        if eqns[i].primitive.name in _PASSIVE:
            uses += readers.get(eqns[i].outvars[0], ())
        else:
            found.append(stages[i])
    return min(found, default=None)
