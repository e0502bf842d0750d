"""Merges the instructions of several groups into one order, for a process that owns them."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush

from scheduler.errors import ScheduleError
from scheduler.programs.instructions import TRANSFERS, WORK, Free, Instruction, Program, Recv, Run, Send, Transfer
from scheduler.programs.lowering import DURATION

GroupInstruction = tuple[int, Instruction]


def merge(program: Program, groups: Collection[int] | None = None) -> tuple[GroupInstruction, ...]:
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
    return tuple(step for step in _Merge(program).run() if step[0] in wanted)


class _Merge:
    """The program on a clock.

    A Send stands from the moment its value exists, a Recv from the moment the group has started what is before it. Each
    waits for the other; then both happen.

    Attributes:
        steps: The instructions that have happened, each with its group.
        position: For each group, its next instruction.
        issued: When the group started its last instruction.
        free_at: When the group's devices are done with it.
        received_at: When the group received last.
        waiting: The transfers of which one side has come.
        heap: The groups' next instructions: the time, the rank among those of the same time, and the group.
    """

    def __init__(self, program: Program) -> None:
        self.groups = program.groups
        self.steps: list[GroupInstruction] = []
        self.position = [0] * program.num_groups
        self.issued = [0] * program.num_groups
        self.free_at = [0] * program.num_groups
        self.received_at = [-1] * program.num_groups
        self.waiting: set[tuple[type, Transfer]] = set()
        self.heap: list[tuple[int, int, int]] = []

    def run(self) -> list[GroupInstruction]:
        """All groups' instructions in the order in which they start."""
        for group in range(len(self.groups)):
            self._queue(group)
        while self.heap:
            time, _, group = heappop(self.heap)
            instruction = self.groups[group][self.position[group]]
            if isinstance(instruction, TRANSFERS):
                self._meet(Transfer.of(group, instruction), type(instruction), time)
            else:
                self._happen(group, time, _duration(instruction))
                self._queue(group)
        if any(at < len(instructions) for at, instructions in zip(self.position, self.groups, strict=True)):
            raise ScheduleError("merge: the program deadlocks; check(program) says where.")
        return self.steps

    def _queue(self, group: int) -> None:
        """Queues the group's next instruction; frees happen at once."""
        instructions = self.groups[group]
        while self.position[group] < len(instructions):
            instruction = instructions[self.position[group]]
            if not isinstance(instruction, Free):
                break
            self.steps.append((group, instruction))
            self.position[group] += 1
        else:
            return
        if isinstance(instruction, WORK):
            waits = self.received_at[group] == self.free_at[group]
            heappush(self.heap, (self.free_at[group], 2 if waits else 1, group))
        else:
            times = self.free_at if isinstance(instruction, Send) else self.issued
            heappush(self.heap, (times[group], 0, group))

    def _meet(self, transfer: Transfer, side: type, time: int) -> None:
        """One side of a transfer has come: it waits for the other, or both happen."""
        partner = (Recv if side is Send else Send, transfer)
        if partner not in self.waiting:
            self.waiting.add((side, transfer))
            return
        self.waiting.remove(partner)
        for group in (transfer.source, transfer.target):
            self._happen(group, time)
        self.received_at[transfer.target] = time
        for group in (transfer.source, transfer.target):
            self._queue(group)

    def _happen(self, group: int, time: int, duration: int = 0) -> None:
        self.steps.append((group, self.groups[group][self.position[group]]))
        self.position[group] += 1
        self.issued[group] = time
        self.free_at[group] = max(self.free_at[group], time + duration)


def _duration(instruction: Instruction) -> int:
    if isinstance(instruction, Run):
        return sum(DURATION.get(task.kind, 1) for task in instruction.tasks)
    return 1
