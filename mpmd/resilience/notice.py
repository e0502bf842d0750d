"""The notice that this process has to end: SIGTERM, while its state is kept."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping

from mpmd.job import interrupts


class Notice:
    """The notice of a SIGTERM that lets this process finish its step.

    The launcher makes a file when it ends ranks without delay.
    """

    def __init__(self, environment: Mapping[str, str]):
        folder = environment.get("MPMD_STATUS_DIR")
        self._stopping = None if folder is None else pathlib.Path(folder, "stopping")
        self.came = False

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Lets SIGTERM only set `came` while the context lasts. A SIGTERM of the launcher ends the process as ever."""
        with interrupts.listening(self._note):
            yield

    def _note(self, signal: str) -> bool:
        if signal != "SIGTERM" or (self._stopping is not None and os.path.exists(self._stopping)):
            return False
        self.came = True
        return True
