"""The flight record of a process that is alone: written where a folder is named and the process ends badly."""

import functools
import os
import sys

from mpmd.job import exits, interrupts
from mpmd.job.activity import Activity
from mpmd.job.black_box import BlackBox
from mpmd.job.verdict import View
from mpmd.observe import flight_files


class Alone:
    """The activity of this process, and its flight record."""

    def __init__(self):
        self.activity = Activity(0)
        self._black_box = BlackBox(0, 1, self.activity, os.environ)
        interrupts.listen(self._note)

    def failed(self, error: Exception) -> str:
        """Writes the record of a step that raised; returns a line that says where."""
        return self._black_box.write(exits.error_text(error), self._views(), 0)

    def _note(self, signal: str) -> None:
        print(self._black_box.interrupted(signal, self._views()), file=sys.stderr, flush=True)

    def _views(self) -> dict[int, View]:
        return {0: View(self.activity.board(), 0.0, "running")}


def alone() -> Alone | None:
    """Returns the record of this process; None where no folder is named."""
    folder = flight_files.folder(os.environ)
    return None if folder is None else _alone(str(folder))


@functools.cache
def _alone(folder: str) -> Alone:
    return Alone()
