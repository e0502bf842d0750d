"""Splits the backward of each stage into two halves, `I` and `W`, for schedules that order them apart."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Place
from mpmd.partition.accumulators import Accumulator


def split_backward(body: Body, accumulators: Sequence[Accumulator]) -> tuple[Body, list[Accumulator]]:
    """Turns each `B` into `I`, what the previous stage's gradient needs, and `W`, the rest.

    An equation that feeds both, and every effect, runs once, in `I`; `W` reads what it made. So does what another
    stage's backward reads in the loop: no weight half waits for one of another stage.
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
    nodes = []
    for node in reversed(body.nodes):
        if node.per_microbatch and node.place and node.place.kind == "B":
            stage, outs = node.place.stage, equations.outputs(node.eqn)
            crosses = any(p.stage != stage and p.kind == "B" for v in outs for p in readers[v])
            is_urgent = node.eqn.effects or crosses or any(v in urgent for v in outs)
            if is_urgent:
                urgent.update(node.inputs)
            node = dataclasses.replace(node, place=Place(stage, "I" if is_urgent else "W"))
        nodes.append(node)
    halves = body.with_nodes(reversed(nodes))
    return halves, [dataclasses.replace(a, place=_half(halves, a)) for a in accumulators]


def _half(body: Body, acc: Accumulator) -> Place:
    """The half of a backward in which a value is accumulated: where it is made, if that is in the same stage."""
    if acc.place.kind != "B":
        return acc.place
    source = body.source_in_loop(acc.value)
    made = source.place if source and source.place and source.place.stage == acc.place.stage else None
    return made if made and made.kind in "IW" else Place(acc.place.stage, "W")
