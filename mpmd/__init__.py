"""Pipeline-parallel training steps for JAX: one step, many programs."""

from mpmd.api import Compiled, Lowered, Traced, device_get, jit
from mpmd.array import MpmdArray
from mpmd.errors import HangError, ReshardError, ScheduleError, StageError
from mpmd.markers import Add, Concat, Max, Mean, Min, mark_stage_end, treduce, treduce_i
from mpmd.mesh import MpmdMesh, MpmdSharding

__all__ = [
    "Add",
    "Compiled",
    "Concat",
    "HangError",
    "Lowered",
    "Max",
    "Mean",
    "Min",
    "MpmdArray",
    "MpmdMesh",
    "MpmdSharding",
    "ReshardError",
    "ScheduleError",
    "StageError",
    "Traced",
    "device_get",
    "jit",
    "mark_stage_end",
    "treduce",
    "treduce_i",
]
