"""Splits the backward of each stage into two halves, `I` and `W`, for schedules that order them apart, and `R`."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node, Place
from mpmd.graphs.halves import KeptBytes, halves, recomputation
from mpmd.partition.accumulators import Accumulator


def split_backward(body: Body, accumulators: Sequence[Accumulator], ahead: bool) -> tuple[Body, list[Accumulator]]:
    """Turns each `B` into `I`, what the previous stage's gradient needs, and `W`, the rest.

    An equation that feeds both, and every effect, runs once, in `I`; `W` reads what it made. So does what another
    stage's backward reads in the loop: no weight half waits for one of another stage. An equation that holds others (a
    checkpoint, a scan over layers) is divided into two (`halves.py`).

    With `ahead`, what such an equation of `I` computes again of the forward, and what that reads of the backward, is
    `R`: it needs no gradient of the next stage, so it need not wait for one.
    """
    readers: dict[compat.Var, set[Place]] = defaultdict(set)
    for node in body.nodes:
        if node.per_microbatch and node.place:
            for v in node.inputs:
                readers[v].add(node.place)
    for acc in accumulators:
        if not isinstance(acc.value, compat.Literal):
            readers[acc.value].add(acc.place)
    urgent: set[compat.Var] = set()
    once = (v for node in body.nodes if not node.per_microbatch for v in node.eqn.outvars)
    held = dict.fromkeys((*body.operands, body.index, *once), 0)  # it costs nothing that `W` reads these
    late = _needs_a_gradient(body) if ahead else set()
    again: set[compat.Var] = set()  # what `R` reads
    nodes: list[Node] = []
    for node in reversed(body.nodes):
        if not (node.per_microbatch and node.place and node.place.kind == "B"):
            nodes.append(node)
            continue
        stage = node.place.stage
        if not again.isdisjoint(node.eqn.outvars):
            nodes.append(dataclasses.replace(node, place=Place(stage, "R")))
            again.update(node.inputs)
            continue
        soon = [
            v
            for v in equations.outputs(node.eqn)
            if v in urgent or any(p.stage != stage and p.kind == "B" for p in readers[v])
        ]
        early = None
        if soon and (waits := late.intersection(node.inputs)):
            pair = recomputation(node.eqn, waits, KeptBytes(held))
            if pair is not None:
                early, node = (dataclasses.replace(node, eqn=eqn) for eqn in pair)
                again.update(early.inputs)
                soon = [v for v in soon if v in node.eqn.outvars]
        first, rest = None, node
        if soon or compat.has_effects(node.eqn):
            pair = halves(node.eqn, soon, KeptBytes(held))
            first = dataclasses.replace(node, eqn=pair.first if pair else node.eqn, place=Place(stage, "I"))
            rest = dataclasses.replace(node, eqn=pair.rest) if pair else None
        if rest is not None:
            nodes.append(dataclasses.replace(rest, place=Place(stage, "W")))
            held.update((v, 0) for v in rest.inputs)
        if first is not None:
            nodes.append(first)
            urgent.update(first.inputs)
        if early is not None:
            nodes.append(dataclasses.replace(early, place=Place(stage, "R")))
    body = body.with_nodes(reversed(nodes))
    return body, [dataclasses.replace(a, place=_half(body, a)) for a in accumulators]


def _needs_a_gradient(body: Body) -> set[compat.Var]:
    """What depends on gradients that arrive from another stage, these, and what effects give."""
    late: set[compat.Var] = set()
    for node in body.nodes:
        if node.place and node.place.kind == "B":
            makers = {v: source.place for v in node.inputs if (source := body.source_in_loop(v))}
            late.update(v for v, p in makers.items() if p and p.kind == "B" and p.stage != node.place.stage)
        if compat.has_effects(node.eqn) or not late.isdisjoint(node.inputs):
            late.update(node.eqn.outvars)
    return late


def _half(body: Body, acc: Accumulator) -> Place:
    """The half of a backward in which a value is accumulated: where it is made, if that is in the same stage."""
    if acc.place.kind != "B":
        return acc.place
    source = body.source_in_loop(acc.value)
    made = source.place if source and source.place and source.place.stage == acc.place.stage else None
    return made if made and made.kind in "IW" else Place(acc.place.stage, "W")
