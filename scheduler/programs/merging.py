"""One order for a process that owns several groups."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush

from scheduler.errors import ScheduleError
from scheduler.programs.instructions import TRANSFERS, WORK, Free, Instruction, Program, Run, Send, Value
from scheduler.programs.lowering import DURATION

Step = tuple[int, Instruction]


def merge(program: Program, groups: Collection[int] | None = None) -> tuple[Step, ...]:
    """The instructions of several groups in one order, the same in every process: pairs of group and instruction.

    The whole program is run on a clock (F, I, W and calls take 1, B takes 2, transfers nothing) where a Send and its
    Recv happen together. Instructions come in order of their start, so what waits for a value comes as late as the
    plan allows, and each Recv directly follows its Send. The order for some groups is the order for all, without the
    others: processes that own different groups never wait for each other in a circle, even if sends block.

    Args:
        program: The program; it may hold calls and several loops.
        groups: The groups wanted; all by default.

    Raises:
        ScheduleError: The program deadlocks, or sends and receives do not match (:func:`check` says why).
    """
    wanted = set(range(program.num_groups) if groups is None else groups)
    return tuple(step for step in _on_the_clock(program) if step[0] in wanted)


def _on_the_clock(program: Program) -> list[Step]:
    """All groups' instructions in the order in which they start.

    A Send stands from the moment its value exists, a Recv from the moment the group has started what is before it. Each
    waits for the other; then both happen.
    """
    steps: list[Step] = []
    position = [0] * program.num_groups
    issued = [0] * program.num_groups  # when the group started its last instruction
    free_at = [0] * program.num_groups  # when its devices are done with it
    received_at = [-1] * program.num_groups
    parked: dict[tuple[bool, int, int, Value], int] = {}
    heap: list[tuple[int, int, int]] = []

    def queue(group: int) -> None:
        """What the group does next; frees happen at once."""
        instructions = program.groups[group]
        index = position[group]
        while index < len(instructions) and isinstance(instructions[index], Free):
            steps.append((group, instructions[index]))
            index += 1
        position[group] = index
        if index == len(instructions):
            return
        instruction = instructions[index]
        if isinstance(instruction, WORK):
            waits = received_at[group] == free_at[group]
            heappush(heap, (free_at[group], 2 if waits else 1, group))
        else:
            heappush(heap, (free_at[group] if isinstance(instruction, Send) else issued[group], 0, group))

    def happen(group: int, time: int, duration: int = 0) -> None:
        steps.append((group, program.groups[group][position[group]]))
        position[group] += 1
        issued[group] = time
        free_at[group] = max(free_at[group], time + duration)

    for group in range(program.num_groups):
        queue(group)
    while heap:
        time, _, group = heappop(heap)
        instruction = program.groups[group][position[group]]
        if isinstance(instruction, TRANSFERS):
            is_send = isinstance(instruction, Send)
            source, target = (group, instruction.to_group) if is_send else (instruction.from_group, group)
            if parked.pop((not is_send, source, target, instruction.value), None) is None:
                parked[is_send, source, target, instruction.value] = group
                continue
            happen(source, time)
            happen(target, time)
            received_at[target] = time
            queue(source)
            queue(target)
        else:
            happen(group, time, _duration(instruction))
            queue(group)
    if any(position[group] < len(instructions) for group, instructions in enumerate(program.groups)):
        raise ScheduleError("merge: the program deadlocks; check(program) says where.")
    return steps


def _duration(instruction: Instruction) -> int:
    if isinstance(instruction, Run):
        return sum(DURATION.get(task.kind, 1) for task in instruction.tasks)
    return 1
