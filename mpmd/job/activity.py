"""Keeps what this process is doing: phase, instruction, whom it waits for, the user's callback.

The main thread sets it; the watchdog's threads publish it as a `Board`.
"""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax

from mpmd.job import exits, processes
from mpmd.job.expected import Awaited, Expected, Times
from mpmd.job.verdict import STILL_S, Board, Wait
from mpmd.observe.flight import Flight, Samples
from mpmd.observe.pace import Pace


class Cursor(Protocol):
    """The position of the executor, which the watchdog reads from its own thread."""

    flight: Flight

    def recorded(self) -> dict[str, object]:
        """Returns the data of this executor for the flight record."""
        ...

    @property
    def position(self) -> int:
        """The instruction that began last."""
        ...

    def text(self, position: int) -> str:
        """Returns an instruction in words."""
        ...

    def peers(self, position: int) -> tuple[int, ...]:
        """Returns the other ranks of the group that runs an instruction."""
        ...


class _Said(NamedTuple):
    """A phase, the work in it, and the ranks that it waits for."""

    phase: str
    doing: str = ""
    ranks: tuple[int, ...] = ()


class Activity:
    """The current activity of this process. `door` and `stacks` are fields of its `Board`."""

    def __init__(self, rank: int, door: str = "", stacks: int = -1):
        self._process = {
            "rank": rank, "host": socket.gethostname(), "pid": os.getpid(),
            "machine": processes.machine(), "started": processes.started(os.getpid()),
            "door": door, "stacks": stacks,
        }  # fmt: skip
        self._said = _Said("idle")
        self.step = 0  # how many steps have begun here
        self._cursor: Cursor | None = None
        self._last_position = -1
        self._times = Times()
        self._line = "", 0.0  # and the time of the look-up
        self.expected = Expected(self._times)  # the values that the process waits for, or has promised
        self.callbacks = Callbacks()
        self.cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()  # executors that have run a step, while they live
        self.samples = Samples()
        self.goes_on = False  # the process is in `mpmd.resilient`, and goes on there when others are lost and replaced
        self.loop_step: int | None = None  # the step that `mpmd.resilient` is in, or that ended it with an error
        self.has_pace = False  # whether calls are measured for `pace`
        self.pace: Pace | None = None  # how fast the devices are; None if that is not known

    @contextlib.contextmanager
    def during(self, phase: str, doing: str, waits_for: Sequence[int] = ()) -> Iterator[None]:
        """Marks a stretch of work other than a step; with ranks, a wait for them."""
        before = self._said
        self.say(phase, doing, waits_for)
        try:
            yield
        finally:
            self.say(*before)

    def waits_for(self, ranks: Sequence[int]) -> None:
        """Narrows the current wait down to `ranks`, which have not come yet."""
        self._said = self._said._replace(ranks=tuple(ranks))

    def say(self, phase: str, doing: str = "", ranks: Sequence[int] = ()) -> None:
        """Begins a phase."""
        self._said = _Said(phase, doing, tuple(ranks))
        self._times.move()

    def fail(self, what: str) -> None:
        """Notes that this process cannot go on. That does not count as a movement."""
        self._cursor = None
        self._said = self._said._replace(phase="failed", doing=what)

    def enter_step(self, cursor: Cursor) -> None:
        """Begins a step. The watchdog reads `cursor` until `leave_step`."""
        self.step += 1
        self._last_position = -1
        cursor.flight.begin(self.step)
        self.cursors.add(cursor)
        self._cursor = cursor
        self.say("step")

    def leave_step(self) -> None:
        """Ends a step: all of its instructions have been dispatched, or it has failed."""
        if self._cursor is not None:
            self._cursor.flight.end()
        self._cursor = None
        self.say("idle")

    def expect(self, array: jax.Array, what: str, ranks: tuple[int, ...], number: int | None = None) -> None:
        """Adds an array that will come from `ranks`, or (without ranks) was promised to another rank.

        Both ends know its number, so a value that was sent and did not arrive is found.
        """
        self.expected.add(Awaited(array, what, ranks, number))

    def board(self, others: Iterable[Board] = ()) -> Board:
        """Returns the board of this rank as of now; `others` are the last boards of the other ranks."""
        now, said, cursor = time.monotonic(), self._said, self._cursor
        doing, position, number = said.doing, 0, None
        self.expected.prune()
        wait = (doing, said.ranks) if said.ranks else None
        if wait is None and (awaited := self.expected.oldest()) is not None:
            wait, number = (awaited.what, awaited.ranks), awaited.number
        if cursor is not None:
            position = cursor.position
            doing = cursor.text(position)
            if position != self._last_position:
                self._last_position, self._times.moved = position, now
                if not self.expected:
                    self._times.waits_since = now
            if wait is None and (peers := cursor.peers(position)):
                wait = doing, peers
        still_s = max(0.0, now - self._times.moved)
        return Board(
            **self._process, phase=said.phase, step=self.step, position=position, doing=doing, still_s=still_s,
            wait=None if wait is None else Wait(*wait, max(0.0, now - self._times.waits_since), number),
            sent=self._sent_in_vain(others),
            callback=self.callbacks.running() if still_s > STILL_S else "", raised=self.callbacks.raised,
            line=self._user_line(now) if still_s > STILL_S else "", goes_on=self.goes_on, pace=self.pace,
            loop_step=self.loop_step,
        )  # fmt: skip

    def _user_line(self, now: float) -> str:
        """Returns the user's line that the main thread is in. The look-up takes a millisecond, so once a second."""
        if now - self._line[1] > 1.0:
            self._line = exits.main_line(), now
        return self._line[0]

    def _sent_in_vain(self, others: Iterable[Board]) -> tuple[int, ...]:
        """Returns the numbers of values that others have been waiting for although this rank has sent them."""
        rank = self._process["rank"]
        waits = [board.wait for board in others if board.wait is not None]
        return self.expected.sent_among(
            {w.number for w in waits if w.number is not None and rank in w.ranks and w.for_s > STILL_S}
        )


class Callbacks:
    """The user's functions that JAX calls on the host, in any thread."""

    def __init__(self):
        self.raised = ""  # the first error of such a function, empty if none. It may reach other ranks before this one.
        self._running: dict[int, str] = {}

    def running(self) -> str:
        """Returns a function that is running; empty if none is."""
        return next(iter(list(self._running.values())), "")

    @contextlib.contextmanager
    def calling(self, function: Callable) -> Iterator[None]:
        """Notes the function while a program calls it."""
        thread, text = threading.get_ident(), exits.function_text(function)
        self._running[thread] = text
        try:
            yield
        except BaseException as e:
            self.raised = self.raised or f"{exits.error_text(e)} in the host callback {text}"
            raise
        finally:
            self._running.pop(thread, None)
