"""Walks the instructions of a step: a loop over a flat list, with integer slots and arguments bound beforehand.

Nothing is looked up by name and no pytree is touched per task; nothing waits for a device. What an
instruction needs is worked out once, when the executor is built.
"""

import contextlib
import functools
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import scheduler
from mpmd import _jax_compat as compat
from mpmd.compile.compiler import Executable
from mpmd.compile.program import edge_name, zeros_name
from mpmd.compile.step import LoopProgram, StepPrograms
from mpmd.job import joining, wires
from mpmd.job.job import Job
from mpmd.partition.graph import Place
from mpmd.run import nans, routes
from mpmd.run.agreement import agree, plan_of, warm_up
from mpmd.run.profiling import annotated
from mpmd.run.run_ahead import Limits, give_up
from mpmd.run.timing import Timed, as_text, of_text, run_timed
from scheduler import Call, Free, Program, Recv, Run, Send, Task, Value

_RUN, _MOVE, _ALIAS, _SEND, _RECV = range(5)


class Executor:
    """Runs this process's part of a checked program.

    Attributes:
      num_calls: executables called per step.
      num_moves, bytes_moved: transfers per step that this process has to do with.
      ranks: the processes of all groups.
    """

    def __init__(self, programs: StepPrograms, program: Program):
        self.ranks = tuple(sorted({r for ranks in programs.mesh.processes for r in ranks}))
        job = joining.current() if len(self.ranks) > 1 else None
        self._job = job if job is not None and job.rank in self.ranks else None
        if jax.process_index() not in self.ranks:
            warnings.warn(
                f"mpmd: process {jax.process_index()} has none of the mesh's devices, which are those of"
                f" {', '.join(map(str, self.ranks))}: it takes no part in the step and cannot read its results."
                " Start as many processes as the mesh needs, or give each fewer devices.",
                stacklevel=2,
            )
        build = _Build(programs, program, self._job)
        build.run()
        self.num_calls = sum(op[0] == _RUN for op in build.ops)
        self.num_moves = sum(op[0] in (_MOVE, _SEND, _RECV) for op in build.ops)
        self.bytes_moved = build.bytes_moved
        self._num_pieces = build.num_pieces
        self._next_piece: int | None = None
        self._mesh = programs.mesh
        self._plan = functools.partial(plan_of, programs, program)
        self.position = 0
        self._ops = [tuple(op) for op in build.ops]
        self._names = build.names
        self._texts = build.texts
        self._owners = build.owners
        self._template: list = [None] * len(build.slots)
        for slot, value in build.constants.items():
            self._template[slot] = value
        self._inputs = build.input_slots
        self._outputs = build.output_slots

    def __call__(self, arguments):
        """Runs the step once.

        Args:
          arguments: per flat input (captured constants first), `{group: array}`.

        Returns:
          Per flat result, `{group: array}`.
        """
        slots = self._fill(arguments)
        if nans.are_errors():
            return self._run_checked(slots)
        if self._job is not None:
            return self._run_in_job(slots, self._job)
        position = -1
        try:
            for code, fun, ins, outs, frees in self._instructions():
                position += 1
                if code == _RUN:
                    for slot, value in zip(outs, fun(*[slots[i] for i in ins]), strict=False):
                        slots[slot] = value
                elif code == _MOVE:
                    slots[outs] = fun(slots[ins])
                else:
                    slots[outs] = slots[ins]
                for slot in frees:
                    slots[slot] = None
        except Exception as e:
            e.add_note(f"jax-mpmd: while it ran {self._texts[position]}")
            raise
        return self._collect(slots)

    def _run_in_job(self, slots, job: Job):
        """The same loop beside other processes: with their sends and receives, under the watchdog's eyes."""
        base = self._begin()
        job.watchdog.enter_step(self)
        try:
            with job.as_a_whole():
                for position, op in enumerate(self._instructions()):
                    self.position = position
                    _step(slots, op, base)
                    for slot in op[4]:
                        slots[slot] = None
        except Exception as e:
            give_up(self._ops[self.position :], base)
            e.add_note(f"jax-mpmd: while it ran {self._texts[self.position]}")
            raise
        finally:
            job.watchdog.leave_step()
        return self._collect(slots)

    def prepare(self) -> Job | None:
        """Before the first step, lets the processes agree on the plan and meet; the job if this has just been done."""
        if self._job is None or self._next_piece is not None:
            return None
        self._next_piece = agree(self._job, self._plan(), self.ranks) << wires.NUMBER_BITS
        warm_up(self._job, self._mesh, self.ranks)
        return self._job

    def _begin(self) -> int:
        """The number of the step's first piece."""
        self.prepare()
        assert self._next_piece is not None
        base = self._next_piece
        self._next_piece += self._num_pieces
        return base

    @property
    def transport(self) -> str:
        """How values go between groups, for `explain()`."""
        if self._job is None:
            return "by jax.device_put"
        return f"by jax.device_put in this process, between processes by {wires.wire_class(self._job).name}"

    def text(self, position: int) -> str:
        """An instruction in words, for the watchdog."""
        return self._texts[position] if position < len(self._texts) else ""

    def peers(self, position: int) -> tuple[int, ...]:
        """The other ranks whose part in an instruction it may wait for."""
        code, *_ = self._ops[position]
        others = self._mesh.processes[self._owners[position][0]] if code == _RUN else ()
        return tuple(r for r in others if r != self._job.rank) if self._job is not None and len(others) > 1 else ()

    def _run_checked(self, slots):
        """The same loop, looking at what each executable returns (`jax_debug_nans`, `jax_debug_infs`)."""
        base = 0 if self._job is None else self._begin()
        with self._as_a_whole():
            for op, text in zip(self._ops, self._texts, strict=True):
                try:
                    _step(slots, op, base)
                    if op[0] == _RUN and op[2]:  # accumulators start from nothing, perhaps at infinity
                        nans.check([slots[i] for i in op[3]], text)
                except Exception as e:
                    e = nans.translated(e, text)
                    e.add_note(f"jax-mpmd: while it ran {text}")
                    raise e from None
                for slot in op[4]:
                    slots[slot] = None
        return self._collect(slots)

    def _as_a_whole(self):
        return contextlib.nullcontext() if self._job is None else self._job.as_a_whole()

    def timed(self, arguments) -> tuple[list, list[Timed]]:
        """Runs the step once under a clock: results as by a call, and when each task of its loops ran."""
        slots = self._fill(arguments)
        base = 0 if self._job is None else self._begin()
        mixed = any(op[0] == _RECV and op[2] is not None for op in self._ops)  # reads what another local group sends
        if self._job is not None and wires.wire_class(self._job).is_ordered:
            mixed = True
        ops = [
            (0 if mixed else group, tasks, op[0] == _RUN, functools.partial(_step, slots, op, base), op[2], op[3])
            for op, (group, tasks) in zip(self._ops, self._owners, strict=True)
        ]
        if self._job is not None:
            self._job.exchange("starting the clock of a timed step", "", self.ranks)
            self._job.watchdog.enter_step(self)
        with self._as_a_whole():
            records = run_timed(slots, ops)
        if self._job is not None:
            self._job.watchdog.leave_step()
            said = self._job.exchange("gathering a timed step", as_text(records), self.ranks)
            records = sorted({r for text in said.values() for r in of_text(text)}, key=lambda r: r.start)
        return self._collect(slots), records

    def _instructions(self) -> list[tuple]:
        """What is run, each instruction in a span of its own while a profile is being taken."""
        return self._annotated if compat.is_profiling() else self._ops

    @functools.cached_property
    def _annotated(self) -> list[tuple]:
        return [
            op if op[1] is None else (op[0], annotated(op[1], name, group, tasks), *op[2:])
            for op, name, (group, tasks) in zip(self._ops, self._names, self._owners, strict=True)
        ]

    def _fill(self, arguments) -> list:
        slots = self._template.copy()
        for arrays, where in zip(arguments, self._inputs, strict=True):
            for group, slot in where:
                slots[slot] = arrays[group]
        return slots

    def _collect(self, slots):
        return [{group: slots[slot] for group, slot in where} for where in self._outputs]


