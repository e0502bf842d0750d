"""A status line for work that takes long: the progress, and about how long the work still takes."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

_PATIENCE_S, _EVERY_S = 2.0, 0.5
_LOGGED_EVERY_S = 10.0
CLEAR = "\r\x1b[K"
# The names that the launcher, Slurm, Open MPI and Kubernetes have for the number of a process in its job.
_RANKS = ("MPMD_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")

# One line at a time: if one work is inside another, the line of the outer one.
_LINE = threading.Lock()


class Line:
    """Shows the text of `state` in a line, from `begin` to `end`, once the work has taken a while.

    On a terminal the line appears after two seconds, is renewed twice a second, and disappears at the end. Elsewhere,
    as in a log, a line is written every ten seconds. In a job, only the first process writes to a log.

    Args:
        state: Returns the text, and the share that is done, from 0 to 1 (0 if unknown). Another thread calls it.
        stream: Where the line goes; by default standard error.
    """

    def __init__(
        self, state: Callable[[], tuple[str, float]], stream: TextIO | None = None, patience_s: float | None = None
    ) -> None:
        self._state = state
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = _is_terminal(self._stream)
        default_s, self._every_s = (_PATIENCE_S, _EVERY_S) if self._is_terminal else (_LOGGED_EVERY_S,) * 2
        self._patience_s = default_s if patience_s is None else patience_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts to wait for the first line. A second call does nothing."""
        if self._thread is None and (self._is_terminal or _is_first_rank()):
            self._thread = threading.Thread(target=self._show, args=(time.monotonic(),), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Removes the line: the work is done."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _show(self, start: float) -> None:
        if self._ended.wait(self._patience_s):
            return
        while not _LINE.acquire(blocking=False):
            if self._ended.wait(self._every_s):
                return
        try:
            while True:
                text, share = self._state()
                text += time_left(time.monotonic() - start, share)
                self._put(f"{CLEAR}{text}" if self._is_terminal else f"{text}\n")
                if self._ended.wait(self._every_s):
                    break
            if self._is_terminal:
                self._put(CLEAR)
        finally:
            _LINE.release()

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def waiting(
    state: Callable[[], tuple[str, float]], stream: TextIO | None = None, patience_s: float | None = None
) -> Iterator[None]:
    """Shows a `Line` while the block runs."""
    line = Line(state, stream, patience_s)
    line.begin()
    try:
        yield
    finally:
        line.end()


def time_left(seconds: float, share: float) -> str:
    """Returns the time left, after so many seconds for this share, or the time so far; empty below a second.

    Examples:
        >>> time_left(30.0, 0.25), time_left(300.0, 0.5), time_left(12.0, 0.0), time_left(0.1, 0.5)
        (', about 90 s left', ', about 5 min left', ', 12 s so far', '')
    """
    left = seconds * (1 - share) / share if share > 0 else seconds
    if left < 1:
        return ""
    shown = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
    return f", about {shown} left" if share > 0 else f", {shown} so far"


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def _is_first_rank() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)
