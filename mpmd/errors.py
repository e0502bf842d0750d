"""The errors that users see. Each says what is wrong, where, and what to do about it."""

from scheduler.errors import ScheduleError


class StageError(ValueError):
    """A step cannot be cut into pipeline stages as it is written."""


class ReshardError(ValueError):
    """Arrays cannot be moved to the requested layout; nothing was moved."""


class HangError(RuntimeError):
    """Another process died, stopped, or waits for something that will not come."""


class RankLostError(HangError):
    """A process was lost, and a spare replaces it: `mpmd.resilient` continues from the last state that is kept."""


class CorruptionError(RuntimeError):
    """A device computed other bits than others from the same values: the device, its memory or a link is faulty."""


__all__ = ["CorruptionError", "HangError", "ReshardError", "ScheduleError", "StageError"]
