"""Compiles all segments and tasks of a step in data-flow order, so that each passes its shardings to the next.

A variable of the step has one spec, the same in every group that holds it (as in an `MpmdSharding`).
The user's specs win, then the specs of incoming state leaves, then the specs that XLA inferred.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import REPLICATED, Layout, fit, memory_kind, shortest
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.compiler import Compiler, CompilerOptions
from mpmd.compile.constants import WithConstants, with_constants
from mpmd.compile.donation import donations
from mpmd.compile.executable import Executable
from mpmd.compile.program import zeros_call
from mpmd.compile.subprogram import SEGMENTS, TASKS, UPDATES
from mpmd.compile.tasks import accumulators_of, segment_names, task_bodies, task_jaxpr, task_name, zeros_name
from mpmd.graphs.body import Place
from mpmd.partition.loop import TaskBody
from mpmd.partition.outline import Loop, Outline, Segment, is_of_list
from scheduler import Call, Run, Task


@dataclasses.dataclass(frozen=True)
class TaskProgram:
    """A task's body and executable: constants, [index], operands, reads, accumulators -> accumulators, writes.

    JAX gives the memory of donated arguments to results of their type in order: accumulators come first.
    """

    body: TaskBody
    executable: Executable | None
    constants: tuple[np.generic, ...] = ()  # arguments of this task that differ between tasks that run the same program


@dataclasses.dataclass(frozen=True)
class LoopProgram:
    """The executables of a loop."""

    loop: Loop
    tasks: dict[Place, TaskProgram]  # one per stage and kind
    fused: dict[tuple[Place, Place], Executable]  # one per pair of tasks that the schedule asks to run as one
    zeros: dict[int, Executable]  # per group with accumulators, the executable that makes them

    @property
    def executables(self) -> dict[Place, Executable]:
        """The executables of the tasks that compute something."""
        return {place: t.executable for place, t in self.tasks.items() if t.executable is not None}


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """Everything that a step runs.

    Attributes:
      constants: per segment, the first arguments of its executable; they differ between segments that share it.
    """

    outline: Outline
    mesh: MpmdMesh
    compiler: Compiler
    segments: dict[str, Executable]
    constants: dict[str, tuple[np.generic, ...]]
    donated: dict[str, frozenset[compat.Var]]  # per segment, the variables that its executable takes over
    loops: tuple[LoopProgram, ...]
    layouts: dict[compat.Var, Layout]  # spec and memory kind of each variable
    name: str = "step"  # the name of the user's function

    @functools.cached_property
    def named(self) -> dict[str, Executable]:
        """The executables of the program's calls, by the names of the calls: segments, and the zeros of loops."""
        return self.segments | {zeros_call(p.loop, g): zeros for p in self.loops for g, zeros in p.zeros.items()}

    def prefix_of(self, loop: LoopProgram) -> str:
        """Returns what stands before the names of a loop's tasks where those of all loops are shown."""
        return f"loop{loop.loop.number}:" if len(self.loops) > 1 else ""

    def calls(self, instruction: Run | Call) -> list[tuple[Executable, tuple[Task, ...]]]:
        """Returns the executables that an instruction runs, each with its tasks.

        A pair of tasks has one executable if they are fused. Tasks that compute nothing have none.
        """
        if isinstance(instruction, Call):
            return [(self.named[instruction.name], ())]
        loop, tasks = self.loops[instruction.loop], instruction.tasks
        places = tuple(Place(t.stage, t.kind) for t in tasks)
        if len(places) == 2 and (fused := loop.fused.get((places[0], places[1]))) is not None:
            return [(fused, tasks)]
        found = [(loop.tasks.get(place), task) for place, task in zip(places, tasks, strict=True)]
        return [(t.executable, (task,)) for t, task in found if t is not None and t.executable is not None]

    def executables_of(self, instruction: Run | Call) -> list[Executable]:
        """Returns the executables of `calls`."""
        return [executable for executable, _ in self.calls(instruction)]

    def layout(self, v: compat.Var | compat.Literal) -> Layout:
        """Returns the layout of a variable; literals are replicated."""
        return REPLICATED if isinstance(v, compat.Literal) else self.layouts.get(v, REPLICATED)

    def sharding(self, v: compat.Var, group: int) -> NamedSharding:
        """Returns the sharding of a variable in a group."""
        return fit(self.layout(v), self.mesh.groups[group], getattr(v.aval, "shape", ()))


