"""The one error of this package."""

from collections.abc import Sequence


class ScheduleError(ValueError):
    """A schedule or a program is wrong; the message lists the faults that were found.

    Attributes:
        faults: Every fault as a sentence without its full stop, if the message is a list. The message of a long list
            shows only some of them.
    """

    def __init__(self, message: str, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)
