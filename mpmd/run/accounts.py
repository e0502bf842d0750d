"""Reports each call of a program to the ledger: when it began, how to tell that it is done, how its seconds divide.

After its first calls, each program measures at most one call in `_EVERY`; its shares divide the seconds of the calls
after it. A job that replaces slow processes measures more calls, since it finds these processes by the time their
devices compute. A process measures only itself and compares no clocks. For a value from another process, it knows how
long it waited but not how long the transfer took, so the whole wait counts as bubble.
"""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from mpmd.job.activity import Activity
from mpmd.observe import ledger, pace
from mpmd.observe.ledger import Ledger
from mpmd.observe.records import Ran, RecordedTimes
from mpmd.run.bindings import Bindings
from mpmd.run.bound_instruction import MOVE, RECV, RUN
from mpmd.run.run_ahead import after
from mpmd.run.timing import Recorder, first_shard, lanes_of, made_last

_FIRST = 1, 10  # the first call is not like the others
_EVERY, _PAUSE_S = 100, 5.0  # the least number of calls, and of seconds, from one measured call to the next

# Turns the instructions of a call into the instructions that the executor walks.
Measured = Callable[[Sequence[tuple]], Sequence[tuple]]


class Accounts:
    """The reports of one program to the ledger.

    Args:
      activity: receives the pace of this process if it asks for it; None where several processes compute together.
    """

    def __init__(self, of: Ledger, bindings: Bindings, groups: Sequence[Mesh], activity: Activity | None = None):
        self._ledger, self._groups, self._activity = of, groups, activity
        self._history = pace.History()
        self._outputs = {slot for where in bindings.outputs for _, slot in where}
        self._lanes = lanes_of(groups)
        self._num_lanes = len({self._lanes[b.group] for b in bindings.instructions if b.code == RUN and b.writes})
        here = jax.process_index()
        self._devices = {d for mesh in groups for d in mesh.devices.flat if d.process_index == here}
        self._shares: dict[str, float] = {}
        self._num_calls = 0
        self._measured_at = 0, 0.0  # number and time of the last measured call
        self.recorder: Recorder | None = None  # measures the current call; None if the call is not measured

    @contextlib.contextmanager
    def call(self, bindings: Bindings, work: Hashable) -> Iterator[Measured]:
        """Accounts for the call inside this context. Calls of equal `work` compute equally much, in any order."""
        waits: list[Any] = []
        begin, count = self._ledger.begin_call(), self._num_calls
        self._num_calls += 1
        has_pace = self._activity is not None and self._activity.has_pace
        every, pause_s = (pace.EVERY, 0.0) if has_pace else (_EVERY, _PAUSE_S)
        try:
            is_due = count >= self._measured_at[0] + every and begin >= self._measured_at[1] + pause_s
            is_due = (is_due or count in _FIRST) and self._has_room(bindings)
            measured = self._measured(bindings) if is_due else lambda instructions: instructions
            yield lambda instructions: measured(self._ending(bindings, instructions, waits))
        except BaseException:
            self._ledger.end_call(begin, (), self._shares, part=ledger.LOST)
            raise
        finally:
            recorder, self.recorder = self.recorder, None
            if recorder is not None:
                recorder.stop()
        part = ledger.LOST if None in waits else "" if count else ledger.COMPILING
        try:
            if not count:
                self._recorder_of(bindings).warm_up()
        except Exception:  # a program has failed
            part = ledger.LOST
        add = functools.partial(self._history.add, work) if has_pace else None
        divide = None if recorder is None else functools.partial(self._divided, recorder, add)
        self._ledger.end_call(begin, waits, self._shares, part=part, divide=divide)

    def _ending(self, bindings: Bindings, instructions: Sequence[tuple], waits: list[Any]) -> Sequence[tuple]:
        """Returns the instructions; the last program of each lane adds an array to `waits` that is ready when it ends.

        A program need not make a result of the step: the devices of frozen stages make none.
        """
        found, lanes = list(instructions), set[int]()
        for k in reversed(range(len(found))):
            code, act, *rest = found[k]
            about = bindings.instructions[rest[-1]]
            if code == RUN and about.writes and self._lanes[about.group] not in lanes:
                lanes.add(self._lanes[about.group])
                found[k] = (code, _noting_end(act, made_last(about), waits), *rest)
            if len(lanes) == self._num_lanes:
                break
        return found

    def _recorder_of(self, bindings: Bindings) -> Recorder:
        """Returns a recorder that keeps no program result alive: memory freed late could be missing elsewhere."""
        made = {slot for b in bindings.instructions if b.code == RUN for slot in b.writes}
        return Recorder(bindings.instructions, self._groups, jax.process_index(), made | self._outputs)

    def _has_room(self, bindings: Bindings) -> bool:
        """Returns whether devices had room for all values that a step receives: measuring keeps each until it comes."""
        moves = (b.crossing for b in bindings.instructions if b.code in (MOVE, RECV))
        nbytes = sum(crossing.nbytes for crossing in moves if crossing is not None)
        found = [stats for d in self._devices if (stats := d.memory_stats())]
        return all(
            stats["bytes_limit"] - stats["peak_bytes_in_use"] > nbytes for stats in found if "bytes_limit" in stats
        )

    def _divided(
        self, recorder: Recorder, add: Callable[[float], pace.Pace | None] | None, begin: float, end: float
    ) -> dict[str, float]:
        """Returns the seconds of each part of a call from `begin` to `end`. Waits until the measured work is done."""
        recorder.join()
        found = seconds_by_part(recorder.rows(0), recorder.lanes, begin, end)
        if add is not None and self._activity is not None:
            self._activity.pace = add(found[ledger.COMPUTE])
        return found

    def _measured(self, bindings: Bindings) -> Measured:
        recorder = self.recorder = self._recorder_of(bindings)
        self._measured_at = self._num_calls - 1, time.perf_counter()

        def wrapped(instructions: Sequence[tuple]) -> Sequence[tuple]:
            found = recorder.wrapped(instructions)
            recorder.start()
            return found

        return wrapped


