"""Finds the rank to blame when the others wait: a pure function of what every rank last published.

Every rank publishes a `Board`, reads all of them, and comes to the same verdict. The rank to blame is not a rank that
waits, but the end of the chain: it died, left, stopped, or does not move although others wait for it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpmd.observe.pace import Pace
from scheduler.base import texts

# A rank on another machine that publishes nothing for this long is dead, or its machine cannot be reached.
SILENT_S = 20.0
# A live process that publishes nothing for this long is unable to: its Python threads do not run.
HELD_S = 4.0
# A rank that ended its program this long ago will send nothing to a rank that still waits for it.
LEFT_S = 5.0
# After this time without a movement, a rank publishes more about its activity (callback, line).
STILL_S = 2.0
# A rank that got an error with a value from another rank waits this long for that rank to publish the cause.
SECONDHAND_S = 3.0
# How such an error begins.
SECONDHAND = "Error while transferring"
# Ranks may compile for unequal times before a step's first run, so a rank that compiles has this many times the limit.
COMPILING_FACTOR = 10
# A process that replaces a lost one, and has published nothing yet, has at least this long to start.
STARTING_S = 60.0
_MAX_CELL = 60
# Phases of a rank that has ended.
OVER = ("finished", "failed")


@dataclasses.dataclass(frozen=True)
class Wait:
    """A wait of a rank, and its length in seconds."""

    what: str  # a value, an agreement or an instruction
    ranks: tuple[int, ...]  # the ranks that are waited for; none if this rank's own devices have to compute the value
    for_s: float
    number: int | None = None  # the number of a value, which its sender knows too


@dataclasses.dataclass(frozen=True)
class Board:
    """The state that a rank publishes about itself, four times a second."""

    rank: int
    host: str = ""
    pid: int = 0
    machine: str = ""  # a key that is equal for processes that see each other's pids
    started: int = 0  # the process's start, in the kernel's ticks; distinguishes processes that had the same pid
    phase: str = "idle"  # idle (in the user's code), compiling, agreeing, step, reading, finished, failed
    step: int = 0  # the step that was dispatched last
    position: int = 0  # the instruction in it that was dispatched last
    doing: str = ""  # that instruction in words, or the error of a failed rank
    still_s: float = 0.0  # seconds since anything moved here: an instruction, a value that came or was computed
    wait: Wait | None = None  # the current wait
    sent: tuple[int, ...] = ()  # numbers of values that others wait for although this rank has sent them
    callback: str = ""  # the user's function that JAX has been calling on the host for a while
    raised: str = ""  # the first error of such a function. It may reach other ranks before this one.
    line: str = ""  # the line of the user's code that the main thread has been in for a while: `train.py:62 in load`
    door: str = ""  # the address at which the kernel answers other machines for this process
    stacks: int = -1  # the number of the file for its stacks
    goes_on: bool = False  # the rank is in `mpmd.resilient`, and continues there when others are lost and replaced
    pace: Pace | None = None  # how fast its devices are in `mpmd.resilient`, where slow processes are replaced
    loop_step: int | None = None  # the step that `mpmd.resilient` is in

    def to_json(self) -> dict[str, object]:
        """Returns plain data, for the key-value store."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Board":
        """Returns the board of the data from `to_json`."""
        wait, pace = data.get("wait"), data.get("pace")
        fields = dict(data, sent=tuple(data.get("sent", ())), pace=pace and Pace(pace[0], tuple(pace[1])))
        fields["wait"] = Wait(**wait | {"ranks": tuple(wait["ranks"])}) if wait else None
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class View:
    """A board as another rank sees it.

    Attributes:
      process: the state of the process by its kernel: running, stopped, gone, or unknown (another machine). A live
        process that publishes nothing is held (by C code that has Python's lock), or mute (on another machine: held or
        stopped).
    """

    board: Board
    silent_s: float = 0.0  # seconds since the board last changed
    process: str = "unknown"
    held_s: float = HELD_S  # after so many seconds of silence it is unable to publish

    @property
    def still_s(self) -> float:
        """Seconds since anything moved there, as far as this rank knows."""
        return self.board.still_s + self.silent_s

    @property
    def wait(self) -> Wait | None:
        """The rank's wait, with its length up to now."""
        wait = self.board.wait
        return None if wait is None else dataclasses.replace(wait, for_s=wait.for_s + self.silent_s)

    @property
    def is_old(self) -> bool:
        """Whether the process lives and its board is old: the value that it waited for may have come since."""
        return self.process in ("stopped", "held", "mute")

    @property
    def waits_for_others(self) -> bool:
        """Whether the rank waits for other ranks, and not for its own devices, a host callback, or to be continued."""
        return bool(self.wait is not None and self.wait.ranks) and not self.board.callback and not self.is_old

    @property
    def is_stuck(self) -> bool:
        """Whether the process lives and is itself the cause that it does not move. No rank in a circle of waits is."""
        is_there = self.process != "gone" and self.silent_s < self.held_s
        is_at_work = self.board.phase not in ("finished", "failed", "agreeing")
        return self.is_old or (is_there and is_at_work and not self.waits_for_others)

    @property
    def where(self) -> str:
        """`step 3, in 1F2 in group 1`."""
        b = self.board
        if b.phase == "idle":
            what = "between steps" if not b.step else f"after step {b.step}"
        else:
            what = f"step {b.step}, in {b.doing}" if b.phase == "step" else b.doing or b.phase
        return f"{what}, at {b.line}" if b.line else what


