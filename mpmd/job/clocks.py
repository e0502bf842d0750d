"""Finds how far the clocks of the processes are apart, so that times of several machines can be compared."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpmd.job import processes
from mpmd.job.job import Job

_QUESTIONS = 12


class Offset(NamedTuple):
    """The difference from this process's clock to the lowest rank's clock, and its possible error, in seconds."""

    seconds: float
    error: float


def offset(
    job: Job, ranks: Sequence[int], now: Callable[[], float] = time.perf_counter, boot: str | None = None
) -> Offset:
    """Compares `time.perf_counter` of all of `ranks`, which call this together.

    Processes of one kernel, with the same `boot`, have the same clock. Others ask the lowest rank for its time several
    times, through the job's key-value store, and take the fastest answer. The error is half of the time of that answer.
    """
    kernel = processes.machine().split(":")[0] if boot is None else boot
    told = job.exchange("comparing clocks", kernel, ranks)
    lowest = min(told)
    apart = [r for r in told if r != lowest and (told[r] != told[lowest] or not told[r])]
    number = job.new_number(ranks, "comparing clocks", is_brief=True) if apart else 0
    found = Offset(0.0, 0.0)
    for rank in apart:
        if job.rank == lowest:
            _answer(job, number, rank, now)
        elif job.rank == rank:
            found = _ask(job, number, lowest, now)
    return found


def _answer(job: Job, number: int, rank: int, now: Callable[[], float]) -> None:
    for k in range(_QUESTIONS):
        job.find(_key(number, rank, k, "asks"), "comparing clocks with that", rank)
        job.store.key_value_set(_key(number, rank, k, "is"), repr(now()))


def _ask(job: Job, number: int, lowest: int, now: Callable[[], float]) -> Offset:
    found = []
    for k in range(_QUESTIONS):
        before = now()
        job.store.key_value_set(_key(number, job.rank, k, "asks"), "")
        there = float(job.find(_key(number, job.rank, k, "is"), "comparing clocks with that", lowest))
        after = now()
        found.append(Offset(there - (before + after) / 2, (after - before) / 2))
        for what in ("asks", "is"):
            job.store.key_value_delete(_key(number, job.rank, k, what))
    return min(found, key=lambda o: o.error)


def _key(number: int, rank: int, k: int, what: str) -> str:
    return f"mpmd/clocks/{number}/{rank}/{k}/{what}"
