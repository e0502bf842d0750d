"""Shows on a terminal how many programs of a step are compiled, and which one is next, when that takes long."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from scheduler.waiting import CLEAR, PATIENCE_S, is_terminal, put, time_left


class Progress:
    """One line on standard error, if that is a terminal; nothing for what takes less than two seconds.

    Args:
      stream: the terminal.
      patience_s: seconds until the line appears.
    """

    def __init__(self, stream: Any = None, patience_s: float = PATIENCE_S):
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._running: dict[str, None] = {}  # in the order in which they were begun
        self._num_expected = self._num_done = 0
        self._is_closed = self._is_shown = False
        self._timer: threading.Timer | None = None
        self._patience_s = patience_s
        self._begun = time.monotonic()

    def expect(self) -> None:
        """One more program will be compiled."""
        with self._lock:
            self._num_expected += 1
            if self._num_expected == 1:
                self._begun = time.monotonic()
            if self._timer is None and not self._is_closed and is_terminal(self._stream):
                self._timer = threading.Timer(self._patience_s, self._appear)
                self._timer.daemon = True
                self._timer.start()

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Around the compilation of a program."""
        with self._lock:
            self._running[name] = None
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(name, None)
                self._num_done += 1
                self._write()
                self._end()

    def close(self) -> None:
        """No more programs are expected. The line goes away when the last one is there."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _appear(self) -> None:
        with self._lock:
            self._is_shown = not self._is_closed or self._num_done < self._num_expected
            self._write()

    def _write(self) -> None:
        if self._is_shown:
            now = f": {next(iter(self._running))}" if self._running else ""
            left = time_left(time.monotonic() - self._begun, self._num_done / self._num_expected)
            text = f"mpmd: compiled {self._num_done} of {self._num_expected} programs{left}{now}"
            put(self._stream, f"{CLEAR}{text}")

    def _end(self) -> None:
        if self._is_closed and self._num_done == self._num_expected:
            if self._timer is not None:
                self._timer.cancel()
            if self._is_shown:
                self._is_shown = False
                put(self._stream, CLEAR)
