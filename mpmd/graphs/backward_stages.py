"""Puts each backward equation of a loop's body into the stage of its forward equation."""

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.graphs.body import Body, Node
from mpmd.graphs.marks import Marks


def find_backward(body: Body, marks: Marks) -> set[Node]:
    """Returns the nodes of the backward pass: transposed equations, and everything that depends on them."""
    before_forward_marks = body.ancestors(v for n in marks.forward for v in n.eqn.invars)
    made: set[compat.Var] = set()
    found: set[Node] = set()
    for node in body.nodes:
        if not node.per_microbatch:
            continue
        if node in marks.number:
            is_backward = node.eqn.params["kind"] == "backward"
        else:
            transposed = compat.is_transposed(node.eqn) and node not in before_forward_marks
            is_backward = transposed or any(v in made for v in node.inputs)
        if is_backward:
            found.add(node)
            made.update(node.eqn.outvars)
    return found


def backward_stages(body: Body, marks: Marks, backward: set[Node], forward: dict[Node, int]) -> dict[Node, int]:
    """Returns the stage of each backward equation. Equations without a stage float.

    JAX transposes a forward pass in reverse order. So a backward equation belongs between the forward equations that
    its neighbours transpose: a backward mark transposes its mark, another equation one that made or read its inputs. If
    equations of several stages stand there, it belongs to the last of these stages that its gradient inputs allow.
    Gradients from roles in several groups are added where the sum is read: each is sent there, none waits for another.
    """
    last = marks.num_stages - 1
    text = _Text(body, marks, backward, forward)
    spans = _spans(body, marks, backward, forward, text)
    at_least = _before_backward_marks(body, marks, backward)
    readers = _readers_of_sums(body, marks, backward, text)
    stages: dict[Node, int] = {}
    for node in body.nodes:
        if node not in backward:
            continue
        if node in marks.number:
            stages[node] = marks.number[node]
            continue
        sources = [s for v in node.inputs if (s := body.source_in_loop(v))]
        limit = min([last, *(stages[s] for s in sources if s in stages)])
        is_rooted = any(s in stages or s in forward for s in sources) or node in at_least
        groups = {marks.roles[stages[s]] for s in sources if s in stages} if marks.roles is not None else ()
        if node in readers and len(groups) > 1:
            stages[node] = min(limit, readers[node])
        elif is_rooted:
            stage = text.last_stage(node, spans[node], limit) if node in spans else limit
            stage = max(stage, min(limit, readers.get(node, 0)))
            stages[node] = min(limit, max(stage, at_least.get(node, 0)))
    return stages


class _Span(NamedTuple):
    """Positions of forward equations in the body, both ends included."""

    first: int
    last: int


class _Text:
    """The positions of forward equations, and the stages that make and read each value.

    A value that is the same for all microbatches is computed before the loop; its gradient belongs where it is read.
    """

    def __init__(self, body: Body, marks: Marks, backward: set[Node], forward: dict[Node, int]):
        self.of_value: dict[compat.Var, _Span] = {}
        self.of_stage: dict[int, list[int]] = defaultdict(list)
        self.at: dict[compat.Var, set[int]] = {}
        read_in: dict[compat.Var, set[int]] = defaultdict(set)
        for position, node in reversed(list(enumerate(body.nodes))):
            is_constant = not node.per_microbatch and compat.is_transposed(node.eqn)
            if node in backward or node in marks.number or is_constant:
                continue
            made_here = {forward[node]} if node in forward else set()
            stages = made_here or set().union(*(read_in[v] for v in node.eqn.outvars))
            for v in node.inputs:
                read_in[v] |= stages
            for stage in stages:
                self.of_stage[stage].append(position)
            for v in [*node.inputs, *node.eqn.outvars]:
                if stages:
                    self.at.setdefault(v, set()).update(stages)
                self.of_value[v] = _Span(position, self.of_value[v].last if v in self.of_value else position)
        for positions in self.of_stage.values():
            positions.reverse()

    def last_stage(self, node: Node, span: _Span, limit: int) -> int:
        """Returns the last stage up to `limit` with a forward equation in `span`, preferably one with the inputs."""
        found = None
        for stage in range(limit, -1, -1):
            if self._stands_in(stage, span):
                if all(stage in self.at[v] for v in node.inputs if v in self.at):
                    return stage
                found = stage if found is None else found
        return limit if found is None else found

    def _stands_in(self, stage: int, span: _Span) -> bool:
        """Returns whether a forward equation of `stage` stands in `span`."""
        positions = self.of_stage[stage]
        at = bisect.bisect_left(positions, span.first)
        return at < len(positions) and positions[at] <= span.last


