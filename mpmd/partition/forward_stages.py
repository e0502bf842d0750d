"""The stage of each forward equation of a loop's body: where it was written, or where fewer bytes cross."""

import functools
from collections import defaultdict

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.partition import equations
from mpmd.partition.graph import Body, Node
from mpmd.partition.marks import Marks
from mpmd.partition.minimum_cut import Cost, Labelling, cheapest_labels


def forward_stages(body: Body, marks: Marks, backward: set[int], num_microbatches: int) -> dict[int, int]:
    """The stage of each forward equation, by the identity of its node. Equations without one float.

    An equation runs where it stands between the marks. It runs earlier (not before the latest mark that it depends on)
    or later (not after the first mark that needs it) where fewer bytes cross between stages in a step; the bytes of
    parameters that several stages read, and of their gradients, are counted. No stage loses all of its parameters.
    """
    graph = _Graph(body, marks, backward, num_microbatches)
    pinned = {i for i, node in enumerate(graph.nodes) if node.eqn.effects}
    while True:
        problem = graph.problem(pinned)
        stages = cheapest_labels(problem)
        lost = graph.with_parameters(problem.start) - graph.with_parameters(stages)
        if not lost:
            return graph.marked | {id(n): s for n, s in zip(graph.nodes, stages, strict=True)}
        before = len(pinned)
        pinned |= {i for i in graph.parameters if problem.start[i] in lost}
        assert len(pinned) > before  # each round pins more equations


