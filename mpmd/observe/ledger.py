"""The ledger of a process: where its seconds go, written while it runs, in lines for people.

The main thread notes begins and ends; another thread waits for the results of each call and adds up the times. Time in
which the devices have a call to do belongs to that call, whatever the host does meanwhile. Other time belongs to the
activity of the host. Each second is counted once, so the parts add up to the life of the process.
"""

import atexit
import contextlib
import datetime
import functools
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from mpmd.observe import pace, rank_files

# The environment variable for the folder; the launcher sets it to the folder of --log-dir.
VARIABLE = "MPMD_LEDGER_DIR"
ENDING = "ledger"
COMPUTE, BUBBLE, TRANSFERS, HOST = "compute", "bubble", "transfers", "data and host"
UNDIVIDED = "not divided"  # of calls that were not measured
COMPILING, CHECKPOINT, LOST, RECOVERY = "compiling", "checkpoint", "lost", "recovery"
IDLE, STARTING, OTHER = "idle spare", "starting", "other"
DIVIDED = (COMPUTE, BUBBLE, TRANSFERS, HOST)
IN_STEPS = (*DIVIDED, UNDIVIDED)
PARTS = (*IN_STEPS, COMPILING, CHECKPOINT, LOST, RECOVERY, IDLE, STARTING, OTHER)
# Prefixes of lines about the loop of `mpmd.resilient`, about a spare, and about the end.
LOOP, TAKES, ENDED = "loop: ", "takes the place of rank ", "ended: "
AT_END = "the program is at its end"
_LINE_S = 1.0  # from one line to the next, at first; a long run writes fewer lines: in a month some 30 MB
_LINES_AT_FIRST = 600
_LONG_S = 10.0  # a longer activity gets a line before its end
_END_S = 10.0  # limit for the last call, at the end of the program


class _Stretch(NamedTuple):
    """A stretch of work other than a call in the main thread. `before`: the part of the time up to `begin`."""

    part: str
    begin: float
    end: float
    before: str


class _NotedCall(NamedTuple):
    """A call of a step."""

    part: str  # the part of the whole call; empty if the call is to be divided
    begin: float
    waits: Sequence[Any]  # arrays that are ready when the devices have done the call
    divide: Callable[[float, float], Mapping[str, float]] | None  # begin and end to seconds by part; None: not measured
    shares: dict[str, float]  # the share of each part in this program's calls; `divide` updates them
    step: int | None  # the step of the loop; None outside of a loop
    before: str


