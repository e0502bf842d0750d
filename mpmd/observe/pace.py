"""Finds a straggler: a process with devices that compute for much longer than before, while the others' do not.

A sample is the seconds in which a process's own devices compute in a call of a step (`accounts.py` measures them), so a
process that waits for a slow one is not slow itself. Groups differ in their work, so each process compares itself with
its own past. Its *usual* time is the median of earlier samples of the same work: the same program, with the same number
of microbatches of each shape. A ratio is a sample divided by its usual time. The work itself may grow in all processes.
So a process is slow if each of its last ratios is at least K, and at least K times the others' ratio (the median over
the others of their median ratio).
"""

import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from scheduler.base.bounded import BoundedDict

# The environment variable for K; the launcher sets it to the value of --replace-slow.
VARIABLE = "MPMD_REPLACE_SLOW"
EVERY = 4  # one in this many calls of a program in the loop is measured
_NUM_LAST, _LEAST_EARLIER, _MOST_EARLIER = 3, 5, 100
_MOST_WORKS = 1024  # kinds of work with kept samples; four shapes in lists of 16 microbatches make 969


class Pace(NamedTuple):
    """How fast a process is at the moment."""

    usual_s: float  # the seconds that its devices usually compute in a call like the last one
    ratios: tuple[float, ...]  # each of the last samples, as a multiple of the usual time for its work


class History:
    """The samples of one program in one process."""

    def __init__(self):
        self._earlier: BoundedDict[Hashable, deque[float]] = BoundedDict(_MOST_WORKS)
        self._last: deque[tuple[Hashable, float]] = deque()

    def add(self, work: Hashable, seconds: float) -> Pace | None:
        """Adds a sample of this work. Returns None while there are too few earlier samples like the last ones."""
        self._last.append((work, seconds))
        if len(self._last) > _NUM_LAST:
            before, sample = self._last.popleft()
            samples = self._earlier.pop(before, None) or deque(maxlen=_MOST_EARLIER)
            samples.append(sample)
            self._earlier[before] = samples  # moves it to the end: the work that is oldest is forgotten first
        usual = [self._usual_s(one) for one, _ in self._last]
        if len(usual) < _NUM_LAST or not all(usual):
            return None
        return Pace(usual[-1], tuple(s / by for (_, s), by in zip(self._last, usual, strict=True)))

    def _usual_s(self, work: Hashable) -> float:
        earlier = self._earlier.get(work, ())
        return statistics.median(earlier) if len(earlier) >= _LEAST_EARLIER else 0.0


def straggler(paces: Mapping[int, Pace], factor: float) -> tuple[int, str] | None:
    """Returns the slowest process and its time in words, if it is slow and the others are not. `paces` are the known
    ones by rank, a single one of which cannot be compared; `factor` is K, above 1.
    """
    if len(paces) < 2:
        return None
    rank, slowest = max(paces.items(), key=lambda item: (min(item[1].ratios), -item[0]))
    others = statistics.median(statistics.median(p.ratios) for r, p in paces.items() if r != rank)
    if min(slowest.ratios) < factor * max(1.0, others):
        return None
    times, steps = statistics.median(slowest.ratios), len(slowest.ratios)
    usual = f"{slowest.usual_s:.2g} s a step ({steps} measured steps, others {others:.1f})"
    return rank, f"takes {times:.1f} times its usual {usual}"
