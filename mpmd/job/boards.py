"""Publishes what this rank is doing, and reads what the others publish, in the job's key-value store."""

import contextlib
import itertools
import json
import pathlib
import threading
import time
from collections.abc import Callable, Collection

from mpmd import _jax_compat as compat
from mpmd.job import processes, signs
from mpmd.job.activity import Activity
from mpmd.job.spares import Taken
from mpmd.job.verdict import HELD_S, LEFT_S, Board, View

# The period at which a rank publishes its board.
PUBLISH_S = 0.25
_FOLDER = "mpmd/board/"
_VERDICT = "verdict-"


class Boards:
    """The boards of all ranks, as this one knows them.

    Attributes:
      number: the number of its process, under which it publishes. A spare that has become a rank keeps its own number.
      num_lost: how many ranks have been lost and replaced; a verdict counts for ranks that know of the same losses.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        activity: Activity,
        store: compat.KeyValueStore,
        status_dir: str | None,
        number: int,
        taken: Collection[Taken],
    ):
        self.rank, self.number, self.num_lost = rank, number, len(taken)
        self.newer: int | None = None  # the number of the process that replaced this one, which was cut off
        self.period_s = PUBLISH_S * max(1.0, num_ranks / 64)  # reading all boards is work that grows with the ranks
        self.store = store
        self.status = StatusFile(None if status_dir is None else pathlib.Path(status_dir, f"rank-{rank}.json"))
        self.verdict: tuple[int, str] | None = None  # a published verdict: the guilty rank and its act
        self._activity = activity
        self._beats = itertools.count()
        self._seen: dict[int, tuple[str, float, Board]] = {}  # the text, when it came, and the board in it
        self._gone: dict[int, float] = {}
        self._numbers = {rank: rank for rank in range(num_ranks)} | dict(taken)  # the process of each rank
        self._knocks: dict[int, signs.Knock] = {}
        self._held_s = max(HELD_S, 3 * self.period_s)
        self._lock = threading.Lock()
        self._read_at = time.monotonic()

    @property
    def unread_s(self) -> float:
        """Seconds since the boards were last read."""
        return time.monotonic() - self._read_at

    def own(self) -> Board:
        """Returns the board of this rank as of now."""
        return self._activity.board([board for *_, board in list(self._seen.values())])

    def publish(self) -> None:
        """Publishes the board of this rank."""
        board, beat = self.own(), next(self._beats)
        self.status.write(board)
        text = json.dumps({"beat": beat, "board": board.to_json()})
        self.store.key_value_set(f"{_FOLDER}{self.number}", text, allow_overwrite=True)

    def read(self) -> None:
        """Reads the boards of all ranks."""
        now = time.monotonic()
        for key, text in self.store.key_value_dir_get(_FOLDER):
            name = key.rsplit("/", 1)[1]
            if name == f"{_VERDICT}{self.num_lost}":
                self.verdict = _verdict_of(text)
            elif name.isdigit():
                self._note(int(name), text, now)
        self._read_at = time.monotonic()

    def _note(self, number: int, text: str, now: float) -> None:
        """Notes the board of a process. Of several processes that were the same rank, the latest one counts."""
        board = Board.from_json(json.loads(text)["board"])
        if board.rank == self.rank and number > self.number:
            self.newer = number
        with self._lock:
            if number >= self._numbers[board.rank] and text != self._seen.get(board.rank, ("",))[0]:
                self._numbers[board.rank] = number
                self._seen[board.rank] = (text, now, board)

    def forget(self, rank: int, number: int) -> None:
        """Forgets the board of a rank: from now on, the process of this number is the rank."""
        with self._lock:
            old, self._numbers[rank] = self._numbers[rank], number
            self.num_lost += 1
            self._seen.pop(rank, None)
            self._gone.pop(rank, None)
            if (knock := self._knocks.pop(rank, None)) is not None:
                knock.close()
        if old != number:  # nobody reads it any more
            with contextlib.suppress(Exception):
                self.store.key_value_delete(f"{_FOLDER}{old}")

    def views(self) -> dict[int, View]:
        """Returns every rank as this one sees it now."""
        now, own = time.monotonic(), self.own()
        views: dict[int, View] = {}
        late = max(0.0, now - self._read_at - 1.0)  # while nothing is read, only the store is silent
        with self._lock:
            for rank, (_, changed, board) in list(self._seen.items()):
                silent_s = max(0.0, now - changed - late)
                is_here = bool(board.machine) and board.machine == own.machine
                process = self._state_here(board, silent_s, now) if is_here else self._state_away(board, silent_s)
                views[rank] = View(board, silent_s, process, self._held_s)
        views[self.rank] = View(own, 0.0, "running", self._held_s)
        return views

    def _state_here(self, board: Board, silent_s: float, now: float) -> str:
        """Returns the state of a process of this machine, by its kernel."""
        process = processes.state(board.pid, board.started)
        if process != "gone":
            self._gone.pop(board.rank, None)
        elif self._read_at < self._gone.setdefault(board.rank, now) + 4 * PUBLISH_S:
            process = "running"  # its last board may still be on its way, or the store is gone
        return "held" if process == "running" and silent_s > self._held_s else process

    def _state_away(self, board: Board, silent_s: float) -> str:
        """Returns the state of a silent process on another machine, by the answer of that machine's kernel."""
        if silent_s < self._held_s or board.rank == self.rank or not board.door:
            if (knock := self._knocks.pop(board.rank, None)) is not None:
                knock.close()
            return "unknown"
        return "mute" if self._knocks.setdefault(board.rank, signs.Knock(board.door)).lives() else "unknown"

    def forgive(self, seconds: float) -> None:
        """Shortens all silences by a time in which this process could not read (lock held, or process stopped)."""
        now = time.monotonic()
        self._read_at = min(now, self._read_at + seconds)
        for rank, (text, changed, board) in list(self._seen.items()):
            self._seen[rank] = text, min(now, changed + seconds), board

    def first_verdict(self, rank: int, what: str) -> tuple[int, str, bool]:
        """Publishes a verdict. Returns the first one, which counts for all, and whether that is this rank's own."""
        found: list[tuple[int, str, bool]] = []
        key = f"{_FOLDER}{_VERDICT}{self.num_lost}"

        def ask() -> None:
            is_first = False
            with contextlib.suppress(Exception):
                with contextlib.suppress(Exception):
                    self.store.key_value_set(key, json.dumps([rank, what]))
                    is_first = True
                found.append((*_verdict_of(self.store.key_value_try_get(key)), is_first))

        if self.unread_s < LEFT_S:  # else the store does not answer
            run_briefly(ask, 2.0)
        return found[0] if found else (rank, what, True)


