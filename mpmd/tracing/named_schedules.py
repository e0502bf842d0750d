"""Replaces the name of a schedule by the schedule, with the number of stages from the mesh and the marks."""

import dataclasses
from collections.abc import Sequence

from mpmd import _jax_compat as compat
from mpmd.errors import StageError
from mpmd.ops.stage_end import mark_p
from mpmd.ops.treduce import treduce_p
from scheduler import Schedule
from scheduler.schedules import catalogue


def with_schedules(eqns: Sequence[compat.JaxprEqn], num_groups: int) -> list[compat.JaxprEqn]:
    """The equations of a step, in which loops have the schedules that they named.

    Raises:
      StageError: a schedule of that name does not fit the marks and the groups.
    """
    return [_with_schedule(eqn, num_groups) if eqn.primitive is treduce_p else eqn for eqn in eqns]


def _with_schedule(eqn: compat.JaxprEqn, num_groups: int) -> compat.JaxprEqn:
    info = eqn.params["info"]
    if not isinstance(info.schedule, str):
        return eqn
    marks = [e for e in eqn.params["jaxpr"].jaxpr.eqns if e.primitive is mark_p and e.params["kind"] == "forward"]
    try:
        schedule: Schedule = catalogue.for_marks(info.schedule, len(marks), num_groups)
    except ValueError as e:
        raise StageError(
            f"treduce at {compat.source_line(eqn)}: schedule is {info.schedule!r}, and {e}\n"
            "  Call mark_stage_end at the end of each stage, or take another schedule."
        ) from None
    return eqn.replace(params={**eqn.params, "info": dataclasses.replace(info, schedule=schedule)})
