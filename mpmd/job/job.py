"""The processes of one job, as one of them sees them: agreements, numbers and the wire between them."""

import atexit
import contextlib
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import HangError, RankLostError
from mpmd.job import wires
from mpmd.job.activity import Activity
from mpmd.job.black_box import BlackBox
from mpmd.job.boards import Boards
from mpmd.job.calls import Calls
from mpmd.job.judge import Judge
from mpmd.job.notes import Note
from mpmd.job.signs import Door, offer_stacks
from mpmd.job.spares import SPARE, UNFIT, Register, Taken
from mpmd.job.verdict import Board
from mpmd.job.watchdog import Watchdog

# An agreement is asked for in slices of this length, so that the main thread stays interruptible.
_SLICE_MS = 1000
# Where others take the places of lost ranks: so that the loss of a process is heard of soon.
_SHORT_SLICE_MS = 100
# So long after an error that may come of a loss, the launcher has said that a process was lost.
_HEARD_S = 5.0


class Job:
    """The processes that run together, as this one sees them.

    Attributes:
      rank, num_ranks: this process, and how many there are.
      store: the key-value store that they share.
      hang_timeout_s: as of `initialize`.
      activity: what this process is at, for the watchdog.
      watchdog: ends the process when the job cannot go on.
      calls: what this process calls, compared with what the others call.
      address: the interface that other processes reach this one by.
      end_process: in `mpmd.resilient`, ends the process of a rank on whatever host.
      wait_until_kept: in `mpmd.resilient`, waits until one more state is whole in memory; False if none will be.
      replaces: whether others take the places of lost ranks.
      epoch: how many ranks have been lost and replaced, as far as this process goes on from there; -1 in the place of
        a lost rank, until it meets the others in `mpmd.resilient`.
    """

    def __init__(
        self,
        store: compat.KeyValueStore,
        hang_timeout_s: float | None,
        environment: Mapping[str, str],
        slow_factor: float | None = None,
    ):
        self.rank, self.num_ranks = jax.process_index(), jax.process_count()
        self.store, self.hang_timeout_s = store, hang_timeout_s
        coordinator = environment.get("MPMD_COORDINATOR") or compat.coordinator_address() or ""
        self.address = "127.0.0.1" if environment.get("MPMD_LOCAL_ONLY") == "1" else _address_towards(coordinator)
        serves = self.rank == 0 and environment.get("MPMD_SERVICE") != "external"
        door = Door(None if environment.get("MPMD_LOCAL_ONLY") == "1" else self.address)
        self.activity = Activity(self.rank, door.address, offer_stacks())
        self._register = Register(environment)
        self.replaces = self._register.replaces
        is_spare = SPARE in environment
        self._taken = self._register.read() if is_spare else []
        number = int(environment[SPARE]) if is_spare else self.rank
        status_dir = environment.get("MPMD_STATUS_DIR")
        boards = Boards(self.rank, self.num_ranks, self.activity, store, status_dir, number, self._taken)
        judge = Judge(boards, hang_timeout_s, serves, slow_factor)
        self._slow_factor = slow_factor
        black_box = BlackBox(self.rank, self.num_ranks, self.activity, environment)
        self.epoch = -1 if is_spare else 0
        self._is_bound = False
        self.end_process: Callable[[Board, int], None] | None = None
        self.wait_until_kept: Callable[[], bool] | None = None
        losses, make_way = (self._hear_of_losses, self._make_way) if self.replaces else (None, None)
        self.watchdog = Watchdog(
            self.num_ranks, self.activity, boards, judge, black_box, door, serves, losses, make_way
        )
        self.calls = Calls(self.rank, self.num_ranks, store, self.activity, self.watchdog.end, self.check)
        if self.is_apart:
            compat.forget_collectives()
        self.calls.is_apart = self.is_apart
        self._exchanges: dict[tuple[int, ...], tuple[int, str]] = {}  # how many there were, where the last one lies
        self._wire: wires.Wire | None = None
        self.watchdog.start()
        hardware = wires.hardware() if compat.has_cross_host_put() else ""
        store.key_value_set(f"mpmd/devices/{self.rank}", hardware, allow_overwrite=True)
        atexit.register(self.watchdog.finish, self.calls)

    def exchange(
        self, what: str, text: str, ranks: Sequence[int], about: str = "", call: Note | None = None
    ) -> dict[int, str]:
        """What each of `ranks` says here; returns when all have said it. Calls come in the same order in all of them.

        Args:
          what: what it is for, the same in all ranks.
          about: more of that, for the report when a rank does not come.
          call: the user's call that it is done for, where that says more to who came to something else.
          text: what this rank says.
          ranks: those that take part, this one among them.
        """
        ranks = tuple(sorted(ranks))
        if self.is_apart:
            return dict.fromkeys(ranks, text)
        self.check()
        self.calls.note(ranks, call or Note(f"came to {what}", step=self.activity.step))
        count, before = self._exchanges.get(ranks, (0, ""))
        folder = f"mpmd/exchange/{zlib.crc32(repr(ranks).encode()):08x}/"
        if self.epoch:
            folder += f"after {self.epoch}/"
        folder += f"{count}/{zlib.crc32(what.encode()):08x}"  # who comes to something else is not understood
        self._exchanges[ranks] = count + 1, folder
        self.store.key_value_set(f"{folder}/{self.rank}", text, allow_overwrite=True)
        said = {self.rank: text}
        missing = [r for r in ranks if r != self.rank]
        with self.activity.during("agreeing", what + about, missing):
            while missing:
                if (answer := self._answer(f"{folder}/{missing[0]}", what)) is not None:
                    said[missing.pop(0)] = answer
                self.calls.check()
                self.check()
                self.activity.waits_for(missing)
        if before:  # all have come this far, so nobody reads the one before any more
            self.store.key_value_delete(f"{before}/{self.rank}")
        return dict(sorted(said.items()))

    def find(self, key: str, what: str, rank: int) -> str:
        """What a rank publishes once under a key of the store; waits for it.

        Args:
          what: what is done meanwhile, for the report when it does not come.
        """
        with self.activity.during("agreeing", f"{what} of rank {rank}", [rank]):
            while (answer := self._answer(key, what)) is None:
                self.check()
            return answer

    def _answer(self, key: str, what: str) -> str | None:
        """What stands under a key of the store; None if it does not come soon. Any other error is the end."""
        slice_ms = _SHORT_SLICE_MS if self.replaces else _SLICE_MS
        try:
            return self.store.blocking_key_value_get(key, slice_ms)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE" not in str(e):
                raise HangError(f"mpmd: lost the coordination service while {what}: {e}") from None
            return None

    def new_number(
        self, ranks: Sequence[int], what: str, about: str = "", call: Note | None = None, *, is_brief: bool = False
    ) -> int:
        """A number that all of `ranks` get alike and that no other call gets.

        Args:
          what, about, call: as of `exchange`.
          is_brief: it is done with when the call returns. After half a million such calls it comes again.
        """
        if self.is_apart:
            return 0
        lowest, counter = min(ranks), "mpmd/brief numbers" if is_brief else "mpmd/numbers"
        mine = str(self.store.key_value_increment(counter, 1)) if self.rank == lowest else ""
        number = int(self.exchange(what, mine, ranks, about, call)[lowest])
        return number % wires.NUM_NUMBERS + wires.NUM_NUMBERS if is_brief else number

    @property
    def wire(self) -> wires.Wire:
        """The transport between processes, opened at its first use."""
        self.check()
        if self._wire is None:
            self._wire = wires.NoWire(self) if self.is_apart else wires.wire_class(self)(self)
        return self._wire

    # --- the loss of ranks, where others take their places ----------------------------------------------------

    @property
    def is_apart(self) -> bool:
        """Whether this process is a spare that has taken a place and has not met the others yet.

        It then does alone what all have done together before `mpmd.resilient`. What it would say it takes for what
        all have said, and what others would send it gets as arrays that cannot be read: the state that the others
        have kept replaces them, and whatever else depends on them raises.
        """
        return self.epoch < 0

    @property
    def lost(self) -> list[Taken]:
        """The ranks that were lost since this process has gone on the last time, and who takes their places."""
        return self._taken[max(0, self.epoch) :]

    def check(self) -> None:
        """Raises where a rank was lost.

        Raises:
          RankLostError: one was.
        """
        if self.epoch >= 0 and len(self._taken) > self.epoch:
            raise RankLostError(f"mpmd: rank {self._taken[-1].rank} was lost, and a spare takes its place")

    def has_lost(self, error: BaseException) -> bool:
        """Whether an error came of the loss of a rank whose place is taken; waits until that may be known."""
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
            causes.append(cause)
        # An OSError is what a save makes of a loss, and what it tells the other processes of it.
        may_be = any(isinstance(e, (jax.errors.JaxRuntimeError, HangError, OSError)) for e in causes)
        end = time.monotonic() + (_HEARD_S if may_be and self.activity.goes_on else 0.0)
        while not self.lost and time.monotonic() < end:
            time.sleep(0.02)
        return bool(self.lost)

    def go_on(self) -> None:
        """Begins again with those that have taken places: agreements and connections are made anew."""
        if not self.replaces:
            return
        self.epoch = len(self._taken)
        self._wire, self._exchanges = None, {}
        self.activity.expected.forget()
        self.activity.say("idle")
        self.calls.begin_again(self.epoch)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Around what can go on after a loss."""
        if self.is_apart:
            self.go_on()
        self.activity.goes_on = self.replaces and not (self._is_bound or compat.has_cross_host_put())
        self.activity.has_pace = self._slow_factor is not None
        try:
            yield
        finally:
            self.activity.goes_on = self.activity.has_pace = False
            self.activity.pace = None

    def bind(self) -> None:
        """From now on nobody can take the place of a lost process: all do together what it could not do alone."""
        self._is_bound, self.activity.goes_on = True, False

    @property
    def may_be_replaced(self) -> bool:
        """Whether a spare with other devices can take the place of this process, and the others go on."""
        return self.activity.goes_on and self._register.num_left > 0

    def _make_way(self, board: Board, what: str, is_slow: bool) -> bool:
        """Ends the process of a rank that holds up the others, for a spare to take its place; if there is one.

        A slow one does so when one more state is whole in memory: only the step that has begun then comes again.

        Returns:
          False if it is to be tried again.
        """
        text, end, wait = f"jax-mpmd: rank {board.rank}: {what}", self.end_process, self.wait_until_kept
        if end is None or wait is None or not self.activity.goes_on:
            return False
        if is_slow and not self.may_be_replaced:
            print(f"{text}; no spare can take its place", file=sys.stderr, flush=True)
            return True
        if is_slow and not wait():
            return False
        print(f"{text}; it is killed, to be replaced", file=sys.stderr, flush=True)
        try:
            end(board, UNFIT if is_slow else signal.SIGKILL)
        except OSError as error:
            print(f"jax-mpmd: rank {board.rank}: the keeper of its host does not do it: {error}", file=sys.stderr)
        return True

    def _hear_of_losses(self) -> tuple[int, str] | None:
        """Takes note of new losses, in the watchdog's thread; a verdict if this process cannot go on."""
        taken = self._register.read()
        new = taken[len(self._taken) :]
        if new and not (self.activity.goes_on or self.is_apart):
            return new[0].rank, "was lost while others were not in mpmd.resilient"
        for rank, number in new:
            self.watchdog.boards.forget(rank, number)
        self._taken = taken
        if self.lost and (wire := self._wire) is not None:  # each time: a connection may just have been made
            wire.sever()
        return None

    @contextlib.contextmanager
    def as_a_whole(self) -> Iterator[None]:
        """Around transfers that other processes make too: if this one leaves on the way, the next may meet the rest."""
        try:
            yield
        except BaseException:
            if self._wire is not None:
                self._wire.interrupt()
            raise


def _address_towards(coordinator: str) -> str:
    """This machine's address as the coordinator's network sees it; loopback if that is where the coordinator is."""
    host, _, port = coordinator.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host or "127.0.0.1", int(port or 1)))
            return probe.getsockname()[0]
        except (OSError, ValueError):
            return "127.0.0.1"
