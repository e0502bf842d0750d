"""Where the equations outside of the loops are held: the forward half of placing.

An equation is pinned to the groups that hold its operands. Where these have no group in common, a heavy equation (a
matrix product, a convolution) goes to its weights, and any other to the group that has the most bytes of its
operands; ties go to the stage in whose text the equation stands, to the group that holds state, then to the value
that was computed last. What depends on no placed value is not pinned: it runs wherever its result is wanted.

In a step without a loop and without marks, the equations that no weight holds are then moved so that the fewest bytes
cross. Where there are marks, they say where stages end: a value that went through mark k is in the group of stage k + 1
from then on. A stage's group is the one that holds most of its weights; if nothing is placed yet, stages are dealt out
evenly.
"""

import dataclasses
from collections import defaultdict

from mpmd import _jax_compat as compat
from mpmd.ops.cross_group import SMALL, across_p, place_p
from mpmd.ops.stage_end import mark_p
from mpmd.partition import equations
from mpmd.partition.minimum_cut import Cost, Labelling, cheapest_labels
from mpmd.tracing.trace import Trace

Groups = frozenset[int]

_WEIGHT = 64  # a smaller array is worth sending: elements


# --- marks outside of loops -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StageText:
    """Which stage the equations of a step without a loop stand in.

    Attributes:
      stage: per equation (by its results), the stage in whose text it stands.
      arrivals: per equation, for operands that came through a mark, the stage that the last such mark begins.
      num_stages: how many stages the marks make.
    """

    stage: dict[compat.Var, int]
    arrivals: dict[compat.Var, dict[compat.Var, int]]
    num_stages: int

    @classmethod
    def of(cls, trace: Trace, num_groups: int) -> "StageText | None":
        """Reads the marks of a flat jaxpr; None if it has none."""
        marks = [e for e in trace.jaxpr.eqns if e.primitive is mark_p]
        num_forward = sum(e.params["kind"] == "forward" for e in marks)
        if not num_forward:
            return None
        num_stages = num_forward if num_forward % num_groups == 0 else num_forward + 1
        stage: dict[compat.Var, int] = {}
        arrivals: dict[compat.Var, dict[compat.Var, int]] = {}
        alias: dict = {}
        arrived: dict[compat.Var, int] = {}
        forward: dict = defaultdict(list)
        here = passed = 0
        for eqn in trace.jaxpr.eqns:
            operands = equations.variables(eqn.invars)
            if eqn.primitive is not mark_p:
                found = {alias.get(v, v): arrived[v] for v in operands if v in arrived}
                for v in eqn.outvars:
                    stage[v] = here
                    arrivals[v] = found
                continue
            kind, mark = eqn.params["kind"], eqn.params["id"]
            if kind == "forward":
                forward[mark].append(passed)
                passed += 1
                here = min(passed, num_stages - 1)
            elif kind == "backward" and forward[mark]:
                here = forward[mark].pop() if len(forward[mark]) > 1 else forward[mark][0]
            for new, old in zip(eqn.outvars, eqn.invars, strict=True):
                if not isinstance(old, compat.Literal):
                    alias[new] = alias.get(old, old)
                    arrived[new] = here
        return cls(stage, arrivals, num_stages)

    def groups(self, items, held, num_groups: int) -> tuple[list[int], list[bool]]:
        """Per stage, its group, and whether placed weights say so.

        Args:
          items: the step's equations.
          held: the groups of each argument that is placed.
        """
        votes: list[dict[int, int]] = [defaultdict(int) for _ in range(self.num_stages)]
        for item in items:
            if (s := self.stage.get(item.outvars[0]) if item.outvars else None) is None:
                continue
            for v in equations.variables(item.invars):
                if len(groups := held.get(v) or ()) == 1 and equations.size(v.aval) > _WEIGHT:
                    votes[s][min(groups)] += equations.nbytes(v.aval)
        found = [max(v, key=lambda g: (v[g], -g)) if v else None for v in votes]
        firm = [g is not None for g in found]
        if not any(firm):
            return [s * num_groups // self.num_stages for s in range(self.num_stages)], firm
        for s in range(1, self.num_stages):  # a stage without weights runs where the one before it does
            found[s] = found[s - 1] if found[s] is None else found[s]
        first = next(g for g in found if g is not None)
        return [first if g is None else g for g in found], firm


# --- pins -----------------------------------------------------------------------------------------


class Pins:
    """The groups that hold each variable, filled equation by equation in the order of the step.

    Attributes:
      of: per variable, the groups that hold it; None where any group would do.
      firm: variables whose place follows from something that is placed: an argument, a loop, the user's word. The
        others are where they are for want of a better place.
      follows: results larger than their operands: the operands are sent instead.
    """

    def __init__(self, num_groups: int, arguments: dict, state, placed, text: StageText | None, items):
        self.of: dict[compat.Var, Groups | None] = dict(arguments)
        self.firm = {v for v, groups in arguments.items() if groups is not None}
        self.weights = {v for v in self.firm if equations.size(v.aval) > _WEIGHT}
        self.state = set(state)
        self.placed = placed
        self.follows: set[compat.Var] = set()
        self.order: dict[compat.Var, int] = {}
        self.anchored: set[compat.Var] = set()  # results of equations that stay with their weights
        self.torn = False  # whether an equation had to choose between groups
        self.text = text
        self.stage_groups, self.stage_firm = text.groups(items, arguments, num_groups) if text else ([], [])
        self.has_loop = False

    def loop_result(self, v, groups: Groups):
        """A loop's result lies where it is accumulated."""
        self.has_loop = True
        self.of[v] = groups
        self.firm.add(v)

    def pin(self, eqn) -> Groups | None:
        """The groups that may run an equation, None where any group would do."""
        if eqn.primitive is place_p:
            return self.placed[eqn.outvars[0]]
        if eqn.primitive is across_p and equations.nbytes(eqn.outvars[0].aval) <= SMALL:
            return None  # where it is wanted: each group gets all the parts
        held = self._held(eqn)
        if not held:
            stage = self._stage(eqn) if (runs_once(eqn) or _looks_up(eqn)) and not eqn.effects else None
            return None if stage is None else frozenset([self.stage_groups[stage]])
        common = frozenset.intersection(*(groups for groups, _ in held))
        if not common:
            return frozenset([self._choose(eqn, held)])
        return self._in_its_text(eqn, held, common) or common

    def bind(self, eqn, pin: Groups | None):
        """Records where an equation's results are."""
        operands = equations.variables(eqn.invars)
        if eqn.effects or eqn.primitive is place_p or (equations.is_heavy(eqn) and self.weights.intersection(operands)):
            self.anchored.update(eqn.outvars)
        for v in eqn.outvars:
            self.of[v] = pin
            self.order[v] = len(self.order)
        firm = eqn.primitive is place_p or any(v in self.firm for v in operands)
        if not firm and pin and self.text is not None and (s := self._stage(eqn)) is not None:
            firm = self.stage_firm[s]
        if pin is not None and firm:
            self.firm.update(eqn.outvars)
        if operands and not equations.is_heavy(eqn) and all(v in self.weights for v in operands):
            self.weights.update(eqn.outvars)
        if self.state.intersection(operands):
            self.state.update(eqn.outvars)
        made = self.follows.intersection(operands)
        if not runs_once(eqn) and (equations.grows(eqn) or (equations.is_layout(eqn) and made)):
            self.follows.update(eqn.outvars)

    def _stage(self, eqn) -> int | None:
        return self.text.stage.get(eqn.outvars[0]) if self.text and eqn.outvars else None

    def _held(self, eqn) -> list[tuple[Groups, compat.Var]]:
        """Operands that are somewhere, and where; a value that came through a mark is in the stage that this begins."""
        arrived = self.text.arrivals.get(eqn.outvars[0], {}) if self.text and eqn.outvars else {}
        found = []
        for v in equations.variables(eqn.invars):
            if v in arrived and equations.size(v.aval) > 1:
                found.append((frozenset([self.stage_groups[arrived[v]]]), v))
            elif (groups := self.of[v]) is not None:
                found.append((groups, v))
        return found

    def _in_its_text(self, eqn, held, common: Groups) -> Groups | None:
        """The group of the stage in whose text a heavy equation stands, if it is cheaper to bring its operands there
        than its results: tokens go to the embedding of the first stage, although the last one has a copy of it.
        """
        stage = self._stage(eqn) if runs_once(eqn) or _looks_up(eqn) else None
        if stage is None or (group := self.stage_groups[stage]) in common:
            return None
        missing = sum(equations.nbytes(v.aval) for groups, v in held if group not in groups)
        return frozenset([group]) if missing < sum(equations.nbytes(v.aval) for v in eqn.outvars) else None

    def _choose(self, eqn, held) -> int:
        """The group that runs an equation whose operands have no group in common."""
        heavy = equations.is_heavy(eqn)
        self.torn |= any(equations.size(v.aval) > 1 for v in eqn.outvars)
        stage = self._stage(eqn)
        text = self.stage_groups[stage] if stage is not None else None
        weights: dict[int, int] = defaultdict(int)
        nbytes: dict[int, int] = defaultdict(int)
        state: set[int] = set()
        last: dict[int, int] = defaultdict(int)
        for groups, v in held:
            for g in groups:
                nbytes[g] += equations.nbytes(v.aval)
                if heavy and v in self.weights:
                    weights[g] += equations.nbytes(v.aval)
                if v in self.state:
                    state.add(g)
                if not self.has_loop and equations.size(v.aval) > 1:
                    last[g] = max(last[g], self.order.get(v, 0))
        return max(nbytes, key=lambda g: (weights[g], g == text, nbytes[g], g in state, last[g], -g))


def with_fewest_bytes(items, pins: list[Groups | None], held: Pins, wanted: dict) -> list[Groups | None]:
    """Pins under which the fewest bytes cross, where equations that no weight holds may move to other groups.

    Args:
      items: the equations of a step without a loop.
      pins: where they run so far.
      held: the same by variable.
      wanted: the groups in which results are wanted, where something says so.
    """
    labels: list[int] = []
    movable: list[bool] = []
    node: dict[compat.Var, int] = {}
    readers: dict[compat.Var, set[int]] = defaultdict(set)

    def add(group: int, moves: bool) -> int:
        labels.append(group)
        movable.append(moves)
        return len(labels) - 1

    made = {v for eqn in items for v in eqn.outvars}
    for v, groups in held.of.items():
        if v not in made and groups is not None and len(groups) == 1:
            node[v] = add(min(groups), False)
    own: dict[int, int] = {}
    for i, (eqn, pin) in enumerate(zip(items, pins, strict=True)):
        if pin is None or len(pin) != 1:
            continue
        own[i] = add(min(pin), not held.anchored.intersection(eqn.outvars))
        node.update((v, own[i]) for v in eqn.outvars)
        for v in equations.variables(eqn.invars):
            readers[v].add(own[i])
    for v, groups in wanted.items():
        for g in groups:
            readers[v].add(add(g, False))
    last = max((g for g in labels), default=0)
    found = cheapest_labels(
        Labelling(
            [0 if m else g for g, m in zip(labels, movable, strict=True)],
            [last if m else g for g, m in zip(labels, movable, strict=True)],
            labels,
            (),
            [Cost(equations.nbytes(v.aval), node[v], tuple(sorted(rs))) for v, rs in readers.items() if v in node],
        )
    )
    return [frozenset([found[own[i]]]) if i in own else pin for i, pin in enumerate(pins)]


def _looks_up(eqn) -> bool:
    """Whether the equation takes rows of a table, as an embedding does."""
    return eqn.primitive.name == "gather" and equations.size(eqn.invars[0].aval) > _WEIGHT and equations.shrinks(eqn)


def runs_once(eqn) -> bool:
    """Whether an equation should run in one group, early; moves between memories are each group's own, and late."""
    return equations.is_heavy(eqn) and not equations.changes_memory(eqn)
