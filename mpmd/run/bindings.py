"""Binds each instruction of this process to its callable and to the slots that it reads and writes.

This happens once, before the first step. One list holds a step's values; each value of each group has a slot in it.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import jax
import numpy as np

import scheduler
from mpmd.compile.executable import Executable
from mpmd.compile.step import StepPrograms
from mpmd.graphs.body import Place
from mpmd.job.job import Job
from mpmd.job.wires import ORDER_BITS
from mpmd.ops.reductions import Operation
from mpmd.run.bound_calls import BoundCalls
from mpmd.run.bound_instruction import ALIAS, RUN, BoundInstruction, Crossing, HostCall
from mpmd.run.bound_transfers import BoundTransfers
from mpmd.run.run_ahead import Limits
from mpmd.run.slots import Slots, SlotValues
from scheduler import Call, Free, Program, Recv, Run, Send, Value
from scheduler.programs.merging import GroupInstruction


@dataclasses.dataclass(frozen=True)
class Bindings:
    """All instructions of this process."""

    instructions: Sequence[BoundInstruction]
    template: SlotValues  # the slots before a step; microbatch indices and other constants are filled in
    inputs: list[list[tuple[int, int]]]  # per flat argument of the step, groups and slots
    outputs: list[list[tuple[int, int]]]  # per flat result, likewise
    num_pieces: int  # the number of pieces that all processes exchange in a step
    slots: "Slots"  # the slot numbers of values
    places: list[int]  # per instruction, its position in the order of `scheduler.merge`

    def finish(self) -> None:
        """Waits for all programs."""
        for b in self.instructions:
            if isinstance(act := b.act, Executable | HostCall):  # read once: another thread may finish them too
                b.act = act.call

    @property
    def num_calls(self) -> int:
        """The number of calls of executables in a step."""
        return sum(i.code == RUN for i in self.instructions)

    @property
    def num_moves(self) -> int:
        """The number of transfers in a step that this process takes part in."""
        return len(self.crossings)

    @property
    def crossings(self) -> list[Crossing]:
        """The values that these transfers move."""
        return [i.crossing for i in self.instructions if i.crossing is not None and i.code != ALIAS]


def bind(programs: StepPrograms, program: Program, job: Job | None) -> Bindings:
    """Binds the instructions of this process's groups. In a job (None: all groups are here), waits for compilations."""
    slots, limits = Slots(programs.mesh, job), None if job is None else Limits(job, programs, program)
    return _bind(programs, program, job, limits, BoundCalls(programs, slots, frozenset()), _merged(programs, program))


def with_added(
    plain: Bindings,
    places: Sequence[int],
    added: Iterable[tuple[int, Sequence[GroupInstruction]]],
    programs: StepPrograms,
    program: Program,
    job: Job | None,
    alike: Mapping[tuple[int, Value], tuple[int, Value]],
) -> Bindings:
    """Returns the bindings of a compiled step with further instructions inserted (`mpmd.run.audits`).

    Args:
      places: per instruction, its position in the order of `scheduler.merge`.
      added: such positions in ascending order, each with the instructions to insert before it.
      programs: the programs that the inserted instructions call.
      program: the program with all instructions.
      alike: maps a value of a group to the value of the step that it shares a slot with.
    """
    slots = plain.slots.extended(alike)
    limits = None if job is None else Limits.none(job, programs, program)
    transfers = BoundTransfers(programs, program, job, slots, limits, plain.num_pieces)
    calls, found, at = BoundCalls(programs, slots, frozenset()), list[BoundInstruction](), 0
    for place, instructions in added:
        before, at = at, bisect_left(places, place)
        found += plain.instructions[before:at]
        new, _ = _bound(instructions, programs.mesh.local_groups, calls, transfers)
        if found and new and new[0].code == RUN:  # it may read slots that were dead here
            late = tuple(slot for slot in found[-1].frees if slot in new[0].reads)
            found[-1] = dataclasses.replace(found[-1], frees=tuple(s for s in found[-1].frees if s not in late))
            new[0].frees += late
        found += new
    found += plain.instructions[at:]
    template = [*plain.template, *[None] * (len(slots) - len(plain.template))]
    bindings = dataclasses.replace(
        plain, instructions=tuple(found), template=template, num_pieces=transfers.num_pieces, slots=slots
    )
    bindings.finish()
    return bindings


def values_of_instruction(
    programs: StepPrograms, job: Job | None, group: int, instruction: Run | Call, dealt: Set[str] = frozenset()
) -> tuple[list[Value | np.generic], list[Value], list[Value]]:
    """Returns the inputs, the outputs and the donated inputs of an instruction that calls one executable.

    The inputs come in the executable's order: values, and numbers that are constants of the program. The arguments
    named in `dealt` differ between microbatches.
    """
    slots = Slots(programs.mesh, job)
    calls = BoundCalls(programs, slots, dealt)
    bound = calls.call(group, instruction) if isinstance(instruction, Call) else calls.run(group, instruction)[0]
    reads, writes, donates = (slots.values(of) for of in (bound.reads, bound.writes, bound.donates))
    return reads, writes, donates


