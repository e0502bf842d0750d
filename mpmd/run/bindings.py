"""Binds each instruction of this process to what it calls and to the slots that it reads and writes.

Worked out once, before the first step. A step's values stand in one list; each value of each group has a slot in it.
"""

import copy
import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import scheduler
from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import Device, MpmdMesh
from mpmd.compile.executable import Executable
from mpmd.compile.program import edge_name
from mpmd.compile.step import LoopProgram, StepPrograms
from mpmd.graphs.body import Place
from mpmd.job.job import Job
from mpmd.job.wires import ORDER_BITS
from mpmd.ops.reductions import Operation
from mpmd.run import device_put
from mpmd.run.pieces import pieces
from mpmd.run.routes import ValueRoute
from mpmd.run.run_ahead import Flow, Limits
from scheduler import Call, Free, Program, Recv, Run, Send, Task, Value
from scheduler.programs.merging import GroupInstruction

RUN, MOVE, ALIAS, SEND, RECV = range(5)


class Crossing(NamedTuple):
    """A value that goes from one group to another."""

    value: Value
    source: int
    target: int
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class HostCall:
    """A function of the host that stands for an `Executable`."""

    name: str
    call: Callable[..., list[jax.Array]] | None

    def start(self) -> None:
        """There is nothing to load."""


@dataclasses.dataclass
class BoundInstruction:
    """One instruction of this process.

    Attributes:
      code: RUN, MOVE (to another group of this process), ALIAS (the same devices), SEND or RECV (another process).
      act: of RUN, from arrays to arrays; of MOVE, from an array to one; of SEND and RECV, from an array or None and the
        number of the step's first piece; None of ALIAS. Until `Bindings.finish` an `Executable`, which waits.
      reads, writes: slots; several of RUN, else one or None.
      group: the group that it belongs to.
      text: the instruction in words.
      tasks: of RUN, the tasks that it runs.
      frees: slots that nobody reads afterwards.
      donates: of RUN, slots whose memory it takes over.
      loop: of tasks, the loop that they belong to.
      crossing: of transfers.
      executable: of RUN.
    """

    code: int
    act: Any
    reads: Any
    writes: Any
    group: int
    text: str
    tasks: tuple[Task, ...] = ()
    frees: tuple[int, ...] = ()
    donates: tuple[int, ...] = ()
    loop: int = 0
    crossing: Crossing | None = None
    executable: Executable | None = None

    def __post_init__(self):
        if self.code == RUN and self.executable is None:  # one that was replaced after `Bindings.finish` has its own
            self.executable = self.act

    @property
    def name(self) -> str:
        """Of the program that it calls; else the instruction in words."""
        return self.text if self.executable is None else self.executable.name


@dataclasses.dataclass(frozen=True)
class Bindings:
    """All instructions of this process.

    Attributes:
      template: the slots before a step; microbatch indices and other constants are filled in.
      inputs, outputs: per flat argument (result) of the step, groups and slots.
      num_pieces: pieces that go between processes in a step, all processes' together.
      slots: the numbers of values.
      places: of each instruction, its position in the order of `scheduler.merge`.
    """

    instructions: Sequence[BoundInstruction]
    template: list[Any]
    inputs: list[list[tuple[int, int]]]
    outputs: list[list[tuple[int, int]]]
    num_pieces: int
    slots: "Slots"
    places: list[int]

    def finish(self) -> None:
        """Waits for all programs."""
        for b in self.instructions:
            if isinstance(b.act, Executable | HostCall):
                b.act = b.act.call

    @property
    def num_calls(self) -> int:
        """Executables that are called in a step."""
        return sum(i.code == RUN for i in self.instructions)

    @property
    def num_moves(self) -> int:
        """Transfers in a step that this process has to do with."""
        return len(self.crossings)

    @property
    def crossings(self) -> list[Crossing]:
        """What these transfers move."""
        return [i.crossing for i in self.instructions if i.crossing is not None and i.code != ALIAS]


def bind(programs: StepPrograms, program: Program, job: Job | None) -> Bindings:
    """Binds the instructions of this process's groups. In a job it waits for compilations.

    Args:
      job: None where all groups are this process's.
    """
    slots, limits = Slots(programs.mesh, job), None if job is None else Limits(job, programs, program)
    return _bind(programs, program, job, limits, _Calls(programs, slots, frozenset()), _merged(programs, program))