Views = Mapping[int, View]


def diagnose(views: Views, me: int) -> tuple[int, str] | None:
    """Returns the rank that died, failed or left, and how, as rank `me` finds it; None while all are there."""
    return _failed(views) or _dead(views) or _left(views, me)


def suspect(views: Views, hang_timeout_s: float | None) -> tuple[int, str] | None:
    """Returns the rank that seems to hold up others, and how; None while everything moves.

    The boards are from different moments, so a rank can seem to wait for a value that has come since. A result is
    certain only if it is the same after all ranks have published once more.
    """
    if not hang_timeout_s:
        return None
    for rank, v in sorted(views.items()):
        if v.wait is None or not v.wait.ranks or v.wait.for_s < hang_timeout_s:
            continue
        chain, lost = _chain(views, rank)
        guilty, waiting = views[chain[-1]], views[chain[-2]] if len(chain) > 1 else v
        compiles = guilty.board.phase == "compiling" and guilty.process != "stopped"
        limit = hang_timeout_s * (COMPILING_FACTOR if compiles else 1)
        awaited = {r for member in chain if (wait := views[member].wait) is not None for r in wait.ranks}
        if guilty.waits_for_others and not awaited <= views.keys():
            limit = max(limit, STARTING_S)
        if (what := _held_up(guilty, waiting, lost, limit)) is not None:
            return guilty.board.rank, what
    for rank, v in sorted(views.items()):  # others may wait for it without a note of that, in a save for example
        if v.process == "stopped" and v.board.phase not in OVER and v.silent_s >= hang_timeout_s:
            return rank, _what(v)
    return None


def _failed(views: Views) -> tuple[int, str] | None:
    """Returns the first rank with an error of its own, else of a host callback, else (later) a received error."""
    failed = [v for v in views.values() if v.board.phase == "failed"]
    causes = [v for v in failed if SECONDHAND not in v.board.doing]
    raised = [v for v in views.values() if v.board.raised] if failed else []
    if not causes and raised:
        first = min(raised, key=lambda v: v.board.rank)
        return first.board.rank, f"{first.board.raised} ({first.where})"
    causes = causes or [v for v in failed if v.still_s > 2 * SECONDHAND_S]
    if not causes:
        return None
    first = max(causes, key=lambda v: (v.still_s, -v.board.rank))
    return first.board.rank, first.board.doing


def _dead(views: Views) -> tuple[int, str] | None:
    for rank, v in sorted(views.items()):
        if v.board.phase in OVER:
            continue
        if v.process == "gone" and v.silent_s < LEFT_S:
            return rank, f"died: process {v.board.pid} on {v.board.host} is gone ({v.where})"
        # A process that was silent before it went was cut off, and may have ended itself for that reason.
        if v.process == "gone" or (v.process == "unknown" and v.silent_s > SILENT_S):
            return rank, (
                f"no sign of life from {v.board.host} for {v.silent_s:.0f} s: process {v.board.pid} died, or its"
                f" machine cannot be reached ({v.where})"
            )
    return None


def _left(views: Views, me: int) -> tuple[int, str] | None:
    """Returns a rank that left while `me` waits for it. Only the waiting rank decides: its board elsewhere is old."""
    wait = views[me].wait if me in views else None
    if wait is None or wait.for_s < LEFT_S:
        return None
    for other in wait.ranks:
        seen = views.get(other)
        if seen is not None and seen.board.phase == "finished" and seen.still_s > LEFT_S:
            return other, f"left the program after step {seen.board.step}, while rank {me} waits for {wait.what}"
    return None


