"""In a step without a loop: the stage in which each equation stands, by the marks, and the group of each stage.

An equation that depends on a mark stands in the stage in whose text it was written. An equation that depends on no
mark (parameters that are derived from others, masks, noise) stands in the first stage that reads it, wherever it was
written. An equation on gradients that makes no gradient (the optimizer) stands in no stage.

A stage's group is its role's group; without a role, the group that holds most of its weights; if nothing is placed yet,
stages are distributed evenly.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.ops.role import groups_of_stages
from mpmd.ops.stage_end import mark_p
from mpmd.tracing.trace import Trace

Groups = frozenset[int]

WEIGHT = 64  # elements; smaller arrays are worth sending


@dataclasses.dataclass(frozen=True)
class StageGroups:
    """The stages of the equations in a step without a loop, and the group of each stage.

    Attributes:
      arrivals: per equation, for operands that passed a mark, the stage that the last such mark begins.
    """

    stage: dict[compat.Var, int]  # per equation (by its results), the stage in which it stands
    arrivals: dict[compat.Var, dict[compat.Var, int]]
    with_weights: set[compat.Var]  # equations (by first result) that read weights of their stage, directly or derived
    groups: list[int]  # per stage, its group
    firm: list[bool]  # per stage, whether its role or placed weights determine the group

    @classmethod
    def of(cls, trace: Trace, held: Mapping[compat.Var, Groups | None], num_groups: int) -> "StageGroups | None":
        """Reads the marks of a flat jaxpr; None if it has none. `held`: the groups of each argument."""
        marks = [e for e in trace.jaxpr.eqns if e.primitive is mark_p]
        roles = [e.params["role"] for e in marks if e.params["kind"] == "forward"]
        if not roles:
            return None
        is_whole = roles[-1] is not None or len(roles) % num_groups == 0
        num_stages = len(roles) if is_whole else len(roles) + 1
        lines = _lines(trace.jaxpr.eqns, num_stages)
        ends = _stand(lines)
        stage = {v: line.stage for line in lines if line.stage is not None for v in line.eqn.outvars}
        arrivals = {line.eqn.outvars[0]: line.arrived for line in lines if line.eqn.outvars}
        weights, with_weights = _weights(lines, set(trace.jaxpr.invars), ends, num_stages)
        of_roles = groups_of_stages([*roles, None][:num_stages])
        found = [own if own is not None else _home(read, held) for own, read in zip(of_roles, weights, strict=True)]
        firm = [g is not None for g in found]
        if not any(firm):
            return cls(stage, arrivals, with_weights, [s * num_groups // num_stages for s in range(num_stages)], firm)
        for s in range(1, num_stages):  # a stage without weights runs where the one before it does
            found[s] = found[s - 1] if found[s] is None else found[s]
        first = next(g for g in found if g is not None)
        return cls(stage, arrivals, with_weights, [first if g is None else g for g in found], firm)

    def group(self, eqn: compat.JaxprEqn) -> int | None:
        """Returns the group of the stage in whose text an equation stands."""
        stage = self._stage(eqn)
        return None if stage is None else self.groups[stage]

    def is_firm(self, eqn: compat.JaxprEqn) -> bool:
        """Returns whether a role or placed weights determine the group of an equation's stage."""
        stage = self._stage(eqn)
        return stage is not None and self.firm[stage]

    def reads_weights(self, eqn: compat.JaxprEqn) -> bool:
        """Returns whether an equation reads weights of its stage, directly or derived."""
        return not self.with_weights.isdisjoint(eqn.outvars[:1])

    def arrived(self, eqn: compat.JaxprEqn) -> dict[compat.Var, int]:
        """Returns, for operands that passed a mark, the group of the stage that the mark begins."""
        stages = self.arrivals.get(eqn.outvars[0], {}) if eqn.outvars else {}
        return {v: self.groups[stage] for v, stage in stages.items() if equations.size(v.aval) > 1}

    def _stage(self, eqn: compat.JaxprEqn) -> int | None:
        return self.stage.get(eqn.outvars[0]) if eqn.outvars else None


@dataclasses.dataclass
class _Line:
    """An equation, with its operands as they were before marks."""

    eqn: compat.JaxprEqn
    operands: list[compat.Var]
    stage: int | None  # the stage in which it stands; for a mark, the stage that it ends
    arrived: dict[compat.Var, int]  # for operands that passed a mark, the stage that the last such mark begins
    is_derived: bool  # whether it depends on no mark
    is_free: bool  # whether readers determine its stage: it is derived, or is made from gradients


