"""The exchange of all processes before a loop begins: who has which state in memory, and which state all can read."""

import contextlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence

import jax

from mpmd.errors import HangError
from mpmd.job import audits
from mpmd.job.verdict import Board
from mpmd.observe import rank_files
from mpmd.pytrees import PyTree
from mpmd.resilience import restoring, versions
from mpmd.resilience.copies import GONE, Copies, kept, say
from mpmd.resilience.keeper import TOKEN
from mpmd.resilience.keepers import Address, Connection
from mpmd.resilience.ranks import Ranks
from mpmd.resilience.restoring import LostError, Reading
from mpmd.resilience.versions import Version

_POLL_S = 0.02
# The numbers that all processes pass alike, and the smallest value of each.
NUMBERS = {"num_steps": 0, "copies": 0, "every": 1, "start": 0}


class Meeting:
    """The exchange of all processes before they begin: the keepers and their records.

    Args:
      call: the number of this call of `resilient` in the program.
      numbers: arguments that are the same in all processes.
      is_used_up: the loop has begun with the given state, or this process was a spare and cannot read the state.
      is_new: this process was a spare. It may have found a later checkpoint, and pass another `start`.
      leaves: the leaves of the given state, in words that are the same in all processes.
    """

    def __init__(
        self,
        ranks: Ranks,
        own: Address | None,
        call: int,
        numbers: tuple[int, ...],
        is_used_up: bool,
        is_new: bool = False,
        leaves: Sequence[str] = (),
    ):
        self._ranks, self._own, self._call, self._last = ranks, own, call, numbers[0] - 1
        self._is_used_up = is_used_up
        self._token = os.environ.get(TOKEN, "")
        self._attempt = rank_files.attempt_of(os.environ)
        self._connection, records = self._connected(own) if own is not None else (None, [])
        mine: dict[str, object] = {"numbers": numbers, "call": call, "is_new": is_new, "had_keeper": own is not None}
        mine["leaves"] = zlib.crc32(json.dumps(leaves).encode())
        if self._connection:
            mine |= {"keeper": own, "records": records}
        said = {rank: json.loads(text) for rank, text in self._exchange("begin", json.dumps(mine)).items()}
        were_here = {rank: one for rank, one in said.items() if not one["is_new"]} or said
        start = min(one["numbers"][-1] for one in were_here.values())
        _check_alike(NUMBERS, {
            rank: [*one["numbers"][:-1], start if one["is_new"] else one["numbers"][-1]] for rank, one in said.items()
        })  # fmt: skip
        if len({one["leaves"] for one in were_here.values()}) > 1:
            told = self._exchange("saying how states differ", json.dumps(leaves))
            _check_alike(itertools.repeat("a leaf of state"), {rank: json.loads(told[rank]) for rank in were_here})
        self.numbers = *numbers[:-1], start  # as agreed
        if len({one["call"] for one in said.values()}) > 1:
            raise HangError("mpmd.resilient: a spare comes to its first loop, and the others are in another one.")
        self._without = [rank for rank, one in said.items() if not one["had_keeper"]]
        self._keeper_of = {rank: Address(*one["keeper"]) for rank, one in said.items() if "keeper" in one}
        by_name = {address.name: address for address in reversed(self._keeper_of.values())}
        self._hosts = sorted(by_name.values(), key=lambda host: [*self._keeper_of.values()].index(host))
        self._keeper_of = {rank: by_name[address.name] for rank, address in self._keeper_of.items()}
        self._stored = versions.stored({
            address: said[rank]["records"] for rank, address in reversed(self._keeper_of.items())
        })  # fmt: skip
        ranks.end_by(self._end, self._wait_until_kept)

    def newest_readable(
        self, names: Sequence[str], state: PyTree, start: int, num_steps: int
    ) -> tuple[PyTree, int] | None:
        """Returns the newest state that all processes can read, in the layout of `state`, and the step that made it."""
        leaves, structure = jax.tree.flatten(state)
        whys: list[str] = []
        for version in versions.whole(self._stored, self._call):
            if not start <= version.step < num_steps:
                whys.append(f"the state after step {version.step} is not of the steps {start} to {num_steps - 1}")
                continue
            reading = Reading(version, self._ranks.rank, self._ranks.num_ranks, self._connect)
            data, why = None, ""
            try:
                data = reading.load(names, leaves)
            except LostError as error:
                why = f"of the state after step {version.step}, {error}"
            said = self._exchange("reading a state", why)
            lost = [text for text in said.values() if text]
            if lost:
                whys.append(lost[0])
                continue
            assert data is not None
            made = [restoring.put(leaf, about, d) for leaf, about, d in zip(leaves, reading.leaves, data, strict=True)]
            self._settle(version)
            self._say(f"goes on after step {version.step}, from memory" + "".join(f" ({why})" for why in whys))
            return jax.tree.unflatten(structure, made), version.step
        self._settle(None)
        why = whys[0] if whys else versions.lost_text(self._stored, self._call)
        if self._is_used_up:
            raise HangError(
                f"mpmd.resilient: a rank was lost, and no whole state lies in memory ({why}); the job starts over."
            )
        if self._attempt or any(record.call == self._call for record in self._stored):
            self._say(f"begins with step {start} and the given state: {why}")
        return None

    def copies(self, copies: int, last: int | None) -> Copies | None:
        """Returns the copies of this process from here on; None where there is no keeper."""
        if self._without or not self._keeper_of:
            where = "" if not self._keeper_of else f" on the host of rank {self._without[0]}"
            self._say(
                f"keeps no copies: no keeper runs{where} (launch_multihost.sh --restarts R starts them, with the Python"
                " that its command names, or python3, if that has mpmd)"
            )
            return None
        on_gpus = jax.local_devices()[0].platform == "gpu"
        if on_gpus and not self._attempt and audits.SAME_BITS not in os.environ.get("XLA_FLAGS", ""):
            self._say(
                "on GPUs, sums may round otherwise each time; for the same bits after a loss put"
                f" --{audits.SAME_BITS}=true in XLA_FLAGS, or {audits.SAME_BITS} in compiler_options of mpmd.jit"
            )
        rank = self._ranks.rank
        mine = self._keeper_of.get(rank)
        speaks = rank == min(other for other in range(self._ranks.num_ranks) if self._keeper_of.get(other) == mine)
        if mine is None or self._connection is None:  # its host's keeper was lost: another host keeps all records
            connections, buddies = {}, [self._hosts[rank % len(self._hosts)]]
        else:
            connections, others = {mine: self._connection}, versions.buddies(self._hosts, mine, len(self._hosts))
            if copies > len(others) > 0:
                self._say(f"copies={copies}, and there are {len(others)} other hosts to keep one")
            buddies = others[:copies]
        for buddy in buddies:
            try:
                connections[buddy] = self._connect(buddy)
            except OSError as error:
                if speaks:
                    say(f"the keeper on {buddy.host} cannot be reached ({error}): copies go on without it")
        about = {"attempt": self._attempt, "call": self._call, "owner": rank, "num_ranks": self._ranks.num_ranks}
        return Copies(self._ranks, connections, about, speaks, last)

    def _connected(self, own: Address) -> tuple[Connection | None, list[dict[str, int]]]:
        """Returns a connection to the keeper of this host (None if it is gone), and the keeper's records."""
        try:
            connection = self._connect(own)
            return connection, connection.records()
        except OSError as error:
            say(f"rank {self._ranks.rank}: the keeper of its host cannot be reached: {error}")
            return None, []

    def _connect(self, address: Address) -> Connection:
        is_own = self._own is not None and address.name == self._own.name
        return Connection(address, self._token, shares_memory=is_own, patience_s=self._ranks.patience_s)

    def _end(self, board: Board, number: int) -> None:
        """Makes the keeper of a rank's host kill the rank's process by this signal."""
        if (address := self._keeper_of.get(board.rank)) is None:
            raise OSError("there is none any more")
        connection = self._connect(address)
        connection.end(board.pid, board.started, number)
        connection.close()

    def _wait_until_kept(self) -> bool:
        """Returns True when one more state is whole and steps are to come; False if that will not happen."""
        before = newest = None
        try:
            while newest == before:
                said = self._ranks.published()
                if GONE in said.values():
                    return False
                newest = min(kept(said, rank) for rank in range(self._ranks.num_ranks))
                before = before or newest
                if newest is not None and newest[1] >= self._last:  # the last state is whole
                    return False
                self._ranks.check()
                time.sleep(_POLL_S)
        except (HangError, jax.errors.JaxRuntimeError):  # a rank was lost, or the job ends
            return False
        return newest is not None and newest[1] < self._last

    def _settle(self, version: Version | None) -> None:
        """Makes keepers drop all other versions, and waits until all processes have read the state."""
        if self._connection is not None:
            wanted = None if version is None else (self._call, version.step)
            with contextlib.suppress(OSError):
                self._connection.keep(version.attempt if version else 0, wanted)
        self._exchange("after reading a state", "")

    def _exchange(self, what: str, text: str) -> dict[int, str]:
        return self._ranks.exchange(f"mpmd.resilient ({what})", text)

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            say(text)


def _check_alike(names: Iterable[str], values: Mapping[int, Sequence[object]]) -> None:
    first = min(values)
    for rank, theirs in values.items():
        pairs = itertools.zip_longest(values[first], theirs, fillvalue="missing")
        for name, (mine, other) in zip(names, pairs, strict=False):
            if mine != other:
                raise ValueError(
                    f"mpmd.resilient: {name} is {mine} in process {first} and {other} in process {rank}. Every process"
                    " must call it with the same numbers and the same tree."
                )
