"""Ends event loops without complaints from storage that is still working on them."""

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
# How long tasks that are left may take to end. Ctrl-C within the loop may have lost the call that would wake one, which
# then never ends.
_LEFT_S = 5.0


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a loop of its own. After an error or Ctrl-C, its tasks are ended before the loop.

    If a loop is running already (in a notebook), the new one runs in another thread.
    """
    if not _is_running():
        return _run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, _run, coroutine).result()


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    finally:
        loop.set_exception_handler(_ignored)  # the coroutine's own error is enough
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=_LEFT_S))
        finally:
            asyncio.set_event_loop(None)
            vars(loop)["call_soon_threadsafe"] = _ignored  # threads of tensorstore call it whenever they are done
            loop.close()


def _ignored(*_: object, **__: object) -> None:
    pass
