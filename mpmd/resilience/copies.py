"""Copies the state to keepers while steps run: one version is on its way, and the version before it is whole.

After a step the main thread starts the copies from the devices to the host. The devices make them before they begin
the next step, so that step may reuse the state's memory. A thread does the rest. It waits until all ranks have kept
version n - 1, writes version n over version n - 2, and sends it to the other hosts. If the thread is not done when the
next version is due, the main thread waits for it: all ranks keep the same versions.
"""

import contextlib
import dataclasses
import json
import math
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import Device
from mpmd.arrays.sharding import Key
from mpmd.errors import RankLostError
from mpmd.job import audits
from mpmd.pytrees import PyTree
from mpmd.resilience import layout
from mpmd.resilience.keeper import NoRoomError, Version
from mpmd.resilience.keepers import Address, Connection
from mpmd.resilience.layout import NUMBER, StateLayout
from mpmd.resilience.ranks import Ranks

_POLL_S = 0.005
_CLOSING_S = 2.0  # limit for the last copy where the program ends with an error; it may wait for ranks that never come
_BREAK_S = 0.5  # the same after a loss
_PATIENCE_S = 0.2  # a longer wait for others is shown in reports
_SLICE_S = 0.5
_AGAIN_S, _AGAIN_LIMIT_S = 30.0, 1.0  # how often, and for how long, a keeper that did not answer is asked again
_HOPE_S = 60.0  # a rank waits this long for its last keeper to answer again, before all ranks stop making copies
GONE = "gone"  # published by a rank without a keeper, which can keep no version any more
_HOST_MEMORY = "pinned_host"


class Started(NamedTuple):
    """The content of a record: for each piece an array on its way to the host, and the number leaves."""

    values: list[jax.Array | np.ndarray]
    numbers: dict[int, float | str]