def with_added(
    plain: Bindings,
    places: Sequence[int],
    added: Iterable[tuple[int, Sequence[GroupInstruction]]],
    programs: StepPrograms,
    program: Program,
    job: Job | None,
    alike: Mapping[tuple[int, Value], tuple[int, Value]],
) -> Bindings:
    """The bindings of a step, all of whose programs are there, with more instructions among them (`mpmd.run.audits`).

    Args:
      places: of the instructions, positions in the order of `scheduler.merge`.
      added: by such a position, in its order, what comes before the instruction there.
      programs: what they call.
      program: with all instructions.
      alike: values of groups that stand for others of the step.
    """
    slots = plain.slots.extended(alike)
    limits = None if job is None else Limits.none(job, programs, program)
    transfers = _Transfers(programs, program, job, slots, limits, plain.num_pieces)
    calls, found, at = _Calls(programs, slots, frozenset()), list[BoundInstruction](), 0
    for place, instructions in added:
        before, at = at, bisect_left(places, place)
        found += plain.instructions[before:at]
        new, _ = _bound(instructions, programs.mesh.local_groups, calls, transfers)
        if found and new and new[0].code == RUN:  # it may read what nobody read so far
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
    """What an instruction that calls one executable takes, in its order, what it gives, and what it takes over.

    What it takes are values, and numbers that are constants of the program.

    Args:
      dealt: names of the arguments of which each microbatch has its own.
    """
    slots = Slots(programs.mesh, job)
    calls = _Calls(programs, slots, dealt)
    bound = calls.call(group, instruction) if isinstance(instruction, Call) else calls.run(group, instruction)[0]
    reads, writes, donates = (slots.values(of) for of in (bound.reads, bound.writes, bound.donates))
    return reads, writes, donates


def variables_of(programs: StepPrograms) -> dict[tuple[str, bool], compat.Var]:
    """The variables that values stand for, by their names and whether each microbatch has its own."""
    found = {(name, False): v for v, name in programs.outline.names.items()}
    for loop in programs.loops:
        found.update(((edge_name(loop.loop, v), True), v) for v in loop.loop.partition.names)
    return found


def _merged(programs: StepPrograms, program: Program) -> Sequence[GroupInstruction]:
    """The instructions of all groups in one order; none where this process has no group."""
    return scheduler.merge(program) if programs.mesh.local_groups else ()


class SummedOutput(NamedTuple):
    """An accumulator of a task: its positions among what the instruction reads and writes."""

    read: int
    write: int
    operation: Operation


class BoundBuckets:
    """The programs of buckets, bound: instruction by instruction they do the same, for microbatches of other shapes.

    Args:
      buckets: a step for each shape, with its program.
      dealt: names of the arguments of which each microbatch has its own.

    Attributes:
      of: per bucket, its bindings; the slots are those of all.
    """

    def __init__(self, buckets: Sequence[tuple[StepPrograms, Program]], job: Job | None, dealt: Set[str]):
        (first, program), *others = buckets
        self.slots = Slots(first.mesh, job)
        self._limits = None if job is None else Limits(job, first, program, ORDER_BITS, [p for p, _ in others])
        self._calls = [_Calls(programs, self.slots, dealt) for programs, _ in buckets]
        merged = {id(one): _merged(first, one) for one in {id(one): one for _, one in buckets}.values()}
        self.of = [
            _bind(programs, program, job, self._limits, calls, merged[id(program)])
            for (programs, program), calls in zip(buckets, self._calls, strict=True)
        ]
        self.template = self.slots.template()

    def sums(self, b: BoundInstruction, buckets: Sequence[int]) -> list[list[SummedOutput]]:
        """The accumulators of each task of an instruction, whose microbatches belong to these buckets."""
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
        """Two tasks that run as one executable where their microbatches have one shape, one after the other."""
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
    calls: "_Calls",
    merged: Sequence[GroupInstruction],
) -> Bindings:
    outline, slots = programs.outline, calls.slots
    if limits is not None:
        limits.begin()
    transfers = _Transfers(programs, program, job, slots, limits)
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
    merged: Iterable[GroupInstruction], local: Collection[int], calls: "_Calls", transfers: "_Transfers"
) -> tuple[list[BoundInstruction], list[int]]:
    """The instructions of this process, and their places among all."""
    slots = calls.slots
    found: list[BoundInstruction] = []
    places: list[int] = []
    last: dict[int, BoundInstruction] = {}  # of each group
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


