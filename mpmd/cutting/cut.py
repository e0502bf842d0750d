"""Cuts the loops of a traced step: some of the marks where a stage may end become stage ends, the others vanish.

Later passes see only stage ends, as if the user had written `mark_stage_end` at these places.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout
from mpmd.arrays.mesh import MpmdMesh
from mpmd.cutting.candidates import Candidates
from mpmd.cutting.choose import choose, one_cut
from mpmd.cutting.scan_residuals import keep_less
from mpmd.cutting.stage_ends import ends_of_roles, forward_roles, has_roles, with_stage_ends
from mpmd.errors import StageError
from mpmd.graphs.equations import variables
from mpmd.graphs.scheduled_loop import ScheduledLoop
from mpmd.ops.loop_primitive import treduce_p
from mpmd.ops.role import groups_of_stages
from mpmd.tracing.inline import check_no_marks_inside
from mpmd.tracing.trace import Trace
from mpmd.users_frame import users_frame
from scheduler import Adaptive, GraphSchedule, Schedule
from scheduler.base.texts import counted
from scheduler.optimize.cuts import Cut
from scheduler.ordering import chain
from scheduler.schedules import catalogue
from scheduler.schedules.graph import RULES


def cut_trace(trace: Trace, mesh: MpmdMesh, in_layouts: Sequence[Layout | None]) -> Trace:
    """Returns the step with a known schedule in each loop, and only stage ends as marks.

    Raises:
      StageError: the marks, the schedule and the cuts of a loop do not fit each other.
    """
    layouts = {v: layout for v, layout in zip(trace.arguments, in_layouts, strict=True) if layout}
    trace = trace.with_loops(lambda eqn: _with_schedule(eqn, mesh.num_groups))
    if jax.process_index() == 0:
        _warn_of_rows(trace)
    chosen = iter(_chosen_cuts(trace, mesh, layouts))
    return trace.with_loops(lambda eqn: _cut_loop(eqn, *next(chosen)))


def with_given_cuts(trace: Trace, cuts: tuple[int, ...]) -> Trace:
    """Returns the step as if its loops had been written with these cuts."""

    def with_cuts(eqn: compat.JaxprEqn) -> compat.JaxprEqn:
        return eqn.replace(params={**eqn.params, "info": dataclasses.replace(eqn.params["info"], cuts=cuts)})

    return trace.with_loops(with_cuts)


def _with_schedule(eqn: compat.JaxprEqn, num_groups: int) -> compat.JaxprEqn:
    """Returns a loop with a known schedule, which fits the places where its stages may end."""
    body: compat.ClosedJaxpr = eqn.params["jaxpr"]
    candidates = Candidates.of(body.jaxpr)
    candidates.check_are_of_one_kind()
    if candidates.scans:
        eqn = eqn.replace(params={**eqn.params, "jaxpr": keep_less(body)})
        candidates = Candidates.of(eqn.params["jaxpr"].jaxpr)
    if has_roles(candidates):
        eqn = ends_of_roles(eqn, candidates)
        schedule = _schedule_of_roles(eqn, eqn.params["info"].schedule, num_groups)
        return eqn.replace(params={**eqn.params, "info": ScheduledLoop.of(eqn.params["info"], schedule)})
    schedule = _schedule_of(eqn, eqn.params["info"].schedule, candidates, num_groups)
    if candidates.are_optional:
        _check_candidates(eqn, candidates, schedule)
    return eqn.replace(params={**eqn.params, "info": ScheduledLoop.of(eqn.params["info"], schedule)})


def _warn_of_rows(trace: Trace) -> None:
    """Warns where the rows of a batch seem to have become microbatches: there are many for so few stages.

    Microbatches that carry their numbers (an `iota`) were made on purpose: no warning.
    """
    numbers = {v for eqn in trace.jaxpr.eqns if eqn.primitive.name == "iota" for v in eqn.outvars}
    for eqn in trace.jaxpr.eqns:
        info: ScheduledLoop | None = eqn.params["info"] if eqn.primitive is treduce_p else None
        if info is None or info.doubt is None or info.num_microbatches <= 2 * info.schedule.num_stages:
            continue
        if any(v in numbers and v.aval.shape == (info.num_microbatches,) for v in variables(eqn.invars)):
            continue
        warnings.warn(
            f"treduce at {compat.source_line(eqn)}: each of the {info.num_microbatches} microbatches is {info.doubt},"
            " without an axis of rows that they share. So each row of the batch may have become a microbatch:"
            " reshape the batch to (microbatches, rows, ...).",
            stacklevel=users_frame(),
        )


def _chosen_cuts(
    trace: Trace, mesh: MpmdMesh, layouts: Mapping[compat.Var, Layout]
) -> list[tuple[tuple[int, ...] | None, Cut | None]]:
    """Returns the cuts of each loop (None if its marks are the stage ends), and their costs if they were chosen.

    Loops over the same layers have one cut: parameters and optimizer state are then in one group.
    """
    loops = [eqn for eqn in trace.jaxpr.eqns if eqn.primitive is treduce_p]
    found: list[tuple[tuple[int, ...] | None, Cut | None]] = [(eqn.params["info"].cuts, None) for eqn in loops]
    candidates = [Candidates.of(eqn.params["jaxpr"].jaxpr) for eqn in loops]
    open_loops = [i for i, c in enumerate(candidates) if c.are_optional and found[i][0] is None]
    while open_loops:
        first = loops[open_loops[0]]
        alike = [i for i, c in enumerate(candidates) if c.are_optional and _have_the_same_layers(first, loops[i])]
        own = [i for i in alike if i in open_loops]
        open_loops = [i for i in open_loops if i not in own]
        given = next((found[i][0] for i in alike if found[i][0] is not None), None)
        if given is not None:
            found = [(given, None) if i in own else old for i, old in enumerate(found)]
            continue
        infos: list[ScheduledLoop] = [loops[i].params["info"] for i in own]
        choices = [
            choose(trace, loops[i], candidates[i], info.schedule, mesh, layouts)
            for i, info in zip(own, infos, strict=True)
        ]
        for i, choice in zip(own, one_cut(choices, infos, mesh), strict=True):
            found[i] = choice.layers, choice
    return found


def _have_the_same_layers(one: compat.JaxprEqn, other: compat.JaxprEqn) -> bool:
    """Returns whether two loops have equally many layers on the same groups, and mostly operands of the same types:
    the same parameters, or a copy of them (a target network).
    """
    if one is other:
        return True
    infos = [eqn.params["info"] for eqn in (one, other)]
    if infos[0].schedule.placement != infos[1].schedule.placement:
        return False
    if len({len(Candidates.of(eqn.params["jaxpr"].jaxpr)) for eqn in (one, other)}) > 1:
        return False
    kinds = [
        Counter((v.aval.shape, v.aval.dtype) for v in eqn.invars if jax.dtypes.issubdtype(v.aval.dtype, np.inexact))
        for eqn in (one, other)
    ]
    return 2 * (kinds[0] & kinds[1]).total() >= min(kinds[0].total(), kinds[1].total())


def _cut_loop(eqn: compat.JaxprEqn, cuts: tuple[int, ...] | None, choice: Cut | None) -> compat.JaxprEqn:
    """Returns a loop with only stage ends as marks."""
    body: compat.ClosedJaxpr = eqn.params["jaxpr"]
    candidates = Candidates.of(body.jaxpr)
    info: ScheduledLoop = dataclasses.replace(eqn.params["info"], cuts=cuts, choice=choice)
    schedule = info.schedule
    if candidates.are_optional:
        assert cuts is not None
        body = with_stage_ends(body, candidates, _stage_ends(eqn, candidates, cuts, schedule))
    elif cuts is not None:
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: cuts is {cuts}, and its body has no mark_layer_end.\n"
            "  Call mark_layer_end at the end of each layer, or leave cuts out: mark_stage_end says where stages end."
        )
    elif candidates.scans and len(candidates) in (schedule.num_stages - 1, schedule.num_stages):
        body = with_stage_ends(body, candidates, range(len(candidates)))
    elif candidates.scans:
        raise StageError(
            f"mark_stage_end inside scan: {schedule} has {counted(schedule.num_stages, 'stage')}, and a stage would end"
            f" {counted(len(candidates), 'time')} in a microbatch:{candidates.lines()}\n"
            "  Use mark_layer_end there: the library chooses, or cuts= says, behind which layers stages end."
        )
    for inner in body.jaxpr.eqns:
        check_no_marks_inside(inner)
    return eqn.replace(params={**eqn.params, "info": info, "jaxpr": body})


def _schedule_of(
    eqn: compat.JaxprEqn, given: Schedule | str | None, candidates: Candidates, num_groups: int
) -> Schedule:
    """Returns the schedule of a loop. A schedule given by name has as many stages as the cuts or the marks imply.

    If the marks are layer ends, a group has one stage, or two if the schedule has several per group.

    Raises:
      StageError: no schedule of that name fits the marks and the groups.
    """
    assert given is not None, "a loop without a schedule is a loop of `lax` by now"
    if isinstance(given, Adaptive):
        return dataclasses.replace(given, schedule=_schedule_of(eqn, given.schedule, candidates, num_groups))
    if not isinstance(given, str):
        return given
    cuts = eqn.params["info"].cuts
    try:
        if cuts is None and candidates.are_optional:
            return catalogue.make(given, num_groups=num_groups)
        return catalogue.for_marks(given, len(candidates if cuts is None else cuts), num_groups)
    except ValueError as e:
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: schedule is {given!r}, and {e}\n"
            "  Call mark_stage_end at the end of each stage, or take another schedule."
        ) from None


def _schedule_of_roles(eqn: compat.JaxprEqn, given: Schedule | str, num_groups: int) -> Schedule:
    """Returns the schedule of a loop with stages in the groups of their roles. The graph of a `GraphSchedule` is found
    when the loop is partitioned.

    Raises:
      StageError: the schedule places stages elsewhere, or cuts are given.
    """
    where = f"treduce at {compat.source_line(eqn)}"
    if eqn.params["info"].cuts is not None:
        raise StageError(
            f"{where}: cuts is {eqn.params['info'].cuts}, and its stages are roles.\n"
            "  Leave cuts out; in a role of several groups, mark_stage_end says where it is divided."
        )
    if isinstance(given, Adaptive):
        return dataclasses.replace(given, schedule=_schedule_of_roles(eqn, given.schedule, num_groups))
    ends = forward_roles(eqn.params["jaxpr"].jaxpr)
    placement = tuple(group for group in groups_of_stages(ends) if group is not None)
    assert len(placement) == len(ends), "each stage of a loop with roles has one"
    if isinstance(given, str) and (rule := catalogue.name_of(given)) in RULES:
        return GraphSchedule(chain(len(placement)), placement, rule, num_groups)
    try:
        schedule = catalogue.for_marks(given, len(placement), num_groups) if isinstance(given, str) else given
    except ValueError as e:
        raise StageError(f"{where}: schedule is {given!r}, and {e}\n  Take '1f1b' or 'gpipe'.") from None
    if tuple(schedule.placement) != placement:
        raise StageError(
            f"{where}: {schedule} has its stages in the groups {tuple(schedule.placement)}, and the roles of the loop"
            f" are in {placement}.\n"
            "  Take '1f1b' or 'gpipe', which go over any graph of stages, or another table of roles."
        )
    return schedule


def _check_candidates(eqn: compat.JaxprEqn, candidates: Candidates, schedule: Schedule) -> None:
    if len(candidates) < schedule.num_stages - 1:
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: {schedule} has {counted(schedule.num_stages, 'stage')}, and a"
            f" stage may end at {counted(len(candidates), 'place')} only:{candidates.lines()}\n"
            "  Call mark_layer_end at the end of each layer, or use a schedule with fewer stages."
        )


def _stage_ends(
    eqn: compat.JaxprEqn, candidates: Candidates, cuts: Sequence[int], schedule: Schedule
) -> tuple[int, ...]:
    """Returns the candidates at which stages end: behind the last layer of each stage except the last one."""
    where, found = f"treduce at {compat.source_line(eqn)}: cuts is {tuple(cuts)}", len(candidates)
    if len(cuts) != schedule.num_stages:
        raise StageError(
            f"{where}, {counted(len(cuts), 'entry')}, and {schedule} has {counted(schedule.num_stages, 'stage')}.\n"
            "  Pass how many layers each stage gets, one number for each stage."
        )
    if sum(cuts) != found and not (sum(cuts) == found + 1 and cuts[-1]):
        raise StageError(
            f"{where}, {counted(sum(cuts), 'layer')} together, and the loop has"
            f" {counted(found, 'layer end')}:{candidates.lines()}\n"
            f"  The numbers must add up to {found}, or to {found + 1} if the last layer has no mark."
        )
    return tuple(sum(cuts[: s + 1]) - 1 for s in range(len(cuts) - 1))
