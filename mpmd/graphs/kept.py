"""Chooses the values to keep for equations that run later: the fewest bytes from which their inputs can be made again.

Cheap equations may be done again; heavy ones (matrix products, random numbers) may not.
"""

from collections.abc import Callable, Collection, Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.minimum_cut import minimum_cut
from mpmd.ops.stage_end import mark_p


def fewest_bytes(
    invars: Sequence[compat.Var],
    eqns: Sequence[compat.JaxprEqn],
    wanted: Sequence[compat.Var],
    cost: Callable[[compat.Var], int],
) -> list[compat.Var]:
    """Returns the values of least `cost` from which the wanted ones can be made: a minimum cut through `eqns`."""
    values = [*invars, *(v for e in eqns for v in e.outvars)]
    number = {v: 2 + 2 * i for i, v in enumerate(values)}  # made at this node, read at the next one
    costs = {v: cost(v) for v in values}
    infinite = sum(costs.values()) + 1
    source, sink = 0, 1
    edges = [(number[v], number[v] + 1, cost) for v, cost in costs.items()]
    edges += [(source, number[v], infinite) for v in invars if costs[v]]
    edges += [(number[v] + 1, sink, infinite) for v in wanted]
    for eqn in eqns:
        moves = not equations.is_heavy(eqn) and eqn.primitive is not mark_p
        for out in eqn.outvars:
            if moves:
                edges += [(number[v] + 1, number[out], infinite) for v in equations.variables(eqn.invars)]
            else:
                edges.append((source, number[out], infinite))
    before = minimum_cut(2 + 2 * len(values), edges, source, sink)
    return [v for v in values if number[v] in before and number[v] + 1 not in before]


def equations_between(
    eqns: Sequence[compat.JaxprEqn], kept: Collection[compat.Var], wanted: Collection[compat.Var]
) -> list[compat.JaxprEqn]:
    """Returns the equations that make the wanted values from the kept ones, in order."""
    have, needed, found = set(kept), set(wanted) - set(kept), []
    for eqn in reversed(eqns):
        if any(v in needed for v in eqn.outvars):
            needed.update(v for v in equations.variables(eqn.invars) if v not in have)
            found.append(eqn)
    return found[::-1]
