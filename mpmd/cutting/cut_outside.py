"""Cuts scans over layers that stand outside of the loops: prediction and generation with a scanned model.

Stages end where the stacked weights change groups. If nothing is placed yet, the groups get equally many layers. In a
step with loops, marks outside of them have no effect. Nor do marks in a scan over the data, such as the user's own loop
over microbatches.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence

from mpmd import _jax_compat as compat
from mpmd.cutting.candidates import marked_kind, marks_in
from mpmd.cutting.pieces import Rows
from mpmd.cutting.split_scans import split_scans, without_marks
from mpmd.cutting.spread import Spread
from mpmd.graphs import equations
from mpmd.ops.loop_primitive import treduce_p
from mpmd.ops.stage_end import mark_p
from mpmd.tracing.arguments import Hint
from mpmd.tracing.trace import Trace
from mpmd.users_frame import users_frame


def cut_outside(trace: Trace, hints: Sequence[Hint], num_groups: int) -> Trace:
    """Returns the step without marks in scans outside of the loops; these scans are cut."""
    if not any(marked_kind(e) for e in trace.jaxpr.eqns):
        return trace
    trace = _without_marks_over_data(trace)
    scans = [e for e in trace.jaxpr.eqns if marked_kind(e) == "forward"]
    if any(e.primitive is treduce_p for e in trace.jaxpr.eqns):
        lengths = [(e.params["length"],) for e in scans]
    else:
        lengths = _placed(trace, scans, hints) or _even_in_roles(trace, scans, num_groups)
    return dataclasses.replace(trace, jaxpr=split_scans(compat.ClosedJaxpr(trace.jaxpr, ()), lengths).jaxpr)


def _without_marks_over_data(trace: Trace) -> Trace:
    """Returns the step without the marks of scans over data; warns about them if the step has no loop."""
    forward = [e for e in trace.jaxpr.eqns if marked_kind(e) == "forward"]
    over_layers = {m.params["id"] for e in forward if _marks_follow_carry(e) for m in marks_in(e)}
    eqns: list[compat.JaxprEqn] = []
    lines: list[str] = []
    for eqn in trace.jaxpr.eqns:
        if marked_kind(eqn) and over_layers.isdisjoint(m.params["id"] for m in marks_in(eqn)):
            lines += [compat.source_line(m) for m in marks_in(eqn)]
            eqn = without_marks(eqn)
        eqns.append(eqn)
    if lines and not any(e.primitive is treduce_p for e in eqns):
        warnings.warn(
            f"mpmd.jit: the stage end at {lines[0]} stands in a lax.scan (or lax.map) over data, such as a loop over"
            " microbatches. No stage ends there: all of that loop runs in one group. Use"
            " mpmd.treduce(fun, microbatches, schedule) in its place.",
            stacklevel=users_frame(),
        )
    return dataclasses.replace(trace, jaxpr=compat.new_jaxpr(trace.jaxpr, eqns=eqns)) if lines else trace


def _marks_follow_carry(eqn: compat.JaxprEqn) -> bool:
    """Returns whether a mark in the body of a scan depends on a mark of the iteration before: the layer before."""
    body = eqn.params["jaxpr"].jaxpr
    first, num_carries = compat.scan_sizes(eqn)
    marked = [e for e in body.eqns if e.primitive is mark_p or any(True for _ in marks_in(e))]
    given = _computed_from(body, [v for e in marked for v in e.outvars])
    carries = zip(body.invars[first : first + num_carries], body.outvars[:num_carries], strict=True)
    reached = _computed_from(
        body, [v for v, after in carries if not isinstance(after, compat.Literal) and after in given]
    )
    return any(not reached.isdisjoint(equations.variables(e.invars)) for e in marked)


def _computed_from(body: compat.Jaxpr, sources: Iterable[compat.Var]) -> set[compat.Var]:
    """Returns these variables and all that depend on them."""
    reached = set(sources)
    for e in body.eqns:
        if not reached.isdisjoint(equations.variables(e.invars)):
            reached.update(e.outvars)
    return reached


def _placed(trace: Trace, scans: Sequence[compat.JaxprEqn], hints: Sequence[Hint]) -> list[tuple[int, ...]] | None:
    """Returns the layers of each scan in one group after the other; None if no scan's weights are placed."""
    found = [_groups_of_layers(trace, eqn, hints) for eqn in scans]
    if not any(found):
        return None
    lengths: list[tuple[int, ...]] = []
    for n, (eqn, groups) in enumerate(zip(scans, found, strict=True)):
        own = [b - a for a, b, _ in groups] if groups else [eqn.params["length"]]
        own = own[::-1] if eqn.params["reverse"] else own
        lengths.append((*own, 0) if n < len(scans) - 1 else tuple(own))
    return lengths


def _groups_of_layers(trace: Trace, eqn: compat.JaxprEqn, hints: Sequence[Hint]) -> list[tuple[int, int, int]]:
    """Returns the layers of a scan as ranges, each in one group, by the first stacked argument that is split."""
    spread = Spread()
    for x in eqn.invars[sum(compat.scan_sizes(eqn)) :]:
        spread.add(x, Rows(0, (0, eqn.params["length"])))
    spread.run(trace.jaxpr.eqns)
    for v, hint in zip(trace.arguments, hints, strict=True):
        rows = spread.of(v)
        if rows is not None and hint.split_axis == rows.axis:
            merged: list[tuple[int, int, int]] = []
            for start, stop, group in hint.ranges:
                if merged and merged[-1][2] == group:
                    start = merged.pop()[0]
                merged.append((start, stop, group))
            return merged
    return []


def _even_in_roles(trace: Trace, scans: Sequence[compat.JaxprEqn], num_groups: int) -> list[tuple[int, ...]]:
    """Divides the layers of each scan evenly: the layers of a role over its groups, all others over all groups."""
    lengths: list[tuple[int, ...]] = []
    own: list[int] = []
    for eqn in trace.jaxpr.eqns:
        end = eqn.params["role"] if eqn.primitive is mark_p and eqn.params["kind"] == "forward" else None
        if any(eqn is scan for scan in scans):
            own.append(eqn.params["length"])
        elif end is not None and end.groups is not None:
            lengths += _even(own, len(end.groups))
            own = []
    return [*lengths, *_even(own, num_groups)]


def _even(counts: Sequence[int], num_groups: int) -> Iterator[tuple[int, ...]]:
    """Divides all layers evenly over the groups, and yields the numbers for each scan."""
    total, first = sum(counts), 0
    ends = [total * g // num_groups for g in range(1, num_groups)]
    for count in counts:
        own = [0, *sorted({e - first for e in ends if first < e <= first + count and e < total})]
        yield tuple(b - a for a, b in zip(own, [*own[1:], count], strict=True))
        first += count
