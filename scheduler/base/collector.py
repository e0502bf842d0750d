"""Pauses Python's garbage collector while a plan is made or many small arrays are moved."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pauses Python's garbage collector, which would rescan the many small objects of a plan although they stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
