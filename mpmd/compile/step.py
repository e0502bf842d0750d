"""All executables of a step, compiled in data-flow order so that each one's shardings tell the next.

A variable of the step has one spec, the same in every group that holds it (what an `MpmdSharding` can say).
The user's specs win, then those that state leaves came in with, then what XLA inferred.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import REPLICATED, Layout, fit, memory_kind, shortest
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.compiler import Compiler, Executable
from mpmd.compile.program_names import segment_names, task_name, zeros_name
from mpmd.compile.subprogram import SEGMENTS, TASKS, ZEROS
from mpmd.partition import equations
from mpmd.partition.graph import Place
from mpmd.partition.loop import LoopPartition, TaskBody
from mpmd.partition.outline import Loop, Outline, Segment, Transfer
from mpmd.tracing.trace import trace_equations


@dataclasses.dataclass(frozen=True)
class TaskProgram:
    """A task's body and executable: [index], operands, reads, accumulators -> accumulators, writes.

    JAX gives the memory of donated arguments to results of their type in order: accumulators come first.
    """

    body: TaskBody
    executable: Executable | None


@dataclasses.dataclass(frozen=True)
class LoopProgram:
    """The executables of a loop: one per stage and kind, one per fused pair that the schedule asks for, and one per
    group that makes its accumulators.
    """

    loop: Loop
    tasks: dict[Place, TaskProgram]
    fused: dict[tuple[Place, Place], Executable]
    zeros: dict[int, tuple[tuple[int, ...], Executable]]


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """Everything that a step runs.

    Attributes:
      donated: per segment, the variables whose memory its executable takes over.
      layouts: spec and memory kind of each variable.
      name: of the user's function.
    """

    outline: Outline
    mesh: MpmdMesh
    compiler: Compiler
    segments: dict[str, Executable]
    donated: dict[str, frozenset[compat.Var]]
    loops: tuple[LoopProgram, ...]
    layouts: dict[compat.Var, Layout]
    name: str = "step"

    def layout(self, v: Any) -> Layout:
        """The layout of a variable; literals are replicated."""
        return REPLICATED if isinstance(v, compat.Literal) else self.layouts.get(v, REPLICATED)

    def sharding(self, v: compat.Var, group: int) -> NamedSharding:
        """The sharding of a variable in a group."""
        return fit(self.layout(v), self.mesh.groups[group], getattr(v.aval, "shape", ()))


def compile_step(
    outline: Outline,
    mesh: MpmdMesh,
    in_layouts,
    out_layouts,
    donated_args: frozenset[int],
    name: str,
    options: Mapping[str, Any] | None = None,
) -> StepPrograms:
    """Compiles every segment and task of `outline`.

    Args:
      in_layouts, out_layouts: per flat argument (result), its layout or None.
      donated_args: flat arguments whose memory may be taken over.
      name: of the step, with which those of its programs begin.
      options: for XLA.
    """
    return _StepCompiler(outline, mesh, in_layouts, out_layouts, donated_args, name, options).run()


def donations(outline: Outline, mesh: MpmdMesh, donated_args: frozenset[int]) -> dict[str, frozenset[compat.Var]]:
    """What each segment's executable may take over, told without compiling."""
    nothing = [None] * len(outline.trace.in_avals), [None] * len(outline.outputs)
    step = _StepCompiler(outline, mesh, *nothing, donated_args, "step", None)
    step.compiler.close()
    last_use = step._last_use()
    segments = [(i, item) for i, item in enumerate(outline.items) if isinstance(item, Segment)]
    return {item.name: step._donatable(item, i, last_use) for i, item in segments}


