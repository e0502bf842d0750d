"""Where the processes of a save wait for each other; the waiting ends in all of them as soon as one cannot save.

A process that fails tells the others through the key-value store of `jax.distributed` and leaves. The others find it
where they wait next, raise the same error, and leave too. Failures are numbered, so that what each process raises once
is over for all, and the next save begins anew.
"""

import errno
import functools
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import ReshardError
from reshard._orbax_compat import multihost

# Those who wait look this often whether somebody has failed.
_SLICE_MS = 500
_TOLD, _HEARD = "told", "heard"
_MARK = "_mpmd_failure"


class Meetings:
    """The meetings of this process with the others; every process comes to the same ones in the same order."""

    def __init__(self):
        self._num_failures = 0
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def meet(self, key: str, num: int, timeout_ms: int) -> None:
        """Returns when `num` processes have come.

        Raises:
            OSError: one of them cannot save; as `tell` was told.
            TimeoutError: one has not come in time; the others are told so.
        """
        with self._lock:
            self._counts[key] += 1
            folder = f"reshard/meeting/{self._num_failures}/{key}/{self._counts[key]}"
        store, end = compat.distributed_client(), time.monotonic() + timeout_ms / 1000
        assert store is not None
        self.raise_if_told()
        if store.key_value_increment(f"{folder}/come", 1) == num:
            store.key_value_set(f"{folder}/all", "")
            return
        while True:
            left_ms = max(1, round(1000 * (end - time.monotonic())))
            try:
                store.blocking_key_value_get(f"{folder}/all", min(_SLICE_MS, left_ms))
                return
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE" not in str(error):
                    raise
            self.raise_if_told()
            if time.monotonic() > end:
                come = store.key_value_try_get(f"{folder}/come")
                late = TimeoutError(f"only {come} of {num} processes have come")
                self.tell(late)
                raise late

    def tell(self, error: BaseException) -> None:
        """Makes the others raise this error of a save, where they wait for this process; nothing if they know it."""
        if jax.process_count() == 1 or _marked(error) is not None:
            return
        setattr(error, _MARK, _TOLD)
        store = compat.distributed_client()
        assert store is not None
        with self._lock:
            number, self._num_failures = self._num_failures, self._num_failures + 1
            self._counts.clear()
        said = {"rank": jax.process_index(), "kind": type(error).__name__, "text": str(error)}
        if isinstance(error, OSError) and error.errno is not None:
            said |= {"code": error.errno, "text": error.strerror, "path": error.filename}
        try:
            store.key_value_set(_told(number), json.dumps(said))
        except jax.errors.JaxRuntimeError as e:
            if "ALREADY_EXISTS" not in str(e):  # another has failed before, which is told then
                raise

    def raise_if_told(self) -> None:
        """Raises what another process has told."""
        with self._lock:
            number = self._num_failures
        store = compat.distributed_client()
        assert store is not None
        try:
            said = json.loads(store.key_value_try_get(_told(number)))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return
        with self._lock:
            if self._num_failures == number:  # else another thread has raised it
                self._num_failures, _ = number + 1, self._counts.clear()
        raise _as_told(said)


def _told(number: int) -> str:
    return f"reshard/failure/{number}"


def _as_told(said: dict[str, Any]) -> Exception:
    text = f"{said['text']} (so process {said['rank']} says)"
    error: Exception
    if "code" in said:
        error = OSError(said["code"], text, said["path"])
    elif said["kind"] == "TimeoutError":
        error = TimeoutError(text)
    elif said["kind"] == "ReshardError":
        error = ReshardError(text)
    else:
        error = OSError(errno.EIO, f"save: {said['kind']}: {text}")
    setattr(error, _MARK, _HEARD)
    return error


def heard(error: BaseException) -> BaseException | None:
    """The error of another process that this one was told, if that is the cause."""
    found = _marked(error)
    return found if found is not None and getattr(found, _MARK) == _HEARD else None


def _marked(error: BaseException | None) -> BaseException | None:
    # Not by `__context__`: that of a second save in an `except` is the error of the first one.
    while error is not None and not hasattr(error, _MARK):
        error = error.__cause__
    return error


meetings = Meetings()


def end_orbaxs_barriers_too() -> None:
    """Makes Orbax wait in these meetings instead of at barriers of `jax.distributed`, which nothing can end early."""
    if not (hasattr(multihost, "get_barrier_sync_fn") and hasattr(multihost, "should_skip_process_sync")):
        return  # another release: the others wait until Orbax's time limit
    plain = multihost.get_barrier_sync_fn

    @functools.wraps(plain)
    def get_barrier_sync_fn(*, processes: set[int] | None = None) -> Callable[..., None]:
        barrier = plain(processes=processes)  # checks `processes`
        if multihost.should_skip_process_sync(processes):
            return barrier
        ranks = sorted(processes or range(jax.process_count()))

        def meet(*, key: str, timeout_ms: int) -> None:
            meetings.meet(f"{zlib.crc32(repr(ranks).encode()):08x}/{key}", len(ranks), timeout_ms)

        return meet

    multihost.get_barrier_sync_fn = get_barrier_sync_fn