def _merged(programs: StepPrograms, program: Program) -> Sequence[GroupInstruction]:
    """Returns the instructions of all groups in one order; none where this process has no group."""
    return scheduler.merge(program) if programs.mesh.local_groups else ()


class SummedOutput(NamedTuple):
    """An accumulator of a task: its positions among the reads and the writes of the instruction."""

    read: int
    write: int
    operation: Operation


class BoundBuckets:
    """The bound programs of buckets, which match instruction by instruction, for microbatches of different shapes."""

    def __init__(self, buckets: Sequence[tuple[StepPrograms, Program]], job: Job | None, dealt: Set[str]):
        (first, program), *others = buckets
        self.slots = Slots(first.mesh, job)
        self._limits = None if job is None else Limits(job, first, program, ORDER_BITS, [p for p, _ in others])
        self._calls = [BoundCalls(programs, self.slots, dealt) for programs, _ in buckets]
        merged = {id(one): _merged(first, one) for one in {id(one): one for _, one in buckets}.values()}
        self.of = [  # per bucket; all share the slots
            _bind(programs, program, job, self._limits, calls, merged[id(program)])
            for (programs, program), calls in zip(buckets, self._calls, strict=True)
        ]
        self.template = self.slots.template()

    def sums(self, b: BoundInstruction, buckets: Sequence[int]) -> list[list[SummedOutput]]:
        """Returns the accumulators of each task of an instruction; `buckets` has the bucket of each task."""
        found: list[list[SummedOutput]] = []
        num_reads = num_writes = 0
        for task, bucket in zip(b.tasks, buckets, strict=True):
            values, operations = self._calls[bucket].values(b.group, b.loop, Place(task.stage, task.kind))
            num_reads += len(values.constants) + values.uses_index + len(values.operands) + len(values.reads)
            found.append([SummedOutput(num_reads + k, num_writes + k, op) for k, op in enumerate(operations)])
            num_reads += len(operations)
            num_writes += len(operations) + len(values.writes)
        return found

    def pair(self, b: BoundInstruction, buckets: tuple[int, int]) -> BoundInstruction:
        """Binds a pair of tasks as two executables, one after the other: their microbatches differ in shape."""
        halves = [
            self._calls[bucket].alone(b.group, b.loop, task) for bucket, task in zip(buckets, b.tasks, strict=True)
        ]
        first, second = (half.act.call for half in halves)
        cut = len(halves[0].reads)

        def act(*arrays: jax.Array) -> list[jax.Array]:
            return [*first(*arrays[:cut]), *second(*arrays[cut:])]

        return dataclasses.replace(
            halves[0],
            act=act if self._limits is None else self._limits.counted(b.group, act),
            reads=halves[0].reads + halves[1].reads,
            writes=halves[0].writes + halves[1].writes,
            donates=halves[0].donates + halves[1].donates,
            text=b.text,
            tasks=b.tasks,
            frees=b.frees,
        )


def _bind(
    programs: StepPrograms,
    program: Program,
    job: Job | None,
    limits: Limits | None,
    calls: BoundCalls,
    merged: Sequence[GroupInstruction],
) -> Bindings:
    outline, slots = programs.outline, calls.slots
    if limits is not None:
        limits.begin()
    transfers = BoundTransfers(programs, program, job, slots, limits)
    inputs = slots.of_all(zip(outline.trace.jaxpr.invars, outline.inputs, strict=True))
    found, places = _bound(merged, programs.mesh.local_groups, calls, transfers)
    if limits is not None:
        limits.close(transfers.num_pieces)
    runs = [b for b in found if b.code == RUN]
    for executable in {b.act: None for b in runs}:
        executable.start()
    if limits is not None:
        for b in runs:  # last of all, since it waits for compilations
            b.act = limits.counted(b.group, b.act.call)
    outputs = slots.of_all(outline.outputs)
    return Bindings(tuple(found), slots.template(), inputs, outputs, transfers.num_pieces, slots, places)


def _bound(
    merged: Iterable[GroupInstruction], local: Collection[int], calls: BoundCalls, transfers: BoundTransfers
) -> tuple[list[BoundInstruction], list[int]]:
    """Returns the bound instructions of this process, and their places among the instructions of all groups."""
    slots = calls.slots
    found: list[BoundInstruction] = []
    places: list[int] = []
    last: dict[int, BoundInstruction] = {}  # by group
    for place, (group, instruction) in enumerate(merged):
        bound: list[BoundInstruction] = []
        if isinstance(instruction, Send):
            bound = transfers.send(group, instruction)
        elif group not in local:
            continue
        elif isinstance(instruction, Run):
            bound = calls.run(group, instruction)
        elif isinstance(instruction, Call):
            bound = [calls.call(group, instruction)]
        elif isinstance(instruction, Recv):
            bound = transfers.receive(group, instruction)
        elif isinstance(instruction, Free) and group in last:
            last[group].frees += (slots.of(group, instruction.value),)
        if bound:
            last[group] = bound[-1]
            if isinstance(instruction, Recv) and bound[-1].reads is not None:  # from another group of this process
                last[instruction.from_group] = bound[-1]
        found += bound
        places += [place] * len(bound)
    return found, places