class Ledger:
    """The ledger of this process.

    Args:
      path: the file. A file of an earlier job is replaced.
      attempt: the attempt of the job. In later attempts, the time before the second call of a program is recovery.
    """

    def __init__(self, path: Path, number: int, attempt: int = 0, age_s: float = 0.0):
        self.step: int | None = None  # the step of the loop that the next calls belong to; None outside of a loop
        now = time.perf_counter()
        self._clock = time.time() - now
        self._begun = self._at = now - age_s  # the sums include all time before `_at`
        self._gap = STARTING  # the part of time between noted stretches
        self._is_recovering = attempt > 0
        self._open: tuple[str, float] | None = None  # the current part of the main thread; "" is a call
        self._sums: defaultdict[str, float] = defaultdict(float)  # not written yet
        self._steps: list[int] = []
        self._texts: list[str] = []  # of events, not written yet
        self._num_calls, self._num_waited = 0, 0
        self._num_pending, self._written_at = 0, now
        self._lock = threading.RLock()
        self._pid = os.getpid()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self._file = path.open("ab", buffering=0)  # at its end also after somebody else has cut it off
        who = f"process {number} went, attempt {attempt}, on {socket.gethostname()}"
        begun = _clock_text(self._clock + self._at)
        self._file.write(f"# jax-mpmd: where the seconds of {who}; begun {begun}\n".encode())
        self._queue: SimpleQueue[_Stretch | _NotedCall | tuple[str, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mpmd-ledger", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    # --- the main thread --------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Marks a stretch of work other than a call. Inside another stretch or in another thread it has no effect."""
        if self._open is not None or threading.current_thread() is not threading.main_thread():
            yield
            return
        begin, before = time.perf_counter(), self._before()
        part = RECOVERY if self._is_recovering and part != IDLE else part
        self._open = part, begin
        try:
            yield
        finally:
            self._open = None
            self._queue.put(_Stretch(part, begin, time.perf_counter(), before))

    def begin_call(self) -> float:
        """Begins a call; returns the time."""
        begin = time.perf_counter()
        self._open = "", begin
        return begin

    def end_call(
        self,
        begin: float,
        waits: Sequence[Any],
        shares: dict[str, float],
        *,
        part: str = "",
        divide: Callable[[float, float], Mapping[str, float]] | None = None,
    ) -> None:
        """Notes that a call is fully dispatched, or (`LOST`) has failed. The arguments are fields of `_NotedCall`."""
        before = self._before()
        if not part:
            self._is_recovering, self._gap = False, HOST
        elif part == LOST:
            self._is_recovering = True
        elif self._is_recovering:
            part = RECOVERY
        self._num_pending += 1
        self._queue.put(_NotedCall(part, begin, waits, divide, shares, self.step, before))
        self._open = None

    def event(self, text: str, *, is_recovering: bool = False) -> None:
        """Writes a line about an event."""
        self._queue.put(_Stretch(self._before(), now := time.perf_counter(), now, self._before()))
        self._queue.put((text, now))
        self._is_recovering |= is_recovering

    def leave_loop(self) -> None:
        """Notes that the loop is over."""
        self.event(LOOP + "is over")
        self.step, self._gap = None, OTHER

    def close(self, why: str) -> None:
        """Writes the last line: the process ends now, perhaps by force. The time of an unfinished call is lost."""
        with self._lock:
            if self._file.closed or os.getpid() != self._pid:
                return
            open_, now = self._open, time.perf_counter()
            is_in_call = self._num_pending > self._num_waited or (open_ is not None and not open_[0])
            self._add(LOST if is_in_call else open_[0] if open_ else self._before(), now)
            self._write(ENDED + why)
            with contextlib.suppress(OSError):
                self._file.close()

    def _before(self) -> str:
        return RECOVERY if self._is_recovering else self._gap

    def _finish(self) -> None:
        if os.getpid() == self._pid:
            self._queue.put(None)
            self._thread.join(_END_S)
            self.close(AT_END)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_LINE_S)
            except Empty:
                self._look()
                continue
            if item is None:
                return
            if isinstance(item, _NotedCall):
                self._wait(item)
            with self._lock:
                if isinstance(item, _Stretch):
                    self._add(item.before, item.begin)
                    self._add(item.part, item.end)
                elif not isinstance(item, _NotedCall):
                    self._write(item[0])
                if (now := time.perf_counter()) - self._written_at > self._line_s(now):
                    self._write()
            del item  # keeps no array alive during the wait

    def _wait(self, call: _NotedCall) -> None:
        part = call.part
        try:
            for x in call.waits:
                x.block_until_ready()
        except Exception:  # the reader of the result gets the error
            part = part if part == RECOVERY else LOST
            self._is_recovering = True
        end = time.perf_counter()
        with self._lock:
            self._num_waited += 1
            self._add(call.before, call.begin)
            begin = self._at
            if call.divide is not None and not part:
                with contextlib.suppress(Exception):  # then the shares stay as they were
                    seconds = call.divide(begin, end)
                    call.shares.update({name: s / sum(seconds.values()) for name, s in seconds.items()})
            if part:
                self._add(part, end)
                return
            shares, seconds = call.shares or {UNDIVIDED: 1.0}, max(0.0, end - begin)
            for name, share in shares.items():
                self._sums[name] += share * seconds
            self._at = max(self._at, end)
            self._num_calls += 1
            if call.step is not None:
                self._steps.append(call.step)

    def _line_s(self, now: float) -> float:
        """Returns the seconds from one line to the next: a share of the process's life, within bounds."""
        return min(_LONG_S, max(_LINE_S, (now - self._begun) / _LINES_AT_FIRST))

    def _look(self) -> None:
        """Writes the sums when nothing has ended for a while; adds a long activity before its end."""
        with self._lock:
            open_, now = self._open, time.perf_counter()
            if now - self._at > _LONG_S and (open_ is None or open_[0]):
                if open_ is not None:
                    self._add(self._before(), open_[1])
                self._add(open_[0] if open_ else self._before(), now)
            if now - self._written_at > self._line_s(now):
                self._write()

    # --- sums and lines ---------------------------------------------------------------------------

    def _add(self, part: str, until: float) -> None:
        """Adds the time up to `until` that is not counted yet."""
        if until > self._at:
            self._sums[part] += until - self._at
            self._at = until

    def _write(self, text: str = "") -> None:
        """Writes the sums, and the text of an event. What a full disk does not take is written with the next ones."""
        self._texts += [text] if text else []
        if not (self._texts or self._sums) or self._file.closed or os.getpid() != self._pid:
            return
        self._written_at = time.perf_counter()
        for line in self._texts or [""]:
            if not self._write_line(line):
                break
            self._texts = self._texts[1:]

    def _write_line(self, text: str) -> bool:
        """Writes a line with the sums; returns False if it cannot be written."""
        what = []
        if self._steps:
            first, last = min(self._steps), max(self._steps)
            what.append(f"steps {first} to {last}" if last > first else f"step {first}")
        if self._num_calls:
            what.append(f"{self._num_calls} call{'s' * (self._num_calls > 1)}")
        parts = ", ".join(f"{name} {self._sums[name]:.4f}" for name in PARTS if self._sums.get(name))
        fields = [
            _clock_text(self._clock + self._at),
            f"{sum(self._sums.values()):.4f} s",
            ", ".join(what),
            parts,
            " ".join(text.split()),
        ]
        line = (" | ".join(fields).rstrip() + "\n").encode()
        try:
            before = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) < len(line):
                self._file.truncate(before)
                return False
        except OSError:
            return False
        self._sums.clear()
        self._steps.clear()
        self._num_calls = 0
        return True


