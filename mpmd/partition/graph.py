"""A loop's body as a graph of equations, the ground on which placing stands."""

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.ops.stage_end import mark_p
from mpmd.partition import equations


class Place(NamedTuple):
    """Where an equation runs: a stage and `F` or `B` (after `split_backward`, also `I` or `W`)."""

    stage: int
    kind: str

    def __str__(self):
        return f"{self.kind}{self.stage}"


# --- the body, as a graph -------------------------------------------------------------------------


@dataclasses.dataclass
class Node:
    """An equation under analysis.

    Attributes:
      place: where it runs; None while it floats.
      clonable: whether each reader may compute it again.
      arrivals: for operands that came through a mark, the place that the (last) mark begins.
    """

    eqn: compat.JaxprEqn
    per_microbatch: bool = True
    backward: bool = False
    place: Any = None
    clonable: bool = False
    arrivals: dict[compat.Var, Place] = dataclasses.field(default_factory=dict)


class Body:
    """The loop's equations with fresh variables, operands replaced by those of the step."""

    def __init__(self, nodes, index, outvars, operands):
        self.nodes: list[Node] = nodes
        self.index: compat.Var = index
        self.outvars = outvars
        self.operands: set[compat.Var] = operands
        self.producer: dict[compat.Var, Node] = {v: n for n in nodes for v in n.eqn.outvars}

    @classmethod
    def of(cls, eqn):
        jaxpr = eqn.params["jaxpr"].jaxpr
        env = dict(zip(jaxpr.invars, eqn.invars, strict=False))
        index = env[jaxpr.invars[-1]] = compat.new_var(jaxpr.invars[-1].aval)
        env |= {v: compat.Literal(c, v.aval) for v, c in zip(jaxpr.constvars, eqn.params["jaxpr"].consts, strict=True)}

        def read(v):
            return v if isinstance(v, compat.Literal) else env[v]

        nodes = []
        for e in jaxpr.eqns:
            fresh = [v if isinstance(v, compat.DropVar) else compat.new_var(v.aval) for v in e.outvars]
            nodes.append(Node(e.replace(invars=[read(v) for v in e.invars], outvars=fresh)))
            env.update(zip(e.outvars, fresh, strict=True))
        operands = {v for v in eqn.invars if not isinstance(v, compat.Literal)}
        return cls(nodes, index, [read(v) for v in jaxpr.outvars], operands)

    def inputs(self, node):
        return [v for v in node.eqn.invars if not isinstance(v, compat.Literal)]

    def source(self, v) -> Any:
        """The node that makes a variable; None for operands, the index and literals."""
        return None if isinstance(v, compat.Literal) else self.producer.get(v)

    def reads_whole_operand(self, node) -> bool:
        """Whether an equation reads a large operand other than by taking this microbatch's slice of it."""
        if node.eqn.primitive.name == "dynamic_slice":
            return False
        return any(v in self.operands and equations.size(v.aval) > 64 for v in self.inputs(node))

    def ancestors(self, atoms) -> set[int]:
        """Identities of the nodes that `atoms` depend on."""
        found: set[int] = set()
        stack = [n for v in atoms if (n := self.source(v))]
        while stack:
            node = stack.pop()
            if id(node) not in found:
                found.add(id(node))
                stack += [n for v in self.inputs(node) if (n := self.source(v))]
        return found

    def constant(self, v) -> int | None:
        """The value of an integer scalar that follows from literals alone, else None."""
        if v.aval.shape or (not jax.dtypes.issubdtype(v.aval.dtype, np.integer) and v.aval.dtype != np.bool_):
            return None
        if isinstance(v, compat.Literal):
            return int(v.val)
        node: Any = self.source(v)
        fold = None if node is None else _FOLDS.get(node.eqn.primitive.name)
        if fold is None or node is None:
            return None
        operands = [self.constant(x) for x in node.eqn.invars]
        return None if any(x is None for x in operands) else int(fold(*operands))

    def keep_live(self, values):
        """Drops per-microbatch equations that none of `values` and no effect needs."""
        effects = [n for n in self.nodes if n.eqn.effects]
        live = self.ancestors([*values, *(v for n in effects for v in n.eqn.invars)]) | set(map(id, effects))
        self.nodes = [n for n in self.nodes if id(n) in live or not n.per_microbatch]
        self.producer = {v: n for n in self.nodes for v in n.eqn.outvars}

    def drop_microbatch_free(self):
        """Finds what no microbatch changes. Cheap views and constants may be computed again inside the tasks
        that read them; everything else is computed before the loop and becomes an operand.
        """
        moving = {self.index}
        rooted: set[compat.Var] = set(self.operands)
        for node in self.nodes:
            ins = self.inputs(node)
            node.per_microbatch = bool(node.eqn.effects) or any(v in moving for v in ins)
            if node.per_microbatch or node.eqn.primitive is mark_p:
                node.per_microbatch = True
                moving.update(node.eqn.outvars)
                continue
            from_operands = any(v in rooted for v in ins)
            if from_operands:
                rooted.update(node.eqn.outvars)
            cheap = not equations.is_heavy(node.eqn)
            node.clonable = cheap and (
                not from_operands or equations.is_layout(node.eqn) or equations.is_scalar_work(node.eqn)
            )

    def forget_marks(self):
        """Marks are identities: what crosses several of them untouched is one value."""
        alias: dict[compat.Var, compat.Var | compat.Literal] = {}

        def read(v):
            while not isinstance(v, compat.Literal) and v in alias:
                v = alias[v]
            return v

        kept = []
        for node in self.nodes:
            marked = [(read(v), self.producer[v].place) for v in self.inputs(node) if v in alias]
            node.arrivals = {v: place for v, place in marked if not isinstance(v, compat.Literal)}
            node.eqn = node.eqn.replace(invars=[read(v) for v in node.eqn.invars])
            if node.eqn.primitive is mark_p:
                alias.update(zip(node.eqn.outvars, node.eqn.invars, strict=True))
            else:
                kept.append(node)
        self.nodes = kept
        self.outvars = [read(v) for v in self.outvars]
        self.producer = {v: n for n in kept for v in n.eqn.outvars}


# What indexing writes for a scalar index: `select_n(i < 0, i, i + size)`.
_FOLDS = {
    "lt": operator.lt,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "convert_element_type": int,
    "squeeze": int,
    "select_n": lambda which, *cases: cases[which],
}
