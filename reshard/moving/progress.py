"""Counts the bytes that a reshard really moves, and reports its progress to the caller."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from reshard.moving.plan import ReshardPlan
from scheduler.base.texts import bar


@dataclasses.dataclass
class Stats:
    """Statistics of a reshard, counted where the bytes are moved."""

    bytes_moved: int = 0
    bytes_copied_on_device: int = 0
    num_transfers: int = 0
    num_rounds: int = 0
    peak_working_bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a reshard; bytes count everything that is copied, on one device or between two."""

    bytes_done: int
    bytes_total: int
    arrays_done: int
    arrays_total: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes_done / max(self.seconds, 1e-9) / 2**30
        how_far = bar(self.bytes_done, self.bytes_total)
        return f"reshard {how_far}  {self.arrays_done}/{self.arrays_total} arrays  {rate:.1f} GiB/s"


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Counts the bytes that are moved and reports the progress to the caller."""

    def __init__(self, plan: ReshardPlan, callback: ProgressCallback | None):
        self.stats = Stats(num_rounds=len(plan.rounds))
        self.arrays_done = 0  # how many arrays are complete
        self.bytes_done = 0  # how many bytes have been moved or copied
        self._plan = plan
        self._callback = callback
        kept = sum(a.route.target.boxes[t].size * a.unit_bytes for a in plan.arrays for _, t in a.route.kept)
        self._bytes_total = plan.traffic.moved + plan.traffic.stays - kept
        self._start = time.perf_counter()

    def received(self, nbytes: int, on_same_device: bool) -> None:
        """Counts one piece that this process has received."""
        if on_same_device:
            self.stats.bytes_copied_on_device += nbytes
        else:
            self.stats.bytes_moved += nbytes
            self.stats.num_transfers += 1

    def report(self) -> None:
        """Calls the caller's function."""
        if self._callback is None:
            return
        arrays_total = len(self._plan.arrays)
        self._callback(Progress(self.bytes_done, self._bytes_total, self.arrays_done, arrays_total, self._seconds()))

    def finish(self) -> None:
        """Reports that all arrays are complete."""
        self.stats.seconds = self._seconds()
        self.arrays_done = len(self._plan.arrays)
        self.report()

    def _seconds(self) -> float:
        return time.perf_counter() - self._start


def how_far(reports: Sequence[Any], doing: str) -> tuple[str, float]:
    """Returns the progress for `waiting`: the last report of a copy, and the share of its bytes that is done."""
    if not reports:
        return doing, 0.0
    return str(reports[-1]), reports[-1].bytes_done / max(1, reports[-1].bytes_total)