class Copies:
    """The copies of this process.

    Args:
      keepers: connections to the keepers of this process's records; the keeper of its own host first, if there is one.
      about: the fields of all records of this process, without the step.
      speaks: whether this process reports losses of keepers; one process of each host does.
      last: the version that the keepers have whole; None if they have none.

    Attributes:
      whole: the last step after which all processes have kept the state, as far as this one knows; -1 if there is none.
    """

    def __init__(
        self, ranks: Ranks, keepers: dict[Address, Connection], about: Mapping[str, int], speaks: bool, last: int | None
    ):
        self._ranks, self._keepers, self._about, self._speaks = ranks, keepers, about, speaks
        self.whole = self._step = -1 if last is None else last
        # Keepers that did not answer or had no room, with the time to ask again; and those that were asked again.
        self._silent: dict[Address, tuple[Connection, float]] = {}
        self._asked_again: set[Address] = set()
        self._num_found = audits.num_found()
        self._names: list[str] = []
        self._signature: tuple | None = None
        self._layout: StateLayout | None = None
        self._due: queue.Queue[tuple[int, StateLayout, Started, Callable[[], None]] | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._has_ended = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="mpmd-copies", daemon=True)
        self._thread.start()

    def keep(self, step: int, state: PyTree, signature: tuple | None = None) -> None:
        """Keeps the state after a step; returns once its copies have begun. `signature` is its leaves', if known."""
        self._wait_until_idle()
        if self._has_ended:
            return
        leaves = jax.tree.leaves(state)
        if (signature := signature or layout.signature(leaves)) != self._signature:
            self._names = self._names or layout.names_of(state)
            self._layout, self._signature = layout.plan(self._names, leaves, self._ranks.rank), signature
        assert self._layout is not None
        self._idle.clear()
        self._due.put((step, self._layout, started(leaves, self._layout), self._ranks.calls_until_now()))

    def finish(self) -> None:
        """Returns when the last version is whole, or no more copies are made."""
        self._wait_until_idle()
        if not self._has_ended and self._step > self.whole:
            with self._waiting():
                self._wait_for_others(self._step)

    def close(self) -> None:
        """Ends the thread. Kept versions stay there. After a loss, a copy on its way may be broken off."""
        is_lost, end = False, time.monotonic() + _CLOSING_S
        while not self._idle.wait(_POLL_S) and time.monotonic() < end:
            if not is_lost and (is_lost := self._has_lost()):
                self._is_closing, end = True, time.monotonic() + _BREAK_S
        self._is_closing = True
        for connection in list(self._keepers.values()) if is_lost else ():
            connection.break_off()
        self._due.put(None)
        self._thread.join(_CLOSING_S)
        for connection in self._keepers.values() if not self._thread.is_alive() else ():
            connection.close()

    def _has_lost(self) -> bool:
        try:
            self._ranks.check()
        except RankLostError:
            return True
        return False

    def _wait_until_idle(self) -> None:
        if not self._idle.wait(_PATIENCE_S):
            with self._waiting():
                while not self._idle.wait(_SLICE_S):  # in slices, to react to Ctrl-C and losses
                    self._ranks.check()
        if self._error is not None:
            raise self._error

    def _waiting(self) -> contextlib.AbstractContextManager[object]:
        """Marks a wait of the main thread, so that a rank that keeps the others waiting is found."""
        others = [rank for rank in range(self._ranks.num_ranks) if rank != self._ranks.rank]
        return self._ranks.waiting("the copies of the state", others)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            try:
                self._copy(*due)
            except BaseException as error:
                self._error = error
            finally:
                del due
                self._idle.set()

    def _copy(self, step: int, layout: StateLayout, taken: Started, compare_calls: Callable[[], None]) -> None:
        if self._step > self.whole:
            self._wait_for_others(self._step)
        if self._has_ended or self._step > self.whole:
            return
        jax.block_until_ready(taken.values)  # by then, most calls have been compared anyway
        compare_calls()  # results of calls that differ must not count
        audits.settle(known=self._num_found)  # nor results of a faulty device
        about = dict(self._about, step=step)
        below = (self._about["call"], self.whole)
        data, header = None, ""

        def give(connection: Connection) -> None:
            nonlocal data, header
            if connection.shares_memory:
                buffer, data = connection.begin(layout.nbytes, below)
                header = written(layout, taken, data)
                connection.commit(buffer, about, header)
                return
            if data is None:
                data = np.empty(layout.nbytes, np.uint8)
                header = written(layout, taken, data)
            connection.put(data, below, about, header)

        now = time.monotonic()
        end = now + min(_HOPE_S, self._ranks.patience_s / 4)
        self._ask_silent(now)
        while True:
            for address in list(self._keepers):
                try:
                    self._give_to(address, give)
                except OSError as error:
                    self._without(address, error)
            if self._keepers or not self._silent or self._is_closing or time.monotonic() > end:
                break
            time.sleep(_SLICE_S)
            self._ask_silent(math.inf)
        if not self._keepers:
            self._ranks.publish(GONE)
            self._end(self._ranks.rank)
            return
        self._step = step
        self._ranks.publish(f"{self._about['call']} {step}")

    def _give_to(self, address: Address, give: Callable[[Connection], None]) -> None:
        """Sends a version to a keeper; if the keeper was killed, to its successor, which has no version yet."""
        try:
            give(self._keepers[address])
        except ConnectionError:
            if self._is_closing:
                raise
            self._keepers[address] = self._keepers[address].again()
            give(self._keepers[address])
            if self._speaks:
                say(f"the keeper on {address.host} was killed, and has a successor: what it had is lost")
        if address in self._asked_again:
            self._asked_again.remove(address)
            if self._speaks:
                say(f"the keeper on {address.host} answers again, and gets copies again")

    def _without(self, address: Address, error: OSError) -> None:
        """Leaves a keeper out: until it answers again, or has room, if that is all that it lacks."""
        connection, what = self._keepers.pop(address), "cannot be used any more"
        connection.close()
        if isinstance(error, (TimeoutError, NoRoomError)):
            self._silent[address] = connection, time.monotonic() + _AGAIN_S
            what = "takes no copies now" if isinstance(error, NoRoomError) else "does not answer"
        if self._speaks and not self._is_closing and address not in self._asked_again:
            say(f"the keeper on {address.host} {what} ({error}): copies go on without it")

    def _ask_silent(self, now: float) -> None:
        """Connects again to keepers that did not answer, and are due at a time. They get the next version."""
        for address, (connection, due) in list(self._silent.items()):
            if due > now:
                continue
            try:
                self._keepers[address] = connection.again(_AGAIN_LIMIT_S)
            except TimeoutError:
                self._silent[address] = connection, time.monotonic() + _AGAIN_S
                continue
            except OSError:
                pass
            del self._silent[address]
            if address in self._keepers:
                self._asked_again.add(address)

    def _wait_for_others(self, step: int) -> None:
        """Returns when all ranks have kept the version of a step, or one of them cannot keep any version any more.

        If a rank was lost after it kept that version, the next version is kept anyway: it may be the last whole one.
        """
        wanted, pause = (self._about["call"], step), _POLL_S
        while True:
            said = self._ranks.published()
            gone = [rank for rank, text in said.items() if text == GONE]
            late = [r for r in range(self._ranks.num_ranks) if r not in gone and kept(said, r) < wanted]
            if not late and not gone:
                self.whole = step
                return
            if gone:
                self._end(gone[0])
                return
            self._ranks.check()
            if self._is_closing:
                return
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)  # each look costs the one process that serves all ranks

    def _end(self, rank: int) -> None:
        """Ends the copies: no later version can be whole. The last whole one stays where it is."""
        if not self._has_ended and self._ranks.rank == 0:
            last = "none is kept" if self.whole < 0 else f"the last whole one is that after step {self.whole}"
            say(f"rank {rank} has no keeper left: no more copies of the state are made; {last}")
        self._has_ended = True


