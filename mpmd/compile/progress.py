"""Reports how many programs of a step are compiled, and which one is next, when that takes long."""

import contextlib
import threading
from collections.abc import Iterator
from typing import TextIO

from scheduler.base.waiting import Line


class CompileProgress:
    """A progress line on standard error (or `stream`) after `patience_s`, from `scheduler.base.waiting`."""

    def __init__(self, stream: TextIO | None = None, patience_s: float | None = None):
        self._lock = threading.Lock()
        self._running: dict[str, None] = {}  # in the order in which they began
        self._num_expected = self._num_done = 0
        self._is_closed = False
        self._line = Line(self._state, stream, patience_s)

    def expect(self) -> None:
        """Counts one more program to compile."""
        with self._lock:
            self._num_expected += 1
            if not self._is_closed:
                self._line.begin()

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Marks a program as being compiled inside this context, and as done after it."""
        with self._lock:
            self._running[name] = None
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(name, None)
                self._num_done += 1
            self._end()

    def close(self) -> None:
        """Expects no more programs. The line disappears when the last one is compiled."""
        self._is_closed = True
        self._end()

    def _state(self) -> tuple[str, float]:
        with self._lock:
            now = f", now {next(iter(self._running))}" if self._running else ""
            text = f"mpmd: compiled {self._num_done} of {self._num_expected} programs{now}"
            return text, self._num_done / max(1, self._num_expected)

    def _end(self) -> None:
        if self._is_closed and self._num_done == self._num_expected:
            self._line.end()
