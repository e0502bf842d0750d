"""Publishes what this rank is doing, and reads what the others publish, in the job's key-value store."""

import contextlib
import itertools
import json
import pathlib
import threading
import time
from typing import Any

from mpmd.job import processes
from mpmd.job.activity import Activity
from mpmd.job.verdict import LEFT_S, Board, View

# So often a rank publishes its board.
PUBLISH_S = 0.25
_FOLDER = "mpmd/board/"
_VERDICT = "verdict"


class Boards:
    """The boards of all ranks, as this one knows them.

    Attributes:
      rank: this one.
      store: the key-value store of `jax.distributed`.
      status: the launcher's file about this rank.
      verdict: the verdict that some rank has published, if any: the guilty rank and what it did.
    """

    def __init__(self, rank: int, activity: Activity, store: Any, status_dir: str | None):
        self.rank = rank
        self.store = store
        self.status = StatusFile(None if status_dir is None else pathlib.Path(status_dir, f"rank-{rank}.json"))
        self.verdict: tuple[int, str] | None = None
        self._activity = activity
        self._beats = itertools.count()
        self._seen: dict[int, tuple[str, float, Board]] = {}  # with the text, and when it was new
        self._gone: dict[int, float] = {}
        self._read_at = time.monotonic()

    @property
    def unread_s(self) -> float:
        """Seconds since the boards were read."""
        return time.monotonic() - self._read_at

    def own(self) -> Board:
        """What this rank says of itself now."""
        return self._activity.board([board for *_, board in list(self._seen.values())])

    def publish(self) -> None:
        """Says now what this rank is at."""
        board, beat = self.own(), next(self._beats)
        self.status.write(board)
        text = json.dumps({"beat": beat, "board": board.to_json()})
        self.store.key_value_set(f"{_FOLDER}{self.rank}", text, allow_overwrite=True)

    def read(self) -> None:
        """Reads what all ranks say."""
        now = time.monotonic()
        for key, text in self.store.key_value_dir_get(_FOLDER):
            name = key.rsplit("/", 1)[1]
            if name == _VERDICT:
                self.verdict = _verdict_of(text)
            elif name.isdigit() and self._seen.get(int(name), ("",))[0] != text:
                self._seen[int(name)] = (text, now, Board.from_json(json.loads(text)["board"]))
        self._read_at = time.monotonic()

    def views(self) -> dict[int, View]:
        """Every rank as this one sees it now."""
        now, own = time.monotonic(), self.own()
        views: dict[int, View] = {}
        late = max(0.0, now - self._read_at - 1.0)  # while nothing is read, nobody is silent but the store
        for rank, (_, changed, board) in list(self._seen.items()):
            is_here = bool(board.machine) and board.machine == own.machine
            process = processes.state(board.pid, board.started) if is_here else "unknown"
            if process != "gone":
                self._gone.pop(rank, None)
            elif self._read_at < self._gone.setdefault(rank, now) + 4 * PUBLISH_S:
                process = "running"  # its last words may still be on their way, or the store cannot tell them
            views[rank] = View(board, max(0.0, now - changed - late), process)
        views[self.rank] = View(own, 0.0, "running")
        return views

    def first_verdict(self, rank: int, what: str) -> tuple[int, str]:
        """Publishes a verdict; the one that was published first counts for all ranks."""
        if self.unread_s > LEFT_S:
            return rank, what  # there is nobody to ask
        found: list[tuple[int, str]] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                with contextlib.suppress(Exception):
                    self.store.key_value_set(_FOLDER + _VERDICT, json.dumps([rank, what]))
                found.append(_verdict_of(self.store.key_value_try_get(_FOLDER + _VERDICT)))

        run_briefly(ask, 2.0)
        return found[0] if found else (rank, what)


def _verdict_of(text: str) -> tuple[int, str]:
    rank, what = json.loads(text)
    return rank, what


def run_briefly(function: Any, limit_s: float) -> None:
    """Calls a function in a thread, and gives it so long: a call to the store may hang."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(limit_s)


class StatusFile:
    """What the launcher reads of a rank when no rank can speak any more.

    Args:
      path: None if there is no launcher.
    """

    def __init__(self, path: pathlib.Path | None):
        self._path = path

    def write(self, board: Board, verdict: str | None = None) -> None:
        """Replaces it by what the rank is at now, and the first line of the verdict."""
        if self._path is None:
            return
        wait, now = board.wait, time.time()
        data: dict[str, Any] = {k: getattr(board, k) for k in ("rank", "host", "pid", "phase", "step", "doing")}
        data["since"] = now - board.still_s
        data["waiting_for"] = wait and {"value": wait.what, "ranks": list(wait.ranks), "since": now - wait.for_s}
        data["verdict"] = verdict
        with contextlib.suppress(OSError):
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(data))
            temporary.replace(self._path)
