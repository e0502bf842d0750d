"""Simulated annealing: improves finished orders by small random moves. Compiled where numba is installed."""

import functools
import importlib.util
import math
from collections.abc import Callable, MutableSequence
from itertools import accumulate, chain
from types import FunctionType
from typing import NamedTuple

from scheduler.schedules.list_scheduling import Problem
from scheduler.task import Kind, Orders, Task

_KINDS: tuple[Kind, ...] = ("F", "I", "W")
# Lists, or numpy arrays where the functions are compiled.
Floats = MutableSequence[float]
Ints = MutableSequence[int]


class Tables(NamedTuple):
    """The data that moves change and read.

    A task is a number: ((kind's place in `_KINDS`) * stages + stage) * microbatches + microbatch.

    Attributes:
        sequence, best_sequence: All tasks, group after group, each group's in its order.
        begin: For each group, the place in the sequence where its tasks begin; at the end, the length of the sequence.
        time, nbytes: For each task, its seconds, and the bytes that it adds to the memory of its group.
        across, lag: The task of another stage that it waits for (-1: none), and the seconds of the transfer.
        position, clock: For each group, its place in the sequence and its last end so far; filled by `_simulated`.
    """

    sequence: Ints
    best_sequence: Ints
    begin: Ints
    time: Floats
    nbytes: Floats
    across: Ints
    lag: Floats
    local: Ints  # The task of its own stage that comes before it (-1: none): F before I, I before W
    lane: Ints  # Its kind and stage as one number; tasks of one lane stay in their order
    ends: Floats  # The end of each task, -1 before it; filled by `_simulated`
    limits: Floats  # For each group, the bytes that it may hold
    position: Ints
    clock: Floats


