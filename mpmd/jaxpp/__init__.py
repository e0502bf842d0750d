"""JaxPP's public names on top of this library: `import mpmd.jaxpp as jaxpp` instead of `import jaxpp.api as jaxpp`.

The functions only translate arguments for `mpmd.jit`, `mpmd.treduce`, `reshard` and `scheduler`, and return the results
of these.
"""

from mpmd.jaxpp.places import JaxppMesh as MpmdMesh
from mpmd.jaxpp.places import (
    MpmdArray,
    MpmdSharding,
    add_multi_p,
    cross_mpmd_all_reduce,
    cross_mpmd_stack,
    gather_multi_p,
    logically_stacked,
    mpmd_to_mpmd_reshard,
    mpmd_to_spmd_reshard,
    place_with,
    spmd_to_mpmd_reshard,
)
from mpmd.jaxpp.places import to_global_jax_array as _to_global_jax_array  # noqa: F401  a name of JaxPP's, too
from mpmd.jaxpp.schedules import (
    BaseSchedule,
    DualPipeV,
    Eager1F1B,
    FusedTask,
    GPipe,
    Interleaved1F1B,
    InterleavedGPipe,
    InterleavedZeroBubble,
    KimiK2,
    Std1F1B,
    Task,
    TaskType,
    ZeroBubble,
)
from mpmd.jaxpp.steps import (  # noqa: F401  some raise with advice on what to write instead
    ArrayRef,
    LoopOutput,
    RemoteMpmdMesh,
    accumulate_grads,
    collect_task_times_ms,
    default_op,
    mpmd_jit_by_yield,
    mpmd_jit_rev,
    mpmd_jit_with_loop,
    pipeline_enter_stage,
    pipelined,
    run_replicated_dced,
    treduce,
    treduce_i,
)
from mpmd.ops.reductions import Add, Concat, Max
from mpmd.ops.stage_end import mark_stage_end

__all__ = [
    "Add",
    "BaseSchedule",
    "Concat",
    "DualPipeV",
    "Eager1F1B",
    "FusedTask",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedGPipe",
    "InterleavedZeroBubble",
    "KimiK2",
    "Max",
    "MpmdArray",
    "MpmdMesh",
    "MpmdSharding",
    "Std1F1B",
    "Task",
    "TaskType",
    "ZeroBubble",
    "add_multi_p",
    "collect_task_times_ms",
    "cross_mpmd_all_reduce",
    "cross_mpmd_stack",
    "default_op",
    "gather_multi_p",
    "logically_stacked",
    "mark_stage_end",
    "mpmd_jit_by_yield",
    "mpmd_jit_rev",
    "mpmd_jit_with_loop",
    "mpmd_to_mpmd_reshard",
    "mpmd_to_spmd_reshard",
    "pipeline_enter_stage",
    "place_with",
    "spmd_to_mpmd_reshard",
    "treduce",
    "treduce_i",
]
