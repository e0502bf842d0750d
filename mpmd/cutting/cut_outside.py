"""Cuts scans over layers that stand outside of the loops: prediction and generation with a scanned model.

Stages end where the stacked weights change groups. If nothing is placed yet, each group gets as many layers as any
other. In a step that has loops, marks outside of them say nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from mpmd import _jax_compat as compat
from mpmd.cutting.pieces import Rows
from mpmd.cutting.split_scans import marked_kind, split_scans
from mpmd.cutting.spread import Spread
from mpmd.ops.treduce import treduce_p
from mpmd.tracing.arguments import Hint
from mpmd.tracing.trace import Trace


def cut_outside(trace: Trace, hints: Sequence[Hint], num_groups: int) -> Trace:
    """The step, in which no scan outside of the loops holds a mark.

    Args:
      trace: the step.
      hints: per flat argument, where it is, as far as that is known.
      num_groups: of the mesh.
    """
    scans = [e for e in trace.jaxpr.eqns if marked_kind(e) == "forward"]
    if not any(marked_kind(e) for e in trace.jaxpr.eqns):
        return trace
    if any(e.primitive is treduce_p for e in trace.jaxpr.eqns):
        lengths = [(e.params["length"],) for e in scans]
    else:
        lengths = _placed(trace, scans, hints) or list(_even([e.params["length"] for e in scans], num_groups))
    return dataclasses.replace(trace, jaxpr=split_scans(compat.ClosedJaxpr(trace.jaxpr, ()), lengths).jaxpr)


def _placed(trace: Trace, scans: Sequence[compat.JaxprEqn], hints: Sequence[Hint]) -> list[tuple[int, ...]] | None:
    """How many layers of each scan are in one group after the other; None if no scan's weights are placed."""
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
    """The layers of a scan, as ranges in one group each: those of the first stacked argument that is split."""
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


def _even(counts: Sequence[int], num_groups: int) -> Iterator[tuple[int, ...]]:
    """The layers of each scan by group, if all layers are dealt out evenly."""
    total, first = sum(counts), 0
    ends = [total * g // num_groups for g in range(1, num_groups)]
    for count in counts:
        own = [0, *sorted({e - first for e in ends if first < e <= first + count and e < total})]
        yield tuple(b - a for a, b in zip(own, [*own[1:], count], strict=True))
        first += count
