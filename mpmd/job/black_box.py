"""Writes the flight record of this rank when the job ends badly, or when somebody asks for it."""

import contextlib
import dataclasses
import os
import shlex
import threading
import time
from collections.abc import Mapping

from mpmd.job import exits, verdict
from mpmd.job.activity import Activity
from mpmd.job.verdict import STILL_S, View
from mpmd.observe import flight_files

# A file of this name in the folder asks all ranks to write their records now. They continue to run.
_REQUEST = "now"
# A process that gets a signal to end does so within this time. An error in this time is not the reason for the end.
_ENDING_S = 30.0


class BlackBox:
    """The flight record of this rank and its file, in the folder that `environment` names."""

    def __init__(self, rank: int, num_ranks: int, activity: Activity, environment: Mapping[str, str]):
        self._rank, self._num_ranks, self._activity = rank, num_ranks, activity
        self.folder = flight_files.folder(environment)
        self._asked_at = 0.0
        self._interrupted_at = -_ENDING_S
        self._noted: Mapping[int, View] | None = None
        self._lock = threading.RLock()
        if self.folder is not None:
            self._path = flight_files.path_of(self.folder, rank, environment)
            with contextlib.suppress(OSError):
                self._path.unlink()  # the record of an earlier job
            self._asked_at = self._request_time()

    def note(self, views: Mapping[int, View]) -> None:
        """Notes the activity of this rank, a few times a second. Writes the record if the file `now` is new."""
        self._noted = views
        board = views[self._rank].board
        what, ranks = ("", ()) if board.wait is None else (board.wait.what, board.wait.ranks)
        self._activity.samples.add(board.phase, board.step, board.doing, what, ranks)
        if self.folder is not None and (asked_at := self._request_time()) not in (0.0, self._asked_at):
            self._asked_at = asked_at
            self.write("asked for", views)

    def interrupted(self, signal: str, views: Mapping[int, View]) -> str:
        """Writes the record of a process that somebody ends from outside, perhaps because the job hangs.

        Args:
          views: the views of all ranks, for a process that notes none. Otherwise the last noted views count, because
            the end of a job also lets stopped ranks continue.

        Returns:
          Lines for people: a rank that holds up others, even for a short time, and where the record is. Empty if the
          record has just been written.
        """
        if self.folder is None:
            return ""
        views = self._noted or views
        view = views[self._rank]
        found = verdict.suspect(views, STILL_S)
        why = f"jax-mpmd: {signal} came to rank {self._rank} ({view.where})"
        if view.board.callback:
            why += f", in the host callback {view.board.callback} for {view.still_s:.0f} s"
        if found is not None:
            why = f"jax-mpmd: rank {found[0]}: {found[1]}; then {signal} came"
        elif self._num_ranks > 1:
            why += f"; no rank had held up another one for {STILL_S:.0f} s"
        with self._lock:
            where = self.write(why, views, found and found[0], interrupted=True)
            self._interrupted_at = time.monotonic()
        return where and f"{why}\n{where}"

    def write(
        self, why: str, views: Mapping[int, View], guilty: int | None = None, *, interrupted: bool = False
    ) -> str:
        """Writes the record; returns a line for people that says where. Does nothing where no folder is named, or
        where this process has just got a signal to end.

        Args:
          interrupted: whether somebody ends this process from outside.
        """
        if self.folder is None:
            return ""
        with self._lock, contextlib.suppress(Exception):  # a full disk must not keep a rank from ending
            if time.monotonic() - self._interrupted_at < _ENDING_S:
                return ""
            seen = {r: {**dataclasses.asdict(v), "still_s": v.still_s} for r, v in views.items()}
            programs = [cursor.recorded() for cursor in list(self._activity.cursors)]
            flight_files.write(
                self._path, self._rank, why, programs, self._activity.samples.list(),
                num_ranks=self._num_ranks, guilty=guilty, views=seen, interrupted=interrupted, at=exits.user_lines(),
            )  # fmt: skip
            return f"jax-mpmd: what each rank did last: python -m mpmd replay {shlex.quote(str(self.folder))}"
        return f"jax-mpmd: what this rank did last could not be written to {self.folder}"

    def _request_time(self) -> float:
        assert self.folder is not None
        try:
            return os.stat(self.folder / _REQUEST).st_mtime
        except OSError:
            return 0.0
