"""Walks the instructions of a step: a loop over a flat list, with integer slots and arguments bound beforehand.

Nothing is looked up by name and no pytree is touched per task; nothing waits for a device. What an
instruction needs is worked out once, when the executor is built.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import scheduler
from mpmd import _jax_compat as compat
from mpmd import transfer
from mpmd.body import Place
from mpmd.program import edge_name, zeros_name
from mpmd.stepping import LoopProgram, StepPrograms
from mpmd.timing import Timed, run_timed
from scheduler import Call, Free, Program, Run, Send, Task, Value

_RUN, _MOVE, _ALIAS = 0, 1, 2


class Executor:
    """Runs a checked program in this process.

    Attributes:
      num_calls: executables called per step.
      num_moves, bytes_moved: transfers between groups per step.
    """

    def __init__(self, programs: StepPrograms, program: Program):
        build = _Build(programs, program)
        build.run()
        self.num_calls = sum(op[0] == _RUN for op in build.ops)
        self.num_moves = sum(op[0] == _MOVE for op in build.ops)
        self.bytes_moved = build.bytes_moved
        self._ops = [tuple(op) for op in build.ops]
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
        position = -1
        try:
            for code, fun, ins, outs, frees in self._ops:
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

    def timed(self, arguments) -> tuple[list, list[Timed]]:
        """Runs the step once under a clock: results as by a call, and when each task of its loops ran."""
        slots = self._fill(arguments)
        ops = []
        for (code, fun, ins, outs, _), (group, tasks) in zip(self._ops, self._owners, strict=True):
            ops.append((group, tasks, code == _RUN, (lambda x: x) if code == _ALIAS else fun, ins, outs))
        records = run_timed(slots, ops)
        return self._collect(slots), records

    def _fill(self, arguments) -> list:
        slots = self._template.copy()
        for arrays, where in zip(arguments, self._inputs, strict=True):
            for group, slot in where:
                slots[slot] = arrays[group]
        return slots

    def _collect(self, slots):
        return [{group: slots[slot] for group, slot in where} for where in self._outputs]


class _Build:
    """Works out slots and bound arguments for one process's instructions."""

    def __init__(self, programs: StepPrograms, program: Program):
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
            [(g, self.slot(g, self.outer(v))) for g in sorted(groups)]
            for v, groups in zip(names, self.outline.inputs, strict=True)
        ]
        pending: list[int] = []
        for group, instruction in scheduler.merge(self.program):
            if isinstance(instruction, Run):
                self._run(group, instruction.tasks, self.programs.loops[instruction.loop])
            elif isinstance(instruction, Call):
                self._call(group, instruction)
            elif isinstance(instruction, Send):
                self._send(group, instruction)
            elif isinstance(instruction, Free):
                slot = self.slot(group, instruction.value)
                if self.ops:
                    self.ops[-1][4] += (slot,)
                else:
                    pending.append(slot)
        if self.indices:
            slots, values, targets = zip(*self.indices, strict=True)
            self.constants.update(zip(slots, jax.device_put(list(values), list(targets)), strict=True))
        self.output_slots = [
            [(g, self.slot(g, self.outer(v))) for g in sorted(groups)] for v, groups in self.outline.outputs
        ]

    def _add(self, code, fun, ins, outs, text, group, tasks=()):
        self.ops.append([code, fun, ins, outs, ()])
        self.owners.append((group, tasks))
        self.texts.append(text)

    def _call(self, group, instruction: Call):
        if instruction.name in self.zeros:
            loop, _ = self.zeros[instruction.name]
            call = loop.zeros[group][1].call
        else:
            call = self.programs.segments[instruction.name].call
        ins = tuple(self.slot(group, v) for v in instruction.reads)
        outs = tuple(self.slot(group, v) for v in instruction.writes)
        self._add(_RUN, call, ins, outs, f"{instruction.name} in group {group}", group)
        gone = {self.slot(group, v) for v in instruction.donates}
        self.ops[-1][4] += tuple(gone - set(outs))

    def _run(self, group, tasks: tuple[Task, ...], program: LoopProgram):
        places = tuple(Place(t.stage, t.kind) for t in tasks)
        if len(tasks) == 2 and places in program.fused:
            bound = [self._bind(group, t, program) for t in tasks]
            ins, outs = (tuple(slot for part in bound for slot in part[k]) for k in (0, 1))
            self._add(
                _RUN,
                program.fused[places[0], places[1]].call,
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
                self._add(_RUN, entry.executable.call, ins, outs, f"{task} in group {group}", group, (task,))

    def _bind(self, group, task: Task, program: LoopProgram):
        """Slots of a task's arguments and results."""
        loop, body = program.loop, program.tasks[Place(task.stage, task.kind)].body
        accs = [self.slot(group, self.outer(loop.partition.accumulators[k].result)) for k in body.accumulates]
        ins = [self._index(group, task.microbatch)] if body.uses_index else []
        ins += [self.slot(group, self.outer(v)) for v in body.operands]
        ins += [self.slot(group, Value(edge_name(loop, v), task.microbatch)) for v in body.reads]
        outs = [self.slot(group, Value(edge_name(loop, v), task.microbatch)) for v in body.writes]
        return (*ins, *accs), (*outs, *accs)

    def _index(self, group, microbatch) -> int:
        slot = self.slot(group, ("index", microbatch))
        if slot not in self.constants:
            sharding = NamedSharding(self.programs.mesh.groups[group], PartitionSpec())
            self.constants[slot] = None  # until all are put at once
            self.indices.append((slot, np.int32(microbatch), transfer.target_of(sharding)))
        return slot

    def _send(self, group, instruction: Send):
        value, target = instruction.value, instruction.to_group
        v = self.loop_vars[value.name] if value.microbatch is not None else self.vars[value.name]
        source = self.programs.sharding(v, group)
        wanted = self.programs.sharding(v, target)
        ins, outs = self.slot(group, value), self.slot(target, value)
        text = f"the transfer of {value} from group {group} to {target}"
        if transfer.is_alias(source, wanted, len(v.aval.shape)):
            self._add(_ALIAS, None, ins, outs, text, group)
        else:
            self._add(_MOVE, transfer.mover(source, wanted, v.aval.dtype), ins, outs, text, group)
            self.bytes_moved += self.program.nbytes.get(value.name, 0)
