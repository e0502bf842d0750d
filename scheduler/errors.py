"""The one error of this package."""


class ScheduleError(ValueError):
    """A schedule or a program is wrong; the message lists every fault that was found."""
