"""Moves arrays between any two layouts, no byte too many and never over the memory it was given."""

from mpmd.errors import ReshardError
from reshard.api import (
    last_stats,
    logically_stacked,
    mpmd_to_mpmd_reshard,
    mpmd_to_spmd_reshard,
    spmd_to_mpmd_reshard,
)
from reshard.devices import HostMemory, describe_mesh
from reshard.execute import Progress, Stats
from reshard.plan import ReshardPlan, plan

__all__ = [
    "HostMemory",
    "Progress",
    "ReshardError",
    "ReshardPlan",
    "Stats",
    "describe_mesh",
    "last_stats",
    "logically_stacked",
    "mpmd_to_mpmd_reshard",
    "mpmd_to_spmd_reshard",
    "plan",
    "spmd_to_mpmd_reshard",
]
