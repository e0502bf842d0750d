"""Pipeline-parallel training steps for JAX: one step, many programs."""

from mpmd import _jax_version  # noqa: F401  before imports that fail with an older JAX
from mpmd.api import jit
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from mpmd.arrays.targets import Target
from mpmd.arrays.topology import topology_mesh
from mpmd.compiled import Compiled
from mpmd.errors import CorruptionError, HangError, ReshardError, ScheduleError, StageError
from mpmd.job.joining import initialize
from mpmd.ops.cross_group import cross_mpmd_all_reduce, cross_mpmd_stack, place
from mpmd.ops.foreign import from_exported, from_stablehlo
from mpmd.ops.lists import Reordered
from mpmd.ops.reductions import Add, Concat, Max, Mean, Min, Operation
from mpmd.ops.role import role
from mpmd.ops.stage_end import mark_layer_end, mark_stage_end
from mpmd.ops.treduce import treduce, treduce_i
from mpmd.resilience.loop import resilient
from mpmd.run.device_get import device_get
from mpmd.stages import Lowered, Traced
from mpmd.tuning.ranked import Tuning
from mpmd.tuning.tune import tune
from scheduler import Adaptive

__all__ = [
    "Adaptive",
    "Add",
    "Compiled",
    "Concat",
    "CorruptionError",
    "HangError",
    "Lowered",
    "Max",
    "Mean",
    "Min",
    "MpmdArray",
    "MpmdMesh",
    "MpmdSharding",
    "Operation",
    "Reordered",
    "ReshardError",
    "ScheduleError",
    "StageError",
    "Target",
    "Traced",
    "Tuning",
    "cross_mpmd_all_reduce",
    "cross_mpmd_stack",
    "device_get",
    "from_exported",
    "from_stablehlo",
    "initialize",
    "jit",
    "mark_layer_end",
    "mark_stage_end",
    "place",
    "resilient",
    "role",
    "topology_mesh",
    "treduce",
    "treduce_i",
    "tune",
]