class _Graph:
    """The forward equations to be placed, by number: neither marks nor what floats.

    Attributes:
      marked: the stage that each forward mark begins, by the identity of its node.
      parameters: the parameters that each equation reads, by its number; equations that read none are left out.
      written: where each equation stands between the forward marks.
      made: the equations that make what each equation reads, perhaps through marks.
      after_marks, before_marks: the stages to which the marks next to an equation bind it.
      side: losses, metrics, residuals: what neither a mark nor an equation with parameters needs.
    """

    def __init__(self, body: Body, marks: Marks, backward: set[int], num_microbatches: int):
        self.body, self.marks = body, marks
        self.last = marks.num_stages - 1
        self.num_microbatches = num_microbatches
        forward = [n for n in body.nodes if n.per_microbatch and id(n) not in backward]
        self.roots = _parameter_roots(body)
        floating = _floating(body, marks, forward, self.roots) if self.last else set()
        self.marked = {id(n): min(marks.number[id(n)] + 1, self.last) for n in forward if id(n) in marks.number}
        self.nodes = [n for n in forward if id(n) not in self.marked and id(n) not in floating]
        self.number = {id(n): i for i, n in enumerate(self.nodes)}
        self.is_trained = bool(backward)
        self.parameters: dict[int, frozenset] = {}
        for i, node in enumerate(self.nodes):
            if not _is_free_view(node) and (found := self._parameters(node)):
                self.parameters[i] = found
        self.written = self._text_stages()
        self.made = [sorted({self.number[id(s)] for s in self._sources(n) if id(s) in self.number}) for n in self.nodes]
        self.side = self._side_work()
        self.after_marks, self.before_marks = self._stages_between_marks()

    def _sources(self, node: Node) -> list:
        """The nodes, other than marks, that make what an equation reads."""
        return [s for v in self.body.inputs(node) if (s := self.body.source(self._unmarked(v)))]

    def _side_work(self) -> set[int]:
        """What follows from parameters and neither a mark nor an equation with parameters needs."""
        needed: set[compat.Var] = set()
        for node in reversed(self.body.nodes):
            is_needed = id(node) in self.marked or self.number.get(id(node)) in self.parameters
            if is_needed or not needed.isdisjoint(node.eqn.outvars):
                needed.update(self.body.inputs(node))
        follows: set[int] = set()
        for i, made in enumerate(self.made):
            if i in self.parameters or not follows.isdisjoint(made):
                follows.add(i)
        return {i for i in follows - self.parameters.keys() if needed.isdisjoint(self.nodes[i].eqn.outvars)}

    def _text_stages(self) -> list[int]:
        """Where each equation stands between the forward marks."""
        stages, stage = [], 0
        for node in self.body.nodes:
            if id(node) in self.number:
                stages.append(min(stage, self.last))
            elif id(node) in self.marked and node.eqn.params["kind"] == "forward":
                stage += 1
        return stages

    def with_parameters(self, stages) -> set[int]:
        """The stages in which an equation reads a parameter."""
        return {stages[i] for i in self.parameters}

    def problem(self, pinned: set[int]) -> Labelling:
        """What may be chosen, and what it costs. Side work on what has no choice has none either."""
        low, high = self._bounds({})
        start = self._start(low, high)
        fixed = pinned | {i for i in range(len(start)) if low[i] == high[i]}
        for i in sorted(self.side - fixed):
            if fixed.issuperset(self.made[i]) and start[i] == self._made_in(i, start):
                fixed.add(i)
        low, high = self._bounds({i: start[i] for i in fixed})
        pairs = [(j, i) for i, made in enumerate(self.made) for j in made]
        return Labelling(low, high, start, pairs, self._costs if low != high else [])

    def _start(self, low, high) -> list[int]:
        """Where equations stand in the text; those of `side`, where what they read is made, if marks allow that."""
        start: list[int] = []
        for i, stage in enumerate(self.written):
            if i in self.side and self._made_in(i, start) >= low[i]:
                stage = self._made_in(i, start)
            start.append(min(max(stage, low[i]), high[i]))
        return start

    def _made_in(self, i: int, stages) -> int:
        """The last stage in which something is made that an equation reads; -1 if it reads data alone."""
        return max((stages[j] for j in self.made[i]), default=-1)

    def _bounds(self, fixed: dict[int, int]) -> tuple[list[int], list[int]]:
        """For each equation, the first and the last stage that marks and fixed equations allow."""
        low, high = list(self.after_marks), list(self.before_marks)
        for i, stage in fixed.items():
            low[i] = high[i] = stage
        for i, made in enumerate(self.made):
            for j in made:
                low[i] = max(low[i], low[j])
        for i in reversed(range(len(high))):
            for j in self.made[i]:
                high[j] = min(high[j], high[i])
        return low, high

    def _stages_between_marks(self) -> tuple[list[int], list[int]]:
        """For each equation, the stage of the latest mark that it depends on, and that of the first that needs it."""
        after: dict[compat.Var, int] = {}
        before: dict[compat.Var, int] = {}
        for node in self.body.nodes:
            if id(node) in self.marked:
                after.update(dict.fromkeys(node.eqn.outvars, self.marked[id(node)]))
                for v in self.body.inputs(node):
                    before[v] = min(before.get(v, self.last), self.marks.number[id(node)])
        low = [max((after.get(v, 0) for v in self.body.inputs(n)), default=0) for n in self.nodes]
        high = [min((before.get(v, self.last) for v in n.eqn.outvars), default=self.last) for n in self.nodes]
        return low, high

    @functools.cached_property
    def _costs(self) -> list[Cost]:
        """The bytes that cross in a step: values forward, their gradients backward, parameters there and back.

        Scalars are free, so that no loss is moved to spare one.
        """
        values: dict[compat.Var, list[int]] = defaultdict(list)
        gradients: dict[compat.Var, list[int]] = defaultdict(list)
        parameters: dict[compat.Var, list[int]] = defaultdict(list)
        learned: set[compat.Var] = set()
        for i, node in enumerate(self.nodes):
            for parameter in self.parameters.get(i, ()):
                parameters[parameter].append(i)
            for v in () if _is_free_view(node) else self._read(node, self._base):
                values[v].append(i)
            read = self._read(node, self._unmarked)
            for v in read:
                gradients[v].append(i)
            if self.is_trained and (self._parameters(node) or not learned.isdisjoint(read)):
                learned.update(v for v in node.eqn.outvars if jax.dtypes.issubdtype(v.aval.dtype, np.inexact))
        found = [
            Cost(self.num_microbatches * equations.nbytes(v.aval), self.number[id(source)], tuple(readers))
            for v, readers in [*values.items(), *((v, r) for v, r in gradients.items() if v in learned)]
            if equations.size(v.aval) > 1 and (source := self.body.source(v)) and id(source) in self.number
        ]
        return found + [Cost(2 * equations.nbytes(v.aval), None, tuple(readers)) for v, readers in parameters.items()]

    def _parameters(self, node: Node) -> frozenset:
        return _parameters_read(self.body, node, self._read(node, self._base), self.roots)

    def _read(self, node: Node, origin) -> list[compat.Var]:
        """The variables that an equation reads, by their origins."""
        return equations.variables(map(origin, self.body.inputs(node)))

    def _unmarked(self, v):
        """The value that marks hand on as `v`."""
        while (source := self.body.source(v)) and id(source) in self.marked:
            v = source.eqn.invars[source.eqn.outvars.index(v)]
        return v

    def _base(self, v):
        """The value that crosses where `v` is read in another stage: views of it are made again by each reader."""
        while (source := self.body.source(v := self._unmarked(v))) and source.per_microbatch and _is_free_view(source):
            v = source.eqn.invars[0]
        return v