def _spans(body: Body, marks: Marks, backward: set[Node], forward: dict[Node, int], text: _Text) -> dict[Node, _Span]:
    """Maps each backward equation to the positions between which the forward equation stands that it transposes."""
    at = {n: p for p, n in enumerate(body.nodes)}
    position = [at[n] for n in marks.forward]
    spans: dict[Node, _Span] = {}
    for end, nodes in _passes(body, backward, forward):
        known = [_known_span(marks, node, text, position) for node in nodes]
        known = [span if span and span.first < end else None for span in known]
        lasts, last = [], end
        for span in known:
            last = min(last, span.last if span else last)
            lasts.append(last)
        first = 0
        for node, span, last in zip(reversed(nodes), reversed(known), reversed(lasts), strict=True):
            first = max(first, span.first if span else first)
            spans[node] = _Span(min(first, last), max(first, last))
    return spans


def _passes(body: Body, backward: set[Node], forward: dict[Node, int]) -> list[tuple[int, list[Node]]]:
    """Returns the runs of backward equations in program order, each with its start; forward equations separate them.
    A body may differentiate several times.
    """
    passes: list[tuple[int, list[Node]]] = []
    is_open = False
    for position, node in enumerate(body.nodes):
        if node in backward and compat.is_transposed(node.eqn):
            if not is_open:
                passes.append((position, []))
            passes[-1][1].append(node)
            is_open = True
        elif node in forward:
            is_open = False
    return passes


def _known_span(marks: Marks, node: Node, text: _Text, position: Sequence[int]) -> _Span | None:
    """Returns the positions of the transposed equation, as far as the equation alone determines them."""
    if node in marks.number:
        at = position[marks.number[node]]
        return _Span(at, at)
    spans = [text.of_value[v] for v in node.inputs if v in text.of_value]
    return _Span(max(s.first for s in spans), min(s.last for s in spans)) if spans else None


def _readers_of_sums(body: Body, marks: Marks, backward: set[Node], text: _Text) -> dict[Node, int]:
    """Maps each sum of gradients to the last stage in which one of its readers has the forward values that it reads.

    A sum transposes no equation: it stands where its last term does, which hardly determines its stage.
    """
    found: dict[Node, int] = {}
    for node in reversed(body.nodes):
        if node not in backward:
            continue
        stage = marks.number.get(node, found.get(node, -1))
        having = [text.at[v] for v in node.inputs if v in text.at]
        if having:
            stage = max({stage} | set.intersection(*having))
        for v in node.inputs:
            source = body.source(v)
            if stage >= 0 and source and source in backward and source.eqn.primitive.name == "add_any":
                found[source] = max(found.get(source, -1), stage)
    return found


def _before_backward_marks(body: Body, marks: Marks, backward: set[Node]) -> dict[Node, int]:
    """Maps each backward equation that a backward mark depends on to the earliest stage in which it may run."""
    bound: dict[Node, int] = {}
    for node in reversed(body.nodes):
        stage = bound.get(node, -1)
        if node in marks.number and node in backward:
            stage = max(min(marks.number[node] + 1, marks.num_stages - 1), stage)
        if stage < 0:
            continue
        for v in node.inputs:
            source = body.source(v)
            if source and source in backward:
                bound[source] = max(bound.get(source, 0), stage)
    return bound
