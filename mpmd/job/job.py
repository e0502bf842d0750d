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
from mpmd.job.key_wait import KeyWait
from mpmd.job.notes import Note
from mpmd.job.signs import Door, offer_stacks
from mpmd.job.spares import SPARE, UNFIT, Register, Taken
from mpmd.job.verdict import Board
from mpmd.job.watchdog import Watchdog

# The main thread waits for an agreement in slices of this length, so that it stays interruptible.
_SLICE_S = 1.0
# The length where others take the places of lost ranks, so that this process notices a loss soon.
_SHORT_SLICE_S = 0.1
# Within this time after an error that a loss may have caused, the launcher announces the loss.
_HEARD_S = 5.0


class Job:
    """The processes that run together, as this one sees them.

    Attributes:
      address: the address at which other processes reach this one.
      wait_until_kept: in `mpmd.resilient`, waits until one more state is whole in memory; False if none will be.
      epoch: how many losses of ranks this process has continued after; -1 in a spare that replaces a lost rank, until
        it meets the others in `mpmd.resilient`.
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
        self.replaces = self._register.replaces  # whether others take the places of lost ranks
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
        self.end_process: Callable[[Board, int], None] | None = None  # in `mpmd.resilient`: ends any rank's process
        self.wait_until_kept: Callable[[], bool] | None = None
        losses, make_way = (self._hear_of_losses, self._make_way) if self.replaces else (None, None)
        self.watchdog = Watchdog(
            self.num_ranks, self.activity, boards, judge, black_box, door, serves, losses, make_way
        )
        self.calls = Calls(self.rank, self.num_ranks, store, self.activity, self.watchdog.end, self.check)
        if self.is_apart:
            compat.forget_collectives()
        self.calls.is_apart = self.is_apart
        self._exchanges: dict[tuple[int, ...], tuple[int, str]] = {}  # their number, and the folder of the last one
        self._wire: wires.Wire | None = None
        self.watchdog.start()
        hardware = wires.hardware() if compat.has_cross_host_put() else ""
        store.key_value_set(f"mpmd/devices/{self.rank}", hardware, allow_overwrite=True)
        atexit.register(self.watchdog.finish, self.calls)

    def exchange(
        self, what: str, text: str, ranks: Sequence[int], about: str = "", call: Note | None = None
    ) -> dict[int, str]:
        """Exchanges texts among `ranks`; returns the text of each. All of them make these calls in the same order.

        Args:
          what: the purpose, the same in all ranks.
          about: more about the purpose, for the report when a rank does not come.
          call: the user's call behind it, where that explains more in the report of a disagreement.
          ranks: the ranks that take part, including this one.
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
        folder += f"{count}/{zlib.crc32(what.encode()):08x}"  # a rank with another purpose writes elsewhere
        self._exchanges[ranks] = count + 1, folder
        self.store.key_value_set(f"{folder}/{self.rank}", text, allow_overwrite=True)
        said = {self.rank: text}
        missing = [r for r in ranks if r != self.rank]
        with self.activity.during("agreeing", what + about, missing):
            wait = self._wait()
            while missing:
                if (answer := self._answer(wait, f"{folder}/{missing[0]}", what)) is not None:
                    said[missing.pop(0)] = answer
                self.calls.check()
                self.check()
                self.activity.waits_for(missing)
        if before:  # all have come this far, so nobody reads the exchange before any more
            self.store.key_value_delete(f"{before}/{self.rank}")
        return dict(sorted(said.items()))

    def find(self, key: str, what: str, rank: int) -> str:
        """Waits for a text that a rank publishes once under a key. If it does not come, the report names `what`."""
        with self.activity.during("agreeing", f"{what} of rank {rank}", [rank]):
            wait = self._wait()
            while (answer := self._answer(wait, key, what)) is None:
                self.check()
            return answer

    def _wait(self) -> KeyWait:
        return KeyWait(self.store, _SHORT_SLICE_S if self.replaces else _SLICE_S)

    def _answer(self, wait: KeyWait, key: str, what: str) -> str | None:
        """Returns the text under a key of the store; None if it does not come soon. Any other error raises."""
        try:
            return wait.value(key)
        except jax.errors.JaxRuntimeError as e:
            raise HangError(f"mpmd: lost the coordination service while {what}: {e}") from None

    def new_number(
        self, ranks: Sequence[int], what: str, about: str = "", call: Note | None = None, *, is_brief: bool = False
    ) -> int:
        """Returns a number that is the same in all of `ranks`, and that no other call returns.

        Args:
          is_brief: nobody uses the number after the user's call returns. Such numbers repeat after half a million.
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
        """Whether this process is a spare that replaces a lost rank and has not met the others yet.

        It then repeats alone the common work of all before `mpmd.resilient`. In an exchange it takes its own text for
        the text of every rank. It receives arrays that cannot be read: the state that the others have kept replaces
        them, and other uses of them raise.
        """
        return self.epoch < 0

    @property
    def lost(self) -> list[Taken]:
        """The ranks that were lost since this process last continued after a loss, and the spares in their places."""
        return self._taken[max(0, self.epoch) :]

    def check(self, epoch: int | None = None) -> None:
        """Raises a RankLostError if a rank was lost; with the epoch in which some work began, if one was since then."""
        if self.epoch >= 0 and len(self._taken) > self.epoch:
            raise RankLostError(f"mpmd: rank {self._taken[-1].rank} was lost, and a spare takes its place")
        if epoch not in (None, self.epoch):
            raise RankLostError("mpmd: a rank was lost, and the processes have gone on since")

    def has_lost(self, error: BaseException) -> bool:
        """Returns whether the loss of a rank that is replaced may have caused an error. Waits until that is known."""
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
            causes.append(cause)
        # A save turns a loss into an OSError, here and in the other processes.
        may_be = any(isinstance(e, (jax.errors.JaxRuntimeError, HangError, OSError)) for e in causes)
        end = time.monotonic() + (_HEARD_S if may_be and self.activity.goes_on else 0.0)
        while not self.lost and time.monotonic() < end:
            time.sleep(0.02)
        return bool(self.lost)

    def go_on(self) -> None:
        """Begins again with the processes that replace lost ones: makes new agreements and connections."""
        if not self.replaces:
            return
        self.epoch = len(self._taken)
        self._wire, self._exchanges = None, {}
        self.activity.expected.forget()
        self.activity.say("idle")
        self.calls.begin_again(self.epoch)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Surrounds work that can continue after a loss."""
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
        """Rules out replacements from now on: all work together in ways that a replacement could not repeat alone."""
        self._is_bound, self.activity.goes_on = True, False

    @property
    def may_be_replaced(self) -> bool:
        """Whether a spare with other devices can replace this process while the others continue."""
        return self.activity.goes_on and self._register.num_left > 0

    def _make_way(self, board: Board, what: str, is_slow: bool) -> bool:
        """Ends the process of a rank that holds up the others, so that another process takes its place.

        A slow process ends only if a spare waits, and when one more state is whole in memory, so that only the current
        step is repeated. Returns False if the caller should try again.
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
        """Notes new losses, in the watchdog's thread; returns a verdict if this process cannot go on."""
        taken = self._register.read()
        if len(taken) < len(self._taken):  # losses do not end: the list cannot be read at the moment
            return None
        new = taken[len(self._taken) :]
        if new and not (self.activity.goes_on or self.is_apart):
            return new[0].rank, "was lost while others were not in mpmd.resilient"
        for rank, number in new:
            self.watchdog.boards.forget(rank, number)
        self._taken = taken
        if self.lost and (wire := self._wire) is not None:  # each time: there may be a new connection
            wire.sever()
        return None

    @contextlib.contextmanager
    def as_a_whole(self) -> Iterator[None]:
        """Surrounds transfers that other processes make too. An error on the way interrupts the wire for later ones."""
        try:
            yield
        except BaseException:
            if self._wire is not None:
                self._wire.interrupt()
            raise


def _address_towards(coordinator: str) -> str:
    """Returns this machine's address in the coordinator's network; the loopback address if the coordinator is there."""
    host, _, port = coordinator.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        kind = socket.SOCK_DGRAM  # of which nothing is sent
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=kind)
        for family, _, _, _, where in sorted(found, key=lambda one: one[0] != socket.AF_INET):  # all choose alike
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(where)
                return probe.getsockname()[0]
    return "127.0.0.1"