def compile_step(
    outline: Outline,
    mesh: MpmdMesh,
    in_layouts: Sequence[Layout | None],
    out_layouts: Sequence[Layout | None],
    donated_args: Set[int],
    name: str,
    options: CompilerOptions | None = None,
    alike: Iterable[Sequence[compat.Var]] = (),
    others: Compiler | None = None,
) -> StepPrograms:
    """Compiles every segment and task of `outline`, in threads that continue until the result's `compiler` is closed.

    Args:
      in_layouts, out_layouts: per flat argument (result), its layout or None.
      donated_args: flat arguments that the step may take over.
      name: the name of the step, which begins the names of its programs.
      alike: lists of variables that are pieces of one array and so have one layout.
      others: the compiler of a step on the same groups with the same options; its programs are reused.
    """
    donated = donations(outline, mesh, donated_args)
    first_of = {v: pieces[0] for pieces in alike for v in pieces}
    step = _StepCompiler(outline, mesh, _Layouts(outline, in_layouts, out_layouts, first_of), name, options, others)
    segments: dict[str, Executable] = {}
    loops: list[LoopProgram] = []
    try:
        bodies = _segment_bodies(outline, mesh)
        for item in outline.items:
            if isinstance(item, Segment):
                segments[item.name] = step.segment(item, bodies[item.name], donated[item.name])
            elif isinstance(item, Loop):
                step.compiler.start()
                loops.append(step.loop(item))
        step.compiler.start()
    except BaseException:
        step.compiler.close()
        raise
    constants, layouts = {name: body.constants for name, body in bodies.items()}, step.layouts.of_all()
    return StepPrograms(outline, mesh, step.compiler, segments, constants, donated, tuple(loops), layouts, name)


def compile_bucket(
    outline: Outline,
    first: StepPrograms,
    in_layouts: Sequence[Layout | None],
    donated_args: Set[int],
    alike: Iterable[Sequence[compat.Var]] = (),
) -> StepPrograms:
    """Compiles the loops of a step for microbatches of another shape. The programs outside the loops are from `first`.

    Args:
      outline: the outline of the step, which is the same as the first one's outside the loops.
    """
    mesh, options = first.mesh, first.compiler.options
    first_of = {v: pieces[0] for pieces in alike for v in pieces}
    layouts = _Layouts(outline, in_layouts, [None] * len(outline.outputs), first_of)
    known = {name: first.layouts[v] for v, name in first.outline.names.items() if v in first.layouts}
    known = {name: layout for name, layout in known.items() if not is_of_list(name)}  # devices may not divide its rows
    layouts.found |= {layouts.one(v): known[name] for v, name in outline.names.items() if name in known}
    step = _StepCompiler(outline, mesh, layouts, first.name, options, first.compiler)
    try:
        loops = tuple(map(step.loop, outline.loops))
        step.compiler.start()
    finally:
        step.compiler.close()
    donated = donations(outline, mesh, donated_args)
    return dataclasses.replace(
        first, outline=outline, compiler=step.compiler, donated=donated, loops=loops, layouts=layouts.of_all()
    )


def with_outline(programs: StepPrograms, outline: Outline) -> StepPrograms:
    """Returns the programs for the same step with other numbers of microbatches."""
    loops = [dataclasses.replace(p, loop=loop) for p, loop in zip(programs.loops, outline.loops, strict=True)]
    return dataclasses.replace(programs, outline=outline, loops=tuple(loops))


