"""A line on the terminal while something takes long: how far it is, and about how long it still takes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_S = 2.0
"""What takes less shows nothing."""
_EVERY_S = 0.5
CLEAR = "\r\x1b[K"


@contextlib.contextmanager
def waiting(
    state: Callable[[], tuple[str, float]], stream: Any = None, patience_s: float = PATIENCE_S
) -> Iterator[None]:
    """Shows what `state` says while the block runs, if it takes longer than two seconds; it goes away at the end.

    Nothing is written where standard error is no terminal, such as in logs.

    Args:
        state: What is done, and which share of it, from 0 to 1; 0 if nobody knows. Another thread calls it.
        stream: The terminal; by default standard error.
        patience_s: Seconds until the line appears.
    """
    stream = sys.stderr if stream is None else stream
    if not is_terminal(stream):
        yield
        return
    start, ended = time.monotonic(), threading.Event()

    def show() -> None:
        if ended.wait(patience_s):
            return
        while True:
            text, share = state()
            put(stream, f"{CLEAR}{text}{time_left(time.monotonic() - start, share)}")
            if ended.wait(_EVERY_S):
                break
        put(stream, CLEAR)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def time_left(seconds: float, share: float) -> str:
    """How long it still takes after so many seconds for this share, or how long it has taken; empty below a second.

    Examples:
        >>> time_left(30.0, 0.25), time_left(300.0, 0.5), time_left(12.0, 0.0), time_left(0.1, 0.5)
        (', about 90 s left', ', about 5 min left', ', 12 s so far', '')
    """
    left = seconds * (1 - share) / share if share > 0 else seconds
    if left < 1:
        return ""
    shown = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
    return f", about {shown} left" if share > 0 else f", {shown} so far"


def is_terminal(stream: Any) -> bool:
    """Whether somebody is there to see it."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def put(stream: Any, text: str) -> None:
    """Writes to a terminal, which may be gone."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()
