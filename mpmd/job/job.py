"""The processes of one job, as one of them sees them: agreements, numbers and the wire between them."""

import atexit
import contextlib
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import HangError
from mpmd.job import wires
from mpmd.job.activity import Activity
from mpmd.job.black_box import BlackBox
from mpmd.job.boards import Boards
from mpmd.job.calls import Calls
from mpmd.job.judge import Judge
from mpmd.job.notes import Note
from mpmd.job.signs import Door, Stacks
from mpmd.job.watchdog import Watchdog

# An agreement is asked for in slices of this length, so that the main thread stays interruptible.
_SLICE_MS = 1000


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
    """

    def __init__(self, store: Any, hang_timeout_s: float | None, environment: Mapping[str, str]):
        self.rank, self.num_ranks = jax.process_index(), jax.process_count()
        self.store, self.hang_timeout_s = store, hang_timeout_s
        coordinator = environment.get("MPMD_COORDINATOR") or compat.coordinator_address() or ""
        self.address = "127.0.0.1" if environment.get("MPMD_LOCAL_ONLY") == "1" else _address_towards(coordinator)
        serves = self.rank == 0 and environment.get("MPMD_SERVICE") != "external"
        door = Door(None if environment.get("MPMD_LOCAL_ONLY") == "1" else self.address)
        self.activity = Activity(self.rank, door.address, Stacks().number)
        boards = Boards(self.rank, self.num_ranks, self.activity, store, environment.get("MPMD_STATUS_DIR"))
        judge = Judge(boards, hang_timeout_s, serves)
        black_box = BlackBox(self.rank, self.num_ranks, self.activity, environment)
        self.watchdog = Watchdog(self.num_ranks, self.activity, boards, judge, black_box, door, serves)
        self.calls = Calls(self.rank, self.num_ranks, store, self.activity, self.watchdog.end)
        self._counts: dict[tuple[int, ...], int] = {}
        self._wire: wires.Wire | None = None
        self.watchdog.start()
        store.key_value_set(f"mpmd/devices/{self.rank}", wires.hardware() if compat.has_cross_host_put() else "")
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
        self.calls.note(ranks, call or Note(f"came to {what}", step=self.activity.step))
        count = self._counts[ranks] = self._counts.get(ranks, 0) + 1
        folder = f"mpmd/exchange/{zlib.crc32(repr(ranks).encode()):08x}/"
        self.store.key_value_set(f"{folder}{count}/{self.rank}", text, allow_overwrite=True)
        said = {self.rank: text}
        missing = [r for r in ranks if r != self.rank]
        with self.activity.during("agreeing", what + about, missing):
            while missing:
                try:
                    said[missing[0]] = self.store.blocking_key_value_get(f"{folder}{count}/{missing[0]}", _SLICE_MS)
                    missing.pop(0)
                except jax.errors.JaxRuntimeError as e:
                    _check_deadline(e, what)
                self.calls.check()
                self.activity.waits_for(missing)
        if count > 1:  # all have come this far, so nobody reads the one before any more
            self.store.key_value_delete(f"{folder}{count - 1}/{self.rank}")
        return dict(sorted(said.items()))

    def find(self, key: str, what: str, rank: int) -> str:
        """What a rank publishes once under a key of the store; waits for it.

        Args:
          what: what is done meanwhile, for the report when it does not come.
        """
        with self.activity.during("agreeing", f"{what} of rank {rank}", [rank]):
            while True:
                try:
                    return self.store.blocking_key_value_get(key, _SLICE_MS)
                except jax.errors.JaxRuntimeError as e:
                    _check_deadline(e, what)

    def new_number(self, ranks: Sequence[int], what: str, about: str = "", call: Note | None = None) -> int:
        """A number that all of `ranks` get alike and that no other call gets."""
        lowest = min(ranks)
        mine = str(self.store.key_value_increment("mpmd/numbers", 1)) if self.rank == lowest else ""
        return int(self.exchange(what, mine, ranks, about, call)[lowest])

    @property
    def wire(self) -> wires.Wire:
        """The transport between processes, opened at its first use."""
        if self._wire is None:
            self._wire = wires.wire_class(self)(self)
        return self._wire

    @contextlib.contextmanager
    def as_a_whole(self) -> Iterator[None]:
        """Around transfers that other processes make too: if this one leaves on the way, the next may meet the rest."""
        try:
            yield
        except BaseException:
            if self._wire is not None:
                self._wire.interrupt()
            raise


def _check_deadline(e: Exception, what: str) -> None:
    """An answer that does not come yet is waited for; anything else is the end."""
    if "DEADLINE" not in str(e):
        raise HangError(f"mpmd: lost the coordination service while {what}: {e}") from None


def _address_towards(coordinator: str) -> str:
    """This machine's address as the coordinator's network sees it; loopback if that is where the coordinator is."""
    host, _, port = coordinator.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host or "127.0.0.1", int(port or 1)))
            return probe.getsockname()[0]
        except (OSError, ValueError):
            return "127.0.0.1"
