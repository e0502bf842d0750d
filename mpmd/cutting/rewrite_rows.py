"""Rewrites a jaxpr on pieces of the arrays that are cut: each equation by its factor, or with its inner jaxprs.

`spread` has found which values are cut, and how. Equations that cannot work on pieces read the whole array, by a join.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax

from mpmd import _jax_compat as compat
from mpmd.cutting.pieces import Rows, join_eqn, join_rows_p, plain, split_eqn, split_rows_p, with_rows
from mpmd.cutting.split_scans import chain
from mpmd.cutting.spread import Opened, Spread
from mpmd.graphs.axis_rules import Factor, piece_params
from mpmd.graphs.equations import live_equations
from mpmd.ops.loop_primitive import treduce_p
from mpmd.ops.stage_end import mark_p
from mpmd.tracing.new_equations import Atom, append, copy_equations, trace_equations

Cut = Sequence[Rows | None]


@dataclasses.dataclass(frozen=True)
class WholeStack:
    """A stacked value that an equation needs as a whole, from all groups that have rows of it."""

    aval: compat.Aval  # its type
    reader: compat.JaxprEqn | None  # the equation that needs it; None for a result

    def __str__(self):
        e = self.reader
        who = "a result" if e is None else f"{e.primitive.name} at {compat.source_line(e)}"
        return f"{who} needs all layers of {self.aval.str_short(short_dtypes=True)} in one place"


class Rewriter:
    """Rewrites a jaxpr on pieces of the values that are cut."""

    def __init__(self, spread: Spread, joins: list[WholeStack] | None = None):
        self.joins: list[WholeStack] = [] if joins is None else joins
        self._spread = spread
        self._reader: compat.JaxprEqn | None = None
        self._eqns: list[compat.JaxprEqn] = []
        self._whole: dict[compat.Var, Atom] = {}
        self._pieces: dict[tuple[compat.Var, Rows], list[Atom]] = {}
        self._readers: dict[compat.Var, compat.JaxprEqn | None] = {}  # of the joins
        self._rows: dict[compat.Var, Rows] = {}  # the cut of each value that exists in pieces
        self._zeros: set[Atom] = set()  # pieces that hold only zeros

    def rewrite(self, jaxpr: compat.Jaxpr, in_rows: Cut, out_rows: Cut) -> compat.Jaxpr:
        """Returns the jaxpr on pieces, with inputs and results cut like `in_rows` and `out_rows`."""
        invars = [v for x, rows in zip(jaxpr.invars, in_rows, strict=True) for v in self._bind(x, rows)]
        for eqn in jaxpr.eqns:
            self._add(eqn)
        self._reader = None
        last = (jaxpr.eqns or (copy_equations(jaxpr.invars[0]).eqns if jaxpr.invars else [None]))[-1]
        outvars = [v for x, rows in zip(jaxpr.outvars, out_rows, strict=True) for v in self._read(last, x, rows)]
        eqns = [e for eqn in live_equations(self._eqns, outvars, (mark_p, treduce_p)) for e in self._plain(eqn)]
        return compat.new_jaxpr(jaxpr, invars=invars, outvars=outvars, eqns=eqns)

    # --- values ---

    def _bind(self, v: compat.Var, rows: Rows | None) -> list[Atom]:
        """Returns new variables for a value (the old one, if it is whole)."""
        if rows is None:
            self._whole[v] = v
            return [v]
        if isinstance(v, compat.DropVar):
            return [compat.DropVar(a) for a in rows.avals(v.aval)]
        pieces: list[Atom] = [compat.Var(a) for a in rows.avals(v.aval)]
        self._set(v, rows, pieces)
        return pieces

    def _set(self, v: compat.Var, rows: Rows, pieces: Sequence[Atom]) -> None:
        self._rows[v] = rows
        self._pieces[v, rows] = list(pieces)

    def _read(self, eqn: compat.JaxprEqn, v: Atom, rows: Rows | None) -> list[Atom]:
        """Returns a value for the equation `eqn` to read: its pieces, or itself."""
        return [self._read_whole(eqn, v)] if rows is None else self._read_pieces(eqn, v, rows)

    def _read_whole(self, eqn: compat.JaxprEqn, v: Atom) -> Atom:
        if isinstance(v, compat.Literal):
            return v
        if v not in self._whole:
            rows = self._rows[v]
            self._whole[v] = joined = compat.Var(v.aval)
            self._eqns.append(join_eqn(eqn, self._pieces[v, rows], rows, joined))
            self._readers[joined] = self._reader
        return self._whole[v]

    def _read_pieces(self, eqn: compat.JaxprEqn, v: Atom, rows: Rows) -> list[Atom]:
        if isinstance(v, compat.Literal) or (v, rows) not in self._pieces:
            new = split_eqn(eqn, self._read_whole(eqn, v), rows)
            self._eqns.append(new)
            if isinstance(v, compat.Literal):
                return new.outvars
            self._pieces[v, rows] = new.outvars
        return self._pieces[v, rows]

    # --- equations ---

    def _add(self, eqn: compat.JaxprEqn) -> None:
        self._reader = eqn
        if eqn.primitive is split_rows_p:
            pieces = self._read_pieces(eqn, eqn.invars[0], eqn.params["rows"])
            self._whole.update(zip(eqn.outvars, pieces, strict=True))
        elif eqn.primitive is join_rows_p and self._spread.of(eqn.outvars[0]) == eqn.params["rows"]:
            self._set(eqn.outvars[0], eqn.params["rows"], [self._read_whole(eqn, v) for v in eqn.invars])
        elif eqn.primitive is mark_p:
            rows = self.of(eqn.invars)
            self.on_pieces(eqn, rows, rows)
        elif (rows := self._spread.chopped.get(id(eqn))) is not None:
            for piece in chain(eqn, rows):
                self._add(piece)
        elif (opened := self._spread.opened.get(id(eqn))) is not None:
            _INSIDE[eqn.primitive.name](self, eqn, opened)
        elif (found := self._factor(eqn)) is not None:
            self._by_pieces(eqn, *found)
        elif eqn.primitive.name == "reshape" and (rows := self._merged(eqn)) is not None:
            self._reshape(eqn, rows)
        elif eqn.primitive.name == "slice" and (rows := self._sliced(eqn)) is not None:
            self._slice(eqn, rows)
        elif eqn.primitive.name == "unstack" and (rows := self._sliced(eqn)) is not None:
            self._unstack(eqn, rows)
        elif eqn.primitive.name == "pad" and (rows := self._padded(eqn)) is not None:
            self._pad(eqn, rows)
        elif eqn.primitive.name == "stack" and (rows := self._spread.of(eqn.outvars[0])) is not None:
            self._stack(eqn, rows)
        else:
            invars = [self._read_whole(eqn, v) for v in eqn.invars]
            self._whole.update((v, v) for v in eqn.outvars)
            self._eqns.append(eqn.replace(invars=invars))

    def _factor(self, eqn: compat.JaxprEqn) -> tuple[Factor, Rows] | None:
        """Returns the factor by which an equation is cut, and the rows (on no particular axis): those of an operand in
        pieces, or else of a result that is wanted in pieces.
        """
        if not any(self._spread.of(v) for v in (*eqn.invars, *eqn.outvars)):
            return None
        for factor in self._spread.factors(eqn):
            for v, axis in zip(eqn.invars, factor.ins, strict=True):
                rows = None if isinstance(v, compat.Literal) else self._rows.get(v)
                if rows is not None and rows.axis == axis:
                    return factor, rows
        for factor in self._spread.factors(eqn):
            for v, axis in zip(eqn.outvars, factor.outs, strict=True):
                if (rows := self._spread.of(v)) is not None and rows.axis == axis:
                    return factor, rows
        return None

    def _merged(self, eqn: compat.JaxprEqn) -> Rows | None:
        """Returns how the operand of a reshape is cut like its cut result, if the axis has another size; or None."""
        rows, shape = self._spread.of(eqn.outvars[0]), eqn.invars[0].aval.shape
        if rows is None or eqn.params["dimensions"] is not None:  # order="F"
            return None
        return rows.reshaped(eqn.outvars[0].aval.shape, shape)

    def _reshape(self, eqn: compat.JaxprEqn, rows: Rows) -> None:
        (v,), (out,) = eqn.invars, eqn.outvars
        out_rows, pieces = self._spread.rows[out], [compat.Var(a) for a in self._spread.rows[out].avals(out.aval)]
        factor = Factor((rows.axis,), (out_rows.axis,))
        for given, piece in zip(self._read_pieces(eqn, v, rows), pieces, strict=True):
            params = piece_params(eqn, factor, piece.aval.shape[out_rows.axis])
            self._eqns.append(eqn.replace(invars=[given], outvars=[piece], params=params))
        self._set(out, out_rows, pieces)

    def _sliced(self, eqn: compat.JaxprEqn) -> Rows | None:
        """Returns the rows of the operand of a slice, if the slice can be taken from its pieces."""
        (v,), strides = eqn.invars, eqn.params.get("strides")
        rows = None if isinstance(v, compat.Literal) or v in self._whole else self._rows.get(v)
        if rows is None:
            return None
        if eqn.primitive.name == "slice" and not eqn.outvars[0].aval.shape[rows.axis]:  # none are taken
            return None
        return rows if strides is None or strides[rows.axis] == 1 else None

    def _slice(self, eqn: compat.JaxprEqn, rows: Rows) -> None:
        """Takes some of the rows: the parts of the pieces that have any of them."""
        (v,), (out,), axis = eqn.invars, eqn.outvars, rows.axis
        first, end = eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]
        parts, bounds = [], [0]
        for piece, (start, stop) in zip(self._pieces[v, rows], rows.ranges, strict=True):
            a, b = max(first, start), min(end, stop)
            if a < b:
                part = compat.Var(with_rows(out.aval, axis, b - a))
                low, high = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
                low[axis], high[axis] = a - start, b - start
                params = {**eqn.params, "start_indices": tuple(low), "limit_indices": tuple(high)}
                self._eqns.append(eqn.replace(invars=[piece], outvars=[part], params=params))
                parts.append(part)
                bounds.append(b - first)
        if len(parts) == 1:
            self._whole[out] = parts[0]
        else:
            self._set(out, Rows(axis, tuple(bounds)), parts)

    def _unstack(self, eqn: compat.JaxprEqn, rows: Rows) -> None:
        """Takes each row from the piece that has it."""
        for piece, (start, stop) in zip(self._pieces[eqn.invars[0], rows], rows.ranges, strict=True):
            outvars = eqn.outvars[start:stop]
            self._whole.update(zip(outvars, outvars, strict=True))
            self._eqns.append(eqn.replace(invars=[piece], outvars=outvars))

    def _stack(self, eqn: compat.JaxprEqn, rows: Rows) -> None:
        """Stacks the rows of each piece."""
        pieces = [compat.Var(a) for a in rows.avals(eqn.outvars[0].aval)]
        for piece, (start, stop) in zip(pieces, rows.ranges, strict=True):
            parts = [self._read_whole(eqn, v) for v in eqn.invars[start:stop]]
            self._eqns.append(eqn.replace(invars=parts, outvars=[piece]))
        self._set(eqn.outvars[0], rows, pieces)

    def _padded(self, eqn: compat.JaxprEqn) -> Rows | None:
        """Returns the rows of the result, if only zeros are added around the operand: the cotangent of a slice."""
        rows, value = self._spread.of(eqn.outvars[0]), eqn.invars[1]
        if rows is None or not isinstance(value, compat.Literal) or value.val != 0:
            return None
        is_plain = all(min(config) >= 0 and config[2] == 0 for config in eqn.params["padding_config"])
        return rows if is_plain else None

    def _pad(self, eqn: compat.JaxprEqn, rows: Rows) -> None:
        """Pads the pieces that have rows of the operand, and makes the others of zeros."""
        v, axis, out = eqn.invars[0], rows.axis, eqn.outvars[0].aval
        first = eqn.params["padding_config"][axis][0]
        end, pieces = first + v.aval.shape[axis], []
        for start, stop in rows.ranges:
            a, b = max(first, start), min(end, stop)
            if a < b:
                config = list(eqn.params["padding_config"])
                config[axis] = (a - start, stop - b, 0)
                make = functools.partial(_padded, part=slice(a - first, b - first), axis=axis, config=config)
                pieces.append(append(self._eqns, eqn, trace_equations(make, self._read_whole(eqn, v))))
            else:
                zeros = trace_equations(lambda n=stop - start: jax.lax.full_like(with_rows(out, axis, n), 0))
                pieces.append(append(self._eqns, eqn, zeros))
                self._zeros.add(pieces[-1])
        self._set(eqn.outvars[0], rows, pieces)

    def _by_pieces(self, eqn: compat.JaxprEqn, factor: Factor, rows: Rows) -> None:
        operands = [
            self._read_pieces(eqn, v, rows.on(axis))
            if axis is not None
            else [self._read_whole(eqn, v)] * len(rows.ranges)
            for v, axis in zip(eqn.invars, factor.ins, strict=True)
        ]
        made = []
        for k, (start, stop) in enumerate(rows.ranges):
            given = [x[k] for x in operands]
            if eqn.primitive.name == "add_any" and not self._zeros.isdisjoint(given):
                # The gradient of a layer's slice is zero in all other pieces: adding these would cost layers² sums.
                made.append([given[given[0] in self._zeros]])
                continue
            outvars = [
                compat.Var(v.aval if axis is None else with_rows(v.aval, axis, stop - start))
                for v, axis in zip(eqn.outvars, factor.outs, strict=True)
            ]
            params = piece_params(eqn, factor, stop - start)
            self._eqns.append(eqn.replace(invars=given, outvars=outvars, params=params))
            made.append(outvars)
        for v, axis, *pieces in zip(eqn.outvars, factor.outs, *made, strict=True):
            if axis is None:
                self._whole[v] = self._combined(eqn, factor, pieces)
            else:
                self._set(v, rows.on(axis), pieces)

    def _combined(self, eqn: compat.JaxprEqn, factor: Factor, pieces: Sequence[Atom]) -> Atom:
        combine = factor.combine
        assert combine is not None
        return functools.reduce(lambda x, y: append(self._eqns, eqn, trace_equations(combine, x, y)), pieces)

    # --- equations with jaxprs inside ---

    def inside(self, jaxpr: compat.Jaxpr, in_rows: Cut, out_rows: Cut) -> compat.Jaxpr:
        """Returns the jaxpr of an equation, on pieces."""
        return Rewriter(self._spread, self.joins).rewrite(jaxpr, in_rows, out_rows)

    def on_pieces(self, eqn: compat.JaxprEqn, in_rows: Cut, out_rows: Cut, **params: object) -> None:
        """Rewrites an equation with pieces of its operands and results, and other parameters."""
        invars = [x for v, r in zip(eqn.invars, in_rows, strict=True) for x in self._read(eqn, v, r)]
        outvars = [x for v, r in zip(eqn.outvars, out_rows, strict=True) for x in self._bind(v, r)]
        self._eqns.append(eqn.replace(invars=invars, outvars=outvars, params={**eqn.params, **params}))

    def of(self, atoms: Sequence[Atom]) -> list[Rows | None]:
        """Returns how atoms are cut."""
        return [self._spread.of(v) for v in atoms]

    # --- remaining cuts and joins ---

    def _plain(self, eqn: compat.JaxprEqn) -> list[compat.JaxprEqn]:
        """Returns slices for a cut that remains, and a concatenation for a join; any other equation as it is."""
        if eqn.primitive is join_rows_p:
            (out,) = eqn.outvars
            self.joins.append(WholeStack(out.aval, self._readers.get(out)))
        elif eqn.primitive is not split_rows_p:
            return [eqn]
        new = trace_equations(plain(eqn), *eqn.invars).named(eqn.outvars)
        return [e.replace(source_info=eqn.source_info) for e in new]


def _padded(x: jax.Array, part: slice, axis: int, config: Sequence[tuple[int, int, int]]) -> jax.Array:
    """Returns some rows of `x` with zeros around them."""
    if part != slice(0, x.shape[axis]):
        x = jax.lax.slice_in_dim(x, part.start, part.stop, axis=axis)
    return jax.lax.pad(x, jax.numpy.zeros((), x.dtype), config) if any(map(any, config)) else x


# --- how the jaxprs of an equation are put together again -----------------------------------------


def _count(rows: Cut) -> int:
    return sum(1 if r is None else len(r.ranges) for r in rows)


def _closed(jaxpr: compat.Jaxpr) -> compat.ClosedJaxpr:
    return compat.ClosedJaxpr(jaxpr, ())


def _treduce(rewriter: Rewriter, eqn: compat.JaxprEqn, opened: Opened) -> None:
    (jaxpr,) = opened.inner
    info = eqn.params["info"]
    ins, inner_outs = rewriter.of(jaxpr.invars), rewriter.of(jaxpr.outvars)
    outs: list[Rows | None] = []
    for j, (v, inner) in enumerate(zip(eqn.outvars, jaxpr.outvars, strict=True)):
        link = next((k for k in opened.links if k.first is inner and k.second is v), None)
        rows = inner_outs[j]
        axis = None if link is None or rows is None else link.moved(rows.axis)
        if rows is None or axis is None:
            inner_outs[j] = None
        outs.append(rows.on(axis) if rows is not None and axis is not None else None)
    operations = tuple(op for op, r in zip(info.operations, outs, strict=True) for _ in range(_count([r])))
    body = rewriter.inside(jaxpr, ins, inner_outs)
    info = dataclasses.replace(info, operations=operations)
    rewriter.on_pieces(eqn, ins[:-1], outs, jaxpr=_closed(body), info=info)


def _scan_or_while(rewriter: Rewriter, eqn: compat.JaxprEqn, opened: Opened) -> None:
    loop = opened.loop
    assert loop is not None
    body, n, m = opened.inner[0], len(loop.consts), len(loop.carry)
    ins, stacks = rewriter.of(body.invars), rewriter.of(body.outvars[m:])
    carry, of_test = ins[n : n + m], rewriter.of([x.inner for x in loop.test_consts])
    new = _closed(rewriter.inside(body, ins, [*carry, *stacks]))
    params = compat.scan_params(eqn, new, _count(ins[:n]), _count(carry))
    if loop.test is not None:
        condition = _closed(rewriter.inside(loop.test, [*of_test, *carry], [None]))
        params |= {"cond_jaxpr": condition, "cond_nconsts": _count(of_test)}
    above = lambda rows: [None if r is None else r.on(r.axis + 1) for r in rows]  # noqa: E731
    rewriter.on_pieces(eqn, [*of_test, *ins[: n + m], *above(ins[n + m :])], [*carry, *above(stacks)], **params)


def _cond(rewriter: Rewriter, eqn: compat.JaxprEqn, opened: Opened) -> None:
    ins, outs = rewriter.of(eqn.invars[1:]), rewriter.of(eqn.outvars)
    branches = tuple(_closed(rewriter.inside(jaxpr, ins, outs)) for jaxpr in opened.inner)
    rewriter.on_pieces(eqn, [None, *ins], outs, branches=branches)


def _checkpoint(rewriter: Rewriter, eqn: compat.JaxprEqn, opened: Opened) -> None:
    (jaxpr,) = opened.inner
    ins, outs = rewriter.of(jaxpr.invars), rewriter.of(jaxpr.outvars)
    rewriter.on_pieces(eqn, ins, outs, jaxpr=rewriter.inside(jaxpr, ins, outs))


_INSIDE = {
    "treduce": _treduce,
    "scan": _scan_or_while,
    "while": _scan_or_while,
    "cond": _cond,
    compat.CHECKPOINT: _checkpoint,
}