def improve(
    problem: Problem, orders: Orders, *, steps: int, hot: float, cold: float, target: float, seed: int, compiled: bool
) -> tuple[float, Orders]:
    """Returns orders at most as long as the given ones, and their makespan.

    One step moves a task of one group a few positions back or forth. The move stays if the makespan falls; otherwise
    it stays with a probability that falls with the loss and with time. Microbatches of a kind and stage stay in order,
    and no group exceeds its memory limit.

    Args:
        orders: Orders of F, I and W that keep to the limits.
        steps: How many moves to try. Each costs one simulation.
        hot, cold: The loss of makespan that is easily accepted at the start, and at the end.
        target: Stop when the makespan is no longer than this.
    """
    n, m, costs = problem.num_stages, problem.num_microbatches, problem.costs
    num, size = n * m, problem.num_tasks  # tasks of a kind, and of all kinds
    time = costs.flat(m, lambda one: list(chain.from_iterable(one.seconds(n).values())))
    nbytes = costs.flat(m, lambda one: list(chain.from_iterable(one.memory(n).values())))
    over = costs.flat(m, lambda one: one.transfers_between(problem.placement)[:-1])
    # F waits for F of the stage before, I for I of the stage after.
    across = [*[-1] * m, *range(num - m), *range(num + m, 2 * num), *[-1] * (m + num)]
    lag = [*[0.0] * m, *over, *over, *[0.0] * (m + num)]
    local = [*[-1] * num, *range(2 * num)]
    lane = [task // m for task in range(size)]
    sequence = [_KINDS.index(task.kind) * num + task.stage * m + task.microbatch for order in orders for task in order]
    begin = [0, *accumulate(map(len, orders))]
    limits = [problem.limit(group) + 1e-9 for group in range(problem.num_groups)]
    ends, position, clock = [0.0] * size, [0] * problem.num_groups, [0.0] * problem.num_groups
    tables = Tables(
        sequence, list(sequence), begin, time, nbytes, across, lag, local, lane, ends, limits, position, clock
    )
    run: Callable[..., float] = _anneal
    if compiled:
        import numpy

        run, tables = _compiled(), Tables(*map(numpy.array, tables))  # pyright: ignore[reportArgumentType]
    makespan = run(tables, steps, hot, cold, target, seed % 2**31)
    best = [int(task) for task in tables.best_sequence]
    tasks = [Task(task % num // m, _KINDS[task // num], task % m) for task in best]
    return float(makespan), tuple(tuple(tasks[begin[group] : begin[group + 1]]) for group in range(problem.num_groups))


def can_compile() -> bool:
    """Returns whether numba is installed (the extra ``search``)."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _compiled() -> Callable[..., float]:
    import numba  # pyright: ignore[reportMissingImports]

    def compiled(function: Callable) -> Callable:
        try:
            return numba.njit(cache=True)(function)
        except RuntimeError:  # there is no folder to cache it in for the next process
            return numba.njit(function)

    # Compiled code calls only compiled code; the plain functions stay as they are.
    parts = {part.__name__: compiled(part) for part in (_drawn, _proposed, _shift, _fits, _simulated, _score)}
    return compiled(FunctionType(_anneal.__code__, {**globals(), **parts}))


# From here on only plain loops and arrays, so that numba can compile the functions. The parts do not call each
# other: `_compiled` replaces only the functions that `_anneal` calls by compiled ones.


def _anneal(tables: Tables, steps: int, hot: float, cold: float, target: float, seed: int) -> float:
    """Moves tasks of `sequence`; leaves the best sequence in `best_sequence` and returns its makespan.

    Step 0 moves nothing: it computes the score of the given sequence.
    """
    sequence, begin, lane, local = tables.sequence, tables.begin, tables.lane, tables.local
    random = seed
    current = best = math.inf
    for step in range(steps + 1):
        source = place = group = 0
        if step:
            random = _drawn(random)
            source = (random >> 7) % len(sequence)
            random = _drawn(random)
            group, place = _proposed(begin, source, (random >> 7) % 24)
            place = _shift(sequence, source, place, lane, local)
            if place == source:  # a neighbour that the task may not pass
                continue
        score = makespan = math.inf
        if not step or _fits(sequence, begin[group], begin[group + 1], tables.nbytes, tables.limits[group]):
            makespan = _simulated(tables)
            score = _score(makespan, tables.clock)
        accept = score <= current
        if not accept and score < math.inf:
            temperature = hot * (cold / hot) ** (step / steps)
            random = _drawn(random)
            accept = (random >> 7) / 16777216.0 < math.exp((current - score) / temperature)  # 24 bits: below 2**24
        if accept:
            current = score
            if makespan < best:
                best = makespan
                for i in range(len(sequence)):
                    tables.best_sequence[i] = sequence[i]
                if best <= target:
                    break
        elif step:  # back again: the task may pass the other way wherever it has passed once
            _shift(sequence, place, source, lane, local)
    return best


def _drawn(random: int) -> int:
    """Returns the next number of a linear congruential generator. Its low bits are not random: callers drop seven."""
    return (random * 1103515245 + 12345) & 0x7FFFFFFF


def _proposed(begin: Ints, source: int, drawn: int) -> tuple[int, int]:
    """Returns the group of a position in the sequence, and a position of that group up to 12 before or behind."""
    reach = drawn + 1 if drawn < 12 else 11 - drawn
    group = 0
    for g in range(len(begin) - 1):
        if begin[g] <= source < begin[g + 1]:
            group = g
    return group, min(max(source + reach, begin[group]), begin[group + 1] - 1)


def _shift(sequence: Ints, source: int, place: int, lane: Ints, local: Ints) -> int:
    """Moves a task towards a position, as far as it may pass its neighbours; returns its new position."""
    task = sequence[source]
    direction = 1 if place > source else -1
    at = source
    while at != place:
        other = sequence[at + direction]
        if lane[other] == lane[task] or local[other] == task or local[task] == other:
            break
        sequence[at] = other
        at += direction
    sequence[at] = task
    return at


def _fits(sequence: Ints, begin: int, end: int, nbytes: Floats, limit: float) -> bool:
    """Returns whether a group's tasks keep to its memory."""
    live = 0.0
    for i in range(begin, end):
        live += nbytes[sequence[i]]
        if live > limit:
            return False
    return True


def _simulated(tables: Tables) -> float:
    """Returns the makespan, with each group's last end in ``clock``; infinite if the orders deadlock."""
    sequence, begin, ends, position, clock = tables.sequence, tables.begin, tables.ends, tables.position, tables.clock
    time, across, lag, local = tables.time, tables.across, tables.lag, tables.local
    num_groups, total = len(begin) - 1, len(sequence)
    for i in range(total):
        ends[i] = -1.0
    for g in range(num_groups):
        position[g] = begin[g]
        clock[g] = 0.0
    moved = True
    done = 0
    while moved:  # each round takes every group as far as it can go; if a round moves none, all wait
        moved = False
        for g in range(num_groups):
            i = position[g]
            now = clock[g]
            while i < begin[g + 1]:
                task = sequence[i]
                if local[task] >= 0 and ends[local[task]] < 0:
                    break
                need = across[task]
                if need >= 0:
                    if ends[need] < 0:
                        break
                    arrival = ends[need] + lag[task]
                    if arrival > now:
                        now = arrival
                now += time[task]
                ends[task] = now
                i += 1
                done += 1
                moved = True
            position[g] = i
            clock[g] = now
    if done < total:
        return math.inf
    makespan = 0.0
    for g in range(num_groups):
        makespan = max(makespan, clock[g])
    return makespan


def _score(makespan: float, clock: Floats) -> float:
    """Returns the makespan plus a little for groups that end late: breaks ties in favour of more slack."""
    late = 0.0
    for end in clock:
        late += end
    return makespan + 0.02 * late / len(clock)
