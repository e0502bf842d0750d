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
    walk = _Merge(program, set(range(program.num_groups) if groups is None else groups))
    with without_collection():
        walk.run()
    if blocked(walk.position, program.groups):
        raise ScheduleError("merge: the program deadlocks; check(program) says where.")
    return tuple(walk.steps)


def positions(program: Program) -> list[int]:
    """Returns how many of its instructions each group reaches on that clock: not all, if the program deadlocks."""
    walk = _Merge(program, ())
    walk.run()
    return walk.position


class _Merge:
    """The program on a clock.

    A Send waits from the moment its value exists, a Recv from the moment its group has started all work before it. Once
    both wait, they happen together.
    """

    def __init__(self, program: Program, wanted: Collection[int]) -> None:
        self.groups = program.groups
        self.wanted = wanted  # The groups whose instructions are kept
        self.steps: list[GroupInstruction] = []  # The instructions that have happened, each with its group
        self.position = [0] * program.num_groups  # For each group, its next instruction
        self.issued = [0] * program.num_groups  # When the group started its last instruction
        self.free_at = [0] * program.num_groups  # When the group's devices have finished that instruction
        self.received_at = [-1] * program.num_groups  # When the group last received a value
        self.waiting: dict[int, Transfer] = {}  # For each group that waits for another in a transfer, the transfer
        self.heap: list[tuple[int, int, int]] = []  # Next instructions: time, rank among those of the same time, group

    def run(self) -> None:
        """Runs the program to its end, or until all groups that are left wait."""
        for group in range(len(self.groups)):
            self._queue(group)
        heap, groups, position = self.heap, self.groups, self.position
        while heap:
            time, _, group = heappop(heap)
            instruction = groups[group][position[group]]
            if isinstance(instruction, TRANSFERS):
                self._meet(group, instruction, time)
            else:
                self._happen(group, time, duration(instruction))
                self._queue(group)

    def _queue(self, group: int) -> None:
        """Queues the group's next instruction; frees happen at once."""
        instructions, at = self.groups[group], self.position[group]
        while at < len(instructions) and type(instructions[at]) is Free:
            if group in self.wanted:
                self.steps.append((group, instructions[at]))
            at += 1
        self.position[group] = at
        if at == len(instructions):
            return
        kind = type(instructions[at])
        if kind is Recv:
            heappush(self.heap, (self.issued[group], 0, group))
        elif kind is Send:
            heappush(self.heap, (self.free_at[group], 0, group))
        else:
            waits = self.received_at[group] == self.free_at[group]
            heappush(self.heap, (self.free_at[group], 2 if waits else 1, group))

    def _meet(self, group: int, mine: Send | Recv, time: int) -> None:
        """Brings one side of a transfer: it waits for the other, or both happen."""
        transfer = Transfer.of(group, mine)
        _, source, target = transfer
        other = target if source == group else source
        if self.waiting.get(other) != transfer:
            self.waiting[group] = transfer
            return
        del self.waiting[other]
        for side in (source, target):
            self._happen(side, time)
        self.received_at[target] = time
        for side in (source, target):
            self._queue(side)

    def _happen(self, group: int, time: int, takes: int = 0) -> None:
        if group in self.wanted:
            self.steps.append((group, self.groups[group][self.position[group]]))
        self.position[group] += 1
        self.issued[group] = time
        if time + takes > self.free_at[group]:
            self.free_at[group] = time + takes


def duration(instruction: Instruction) -> int:
    """Returns the duration of a task or a call on the clock of :func:`merge`."""
    if isinstance(instruction, Run):
        if instruction.also:
            return sum(DURATION.get(task.kind, 1) for task in instruction.tasks)
        return DURATION.get(instruction.task.kind, 1)
    return 1