def _verdict_of(text: str) -> tuple[int, str]:
    rank, what = json.loads(text)
    return rank, what


def run_briefly(function: Callable[[], object], limit_s: float) -> None:
    """Calls a function in a thread, and waits at most `limit_s`: a call to the store may hang."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(limit_s)


class StatusFile:
    """The file (None without a launcher) from which the launcher reads the state of a rank when all have ended."""

    def __init__(self, path: pathlib.Path | None):
        self._path, self._verdict, self._lock = path, None, threading.Lock()

    @property
    def exists(self) -> bool:
        """Whether there is a launcher, which prints the verdict at the end."""
        return self._path is not None

    def write(self, board: Board, verdict: str | None = None) -> None:
        """Writes the current activity of the rank, and the first line of the verdict, which later calls keep."""
        if self._path is None:
            return
        wait, now = board.wait, time.time()
        data: dict[str, object] = {
            k: getattr(board, k) for k in ("rank", "host", "pid", "phase", "step", "doing", "goes_on")
        }
        if board.loop_step is not None:  # unlike the number of calls, it grows from one attempt to the next
            data["step"] = board.loop_step
        data["since"] = now - board.still_s
        data["waiting_for"] = wait and {"value": wait.what, "ranks": list(wait.ranks), "since": now - wait.for_s}
        with self._lock, contextlib.suppress(OSError):
            data["verdict"] = self._verdict = verdict or self._verdict
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(data, ensure_ascii=False), "utf-8", errors="replace")
            temporary.replace(self._path)
