"""Moves work on the gradients of several stages (a norm per microbatch) behind the loop, if the backward is split.

No stage needs it for its own gradients, and a weight half that waits for other stages would hold up its group: in
ZB-H1, stage 0's weight half runs long before stage 3's. So each stage keeps its part of every microbatch, if that is
small, and the rest is computed after the loop, one microbatch after the other.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node, Place
from mpmd.ops.reductions import Operation
from mpmd.tracing.new_equations import Atom

# The most elements of a part that is kept for all microbatches.
_SMALL = 64

# The parts that stages keep of each microbatch and their places, further operands, and a function that makes the output
# from the stacked parts and the operands.
Join = tuple[list[tuple[compat.Var, Place]], list[compat.Var], Callable]


class Joins:
    """The equations on several stages' gradients, in a body of placed equations."""

    def __init__(self, body: Body):
        self._body = body
        self._joint = self._find()

    def _find(self) -> dict[Node, int]:
        """Returns the positions of nodes that depend on several stages' backward, and that no gradient depends on."""
        tail: set[Node] = set()
        held: set[compat.Var] = set()
        for node in reversed(self._body.nodes):
            if not node.per_microbatch:
                continue
            in_backward = node.place is not None and node.place.kind == "B"
            needed = node.eqn.effects or compat.is_transposed(node.eqn) or any(v in held for v in node.eqn.outvars)
            if in_backward and not needed:
                tail.add(node)
            else:
                held.update(node.inputs)
        joint: dict[Node, int] = {}
        stages: dict[compat.Var, set[int]] = {}
        for position, node in enumerate(self._body.nodes):
            if node not in tail:
                if node.place is not None and node.place.kind == "B":
                    stages.update((v, {node.place.stage}) for v in node.eqn.outvars)
                continue
            found = set().union(*(stages.get(v, ()) for v in node.inputs))
            stages.update((v, found) for v in node.eqn.outvars)
            if len(found) > 1:
                joint[node] = position
        return joint

    def of(self, value: Atom, operation: Operation, num_microbatches: int) -> Join | None:
        """Returns the computation of an output after the loop; None if it is no join, or has large parts."""
        body = self._body
        last = body.source(value)
        if last is None or last not in self._joint:
            return None
        nodes = sorted(body.ancestors([value], self._joint), key=self._joint.__getitem__)
        parts, operands = [], []
        for v in equations.free_variables([n.eqn for n in nodes]):
            if (source := body.source_in_loop(v)) is not None:
                if equations.size(v.aval) > _SMALL or keys.is_key(v.aval.dtype):
                    return None
                place = source.place or last.place
                assert place is not None  # joined values are in the backward, so they have places
                parts.append((v, place))
            elif v is not body.index:
                operands.append(v)
        invars = [body.index, *(v for v, _ in parts), *operands]
        jaxpr = compat.make_jaxpr(invars, [value], [n.eqn for n in nodes], "join")
        return parts, operands, functools.partial(_reduced, jaxpr, len(parts), operation, num_microbatches)


def _reduced(
    jaxpr: compat.ClosedJaxpr, num_parts: int, operation: Operation, num_microbatches: int, *given: jax.Array
) -> jax.Array:
    """Computes the output of the loop from the stacked parts and the operands.

    Args:
      jaxpr: maps the microbatch index, a microbatch's parts and the operands to the output of the microbatch.
    """
    stacks, operands = given[:num_parts], given[num_parts:]
    index: Any = jaxpr.in_avals[0]
    value: Any = jaxpr.out_avals[0]
    output = compat.jaxpr_as_fun(jaxpr)

    def step(acc, microbatch):
        (x,) = output(*microbatch, *operands)
        return operation.update(acc, x, microbatch[0]), None

    indices = np.arange(num_microbatches, dtype=index.dtype)
    acc, _ = jax.lax.scan(step, operation.init(value, num_microbatches), (indices, *stacks))
    return operation.finish(acc, num_microbatches)
