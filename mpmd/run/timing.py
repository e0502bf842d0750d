"""Runs a step under a clock: a thread per group, each task timed from the moment that its inputs are there.

Slower than the ordinary executor (it waits for every task), so it is asked for. Groups run beside each other
as they do otherwise, so starts and ends are those of a real pipeline.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax

from mpmd.run.bindings import ALIAS, MOVE, RECV, RUN, SEND, BoundInstruction
from scheduler import Costs, Task, Timeline


class Timed(NamedTuple):
    """One executed task (or fused pair): the group, and when it started and ended, in seconds."""

    group: int
    tasks: tuple[Task, ...]
    start: float
    end: float


class Clock:
    """Runs the instructions of a step, one thread for each group, and times those that run tasks.

    A value that a group hands to another one goes through a `Future`, so that each thread waits for its own inputs
    only.

    Args:
      instructions: as the executor walks them, in one global order.
      bound: what each of them is.
      one_order: whether one thread must do all of them.
    """

    def __init__(self, instructions: Sequence[tuple], bound: Sequence[BoundInstruction], one_order: bool):
        self._records: list[Timed] = []
        self._begin = 0.0
        self._futures: list[Future] = []
        self._lists: dict[int, list[tuple]] = defaultdict(list)  # per thread
        on_the_way: dict[int, tuple] = {}  # per slot, the instruction that fills it, once its value is there
        for (code, act, reads, writes, frees, number), about in zip(instructions, bound, strict=True):
            own = self._lists[0 if one_order else about.group]
            for slot in reads if code == RUN else (reads,):
                if slot in on_the_way:
                    own.append(on_the_way.pop(slot))
            if code == RUN:
                own.append((RUN, self._clocked(act, about), reads, writes, frees, number))
            elif code in (MOVE, ALIAS):
                future: Future = Future()
                self._futures.append(future)
                own.append((SEND, _handing_over(future, act), reads, None, frees, number))
                on_the_way[writes] = RECV, _taking_over(future), None, writes, (), number
            else:
                own.append((code, act, reads, writes, frees, number))
        self._lists[0] += on_the_way.values()  # results of the step that nobody reads

    def run(self, walk: Callable[[Sequence[tuple]], None]) -> list[Timed]:
        """Runs everything.

        Args:
          walk: does a list of instructions.
        """
        failures: list[BaseException] = []

        def run(instructions: Sequence[tuple]) -> None:
            try:
                walk(instructions)
            except BaseException as e:
                failures.append(e)
                for future in self._futures:
                    future.cancel()

        threads = [
            threading.Thread(target=run, args=(found,), name=f"mpmd-group-{group}")
            for group, found in sorted(self._lists.items())
        ]
        self._begin = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failures:
            raise failures[0]
        return self._records

    def _clocked(self, act: Callable, about: BoundInstruction) -> Callable:
        def run(*args):
            jax.block_until_ready(args)
            start = time.perf_counter() - self._begin
            results = act(*args)
            jax.block_until_ready(results)
            if about.tasks:
                end = time.perf_counter() - self._begin
                self._records.append(Timed(about.group, about.tasks, start, end))
            return results

        return run


def _handing_over(future: Future, act: Callable | None) -> Callable:
    return lambda x, base: future.set_result(x if act is None else act(x))


def _taking_over(future: Future) -> Callable:
    return lambda x, base: future.result()


def as_text(records: Sequence[Timed]) -> str:
    """Records as they are sent to other processes."""
    return json.dumps([[r.group, [list(t) for t in r.tasks], r.start, r.end] for r in records])


def of_text(text: str) -> list[Timed]:
    """The inverse of `as_text`."""
    return [Timed(group, tuple(Task(*t) for t in tasks), start, end) for group, tasks, start, end in json.loads(text)]


def timeline(records: Sequence[Timed], placement: Sequence[int]) -> Timeline:
    """The measured run as a `scheduler.Timeline`; its costs are the median durations."""
    first = min((r.start for r in records), default=0.0)
    num_groups = max(placement) + 1
    orders: list[list[Task]] = [[] for _ in range(num_groups)]
    starts: list[list[float]] = [[] for _ in range(num_groups)]
    ends: list[list[float]] = [[] for _ in range(num_groups)]
    durations: list[tuple[Task, float]] = []
    fused = set()
    for r in sorted(records, key=lambda r: r.start):
        share = (r.end - r.start) / len(r.tasks)
        for k, task in enumerate(r.tasks):
            orders[r.group].append(task)
            starts[r.group].append(r.start - first + k * share)
            ends[r.group].append(r.start - first + (k + 1) * share)
            durations.append((task, share))
        if len(r.tasks) == 2:
            fused.add((r.tasks[0], r.tasks[1]))
    held = [_peak(order) for order in orders]
    return Timeline(
        tuple(map(tuple, orders)), tuple(starts), tuple(ends), tuple(placement), Costs.measured(durations),
        tuple(held), tuple(map(float, held)), frozenset(fused), "measured",
    )  # fmt: skip


def _peak(order: Sequence[Task]) -> int:
    """The most activations held at once: from F to the backward that frees them."""
    live: set[tuple[int, int]] = set()
    peak = 0
    for task in order:
        if task.kind == "F":
            live.add((task.stage, task.microbatch))
        elif task.kind in "BW":
            live.discard((task.stage, task.microbatch))
        peak = max(peak, len(live))
    return peak
