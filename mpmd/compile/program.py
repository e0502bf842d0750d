"""The step as a `scheduler.Program`: what each group runs, sends, receives and frees, in order, checked."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

import scheduler
from mpmd import _jax_compat as compat
from mpmd.compile.donation import last_uses
from mpmd.compile.tasks import accumulators_of
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.partition.outline import Loop, Outline, OutlineTransfer, Segment
from scheduler import Call, Edge, Free, Instruction, Program, Recv, Run, Send, TaskGraph, Value


def step_program(outline: Outline, num_groups: int, donated: Mapping[str, Set[compat.Var]]) -> Program:
    """Returns the segments, transfers and loops of a placed step as one program.

    Each transfer is put into the sender's and the receiver's list at the same point of one global order, so
    the program is free of deadlock for the reason given in `scheduler.lower`; `scheduler.check` proves it again.

    Raises:
      ScheduleError: a schedule's orders are wrong; every fault is listed.
    """
    program = _Builder(outline, num_groups, donated).build()
    scheduler.check(program)
    return program


def edge_name(loop: Loop, v: compat.Var) -> str:
    """Returns the name of a value between tasks."""
    name = loop.partition.names[v]
    return name if loop.number == 0 else f"loop{loop.number}:{name}"


def loop_of(name: str) -> int:
    """Returns the number of the loop whose tasks pass a value with this name to each other."""
    found = re.match(r"loop(\d+):", name)
    return int(found[1]) if found else 0


def loop_graph(loop: Loop) -> TaskGraph:
    """Returns the values that the tasks of a loop pass to each other, in the scheduler's kinds F, R, I and W."""
    partition = loop.partition
    split = any(t.place.kind == "I" for t in partition.tasks)

    def end(place: Place) -> tuple[int, str]:
        return place.stage, "I" if place.kind == "B" else place.kind

    readers: dict[compat.Var, list[tuple[int, str]]] = defaultdict(list)
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
    if loop.forward_only:
        empty = {e for e in empty if e[1] == "F"}
    return TaskGraph(loop.schedule.num_stages, edges, frozenset(empty), loop.forward_only)


class _Builder:
    """Appends the instructions of an outline's items to the lists of the groups."""

    def __init__(self, outline: Outline, num_groups: int, donated: Mapping[str, Set[compat.Var]]):
        self.outline = outline
        self.donated = donated
        self.groups: list[list[Instruction]] = [[] for _ in range(num_groups)]  # per group
        self.nbytes: dict[str, int] = {}  # of the values so far, by name
        self.alive: set[tuple[Value, int]] = set()  # the live values of each group at this point

    def value(self, v: compat.Var) -> Value:
        value = Value(self.outline.names[v])
        self.nbytes[value.name] = equations.nbytes(v.aval)
        return value

    def build(self) -> Program:
        inputs = self._held(zip(self.outline.trace.jaxpr.invars, self.outline.inputs, strict=True))
        outputs = self._held(self.outline.outputs)
        self.alive = {(v, g) for g, values in enumerate(inputs) for v in values}
        last = {(self.value(v), g): position for (v, g), position in last_uses(self.outline).items()}
        for g, values in enumerate(inputs):
            for v in sorted(values):
                if (v, g) not in last and v not in outputs[g]:
                    self._free(v, g)
        loops: list[Program] = []
        for position, item in enumerate(self.outline.items):
            if isinstance(item, Segment):
                touched = self._segment(item)
            elif isinstance(item, OutlineTransfer):
                touched = self._transfer(item)
            else:
                touched, lowered = self._loop(item)
                loops.append(lowered)
            for value, g in touched:
                if last.get((value, g), position) == position and value not in outputs[g] and (value, g) in self.alive:
                    self._free(value, g)
        longest = max((p.placement for p in loops), key=len, default=tuple(range(len(self.groups))))
        return Program(
            tuple(map(tuple, self.groups)),
            longest,
            tuple(p.tasks[0] for p in loops),
            tuple(map(frozenset, inputs)),
            tuple(map(frozenset, outputs)),
            self.nbytes,
            tuple(p.placement for p in loops),
        )

    def _held(self, held: Iterable[tuple[compat.Var | compat.Literal, Iterable[int]]]) -> list[set[Value]]:
        """Returns, per group, the values that it holds."""
        found: list[set[Value]] = [set() for _ in self.groups]
        for v, groups in held:
            if not isinstance(v, compat.Literal):
                for g in groups:
                    found[g].add(self.value(v))
        return found

    def _free(self, value: Value, group: int) -> None:
        self.groups[group].append(Free(value))
        self.alive.discard((value, group))

    def _segment(self, item: Segment) -> list[tuple[Value, int]]:
        reads = tuple(map(self.value, item.reads))
        writes = tuple(self.value(v) for v in item.writes)
        donates = tuple(self.value(v) for v in item.reads if v in self.donated[item.name])
        self.groups[item.group].append(Call(item.name, reads, writes, donates))
        self.alive -= {(v, item.group) for v in donates}
        self.alive |= {(v, item.group) for v in writes}
        return [(v, item.group) for v in (*reads, *writes)]

    def _transfer(self, item: OutlineTransfer) -> list[tuple[Value, int]]:
        value = self.value(item.var)
        self.groups[item.source].append(Send(value, item.target))
        self.groups[item.target].append(Recv(value, item.source))
        self.alive.add((value, item.target))
        return [(value, item.source), (value, item.target)]

    def _loop(self, loop: Loop) -> tuple[list[tuple[Value, int]], Program]:
        """Appends a loop. Returns the values that it touches, and the program of the loop alone."""
        accumulators = loop.partition.accumulators
        lowered = scheduler.lower(
            loop_graph(loop), loop.schedule, loop.partition.info.num_microbatches, loop.orders
        )  # fmt: skip
        self.nbytes.update(lowered.nbytes)
        waiting: dict[Place, list[Value]] = defaultdict(list)
        for acc in accumulators:
            waiting[acc.place].append(self.value(acc.result))
        touched = [(self.value(v), g) for v, groups in loop.needs().items() for g in sorted(groups)]
        own = accumulators_of(loop)
        for g, instructions in enumerate(lowered.groups):
            if g in own:
                made = tuple(self.value(accumulators[k].result) for k in own[g])
                self.groups[g].append(Call(zeros_call(loop, g), (), made))
                self.alive |= {(v, g) for v in made}
                touched += [(v, g) for v in made]
            self.groups[g] += [_with_accumulators(i, waiting, loop.number) for i in instructions]
        return touched, lowered


def zeros_call(loop: Loop, group: int) -> str:
    """Returns the name of the call that makes a group's accumulators."""
    return f"loop{loop.number}.zeros.{group}"


def _with_accumulators(instruction: Instruction, waiting: dict[Place, list[Value]], loop_number: int) -> Instruction:
    """Adds accumulators to the first run of a task, which updates them in place from then on."""
    if not isinstance(instruction, Run):
        return instruction
    accs: list[Value] = []
    for task in instruction.tasks:
        for kind in {"B": "BIW"}.get(task.kind, task.kind):
            accs += waiting.pop(Place(task.stage, kind), ())
    if not accs and instruction.loop == loop_number:
        return instruction
    own = tuple(accs)
    return Run(
        instruction.task, (*instruction.reads, *own), (*instruction.writes, *own), (*instruction.donates, *own),
        instruction.also, loop_number,
    )  # fmt: skip
