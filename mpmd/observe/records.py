"""What a process notes of a step: when it started each program and transfer, and when the result was there."""

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
    """A program that ran. Times are in seconds, on the clock of the job.

    Attributes:
      name: of the program.
      tasks: of a loop, that it computed; none of other work.
      dispatched, returned: when the process began to start it, and when that was done.
      start: when the devices could begin: all inputs were there, and the program before had ended.
      ready: when its last input was there.
      by: the transfer that brought this input, if one did.
    """

    step: int
    rank: int
    group: int
    name: str
    tasks: tuple[Task, ...]
    loop: int
    dispatched: float
    returned: float
    start: float
    end: float
    ready: float
    by: Way | None

    @property
    def title(self) -> str:
        """Its tasks, or the program's name."""
        return "+".join(map(str, self.tasks)) or self.name


class Moved(NamedTuple):
    """A value that came to a group.

    Attributes:
      start: when the sender had it and this process asked for it.
      is_in_loop: whether it is a microbatch's.
    """

    step: int
    rank: int
    way: Way
    nbytes: int
    dispatched: float
    start: float
    end: float
    is_in_loop: bool


class Sent(NamedTuple):
    """A value that left for a group of other processes.

    Attributes:
      at: when it was computed and on offer.
    """

    step: int
    rank: int
    way: Way
    at: float


class Rows(NamedTuple):
    """What one process noted."""

    runs: tuple[Ran, ...] = ()
    moves: tuple[Moved, ...] = ()
    sends: tuple[Sent, ...] = ()

    def shifted(self, seconds: float) -> "Rows":
        """The same on another clock."""
        return Rows(
            tuple(
                r._replace(
                    dispatched=r.dispatched + seconds, returned=r.returned + seconds, start=r.start + seconds,
                    end=r.end + seconds, ready=r.ready + seconds,
                )
                for r in self.runs
            ),
            tuple(
                m._replace(dispatched=m.dispatched + seconds, start=m.start + seconds, end=m.end + seconds)
                for m in self.moves
            ),
            tuple(s._replace(at=s.at + seconds) for s in self.sends),
        )  # fmt: skip

    def as_text(self) -> str:
        """Packed, to be sent to other processes."""
        return base64.b85encode(zlib.compress(json.dumps(self).encode(), 1)).decode()

    @classmethod
    def of_text(cls, text: str) -> "Rows":
        """The inverse of `as_text`."""
        runs, moves, sends = json.loads(zlib.decompress(base64.b85decode(text)))
        return cls(tuple(map(_read_ran, runs)), tuple(map(_read_moved, moves)), tuple(map(_read_sent, sends)))


def _read_ran(row: list[Any]) -> Ran:
    step, rank, group, name, tasks, loop, dispatched, returned, start, end, ready, by = row
    way = None if by is None else Way(*by)
    found = tuple(Task(*t) for t in tasks)
    return Ran(step, rank, group, name, found, loop, dispatched, returned, start, end, ready, way)


def _read_moved(row: list[Any]) -> Moved:
    step, rank, way, *rest = row
    return Moved(step, rank, Way(*way), *rest)


def _read_sent(row: list[Any]) -> Sent:
    step, rank, way, at = row
    return Sent(step, rank, Way(*way), at)


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all processes in one, ordered by time.

    A transfer starts no sooner than its value was sent, and a value was sent no later than it came: threads note either
    a little late.
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
    return Rows(_by(runs, "start"), _by(moves, "start"), _by(left, "at"))


def _by(rows: Iterable, name: str) -> tuple:
    return tuple(sorted(rows, key=lambda row: getattr(row, name)))
