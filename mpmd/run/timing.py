"""Records when each program and transfer of a step starts and ends, while the step runs as usual.

The step itself does not wait. Separate threads wait for the results: one for each set of devices, since these work in
order, and one for each pair of groups that exchange values.
"""

import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence, Set
from queue import SimpleQueue
from typing import Any

import jax
from jax.sharding import Mesh

from mpmd.arrays import keys
from mpmd.arrays.mesh import Device
from mpmd.compile.executable import Executable
from mpmd.observe.records import Moved, Ran, RecordedTimes, Sent, Way
from mpmd.run.bound_instruction import ALIAS, MOVE, RECV, RUN, SEND, BoundInstruction
from mpmd.run.run_ahead import after

# Python's switch interval, short so that a thread records a time soon.
_SWITCH_S = 2e-4


class Recorder:
    """Times the instructions of a process.

    Args:
      given_away: further slots that the recorder must not keep alive: results that the next step may take over.
    """

    def __init__(
        self, bound: Sequence[BoundInstruction], groups: Sequence[Mesh], rank: int, given_away: Set[int] = frozenset()
    ):
        self._bound = bound
        self.order: Sequence[int] = range(len(bound))  # instruction numbers, as the last step did them
        self._rank = rank
        self._donated = {slot for b in bound for slot in b.donates} | given_away
        self.lanes = lanes_of(groups)  # per group, the first group that it shares a device with, perhaps through others
        self._begun = [0.0] * len(bound)
        self._returned = [0.0] * len(bound)
        self._ends = [0.0] * len(bound)
        self._queues: dict[int | tuple[int, int], SimpleQueue] = {}
        self._threads: list[threading.Thread] = []
        self._is_warm = False
        self._lock = threading.RLock()  # held by a timed step: threads may time one step at once

    def wrapped(self, instructions: Sequence[tuple]) -> list[tuple]:
        """Wraps the instructions that the executor walks, so that each records its times."""
        return [
            (code, self._noting(code, act, self._bound[number], number), reads, writes, frees, number)
            for code, act, reads, writes, frees, number in instructions
        ]

    def run(self, step: int, walk: Callable[[], None]) -> Callable[[], RecordedTimes]:
        """Runs a step (`walk` runs the instructions of `wrapped`), and waits until all work that it started is done.

        Returns a slow function that returns the rows, to call after the last step.
        """
        with self._lock:
            self.warm_up()
            interval = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_S)
            self.start()
            try:
                walk()
            finally:
                self.stop()
                self.join()
                sys.setswitchinterval(interval)
            begun, returned = self._begun.copy(), self._returned.copy()
            return functools.partial(self._rows, step, begun, returned, self._ends, self.order)

    def start(self) -> None:
        """Begins to record a step that runs the instructions from `wrapped`."""
        self._ends = [0.0] * len(self._bound)
        self._threads = [threading.Thread(target=self._watch, args=(q,), daemon=True) for q in self._queues.values()]
        for t in self._threads:
            t.start()

    def stop(self) -> None:
        """Ends the recording: all instructions of the step have been started."""
        for q in self._queues.values():
            q.put(None)

    def join(self) -> None:
        """Waits until all the work that the step started is done."""
        for t in self._threads:
            t.join()

    # --- while the step runs ----------------------------------------------------------------------

    def _noting(self, code: int, act: Any, about: BoundInstruction, number: int) -> Any:
        if code == ALIAS:
            return act
        now, begun, returned = time.perf_counter, self._begun, self._returned
        if code == SEND:

            def send(x: jax.Array, base: int) -> None:
                begun[number] = now()
                act(x, base)
                returned[number] = now()

            return send
        marker, key = self._marker(about), self.lanes[about.group] if about.crossing is None else about.crossing[1:3]
        put = self._queues.setdefault(key, SimpleQueue()).put

        def run(*args: object) -> object:
            begun[number] = now()
            results = act(*args)
            returned[number] = now()
            value = None
            with contextlib.suppress(Exception):  # the program has failed: reading its result raises the error
                value = marker(results)
            put((number, value))
            return results

        return run

    def _marker(self, about: BoundInstruction) -> Callable[[Any], Any]:
        """Returns a function from an instruction's results to an array to wait for, which the step does not delete."""
        if about.code != RUN:
            return (lambda x: None) if about.writes in self._donated else (lambda x: x)
        if not about.writes:
            return lambda results: None
        index = made_last(about, self._donated)
        if about.writes[index] in self._donated:
            return lambda results: after(first_shard(results[index]))
        return lambda results: results[index]

    def _watch(self, queue: SimpleQueue) -> None:
        ends, now = self._ends, time.perf_counter
        while (item := queue.get()) is not None:
            number, value = item
            if value is not None:
                with contextlib.suppress(Exception):  # reading the value raises the error
                    value.block_until_ready()
            ends[number] = now()
            del item, value  # so that the thread keeps no value alive while it waits for the next

    def warm_up(self) -> None:
        """Compiles the programs that wait for donated results, so that the first step measures as well as the tenth."""
        if self._is_warm:
            return
        self._is_warm = True
        known = set()
        for b in self._bound:
            if (
                b.code == RUN
                and b.writes
                and b.writes[index := made_last(b, self._donated)] in self._donated
                and isinstance(b.executable, Executable)
            ):
                aval, sharding = b.executable.compiled.jaxpr.outvars[index].aval, b.executable.out_shardings[index]
                shape = sharding.shard_shape(aval.shape)
                here = next(d for d in b.executable.mesh.devices.flat if d.process_index == jax.process_index())
                place = sharding if sharding.mesh.size == 1 else here  # as `first_shard` finds it
                if (key := (shape, aval.dtype, place)) not in known:
                    known.add(key)
                    after(jax.device_put(keys.zeros(shape, aval.dtype), place))

    # --- afterwards -------------------------------------------------------------------------------

    def _observed(self, ends: Sequence[float], order: Sequence[int]) -> list[float]:
        """Corrects the times of results: a thread may record one late, but no later than a result made from it."""
        found, latest = list(ends), {}  # latest: per slot, and per lane ("lane", number)
        for number in reversed(order):
            b = self._bound[number]
            lane = "lane", self.lanes[b.group]
            reads, writes = (b.reads, b.writes) if b.code == RUN else ((b.reads,), (b.writes,))
            end = min(found[number] or math.inf, *(latest.pop(w, math.inf) for w in writes), math.inf)
            if b.code == RUN:
                end = latest[lane] = min(end, latest.get(lane, math.inf))
            if b.code != SEND:
                found[number] = end
                latest.update((r, min(end, latest.get(r, math.inf))) for r in reads)
        return found

    def rows(self, step: int) -> RecordedTimes:
        """Returns the recorded times of the step, after `join`."""
        return self._rows(step, self._begun, self._returned, self._ends, self.order)

    def _rows(
        self, step: int, begun_at: Sequence[float], returned_at: Sequence[float], ends: Sequence[float],
        order: Sequence[int],
    ) -> RecordedTimes:  # fmt: skip
        there: dict[int, tuple[float, Way | None]] = {}  # per slot, the time of its arrival, and its transfer
        free: dict[int, float] = {}
        runs, moves, sends = [], [], []
        ends = self._observed(ends, order)
        for number in order:
            b, begun, returned = self._bound[number], begun_at[number], returned_at[number]
            end = max(ends[number], begun)
            if b.code == RUN:
                lane = self.lanes[b.group]
                ready, by = max((there.get(s, (0.0, None)) for s in b.reads), key=lambda x: x[0], default=(0.0, None))
                start = min(max(begun, free.get(lane, 0.0), ready), end)
                free[lane] = end
                there.update(dict.fromkeys(b.writes, (end, None)))
                about = b.group, b.name, b.tasks, b.loop
                runs.append(Ran(step, self._rank, *about, begun, returned, start, end, ready, by))
                continue
            before = there.get(b.reads, (0.0, None))
            if b.code == ALIAS:
                there[b.writes] = before
                continue
            assert b.crossing is not None
            value, source, target, nbytes = b.crossing
            way = Way(str(value), source, target)
            if b.code == SEND or (b.code == RECV and b.reads is not None):
                sends.append(Sent(step, self._rank, way, max(begun, before[0])))
            if b.code in (MOVE, RECV):
                start = min(max(begun, before[0]), end)
                there[b.writes] = end, way
                moves.append(Moved(step, self._rank, way, nbytes, begun, start, end, value.microbatch))
        return RecordedTimes(tuple(runs), tuple(moves), tuple(sends))


def made_last(about: BoundInstruction, donated: Set[int] = frozenset()) -> int:
    """Returns the index of a run's result that is ready last: a program in parts makes some long before it ends. Of
    several, it is one that the step does not donate, if there is one.
    """

    def end(index: int) -> tuple:
        made = about.executable.compiled.made_in(index) if isinstance(about.executable, Executable) else ()
        return made, about.writes[index] not in donated, index

    return max(range(len(about.writes)), key=end)


def first_shard(x: jax.Array) -> jax.Array:
    """Returns the part of an array on one device of this process."""
    return x if x.is_fully_addressable and len(x.devices()) == 1 else x.addressable_shards[0].data


def lanes_of(groups: Sequence[Mesh]) -> list[int]:
    """Returns, per group, the first group that shares a device with it, perhaps through others. These take turns."""
    lanes = list(range(len(groups)))
    first: dict[Device, int] = {}
    for group, mesh in enumerate(groups):
        for device in mesh.devices.flat:
            other = first.setdefault(device, group)
            old, new = sorted((lanes[group], lanes[other]))[::-1]
            lanes = [new if lane == old else lane for lane in lanes]
    return lanes
