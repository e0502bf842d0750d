"""Puts each forward equation of a loop's body into the stage where it was written, or where fewer bytes cross."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Body, Node
from mpmd.graphs.marks import Marks
from mpmd.graphs.minimum_cut import Cost, Labelling, cheapest_labels
from mpmd.partition.floating import cheap_on_data
from mpmd.tracing.new_equations import Atom

Parameters = frozenset[compat.Var]
Roots = Mapping[compat.Var, Parameters]


def forward_stages(body: Body, marks: Marks, backward: set[Node], num_microbatches: int) -> dict[Node, int]:
    """Returns the stage of each forward equation. Equations without a stage float.

    An equation runs where it stands between the marks. It runs earlier (not before the latest mark that it depends on)
    or later (not after the first mark that needs it) if fewer bytes then cross between stages in a step; these bytes
    include parameters that several stages read, and their gradients. No stage loses all of its parameters, and no role
    loses heavy work.
    """
    graph = _Graph(body, marks, backward)
    costs = functools.cache(lambda: _bytes_that_cross(graph, bool(backward), num_microbatches))
    pinned = {i for i, node in enumerate(graph.nodes) if node.eqn.effects}
    if marks.roles is not None:
        pinned |= {i for i, node in enumerate(graph.nodes) if i in graph.parameters or equations.is_heavy(node.eqn)}
    while True:
        problem = graph.problem(pinned, costs)
        stages = cheapest_labels(problem)
        lost = graph.with_parameters(problem.start) - graph.with_parameters(stages)
        if not lost:
            return graph.marked | dict(zip(graph.nodes, stages, strict=True))
        before = len(pinned)
        pinned |= {i for i in graph.parameters if problem.start[i] in lost}
        assert len(pinned) > before  # each round pins more equations


class _Graph:
    """The forward equations to be placed, by number: without marks and floating equations.

    Attributes:
      marked: the stage that each forward mark begins.
      made: per equation, the equations that make its inputs, directly or through marks.
    """

    def __init__(self, body: Body, marks: Marks, backward: set[Node]):
        self.body = body
        self.last = marks.num_stages - 1
        forward = [n for n in body.nodes if n.per_microbatch and n not in backward]
        self._roots = _parameter_roots(body)
        floating = _floating(body, marks, forward, self._roots) if self.last else set()
        self.marked = {n: min(marks.number[n] + 1, self.last) for n in forward if n in marks.number}
        self.nodes = [n for n in forward if n not in self.marked and n not in floating]
        self.number = {n: i for i, n in enumerate(self.nodes)}
        self.parameters: dict[int, Parameters] = {}  # per equation that reads any, those that it reads
        for i, node in enumerate(self.nodes):
            if not _is_free_view(node) and (found := self.parameters_of(node)):
                self.parameters[i] = found
        self.made = [sorted({self.number[s] for s in self._sources(n) if s in self.number}) for n in self.nodes]
        self.written = self._text_stages()  # per equation, the stage where it stands between the forward marks
        self.side = self._side_work()  # losses, metrics, residuals
        self.after_marks, self.before_marks = self._stages_between_marks(marks)

    def with_parameters(self, stages: Sequence[int]) -> set[int]:
        """Returns the stages in which an equation reads a parameter."""
        return {stages[i] for i in self.parameters}

    def parameters_of(self, node: Node) -> Parameters:
        """Returns the parameters that an equation reads."""
        return _parameters_read(self.body, node, self.read(node, self.base), self._roots)

    def read(self, node: Node, origin: Callable[[Atom], Atom]) -> list[compat.Var]:
        """Returns the origins of the variables that an equation reads."""
        return equations.variables(map(origin, node.inputs))

    def unmarked(self, v: Atom) -> Atom:
        """Returns the value that marks pass on as `v`."""
        while (source := self.body.source(v)) and source in self.marked:
            v = source.eqn.invars[source.eqn.outvars.index(v)]
        return v

    def base(self, v: Atom) -> Atom:
        """Returns the value that crosses when another stage reads `v`: each reader makes views again."""
        while (source := self.body.source_in_loop(v := self.unmarked(v))) and _is_free_view(source):
            v = source.eqn.invars[0]
        return v

    def _sources(self, node: Node) -> list[Node]:
        """Returns the nodes, other than marks, that make the inputs of an equation."""
        return [s for v in node.inputs if (s := self.body.source(self.unmarked(v)))]

    def problem(self, pinned: set[int], costs: Callable[[], list[Cost]]) -> Labelling:
        """Returns the allowed stages and their costs. Side work on equations without a choice has no choice either."""
        low, high = self._bounds({})
        start = self._start(low, high)
        fixed = pinned | {i for i in range(len(start)) if low[i] == high[i]}
        for i in sorted(self.side - fixed):
            if fixed.issuperset(self.made[i]) and start[i] == self._made_in(i, start):
                fixed.add(i)
        low, high = self._bounds({i: start[i] for i in fixed})
        pairs = [(j, i) for i, made in enumerate(self.made) for j in made]
        return Labelling(low, high, start, pairs, costs() if low != high else [])

    def _text_stages(self) -> list[int]:
        stages, stage = [], 0
        for node in self.body.nodes:
            if node in self.number:
                stages.append(min(stage, self.last))
            elif node in self.marked and node.eqn.params["kind"] == "forward":
                stage += 1
        return stages

    def _side_work(self) -> set[int]:
        """Returns the equations that depend on parameters and that no mark, and no equation with parameters, needs."""
        needed: set[compat.Var] = set()
        for node in reversed(self.body.nodes):
            is_needed = node in self.marked or self.number.get(node) in self.parameters
            if is_needed or not needed.isdisjoint(node.eqn.outvars):
                needed.update(node.inputs)
        follows: set[int] = set()
        for i, made in enumerate(self.made):
            if i in self.parameters or not follows.isdisjoint(made):
                follows.add(i)
        return {i for i in follows - self.parameters.keys() if needed.isdisjoint(self.nodes[i].eqn.outvars)}

    def _stages_between_marks(self, marks: Marks) -> tuple[list[int], list[int]]:
        """Returns, per equation, the stage of the latest mark that it depends on, and of the first that needs it."""
        after: dict[compat.Var, int] = {}
        before: dict[compat.Var, int] = {}
        for node, stage in self.marked.items():
            after.update(dict.fromkeys(node.eqn.outvars, stage))
            for v in node.inputs:
                before[v] = min(before.get(v, self.last), marks.number[node])
        low = [max((after.get(v, 0) for v in n.inputs), default=0) for n in self.nodes]
        high = [min((before.get(v, self.last) for v in n.eqn.outvars), default=self.last) for n in self.nodes]
        return low, high

    def _start(self, low: Sequence[int], high: Sequence[int]) -> list[int]:
        """Returns the stages where equations stand in the text; for `side`, of their inputs, if marks allow it."""
        start: list[int] = []
        for i, stage in enumerate(self.written):
            if i in self.side and self._made_in(i, start) >= low[i]:
                stage = self._made_in(i, start)
            start.append(min(max(stage, low[i]), high[i]))
        return start

    def _made_in(self, i: int, stages: Sequence[int]) -> int:
        """Returns the last stage that makes an input of an equation; -1 if it reads only data."""
        return max((stages[j] for j in self.made[i]), default=-1)

    def _bounds(self, fixed: dict[int, int]) -> tuple[list[int], list[int]]:
        """Returns, per equation, the first and the last stage that marks and fixed equations allow."""
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


def _bytes_that_cross(graph: _Graph, is_trained: bool, num_microbatches: int) -> list[Cost]:
    """Returns the bytes that cross in a step: values forward, their gradients backward, parameters there and back.

    Scalars are free, so that no loss is moved to save one.
    """
    values: dict[compat.Var, list[int]] = defaultdict(list)
    gradients: dict[compat.Var, list[int]] = defaultdict(list)
    parameters: dict[compat.Var, list[int]] = defaultdict(list)
    learned: set[compat.Var] = set()
    for i, node in enumerate(graph.nodes):
        for parameter in graph.parameters.get(i, ()):
            parameters[parameter].append(i)
        for v in () if _is_free_view(node) else graph.read(node, graph.base):
            values[v].append(i)
        read = graph.read(node, graph.unmarked)
        for v in read:
            gradients[v].append(i)
        if is_trained and (graph.parameters_of(node) or not learned.isdisjoint(read)):
            learned.update(v for v in node.eqn.outvars if jax.dtypes.issubdtype(v.aval.dtype, np.inexact))
    found = [
        Cost(num_microbatches * equations.nbytes(v.aval), graph.number[source], tuple(readers))
        for v, readers in [*values.items(), *((v, r) for v, r in gradients.items() if v in learned)]
        if equations.size(v.aval) > 1 and (source := graph.body.source(v)) and source in graph.number
    ]
    return found + [Cost(2 * equations.nbytes(v.aval), None, tuple(readers)) for v, readers in parameters.items()]


def _is_free_view(node: Node) -> bool:
    return equations.is_free_view(node.eqn) and not isinstance(node.eqn.invars[0], compat.Literal)


def _floating(body: Body, marks: Marks, forward: Sequence[Node], roots: Roots) -> set[Node]:
    """Returns cheap work on the microbatch alone (labels, masks, positions, key splits), which each reader repeats.

    The first mark implies an entry mark: equations that it needs and that read a parameter are in stage 0. Other
    equations that read such a parameter are in stage 0, too.
    """
    needed = body.ancestors(v for n in marks.forward[:1] for v in n.eqn.invars)
    entered: set[compat.Var] = set()
    owned: set[compat.Var] = set()
    reads = {n: _parameters_read(body, n, n.inputs, roots) for n in forward}
    for node in forward:
        if node in needed and (reads[node] or any(v in entered for v in node.inputs)):
            entered.update(node.eqn.outvars)
            owned |= reads[node]
    elsewhere = {n for n in forward if not reads[n] & owned and entered.isdisjoint(n.eqn.outvars)}
    return cheap_on_data(body, (elsewhere - marks.number.keys()).__contains__)


def _parameter_roots(body: Body) -> dict[compat.Var, Parameters]:
    """Returns, per value that is the same for all microbatches, the parameters (inexact operands) that it needs."""
    roots = {v: frozenset([v]) for v in body.operands if jax.dtypes.issubdtype(v.aval.dtype, np.inexact)}
    for node in body.nodes:
        if not node.per_microbatch and (found := _union(roots, node.inputs)):
            roots.update((v, found) for v in node.eqn.outvars)
    return roots


def _parameters_read(body: Body, node: Node, inputs: Iterable[compat.Var], roots: Roots) -> Parameters:
    """Returns the parameters among the inputs of an equation. An operand that is sliced by microbatch is data."""
    if node.eqn.primitive.name == "dynamic_slice" and any(
        v is body.index or body.source_in_loop(v) for v in node.eqn.invars[1:]
    ):
        return frozenset()
    return _union(roots, inputs)


def _union(roots: Roots, inputs: Iterable[compat.Var]) -> Parameters:
    return frozenset().union(*(roots.get(v, frozenset()) for v in inputs))
