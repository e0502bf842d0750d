"""The step as a `scheduler.Program`: what each group runs, sends, receives and frees, in order, checked."""

from collections import defaultdict

import scheduler
from mpmd import _jax_compat as compat
from mpmd.compile.step import LoopProgram, StepPrograms
from mpmd.partition import equations
from mpmd.partition.outline import Loop, Segment, Transfer
from scheduler import Call, Edge, Free, Program, Recv, Run, Send, TaskGraph, Value


def step_program(programs: StepPrograms) -> Program:
    """Segments, transfers and loops of a compiled step in one program.

    Each transfer is put into the sender's and the receiver's list at the same point of one global order, so
    the program is free of deadlock for the reason given in `scheduler.lower`; `scheduler.check` proves it again.

    Raises:
      ScheduleError: a schedule's orders are wrong; every fault is listed.
    """
    program = _Builder(programs).build()
    scheduler.check(program)
    return program


def edge_name(loop: Loop, v) -> str:
    """The name of a value between tasks."""
    name = loop.partition.names[v]
    return name if loop.number == 0 else f"loop{loop.number}:{name}"


def loop_graph(program: LoopProgram) -> TaskGraph:
    """What the tasks of a loop hand to each other, in the kinds F, I and W that the scheduler states graphs in."""
    loop = program.loop
    partition = loop.partition
    split = any(t.place.kind == "I" for t in partition.tasks)

    def end(place):
        return place.stage, "I" if place.kind == "B" else place.kind

    readers = defaultdict(list)
    for task in partition.tasks:
        for v in task.reads:
            readers[v].append(end(task.place))
    edges = tuple(
        Edge(edge_name(loop, v), end(task.place), tuple(readers[v]), equations.nbytes(v.aval))
        for task in partition.tasks
        for v in task.writes
    )
    empty = {end(t.place) for t in partition.tasks if t.is_empty}
    if not split:
        empty |= {(s, "W") for s in range(loop.schedule.num_stages)}
    kinds = {t.place.kind for t in partition.tasks if not t.is_empty}
    forward_only = kinds <= {"F"}
    if forward_only:
        empty = {e for e in empty if e[1] == "F"}
    return TaskGraph(loop.schedule.num_stages, edges, frozenset(empty), forward_only)


class _Builder:
    def __init__(self, programs: StepPrograms):
        self.programs = programs
        self.outline = programs.outline
        self.num_groups = programs.mesh.num_groups
        self.groups: list[list] = [[] for _ in range(self.num_groups)]
        self.nbytes: dict[str, int] = {}
        self.alive: set[tuple[Value, int]] = set()

    def value(self, v) -> Value:
        value = Value(self.outline.names[v])
        self.nbytes[value.name] = equations.nbytes(v.aval)
        return value

    def build(self) -> Program:
        inputs: list[set[Value]] = [set() for _ in range(self.num_groups)]
        for v, groups in zip(self.outline.trace.jaxpr.invars, self.outline.inputs, strict=True):
            for g in groups:
                inputs[g].add(self.value(v))
                self.alive.add((self.value(v), g))
        outputs: list[set[Value]] = [set() for _ in range(self.num_groups)]
        for v, groups in self.outline.outputs:
            if not isinstance(v, compat.Literal):
                for g in groups:
                    outputs[g].add(self.value(v))
        last = self._last_use()
        for g in range(self.num_groups):
            self._free([v for v in sorted(inputs[g]) if (v, g) not in last and v not in outputs[g]], g)
        tasks, placement, loops = [], (), list(self.programs.loops)
        for position, item in enumerate(self.outline.items):
            touched: list[tuple[Value, int]] = []
            if isinstance(item, Segment):
                touched = self._segment(item)
            elif isinstance(item, Transfer):
                touched = self._transfer(item)
            else:
                touched, lowered = self._loop(loops[item.number])
                tasks.append(lowered.tasks[0])
                if lowered.num_stages > len(placement):
                    placement = lowered.placement
            for value, g in touched:
                if last.get((value, g), position) == position and value not in outputs[g] and (value, g) in self.alive:
                    self._free([value], g)
        return Program(
            tuple(map(tuple, self.groups)),
            placement or tuple(range(self.num_groups)),
            tuple(tasks),
            tuple(map(frozenset, inputs)),
            tuple(map(frozenset, outputs)),
            self.nbytes,
        )

    def _last_use(self) -> dict[tuple[Value, int], int]:
        last = {}
        for position, item in enumerate(self.outline.items):
            if isinstance(item, Segment):
                last.update(((self.value(v), item.group), position) for v in item.reads)
            elif isinstance(item, Transfer):
                last[self.value(item.var), item.source] = position
            else:
                last.update(((self.value(v), g), position) for v, groups in item.needs().items() for g in groups)
        return last

    def _free(self, values, group):
        for value in values:
            self.groups[group].append(Free(value))
            self.alive.discard((value, group))

    def _segment(self, item: Segment):
        reads = tuple(map(self.value, item.reads))
        writes = tuple(self.value(v) for v in item.writes)
        donates = tuple(self.value(v) for v in item.reads if v in self.programs.donated[item.name])
        self.groups[item.group].append(Call(item.name, reads, writes, donates))
        self.alive -= {(v, item.group) for v in donates}
        self.alive |= {(v, item.group) for v in writes}
        return [(v, item.group) for v in (*reads, *writes)]

    def _transfer(self, item: Transfer):
        value = self.value(item.var)
        self.groups[item.source].append(Send(value, item.target))
        self.groups[item.target].append(Recv(value, item.source))
        self.alive.add((value, item.target))
        return [(value, item.source), (value, item.target)]

    def _loop(self, program: LoopProgram):
        loop = program.loop
        partition = loop.partition
        n = partition.info.num_microbatches
        lowered = scheduler.lower(loop_graph(program), loop.schedule, n, loop.orders)
        self.nbytes.update(lowered.nbytes)
        waiting = defaultdict(list)
        for acc in partition.accumulators:
            waiting[acc.place].append(self.value(acc.result))
        touched = [(self.value(v), g) for v, groups in loop.needs().items() for g in sorted(groups)]
        for g, instructions in enumerate(lowered.groups):
            if g in program.zeros:
                made = tuple(self.value(partition.accumulators[k].result) for k in program.zeros[g][0])
                self.groups[g].append(Call(zeros_name(loop, g), (), made))
                self.alive |= {(v, g) for v in made}
                touched += [(v, g) for v in made]
            self.groups[g] += [_with_accumulators(i, waiting, loop.number) for i in instructions]
        return touched, lowered


def zeros_name(loop: Loop, group: int) -> str:
    """The name of the call that makes a group's accumulators."""
    return f"loop{loop.number}.zeros.{group}"


def _with_accumulators(instruction, waiting, loop_number):
    """The first run of a task takes over the accumulators that it updates in place from then on."""
    if not isinstance(instruction, Run):
        return instruction
    accs: list[Value] = []
    for task in instruction.tasks:
        for kind in {"B": "BIW"}.get(task.kind, task.kind):
            accs += waiting.pop((task.stage, kind), ())
    if not accs and instruction.loop == loop_number:
        return instruction
    own = tuple(accs)
    return Run(
        instruction.task, (*instruction.reads, *own), (*instruction.writes, *own), (*instruction.donates, *own),
        instruction.also, loop_number,
    )  # fmt: skip
