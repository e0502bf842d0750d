"""Repeats cheap work on the microbatch (masks, labels, positions) in every stage that reads it.

Other equations without a stage go to their first reader. Residuals that only a backward reads are made there.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node, Place


def place_floating(body: Body, num_stages: int) -> Body:
    """Places floating equations at their first reader, except those that are cheap to compute again (`clonable`)."""
    clonable = cheap_on_data(body, lambda node: node.place is None)
    # Places in the order in which one microbatch passes them.
    order = [Place(s, "F") for s in range(num_stages)] + [Place(s, "B") for s in reversed(range(num_stages))]
    rank = {p: i for i, p in enumerate(order)}
    readers: dict[compat.Var, set[Place]] = defaultdict(set)
    for v in body.outvars:
        if isinstance(v, compat.Var) and (source := body.source_in_loop(v)) and source.place is None:
            readers[v].add(Place(num_stages - 1, "B" if source.backward else "F"))
    nodes = []
    for node in reversed(body.nodes):
        if node.per_microbatch:
            places = {node.place} if node.place else set().union(*(readers[v] for v in node.eqn.outvars))
            if node in clonable:
                node = dataclasses.replace(node, clonable=True)
            elif node.place is None:
                default = Place(num_stages - 1, "B") if node.backward else Place(0, "F")
                node = dataclasses.replace(node, place=min(places, key=rank.__getitem__, default=default))
            for v in node.inputs:
                readers[v] |= {node.place} if node.place else places
        nodes.append(node)
    return body.with_nodes(reversed(nodes))


def cheap_on_data(body: Body, may_float: Callable[[Node], bool]) -> set[Node]:
    """Returns the floating equations that each reader may repeat: cheap ones that depend only on the microbatch."""
    free: set[compat.Var] = {body.index, *body.operands}
    found: set[Node] = set()
    for node in body.nodes:
        if not node.per_microbatch:
            free.update(node.eqn.outvars)
        elif (
            may_float(node)
            and not equations.is_heavy(node.eqn)
            and all(v in free for v in node.inputs)
            and not body.reads_whole_operand(node)
        ):
            found.add(node)
            free.update(node.eqn.outvars)
    return found


def sink_residuals(body: Body) -> Body:
    """Moves a forward equation that only its stage's backward reads there, if that needs no more bytes of residuals."""
    readers: dict[compat.Var, set[Place | None]] = defaultdict(set)
    for v in body.outvars:
        if not isinstance(v, compat.Literal):
            readers[v].add(None)
    nodes = []
    for node in reversed(body.nodes):
        if node.place and node.place.kind == "F" and not equations.is_heavy(node.eqn):
            target = Place(node.place.stage, "B")
            outs = equations.outputs(node.eqn)
            if outs and set().union(*(readers[v] for v in outs)) == {target}:
                kept = sum(equations.nbytes(v.aval) for v in outs)
                new = sum(
                    equations.nbytes(v.aval)
                    for v in equations.variables(node.inputs)
                    if (s := body.source_in_loop(v)) and not s.clonable and target not in readers[v]
                )
                if new <= kept:
                    node = dataclasses.replace(node, place=target, backward=True)
        for v in node.inputs:
            readers[v].add(node.place if node.place or not node.clonable else None)
        if node.clonable:
            for v in node.inputs:
                readers[v] |= set().union(*(readers[o] for o in node.eqn.outvars))
        nodes.append(node)
    return body.with_nodes(reversed(nodes))