def _segment_bodies(outline: Outline, mesh: MpmdMesh) -> dict[str, WithConstants]:
    """Returns the program of each segment. In a step without a loop, segments are stages (or make their state), which
    differ in constants. In a step with a loop, they are an optimizer's, with equal constants: no search is needed.
    """
    segments = [item for item in outline.items if isinstance(item, Segment)]
    closed = [compat.make_jaxpr(item.reads, item.writes, item.eqns, item.name) for item in segments]
    if outline.loops:
        found = [WithConstants(c, ()) for c in closed]
    else:
        with compat.use_abstract_mesh(mesh.groups[0].abstract_mesh):
            found = with_constants(closed)
    return {item.name: body for item, body in zip(segments, found, strict=True)}


class _Layouts:
    """The layout of each variable of a step, as far as it is known.

    Attributes:
      found: the layouts of incoming arguments, of packed scalars, and of the variables of compiled programs.
    """

    def __init__(
        self,
        outline: Outline,
        in_layouts: Sequence[Layout | None],
        out_layouts: Sequence[Layout | None],
        first_of: Mapping[compat.Var, compat.Var],
    ):
        args = outline.trace.arguments
        self._inputs = outline.trace.jaxpr.invars
        self._first_of = first_of
        self.found: dict[compat.Var, Layout] = dict.fromkeys(outline.packed, REPLICATED) | {
            self.one(v): layout for v, layout in zip(args, in_layouts, strict=True) if layout is not None
        }
        self._wanted: dict[compat.Var, Layout] = {}
        self._donors: dict[compat.Var, compat.Var] = {}
        for (v, _), layout, donor in zip(outline.outputs, out_layouts, outline.donors, strict=True):
            if isinstance(v, compat.Literal):
                continue
            if layout is not None:
                self._wanted[v] = layout
            if donor is not None:
                self._donors.setdefault(v, args[donor])

    def one(self, v: compat.Var) -> compat.Var:
        """Returns the variable that represents all pieces of an array."""
        return self._first_of.get(v, v)

    def of_all(self) -> dict[compat.Var, Layout]:
        """Returns the layouts of all variables, including every piece of an array."""
        found = {**dict.fromkeys(self._inputs, REPLICATED), **self.found}
        return found | {v: found.get(first, REPLICATED) for v, first in self._first_of.items()}

    def known(self, v: compat.Var, mesh: Mesh) -> NamedSharding | None:
        """Returns the sharding of a variable on a group's mesh; None lets XLA choose."""
        layout = self.found.get(self.one(v))
        return None if layout is None else fit(layout, mesh, v.aval.shape)

    def asked(self, v: compat.Var | compat.Literal, mesh: Mesh) -> NamedSharding | None:
        """Returns the sharding that a result must have: the user's, its twin's in another group, or its donor's."""
        if isinstance(v, compat.Literal):
            return NamedSharding(mesh, PartitionSpec())
        layout = self._wanted.get(v) or self.found.get(self.one(v))
        if layout is None and v in self._donors and (of_donor := self.found.get(self.one(self._donors[v]))):
            layout = of_donor[0], compat.memory_kind(v.aval) or of_donor[1]
        return None if layout is None else fit(layout, mesh, v.aval.shape)

    def record(self, atoms: Iterable[compat.Var | compat.Literal], shardings: Iterable[NamedSharding]) -> None:
        """Records the shardings of an executable's arguments or results; the first record of a variable stays."""
        for v, s in zip(atoms, shardings, strict=True):
            if not isinstance(v, compat.Literal):
                self.found.setdefault(self.one(v), (shortest(s.spec), memory_kind(s)))


