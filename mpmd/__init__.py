"""Pipeline-parallel training steps for JAX: one step, many programs."""

from mpmd import _jax_version  # noqa: F401  before all that an older JAX lacks
from mpmd.across import cross_mpmd_all_reduce, cross_mpmd_stack, place
from mpmd.api import jit
from mpmd.array import MpmdArray
from mpmd.distributed import initialize
from mpmd.errors import HangError, ReshardError, ScheduleError, StageError
from mpmd.fetch import device_get
from mpmd.foreign import from_exported, from_stablehlo
from mpmd.markers import mark_stage_end, treduce, treduce_i
from mpmd.mesh import MpmdMesh, MpmdSharding
from mpmd.operations import Add, Concat, Max, Mean, Min, Operation
from mpmd.stages import Compiled, Lowered, Traced

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
    "Operation",
    "ReshardError",
    "ScheduleError",
    "StageError",
    "Traced",
    "cross_mpmd_all_reduce",
    "cross_mpmd_stack",
    "device_get",
    "from_exported",
    "from_stablehlo",
    "initialize",
    "jit",
    "mark_stage_end",
    "place",
    "treduce",
    "treduce_i",
]
