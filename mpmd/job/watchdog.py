"""Every rank says what it is at, and reads what the others say: none of them waits for ever.

Two daemon threads: one publishes this rank's `Board` through the key-value store and reads the others', one
judges (`mpmd.verdict`). They are apart because a call to the store hangs when its process is stopped. A verdict
prints a table on every rank and ends the process by force: the main thread may be stuck in C++.
"""

import collections
import contextlib
import faulthandler
import json
import operator
import os
import pathlib
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from mpmd import _jax_compat as compat
from mpmd.job import exits, processes, verdict
from mpmd.job.verdict import LEFT_S, SECONDHAND_S, SILENT_S, STILL_S, Board, View, Wait

# How a rank ends that was not to blame; the launcher tells victims from the guilty one by it.
VICTIM_STATUS = 75
_PUBLISH_S = 0.25
_BOARDS = "mpmd/board/"
_VERDICT = "verdict"
# Of so many values it is remembered that they were sent.
_REMEMBERED = 1 << 16


class Cursor(Protocol):
    """Where the executor is: the watchdog looks at it from its own thread."""

    position: int

    def text(self, position: int) -> str:
        """The instruction in words."""
        ...

    def peers(self, position: int) -> tuple[int, ...]:
        """The other ranks of the group that runs the instruction."""
        ...