def _held_up(guilty: View, waiting: View, lost: Wait | None, limit: float) -> str | None:
    """Returns what the guilty rank does while another waits for it; None if it may still come."""
    wait, rank = waiting.wait, waiting.board.rank
    if lost is not None:
        text = f"sent {lost.what}, which did not reach rank {rank} for {lost.for_s:.0f} s ({guilty.where})"
        return text if lost.for_s >= limit else None
    if guilty.still_s >= limit:
        return _what(guilty) + ("" if wait is None or waiting is guilty else f"; rank {rank} waits for {wait.what}")
    if wait is not None and wait.for_s >= limit and guilty.board.step > waiting.board.step + 1:
        here, there = f"went on to step {guilty.board.step}", f"of step {waiting.board.step} for {wait.for_s:.0f} s"
        return f"{here}, while rank {rank} waits for {wait.what} {there}"
    return None  # it moves: a slow step is no hang


def _what(v: View) -> str:
    board, wait = v.board, v.wait
    if v.process == "stopped":
        return f"process {board.pid} on {board.host} is stopped for {v.silent_s:.0f} s ({v.where})"
    if v.process in ("held", "mute"):
        held = f"has held Python's lock for {v.silent_s:.0f} s, in C code"
        before = f", and did not move for {v.still_s:.0f} s" if v.still_s > 2 * v.silent_s else ""
        return f"{held}{' (or is stopped)' * (v.process == 'mute')}{before} ({v.where})"
    if v.silent_s > SILENT_S:
        return f"no sign of life from {board.host} for {v.silent_s:.0f} s ({v.where})"
    if board.phase == "agreeing":
        return f"is at a point where others do not come: {board.doing}, for {v.still_s:.0f} s"
    if board.callback:
        return f"is in the host callback {board.callback} for {v.still_s:.0f} s ({v.where})"
    if wait is not None and not wait.ranks:
        return f"its devices have not computed {wait.what} for {wait.for_s:.0f} s ({v.where})"
    if wait is not None:
        return f"waits in a circle for {wait.what} for {wait.for_s:.0f} s ({v.where})"
    if board.phase == "idle":
        return f"did not come to the next step for {v.still_s:.0f} s ({v.where})"
    return f"no progress for {v.still_s:.0f} s ({v.where})"


def _chain(views: Views, rank: int) -> tuple[list[int], Wait | None]:
    """Follows the waits from a rank to a rank that waits for no other, or into a circle.

    Returns:
      The ranks, and the wait for a value that the last rank has sent to the one before it, if it got lost on the way.
    """
    chain = [rank]
    while views[chain[-1]].waits_for_others:
        wait = views[chain[-1]].wait
        assert wait is not None
        known = [r for r in wait.ranks if r in views]
        if not known:
            break
        free = [r for r in known if not views[r].waits_for_others] or known
        behind = min(free, key=lambda r: (views[r].board.step, views[r].board.position, r))
        if wait.number in views[behind].board.sent and not views[behind].is_old:
            return [*chain, behind], wait
        if behind in chain:
            return [*chain, _odd_one(views)], None
        chain.append(behind)
    return chain, None


def _odd_one(views: Views) -> int:
    """Returns the odd rank of a circle of waits (perhaps through a collective on the devices).

    If only some of them are agreeing on a program, only the smaller part counts. The odd rank is the furthest behind.
    """
    running = {r for r, v in views.items() if v.board.phase not in OVER}
    agreeing = {r for r in running if views[r].board.phase == "agreeing"}
    others = running - agreeing
    some = min((agreeing, others), key=len) if agreeing and others else running

    def progress(rank: int) -> tuple[int, bool, int, int]:
        board = views[rank].board
        return board.step, board.wait is not None, board.position, rank

    return min(some, key=progress)


def table(views: Views, rank: int, what: str) -> str:
    """Returns the report: the guilty rank in the first line, then a row for each rank."""
    head = ("rank", "host", "pid", "step", "at", "waits for", "from", "seconds")
    rows: list[tuple[str, ...]] = [head]
    for r, v in sorted(views.items()):
        b, wait = v.board, v.wait
        at = v.process if v.is_old or (v.process == "gone" and r == rank) else b.phase
        doing = f"{at}: {b.doing}" if b.doing and b.phase != "idle" else at
        doing = doing if len(doing) <= _MAX_CELL else doing[: _MAX_CELL - 1] + "…"
        who = "" if wait is None else ",".join(map(str, wait.ranks))
        seconds = f"{wait.for_s:.1f}" if wait is not None else f"{v.still_s:.1f}"
        rows.append((str(r), b.host, str(b.pid), str(b.step), doing, wait.what if wait else "", who, seconds))
    lines = texts.table(rows, "<" * len(head))
    return "\n".join([f"jax-mpmd: rank {rank}: {what}", *(f"  {line}" for line in lines)])
