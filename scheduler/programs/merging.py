"""Merges the instructions of several groups into one order, for a process that owns them."""

from collections.abc import Collection
from heapq import heappop, heappush

from scheduler.base.collector import without_collection
from scheduler.engine import blocked
from scheduler.errors import ScheduleError
from scheduler.programs.instructions import TRANSFERS, Free, Instruction, Program, Recv, Run, Send, Transfer
from scheduler.programs.task_units import DURATION

GroupInstruction = tuple[int, Instruction]


def merge(program: Program, groups: Collection[int] | None = None) -> tuple[GroupInstruction, ...]:
    """Merges the instructions of several groups into one order of pairs (group, instruction), alike in every process.

    The whole program is run on a clock (F, I, W and calls take 1, B takes 2, transfers nothing) where a Send and its
    Recv happen together. Instructions are ordered by start, so a reader of a value comes as late as the plan allows,
    and each Recv directly follows its Send. The order for some groups is the order for all, without the others:
    processes that own different groups never wait for each other in a circle, even if sends block.

    Args:
        program: The program; it may hold calls and several loops.
        groups: The groups wanted; all by default.

    Raises:
        ScheduleError: The program deadlocks, or sends and receives do not match (:func:`check` shows why).
    """
    with without_collection():
        steps, position = _on_clock(program, set(range(program.num_groups) if groups is None else groups))
    if blocked(position, program.groups):
        raise ScheduleError("merge: the program deadlocks; check(program) says where.")
    return tuple(steps)


def positions(program: Program) -> list[int]:
    """Returns how many of its instructions each group reaches on that clock: not all, if the program deadlocks."""
    return _on_clock(program, ())[1]


def _on_clock(program: Program, wanted: Collection[int]) -> tuple[list[GroupInstruction], list[int]]:
    """Runs a program on the clock to its end, or until all groups that are left wait.

    A Send waits from the moment its value exists, a Recv from the moment its group has started all work before it. Once
    both wait, they happen together.

    Returns:
        The instructions of the wanted groups that have happened, and how many of its instructions each group reaches.
    """
    groups, num_groups = program.groups, program.num_groups
    steps: list[GroupInstruction] = []
    position = [0] * num_groups
    issued = [0] * num_groups  # When the group started its last instruction
    free_at = [0] * num_groups  # When the group's devices have finished that instruction
    received_at = [-1] * num_groups  # When the group last received a value
    waiting: dict[int, Transfer] = {}  # For each group that waits for another in a transfer, the transfer
    heap: list[tuple[int, int, int]] = []  # Next instructions: time, rank among those of the same time, group

    def queue(group: int) -> None:
        """Queues the group's next instruction; frees happen at once."""
        instructions, at = groups[group], position[group]
        while at < len(instructions) and type(instructions[at]) is Free:
            if group in wanted:
                steps.append((group, instructions[at]))
            at += 1
        position[group] = at
        if at == len(instructions):
            return
        kind = type(instructions[at])
        if kind is Recv:
            heappush(heap, (issued[group], 0, group))
        elif kind is Send:
            heappush(heap, (free_at[group], 0, group))
        else:
            heappush(heap, (free_at[group], 2 if received_at[group] == free_at[group] else 1, group))

    def happen(group: int, time: int, takes: int = 0) -> None:
        if group in wanted:
            steps.append((group, groups[group][position[group]]))
        position[group] += 1
        issued[group] = time
        if time + takes > free_at[group]:
            free_at[group] = time + takes

    for group in range(num_groups):
        queue(group)
    while heap:
        time, _, group = heappop(heap)
        instruction = groups[group][position[group]]
        if not isinstance(instruction, TRANSFERS):
            happen(group, time, duration(instruction))
            queue(group)
            continue
        transfer = Transfer.of(group, instruction)
        _, source, target = transfer
        other = target if source == group else source
        if waiting.get(other) != transfer:
            waiting[group] = transfer
            continue
        del waiting[other]
        for side in (source, target):
            happen(side, time)
        received_at[target] = time
        for side in (source, target):
            queue(side)
    return steps, position


def duration(instruction: Instruction) -> int:
    """Returns the duration of a task or a call on the clock of :func:`merge`."""
    if isinstance(instruction, Run):
        if instruction.also:
            return sum(DURATION.get(task.kind, 1) for task in instruction.tasks)
        return DURATION.get(instruction.task.kind, 1)
    return 1
