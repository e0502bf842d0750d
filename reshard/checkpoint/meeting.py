"""Barriers of the processes of a save: the waiting ends in all of them as soon as one cannot save.

A process that fails writes its error to the key-value store of `jax.distributed` and leaves. The others find the
error at their next wait, raise the same one, and leave too. Each call (a save, say) has a number, which every process
counts alike. An error of one call is never read in another, so the next save starts afresh.
"""

import contextlib
import errno
import itertools
import json
import sys
import threading
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import RankLostError, ReshardError
from mpmd.job import joining
from mpmd.job.disagreement import other_ways
from mpmd.job.key_wait import KeyWait
from mpmd.observe import ledger

# The interval at which a waiting process looks for a failure of another one.
_SLICE_S = 0.5
_MAX_SHOWN = 5
# Entries of a call, or a place, are deleted so many calls or places later: threads may still run for an older call.
_NUM_REMEMBERED = 64
_MARK = "_mpmd_said"
# The calls that these ranks have made together since a rank was last lost; a replacement process has made none.
_numbers: defaultdict[tuple[int, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)
_lock = threading.Lock()


class SharedCall:
    """One call that all of `ranks` make together, and the threads that continue it after it has returned.

    It gets its number when it first waits for the others, or fails: a call that does neither is not counted.
    """

    def __init__(self, what: str, ranks: tuple[int, ...]):
        self.what, self.ranks = what, ranks
        self.about: dict[str, str] = {}  # equal in all processes, in words by name: `{"step": "as 7"}`; may grow
        self.place_read = ""  # this process's path, which may differ elsewhere; shown where something else differs
        self._compared: dict[str, str] = {}
        self._folder, self._epoch = "", 0
        self._before = ""  # the folder of a call that is long over
        self._places: deque[str] = deque(maxlen=_NUM_REMEMBERED + 1)
        self._counts: Counter[str] = Counter()

    @property
    def folder(self) -> str:
        """The folder of this call in the key-value store, the same in all processes."""
        with _lock:
            if not self._folder:
                epoch = self._epoch = joining.epoch()
                number = next(_numbers[epoch, self.ranks])
                among = f"{zlib.crc32(repr(self.ranks).encode()):08x}{f'.{epoch}' if epoch else ''}"
                self._folder = f"reshard/call/{among}/{number}"
                self._before = f"reshard/call/{among}/{number - _NUM_REMEMBERED}" if number >= _NUM_REMEMBERED else ""
            return self._folder

    def place(self, key: str) -> str:
        """Returns the place where processes meet under this key; they may meet several times under one key."""
        folder = self.folder
        with _lock:
            self._counts[key] += 1
            self._places.append(f"{folder}/{key}/{self._counts[key]}")
            return self._places[-1]

    def forget(self) -> None:
        """Deletes old entries: all processes have come to the last place, so nobody reads what is long over."""
        with _lock:
            before = [self._before, self._places[0] if len(self._places) > _NUM_REMEMBERED else ""]
            self._before = ""
        for folder in filter(None, before):
            store().key_value_delete(f"{folder}/")

    def check(self) -> None:
        """Raises a RankLostError if a rank was lost since the call began."""
        joining.check()
        if self._folder and joining.epoch() != self._epoch:
            raise RankLostError(f"mpmd: a rank was lost during the {self.what}")

    def publish(self) -> None:
        """Publishes the properties of this process's call."""
        if self.about != self._compared:
            place = f"{self.folder}/about/{jax.process_index()}"
            store().key_value_set(place, json.dumps([self.about, self.place_read]), allow_overwrite=True)

    def compare(self) -> None:
        """Compares the properties of this call with the published ones. Raises a ReshardError if they differ."""
        mine = dict(self.about)
        if mine == self._compared:
            return
        read = store().key_value_dir_get(f"{self.folder}/about/")
        said = {int(key.rpartition("/")[2]): json.loads(text) for key, text in read}
        names = set(mine).intersection(*(about for about, _ in said.values()))
        if found := other_ways(
            {r: {name: about[name] for name in mine if name in names} for r, (about, _) in said.items()}
        ):
            lines = [line for _, line in found[:_MAX_SHOWN]]
            lines += [f"rank {rank} reads {place}" for rank, (_, place) in sorted(said.items())[:_MAX_SHOWN] if place]
            text = "\n  ".join(lines)
            raise ReshardError(f"{self.what}: the processes do not {self.what} the same: {text}")
        if len(said) == len(self.ranks) and len(names) == len(mine):
            self._compared = mine


class Meetings:
    """The meetings of this process with the others; every process comes to the same ones in the same order."""

    def __init__(self):
        # Not thread-local: tasks of an event loop, and the threads that they use, are in the call that began them.
        self._here: ContextVar[tuple[SharedCall | None, bool]] = ContextVar("meetings", default=(None, False))
        self._handled: ContextVar[BaseException | None] = ContextVar("handled", default=None)

    @property
    def call(self) -> SharedCall | None:
        """The call that this thread or task is in."""
        return self._here.get()[0]

    @property
    def is_behind(self) -> bool:
        """Whether this thread or task continues a call that has returned."""
        return self._here.get()[1]

    @property
    def handled(self) -> BaseException | None:
        """The error that the caller handled when the call began: no error of the call, although it is their context."""
        return self._handled.get()

    @contextlib.contextmanager
    def together(
        self, what: str, ranks: set[int] | None = None, about: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[None]:
        """Wraps a call of all `ranks`: an error in one is raised where the others wait. A nested call is part of it."""
        with contextlib.ExitStack() as ending:
            ending.callback(self._handled.reset, self._handled.set(sys.exc_info()[1]))
            ending.enter_context(ledger.during(ledger.CHECKPOINT))
            if self.call is not None or jax.process_count() == 1:
                yield
                return
            if what == "save":
                joining.needs_all()
            elif joining.is_apart():  # the other processes have done it before
                yield
                return
            call = SharedCall(what, _in_order(ranks))
            before = self._here.set((call, False))
            try:
                call.about |= about
                yield
            except Exception as error:
                self.tell(error)
                raise
            finally:
                self._here.reset(before)

    @contextlib.contextmanager
    def behind(self, call: SharedCall | None) -> Iterator[None]:
        """Wraps the work of a thread or task after `call` has returned.

        An error in this work is reported to threads of this kind only. Every caller sees it when it waits for them or
        makes its next call: all callers at that point, and none in the middle of work that the others continue.
        """
        before = self._here.set((call, call is not None))
        try:
            yield
        finally:
            self._here.reset(before)

    def meet(self, key: str, timeout_ms: int, ranks: set[int] | None = None) -> None:
        """Waits for all of `ranks`: returns in all of them, or in none.

        Raises:
            OSError: one of them cannot save; the error that it passed to `tell`.
            ReshardError: the processes do not save or restore the same tree.
            ScheduleError: the others have called something else.
            TimeoutError: a process has not come in time; the others raise it too.
        """
        if joining.is_apart():
            return
        call, num = self.call, len(_in_order(ranks))
        if call is None or call.ranks != _in_order(ranks):
            call = _outside.setdefault((joining.epoch(), _in_order(ranks)), SharedCall("barrier", _in_order(ranks)))
        place, end = call.place(key), time.monotonic() + timeout_ms / 1000
        self._raise_if_told(call)
        call.publish()
        if store().key_value_increment(f"{place}/come", 1) == num:
            store().key_value_set(f"{place}/all", "")
            call.forget()
            call.compare()
            return
        wait = KeyWait(store(), min(_SLICE_S, timeout_ms / 1000))
        while True:
            if wait.value(f"{place}/all") is not None:
                call.compare()
                return
            try:
                self._raise_if_told(call)
                call.compare()
                call.check()
                if time.monotonic() > end:
                    late = TimeoutError(f"only {_get(f'{place}/come')} of {num} processes have come")
                    self.tell(late)
                    raise late
            except Exception:
                if _get(f"{place}/all") is not None:  # all have come meanwhile, and the others continue
                    return
                raise

    def find(self, key: str, timeout_s: int) -> str:
        """Waits for a text that another process writes once under a key of the store.

        Raises:
            OSError: the other process cannot save; the error that it passed to `tell`.
            RankLostError: a process was lost, perhaps that one.
            TimeoutError: the text does not come in time.
        """
        end, wait = time.monotonic() + timeout_s, KeyWait(store(), _SLICE_S)
        while (said := wait.value(key)) is None:
            joining.check()
            if self.call is not None:
                self._raise_if_told(self.call)
            if time.monotonic() > end:
                raise TimeoutError(f"save: another process has not said {key} after {timeout_s} s")
        return said

    def tell(self, error: BaseException) -> None:
        """Makes the others raise this error where they wait in this call, unless it came from another process."""
        if self.call is not None and heard(error) is None:
            _set(f"{self.call.folder}/failed/{int(self.is_behind)}", said_of(error, self.call.what))

    def _raise_if_told(self, call: SharedCall) -> None:
        for is_behind in range(1 + self.is_behind):
            if (said := _get(f"{call.folder}/failed/{is_behind}")) is not None:
                raise as_told(said)


# The calls for Orbax's waits that are in none of the calls known here.
_outside: dict[tuple[int, tuple[int, ...]], SharedCall] = {}


def _in_order(ranks: set[int] | None) -> tuple[int, ...]:
    return tuple(sorted(ranks or range(jax.process_count())))


def store() -> compat.KeyValueStore:
    """Returns the key-value store of `jax.distributed`."""
    found = compat.distributed_client()
    assert found is not None
    return found


def _get(key: str) -> str | None:
    try:
        return store().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def _set(key: str, text: str) -> None:
    try:
        store().key_value_set(key, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):  # otherwise another process has failed before, and its error is reported
            raise


def said_of(error: BaseException, what: str = "save") -> str:
    """Returns an error as text, for other threads and processes."""
    if (found := heard(error)) is not None:
        return getattr(found, _MARK)
    said = {"rank": jax.process_index(), "what": what, "kind": type(error).__name__, "text": str(error)}
    if isinstance(error, OSError) and error.errno is not None:
        said |= {"code": error.errno, "text": error.strerror, "path": error.filename}
    return json.dumps(said)


def as_told(text: str) -> Exception:
    """Returns the error that `said_of` wrote as text."""
    said = json.loads(text)
    is_own = said["rank"] == jax.process_index()
    told = said["text"] if is_own else f"{said['text']} (so process {said['rank']} says)"
    error: Exception
    if "code" in said:
        error = OSError(said["code"], told, said["path"])
    elif said["kind"] == "TimeoutError":
        error = TimeoutError(told)
    elif said["kind"] == "ReshardError":
        error = ReshardError(told)
    else:
        error = OSError(errno.EIO, f"{said['what']}: {said['kind']}: {told}")
    if not is_own:
        setattr(error, _MARK, text)
    return error


def heard(error: BaseException | None) -> BaseException | None:
    """Returns the error of another process that caused this error, if there is one."""
    # Not by `__context__`: for a second save in an `except` block, it is the error of the first save.
    while error is not None and not hasattr(error, _MARK):
        error = error.__cause__
    return error


meetings = Meetings()
