"""Puts each equation of a loop's body into its unit: the part of the body between two candidates.

Unit k ends with candidate k. A scan over layers is one span with a unit for each iteration; the equations before it
belong to its first unit, those behind it to the unit of the next candidate.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.cutting.candidates import Candidates, Marked, marks_in
from mpmd.cutting.split_scans import tied_scans
from mpmd.graphs.backward_stages import backward_stages, find_backward
from mpmd.graphs.body import Body, Node, hoist, with_places
from mpmd.graphs.marks import Marks, forget_marks
from mpmd.ops.stage_end import MarkId, boundaries, mark_p
from mpmd.tracing.new_equations import Atom


class Span(NamedTuple):
    """Equations between two marks, or a scan over layers, and their units."""

    first: int
    num_units: int
    scan: Marked | None

    @property
    def units(self) -> range:
        """The numbers of the units."""
        return range(self.first, self.first + self.num_units)

    @property
    def last(self) -> int:
        """The last of the units."""
        return self.units[-1]


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedBody:
    """The body of a loop, without its marks. The place of a node is the number of its span and `F` or `B`."""

    body: Body
    spans: tuple[Span, ...]
    input_grads: frozenset[compat.Var]  # values of backward nodes that an earlier span waits for

    @property
    def num_units(self) -> int:
        """The number of candidates plus one."""
        return self.spans[-1].last + 1


def place_in_units(eqn: compat.JaxprEqn, candidates: Candidates) -> PlacedBody:
    """Places the equations of a `treduce` equation's body in program order, as if a stage ended at each candidate."""
    closed = eqn.params["jaxpr"]
    jaxpr, spans = _with_every_mark(closed.jaxpr, candidates)
    inner = compat.ClosedJaxpr(jaxpr, closed.consts)
    of_a_list = eqn.params["info"].path is not None
    body = hoist(Body.of(eqn.replace(params={**eqn.params, "jaxpr": inner})), of_a_list)
    nodes = [n for n in body.nodes if n.is_mark]
    number = dict(zip(nodes, boundaries([n.eqn.params for n in nodes]), strict=True))
    written = tuple(n for n in nodes if n.eqn.params["kind"] == "forward")
    marks = Marks(len(spans), number, written, (None,) * len(spans))
    backward = find_backward(body, marks)
    forward: dict[Node, int] = {}
    here = 0
    for node in body.nodes:
        if node.per_microbatch and node not in backward:
            here += node.is_mark and node.eqn.params["kind"] == "forward"
            forward[node] = here
    gradients = backward_stages(body, marks, backward, forward)
    needed = body.ancestors(v for n in number if n.eqn.params["kind"] == "backward" for v in n.inputs)
    waited_for = frozenset(v for n in needed & backward for v in n.eqn.outvars)
    placed = with_places(body, backward, forward, gradients)
    return PlacedBody(forget_marks(placed), tuple(spans), waited_for)


def _with_every_mark(jaxpr: compat.Jaxpr, candidates: Candidates) -> tuple[compat.Jaxpr, list[Span]]:
    """Returns the body with a mark for each candidate, and with marks before and behind each scan over layers."""
    scans = {id(m.eqn): m for m in candidates.scans}
    own = [(MarkId(), MarkId()) for _ in candidates.scans]
    numbers = iter(boundaries([e.params for e in jaxpr.eqns if e.primitive is mark_p]))
    ids: dict[int, MarkId] = defaultdict(MarkId)
    tied = tied_scans(jaxpr)
    alias: dict[compat.Var, Atom] = {}
    eqns: list[compat.JaxprEqn] = []
    spans, unit = [], 0

    def mark(like: compat.JaxprEqn, values: Sequence[Atom], mark_id: MarkId, kind: str) -> dict[compat.Var, Atom]:
        found: dict[compat.Var, Atom] = {
            v: compat.Var(v.aval) for v in values if not isinstance(v, (compat.Literal, compat.DropVar))
        }
        function = next(marks_in(like)).params["function"]
        params = {"id": mark_id, "kind": kind, "label": None, "function": function, "optional": False, "role": None}
        eqns.append(like.replace(primitive=mark_p, invars=list(found), outvars=list(found.values()), params=params,
                                 effects=frozenset()))  # fmt: skip
        return found

    for eqn in jaxpr.eqns:
        found = scans.get(id(eqn))
        number, kind = tied.get(id(eqn), (0, None))
        eqn = eqn.replace(invars=[compat.renamed(v, alias) for v in eqn.invars])
        if eqn.primitive is mark_p:
            eqns.append(eqn.replace(params={**eqn.params, "id": ids[next(numbers)]}))
            if eqn.params["kind"] == "forward":
                spans.append(Span(unit, 1, None))
                unit += 1
        elif kind not in ("forward", "backward"):
            eqns.append(eqn)
        else:
            num_consts, num_carry = compat.scan_sizes(eqn)
            carried = eqn.invars[num_consts : num_consts + num_carry]
            first, last = own[number] if found else own[number][::-1]
            before = mark(eqn, carried, first, kind)
            eqns.append(eqn.replace(invars=[compat.renamed(v, before) for v in eqn.invars]))
            behind = mark(eqn, eqn.outvars[:num_carry], last, kind)
            alias.update(behind)
            if found:
                spans += [Span(unit, 1, None), Span(unit, found.count, found)]
                unit += found.count
    spans.append(Span(unit, 1, None))
    return compat.new_jaxpr(jaxpr, eqns=eqns, outvars=[compat.renamed(v, alias) for v in jaxpr.outvars]), spans