def _is_free_view(node: Node) -> bool:
    return equations.is_free_view(node.eqn) and not isinstance(node.eqn.invars[0], compat.Literal)


def _floating(body: Body, marks: Marks, forward, roots) -> set[int]:
    """Cheap work on the microbatch alone (labels, masks, positions, key splits): each reader does it again.

    The first mark has an implied entry mark: what it needs and reads a parameter is in stage 0, as is what reads such a
    parameter elsewhere.
    """
    needed = body.ancestors(v for n in marks.forward[:1] for v in n.eqn.invars)
    entered: set[compat.Var] = set()
    owned: set[compat.Var] = set()
    reads = {id(n): _parameters_read(body, n, body.inputs(n), roots) for n in forward}
    for node in forward:
        if id(node) in needed and (reads[id(node)] or any(v in entered for v in body.inputs(node))):
            entered.update(node.eqn.outvars)
            owned |= reads[id(node)]
    free = {body.index, *body.operands, *(v for n in body.nodes if not n.per_microbatch for v in n.eqn.outvars)}
    floating: set[int] = set()
    for node in forward:
        is_cheap = (
            id(node) not in marks.number and not equations.is_heavy(node.eqn) and not body.reads_whole_operand(node)
        )
        in_stage_zero = reads[id(node)] & owned or not entered.isdisjoint(node.eqn.outvars)
        if is_cheap and not in_stage_zero and all(v in free for v in body.inputs(node)):
            floating.add(id(node))
            free.update(node.eqn.outvars)
    return floating


def _parameter_roots(body: Body) -> dict[compat.Var, frozenset]:
    """For each value that no microbatch changes, the parameters (whatever is inexact) that it comes from."""
    roots = {v: frozenset([v]) for v in body.operands if jax.dtypes.issubdtype(v.aval.dtype, np.inexact)}
    for node in body.nodes:
        if not node.per_microbatch:
            found = frozenset().union(*(roots.get(v, frozenset()) for v in body.inputs(node)))
            if found:
                roots.update((v, found) for v in node.eqn.outvars)
    return roots


def _parameters_read(body: Body, node: Node, inputs, roots) -> frozenset:
    """Parameters among what an equation reads. Taking one microbatch of an operand is reading data, not a parameter."""
    if node.eqn.primitive.name == "dynamic_slice" and any(
        v is body.index or ((n := body.source(v)) and n.per_microbatch) for v in node.eqn.invars[1:]
    ):
        return frozenset()
    return frozenset().union(*(roots.get(v, frozenset()) for v in inputs))
