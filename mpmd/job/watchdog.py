"""Ends this process when the job cannot go on, so that no rank waits for ever.

Two daemon threads: one publishes this rank's `Board` through the key-value store and reads the others', one
judges (`judge.py`, `verdict.py`). They are separate because a call to the store hangs when the process of the store is
stopped. A verdict prints a table on every rank and ends the process by force: the main thread may be stuck in C++.
"""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping

import jax

from mpmd import _jax_compat as compat
from mpmd.job import exits, interrupts, verdict
from mpmd.job.activity import Activity
from mpmd.job.black_box import BlackBox
from mpmd.job.boards import PUBLISH_S, Boards, run_briefly
from mpmd.job.calls import Calls
from mpmd.job.judge import Judge
from mpmd.job.signs import Door
from mpmd.job.verdict import SECONDHAND_S, SILENT_S, Board, View
from mpmd.observe import ledger

# A thread that takes this long for a round could not run: its lock was held, or its process was stopped.
_PAUSED_S = 2.0
# The launcher has this long to announce that another process takes the place of a lost rank.
_LAUNCHER_S = 3.0
# The exit status of a rank that was not to blame; the launcher tells victims from the guilty rank by it.
VICTIM_STATUS = 75


class Watchdog:
    """Watches over the ranks, and ends this one.

    Args:
      serves: whether this process serves the key-value store, so that it leaves last.
      losses: where lost ranks are replaced, notes the losses; returns a verdict if this process cannot go on.
      make_way: where lost ranks are replaced, ends the process of a slow or stuck rank; returns whether it did.
    """

    def __init__(
        self,
        num_ranks: int,
        activity: Activity,
        boards: Boards,
        judge: Judge,
        black_box: BlackBox,
        door: Door,
        serves: bool,
        losses: Callable[[], tuple[int, str] | None] | None = None,
        make_way: Callable[[Board, str, bool], bool] | None = None,
    ):
        self._losses, self._make_way, self._found_at = losses, make_way, 0.0
        self._slow: set[tuple[int, int]] = set()  # ranks and processes that were found to be slow
        self._door = door
        self.boards, self._black_box = boards, black_box
        self._num_ranks, self._activity, self._judge, self._serves = num_ranks, activity, judge, serves
        self._is_ending = self._is_let_go = self._has_failed = False
        self._stack: types.TracebackType | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads, and listens for uncaught exceptions."""
        faulthandler.enable()
        for target in (self._publish_loop, self._judge_loop):
            thread = threading.Thread(target=target, name=f"mpmd-{target.__name__.strip('_')}", daemon=True)
            self._threads.append(thread)
            thread.start()
        plain = sys.excepthook
        sys.excepthook = lambda kind, value, stack: self._on_exception(kind, value, stack, plain)
        exits.note_exits()
        if self._black_box.folder is not None:
            interrupts.listen(self._on_signal)
        compat.observe_callbacks(self._activity.callbacks.calling)

    # --- threads ----------------------------------------------------------------------------------

    def _publish_loop(self) -> None:
        while not self._is_ending:
            with contextlib.suppress(Exception):  # the store is gone: the judge sees that nothing is read any more
                self._door.clear()
                self.boards.publish()
                self.boards.read()
            if (newer := self.boards.newer) is not None:
                text = f"was cut off, and spare {newer} has its place: this process ends"
                print(f"jax-mpmd: rank {self.boards.rank}: {text}", file=sys.stderr, flush=True)
                self._leave(VICTIM_STATUS)
            time.sleep(self.boards.period_s)

    def _judge_loop(self) -> None:
        woke_at = time.monotonic()
        while not self._is_ending:
            time.sleep(PUBLISH_S)
            before, woke_at = woke_at, time.monotonic()
            if woke_at - before > _PAUSED_S:
                self.boards.forgive(woke_at - before)
            try:
                self._judge_once(woke_at)
            except Exception:  # without a judge, a rank could wait for ever
                if not self._has_failed:
                    traceback.print_exc()
                self._has_failed = True
                if self._is_ending:
                    self._leave(VICTIM_STATUS)

    def _judge_once(self, woke_at: float) -> None:
        views = self.boards.views()
        self._black_box.note(views)
        found = self.boards.verdict or self._judge.find(views)
        if self._losses is not None:
            found = self._after_losses(found, views)
            if found is None and (slow := self._judge.straggler(views)) is not None:
                self._after_slowness(views, *slow)
        if found is not None and time.monotonic() - woke_at < _PAUSED_S:  # else it may be old
            self._end(views, *found)

    def _after_losses(self, found: tuple[int, str] | None, views: Mapping[int, View]) -> tuple[int, str] | None:
        """Ends a rank that is stuck; returns its verdict once the launcher had time to announce a replacement."""
        assert self._losses is not None and self._make_way is not None
        if (why := self._losses()) is not None:
            return why
        if not self._activity.goes_on:
            return found
        if found is not None and self.boards.unread_s >= SILENT_S:
            return found  # without the store, no process can be replaced
        if found is None or any(map(_may_be_cut_off, views.values())):
            self._found_at = 0.0
            return None
        if found[0] in views and _has_failed(views[found[0]].board):
            return found
        if not self._found_at:
            self._found_at = time.monotonic()
            rank, what = found
            is_new = self.boards.verdict is None and self._speaks_of(rank, views)
            if is_new and rank in views and views[rank].is_stuck:
                threading.Thread(target=self._make_way, args=(views[rank].board, what, False), daemon=True).start()
        return found if time.monotonic() - self._found_at > _LAUNCHER_S else None

    def _after_slowness(self, views: Mapping[int, View], rank: int, what: str) -> None:
        """Has the rank make way for a spare, once for each of its processes."""
        assert self._make_way is not None
        board, make_way = views[rank].board, self._make_way
        if (found := (rank, board.pid)) in self._slow or not self._speaks_of(rank, views):
            return

        def replace() -> None:
            if not make_way(board, what, True):
                self._slow.discard(found)

        self._slow.add(found)
        threading.Thread(target=replace, daemon=True).start()

    def _speaks_of(self, rank: int, views: Mapping[int, View]) -> bool:
        """Returns whether this rank speaks for all about another one."""
        return min((r for r, v in views.items() if r != rank and not v.is_old), default=-1) == self.boards.rank

    # --- the end ----------------------------------------------------------------------------------

    def end(self, rank: int, what: str) -> None:
        """Ends this process with a verdict that was found elsewhere."""
        self._end(self.boards.views(), rank, what)

    def _end(self, views: Mapping[int, View], rank: int, what: str) -> None:
        """Prints the table and ends this process. The verdict that was published first counts for all."""
        if self._is_ending:
            return
        self._is_ending = True
        rank, what, is_first = self.boards.first_verdict(rank, what)
        text = verdict.table(views, rank, what)
        me = views[self.boards.rank].board
        is_guilty, is_finished = rank == me.rank, me.phase == "finished"
        self.boards.status.write(me, text.splitlines()[0])
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if is_first or not self.boards.status.exists:
            print(text if is_first else text.splitlines()[0], file=sys.stderr, flush=True)
        if where := self._black_box.write(text.splitlines()[0], views, rank):
            print(where, file=sys.stderr, flush=True)
        if not is_finished and is_guilty:
            with contextlib.suppress(Exception):
                self._print_stacks()
        if is_finished and is_guilty and not self._serves:
            self._is_let_go = True  # it ends with the status of its program
        else:
            run_briefly(lambda: ledger.close(f"rank {rank} {what}"), 3.0)  # its folder may be on a disk that hangs
            self._leave(1 if is_guilty and self._activity.callbacks.raised else VICTIM_STATUS)

    def _print_stacks(self) -> None:
        if self._stack is not None:
            print("Where a broken connection found the main thread (most recent call last):", file=sys.stderr)
            traceback.print_tb(self._stack)
        for name, lines in exits.stacks():
            print(f"Rank {self.boards.rank}, {name} (most recent call last):", *lines, sep="\n", file=sys.stderr)
        sys.stderr.flush()

    def _leave(self, status: int) -> None:
        """Ends the process by force. The one that serves the store is the last, for JAX aborts the others with it."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if self._serves:
            time.sleep(4 * PUBLISH_S + 2.5)
        os._exit(status)

    def _on_exception(
        self, kind: type[BaseException], value: BaseException, stack: types.TracebackType | None, print_it: Callable
    ) -> None:
        """Tells the others that this rank cannot go on and ends the process, or waits for the verdict on the cause."""
        self._stack = stack  # at once: a verdict may end the process while this runs
        raised = self._activity.callbacks.raised
        is_ours = bool(raised) and issubclass(kind, jax.errors.JaxRuntimeError)
        what = f"{raised if is_ours else exits.error_text(value)} ({self.boards.views()[self.boards.rank].where})"
        if issubclass(kind, jax.errors.JaxRuntimeError) and not is_ours:
            if verdict.SECONDHAND in str(value):  # another rank computed it: the judge will find that rank
                self._activity.say("failed", what)
                time.sleep(SECONDHAND_S)
            elif "onnect" in str(value):  # another rank's death may be the cause
                time.sleep(SILENT_S + 2)
        if self._is_ending:
            time.sleep(60)  # the judge has found the cause; it ends the process
        print_it(kind, value, stack)
        if issubclass(kind, KeyboardInterrupt):
            self._on_signal("SIGINT")
        print(f"jax-mpmd: rank {self.boards.rank}: {what}", file=sys.stderr, flush=True)
        self._fail(what, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _on_signal(self, signal: str) -> None:
        """Writes the record of this rank, which somebody ends from outside, perhaps because the job hangs."""
        if not self._is_ending and (text := self._black_box.interrupted(signal, self.boards.views())):
            print(text, file=sys.stderr, flush=True)

    def _fail(self, what: str, status: int) -> None:
        """Tells the others that this rank cannot go on, and ends the process."""
        if where := self._black_box.write(what, self.boards.views(), self.boards.rank):
            print(where, file=sys.stderr, flush=True)
        run_briefly(lambda: ledger.close(f"rank {self.boards.rank} {what}"), 3.0)
        self._activity.fail(what)
        self._is_ending = True
        run_briefly(self._last_words, 3.0)
        self._leave(status)

    def _last_words(self) -> None:
        with contextlib.suppress(Exception):
            self.boards.publish()
            if (board := self.boards.own()).phase == "failed":
                self.boards.status.write(board, f"jax-mpmd: rank {board.rank}: {board.doing}")

    def finish(self, calls: Calls) -> None:
        """Publishes that the program is at its end, and waits for the ends of all ranks (or for a verdict)."""
        if status := exits.exit_status():
            self._fail(exits.status_text(status), status)
        end = math.inf
        # A value may never come: the judge sees that. If calls have differed, their error is first raised elsewhere.
        while not self._is_ending and self._activity.expected.are_to_come() and time.monotonic() < end:
            time.sleep(PUBLISH_S / 5)
            if calls.have_differed:
                end = min(end, time.monotonic() + SILENT_S)
        calls.finish()
        if not self._is_ending:
            self._activity.say("finished")
            self._last_words()
        while not (
            self._is_ending or self._all_have_finished() or calls.have_differed or self.boards.unread_s > SILENT_S
        ):
            time.sleep(PUBLISH_S / 5)
        is_judged = self._is_ending
        end = time.monotonic() + 60
        while is_judged and not self._is_let_go and time.monotonic() < end:
            time.sleep(PUBLISH_S)  # the judge ends the process, or lets it go
        if self._is_let_go:
            compat.abandon_distributed()  # the others will not come to their end any more
            return
        if what := calls.last():
            what = what.removeprefix(f"rank {self.boards.rank} ")
            print(f"jax-mpmd: rank {self.boards.rank}: {what}", file=sys.stderr, flush=True)
            self._fail(what.splitlines()[0], 1)
        if self._losses is not None:
            compat.abandon_distributed()  # JAX's last barrier would wait for spares and lost processes
        time.sleep(2 * PUBLISH_S)  # so that the others can read it
        self._is_ending = True
        calls.stop(SILENT_S)
        for thread in self._threads:  # a thread that returned from C++ to a Python that is gone would abort the process
            thread.join(SILENT_S)

    def _all_have_finished(self) -> bool:
        views = self.boards.views().values()
        return sum(v.board.phase == "finished" for v in views) == self._num_ranks


def _has_failed(board: Board) -> bool:
    """Returns whether a process has ended with an error, after which the launcher restarts all."""
    return board.phase == "failed" and board.doing != exits.status_text(exits.TOLD_TO_END)


def _may_be_cut_off(view: View) -> bool:
    """Returns whether a rank's host may be lost (the reason why others wait in vain), as the launcher may soon find."""
    return view.process == "unknown" and view.board.phase not in verdict.OVER and view.held_s < view.silent_s < SILENT_S
