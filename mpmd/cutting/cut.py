"""Cuts the loops of a traced step: of the marks where a stage may end, those where one does remain as stage ends.

What comes after sees stage ends only, as if the user had written `mark_stage_end` at these places.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout
from mpmd.arrays.mesh import MpmdMesh
from mpmd.cutting.candidates import Candidates
from mpmd.cutting.choose import choose
from mpmd.cutting.scan_residuals import keep_less
from mpmd.cutting.split_scans import split_scans
from mpmd.errors import StageError
from mpmd.ops.stage_end import MarkId, boundaries, mark_p
from mpmd.ops.treduce import LoopInfo
from mpmd.tracing.inline import check_no_marks_inside
from mpmd.tracing.new_equations import Atom
from mpmd.tracing.trace import Trace
from scheduler import Schedule
from scheduler.schedules import catalogue


def cut_trace(trace: Trace, mesh: MpmdMesh, in_layouts: Sequence[Layout | None]) -> Trace:
    """The step, in whose loops all schedules are known and all marks are stage ends.

    Args:
      trace: the step.
      mesh: the groups.
      in_layouts: per flat argument, its layout or None.

    Raises:
      StageError: the marks, the schedule and the cuts of a loop do not fit each other.
    """
    layouts = {v: layout for v, layout in zip(trace.arguments, in_layouts, strict=True) if layout}
    return trace.with_loops(lambda eqn: _cut_loop(trace, eqn, mesh, layouts))


def with_given_cuts(trace: Trace, cuts: tuple[int, ...]) -> Trace:
    """The step, as if its loops had been written with these cuts."""

    def with_cuts(eqn: compat.JaxprEqn) -> compat.JaxprEqn:
        return eqn.replace(params={**eqn.params, "info": dataclasses.replace(eqn.params["info"], cuts=cuts)})

    return trace.with_loops(with_cuts)


def _cut_loop(
    trace: Trace, eqn: compat.JaxprEqn, mesh: MpmdMesh, layouts: Mapping[compat.Var, Layout]
) -> compat.JaxprEqn:
    info: LoopInfo = eqn.params["info"]
    body: compat.ClosedJaxpr = eqn.params["jaxpr"]
    candidates = Candidates.of(body.jaxpr)
    candidates.check_are_of_one_kind()
    if candidates.scans:
        body = keep_less(body)
        eqn = eqn.replace(params={**eqn.params, "jaxpr": body})
        candidates = Candidates.of(body.jaxpr)
    schedule = _schedule_of(eqn, candidates, mesh.num_groups)
    info = dataclasses.replace(info, schedule=schedule)
    if candidates.are_optional:
        _check_candidates(eqn, candidates, schedule)
        if info.cuts is None:
            choice = choose(trace, eqn, candidates, schedule, mesh, layouts)
            info = dataclasses.replace(info, cuts=choice.layers, choice=choice)
        assert info.cuts is not None
        ends = _stage_ends(eqn, candidates, info.cuts, schedule)
        body = with_stage_ends(body, candidates, ends)
    elif info.cuts is not None:
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: cuts is {info.cuts}, and its body has no mark_layer_end.\n"
            "  Call mark_layer_end at the end of each layer, or leave cuts out: mark_stage_end says where stages end."
        )
    elif candidates.scans and len(candidates) in (schedule.num_stages - 1, schedule.num_stages):
        body = with_stage_ends(body, candidates, range(len(candidates)))
    elif candidates.scans:
        raise StageError(
            f"mark_stage_end inside scan: {schedule} has {schedule.num_stages} stages, and a stage would end"
            f" {len(candidates)} times in a microbatch:{candidates.lines()}\n"
            "  Use mark_layer_end there: the library chooses, or cuts= says, behind which layers stages end."
        )
    for inner in body.jaxpr.eqns:
        check_no_marks_inside(inner)
    return eqn.replace(params={**eqn.params, "info": info, "jaxpr": body})


def _schedule_of(eqn: compat.JaxprEqn, candidates: Candidates, num_groups: int) -> Schedule:
    """The schedule of a loop. One that is given by its name has as many stages as the cuts or the marks say.

    Where marks leave the stage ends open, a group has one stage, or two if the schedule has several.

    Raises:
      StageError: a schedule of that name does not fit the marks and the groups.
    """
    info: LoopInfo = eqn.params["info"]
    if not isinstance(info.schedule, str):
        return info.schedule
    try:
        if info.cuts is not None:
            return catalogue.for_marks(info.schedule, len(info.cuts), num_groups)
        if candidates.are_optional:
            return catalogue.make(info.schedule, num_groups=num_groups)
        return catalogue.for_marks(info.schedule, len(candidates), num_groups)
    except ValueError as e:
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: schedule is {info.schedule!r}, and {e}\n"
            "  Call mark_stage_end at the end of each stage, or take another schedule."
        ) from None


def _check_candidates(eqn: compat.JaxprEqn, candidates: Candidates, schedule: Schedule) -> None:
    if len(candidates) < schedule.num_stages - 1:
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: {schedule} has {schedule.num_stages} stages, and a stage may end at"
            f" {len(candidates)} places only:{candidates.lines()}\n"
            "  Call mark_layer_end at the end of each layer, or use a schedule with fewer stages."
        )


def _stage_ends(
    eqn: compat.JaxprEqn, candidates: Candidates, cuts: Sequence[int], schedule: Schedule
) -> tuple[int, ...]:
    """The candidates at which stages end: those behind the last layer of each stage but the last one."""
    where, found = f"treduce at {compat.source_line(eqn)}: cuts is {tuple(cuts)}", len(candidates)
    if len(cuts) != schedule.num_stages:
        raise StageError(
            f"{where}, {len(cuts)} entries, and {schedule} has {schedule.num_stages} stages.\n"
            "  Pass how many layers each stage gets, one number for each stage."
        )
    if sum(cuts) != found and not (sum(cuts) == found + 1 and cuts[-1]):
        raise StageError(
            f"{where}, {sum(cuts)} layers together, and the loop has {found} layer ends:{candidates.lines()}\n"
            f"  The numbers must add up to {found}, or to {found + 1} if the last layer has no mark."
        )
    return tuple(sum(cuts[: s + 1]) - 1 for s in range(len(cuts) - 1))


def with_stage_ends(body: compat.ClosedJaxpr, candidates: Candidates, ends: Sequence[int]) -> compat.ClosedJaxpr:
    """The body of a loop with stage ends at some of its candidates, and no other marks.

    Args:
      ends: numbers of candidates.
    """
    chosen, lengths, first = set(ends), [], 0
    new_ids: dict[int, MarkId] = {}  # per mark outside of scans that ends a stage, by its number among these
    number = 0
    for m in candidates.marked:
        own = sorted(k - first for k in chosen if first <= k < first + m.count)
        if m.is_scan:
            starts = [0, *(k + 1 for k in own)]
            lengths.append(tuple(b - a for a, b in zip(starts, [*starts[1:], m.count], strict=True)))
        else:
            if own:
                new_ids[number] = MarkId()
            number += 1
        first += m.count
    body = compat.ClosedJaxpr(_with_marks(body.jaxpr, new_ids), body.consts)
    return split_scans(body, lengths) if lengths else body


def _with_marks(jaxpr: compat.Jaxpr, new_ids: dict[int, MarkId]) -> compat.Jaxpr:
    """Of the marks that stand outside of scans, those with a new id become stage ends; the others vanish."""
    marks = [eqn for eqn in jaxpr.eqns if eqn.primitive is mark_p]
    numbers = iter(boundaries([eqn.params for eqn in marks]))
    alias: dict[compat.Var, Atom] = {}

    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[compat.renamed(v, alias) for v in eqn.invars])
        if eqn.primitive is not mark_p:
            eqns.append(eqn)
        elif (number := next(numbers)) in new_ids:
            eqns.append(eqn.replace(params={**eqn.params, "id": new_ids[number], "optional": False}))
        else:
            alias.update(zip(eqn.outvars, eqn.invars, strict=True))
    return compat.new_jaxpr(jaxpr, eqns=eqns, outvars=[compat.renamed(v, alias) for v in jaxpr.outvars])
