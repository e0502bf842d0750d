"""Replaces the name of a schedule by the schedule, with the number of stages from the mesh and the marks."""

from mpmd import _jax_compat as compat
from mpmd.cutting.candidates import Candidates
from mpmd.errors import StageError
from mpmd.ops.treduce import LoopInfo
from scheduler import Schedule
from scheduler.schedules import catalogue


def schedule_of(eqn: compat.JaxprEqn, candidates: Candidates, num_groups: int) -> Schedule:
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