def _step(slots: list, op, base: int) -> None:
    """Does one instruction."""
    code, fun, ins, outs, _ = op
    if code == _RUN:
        for slot, value in zip(outs, fun(*[slots[i] for i in ins]), strict=False):
            slots[slot] = value
    elif code == _MOVE:
        slots[outs] = fun(slots[ins])
    elif code == _ALIAS:
        slots[outs] = slots[ins]
    elif code == _SEND:
        fun(slots[ins], base)
    else:
        slots[outs] = fun(None if ins is None else slots[ins], base)


class _Build:
    """Works out slots and bound arguments for one process's instructions."""

    def __init__(self, programs: StepPrograms, program: Program, job: Job | None):
        self.job = job
        self.limits = None if job is None else Limits(job, programs, program)
        self.local = set(programs.mesh.local_groups)
        self.num_pieces = 0
        self.routes: dict = {}
        self.ways: dict = {}
        self.values: dict = {}
        self.programs = programs
        self.outline = programs.outline
        self.program = program
        self.slots: dict = {}
        self.constants: dict[int, object] = {}
        self.indices: list[tuple[int, np.int32, Any]] = []
        self.ops: list[list] = []
        self.texts: list[str] = []
        self.owners: list[tuple[int, tuple[Task, ...]]] = []
        self.bytes_moved = 0
        self.vars = {name: v for v, name in self.outline.names.items()}
        self.loop_vars: dict[str, compat.Var] = {}
        self.zeros: dict[str, tuple[LoopProgram, int]] = {}
        for loop in programs.loops:
            self.loop_vars.update((edge_name(loop.loop, v), v) for v in loop.loop.partition.names)
            self.zeros.update((zeros_name(loop.loop, g), (loop, g)) for g in loop.zeros)

    def slot(self, group: int, value) -> int:
        return self.slots.setdefault((group, value), len(self.slots))

    def outer(self, v) -> Value:
        return Value(self.outline.names[v])

    def run(self):
        names = self.outline.trace.jaxpr.invars
        self.input_slots = [
            [(g, self.slot(g, self.outer(v))) for g in sorted(groups) if g in self.local]
            for v, groups in zip(names, self.outline.inputs, strict=True)
        ]
        for group, instruction in scheduler.merge(self.program) if self.local else ():
            if isinstance(instruction, Send):
                self._send(group, instruction)
            elif group not in self.local:
                continue
            elif isinstance(instruction, Run):
                self._run(group, instruction.tasks, self.programs.loops[instruction.loop])
            elif isinstance(instruction, Call):
                self._call(group, instruction)
            elif isinstance(instruction, Recv):
                self._receive(group, instruction)
            elif isinstance(instruction, Free) and self.ops:
                self.ops[-1][4] += (self.slot(group, instruction.value),)
        self.names = [op[1].name if op[0] == _RUN else text for op, text in zip(self.ops, self.texts, strict=True)]
        for op in self.ops:  # last of all, since it waits for compilations
            if isinstance(op[1], Executable):
                op[1] = op[1].call
        if self.limits is not None:
            self.limits.close(self.num_pieces)
            for op, (group, _) in zip(self.ops, self.owners, strict=True):
                if op[0] == _RUN:
                    op[1] = self.limits.counted(group, op[1])
        if self.indices:
            slots, values, targets = zip(*self.indices, strict=True)
            self.constants.update(zip(slots, self._placed(list(values), list(targets)), strict=True))
        self.output_slots = [
            [(g, self.slot(g, self.outer(v))) for g in sorted(groups) if g in self.local]
            for v, groups in self.outline.outputs
        ]

    def _placed(self, values, targets) -> list:
        return jax.device_put(values, targets) if self.job is None else routes.place(values, targets)

    def _add(self, code, fun, ins, outs, text, group, tasks=()):
        self.ops.append([code, fun, ins, outs, ()])
        self.owners.append((group, tasks))
        self.texts.append(text)

    def _call(self, group, instruction: Call):
        if instruction.name in self.zeros:
            loop, _ = self.zeros[instruction.name]
            executable = loop.zeros[group][1]
        else:
            executable = self.programs.segments[instruction.name]
        ins = tuple(self.slot(group, v) for v in instruction.reads)
        outs = tuple(self.slot(group, v) for v in instruction.writes)
        self._add(_RUN, executable, ins, outs, f"{instruction.name} in group {group}", group)
        gone = {self.slot(group, v) for v in instruction.donates}
        self.ops[-1][4] += tuple(gone - set(outs))

    def _run(self, group, tasks: tuple[Task, ...], program: LoopProgram):
        places = tuple(Place(t.stage, t.kind) for t in tasks)
        if len(tasks) == 2 and places in program.fused:
            bound = [self._bind(group, t, program) for t in tasks]
            ins, outs = (tuple(slot for part in bound for slot in part[k]) for k in (0, 1))
            self._add(
                _RUN,
                program.fused[places[0], places[1]],
                ins,
                outs,
                f"{tasks[0]}+{tasks[1]} in group {group}",
                group,
                tasks,
            )
            return
        for task, place in zip(tasks, places, strict=True):
            entry = program.tasks.get(place)
            if entry is not None and entry.executable is not None:
                ins, outs = self._bind(group, task, program)
                self._add(_RUN, entry.executable, ins, outs, f"{task} in group {group}", group, (task,))

    def _bind(self, group, task: Task, program: LoopProgram):
        """Slots of a task's arguments and results."""
        index, around, reads, writes, accs = self._values(group, program, Place(task.stage, task.kind))
        slot, microbatch = self.slot, task.microbatch
        ins = [slot(group, Value(name, microbatch)) for name in reads]
        outs = [slot(group, Value(name, microbatch)) for name in writes]
        first = (self._index(group, microbatch),) if index else ()
        return (*first, *around, *ins, *accs), (*accs, *outs)

    def _values(self, group, program: LoopProgram, place: Place):
        """What tasks of one place take and give: whether the index; slots of values around the loop; names of values
        in it; slots of accumulators.
        """
        key = program.loop.number, place
        if key not in self.values:
            loop, body = program.loop, program.tasks[place].body
            self.values[key] = (
                body.uses_index,
                [self.slot(group, self.outer(v)) for v in body.operands],
                [edge_name(loop, v) for v in body.reads],
                [edge_name(loop, v) for v in body.writes],
                [self.slot(group, self.outer(loop.partition.accumulators[k].result)) for k in body.accumulates],
            )
        return self.values[key]

    def _index(self, group, microbatch) -> int:
        slot = self.slot(group, ("index", microbatch))
        if slot not in self.constants:
            sharding = NamedSharding(self.programs.mesh.groups[group], PartitionSpec())
            self.constants[slot] = None  # until all are put at once
            target = routes.target_of(sharding) if self.job is None else sharding
            self.indices.append((slot, np.int32(microbatch), target))
        return slot

    def _send(self, group, instruction: Send):
        value, target = instruction.value, instruction.to_group
        code, fun, source, wanted = self._way(value.name, value.microbatch is not None, group, target)
        text = f"the transfer of {value} from group {group} to {target}"
        if code == _SEND:
            self._send_away(group, instruction, fun, source, wanted, text)
        elif group in self.local:
            self._add(code, fun, self.slot(group, value), self.slot(target, value), text, group)
            self.bytes_moved += self.program.nbytes.get(value.name, 0) if code == _MOVE else 0

    def _way(self, name, in_loop, group, target):
        """How a value goes from group to group, for all microbatches alike."""
        found = self.ways.get((name, group, target))
        if found is None:
            v = self.loop_vars[name] if in_loop else self.vars[name]
            source, wanted = self.programs.sharding(v, group), self.programs.sharding(v, target)
            mesh = self.programs.mesh
            if routes.is_alias(source, wanted, len(v.aval.shape)):
                found = _ALIAS, None, source, wanted
            elif len({*mesh.processes[group], *mesh.processes[target]}) > 1:
                found = _SEND, v.aval, source, wanted
            else:
                here = group in self.local
                found = _MOVE, routes.mover(source, wanted, v.aval.dtype) if here else None, source, wanted
            self.ways[name, group, target] = found
        return found

    def _send_away(self, group, instruction: Send, aval, source, wanted, text):
        """Pieces for other processes; every process counts them alike, also those that have no part in them.

        Where this process receives too, it does both when it comes to the receive, which directly follows.
        """
        value, target = instruction.value, instruction.to_group
        assert self.job is not None and self.limits is not None
        first = self.num_pieces
        self.num_pieces += len(routes.pieces(source, wanted, tuple(aval.shape)))
        if group not in self.local and target not in self.local:
            return
        route = routes.Route(self.job, source, wanted, aval, first, self._is_the_users(group, value), text)
        flow = self.limits.flow(group, target, value)
        self.routes[group, target, value] = route, flow
        if group in self.local and route.outgoing:
            if target not in self.local:
                carry = route.carry if flow is None else flow.sending(route.carry)
                self._add(_SEND, carry, self.slot(group, value), None, text, group)
            self.bytes_moved += self.program.nbytes.get(value.name, 0)

    def _receive(self, group, instruction: Recv):
        value, source = instruction.value, instruction.from_group
        route, flow = self.routes.pop((source, group, value), (None, None))
        if route is not None:
            carry = route.carry if flow is None else flow.receiving(route.carry)
            ins = self.slot(source, value) if source in self.local else None
            self._add(_RECV, carry, ins, self.slot(group, value), route.what, group)
            self.bytes_moved += 0 if source in self.local else self.program.nbytes.get(value.name, 0)

    def _is_the_users(self, group, value) -> bool:
        """Whether the user gets to hold an array, and so may delete it or donate it while it is on its way."""
        return value in self.program.inputs_of(group) or value in self.program.outputs_of(group)
