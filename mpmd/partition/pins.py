"""Finds the groups that may run an equation outside of the loops, from the groups of its operands.

An equation is pinned to the groups that hold its operands. If these have no group in common, a heavy equation (a
matrix product, a convolution) goes to its weights, and any other to the group that has the most bytes of its
operands; ties go to the stage in whose text the equation stands, to the group that holds state, then to the value
that was computed last. An equation that depends on no placed value is not pinned: it runs where its result is wanted.

In a step without a loop, the equations that no weight holds are then moved so that the fewest bytes cross. Marks end
stages: a value that passed mark k is in the group of stage k + 1 from then on (`stage_text.py`). So if there are
marks, only equations that had to choose between groups are moved.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.minimum_cut import Cost, Labelling, cheapest_labels
from mpmd.ops.cross_group import SMALL, across_p, place_p
from mpmd.partition.stage_text import WEIGHT, Groups, StageGroups


class Pins:
    """The groups that hold each variable, filled equation by equation in the order of the step.

    Attributes:
      firm: variables with a place that follows from a placed value: an argument, a loop's result, a `place`. The other
        variables have a place only for want of a better one.
      weights: large placed arguments, and values that are made from these only.
      disputed: results of equations that had to choose a group that lacks an array, and values that depend on them.
    """

    def __init__(
        self,
        arguments: Mapping[compat.Var, Groups | None],
        state: Iterable[compat.Var] = (),
        stages: StageGroups | None = None,
    ):
        self.of: dict[compat.Var, Groups | None] = dict(arguments)  # the groups that hold it; None: any would do
        self.firm = {v for v, groups in arguments.items() if groups is not None}
        self.weights = {v for v in self.firm if equations.size(v.aval) > WEIGHT}
        self.state = set(state)  # arguments that the step returns anew, and values that are made from them
        self.grown: set[compat.Var] = set()  # results larger than their operands: the operands are sent instead
        self.anchored: set[compat.Var] = set()  # results of equations that stay with their weights
        self.disputed: set[compat.Var] = set()
        self.torn = False  # whether an equation had to choose between groups
        self.stages = stages  # the places of the stages between marks, if there are marks
        self._order: dict[compat.Var, int] = {}
        self._after_loop = False

    def loop_result(self, v: compat.Var, groups: Groups) -> None:
        """Records that a loop's result is in the groups that accumulate it."""
        self._after_loop = True
        self.of[v] = groups
        self.firm.add(v)

    def pin(self, eqn: compat.JaxprEqn) -> Groups | None:
        """Returns the groups that may run an equation, None where any group would do."""
        if eqn.primitive is place_p:
            return eqn.params["groups"]
        if eqn.primitive is across_p and equations.nbytes(eqn.outvars[0].aval) <= SMALL:
            return None  # it runs where its result is wanted: each group gets all the parts
        held = self._held(eqn)
        if not held:
            group = None if eqn.effects else self._group_of_text(eqn)
            return None if group is None else frozenset([group])
        common = frozenset.intersection(*(groups for groups, _ in held))
        if not common:
            return frozenset([self._choose(eqn, held)])
        return self._in_its_text(eqn, held, common) or common

    def bind(self, eqn: compat.JaxprEqn, pin: Groups | None) -> None:
        """Records the groups of an equation's results."""
        operands = equations.variables(eqn.invars)
        if eqn.effects or eqn.primitive is place_p or (equations.is_heavy(eqn) and self._stays(eqn, pin)):
            self.anchored.update(eqn.outvars)
        if not self.disputed.isdisjoint(operands) and self.anchored.isdisjoint(eqn.outvars):
            self.disputed.update(eqn.outvars)
        for v in eqn.outvars:
            self.of[v] = pin
            self._order[v] = len(self._order)
        by_stage = bool(pin) and self.stages is not None and self.stages.is_firm(eqn)
        if pin is not None and (by_stage or eqn.primitive is place_p or any(v in self.firm for v in operands)):
            self.firm.update(eqn.outvars)
        large = [v for v in operands if equations.size(v.aval) > WEIGHT]
        if large and not equations.is_heavy(eqn) and self.weights.issuperset(large):
            self.weights.update(eqn.outvars)
        if self.state.intersection(operands):
            self.state.update(eqn.outvars)
        moves = self._after_loop or not runs_once(eqn)  # after a loop: a part of a gradient, a product of small factors
        if moves and (equations.grows(eqn) or self._grows_on(eqn)):
            self.grown.update(eqn.outvars)

    def _grows_on(self, eqn: compat.JaxprEqn) -> bool:
        """Returns whether the results of an equation are larger than its placed operands, or depend on grown results.

        So the group of a parameter pads parts of its gradient with zeros, and updates a momentum that nothing else
        places.
        """
        held = [v for v in equations.variables(eqn.invars) if self.of[v] is not None]
        if not held or not (self._after_loop or equations.is_view(eqn)):
            return False
        read, made = (sum(equations.nbytes(v.aval) for v in vs) for vs in (held, eqn.outvars))
        if self.grown.issuperset(held):
            return equations.is_view(eqn) or (made >= read and not equations.is_heavy(eqn))
        return self._after_loop and made > read

    def _stays(self, eqn: compat.JaxprEqn, pin: Groups | None) -> bool:
        """Returns whether a heavy equation stays with the weights that it reads directly or derived."""
        if self.stages and self.stages.reads_weights(eqn) and pin == {self.stages.group(eqn)}:
            return True
        return not self.weights.isdisjoint(equations.variables(eqn.invars))

    def _group_of_text(self, eqn: compat.JaxprEqn) -> int | None:
        """Returns the group of the stage in whose text a heavy equation (or a lookup) stands; None for others."""
        return self.stages.group(eqn) if self.stages and (runs_once(eqn) or _looks_up(eqn)) else None

    def _held(self, eqn: compat.JaxprEqn) -> list[tuple[Groups, compat.Var]]:
        """Returns placed operands and their groups. A value that passed a mark is in the stage that the mark begins."""
        arrived = self.stages.arrived(eqn) if self.stages else {}
        found = []
        for v in equations.variables(eqn.invars):
            if v in arrived:
                found.append((frozenset([arrived[v]]), v))
            elif (groups := self.of[v]) is not None:
                found.append((groups, v))
        return found

    def _in_its_text(
        self, eqn: compat.JaxprEqn, held: Sequence[tuple[Groups, compat.Var]], common: Groups
    ) -> Groups | None:
        """Returns the group of the stage in whose text a heavy equation stands, if its operands are cheaper to send
        there than its results: tokens go to the embedding of the first stage, although the last stage has a copy of it.
        """
        group = self._group_of_text(eqn)
        if group is None or group in common:
            return None
        missing = sum(equations.nbytes(v.aval) for groups, v in held if group not in groups)
        return frozenset([group]) if missing <= sum(equations.nbytes(v.aval) for v in eqn.outvars) else None

    def _choose(self, eqn: compat.JaxprEqn, held: Sequence[tuple[Groups, compat.Var]]) -> int:
        """Chooses the group for an equation with operands that have no group in common."""
        heavy = equations.is_heavy(eqn)
        self.torn |= any(equations.size(v.aval) > 1 for v in eqn.outvars)
        text = self.stages.group(eqn) if self.stages else None
        weights: dict[int, int] = defaultdict(int)
        nbytes: dict[int, int] = defaultdict(int)
        state, stays = set[int](), set[int]()
        last: dict[int, int] = defaultdict(int)
        for groups, v in held:
            for g in groups:
                nbytes[g] += equations.nbytes(v.aval)
                if heavy and v in self.weights:
                    weights[g] += equations.nbytes(v.aval)
                if v in self.state:
                    state.add(g)
                if v not in self.grown and equations.size(v.aval) > 1:
                    stays.add(g)
                if not self._after_loop and equations.size(v.aval) > 1:
                    last[g] = max(last[g], self._order.get(v, 0))
        # Between two large arguments (weights, and an encoder's output), the equation's own stage decides.
        of_its_text = text if text is not None and weights[text] else None
        best = max(
            nbytes,
            key=lambda g: (g == of_its_text, weights[g], g == text, nbytes[g], g in state, last[g], g in stays, -g),
        )
        if any(best not in groups and equations.size(v.aval) > 1 for groups, v in held):
            self.disputed.update(eqn.outvars)
        return best


