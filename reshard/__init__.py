"""Moves arrays between any two layouts, no byte too many and never over the memory it was given."""

from typing import TYPE_CHECKING, Any

from mpmd.errors import ReshardError
from reshard.api import last_stats, logically_stacked, mpmd_to_mpmd_reshard, mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
from reshard.moving.plan import ReshardPlan, plan
from reshard.moving.progress import Progress, Stats
from reshard.places import HostMemory, describe_mesh
from reshard.streams.publishing import publish, subscribe
from reshard.streams.receiving import Subscription
from reshard.streams.stream import Stream, stream

if TYPE_CHECKING:
    from reshard.checkpoint import restore, save

__all__ = [
    "HostMemory",
    "Progress",
    "ReshardError",
    "ReshardPlan",
    "Stats",
    "Stream",
    "Subscription",
    "describe_mesh",
    "last_stats",
    "logically_stacked",
    "mpmd_to_mpmd_reshard",
    "mpmd_to_spmd_reshard",
    "plan",
    "publish",
    "restore",
    "save",
    "spmd_to_mpmd_reshard",
    "stream",
    "subscribe",
]


def __getattr__(name: str) -> Any:
    """Returns `save` or `restore`. Orbax, which they need, is imported at their first use."""
    if name in ("restore", "save"):
        from reshard import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