def kept(said: Mapping[int, str], rank: int) -> Version:
    """Returns the version that a rank has published as kept."""
    call, step = map(int, said.get(rank, "-1 -1").split())
    return call, step


def say(text: str) -> None:
    """Prints a line for people."""
    print(f"mpmd.resilient: {text}", file=sys.stderr, flush=True)


def started(leaves: Sequence[Any], layout: StateLayout) -> Started:
    """Starts the copies of all pieces that this process keeps. Does not wait for them.

    The device makes a copy in the order of its programs, so the next program may reuse the memory.
    """
    values: list[Any] = [None] * len(layout.pieces)
    data: dict[int, jax.Array] = {}
    shards: dict[Hashable, int] = {}  # the same shard may be cut into several pieces
    arrays: list[jax.Array] = []
    for i, piece in enumerate(layout.pieces):
        leaf = leaves[piece.leaf]
        if not isinstance(leaf, jax.Array):
            values[i] = np.array(leaf)
            continue
        if piece.leaf not in data:
            data[piece.leaf] = keys.to_data(leaf)
        where = piece.leaf, piece.part, piece.device
        if where not in shards:
            shards[where] = len(arrays)
            arrays.append(_shard(data[piece.leaf], piece.part, piece.device))
        values[i] = shards[where]
    on_host = jax.device_put(arrays, [_beside(array.sharding) for array in arrays], may_alias=False)
    numbers = {i: leaves[i] for i, leaf in enumerate(layout.leaves) if leaf.kind == NUMBER}
    return Started([on_host[value] if isinstance(value, int) else value for value in values], numbers)


def _shard(array: jax.Array, part: Key | None, device: Device | None) -> jax.Array:
    if isinstance(array, MpmdArray):
        array = array._arrays[part]
    if device is None or len(array.sharding.device_set) == 1:
        return array
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def _beside(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns a sharding in host memory at an array's devices: page-locked memory, where they have it."""
    device = next(iter(sharding.device_set))
    has_it = any(memory.kind == _HOST_MEMORY for memory in device.addressable_memories())
    if len(sharding.device_set) == 1:
        return SingleDeviceSharding(device, memory_kind=_HOST_MEMORY if has_it else None)
    return sharding.with_memory_kind(_HOST_MEMORY) if has_it else sharding


def written(layout: StateLayout, taken: Started, into: np.ndarray) -> str:
    """Writes the bytes of all pieces. Returns the header of the record, with their checksums."""
    sums: list[int] = []
    for piece, value in zip(layout.pieces, taken.values, strict=True):
        part = np.asarray(value)
        if piece.held != piece.box:
            part = part[piece.box.relative_to(piece.held).slices]
        target = into[piece.offset : piece.offset + piece.nbytes]
        np.copyto(target, np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        sums.append(zlib.crc32(target.data))
    pieces = [
        (p.leaf, p.box.start, p.box.stop, p.offset, p.nbytes, s) for p, s in zip(layout.pieces, sums, strict=True)
    ]
    leaves = [dataclasses.astuple(leaf) for leaf in layout.leaves]
    return json.dumps({"leaves": leaves, "pieces": pieces, "numbers": list(taken.numbers.items())})
