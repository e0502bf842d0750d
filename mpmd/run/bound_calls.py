"""Binds the instructions that call executables."""

from collections.abc import Set
from typing import NamedTuple

from mpmd.compile.executable import Executable
from mpmd.compile.program import edge_name
from mpmd.compile.step import LoopProgram, StepPrograms
from mpmd.graphs.body import Place
from mpmd.ops.reductions import Operation
from mpmd.run.bound_instruction import RUN, BoundInstruction
from mpmd.run.slots import Slots
from scheduler import Call, Run, Task, Value


class TaskValues(NamedTuple):
    """Inputs and outputs of tasks of one stage and kind: slots of values outside the loop, names of values inside.

    An operand that differs between microbatches has a name.
    """

    constants: list[int]
    uses_index: bool
    operands: list[int | str]
    reads: list[str]
    writes: list[str]
    accumulators: list[int]


class BoundCalls:
    """Binds the instructions that call executables."""

    def __init__(self, programs: StepPrograms, slots: Slots, dealt: Set[str]):
        self._programs = programs
        self.slots = slots
        slots.names.update(programs.outline.names)
        self._dealt = dealt
        self._values: dict[tuple[int, Place], TaskValues] = {}

    def call(self, group: int, instruction: Call) -> BoundInstruction:
        slots = [
            tuple(self.slots.of(group, v) for v in values)
            for values in (instruction.reads, instruction.writes, instruction.donates)
        ]
        text = f"{instruction.name} in group {group}"
        frees = tuple(set(slots[2]) - set(slots[1]))
        act = self._programs.named[instruction.name]
        constants = self._programs.constants.get(instruction.name, ())  # zeros have none
        reads = (*(self.slots.of_constant(group, c) for c in constants), *slots[0])
        return BoundInstruction(RUN, act, reads, slots[1], group, text, frees=frees, donates=slots[2])

    def run(self, group: int, instruction: Run) -> list[BoundInstruction]:
        """Binds a task, or a pair of tasks."""
        program = self._programs.loops[instruction.loop]
        return [
            self._task(group, program, executable, tasks) for executable, tasks in self._programs.calls(instruction)
        ]

    def alone(self, group: int, loop: int, task: Task) -> BoundInstruction:
        """Binds a task as its own executable."""
        program = self._programs.loops[loop]
        executable = program.tasks[Place(task.stage, task.kind)].executable
        assert executable is not None
        return self._task(group, program, executable, (task,))

    def _task(
        self, group: int, program: LoopProgram, executable: Executable, tasks: tuple[Task, ...]
    ) -> BoundInstruction:
        """Binds the tasks of one executable: the arguments (results) of the first task, then of the second."""
        reads: tuple[int, ...] = ()
        writes: tuple[int, ...] = ()
        donates: tuple[int, ...] = ()
        loop = program.loop.number
        for task in tasks:
            values, microbatch = self._values_of(group, program, Place(task.stage, task.kind)), task.microbatch
            number = (self.slots.of_microbatch(group, loop, microbatch),) if values.uses_index else ()
            own = [x if isinstance(x, int) else self.slots.of(group, Value(x, microbatch)) for x in values.operands]
            taken = [self.slots.of(group, Value(name, microbatch)) for name in values.reads]
            given = [self.slots.of(group, Value(name, microbatch)) for name in values.writes]
            reads += (*values.constants, *number, *own, *taken, *values.accumulators)
            writes += (*values.accumulators, *given)
            donates += (*values.accumulators,)
        text = f"{'+'.join(map(str, tasks))} in group {group}"
        return BoundInstruction(RUN, executable, reads, writes, group, text, tasks, donates=donates, loop=loop)

    def values(self, group: int, loop: int, place: Place) -> tuple[TaskValues, list[Operation]]:
        """Returns the inputs and outputs of tasks, and the operations of their accumulators."""
        program = self._programs.loops[loop]
        accumulators, accumulates = program.loop.partition.accumulators, program.tasks[place].body.accumulates
        return self._values_of(group, program, place), [accumulators[k].operation for k in accumulates]

    def _values_of(self, group: int, program: LoopProgram, place: Place) -> TaskValues:
        key = program.loop.number, place
        if key not in self._values:
            loop, body = program.loop, program.tasks[place].body
            constants = program.tasks[place].constants
            operands = [(self.slots.names[v], v) for v in body.operands]
            results = [loop.partition.accumulators[k].result for k in body.accumulates]
            self._values[key] = TaskValues(
                [self.slots.of_constant(group, c) for c in constants],
                body.uses_index,
                [name if name in self._dealt else self.slots.around(group, v) for name, v in operands],
                [edge_name(loop, v) for v in body.reads],
                [edge_name(loop, v) for v in body.writes],
                [self.slots.around(group, v) for v in results],
            )
        return self._values[key]
