"""Moves arrays between any two layouts, no byte too many and never over the memory it was given."""

from reshard.devices import HostMemory, describe_mesh
from reshard.plan import ReshardPlan, plan

__all__ = ["HostMemory", "ReshardPlan", "describe_mesh", "plan"]
