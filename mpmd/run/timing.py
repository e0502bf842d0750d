"""A step run under a clock: one thread a group, each task timed from the moment that its inputs are there.

Slower than the ordinary executor (it waits for every task), so it is asked for. Groups run beside each other
as they do otherwise, so starts and ends are those of a real pipeline.
"""

import json
import threading
import time
from typing import NamedTuple

import jax

from scheduler import Costs, Task, Timeline


class Timed(NamedTuple):
    """One executed task (or fused pair): the group, and when it started and ended, in seconds."""

    group: int
    tasks: tuple[Task, ...]
    start: float
    end: float


def run_timed(slots: list, ops) -> list[Timed]:
    """Runs `ops` on `slots`, one thread for each group.

    Args:
      slots: the values of the step, inputs filled in; results are left in them.
      ops: `(group, tasks, is_run, act, input slots, output slots)` in one global order; `act()` does it on `slots`.
    """
    arrived = {op[5]: threading.Event() for op in ops if not op[2]}
    records: list[Timed] = []
    failures: list[BaseException] = []
    begin = time.perf_counter()

    def walk(group):
        try:
            for owner, tasks, is_run, act, ins, outs in ops:
                if owner != group or failures:
                    continue
                if not is_run:
                    act()
                    arrived[outs].set()
                    continue
                for i in ins:
                    if i in arrived:
                        arrived[i].wait()
                jax.block_until_ready([slots[i] for i in ins])
                start = time.perf_counter() - begin
                act()
                jax.block_until_ready([slots[i] for i in outs])
                end = time.perf_counter() - begin
                if tasks:
                    records.append(Timed(group, tasks, start, end))
        except BaseException as e:
            failures.append(e)
            for event in arrived.values():
                event.set()

    threads = [threading.Thread(target=walk, args=(g,), name=f"mpmd-group-{g}") for g in sorted({op[0] for op in ops})]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]
    return records


def as_text(records: list[Timed]) -> str:
    """Records as they are sent to other processes."""
    return json.dumps([[r.group, [list(t) for t in r.tasks], r.start, r.end] for r in records])


def of_text(text: str) -> list[Timed]:
    """The inverse of `as_text`."""
    return [Timed(group, tuple(Task(*t) for t in tasks), start, end) for group, tasks, start, end in json.loads(text)]


def timeline(records: list[Timed], placement) -> Timeline:
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


def _peak(order) -> int:
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
