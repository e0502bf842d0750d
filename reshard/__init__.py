"""Moves arrays between any two layouts, no byte too many and never over the memory it was given."""

from mpmd.errors import ReshardError
from reshard.api import (
    last_stats,
    logically_stacked,
    mpmd_to_mpmd_reshard,
    mpmd_to_spmd_reshard,
    spmd_to_mpmd_reshard,
)
from reshard.moving.plan import ReshardPlan, plan
from reshard.moving.progress import Progress, Stats
from reshard.places import HostMemory, describe_mesh

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