class _StepCompiler:
    def __init__(self, outline: Outline, mesh: MpmdMesh, in_layouts, out_layouts, donated_args, name, options):
        self.outline = outline
        self.mesh = mesh
        self.name = name
        self.segment_names = segment_names(name, outline)
        own = [mesh.groups[g] for g in mesh.local_groups]
        self.compiler = Compiler(mesh.groups[0].abstract_mesh, own, options)
        self.layouts: dict[compat.Var, Layout] = {}
        self.wanted: dict[compat.Var, Layout] = {}
        num_consts = len(outline.trace.consts)
        self.invars = outline.trace.jaxpr.invars
        self.arg_vars = self.invars[num_consts:]
        for v, layout in zip(self.arg_vars, in_layouts, strict=True):
            if layout is not None:
                self.layouts[v] = layout
        self.out_layouts = out_layouts
        self.donated_vars = {self.arg_vars[i] for i in donated_args}
        for (v, _), layout in zip(outline.outputs, out_layouts, strict=True):
            if layout is not None and not isinstance(v, compat.Literal):
                self.wanted[v] = layout

    def run(self) -> StepPrograms:
        segments: dict[str, Executable] = {}
        donated: dict[str, frozenset] = {}
        loops: list[LoopProgram] = []
        last_use = self._last_use()
        for position, item in enumerate(self.outline.items):
            if isinstance(item, Segment):
                donated[item.name] = self._donatable(item, position, last_use)
                segments[item.name] = self._segment(item, donated[item.name])
            elif isinstance(item, Loop):
                self.compiler.start()
                loops.append(self._loop(item))
        for v in self.invars:
            self.layouts.setdefault(v, (PartitionSpec(), None))
        self.compiler.close()
        return StepPrograms(
            self.outline, self.mesh, self.compiler, segments, donated, tuple(loops), self.layouts, self.name
        )

    # --- layouts ----------------------------------------------------------------------------------

    def _known(self, v, mesh: Mesh) -> NamedSharding | None:
        return fit(self.layouts[v], mesh, v.aval.shape) if v in self.layouts else None

    def _asked(self, v, mesh: Mesh) -> NamedSharding | None:
        """The layout that a result must have: the user's, its twin's in another group, or its donor's."""
        if isinstance(v, compat.Literal):
            return NamedSharding(mesh, PartitionSpec())
        layout = self.wanted.get(v) or self.layouts.get(v) or self._donor_layout(v)
        return None if layout is None else fit(layout, mesh, v.aval.shape)

    def _donor_layout(self, v):
        for (out, _), donor in zip(self.outline.outputs, self.outline.donors, strict=True):
            if out is v and donor is not None:
                return self.layouts.get(self.arg_vars[donor])
        return None

    def _record(self, atoms, shardings):
        for v, s in zip(atoms, shardings, strict=True):
            if not isinstance(v, compat.Literal):
                self.layouts.setdefault(v, (shortest(s.spec), memory_kind(s)))

    # --- donation ---------------------------------------------------------------------------------

    def _last_use(self) -> dict[tuple[compat.Var, int], int]:
        last: dict[tuple[compat.Var, int], int] = {}
        for position, item in enumerate(self.outline.items):
            if isinstance(item, Segment):
                last.update(((v, item.group), position) for v in item.reads)
            elif isinstance(item, Transfer):
                last[item.var, item.source] = position
                last.setdefault((item.var, item.target), position)
            else:
                last.update(((v, g), position) for v, groups in item.needs().items() for g in groups)
        for v, groups in self.outline.outputs:
            if not isinstance(v, compat.Literal):
                last.update(((v, g), 1 << 60) for g in groups)
        return last

    def _donatable(self, item: Segment, position, last_use) -> frozenset:
        """Arguments that nothing reads afterwards and whose memory a result can use."""
        shared = set()
        # Where groups share devices, a transfer is an alias; between processes, what is sent stays until it is taken.
        if self.mesh.groups_share_devices or len({p for ps in self.mesh.processes for p in ps}) > 1:
            shared = {t.var for t in self.outline.items if isinstance(t, Transfer)}
            shared |= {v for v, g in zip(self.invars, self.outline.inputs, strict=True) if len(g) > 1}
        room: list = [
            (v.aval.shape, str(v.aval.dtype), compat.memory_kind(v.aval))
            for v in item.writes
            if not isinstance(v, compat.Literal)
        ]
        inputs = set(self.invars)
        found = []
        for v in item.reads:
            if v in shared or last_use[v, item.group] != position or (v in inputs and v not in self.donated_vars):
                continue
            kind = (getattr(v.aval, "shape", None), str(v.aval.dtype), compat.memory_kind(v.aval))
            if kind in room:
                room.remove(kind)
                found.append(v)
        return frozenset(found)

    # --- programs ---------------------------------------------------------------------------------

    def _segment(self, item: Segment, donated) -> Executable:
        mesh = self.mesh.groups[item.group]
        closed = compat.make_jaxpr(item.reads, item.writes, item.eqns, item.name)
        executable = self.compiler.compile(
            self.segment_names[item.name], item.name.split(".")[0], closed, mesh,
            [self._known(v, mesh) for v in item.reads],
            [self._asked(v, mesh) for v in item.writes],
            [i for i, v in enumerate(item.reads) if v in donated],
            sharing=SEGMENTS,
        )  # fmt: skip
        self._record(item.reads, executable.in_shardings)
        self._record(item.writes, executable.out_shardings)
        return executable

    def _loop(self, loop: Loop) -> LoopProgram:
        tasks = {}
        for _, bodies in itertools.groupby(task_bodies(loop), key=lambda body: body.place.kind):
            for body in bodies:
                tasks[body.place] = TaskProgram(body, None if body.is_empty else self._task(loop, body))
            self.compiler.start()
        zeros = {}
        for group in range(self.mesh.num_groups):
            own = tuple(k for k, a in enumerate(loop.partition.accumulators) if loop.group(a.place) == group)
            if own:
                zeros[group] = own, self._zeros(loop, own, group)
        return LoopProgram(loop, tasks, self._fused(loop, tasks), zeros)

    def _fused(self, loop: Loop, tasks) -> dict[tuple[Place, Place], Executable]:
        """Pairs as one executable: arguments and results of the first, then those of the second."""
        fused = {}
        for first, second in loop.schedule.fused(loop.partition.info.num_microbatches):
            pair = Place(first.stage, first.kind), Place(second.stage, second.kind)
            entries = [tasks.get(p) for p in pair]
            if pair in fused or any(e is None or e.executable is None for e in entries):
                continue
            name = task_name(self.name, loop, *pair)
            fused[pair] = self.compiler.fuse(name, *(e.executable for e in entries))
        return fused

    def _task(self, loop: Loop, body: TaskBody) -> Executable:
        partition = loop.partition
        mesh = self.mesh.groups[loop.group(body.place)]
        accs = [partition.accumulators[k] for k in body.accumulates]
        results = [a.result for a in accs]
        closed, args = self._jaxpr(partition, body)
        first_acc = len(args) - len(accs)
        ins = [None if v is partition.index else self._known(v, mesh) for v in (*args[:first_acc], *results)]
        asked = [self._asked(v, mesh) for v in (*results, *body.writes)]
        name, kind = task_name(self.name, loop, body.place), body.place.kind
        donate = list(range(first_acc, len(args)))
        for k in range(len(accs)):  # in and out of an accumulator are one buffer
            asked[k] = ins[first_acc + k] = ins[first_acc + k] or asked[k]
        executable = self.compiler.compile(name, kind, closed, mesh, ins, asked, donate, sharing=TASKS)
        acc_in, acc_out = executable.in_shardings[first_acc:], executable.out_shardings[: len(accs)]
        if any(
            not a.is_equivalent_to(b, acc.result.aval.ndim) for a, b, acc in zip(acc_in, acc_out, accs, strict=True)
        ):
            ins[first_acc:] = acc_out
            asked[: len(accs)] = acc_out
            executable = self.compiler.compile(name, kind, closed, mesh, ins, asked, donate, sharing=TASKS)
        known = [v for v in args[:first_acc] if v is not partition.index]
        skip = len(args[:first_acc]) - len(known)
        self._record([*known, *results], executable.in_shardings[skip:])
        self._record([*results, *body.writes], executable.out_shardings)
        return executable

    def _jaxpr(self, partition: LoopPartition, body: TaskBody):
        with compat.use_abstract_mesh(self.mesh.groups[0].abstract_mesh):
            return task_jaxpr(partition, body)

    def _zeros(self, loop: Loop, own, group) -> Executable:
        partition = loop.partition
        accs = [partition.accumulators[k] for k in own]
        mesh = self.mesh.groups[group]
        n = partition.info.num_microbatches

        def start():
            return [a.operation.init(a.value.aval, n) for a in accs]

        with compat.use_abstract_mesh(self.mesh.groups[0].abstract_mesh):
            closed = jax.make_jaxpr(start)()
        outs = [self._known(a.result, mesh) for a in accs]
        return self.compiler.compile(zeros_name(self.name, loop, group), "zeros", closed, mesh, [], outs, sharing=ZEROS)


