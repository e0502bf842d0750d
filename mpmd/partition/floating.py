"""What is left to place once forward and backward equations have their stages: what floats, and residuals."""

from collections import defaultdict

from mpmd import _jax_compat as compat
from mpmd.partition import equations
from mpmd.partition.graph import Body, Place


def _order(num_stages):
    """Places in the order in which one microbatch passes them."""
    return [Place(s, "F") for s in range(num_stages)] + [Place(s, "B") for s in reversed(range(num_stages))]


def resolve_floats(body: Body, num_stages: int):
    """Gives a home, at its first reader, to every floating equation that is not cheap to compute again."""
    rank = {p: i for i, p in enumerate(_order(num_stages))}
    free: set[compat.Var] = {body.index, *body.operands}
    for node in body.nodes:
        if not node.per_microbatch:
            free.update(node.eqn.outvars)
        elif node.place is None and not equations.is_heavy(node.eqn) and all(v in free for v in body.inputs(node)):
            roots = body.reads_whole_operand(node)
            node.clonable = not roots
            if node.clonable:
                free.update(node.eqn.outvars)
    readers: dict[compat.Var, set[Place]] = defaultdict(set)
    for v in body.outvars:
        source = body.source(v)
        if source and source.per_microbatch and source.place is None and not isinstance(v, compat.Literal):
            readers[v].add(Place(num_stages - 1, "B" if source.backward else "F"))
    for node in reversed(body.nodes):
        if not node.per_microbatch:
            continue
        if node.place is None:
            places = set().union(*(readers[v] for v in node.eqn.outvars))
            if not node.clonable:
                default = Place(num_stages - 1, "B") if node.backward else Place(0, "F")
                node.place = min(places, key=rank.__getitem__, default=default)
        else:
            places = {node.place}
        for v in body.inputs(node):
            readers[v] |= {node.place} if node.place else places


def sink_residuals(body: Body):
    """Moves a forward equation into the backward of its stage when only that reads it, and no more bytes are
    kept for it than before.
    """
    readers: dict[compat.Var, set[Place | None]] = defaultdict(set)
    for v in body.outvars:
        if not isinstance(v, compat.Literal):
            readers[v].add(None)
    for node in reversed(body.nodes):
        place = node.place
        if place and place.kind == "F" and not equations.is_heavy(node.eqn):
            target = Place(place.stage, "B")
            outs = equations.outputs(node.eqn)
            if outs and set().union(*(readers[v] for v in outs)) == {target}:
                kept = sum(equations.nbytes(v.aval) for v in outs)
                new = 0
                for v in set(body.inputs(node)):
                    source = body.source(v)
                    if source and source.per_microbatch and not source.clonable and target not in readers[v]:
                        new += equations.nbytes(v.aval)
                if new <= kept:
                    node.place = place = target
                    node.backward = True
        for v in body.inputs(node):
            readers[v].add(place if place or not node.clonable else None)
        if node.clonable:
            for v in body.inputs(node):
                readers[v] |= set().union(*(readers[o] for o in node.eqn.outvars))