def _noting_end(act: Callable[..., Any], index: int, waits: list[Any]) -> Callable[..., Any]:
    def run(*args: object) -> Any:
        results = act(*args)
        try:
            waits.append(after(first_shard(results[index])))
        except Exception:  # the program has failed: reading its result raises the error
            waits.append(None)
        return results

    return run


def seconds_by_part(rows: RecordedTimes, lanes: Sequence[int], begin: float, end: float) -> dict[str, float]:
    """Divides the time of a call (seconds `begin` to `end`) among the parts, summed over the devices of a process.

    Args:
      lanes: per group, its lane; groups that share devices, and so take turns, have the same lane.

    Returns:
      Seconds by part; each lane that ran something contributes `end - begin` in total.
    """
    offered = {m.way: m.start for m in rows.moves}
    here = {r.group for r in rows.runs}
    by_lane: dict[int, list[Ran]] = defaultdict(list)
    for r in rows.runs:
        by_lane[lanes[r.group]].append(r)
    found: dict[str, float] = dict.fromkeys(ledger.DIVIDED, 0.0)
    for runs in by_lane.values():
        free = begin
        for r in sorted(runs, key=lambda r: r.start):
            start, stop = (min(max(t, free), end) for t in (r.start, r.end))
            ready = min(max(r.ready, free), start)
            moving = 0.0
            if r.by is not None and r.by.source in here:
                moving = max(0.0, ready - max(free, offered.get(r.by, ready)))
            found[ledger.TRANSFERS] += moving
            found[ledger.BUBBLE] += ready - free - moving
            found[ledger.HOST] += start - ready
            found[ledger.COMPUTE] += stop - start
            free = stop
        found[ledger.BUBBLE] += end - free
    return found
