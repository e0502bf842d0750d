"""All proofs about a program in one call: every fault at once, and the memory that it needs."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.base.collector import without_collection
from scheduler.base.texts import counted
from scheduler.ordering import LoopTasks, Numbers, coverage_faults, raise_faults
from scheduler.programs.instructions import TRANSFERS, WORK, Free, Program, Run, Send, Value
from scheduler.programs.liveness import Liveness, located
from scheduler.programs.streams import Stream, stream_faults
from scheduler.programs.transfers import transfer_faults
from scheduler.task import KINDS, Task

_ON_ONE_VALUE = (*TRANSFERS, Free)


@dataclass(frozen=True)
class Report:
    """Facts about a right program, found by :func:`check`.

    Attributes:
        peak_bytes: For each group, the most bytes alive at once, inputs and outputs included.
        num_instructions: For each group, the length of its list.
        num_transfers: How many values cross from one group to another.
    """

    peak_bytes: tuple[int, ...]
    num_instructions: tuple[int, ...]
    num_transfers: int

    def __str__(self) -> str:
        rows = [
            f"  group {group}: {count} instructions, at most {peak} bytes alive"
            for group, (count, peak) in enumerate(zip(self.num_instructions, self.peak_bytes, strict=True))
        ]
        return "\n".join([f"right: {counted(len(rows), 'group')}, {counted(self.num_transfers, 'transfer')}", *rows])


def check(program: Program, *, streams: Sequence[Stream] | None = None) -> Report:
    """Proves that each group can run its list in order, and that every value is where it is used, when it is used.

    Proved: each loop runs every task once, in the group of its stage, as B or as I and W; nothing is read before it is
    written or has arrived, nor after a free or a donation; everything is freed once, except outputs; sends and receives
    match, in the same order for each pair of groups; and there is no deadlock, even if a send blocks until the other
    group has come to its receive, and a receive until the value is sent. Linear in instructions.

    Args:
        program: Any program, however broken.
        streams: Devices that work in order, each with the groups that it runs (in the order of :func:`merge`) or with
            its own order of pairs of group and instruction; a group may be on several. Then it is also proved that they
            cannot deadlock where transfers block both sides and each run of a group is a collective of its streams.

    Returns:
        The peak of live bytes of each group, and the numbers of instructions and transfers.

    Raises:
        ScheduleError: With every fault that was found. For a deadlock, the error names the cycle.

    Examples:
        >>> from scheduler import OneFOneB, TaskGraph, lower
        >>> check(lower(TaskGraph.chain(4, activation_bytes=10), OneFOneB(4), 8)).peak_bytes
        (50, 60, 50, 30)
    """
    with without_collection():
        peaks, faults = _faults(program)
        raise_faults("check: the program", faults)
        if streams is not None:
            raise_faults("check: the program", stream_faults(program, streams))
        return Report(
            tuple(peaks),
            tuple(map(len, program.groups)),
            sum(type(step) is Send for steps in program.groups for step in steps),
        )


def _faults(program: Program) -> tuple[list[int], list[str]]:
    """Returns the most bytes alive at once in each group, and all faults."""
    peaks: list[int] = []
    faults: list[str] = []
    try:
        faults += _task_faults(program)
        for group in range(program.num_groups):
            walk = Liveness(program, group)
            faults += walk.run()
            peaks.append(walk.peak)
        faults += transfer_faults(program)
    except (TypeError, AttributeError, IndexError):  # an entry is not a task, a value or a number
        shape, is_legible = _shape_faults(program)
        if is_legible and not shape:
            raise
        return peaks, shape
    if faults or any(len(ends) not in (0, program.num_groups) for ends in (program.inputs, program.outputs)):
        faults = _shape_faults(program)[0] + faults
    return peaks, faults


def _shape_faults(program: Program) -> tuple[list[str], bool]:
    """Returns nonexistent groups, entries that are no instructions, and whether the program can be read at all."""
    faults = []
    legible = True
    groups = range(program.num_groups)
    for name, sets in (("inputs", program.inputs), ("outputs", program.outputs)):
        if len(sets) not in (0, program.num_groups):
            faults.append(
                f"{name} has {counted(len(sets), 'entry')}; expected one for each of {program.num_groups} groups, or"
                " none"
            )
    if len(program.placements) not in (0, len(program.tasks)):
        faults.append(
            f"placements has {counted(len(program.placements), 'entry')}; expected one for each of"
            f" {len(program.tasks)} loops,"
            " or none"
        )
    for placement in dict.fromkeys((program.placement, *program.placements)):
        for stage, group in enumerate(placement):
            if group not in groups:
                faults.append(f"stage {stage} is placed in group {group!r}; expected 0 to {program.num_groups - 1}")
    for group, instructions in enumerate(program.groups):
        for index, instruction in enumerate(instructions):
            values: tuple[object, ...]
            if isinstance(instruction, WORK):
                values = (*instruction.reads, *instruction.writes, *instruction.donates)
            elif isinstance(instruction, _ON_ONE_VALUE):
                values = (instruction.value,)
            else:
                faults.append(f"{located(group, index, repr(instruction))}: not an instruction")
                legible = False
                continue
            strange = [value for value in values if not isinstance(value, Value)]
            if isinstance(instruction, Run):
                strange = [*(task for task in instruction.tasks if not _is_task(task)), *strange]
            if strange:
                faults.append(f"group {group}, #{index}: {strange[0]!r} is no task and no value")
                legible = False
            elif isinstance(instruction, TRANSFERS):
                other = instruction.to_group if isinstance(instruction, Send) else instruction.from_group
                if other not in groups:
                    faults.append(f"{located(group, index, instruction)}: there is no group {other!r}")
                elif other == group:
                    faults.append(f"{located(group, index, instruction)}: that is the group itself")
    return faults, legible


def _is_task(task: object) -> bool:
    return (
        isinstance(task, Task)
        and isinstance(task.stage, int)
        and isinstance(task.microbatch, int)
        and task.kind in KINDS
    )


def _task_faults(program: Program) -> list[str]:
    """Returns where a loop does not run every task once, in the group of its stage, as B or as I and W."""
    runs: dict[int, list[tuple[int, Task]]] = defaultdict(list)
    for group, instructions in enumerate(program.groups):
        for instruction in instructions:
            if isinstance(instruction, Run):
                runs[instruction.loop] += [(group, task) for task in instruction.tasks]
    faults = []
    for loop in sorted(set(range(len(program.tasks))) | set(runs), key=repr):
        where = f" of loop {loop}" if len(program.tasks) > 1 else ""
        if not isinstance(loop, int) or not 0 <= loop < len(program.tasks):
            faults.append(f"task {runs[loop][0][1]} belongs to loop {loop!r}; the program has {len(program.tasks)}")
            continue
        tasks, placement = program.tasks[loop], program.placement_of(loop)
        if isinstance(tasks, LoopTasks) and _covers(runs[loop], placement, tasks):
            continue
        expected = frozenset(part for task in tasks for part in task.parts)
        if outside := sorted({task.stage for task in expected if not 0 <= task.stage < len(placement)}):
            faults.append(f"stages {outside}{where} have no place; placement names {counted(len(placement), 'stage')}")
            expected = frozenset(task for task in expected if task.stage not in outside)
        faults += coverage_faults(runs[loop], placement, expected, where)
    return faults


def _covers(runs: Iterable[tuple[int, Task]], placement: Sequence[int], tasks: LoopTasks) -> bool:
    """Returns whether all is right. It is quick; `coverage_faults` finds the faults."""
    numbers = Numbers(tasks, "b")
    for group, task in runs:
        if type(task) is not Task or not numbers.add(task, 1):
            return False
        if not task.stage < len(placement) or placement[task.stage] != group:
            return False
    return not numbers.left
