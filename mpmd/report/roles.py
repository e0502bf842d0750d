"""The role of each argument in a step: a parameter, other state, or data."""

from collections.abc import Iterable

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.partition.loop import TaskBody
from mpmd.partition.outline import Loop, Outline, Segment


class Roles:
    """The role of each argument: a parameter (a loop reads it whole, or reads it and the step returns it), other state,
    or data, of which each microbatch takes a part. Where no loop has a backward pass, returned arguments are state.

    `frozen` are the parameters that the step does not return.
    """

    def __init__(self, outline: Outline):
        self.args = outline.trace.arguments  # the flat arguments
        self.groups = outline.inputs[len(outline.trace.consts) :]  # for each, the groups that hold it
        self.names = outline.names
        self._roots: dict[compat.Var, set[compat.Var]] = {v: {v} for v in self.args}
        for item in outline.items:
            if isinstance(item, Segment):
                for eqn in item.eqns:
                    found = self.arguments(equations.variables(eqn.invars))
                    self._roots.update((v, found) for v in eqn.outvars)
        tasks = [t for loop in outline.loops for t in loop.partition.tasks]
        self.trains = any(t.place.kind != "F" and not t.is_empty for t in tasks)  # whether a loop has a backward pass
        returned = {self.args[d] for d in outline.donors if d is not None}
        read = {v for t in tasks for v in self.arguments(t.operands) if equations.size(v.aval) > 1}
        self.frozen = read - returned - self.arguments(v for loop in outline.loops for v in _scanned(loop))
        parameters = self.frozen | (read & returned if self.trains else set())
        self.role = {v: "parameters" if v in parameters else "state" if v in returned else "data" for v in self.args}

    def arguments(self, operands: Iterable[compat.Var]) -> set[compat.Var]:
        """Returns the arguments that these values are computed from."""
        return set().union(*(self._roots.get(v, set()) for v in operands))

    def read_by(self, tasks: Iterable[TaskBody]) -> list[compat.Var]:
        """Returns the parameters that tasks read; in a step without training, all arguments that they read."""
        found = self.arguments({v for t in tasks for v in t.operands})
        return [v for v in found if self.role[v] == "parameters" or not self.trains]

    def bytes_in(self, group: int) -> dict[str, int]:
        """Returns the bytes in a group by role, over all of its devices, without replicas."""
        held = {"parameters": 0, "state": 0, "data": 0}
        for v, groups in zip(self.args, self.groups, strict=True):
            if group in groups:
                held[self.role[v]] += equations.nbytes(v.aval)
        return held


def _scanned(loop: Loop) -> set[compat.Var]:
    """Returns the operands of which each microbatch takes a part: an equation reads them together with the index."""
    found: set[compat.Var] = set()
    for t in loop.partition.tasks:
        moving, whole = {loop.partition.index}, {v: {v} for v in t.operands}
        for eqn in t.eqns:
            read = equations.variables(eqn.invars)
            operands = set().union(*(whole.get(v, ()) for v in read))
            if moving.isdisjoint(read):
                whole.update((v, operands) for v in eqn.outvars if equations.is_view(eqn))
            elif operands:
                found |= operands
            elif moving.issuperset(read):
                moving.update(eqn.outvars)
    return found
