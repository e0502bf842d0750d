"""Plans for fewer microbatches: plans for more, without the instructions of the later microbatches.

A task reads values of its own microbatch alone, and each of these is made, sent, received and freed by instructions of
this microbatch. So if all instructions of the later microbatches are removed, no other misses a value, and sends and
receives still match. The other instructions keep their order, also in the one order of events that proves the program
free of deadlock (:func:`scheduler.lower`). Hence a program's proof also holds for its programs for fewer microbatches.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from scheduler.ordering import LoopTasks
from scheduler.programs.instructions import WORK, Instruction, Program, Run, Value
from scheduler.task import Orders, Schedule, Task


def begins_with(schedule: Schedule, orders: Orders, num_microbatches: int, fewer: int) -> bool:
    """Returns whether a schedule's orders, without the tasks of later microbatches, are its orders for fewer.

    Args:
        orders: The orders for ``num_microbatches``.

    Raises:
        ValueError: The schedule is not defined for ``fewer`` microbatches.

    Examples:
        >>> from scheduler import OneFOneB, ZeroBubbleV
        >>> [begins_with(s, s.orders(8), 8, 6) for s in (OneFOneB(4), ZeroBubbleV(4))]
        [True, False]
    """
    own = schedule.orders(fewer)
    if any([t for t in order if t.microbatch < fewer] != list(few) for order, few in zip(orders, own, strict=True)):
        return False
    pairs = schedule.fused(num_microbatches)
    staying = {pair for pair in pairs if all(task.microbatch < fewer for task in pair)}
    divided = any(any(task.microbatch < fewer for task in pair) for pair in pairs - staying)
    return not divided and schedule.fused(fewer) == staying


def later_values(program: Program, counts: Mapping[int, int]) -> Callable[[Value], bool]:
    """Returns a test whether a value belongs to a microbatch beyond the count of its loop (`counts`, by number)."""
    loop_of = {
        value.name: run.loop
        for instructions in program.groups
        for run in instructions
        if isinstance(run, Run)
        for value in (*run.reads, *run.writes)
        if value.microbatch is not None
    }

    def is_later(value: Value) -> bool:
        most = counts.get(loop_of.get(value.name, -1))
        return value.microbatch is not None and most is not None and value.microbatch >= most

    return is_later


def with_fewer(program: Program, counts: Mapping[int, int]) -> Program:
    """Returns a program without the later microbatches of some of its loops.

    Args:
        program: A right program, in which the first run of each task is for microbatch 0.
        counts: By the number of a loop, how many microbatches stay.
    """
    is_later = later_values(program, counts)

    def values(of: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(v for v in of if not is_later(v))

    def kept(instructions: tuple[Instruction, ...]) -> Iterator[Instruction]:
        for i in instructions:
            if not isinstance(i, Run):
                if isinstance(i, WORK) or not is_later(i.value):
                    yield i
            elif tasks := [task for task in i.tasks if task.microbatch < counts.get(i.loop, task.microbatch + 1)]:
                reads, writes, donates = map(values, (i.reads, i.writes, i.donates))
                yield Run(tasks[0], reads, writes, donates, tuple(tasks[1:]), i.loop)

    def tasks(loop: int) -> LoopTasks | frozenset[Task]:
        own = program.tasks[loop]
        if isinstance(own, LoopTasks):
            return dataclasses.replace(own, num_microbatches=min(own.num_microbatches, counts[loop]))
        return frozenset(task for task in own if task.microbatch < counts[loop])

    return dataclasses.replace(
        program,
        groups=tuple(tuple(kept(instructions)) for instructions in program.groups),
        tasks=tuple(tasks(n) if n in counts else own for n, own in enumerate(program.tasks)),
    )
