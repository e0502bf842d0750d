"""The measured times of a step in one process: when it started each program and transfer, and when the result came."""

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from scheduler import Task


class Way(NamedTuple):
    """A value on its way from one group to another."""

    value: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.value} from group {self.source} to {self.target}"


class Ran(NamedTuple):
    """A program that ran. Times are in seconds, on the clock of the job."""

    step: int
    rank: int
    group: int
    name: str  # the name of the program
    tasks: tuple[Task, ...]  # the tasks of a loop in it; none for other work
    loop: int
    dispatched: float  # when the process began the dispatch
    returned: float  # when it ended the dispatch
    start: float  # when the devices could begin: all inputs were there, and the program before had ended
    end: float
    ready: float  # when its last input was there
    by: Way | None  # the transfer that brought this input, if one did

    @property
    def title(self) -> str:
        """The tasks, or the program's name."""
        return "+".join(map(str, self.tasks)) or self.name


class Moved(NamedTuple):
    """A value that came to a group."""

    step: int
    rank: int
    way: Way
    nbytes: int
    dispatched: float
    start: float  # when the sender had it and this process asked for it
    end: float
    microbatch: int | None  # its microbatch; None outside of loops


class Sent(NamedTuple):
    """A value that left for a group of other processes."""

    step: int
    rank: int
    way: Way
    at: float  # when it was computed and offered


class RecordedTimes(NamedTuple):
    """The times that one process noted."""

    runs: tuple[Ran, ...] = ()
    moves: tuple[Moved, ...] = ()
    sends: tuple[Sent, ...] = ()

    def shifted(self, seconds: float) -> "RecordedTimes":
        """Returns the same times on another clock."""

        def later(rows: Sequence[Any], *times: str) -> tuple[Any, ...]:
            return tuple(row._replace(**{name: getattr(row, name) + seconds for name in times}) for row in rows)

        return RecordedTimes(
            later(self.runs, "dispatched", "returned", "start", "end", "ready"),
            later(self.moves, "dispatched", "start", "end"),
            later(self.sends, "at"),
        )

    def as_text(self) -> str:
        """Returns the times as packed text, for other processes."""
        return base64.b85encode(zlib.compress(json.dumps(self).encode(), 1)).decode()

    @classmethod
    def of_text(cls, text: str) -> "RecordedTimes":
        """Returns the times in a text from `as_text`."""
        runs, moves, sends = json.loads(zlib.decompress(base64.b85decode(text)))
        ran = (Ran(*row) for row in runs)
        moved, sent = (Moved(*row) for row in moves), (Sent(*row) for row in sends)
        return cls(
            tuple(r._replace(tasks=tuple(Task(*t) for t in r.tasks), by=r.by and Way(*r.by)) for r in ran),
            tuple(m._replace(way=Way(*m.way)) for m in moved),
            tuple(s._replace(way=Way(*s.way)) for s in sent),
        )


def joined(parts: Sequence[RecordedTimes]) -> RecordedTimes:
    """Joins the rows of all processes, ordered by time.

    Threads note times a little late. So the start of a transfer is moved to the time at which its value was sent, if
    that is later, and the time at which a value was sent to the time at which it came, if that is earlier.
    """
    sends: dict[tuple[int, Way], float] = {}
    for s in (s for part in parts for s in part.sends):
        key = s.step, s.way
        sends[key] = max(s.at, sends.get(key, s.at))
    moves = []
    for m in (m for part in parts for m in part.moves):
        at = sends.get((m.step, m.way), m.start)
        moves.append(m._replace(start=min(max(m.start, at), m.end)))
    came = {(m.step, m.way): m.end for m in moves}
    left = [s._replace(at=min(s.at, came.get((s.step, s.way), s.at))) for part in parts for s in part.sends]
    runs = [r for part in parts for r in part.runs]
    return RecordedTimes(_by(runs, "start"), _by(moves, "start"), _by(left, "at"))


def _by(rows: Iterable, name: str) -> tuple:
    return tuple(sorted(rows, key=lambda row: getattr(row, name)))
