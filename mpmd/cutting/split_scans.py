"""Cuts a `scan` over layers into shorter ones, with an ordinary mark between any two of them.

The pieces run one after the other: their carries are chained, scanned inputs and outputs are cut along the layers, and
all pieces read the constants. A carry that only sums (in a backward pass, the gradient of a constant) is summed in each
piece separately; the sums are added afterwards. So no such gradient crosses a stage end.
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence

import jax

from mpmd import _jax_compat as compat
from mpmd.cutting.candidates import marked_kind, marks_in
from mpmd.cutting.pieces import Rows, join_eqn, split_eqn
from mpmd.graphs.open_loops import Carry, OpenLoop
from mpmd.ops.stage_end import MarkId, boundaries, mark_p, without
from mpmd.tracing.new_equations import Atom, append, trace_equations


def split_scans(body: compat.ClosedJaxpr, lengths: Sequence[tuple[int, ...]]) -> compat.ClosedJaxpr:
    """Returns a loop's body without marks in scans: such scans become chains of shorter ones between ordinary marks.

    Args:
      body: the body, differentiated and flat.
      lengths: how many layers each stage gets, for each forward scan with a mark in its body, in program order. The
        last number counts the layers after the last stage end in the scan, 0 if the stage end follows the last layer.
    """
    jaxpr, tied = body.jaxpr, tied_scans(body.jaxpr)
    forward = [eqn for eqn in jaxpr.eqns if id(eqn) in tied and tied[id(eqn)][1] == "forward"]
    cuts = [_scan_cut(eqn, own) for eqn, own in zip(forward, lengths, strict=True)]
    eqns: list[compat.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if id(eqn) in tied:
            number, kind = tied[id(eqn)]
            eqns += chain(without_marks(eqn), *cuts[number], kind)
        else:
            eqns.append(eqn)
    return compat.ClosedJaxpr(compat.new_jaxpr(jaxpr, eqns=eqns), body.consts)


def without_marks(eqn: compat.JaxprEqn) -> compat.JaxprEqn:
    """Returns a scan without the marks in its body."""
    closed = eqn.params["jaxpr"]
    bare = compat.ClosedJaxpr(without(closed.jaxpr, (mark_p,)), closed.consts)
    return eqn.replace(params={**eqn.params, "jaxpr": bare})


def tied_scans(jaxpr: compat.Jaxpr) -> dict[int, tuple[int, str]]:
    """Maps each marked scan (by the id of its equation) to the number of its forward scan, and to its kind.

    A backward scan transposes a forward one: their marks share an id.
    """
    marked = [(eqn, kind) for eqn in jaxpr.eqns if (kind := marked_kind(eqn)) is not None]
    own = [[m for m in marks_in(eqn) if m.params["kind"] == kind] for eqn, kind in marked]
    ids = {marks[-1].params["id"] for marks, (_, kind) in zip(own, marked, strict=True) if kind == "forward"}
    found = [next((m for m in reversed(marks) if m.params["id"] in ids), None) for marks in own]
    scans = [(id(eqn), kind) for (eqn, kind), mark in zip(marked, found, strict=True) if mark is not None]
    numbers = boundaries([mark.params for mark in found if mark is not None])
    return {scan: (number, kind) for (scan, kind), number in zip(scans, numbers, strict=True)}


def _scan_cut(eqn: compat.JaxprEqn, lengths: tuple[int, ...]) -> tuple[Rows, list[compat.JaxprEqn]]:
    """Returns the layers of each piece of a scan, and the forward mark after each piece but the last; one mark more if
    a stage ends after the last layer.
    """
    mark = [m for m in marks_in(eqn) if m.params["kind"] == "forward"][-1]
    pieces = [n for n in lengths if n]
    assert sum(pieces) == eqn.params["length"], (pieces, eqn.params["length"])
    bounds = itertools.accumulate(pieces[::-1] if eqn.params["reverse"] else pieces, initial=0)
    ends = [mark.replace(params={**mark.params, "optional": False, "id": MarkId()}) for _ in lengths[:-1]]
    return Rows(0, tuple(bounds)), ends


# --- the pieces of a scan -------------------------------------------------------------------------


def chain(
    eqn: compat.JaxprEqn, rows: Rows, marks: Sequence[compat.JaxprEqn] = (), kind: str = "forward"
) -> list[compat.JaxprEqn]:
    """Returns a scan as a chain of shorter ones.

    Args:
      eqn: the scan, without marks in its body.
      rows: its pieces, along its iterations.
      marks: the stage ends behind its first pieces, in the order of the forward pass.
      kind: of the marks: `forward` ones stand behind the piece that they end, `backward` ones ahead of it.
    """
    loop, several = OpenLoop.of(eqn), len(rows.ranges) > 1
    eqns = [split_eqn(eqn, x.outer, rows) for x in loop.rows] if several else []
    xs = [e.outvars for e in eqns] or [[x.outer] for x in loop.rows]
    sums = {i for i, c in enumerate(loop.carry) if several and _is_sum(loop, c)}
    carry, parts = [c.first for c in loop.carry], defaultdict(list)
    ys: dict[int, list[compat.Var]] = {}
    last = len(rows.ranges) - 1
    for n in range(last + 1):
        if kind == "backward" and last - n < len(marks):
            carry = _mark(eqns, eqn, marks[last - n], kind, carry, sums)
        if n:
            zeros = {i: append(eqns, eqn, trace_equations(jax.numpy.zeros_like, carry[i])) for i in sums}
            carry = [zeros.get(i, v) for i, v in enumerate(carry)]
        k = last - n if eqn.params["reverse"] else n
        start, stop = rows.ranges[k]
        piece = _piece(loop, [x[k] for x in xs], carry, stop - start)
        carry, ys[k] = list[Atom](piece.outvars[: len(carry)]), piece.outvars[len(carry) :]
        eqns.append(piece)
        for i in sums:
            parts[i].append(carry[i])
        if kind == "forward" and n < len(marks):
            carry = _mark(eqns, eqn, marks[n], kind, carry, sums)

    def add(total: Atom, part: Atom) -> Atom:  # as differentiation writes it
        return append(eqns, eqn, trace_equations(compat.ad.add_jaxvals, total, part))

    for i in sums:
        carry[i] = functools.reduce(add, parts[i])
    renamed = [*zip(carry, loop.carry, strict=True), *zip(ys[0] if last == 0 else (), loop.stacks, strict=False)]
    names = {v: x[-1] for v, x in renamed if not isinstance(x[-1], compat.DropVar)}
    eqns = compat.renamed_equations(eqns, names)
    for j, stack in enumerate(loop.stacks if last else ()):
        if not isinstance(stack.outer, compat.DropVar):
            eqns.append(join_eqn(eqn, [ys[k][j] for k in range(len(rows.ranges))], rows, stack.outer))
    return eqns


def _piece(loop: OpenLoop, xs: Sequence[Atom], carry: Sequence[Atom], length: int) -> compat.JaxprEqn:
    """Returns a scan over some of the iterations."""
    unroll = loop.eqn.params["unroll"]
    params = {**loop.eqn.params, "length": length, "unroll": min(unroll, length) if length else unroll}
    part = Rows(0, (0, length))
    return dataclasses.replace(
        loop,
        eqn=loop.eqn.replace(params=params),
        carry=[c._replace(first=x, last=compat.Var(c.last.aval)) for c, x in zip(loop.carry, carry, strict=True)],
        rows=[r._replace(outer=x) for r, x in zip(loop.rows, xs, strict=True)],
        stacks=[s._replace(outer=compat.Var(part.avals(s.outer.aval)[0])) for s in loop.stacks],
    ).closed()


def _is_sum(loop: OpenLoop, carry: Carry) -> bool:
    """Returns whether a carry is only added to: a chain of gradient sums, each of them read once, reads it once."""
    v, out = carry.before, carry.after
    if v is out:
        return False
    outs = loop.outs
    while v is not out:
        readers = [e for e in loop.eqns for x in e.invars if x is v]
        if len(readers) != 1 or readers[0].primitive.name != "add_any" or any(v is o for o in outs):
            return False
        (v,) = readers[0].outvars
    return sum(o is out for o in outs) == 1 and not any(x is out for e in loop.eqns for x in e.invars)


def _mark(
    eqns: list[compat.JaxprEqn],
    eqn: compat.JaxprEqn,
    mark: compat.JaxprEqn,
    kind: str,
    carry: Sequence[Atom],
    sums: Collection[int],
) -> list[Atom]:
    """Adds a mark and returns the carries behind it; sums do not cross it."""
    crossing = [i for i, v in enumerate(carry) if i not in sums and not isinstance(v, compat.Literal)]
    found = list(carry)
    for i in crossing:
        found[i] = compat.Var(carry[i].aval)
    if crossing:
        eqns.append(
            mark.replace(
                invars=[carry[i] for i in crossing],
                outvars=[found[i] for i in crossing],
                params={**mark.params, "kind": kind},
                source_info=mark.source_info.replace(name_stack=eqn.source_info.name_stack),
            )
        )
    return found