def with_fewest_bytes(
    items: Sequence[compat.JaxprEqn], pins: list[Groups | None], held: Pins, wanted: Mapping[compat.Var, Groups]
) -> list[Groups | None]:
    """Returns the pins with which the fewest bytes cross, in a step without a loop. Equations that no weight holds may
    move to other groups.

    Args:
      wanted: the groups in which results are wanted, where they are known.
    """
    labels: list[int] = []
    movable: list[bool] = []
    node: dict[compat.Var, int] = {}
    readers: dict[tuple[compat.Var, int | None], set[int]] = defaultdict(set)
    makers: dict[tuple[compat.Var, int | None], int] = {}

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
        moves = held.stages is None or not held.disputed.isdisjoint(eqn.outvars)
        own[i] = add(min(pin), moves and held.anchored.isdisjoint(eqn.outvars))
        node.update((v, own[i]) for v in eqn.outvars)
        arrived = held.stages.arrived(eqn) if held.stages else {}
        for v in equations.variables(eqn.invars):
            g = arrived.get(v)
            readers[v, g].add(own[i])
            if g is not None and (v, g) not in makers:  # it passed a mark, which sends it there
                makers[v, g] = add(g, False)
                readers[v, None].add(makers[v, g])
    for v, groups in wanted.items():
        readers[v, None].update(add(g, False) for g in groups)
    makers.update(((v, None), n) for v, n in node.items())
    costs = [
        Cost(equations.nbytes(v.aval), makers[v, g], tuple(sorted(r)))
        for (v, g), r in readers.items()
        if (v, g) in makers
    ]
    last = max(labels, default=0)
    low = [0 if m else g for g, m in zip(labels, movable, strict=True)]
    high = [last if m else g for g, m in zip(labels, movable, strict=True)]
    found = cheapest_labels(Labelling(low, high, labels, (), costs))
    return [frozenset([found[own[i]]]) if i in own else pin for i, pin in enumerate(pins)]


def _looks_up(eqn: compat.JaxprEqn) -> bool:
    """Returns whether an equation takes rows of a table, as an embedding does."""
    return eqn.primitive.name == "gather" and equations.size(eqn.invars[0].aval) > WEIGHT and equations.shrinks(eqn)


def runs_once(eqn: compat.JaxprEqn) -> bool:
    """Returns whether an equation should run early, in one group. Each group moves values between memories, late."""
    return equations.is_heavy(eqn) and not equations.changes_memory(eqn)
