"""Writes the flight record of this rank when the job ends badly, or when somebody asks for it."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from mpmd.job.activity import Activity
from mpmd.job.verdict import View
from mpmd.observe import flight_files

# A file of this name in the folder asks all ranks to write their records now; they go on.
_REQUEST = "now"


class BlackBox:
    """What is written of this rank, and where.

    Args:
      environment: names the folder.
    """

    def __init__(self, rank: int, num_ranks: int, activity: Activity, environment: Mapping[str, str]):
        self._rank, self._num_ranks, self._activity = rank, num_ranks, activity
        self.folder = flight_files.folder(environment)
        self._asked_at = 0.0
        if self.folder is not None:
            self._path = flight_files.path_of(self.folder, rank, environment)
            flight_files.remove_old(self._path)
            self._asked_at = self._request_time()

    def note(self, views: Mapping[int, View]) -> None:
        """Notes what this rank is at, a few times a second. Writes the record if the file that asks for it is new."""
        board = views[self._rank].board
        what, ranks = ("", ()) if board.wait is None else (board.wait.what, board.wait.ranks)
        self._activity.samples.add(board.phase, board.step, board.doing, what, ranks)
        if self.folder is not None and (asked_at := self._request_time()) > self._asked_at:
            self._asked_at = asked_at
            self.write("asked for", views)

    def write(self, why: str, views: Mapping[int, View], guilty: int | None = None) -> str:
        """Writes the record; returns a line for people that says where. Nothing where no folder is named.

        Args:
          why: the verdict.
          views: what all ranks say.
          guilty: the rank to blame, if it is known.
        """
        if self.folder is None:
            return ""
        with contextlib.suppress(Exception):  # a full disk must not keep a rank from ending
            seen = {r: {**dataclasses.asdict(v), "still_s": v.still_s} for r, v in views.items()}
            programs = [cursor.recorded() for cursor in list(self._activity.cursors)]
            flight_files.write(
                self._path, self._rank, why, programs, self._activity.samples.list(),
                num_ranks=self._num_ranks, guilty=guilty, views=seen, pending=self._pending(),
            )  # fmt: skip
            return f"jax-mpmd: what each rank did last: python -m mpmd replay {self.folder}"
        return f"jax-mpmd: what this rank did last could not be written to {self.folder}"

    def _pending(self) -> list[dict[str, Any]]:
        """Values that have not come, and that were promised and are not computed."""
        return [{"what": mark.what, "ranks": list(mark.ranks)} for mark in self._activity.expected.pending()]

    def _request_time(self) -> float:
        assert self.folder is not None
        try:
            return os.stat(self.folder / _REQUEST).st_mtime
        except OSError:
            return 0.0
