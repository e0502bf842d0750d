"""Measured steps: the runs of each group with their times, and its waits."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpmd.observe.records import Moved, Ran, RecordedTimes, Way


@dataclasses.dataclass(frozen=True)
class Spent:
    """The time of a group in a step, in seconds; the parts add up to the step's length."""

    busy: float  # a program ran
    waiting: float  # nothing to do until another group had computed what came next: the bubble
    exposed: float  # the next input was computed, and on its way
    late: float  # everything was there, but the process had not started the program yet


class Waited(NamedTuple):
    """A run of a group, and the group's waits before it: for another group, a transfer, its host, in this order."""

    run: Ran
    free: float  # when the run before had ended
    offered: float  # when another group had computed the last input
    there: float  # when this input was there; the host then let the group wait until the run's start


@dataclasses.dataclass(frozen=True)
class Step:
    """All times of one step, in order."""

    runs: tuple[Ran, ...]  # of all ranks
    moves: tuple[Moved, ...]  # of all ranks
    sent: Mapping[Way, float]  # when the value of each transfer was offered
    num_groups: int  # the number of groups

    @functools.cached_property
    def start(self) -> float:
        """The time of the first dispatch."""
        return min((r.dispatched for r in self.runs), default=0.0)

    @functools.cached_property
    def end(self) -> float:
        """The time of the last result."""
        return max((r.end for r in (*self.runs, *self.moves)), default=0.0)

    @property
    def seconds(self) -> float:
        """The seconds from the start to the end."""
        return self.end - self.start

    @functools.cached_property
    def by_group(self) -> tuple[tuple[Ran, ...], ...]:
        """The runs of each group's slowest rank."""
        found: list[dict[int, list[Ran]]] = [defaultdict(list) for _ in range(self.num_groups)]
        for r in self.runs:
            found[r.group][r.rank].append(r)
        return tuple(tuple(max(ranks.values(), key=_busy, default=())) for ranks in found)

    @functools.cached_property
    def waits(self) -> tuple[tuple[Waited, ...], ...]:
        """The runs of each group, with the waits before each run."""
        return tuple(tuple(self._waits(runs)) for runs in self.by_group)

    def _waits(self, runs: Sequence[Ran]) -> Iterator[Waited]:
        free = self.start
        for r in runs:
            offered = min(max(free, self.sent.get(r.by, free)), r.start) if r.by is not None else free
            yield Waited(r, free, offered, min(max(offered, r.ready), r.start))
            free = r.end

    @functools.cached_property
    def spent(self) -> tuple[Spent, ...]:
        """The time of each group in the step."""
        return tuple(self._spent(waits) for waits in self.waits)

    def _spent(self, waits: Sequence[Waited]) -> Spent:
        if not waits:
            return Spent(0.0, self.seconds, 0.0, 0.0)
        return Spent(
            _busy([w.run for w in waits]),
            sum(w.offered - w.free for w in waits) + self.end - waits[-1].run.end,
            sum(w.there - w.offered for w in waits),
            sum(w.run.start - w.there for w in waits),
        )


def _busy(runs: Sequence[Ran]) -> float:
    return sum(r.end - r.start for r in runs)


def steps_of(rows: RecordedTimes, num_groups: int) -> tuple[Step, ...]:
    """Splits the rows of all processes into steps."""
    numbers = sorted({r.step for r in rows.runs})
    return tuple(
        Step(
            tuple(r for r in rows.runs if r.step == n),
            tuple(m for m in rows.moves if m.step == n),
            {**{m.way: m.start for m in rows.moves if m.step == n}, **{s.way: s.at for s in rows.sends if s.step == n}},
            num_groups,
        )
        for n in numbers
    )