class _StepCompiler:
    """Compiles the items of an outline, one after the other."""

    def __init__(
        self,
        outline: Outline,
        mesh: MpmdMesh,
        layouts: _Layouts,
        name: str,
        options: CompilerOptions | None,
        others: Compiler | None = None,
    ):
        self.layouts = layouts
        own = [mesh.groups[g] for g in mesh.local_groups]
        self.compiler = Compiler(mesh.groups[0].abstract_mesh, own, options, others)
        self._mesh = mesh
        self._name = name
        self._segment_names = segment_names(name, outline)
        self._reuse = UPDATES if outline.loops else SEGMENTS
        self._zeros_of: dict[Hashable, compat.ClosedJaxpr] = {}

    def segment(self, item: Segment, body: WithConstants, donated: Set[compat.Var]) -> Executable:
        mesh, skip = self._mesh.groups[item.group], len(body.constants)
        executable = self.compiler.compile(
            self._segment_names[item.name], item.name.split(".")[0], body.closed, mesh,
            [*[None] * skip, *(self.layouts.known(v, mesh) for v in item.reads)],
            [self.layouts.asked(v, mesh) for v in item.writes],
            [i for i, v in enumerate(item.reads, skip) if v in donated],
            reuse=self._reuse,
        )  # fmt: skip
        self.layouts.record(item.reads, executable.in_shardings[skip:])
        self.layouts.record(item.writes, executable.out_shardings)
        return executable

    def loop(self, loop: Loop) -> LoopProgram:
        tasks: dict[Place, TaskProgram] = {}
        for _, bodies in itertools.groupby(task_bodies(loop), key=lambda body: body.place.kind):
            tasks |= self._tasks(loop, list(bodies), tasks)
            self.compiler.start()
        zeros = {group: self._zeros(loop, own, group) for group, own in accumulators_of(loop).items()}
        return LoopProgram(loop, tasks, self._fused(loop, tasks), zeros)

    def _fused(self, loop: Loop, tasks: Mapping[Place, TaskProgram]) -> dict[tuple[Place, Place], Executable]:
        """Fuses pairs of tasks into one executable each: arguments and results of the first, then of the second."""
        fused: dict[tuple[Place, Place], Executable] = {}
        if not hides_communication(self._mesh.groups[0]):
            return fused
        for first, second in loop.schedule.fused(loop.partition.info.num_microbatches):
            pair = Place(first.stage, first.kind), Place(second.stage, second.kind)
            halves = [tasks[p].executable for p in pair if p in tasks]
            if pair not in fused and len(halves) == 2 and halves[0] is not None and halves[1] is not None:
                together = self.compiler.fuse(task_name(self._name, loop, *pair), halves[0], halves[1])
                if together is not None:
                    fused[pair] = together
        return fused

    def _tasks(
        self, loop: Loop, bodies: Sequence[TaskBody], earlier: Mapping[Place, TaskProgram]
    ) -> dict[Place, TaskProgram]:
        """Compiles the tasks of one kind, after the tasks of `earlier` kinds."""
        programs = {body.place: TaskProgram(body, None) for body in bodies}
        for body in bodies:
            halves = [earlier.get(Place(body.place.stage, kind)) for kind in "IW" if body.place.kind == "B"]
            busy_halves = [half for half in halves if half is not None and half.executable is not None]
            if len(busy_halves) == 2 and not hides_communication(self._mesh.groups[0]):
                programs[body.place] = self._in_halves(loop, body, busy_halves)
        busy = [body for body in bodies if not body.is_empty and programs[body.place].executable is None]
        with compat.use_abstract_mesh(self._mesh.groups[0].abstract_mesh):
            found = with_constants([task_jaxpr(loop.partition, body) for body in busy])
        for body, (closed, constants) in zip(busy, found, strict=True):
            executable = self._task(loop, body, closed, len(constants))
            programs[body.place] = TaskProgram(body, executable, constants)
        return programs

    def _in_halves(self, loop: Loop, body: TaskBody, halves: Sequence[TaskProgram]) -> TaskProgram:
        """Returns a whole backward that runs the programs of its halves."""
        constants = [c for half in halves for c in half.constants]
        position = {v: i for i, v in enumerate(_arguments(loop, body, range(len(constants))))}
        num_args, begin, takes = len(position), 0, []
        for half in halves:
            own = range(begin, begin + len(half.constants))
            takes.append([position[v] for v in _arguments(loop, half.body, own)])
            begin += len(half.constants)
            given = [("new", k) for k in half.body.accumulates], half.body.writes
            position |= {v: i for i, v in enumerate(itertools.chain(*given), len(position))}
        results = [position[v] for v in (*(("new", k) for k in body.accumulates), *body.writes)]
        executables = [half.executable for half in halves if half.executable is not None]
        name = task_name(self._name, loop, body.place)
        return TaskProgram(body, self.compiler.chain(name, executables, num_args, takes, results), tuple(constants))

    def _task(self, loop: Loop, body: TaskBody, closed: compat.ClosedJaxpr, num_constants: int) -> Executable:
        mesh = self._mesh.groups[loop.group(body.place)]
        results = [loop.partition.accumulators[k].result for k in body.accumulates]
        args, skip = closed.jaxpr.invars, num_constants + int(body.uses_index)
        first_acc = len(args) - len(results)
        known = [*args[skip:first_acc], *results]
        ins = [None] * skip + [self.layouts.known(v, mesh) for v in known]
        outs = [self.layouts.asked(v, mesh) for v in (*results, *body.writes)]
        for k in range(len(results)):  # an accumulator's argument and result share one buffer
            outs[k] = ins[first_acc + k] = ins[first_acc + k] or outs[k]

        family = "IWR" if body.place.kind in "IWR" else body.place.kind  # an `I` without `R` may contain another's

        def compiled() -> Executable:
            return self.compiler.compile(
                task_name(self._name, loop, body.place), family, closed, mesh, ins, outs,
                range(first_acc, len(args)), reuse=TASKS, stage=body.place.stage,
            )  # fmt: skip

        executable = compiled()
        pairs = zip(executable.in_shardings[first_acc:], executable.out_shardings[: len(results)], results, strict=True)
        if any(not a.is_equivalent_to(b, v.aval.ndim) for a, b, v in pairs):
            outs[: len(results)] = ins[first_acc:] = executable.out_shardings[: len(results)]
            executable = compiled()
        self.layouts.record(known, executable.in_shardings[skip:])
        self.layouts.record([*results, *body.writes], executable.out_shardings)
        return executable

    def _zeros(self, loop: Loop, own: Sequence[int], group: int) -> Executable:
        """Compiles the program that makes a group's accumulators."""
        accs = [loop.partition.accumulators[k] for k in own]
        mesh = self._mesh.groups[group]
        n = loop.partition.info.num_microbatches
        key = tuple((a.operation, a.value.aval, n) for a in accs)
        if (closed := self._zeros_of.get(key)) is None:
            with compat.use_abstract_mesh(self._mesh.groups[0].abstract_mesh):
                closed = jax.make_jaxpr(lambda: [a.operation.init(a.value.aval, n) for a in accs])()
            self._zeros_of[key] = closed
        name, outs = zeros_name(self._name, loop, group), [self.layouts.known(a.result, mesh) for a in accs]
        return self.compiler.compile(name, "zeros", closed, mesh, [], outs)


def hides_communication(mesh: Mesh) -> bool:
    """Returns whether a program's collectives overlap its other work, so that fusing two tasks is worth it."""
    return mesh.devices.flat[0].platform != "cpu"


def _arguments(loop: Loop, body: TaskBody, constants: Iterable[int]) -> list[Hashable]:
    """Returns names for the arguments of a task's program; accumulators have the names of their results."""
    index = [loop.partition.index] if body.uses_index else []
    accumulators = [loop.partition.accumulators[k].result for k in body.accumulates]
    return [*constants, *index, *body.operands, *body.reads, *accumulators]