def _lines(eqns: Sequence[compat.JaxprEqn], num_stages: int) -> list[_Line]:
    """Returns equations and forward marks, with the stages in whose text they are written."""
    alias: dict = {}
    arrived: dict[compat.Var, int] = {}
    forward: dict = defaultdict(list)
    marked: set[compat.Var] = set()
    gradients: set[compat.Var] = set()
    lines = []
    here = passed = 0
    for eqn in eqns:
        read = equations.variables(eqn.invars)
        operands = equations.variables(alias.get(v, v) for v in read)
        if eqn.primitive is not mark_p:
            is_gradient = compat.is_transposed(eqn)
            after_gradients = not gradients.isdisjoint(read)
            is_derived = not is_gradient and marked.isdisjoint(read)
            if not is_derived:
                marked.update(eqn.outvars)
            if is_gradient or after_gradients:
                gradients.update(eqn.outvars)
            found = {alias.get(v, v): arrived[v] for v in read if v in arrived}
            is_free = is_derived or (after_gradients and not is_gradient)
            lines.append(_Line(eqn, operands, here, found, is_derived, is_free))
            continue
        kind, mark = eqn.params["kind"], eqn.params["id"]
        marked.update(eqn.outvars)
        if kind == "forward":
            lines.append(_Line(eqn, operands, min(passed, num_stages - 1), {}, False, False))
            forward[mark].append(passed)
            passed += 1
            here = min(passed, num_stages - 1)
        elif kind == "backward" and forward[mark]:
            here = forward[mark].pop() if len(forward[mark]) > 1 else forward[mark][0]
            gradients.update(eqn.outvars)
        stays = kind == "forward" and eqn.params["role"] is not None  # a role's results stay where the role is
        for new, old in zip(eqn.outvars, eqn.invars, strict=True):
            if not isinstance(old, compat.Literal):
                alias[new] = alias.get(old, old)
                if not stays:
                    arrived[new] = here
    return lines


def _stand(lines: Sequence[_Line]) -> dict[compat.Var, int]:
    """Puts free equations at their first reader. Returns, per variable, the first stage with an end that needs it."""
    readers: dict[compat.Var, int] = {}
    ends: dict[compat.Var, int] = {}
    for line in reversed(lines):
        results = line.eqn.outvars
        if line.is_free:
            line.stage = min((readers[v] for v in results if v in readers), default=None)
        end = min((ends[v] for v in results if v in ends), default=None)
        if line.eqn.primitive is mark_p:
            end = line.stage
        for v in line.operands:
            if line.stage is not None:
                readers[v] = min(readers.get(v, line.stage), line.stage)
            if end is not None:
                ends[v] = min(ends.get(v, end), end)
    return ends


def _weights(
    lines: Sequence[_Line], arguments: Collection[compat.Var], ends: Mapping[compat.Var, int], num_stages: int
) -> tuple[list[set[compat.Var]], set[compat.Var]]:
    """Returns the arguments that each stage reads, directly or derived, and the equations that read them.

    A stage that reads large arguments does not count as a reader of others that it has small values of (a norm of all
    weights).
    """
    large, readers = _met(lines, arguments, ends, WEIGHT)
    small, _ = _met(lines, arguments, ends, 1)
    weights: list[set[compat.Var]] = []
    for s in range(num_stages):
        weights.append({v for v in arguments if s in large[v] and equations.size(v.aval) > WEIGHT})
        weights[s] = weights[s] or {v for v in arguments if s in small[v] and equations.size(v.aval) > 1}
    return weights, readers


def _met(
    lines: Sequence[_Line], arguments: Collection[compat.Var], ends: Mapping[compat.Var, int], least: int
) -> tuple[dict[compat.Var, set[int]], set[compat.Var]]:
    """Returns, per derived value, the stages that combine it (or values of more than `least` elements that are derived
    from it) with values that passed marks, or end with it; and the equations that do so, by their first results.

    A value that an earlier stage made for its own end does not count in later stages (a skip connection).
    """
    met: dict[compat.Var, set[int]] = defaultdict(set)
    derived = {v for line in lines if line.is_derived for v in line.eqn.outvars}.union(arguments)
    readers: set[compat.Var] = set()
    for line in reversed(lines):
        results = line.eqn.outvars
        if line.is_derived:
            stages = set[int]().union(*(met[v] for v in results if equations.size(v.aval) > least))
            found = line.operands if stages else []
        else:
            stages = set() if line.stage is None else {line.stage}
            found = [
                v
                for v in line.operands
                if v in derived and v not in line.arrived and equations.size(v.aval) > least
                if v in arguments or line.stage is None or ends.get(v, line.stage) >= line.stage
            ]
        if found:
            readers.update(results[:1])
        if not compat.is_transposed(line.eqn):  # the gradient of a penalty stands in the last stage
            for v in found:
                met[v] |= stages
    return met, readers


def _home(weights: Collection[compat.Var], held: Mapping[compat.Var, Groups | None]) -> int | None:
    """Returns the group that holds most of a stage's weights, None if there is none."""
    votes: dict[int, int] = defaultdict(int)
    for v in weights:
        if len(groups := held.get(v) or ()) == 1:
            votes[min(groups)] += equations.nbytes(v.aval)
    return max(votes, key=lambda g: (votes[g], -g), default=None)
