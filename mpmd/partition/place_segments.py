"""Decides which group runs each equation outside of the loops, the optimizer for instance.

The operands decide first (`pins.py`), then the readers of the result. The rules are in `outline.py`.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import MpmdMesh
from mpmd.graphs import equations
from mpmd.ops.cross_group import place_p
from mpmd.partition.assemble import assemble
from mpmd.partition.control_flow import pinned_parts
from mpmd.partition.flat_step import Asked, FlatStep, Item
from mpmd.partition.levels import Placed, as_early_as_possible, as_late_as_possible, by_task
from mpmd.partition.outline import Groups, Loop, Outline
from mpmd.partition.pins import Pins, runs_once, with_fewest_bytes
from mpmd.partition.stage_text import StageGroups
from mpmd.tracing.trace import Trace


def outline_step(
    trace: Trace,
    mpmd_mesh: MpmdMesh,
    in_groups: Asked,
    out_groups: Asked,
    forwarded: Iterable[int] = (),
    in_specs: Sequence[PartitionSpec | None] = (),
    ahead: bool = True,
) -> Outline:
    """Places every equation of a traced step.

    Args:
      in_groups: per flat argument, the groups that hold it, or None to find out.
      out_groups: per flat result, the groups that must hold it, or None.
      forwarded: flat arguments that may be returned without a copy (donated ones, which nothing else holds).
      in_specs: per flat argument, its spec inside of a group, or None if it is not known.
      ahead: as for `partition_loop`.

    Raises:
      StageError: a loop does not fit its schedule or the mesh, or a `place` names a group that is not there.
    """
    with compat.use_abstract_mesh(mpmd_mesh.groups[0].abstract_mesh):
        step = hold_loop_arguments(FlatStep.of(trace, mpmd_mesh, in_groups, out_groups, forwarded, in_specs, ahead))
        placed = place_by_demand(pin_by_operands(step))
        return assemble(placed, by_task(placed) or as_late_as_possible(placed, as_early_as_possible(placed)))


def hold_loop_arguments(step: FlatStep) -> FlatStep:
    """Places arguments where loops read them, directly or through equations that keep their size (casts).

    Other equations on such an argument run there, and only their results cross. If heavy equations make smaller values
    for several groups from an argument (a network that generates weights), it is in one group.
    """
    wanted: dict[compat.Var, set[int]] = defaultdict(set)
    made: dict[compat.Var, Counter[int]] = defaultdict(Counter)  # elements for each group
    after: set[compat.Var] = set()
    before: list[compat.JaxprEqn] = []
    for item in step.items:
        if isinstance(item, Loop):
            after.update(acc.result for acc in item.partition.accumulators)
            for v, groups in item.needs().items():
                wanted[v] |= groups
        elif any(v in after for v in equations.variables(item.invars)):
            after.update(item.outvars)
        else:
            before.append(item)
    for eqn in reversed(before):
        groups = set().union(*(wanted[v] for v in eqn.outvars))
        if eqn.primitive is place_p and (step.loops or not eqn.params.get("of_role")):
            groups = set(eqn.params["groups"])
        elif runs_once(eqn) and groups:
            groups = {min(groups)}  # it runs once, and its result is sent
        sizes = [equations.size(o.aval) for o in eqn.outvars]
        size = max(sizes, default=0) if eqn.primitive.name == "unstack" else sum(sizes)  # each row counts like a slice
        for v in equations.variables(eqn.invars):
            if equations.size(v.aval) < 2 * size:
                wanted[v] |= groups
                made[v] += sum((made[o] for o in eqn.outvars), Counter())
            elif runs_once(eqn):
                made[v].update(dict.fromkeys(groups, size))
    for v, groups in made.items():
        home = min(groups, default=0)
        if not wanted[v] and groups.total() - groups[home] < (len(groups) - 1) * equations.size(v.aval):
            wanted[v].add(home)
    held = [
        frozenset(wanted[v]) if given is None and wanted[v] and equations.size(v.aval) > 1 else given
        for v, given in zip(step.invars, step.in_groups, strict=True)
    ]
    return dataclasses.replace(step, in_groups=tuple(held))


class Pinned(NamedTuple):
    """A step with equations that are pinned as far as their operands determine it."""

    step: FlatStep  # the step; control flow over several groups is cut into one part for each
    pins: list[Groups | None]  # per item, the groups that may run it; None for loops, and where any group would do
    held: Pins  # the same by variable, with the reasons


def pin_by_operands(step: FlatStep) -> Pinned:
    """Runs the forward pass: pins each equation to the groups that hold its operands."""
    arguments = dict(zip(step.invars, step.in_groups, strict=True))
    stages = None if step.loops else StageGroups.of(step.trace, arguments, len(step.everywhere))
    held = Pins(arguments, step.next_of, stages)
    donor_of = {v: a for a, v in step.next_of.items()}
    items: list[Item] = []
    pins: list[Groups | None] = []
    for item in step.items:
        if isinstance(item, Loop):
            for acc in item.partition.accumulators:
                held.loop_result(acc.result, frozenset([item.group(acc.place)]))
            items.append(item)
            pins.append(None)
            continue
        for eqn, pin in pinned_parts(item, held, donor_of):
            items.append(eqn)
            pins.append(pin)
    if held.torn and not step.loops:
        pins = with_fewest_bytes(items, pins, held, _known_result_groups(step))
        for eqn, pin in zip(items, pins, strict=True):
            held.of.update((v, pin) for v in eqn.outvars)
    return Pinned(dataclasses.replace(step, items=tuple(items)), pins, held)


def _known_result_groups(step: FlatStep) -> dict[compat.Var, Groups]:
    """Returns the groups of results that the user, or the place of an argument, determines."""
    found = {}
    for v, given, donor in zip(step.outvars, step.out_groups, step.donors, strict=True):
        groups = given if given is not None or donor is None else step.in_groups[donor]
        if groups is not None:
            found[v] = groups
    return found


# --- where results are wanted ---------------------------------------------------------------------


def place_by_demand(pinned: Pinned) -> Placed:
    """Runs the backward pass: the groups that want each result, and so run each equation and hold each argument."""
    step, wish = pinned.step, [g or frozenset() for g in pinned.step.out_groups]
    wish, _ = _agreed(pinned, wish, final=False)  # first values with a place; then values that may be anywhere
    wish, demand = _agreed(pinned, wish, final=True)
    outputs = [w or _somewhere(step, demand, v) for w, v in zip(wish, step.outvars, strict=True)]
    return Placed(step, tuple(demand.runs), tuple(demand.inputs), tuple(outputs), _committed(pinned))


class _Demand(NamedTuple):
    """Per item, the groups that run it (none: a loop, or not wanted yet); per input, the groups that hold it."""

    runs: list[Groups]
    inputs: list[Groups]


def _agreed(pinned: Pinned, wish: list[Groups], final: bool) -> tuple[list[Groups], _Demand]:
    """Finds the groups in which results are wanted, so that results and the arguments that they replace agree.

    A result's groups only grow, so the number of (result, group) pairs that are not wished for falls each time.
    """
    step = pinned.step
    for _ in range(len(step.outvars) * len(step.everywhere) + 1):
        demand = _demand(pinned, wish, final)
        wider = [
            given if given is not None else old | _result_groups(step, demand.inputs, j)
            for j, (old, given) in enumerate(zip(wish, step.out_groups, strict=True))
        ]
        if wider == wish:
            return wish, demand
        wish = wider
    raise AssertionError("the groups that want a result grow without end")


def _demand(pinned: Pinned, wish: Sequence[Groups], final: bool) -> _Demand:
    """Returns the groups of equations and of arguments, if results are wanted in the groups of `wish`."""
    step = pinned.step
    wanted: dict[compat.Var, set[int]] = defaultdict(set)
    for v, groups in zip(step.outvars, wish, strict=True):
        wanted[v] |= groups
    runs: list[Groups] = []
    for item, pin in zip(reversed(step.items), reversed(pinned.pins), strict=True):
        if isinstance(item, Loop):
            for v, groups in item.needs().items():
                wanted[v] |= groups
            runs.append(frozenset())
            continue
        here = frozenset().union(*(wanted[v] for v in item.outvars))
        grown = not pinned.held.grown.isdisjoint(item.outvars)
        groups = _where(item, pin, here, grown) if here or item.effects or final else frozenset()
        runs.append(groups)
        for v in equations.variables(item.invars):
            wanted[v] |= groups
    inputs = [_input_groups(pinned, i, frozenset(wanted[v]), final) for i, v in enumerate(step.invars)]
    return _Demand(runs[::-1], inputs)


def _where(eqn: compat.JaxprEqn, pin: Groups | None, here: Groups, grown: bool) -> Groups:
    """Returns the groups that run an equation with results that are wanted `here`."""
    if compat.is_ordered(eqn):
        return frozenset([0])  # in one group they keep their order
    if pin is None:
        if eqn.effects or runs_once(eqn):
            return frozenset([min(here, default=0)])
        return here or frozenset([0])
    if eqn.effects:
        return frozenset([min(pin & here or pin)])
    if here and not pin & here and grown:
        return frozenset([min(here)]) if runs_once(eqn) else here
    return pin & here or frozenset([min(pin)])


def _input_groups(pinned: Pinned, i: int, wanted: Groups, final: bool) -> Groups:
    """Returns the groups that hold an input."""
    step = pinned.step
    if (given := step.in_groups[i]) is not None:
        return given
    returned = [j for j, d in enumerate(step.donors) if d == i]
    if returned and not getattr(step.invars[i].aval, "shape", ()):
        return step.everywhere
    if wanted:
        return wanted
    for j in returned:
        if (given := step.out_groups[j]) is not None:
            return given
        v, held = step.outvars[j], pinned.held
        if (pin := held.of.get(v)) and (final or v not in held.grown):
            return frozenset([min(pin)])
    return frozenset([0] if final else [])


def _result_groups(step: FlatStep, inputs: Sequence[Groups], j: int) -> Groups:
    """Returns the groups in which a result is wanted, as far as its donor, a `place` or its shape determines them."""
    v, donor = step.outvars[j], step.donors[j]
    if donor is not None:
        return inputs[donor]
    if v in step.placed_by_user:
        return step.placed_by_user[v]
    return frozenset() if getattr(v.aval, "shape", ()) else step.everywhere


def _somewhere(step: FlatStep, demand: _Demand, v: compat.Var) -> Groups:
    """Returns the groups of a result that no group wants: the groups that make it."""
    if v in step.invars:
        return demand.inputs[step.invars.index(v)]
    for item, runs in zip(step.items, demand.runs, strict=True):
        if isinstance(item, Loop):
            for acc in item.partition.accumulators:
                if acc.result is v:
                    return frozenset([item.group(acc.place)])
        elif v in item.outvars:
            return runs
    raise AssertionError(f"{v} comes from nowhere")


def _committed(pinned: Pinned) -> tuple[bool, ...]:
    """Returns, per result, whether a placed value determines where it is."""
    step = pinned.step
    return tuple(
        given is not None or (donor is not None and step.in_groups[donor] is not None) or v in pinned.held.firm
        for v, given, donor in zip(step.outvars, step.out_groups, step.donors, strict=True)
    )
