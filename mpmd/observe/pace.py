"""Finds a straggler: a process whose devices compute for much longer than they did, while those of the others do not.

What is compared are the seconds in which a process's own devices compute in a call of a step (`accounts.py` measures
them), so a process that waits for a slow one is not slow itself. Groups differ in their work, so each process compares
itself with its own past: what is *usual* is the median of the earlier samples of as much work: of the same program, and
where microbatches have several shapes, of as many of each. The work itself may grow, for all alike. So a process is
slow if each of its last samples took K times its usual, and K times as much more as the others take (by the median over
these of the median of the last samples of each).
"""

import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from scheduler.base.bounded import BoundedDict

# The environment's name of K; the launcher sets it to that of --replace-slow.
VARIABLE = "MPMD_REPLACE_SLOW"
EVERY = 4  # of the calls of a program in the loop, one in so many is measured
_NUM_LAST, _LEAST_EARLIER, _MOST_EARLIER = 3, 5, 100
_MOST_WORKS = 1024  # with samples; four shapes in lists of 16 microbatches make 969


class Pace(NamedTuple):
    """How fast a process is at the moment.

    Attributes:
      usual_s: what its devices usually compute in a call like the last one.
      ratios: what each of the last samples took, as a multiple of what is usual for it.
    """

    usual_s: float
    ratios: tuple[float, ...]


class History:
    """The samples of one program in one process."""

    def __init__(self):
        self._earlier: BoundedDict[Hashable, deque[float]] = BoundedDict(_MOST_WORKS)
        self._last: deque[tuple[Hashable, float]] = deque()

    def add(self, work: Hashable, seconds: float) -> Pace | None:
        """One more sample, of this work; None while there are too few of that of the last ones."""
        self._last.append((work, seconds))
        if len(self._last) > _NUM_LAST:
            before, sample = self._last.popleft()
            samples = self._earlier.pop(before, None) or deque(maxlen=_MOST_EARLIER)
            samples.append(sample)
            self._earlier[before] = samples  # behind the others: what has not come for long is forgotten
        usual = [self._usual_s(one) for one, _ in self._last]
        if len(usual) < _NUM_LAST or not all(usual):
            return None
        return Pace(usual[-1], tuple(s / by for (_, s), by in zip(self._last, usual, strict=True)))

    def _usual_s(self, work: Hashable) -> float:
        earlier = self._earlier.get(work, ())
        return statistics.median(earlier) if len(earlier) >= _LEAST_EARLIER else 0.0


def straggler(paces: Mapping[int, Pace], factor: float) -> tuple[int, str] | None:
    """The slowest process and what it takes, if it is slow and the others are not.

    Args:
      paces: of all processes that have said theirs, by rank. Where only one has, there is nothing to compare it with.
      factor: K, above 1.
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