def task_bodies(loop: Loop) -> list[TaskBody]:
    """The bodies of the tasks that a loop's schedule has, in data-flow order; a `B` beside `I` and `W` is both."""
    partition = loop.partition
    kinds = {t.kind for order in loop.orders for t in order}
    bodies = {b.place: b for b in partition.tasks}
    if "B" in kinds and any(p.kind == "I" for p in bodies):
        for stage in range(loop.schedule.num_stages):
            bodies[Place(stage, "B")] = _whole_backward(partition, stage)
    rank = {"F": 0, "I": 1, "B": 1, "W": 2}
    stages = loop.schedule.num_stages
    order = sorted(bodies, key=lambda p: (rank[p.kind], p.stage if p.kind == "F" else stages - p.stage))
    return [bodies[p] for p in order if p.kind in kinds]


def _whole_backward(partition: LoopPartition, stage: int) -> TaskBody:
    """`I` and `W` of a stage as one task."""
    i, w = partition.task(Place(stage, "I")), partition.task(Place(stage, "W"))
    seen: set[int] = set()
    eqns = []
    bound: set[compat.Var] = set()
    for eqn in (*i.eqns, *w.eqns):
        if id(eqn) not in seen and not bound.intersection(equations.outputs(eqn)):
            seen.add(id(eqn))
            bound.update(equations.outputs(eqn))
            eqns.append(eqn)
    others = {v for t in partition.tasks if t.place not in (i.place, w.place) for v in t.reads}
    return TaskBody(
        Place(stage, "B"),
        tuple(eqns),
        tuple(dict.fromkeys((*i.operands, *w.operands))),
        tuple(v for v in dict.fromkeys((*i.reads, *w.reads)) if v not in bound),
        tuple(v for v in (*i.writes, *w.writes) if v in others),
        (*i.accumulates, *w.accumulates),
        i.uses_index or w.uses_index,
    )


def task_jaxpr(partition: LoopPartition, body: TaskBody):
    """A task with its accumulation as a closed jaxpr: (jaxpr, arguments)."""
    accs = [partition.accumulators[k] for k in body.accumulates]
    old = [compat.new_var(a.result.aval) for a in accs]
    eqns, new = list(body.eqns), []
    for acc, start in zip(accs, old, strict=True):
        if isinstance(acc.value, compat.Literal):
            more, (total,) = trace_equations(
                lambda a, i, acc=acc, value=acc.value: acc.operation.update(a, value.val, i), start, partition.index
            )
        else:
            more, (total,) = trace_equations(acc.operation.update, start, acc.value, partition.index)
        eqns += more
        new.append(total)
    args = [*([partition.index] if body.uses_index else []), *body.operands, *body.reads, *old]
    outs = [*new, *body.writes]
    return compat.make_jaxpr(args, outs, eqns, str(body.place)), args
