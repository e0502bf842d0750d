"""Pipeline-parallel training steps for JAX: one step, many programs."""

from mpmd.errors import HangError, ReshardError, ScheduleError, StageError
from mpmd.markers import Add, Concat, Max, Mean, Min, mark_stage_end, treduce, treduce_i

__all__ = [
    "Add",
    "Concat",
    "HangError",
    "Max",
    "Mean",
    "Min",
    "ReshardError",
    "ScheduleError",
    "StageError",
    "mark_stage_end",
    "treduce",
    "treduce_i",
]