_ledgers: dict[str, Ledger | None] = {}  # the ledger of this process, by folder


def of_process(number: Callable[[], int] | None = None) -> Ledger | None:
    """Returns the ledger of this process; None where no folder is named. The first call with a number begins it.

    Without a folder, but where calls are measured to find slow processes, the ledger is not written.
    """
    folder = os.environ.get(VARIABLE) or (os.devnull if pace.VARIABLE in os.environ else "")
    if not folder:
        return None
    if folder not in _ledgers and number is not None:
        _ledgers[folder] = _begun(Path(folder), number(), os.environ)
    return _ledgers.get(folder)


def _begun(folder: Path, number: int, environment: Mapping[str, str]) -> Ledger | None:
    attempt = rank_files.attempt_of(environment)
    try:
        if str(folder) == os.devnull:
            return Ledger(folder, number, attempt)
        for old in folder.glob(f"rank-{number}.restart-*.{ENDING}") if not attempt else ():  # files of an earlier job
            old.unlink()
        return Ledger(rank_files.path_of(folder, number, attempt, ENDING), number, attempt, _age_s())
    except OSError as error:
        print(f"jax-mpmd: no ledger is written to {folder}: {error}", file=sys.stderr, flush=True)
        return None


def during(part: str) -> contextlib.AbstractContextManager:
    """Marks a stretch of work in the ledger of this process, if there is one."""
    ledger = of_process()
    return contextlib.nullcontext() if ledger is None else ledger.during(part)


def close(why: str) -> None:
    """Closes the ledger of this process, if there is one, before the process is ended by force."""
    if (ledger := of_process()) is not None:
        ledger.close(why)


@functools.cache
def _age_s() -> float:
    """Returns how long this process has lived, by the kernel; 0 if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def _clock_text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-2] + "Z"
