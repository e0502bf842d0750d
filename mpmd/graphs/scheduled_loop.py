"""The parameters of a loop as all passes after `cutting` read them, with a known schedule and known stage ends."""

import dataclasses

from mpmd.ops.loop_primitive import LoopInfo
from scheduler import Schedule
from scheduler.optimize.cuts import Cut


@dataclasses.dataclass(frozen=True, repr=False)
class ScheduledLoop(LoopInfo):
    """The parameters of a loop, with a schedule instead of its name."""

    schedule: Schedule
    choice: Cut | None = dataclasses.field(default=None, compare=False)  # None if nothing was chosen

    @classmethod
    def of(cls, info: LoopInfo, schedule: Schedule) -> "ScheduledLoop":
        """Returns the loop with this schedule."""
        return cls(**{**vars(info), "schedule": schedule})