class Slots:
    """Numbers the values that groups of this process hold.

    Attributes:
      names: of variables around the loops.
      numbers: by group and loop, where the number of each microbatch stands.
    """

    def __init__(self, mesh: MpmdMesh, job: Job | None):
        self._mesh = mesh
        self.numbers: dict[tuple[int, int], dict[int, int]] = {}
        self.names: dict[compat.Var, str] = {}
        self._is_alone = job is None
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._constants: dict[int, tuple[np.generic, Device | NamedSharding]] = {}

    def extended(self, alike: Mapping[tuple[int, Value], tuple[int, Value]]) -> "Slots":
        """These numbers, and others for new values.

        Args:
          alike: values of groups that have the numbers of others.
        """
        found = copy.copy(self)
        found.names = self.names.copy()
        found._numbers = self._numbers | {new: self._numbers[old] for new, old in alike.items()}
        return found

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, group: int, value: Hashable) -> int:
        return self._numbers.setdefault((group, value), len(self._numbers))

    def values(self, numbers: Iterable[int]) -> list[Any]:
        """What stands in slots: values, and constants themselves."""
        known = {slot: value for (_, value), slot in self._numbers.items()}
        return [self._constants[slot][0] if slot in self._constants else known[slot] for slot in numbers]

    def has(self, group: int, value: Hashable) -> bool:
        """Whether an instruction reads or writes a value."""
        return (group, value) in self._numbers

    @property
    def of_microbatches(self) -> set[int]:
        """The slots of values that belong to a microbatch."""
        values = self._numbers.items()
        return {slot for (_, v), slot in values if isinstance(v, Value) and v.microbatch is not None}

    def sizes(self, nbytes: Mapping[str, int]) -> dict[int, tuple[int, int]]:
        """Per slot of a value, its group and its bytes."""
        values = [(slot, group, v) for (group, v), slot in self._numbers.items() if isinstance(v, Value)]
        return {slot: (group, nbytes.get(v.name, 0)) for slot, group, v in values}

    def around(self, group: int, v: compat.Var) -> int:
        """The slot of a variable of the step, outside of the loops."""
        return self.of(group, Value(self.names[v]))

    def of_all(self, held: Iterable[tuple[compat.Var, Iterable[int]]]) -> list[list[tuple[int, int]]]:
        """Per variable, the groups of this process that hold it and its slots there."""
        local = self._mesh.local_groups
        return [[(g, self.around(g, v)) for g in sorted(groups) if g in local] for v, groups in held]

    def of_constant(self, group: int, value: np.generic) -> int:
        """The slot of a number that each step takes, a constant of a program."""
        return self._of_number(group, ("constant", str(value.dtype), int(value)), value)

    def of_microbatch(self, group: int, loop: int, microbatch: int) -> int:
        """The slot of a microbatch's number."""
        slot = self._of_number(group, ("microbatch", loop, microbatch), np.int32(microbatch))
        self.numbers.setdefault((group, loop), {})[microbatch] = slot
        return slot

    def _of_number(self, group: int, key: Hashable, value: np.generic) -> int:
        slot = self.of(group, key)
        if slot not in self._constants:
            sharding = NamedSharding(self._mesh.groups[group], PartitionSpec())
            target = device_put.target_of(sharding) if self._is_alone else sharding
            self._constants[slot] = value, target
        return slot

    def template(self) -> list[Any]:
        """All slots before a step. The constants are put on devices at once."""
        slots: list[Any] = [None] * len(self)
        if self._constants:
            values, targets = map(list, zip(*self._constants.values(), strict=True))
            placed = jax.device_put(values, targets) if self._is_alone else device_put.place_all(values, targets)
            for slot, constant in zip(self._constants, placed, strict=True):
                slots[slot] = constant
        return slots


class _TaskValues(NamedTuple):
    """What tasks of one stage and kind take and give: slots of values around the loop, names of values in it.

    Operands of which each microbatch has its own are names.
    """

    constants: list[int]
    uses_index: bool
    operands: list[int | str]
    reads: list[str]
    writes: list[str]
    accumulators: list[int]


class _Calls:
    """Binds the instructions that call executables."""

    def __init__(self, programs: StepPrograms, slots: Slots, dealt: Set[str]):
        self._programs = programs
        self.slots = slots
        slots.names.update(programs.outline.names)
        self._dealt = dealt
        self._values: dict[tuple[int, Place], _TaskValues] = {}

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
        """A task, or a pair of tasks."""
        program = self._programs.loops[instruction.loop]
        return [
            self._task(group, program, executable, tasks) for executable, tasks in self._programs.calls(instruction)
        ]

    def alone(self, group: int, loop: int, task: Task) -> BoundInstruction:
        """A task, in an executable of its own."""
        program = self._programs.loops[loop]
        executable = program.tasks[Place(task.stage, task.kind)].executable
        assert executable is not None
        return self._task(group, program, executable, (task,))

    def _task(
        self, group: int, program: LoopProgram, executable: Executable, tasks: tuple[Task, ...]
    ) -> BoundInstruction:
        """Arguments and results are those of the first task, then those of the second."""
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

    def values(self, group: int, loop: int, place: Place) -> tuple[_TaskValues, list[Operation]]:
        """What tasks take and give, and the operations of their accumulators."""
        program = self._programs.loops[loop]
        accumulators, accumulates = program.loop.partition.accumulators, program.tasks[place].body.accumulates
        return self._values_of(group, program, place), [accumulators[k].operation for k in accumulates]

    def _values_of(self, group: int, program: LoopProgram, place: Place) -> _TaskValues:
        key = program.loop.number, place
        if key not in self._values:
            loop, body = program.loop, program.tasks[place].body
            constants = program.tasks[place].constants
            operands = [(self.slots.names[v], v) for v in body.operands]
            results = [loop.partition.accumulators[k].result for k in body.accumulates]
            self._values[key] = _TaskValues(
                [self.slots.of_constant(group, c) for c in constants],
                body.uses_index,
                [name if name in self._dealt else self.slots.around(group, v) for name, v in operands],
                [edge_name(loop, v) for v in body.reads],
                [edge_name(loop, v) for v in body.writes],
                [self.slots.around(group, v) for v in results],
            )
        return self._values[key]


