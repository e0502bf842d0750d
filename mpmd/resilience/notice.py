"""Notice that this process shall end: SIGTERM, while a state is kept."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping

from mpmd.job import interrupts


class Notice:
    """Whether this process has been told to end, by somebody who lets it finish its step.

    Args:
      environment: that of the process. The launcher leaves a file where it ends ranks that have nothing to finish.
    """

    def __init__(self, environment: Mapping[str, str]):
        folder = environment.get("MPMD_STATUS_DIR")
        self._stopping = None if folder is None else pathlib.Path(folder, "stopping")
        self.came = False

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """While it lasts, SIGTERM sets `came` and does nothing else; from the launcher it ends the process as ever."""
        with interrupts.listening(self._note):
            yield

    def _note(self, signal: str) -> bool:
        if signal != "SIGTERM" or (self._stopping is not None and os.path.exists(self._stopping)):
            return False
        self.came = True
        return True
