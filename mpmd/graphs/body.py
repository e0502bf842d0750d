"""A loop's body as a graph of equations: what the passes of the partition take and return."""

import dataclasses
import functools
import itertools
from collections.abc import Container, Iterable
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.ops.stage_end import mark_p
from mpmd.tracing.new_equations import Atom, equations_on


class Place(NamedTuple):
    """Where an equation runs: a stage and `F` or `B` (after `split_backward`, also `R`, `I` or `W`)."""

    stage: int
    kind: str

    def __str__(self):
        return f"{self.kind}{self.stage}"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An equation, and the results of the passes so far. Nodes are compared by identity.

    Attributes:
      arrivals: the place that the last mark before an operand begins, for operands that came through marks.
    """

    eqn: compat.JaxprEqn
    per_microbatch: bool = True  # whether it runs in the loop; otherwise it runs before the loop
    backward: bool = False  # whether it belongs to the backward pass
    place: Place | None = None  # where it runs; None while it floats
    clonable: bool = False  # whether each reader may compute it again
    arrivals: dict[compat.Var, Place] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def inputs(self) -> list[compat.Var]:
        """The variables that the equation reads."""
        return [v for v in self.eqn.invars if not isinstance(v, compat.Literal)]

    @property
    def is_mark(self) -> bool:
        """Whether this is a stage end, forward or backward."""
        return self.eqn.primitive is mark_p


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A loop's equations in order. A pass takes a body and returns another one; `print(body)` shows it."""

    nodes: tuple[Node, ...]
    index: compat.Var  # the microbatch index
    outvars: tuple[Atom, ...]  # what one microbatch returns
    operands: frozenset[compat.Var]  # variables of the step that the loop reads

    @classmethod
    def of(cls, eqn: compat.JaxprEqn) -> "Body":
        """Returns the body of a `treduce` equation on the operands of the step, with fresh variables."""
        closed = eqn.params["jaxpr"]
        index = compat.Var(closed.jaxpr.invars[-1].aval)
        eqns, outs = equations_on(closed, [*eqn.invars, index])
        return cls(tuple(map(Node, eqns)), index, tuple(outs), frozenset(equations.variables(eqn.invars)))

    @functools.cached_property
    def _producer(self) -> dict[compat.Var, Node]:
        return {v: n for n in self.nodes for v in n.eqn.outvars}

    def with_nodes(self, nodes: Iterable[Node]) -> "Body":
        """Returns this body with other nodes."""
        return dataclasses.replace(self, nodes=tuple(nodes))

    def source(self, v: Atom) -> Node | None:
        """Returns the node that makes a variable; None for operands, the index and literals."""
        return None if isinstance(v, compat.Literal) else self._producer.get(v)

    def source_in_loop(self, v: Atom) -> Node | None:
        """Returns the node that makes a variable anew for each microbatch, or None."""
        node = self.source(v)
        return node if node is not None and node.per_microbatch else None

    def reads_whole_operand(self, node: Node) -> bool:
        """Returns whether an equation reads a large operand other than by slicing out this microbatch."""
        if node.eqn.primitive.name == "dynamic_slice":
            return False
        return any(v in self.operands and equations.size(v.aval) > 64 for v in node.inputs)

    def ancestors(self, atoms: Iterable[Atom], among: Container[Node] | None = None) -> set[Node]:
        """Returns the nodes that `atoms` depend on; with `among`, only those reached through its nodes."""
        found: set[Node] = set()
        stack = [n for v in atoms if (n := self.source(v))]
        while stack:
            node = stack.pop()
            if node not in found and (among is None or node in among):
                found.add(node)
                stack += [n for v in node.inputs if (n := self.source(v))]
        return found

    def live(self, values: Iterable[Atom]) -> set[Node]:
        """Returns the nodes that `values` or effects depend on."""
        effects = [n for n in self.nodes if n.eqn.effects]
        return self.ancestors([*values, *(v for n in effects for v in n.inputs)]).union(effects)

    def __str__(self):
        names: dict[Atom, str] = {self.index: "index"}
        numbers = {"arg": itertools.count(), "v": itertools.count()}

        def name(v: Atom) -> str:
            if isinstance(v, compat.Literal):
                return str(v.val)
            if v not in names:
                kind = "arg" if v in self.operands else "v"
                names[v] = f"{kind}{next(numbers[kind])}"
            return names[v]

        lines = []
        for node in self.nodes:
            where = str(node.place or ("any" if node.per_microbatch else "once"))
            outs, ins = " ".join(map(name, node.eqn.outvars)), " ".join(map(name, node.eqn.invars))
            lines.append(f"{where:4} {outs} = {node.eqn.primitive.name} {ins}".rstrip())
        return "\n".join([*lines, f"return {' '.join(map(name, self.outvars))}"])


def hoist(body: Body, of_a_list: bool = False) -> Body:
    """Marks loop-invariant equations to be computed once, before the loop; their results become operands.

    Cheap views and constants may be computed again inside the tasks that read them.

    Args:
      of_a_list: whether microbatches of other shapes run by the same plan. Values from before the loop are the same for
        all shapes, and nobody knows which values depend on a shape (masks, positions, the seed of a mean's gradient, a
        table cut to length): each task computes its inputs.
    """
    moving = {body.index}
    rooted = set(body.operands)
    nodes = []
    for node in body.nodes:
        if node.eqn.effects or node.is_mark or any(v in moving for v in node.inputs):
            moving.update(node.eqn.outvars)
            nodes.append(node)
            continue
        from_operands = any(v in rooted for v in node.inputs)
        if from_operands:
            rooted.update(node.eqn.outvars)
        is_cheap = not equations.is_heavy(node.eqn) or equations.is_small_scatter(node.eqn)
        clonable = is_cheap and (not from_operands or equations.is_view(node.eqn) or equations.is_scalar_work(node.eqn))
        nodes.append(dataclasses.replace(node, per_microbatch=False, clonable=clonable or of_a_list))
    return body.with_nodes(nodes)


def with_places(body: Body, backward: set[Node], forward: dict[Node, int], gradients: dict[Node, int]) -> Body:
    """Returns the body with stages as places of its forward and backward equations. Floating ones have no place."""
    places = {n: Place(s, "F") for n, s in forward.items()} | {n: Place(s, "B") for n, s in gradients.items()}
    return body.with_nodes(
        dataclasses.replace(n, backward=n in backward, place=places.get(n)) if n in backward or n in places else n
        for n in body.nodes
    )


def drop_unused(body: Body, values: Iterable[Atom]) -> Body:
    """Drops equations of the loop that neither `values` nor effects need."""
    live = body.live(values)
    return body.with_nodes(n for n in body.nodes if n in live or not n.per_microbatch)