class _Way(NamedTuple):
    """How a value goes from one group to another, in every microbatch."""

    code: int
    source: NamedSharding
    target: NamedSharding
    aval: compat.Aval
    mover: Callable[[jax.Array], jax.Array] | None


class _Transfers:
    """Binds sends and receives, and counts what goes.

    Args:
      num_pieces: that have been counted before.
    """

    def __init__(
        self, programs: StepPrograms, program: Program, job: Job | None, slots: Slots, limits: Limits | None,
        num_pieces: int = 0,
    ):  # fmt: skip
        self.num_pieces = num_pieces
        self._programs, self._program = programs, program
        self._job, self._slots, self._limits = job, slots, limits
        self._vars = variables_of(programs)
        self._ways: dict[tuple[str, int, int], _Way] = {}
        self._routes: dict[tuple[int, int, Value], tuple[ValueRoute, Flow | None]] = {}

    def send(self, group: int, instruction: Send) -> list[BoundInstruction]:
        """A value's way to another group; nothing where this process has no part in it."""
        value, target = instruction.value, instruction.to_group
        way = self._way(value, group, target)
        text = f"the transfer of {value} from group {group} to {target}"
        if way.code == SEND:
            return self._send_away(group, target, value, way, text)
        if group not in self._programs.mesh.local_groups:
            return []
        crossing = self._crossing(value, group, target)
        reads, writes = self._slots.of(group, value), self._slots.of(target, value)
        return [BoundInstruction(way.code, way.mover, reads, writes, group, text, crossing=crossing)]

    def receive(self, group: int, instruction: Recv) -> list[BoundInstruction]:
        """Nothing where the sender, in this process, has done it already."""
        value, source = instruction.value, instruction.from_group
        route, flow = self._routes.pop((source, group, value), (None, None))
        if route is None:
            return []
        carry = route.carry if flow is None else flow.receiving(route.carry)
        is_here = source in self._programs.mesh.local_groups
        crossing = self._crossing(value, source, group)
        reads, writes = self._slots.of(source, value) if is_here else None, self._slots.of(group, value)
        return [BoundInstruction(RECV, carry, reads, writes, group, route.text, crossing=crossing)]

    def _send_away(self, group: int, target: int, value: Value, way: _Way, text: str) -> list[BoundInstruction]:
        """Pieces for other processes; every process counts them alike, also those that have no part in them.

        Where this process receives too, it does both when it comes to the receive, which directly follows.
        """
        assert self._job is not None and self._limits is not None
        first, local = self.num_pieces, self._programs.mesh.local_groups
        self.num_pieces += len(pieces(way.source, way.target, tuple(way.aval.shape)))
        if group not in local and target not in local:
            return []
        # The user gets to hold such an array, and may delete it or donate it while it is on its way.
        keep = value in self._program.inputs_of(group) or value in self._program.outputs_of(group)
        route = ValueRoute(self._job, way.source, way.target, way.aval, first, keep, text)
        flow = self._limits.flow(group, target, value)
        self._routes[group, target, value] = route, flow
        if group not in local or not route.share.sends:
            return []
        crossing = self._crossing(value, group, target)
        if target in local:
            return []
        carry = route.carry if flow is None else flow.sending(route.carry)
        return [BoundInstruction(SEND, carry, self._slots.of(group, value), None, group, text, crossing=crossing)]

    def _way(self, value: Value, group: int, target: int) -> _Way:
        key = value.name, group, target
        if key not in self._ways:
            v, mesh = self._vars[value.name, value.microbatch is not None], self._programs.mesh
            source, wanted = self._programs.sharding(v, group), self._programs.sharding(v, target)
            code, mover = MOVE, None
            if device_put.is_alias(source, wanted, len(v.aval.shape)):
                code = ALIAS
            elif len({*mesh.processes[group], *mesh.processes[target]}) > 1:
                code = SEND
            elif group in mesh.local_groups:
                mover = device_put.mover(source, wanted, v.aval.dtype)
            self._ways[key] = _Way(code, source, wanted, v.aval, mover)
        return self._ways[key]

    def _crossing(self, value: Value, source: int, target: int) -> Crossing:
        return Crossing(value, source, target, self._program.nbytes.get(value.name, 0))