class Watchdog:
    """Publishes what this rank is at and ends the job when it cannot go on.

    Args:
      rank, num_ranks: this process, and how many there are.
      store: the key-value store of `jax.distributed`.
      hang_timeout_s: how long a rank may wait for one that does not move; None for no limit.
      status_dir: a folder for `rank-N.json`, which the launcher reads when no rank can speak any more.
      serves: this process serves the key-value store, so it leaves last.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: Any,
        hang_timeout_s: float | None,
        status_dir: str | None = None,
        serves: bool = False,
    ):
        self.rank, self.num_ranks = rank, num_ranks
        self.hang_timeout_s = hang_timeout_s
        self._store, self._serves = store, serves
        self._status = None if status_dir is None else pathlib.Path(status_dir, f"rank-{rank}.json")
        self._lock = threading.Lock()
        self._me = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._me |= {"machine": processes.machine(), "started": processes.started(os.getpid())}
        self._phase, self._doing, self._step = "idle", "", 0
        self._wait: tuple[str, tuple[int, ...]] | None = None
        self._since = self._moved = time.monotonic()
        self._cursor: Cursor | None = None
        self._last_position = -1
        self._marks: collections.deque[tuple[Any, str, tuple[int, ...], int | None]] = collections.deque()
        self._sent: collections.deque[int | None] = collections.deque(maxlen=_REMEMBERED)
        self._seen: dict[int, tuple[str, float, Board]] = {}
        self._gone: dict[int, float] = {}
        self._read_at = time.monotonic()
        self._foreign_verdict: str | None = None
        self._suspected: tuple[int | None, float] = None, 0.0
        self._callbacks: dict[int, str] = {}
        self._raised = ""
        self._stack: types.TracebackType | None = None
        self._ending = self._is_let_go = False
        self._threads: list[threading.Thread] = []
        self._beat = 0

    def start(self) -> None:
        """Starts the threads and takes note of uncaught exceptions."""
        faulthandler.enable()
        for target in (self._publish_loop, self._judge_loop):
            thread = threading.Thread(target=target, name=f"mpmd-{target.__name__.strip('_')}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        exits.note_exits()
        compat.observe_callbacks(self._calling)

    # --- what the main thread says ----------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, phase: str, doing: str, waits_for: Sequence[int] = ()) -> Iterator[None]:
        """A stretch of work other than a step; with ranks, one that waits for them."""
        before = self._phase, self._doing, self._wait
        self._say(phase, doing, (doing, tuple(waits_for)) if waits_for else None)
        try:
            yield
        finally:
            self._say(*before)

    def waits_for(self, ranks: Sequence[int]) -> None:
        """Narrows the ranks of the current wait down to those that have not come."""
        if self._wait is not None:
            self._wait = self._wait[0], tuple(ranks)

    def _say(self, phase, doing, wait) -> None:
        self._phase, self._doing, self._wait = phase, doing, wait
        self._since = self._moved = time.monotonic()

    def enter_step(self, cursor: Cursor) -> None:
        """A step begins; `cursor` is looked at until `leave_step`."""
        self._step += 1
        self._last_position = -1
        self._cursor = cursor
        self._say("step", "", None)

    def leave_step(self) -> None:
        """All instructions of the step have been dispatched."""
        self._cursor = None
        self._say("idle", "", None)

    def expect(self, array: Any, what: str, ranks: tuple[int, ...], number: int | None = None) -> None:
        """An array that will come from `ranks`, or (none) that was promised to another rank.

        Held just until it is there, and it shows that things move. By its number, which both sides know, it is found
        out that it was sent and did not arrive.
        """
        with self._lock:
            if not self._marks:
                self._since = time.monotonic()
            self._marks.append((array, what, ranks, number))
            self._prune()

    def _prune(self) -> None:
        while self._marks and self._is_settled(self._marks[0]):
            self._marks.popleft()
            self._since = self._moved = time.monotonic()

    def _expects(self) -> bool:
        """Whether values from other ranks are still to come."""
        with self._lock:
            self._prune()
            return any(ranks for _, _, ranks, _ in self._marks)

    def _is_settled(self, mark) -> bool:
        array, _, ranks, number = mark
        # `is_ready` of a deleted buffer crashes, and the main thread may delete it at any time: the two calls are
        # made by C code, between which Python does not change threads.
        if not any(map(operator.call, (array.is_deleted, array.is_ready))):
            return False
        if not ranks:
            self._sent.append(number)
        return True

    def _waits(self) -> tuple[str, tuple[int, ...], int | None] | None:
        """The oldest value that is not there yet. What was promised after it may have been sent all the same."""
        if self._marks and time.monotonic() - self._since > STILL_S:
            self._marks = collections.deque(m for m in self._marks if m[2] or not self._is_settled(m))
        return self._marks[0][1:] if self._marks else None

    def _sent_in_vain(self) -> tuple[int, ...]:
        """Of the values that others have been waiting for, those that this rank has sent."""
        waits = [board.wait for *_, board in list(self._seen.values()) if board.wait is not None]
        wanted = {w.number for w in waits if w.number is not None and self.rank in w.ranks and w.for_s > STILL_S}
        return tuple(sorted(wanted.intersection(self._sent))) if wanted else ()

    @contextlib.contextmanager
    def _calling(self, function: Callable) -> Iterator[None]:
        """While a program calls a function of the user, in whatever thread; what it raises reaches others first."""
        thread, text = threading.get_ident(), exits.function_text(function)
        self._callbacks[thread] = text
        try:
            yield
        except BaseException as e:
            self._raised = self._raised or f"{exits.error_text(e)} in the host callback {text}"
            raise
        finally:
            self._callbacks.pop(thread, None)

    # --- threads ----------------------------------------------------------------------------------

    def board(self) -> Board:
        """What this rank says of itself now."""
        now = time.monotonic()
        cursor, doing, position = self._cursor, self._doing, 0
        wait = None if self._wait is None else (*self._wait, None)
        with self._lock:
            self._prune()
            wait = wait or self._waits()
            sent = self._sent_in_vain()
        if cursor is not None:
            position = cursor.position
            doing = cursor.text(position)
            if position != self._last_position:
                self._last_position, self._moved = position, now
                if not self._marks:
                    self._since = now
            if wait is None and (peers := cursor.peers(position)):
                wait = doing, peers, None
        still_s = max(0.0, now - self._moved)
        return Board(
            **self._me, phase=self._phase, step=self._step, position=position, doing=doing, still_s=still_s,
            wait=None if wait is None else Wait(wait[0], wait[1], max(0.0, now - self._since), wait[2]), sent=sent,
            callback=next(iter(list(self._callbacks.values())), "") if still_s > STILL_S else "", raised=self._raised,
        )  # fmt: skip

    def _publish_loop(self) -> None:
        period = _PUBLISH_S * max(1.0, self.num_ranks / 64)  # reading all boards is work that grows with the ranks
        while not self._ending:
            with contextlib.suppress(Exception):  # the store is gone: the judge sees that nothing is read any more
                self.publish()
                self._read()
            time.sleep(period)

    def publish(self) -> None:
        """Says now what this rank is at."""
        with self._lock:
            self._beat += 1
            beat = self._beat
        board = self.board()
        text = json.dumps({"beat": beat, "board": board.to_json()})
        self._write_status(board, None)
        self._store.key_value_set(f"{_BOARDS}{self.rank}", text, allow_overwrite=True)

    def _read(self) -> None:
        now = time.monotonic()
        for key, text in self._store.key_value_dir_get(_BOARDS):
            name = key.rsplit("/", 1)[1]
            if name == _VERDICT:
                self._foreign_verdict = text
            elif name.isdigit() and self._seen.get(int(name), ("",))[0] != text:
                self._seen[int(name)] = (text, now, Board.from_json(json.loads(text)["board"]))
        self._read_at = time.monotonic()

    def views(self) -> dict[int, View]:
        """Every rank as this one sees it now."""
        now = time.monotonic()
        views: dict[int, View] = {}
        late = max(0.0, now - self._read_at - 1.0)  # while nothing is read, nobody is silent but the store
        for rank, (_, changed, board) in list(self._seen.items()):
            silent = max(0.0, now - changed - late)
            same = bool(board.machine) and board.machine == self._me["machine"]
            process = processes.state(board.pid, board.started) if same else "unknown"
            if process != "gone":
                self._gone.pop(rank, None)
            elif self._read_at < self._gone.setdefault(rank, now) + 4 * _PUBLISH_S:
                process = "running"  # its last words may still be on their way, or the store cannot tell them
            views[rank] = View(board, silent, process)
        views[self.rank] = View(self.board(), 0.0, "running")
        return views

    def _judge_loop(self) -> None:
        while not self._ending:
            time.sleep(_PUBLISH_S)
            views = self.views()
            if self._foreign_verdict is not None:
                rank, what = json.loads(self._foreign_verdict)
                self._end(views, rank, what)
                continue
            found = verdict.diagnose(views, self.rank) or self._stall(views) or self._store_is_gone(views)
            if found is not None:
                self._end(views, *found)

    def _stall(self, views) -> tuple[int, str] | None:
        """A rank that holds up others, if it still does when all who can have spoken again since it was suspected."""
        found = verdict.suspect(views, self.hang_timeout_s)
        now = time.monotonic()
        if found is None or found[0] != self._suspected[0]:
            self._suspected = None if found is None else found[0], now
            return None
        since = self._suspected[1]
        others = (v for r, v in views.items() if r != self.rank and v.process != "stopped")
        oldest = now - max((v.silent_s for v in others if v.silent_s < LEFT_S), default=0.0)
        return found if now - since > 4 * _PUBLISH_S and oldest > since + 2 * _PUBLISH_S else None

    def _store_is_gone(self, views) -> tuple[int, str] | None:
        """A verdict for when the process that serves the key-value store does not answer (it is rank 0, if any)."""
        age = time.monotonic() - self._read_at
        if age < SILENT_S or self._serves or self._phase == "finished":
            return None
        server = views.get(0)
        stopped = server if server is not None and server.process == "stopped" else None
        limit = self.hang_timeout_s if stopped else SILENT_S
        if not limit or age < limit:
            return None
        if stopped:
            server = stopped
            return 0, f"process {server.board.pid} on {server.board.host} is stopped for {age:.0f} s ({server.where})"
        if server is not None and server.board.host != self._me["host"]:
            why = "its machine cannot be reached, or the coordination service on it has ended"
            return 0, f"no sign of life from {server.board.host} for {age:.0f} s: {why}"
        return 0, f"the coordination service does not answer for {age:.0f} s"

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, views, rank: int, what: str) -> None:
        """Prints the table and ends this process; the first verdict that was published counts for all."""
        if self._ending:
            return
        self._ending = True
        rank, what = self._agree_on_verdict(rank, what)
        text = verdict.table(views, rank, what)
        self._write_status(views[self.rank].board, text.splitlines()[0])
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        me = views[self.rank]
        if me.board.phase != "finished" and (rank == self.rank or me.wait is not None):
            with contextlib.suppress(Exception):
                if self._stack is not None:
                    print("Where a broken connection found the main thread (most recent call last):", file=sys.stderr)
                    traceback.print_tb(self._stack)
                for name, lines in exits.stacks():
                    print(f"Rank {self.rank}, {name} (most recent call last):", *lines, sep="\n", file=sys.stderr)
                sys.stderr.flush()
        if me.board.phase == "finished" and rank == self.rank and not self._serves:
            self._is_let_go = True  # with the status that its program has ended with
        else:
            self._leave(1 if rank == self.rank and self._raised else VICTIM_STATUS)

    def _agree_on_verdict(self, rank: int, what: str) -> tuple[int, str]:
        if time.monotonic() - self._read_at > LEFT_S:
            return rank, what  # there is nobody to ask
        found: list[str] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                with contextlib.suppress(Exception):
                    self._store.key_value_set(_BOARDS + _VERDICT, json.dumps([rank, what]))
                found.append(self._store.key_value_try_get(_BOARDS + _VERDICT))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(2.0)
        if found:
            rank, what = json.loads(found[0])
        return rank, what

    def _leave(self, status: int) -> None:
        """Ends the process by force. The one that serves the store is the last, for JAX aborts the others with it."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if self._serves:
            time.sleep(4 * _PUBLISH_S + 2.5)
        os._exit(status)

    def _on_exception(self, kind, value, stack) -> None:
        """This rank cannot go on: tells the others and ends the process, or gives way to the verdict on its cause."""
        self._stack = stack  # at once: a verdict may end the process while this runs
        is_ours = self._raised and issubclass(kind, jax.errors.JaxRuntimeError)
        with self._lock:
            self._prune()
        what = f"{self._raised if is_ours else exits.error_text(value)} ({self.views()[self.rank].where})"
        if issubclass(kind, jax.errors.JaxRuntimeError) and not is_ours:
            if verdict.SECONDHAND in str(value):  # another rank computed it: the judge will find that rank
                self._say("failed", what, None)
                time.sleep(SECONDHAND_S)
            elif "onnect" in str(value):  # another rank's death may be the cause
                time.sleep(SILENT_S + 2)
        if self._ending:
            time.sleep(60)  # the judge has found the cause; it ends the process
        self._excepthook(kind, value, stack)
        print(f"jax-mpmd: rank {self.rank}: {what}", file=sys.stderr, flush=True)
        self.fail(what, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    def fail(self, what: str, status: int = 1) -> None:
        """This rank cannot go on: tells the others, and ends the process."""
        self._doing = what
        self._phase, self._cursor = "failed", None
        self._ending = True
        thread = threading.Thread(target=self._last_words, daemon=True)
        thread.start()
        thread.join(3.0)
        self._leave(status)

    def _last_words(self) -> None:
        with contextlib.suppress(Exception):
            self.publish()

    def finish(self) -> None:
        """The program is at its end: says so, and waits until all ranks are (or somebody waits for this one)."""
        if status := exits.exit_status():
            self.fail(f"exit status {status}", status)
        while not self._ending and self._expects():  # a value may never come: the judge sees that
            time.sleep(_PUBLISH_S / 5)
        if not self._ending:
            self._say("finished", "", None)
            with contextlib.suppress(Exception):
                self.publish()
        while not self._ending:
            views = self.views()
            done = [v for v in views.values() if v.board.phase == "finished"]
            if len(done) == self.num_ranks or time.monotonic() - self._read_at > SILENT_S:
                break
            time.sleep(_PUBLISH_S / 5)
        is_judged = self._ending
        end = time.monotonic() + 60
        while is_judged and not self._is_let_go and time.monotonic() < end:
            time.sleep(_PUBLISH_S)  # the judge ends the process, or lets it go
        if self._is_let_go:
            compat.abandon_distributed()  # the others do not come to the end any more
            return
        time.sleep(2 * _PUBLISH_S)  # so that the others can read it
        self._ending = True
        for thread in self._threads:  # one that came back from C++ to a Python that is gone would abort the process
            thread.join(SILENT_S)

    def _write_status(self, board: Board, line: str | None) -> None:
        if self._status is None:
            return
        wait = board.wait
        now = time.time()
        data = {k: getattr(board, k) for k in ("rank", "host", "pid", "phase", "step", "doing")}
        data["since"] = now - board.still_s
        data["waiting_for"] = wait and {"value": wait.what, "ranks": list(wait.ranks), "since": now - wait.for_s}
        data["verdict"] = line
        with contextlib.suppress(OSError):
            temporary = self._status.with_suffix(".tmp")
            temporary.write_text(json.dumps(data))
            temporary.replace(self._status)
