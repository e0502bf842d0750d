"""Pauses Python's garbage collector while a plan is made or many small arrays are moved."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0  # in all threads; the first one notes whether the collector was enabled, and the last one restores it
_was_enabled = True


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pauses Python's garbage collector, which would rescan the many small objects of a plan although they stay."""
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
