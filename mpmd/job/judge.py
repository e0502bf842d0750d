"""Asks `verdict.py` again until a suspicion is confirmed. Also notices when the key-value store is gone."""

import dataclasses
import time
from collections.abc import Mapping

from mpmd.job import exits, signs, verdict
from mpmd.job.boards import PUBLISH_S, Boards
from mpmd.job.verdict import LEFT_S, SILENT_S, View
from mpmd.observe import pace


class Judge:
    """Finds the rank that ends the job.

    Args:
      hang_timeout_s: how long a rank may wait for one that does not move; None for no limit.
      serves: whether this process serves the key-value store.
      slow_factor: a process is slow if it takes this many times its usual time; None if slow processes may stay.
    """

    def __init__(self, boards: Boards, hang_timeout_s: float | None, serves: bool, slow_factor: float | None = None):
        self._boards = boards
        self._hang_timeout_s = hang_timeout_s
        self._serves = serves
        self._suspected: tuple[int | None, float] = None, 0.0  # the rank, and since when
        self._slow_factor = slow_factor
        self._slow: tuple[int | None, float] = None, 0.0  # the same for a slow rank

    def find(self, views: Mapping[int, View]) -> tuple[int, str] | None:
        """Returns the guilty rank and what it did; None while everything moves."""
        return verdict.diagnose(views, self._boards.rank) or self._stall(views) or self._store_is_gone(views)

    def _stall(self, views: Mapping[int, View]) -> tuple[int, str] | None:
        """Returns a rank that holds up others, if it still does after all ranks that can have published again."""
        found = verdict.suspect(views, self._hang_timeout_s)
        now = time.monotonic()
        if found is None or found[0] != self._suspected[0]:
            self._suspected = None if found is None else found[0], now
            return None
        since = self._suspected[1]
        others = (v for r, v in views.items() if r != self._boards.rank and not v.is_old)
        oldest = now - max((v.silent_s for v in others if v.silent_s < LEFT_S), default=0.0)
        if now - since < 4 * PUBLISH_S or oldest < since + 2 * PUBLISH_S:
            return None
        return verdict.suspect({**views, found[0]: _with_line(views[found[0]])}, self._hang_timeout_s)

    def straggler(self, views: Mapping[int, View]) -> tuple[int, str] | None:
        """Returns a rank that is slow while the others are not, if it still is after all have published again."""
        if self._slow_factor is None:
            return None
        running = {r: v.board for r, v in views.items() if v.process != "gone" and v.board.phase not in verdict.OVER}
        found = pace.straggler({r: board.pace for r, board in running.items() if board.pace}, self._slow_factor)
        now, rank = time.monotonic(), None if found is None else found[0]
        if rank != self._slow[0]:
            self._slow = rank, now
        return found if now - self._slow[1] > 4 * self._boards.period_s else None

    def _store_is_gone(self, views: Mapping[int, View]) -> tuple[int, str] | None:
        """Returns a verdict if the process that serves the key-value store (rank 0, if a rank does) does not answer."""
        age, me = self._boards.unread_s, views[self._boards.rank].board
        if age < SILENT_S or self._serves or me.phase == "finished":
            return None
        server = views.get(0)
        is_stopped = server is not None and server.process == "stopped"
        limit = self._hang_timeout_s if is_stopped else SILENT_S
        if not limit or age < limit:
            return None
        if server is not None and is_stopped:
            process = f"process {server.board.pid} on {server.board.host}"
            return 0, f"{process} is stopped for {age:.0f} s ({server.where})"
        if server is not None and server.board.host != me.host:
            why = "its machine cannot be reached, or the coordination service on it has ended"
            return 0, f"no sign of life from {server.board.host} for {age:.0f} s: {why}"
        return 0, f"the coordination service does not answer for {age:.0f} s"


def _with_line(view: View) -> View:
    """Returns the view with the line that holds Python's lock. (The signal for it interrupts system calls there.)"""
    board = view.board
    if view.process != "held":
        return view
    line = exits.line_of(signs.stacks_of(board.pid, board.started, board.stacks))
    return dataclasses.replace(view, board=dataclasses.replace(board, line=line))
