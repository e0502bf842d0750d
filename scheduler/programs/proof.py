"""A short proof that a program is right, in one pass over each list; it says nothing about what is wrong."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from scheduler.ordering import LoopTasks
from scheduler.programs.instructions import Call, Free, Program, Recv, Run, Send, Value
from scheduler.task import Task

Sequences = dict[tuple[int, int], list[Value]]
"""For each pair of groups, sender first, the values in the order in which they are sent, or received."""


def peak_bytes(program: Program) -> list[int] | None:
    """For each group of a right program the most bytes alive at once; None if something may be wrong.

    It proves all that :func:`scheduler.check` names. Most programs are right, so most are proved here, in a fraction of
    the time that it takes to find out and to say what is wrong.
    """
    if not all(isinstance(tasks, LoopTasks) for tasks in program.tasks):
        return None
    if any(len(ends) not in (0, program.num_groups) for ends in (program.inputs, program.outputs)):
        return None
    coverage = [_Coverage(tasks) for tasks in program.tasks if isinstance(tasks, LoopTasks)]
    walks = [_Walk(program, group, coverage) for group in range(program.num_groups)]
    sent: Sequences = {}
    received: Sequences = {}
    try:
        if not all(walk.run(sent, received) for walk in walks):
            return None
    except TypeError:  # something stands there that is no task, no value, or no number
        return None
    if sent != received or any(loop.left for loop in coverage) or not _can_run([w.meets for w in walks]):
        return None
    return [walk.peak for walk in walks]


class _Coverage:
    """Which tasks of a loop have run: each once, as B or as I and W."""

    def __init__(self, tasks: LoopTasks) -> None:
        blank = bytearray(tasks.num_microbatches)
        self.done = {(stage, kind): blank[:] for stage in range(tasks.num_stages) for kind in tasks.kinds}
        self.left = len(tasks)

    def add(self, task: Task) -> bool:
        """Whether the task is one of the loop, and has not run before."""
        for part in ("I", "W") if task.kind == "B" else (task.kind,):
            done = self.done.get((task.stage, part))
            if done is None or not 0 <= task.microbatch < len(done) or done[task.microbatch]:
                return False
            done[task.microbatch] = 1
            self.left -= 1
        return True


class _Walk:
    """One group's list, run once.

    Attributes:
        peak: The most bytes alive at once.
        meets: The transfers of the group in order: twice the other group, and one more for a send.
    """

    def __init__(self, program: Program, group: int, coverage: Sequence[_Coverage]) -> None:
        self.program = program
        self.group = group
        self.coverage = coverage
        self.alive = set(program.inputs_of(group))
        self.live = self.peak = sum(program.nbytes.get(value.name, 0) for value in self.alive)
        self.meets = array("q")

    def run(self, sent: Sequences, received: Sequences) -> bool:
        """Whether every value is there when it is used and goes once, and all tasks are of this group."""
        alive, group, others = self.alive, self.group, range(self.program.num_groups)
        for instruction in self.program.groups[group]:
            if isinstance(instruction, Free):
                if not self._let_go(instruction.value):
                    return False
            elif isinstance(instruction, Send):
                other = instruction.to_group
                if instruction.value not in alive or other not in others or other == group:
                    return False
                sent.setdefault((group, other), []).append(instruction.value)
                self.meets.append(2 * other + 1)
            elif isinstance(instruction, Recv):
                other = instruction.from_group
                if other not in others or other == group or not self._make(instruction.value):
                    return False
                received.setdefault((other, group), []).append(instruction.value)
                self.meets.append(2 * other)
            elif isinstance(instruction, Run):
                if not self._has_place(instruction) or not self._work(instruction):
                    return False
            elif not isinstance(instruction, Call) or not self._work(instruction):
                return False
        return alive == self.program.outputs_of(group)

    def _has_place(self, run: Run) -> bool:
        if type(run.loop) is not int or not 0 <= run.loop < len(self.coverage):
            return False
        placement, loop = self.program.placement, self.coverage[run.loop]
        return all(
            type(task) is Task
            and loop.add(task)
            and task.stage < len(placement)
            and placement[task.stage] == self.group
            for task in run.tasks
        )

    def _work(self, instruction: Run | Call) -> bool:
        alive = self.alive
        if not alive.issuperset(instruction.reads):
            return False
        for value in instruction.donates:
            if value not in instruction.reads or not self._let_go(value):
                return False
        return all(map(self._make, instruction.writes))

    def _make(self, value: Value) -> bool:
        if type(value) is not Value or value in self.alive:
            return False
        self.alive.add(value)
        self.live += self.program.nbytes.get(value.name, 0)
        if self.live > self.peak:
            self.peak = self.live
        return True

    def _let_go(self, value: Value) -> bool:
        if value not in self.alive:
            return False
        self.alive.remove(value)
        self.live -= self.program.nbytes.get(value.name, 0)
        return True


def _can_run(meets: Sequence[array[int]]) -> bool:
    """Whether all transfers happen if a send and its receive wait for each other.

    Each pair of groups sends and receives the same values in the same order, so two groups that stand at a send and a
    receive of each other stand at the same transfer.
    """
    position = [0] * len(meets)
    waiting = [-1] * len(meets)
    ready = list(range(len(meets)))
    while ready:
        group = ready.pop()
        at, mine = position[group], meets[group]
        while at < len(mine):
            other, is_send = mine[at] >> 1, mine[at] & 1
            if waiting[other] != 2 * group + 1 - is_send:
                waiting[group] = mine[at]
                break
            waiting[other] = -1
            position[other] += 1
            ready.append(other)
            at += 1
        position[group] = at
    return all(at == len(mine) for at, mine in zip(position, meets, strict=True))
