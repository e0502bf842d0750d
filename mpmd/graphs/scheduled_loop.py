"""The parameters of a loop as all passes read them: `cutting` knows its schedule, and where its stages end."""

import dataclasses

from mpmd.ops.treduce import LoopInfo
from scheduler import Schedule
from scheduler.optimize.cuts import Cut


@dataclasses.dataclass(frozen=True, repr=False)
class ScheduledLoop(LoopInfo):
    """The parameters of a loop, with a schedule in the place of its name.

    Attributes:
      choice: what the chosen cuts and others cost; None where nothing was chosen.
    """

    schedule: Schedule
    choice: Cut | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def of(cls, info: LoopInfo, schedule: Schedule) -> "ScheduledLoop":
        """The loop with this schedule."""
        return cls(**{**vars(info), "schedule": schedule})
