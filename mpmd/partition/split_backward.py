"""Splits the backward of each stage into halves `I` and `W`, for schedules that order them separately, and `R`."""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node, Place
from mpmd.graphs.halves import KeptBytes, halves, recomputation
from mpmd.partition.accumulators import Accumulator


def split_backward(body: Body, accumulators: Sequence[Accumulator], ahead: bool) -> tuple[Body, list[Accumulator]]:
    """Turns each `B` into `I`, the equations that the previous stage's gradient needs, and `W`, the rest.

    An equation that feeds both, and every effect, runs once, in `I`; `W` reads its results. Equations that another
    stage's backward reads in the loop run in `I`, too, so that no weight half waits for another stage's. An equation
    with inner equations (a checkpoint, a scan over layers) is divided into two (`halves.py`).

    With `ahead`, the recomputation of the forward in such an equation of `I`, and the backward equations that it reads,
    are `R`: they need no gradient of the next stage, and so need not wait for one. An equal equation of a stage without
    `R` or without `I` is divided alike, so that its parts are programs that other stages have.
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
    again: set[compat.Var] = set()  # inputs of `R`
    alike: dict[Hashable, _LateAndUrgent] = {}
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
        early, waits = None, late.intersection(node.inputs)
        if soon and ahead and equations.works_hard(node.eqn):
            key = compat.equation_key(node.eqn)
            known = _LateAndUrgent.of(node.eqn, waits, soon) if waits else alike.get(key)
            pair = recomputation(node.eqn, known.waits(node.eqn), KeptBytes(held)) if known else None
            if known and pair is not None:
                alike[key] = known
                early, node = (dataclasses.replace(node, eqn=eqn) for eqn in pair)
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
            nodes.append(dataclasses.replace(early, place=Place(stage, "R" if waits else "I")))
            (again if waits else urgent).update(early.inputs)
    nodes = [part for node in nodes for part in _divided_alike(node, alike, KeptBytes(held))]
    body = body.with_nodes(reversed(nodes))
    return body, [dataclasses.replace(a, place=_half(body, a)) for a in accumulators]


class _LateAndUrgent(NamedTuple):
    """The division of an equation: the positions of its late operands, and of its urgent results."""

    late: tuple[int, ...]
    urgent: tuple[int, ...]

    @classmethod
    def of(cls, eqn: compat.JaxprEqn, waits: Collection[compat.Var], soon: Collection[compat.Var]) -> "_LateAndUrgent":
        return cls(
            tuple(i for i, v in enumerate(eqn.invars) if not isinstance(v, compat.Literal) and v in waits),
            tuple(i for i, v in enumerate(eqn.outvars) if v in soon),
        )

    def waits(self, eqn: compat.JaxprEqn) -> set[compat.Var]:
        """Returns the late operands of an equal equation."""
        return {eqn.invars[i] for i in self.late}

    def soon(self, eqn: compat.JaxprEqn) -> set[compat.Var]:
        """Returns the urgent results of an equal equation."""
        return {eqn.outvars[i] for i in self.urgent}


def _divided_alike(node: Node, alike: Mapping[Hashable, _LateAndUrgent], costs: KeptBytes) -> list[Node]:
    """Divides a node of a stage without `I` into the parts that an equal node has elsewhere; the last part first."""
    if not (alike and node.place and node.place.kind == "W" and equations.works_hard(node.eqn)):
        return [node]
    known = alike.get(compat.equation_key(node.eqn))
    early = recomputation(node.eqn, known.waits(node.eqn), costs) if known else None
    pair = halves(early.rest, known.soon(node.eqn).intersection(early.rest.outvars), costs) if known and early else None
    if early is None:
        return [node]
    eqns = [pair.rest, pair.first, early.first] if pair else [early.rest, early.first]
    return [dataclasses.replace(node, eqn=eqn) for eqn in eqns]


def _needs_a_gradient(body: Body) -> set[compat.Var]:
    """Returns gradients that arrive from another stage, results of effects, and all values that depend on these."""
    late: set[compat.Var] = set()
    for node in body.nodes:
        if node.place and node.place.kind == "B":
            makers = {v: source.place for v in node.inputs if (source := body.source_in_loop(v))}
            late.update(v for v, p in makers.items() if p and p.kind == "B" and p.stage != node.place.stage)
        if compat.has_effects(node.eqn) or not late.isdisjoint(node.inputs):
            late.update(node.eqn.outvars)
    return late


def _half(body: Body, acc: Accumulator) -> Place:
    """Returns the half of a backward that accumulates a value: the half that makes it, if it is in the same stage."""
    if acc.place.kind != "B":
        return acc.place
    source = body.source_in_loop(acc.value)
    made = source.place if source and source.place and source.place.stage == acc.place.stage else None
    return made if made and made.kind in "IW" else Place(acc.place.stage, "W")
