"""Walks the instructions of a step: one loop over a flat list, with integer slots and arguments bound beforehand.

Per task, the loop looks up no names, touches no pytree and waits for no device. Profiles, checks for NaNs and timed
steps are the same loop over instructions that do something more.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.profiler import TraceAnnotation

from mpmd import _jax_compat as compat
from mpmd.compile.step import StepPrograms
from mpmd.errors import HangError
from mpmd.job import joining, wires
from mpmd.job.alone import alone
from mpmd.job.notes import Note, Values
from mpmd.observe import ledger
from mpmd.observe.flight import Flight
from mpmd.observe.records import RecordedTimes
from mpmd.run import nans
from mpmd.run.accounts import Accounts, Measured
from mpmd.run.agreement import Announcement, Given, agree, plan_of, values_to_compare, warm_up
from mpmd.run.bindings import Bindings, bind
from mpmd.run.bound_instruction import MOVE, RECV, RUN, SEND, Instruction
from mpmd.run.run_ahead import give_up
from mpmd.run.slots import SlotValues
from mpmd.run.timing import Recorder
from mpmd.tracing.trace import Trace
from mpmd.users_frame import users_frame
from scheduler import Program, Task


class Executor:
    """Runs this process's part of a checked program; `whole` is the trace of the step that the user calls."""

    def __init__(self, programs: StepPrograms, program: Program, whole: Trace):
        self.ranks = tuple(sorted({r for ranks in programs.mesh.processes for r in ranks}))  # those of all groups
        job = joining.current() if len(self.ranks) > 1 else None
        self.job = job if job is not None and job.rank in self.ranks else None  # None: all groups are here
        if jax.process_index() not in self.ranks and not programs.mesh.is_part:
            warnings.warn(
                f"mpmd: process {jax.process_index()} has none of the mesh's devices, which are those of"
                f" {', '.join(map(str, self.ranks))}: it takes no part in the step and cannot read its results."
                " Start as many processes as the mesh needs, or give each fewer devices.",
                stacklevel=users_frame(),
            )
        self._alone = alone() if job is None and joining.current() is None else None
        watched = self._alone if self.job is None else self.job
        self._activity = None if watched is None else watched.activity
        self.bindings = self._bind(programs, program)
        self.program = program  # of all groups
        self.flight = Flight(len(self.bindings.instructions))  # the times at which it began its latest instructions
        self._num_steps = 0
        self.call_number = 0
        self._next_piece: int | None = None
        self._epoch = 0  # the job's epoch in which the processes agreed on the plan
        self._programs = programs
        self._arguments = whole.in_names, [v.aval for v in whole.arguments]
        outline = programs.outline
        groups = zip(outline.trace.in_names, outline.inputs[len(outline.trace.consts) :], strict=True)
        placed = {name: f"in groups {sorted(of_argument)}" for name, of_argument in groups}
        self._ways = whole.fixed, {"the arguments": f"in the structure {whole.in_tree}", **placed}
        account = ledger.of_process(jax.process_index)
        # A collective of several processes waits for all of them, so its time says nothing about this process.
        own = None if any(len(ranks) > 1 for ranks in programs.mesh.processes) else self._activity
        self._accounts = None if account is None else Accounts(account, self.bindings, programs.mesh.groups, own)
        self._is_finished = False
        self._instructions = self._bound()
        if joining.current() is not None:  # a job's watchdog allows more time for compiling than for a step
            self.finish()

    def _bind(self, programs: StepPrograms, program: Program) -> Bindings:
        return bind(programs, program, self.job)

    def finish(self) -> None:
        """Waits for all programs, once."""
        if not self._is_finished:
            self.bindings.finish()
            self._programs.compiler.release()
            self._instructions, self._is_finished = self._bound(), True

    def __call__(self, arguments: Sequence[Mapping[int, jax.Array]]) -> list[dict[int, jax.Array]]:
        """Runs the step once. Per flat argument (captured constants first) and per flat result: `{group: array}`."""
        slots = self._fill(arguments)
        # The user did not write the transfers between groups, so the user's transfer guard does not apply to them.
        with jax.transfer_guard_device_to_device("allow"):
            with self._accounted() as measured:
                self._run_once(slots, measured)
        return self._collect(slots)

    def _accounted(self) -> contextlib.AbstractContextManager[Measured | None]:
        """Accounts for the call inside this context to the ledger, if there is one."""
        return contextlib.nullcontext() if self._accounts is None else self._accounts.call(self.bindings, self._work)

    @property
    def _work(self) -> Hashable:
        """A key of the work that a call gives its devices. Calls with equal keys do equal work, in any order."""
        return ()

    def _run_once(self, slots: SlotValues, measured: Measured | None = None) -> None:
        with self._step() as base:
            instructions = self._chosen()
            self._walk(slots, instructions if measured is None else measured(instructions), base)
        self.finish()

    def timed(
        self, arguments: Sequence[Mapping[int, jax.Array]], step: int
    ) -> tuple[list[dict[int, jax.Array]], Callable[[], RecordedTimes]]:
        """Runs the step once, as a call does, and records when each instruction of this process ran.

        Returns the results, and a slow function that returns the rows (for `step`), in times of this process's clock.
        """
        slots = self._fill(arguments)
        self.finish()
        instructions = self._recorder.wrapped(self._chosen())

        def walk() -> None:
            with self._step() as base:
                self._walk(slots, instructions if measured is None else measured(instructions), base)

        self.prepare()
        with self._accounted() as measured:
            rows = self._recorder.run(step, walk)
        return self._collect(slots), rows

    def prepare(self) -> bool:
        """Agrees on the plan and warms up collectives, once. Returns whether this call did so."""
        if self.job is None or (self._next_piece is not None and self._epoch == self.job.epoch):
            return False
        if any(len(processes) > 1 for processes in self._programs.mesh.processes):
            if self.job.epoch:
                raise HangError("mpmd: a rank was lost, and a group of several processes cannot go on without it")
            self.job.bind()
        plan, epoch = self._plan(), self.job.epoch
        first = agree(self.job, plan, self.ranks, self._note(0))  # Ctrl-C may end it
        self._next_piece, self._epoch = first << wires.NUMBER_BITS, epoch
        warm_up(self.job, self._programs.mesh, self.ranks)
        return True

    def _plan(self) -> Announcement:
        return plan_of(self._programs, self.program)

    def _note(self, number: int, values: Values = (), makers: Sequence[int] = ()) -> Note:
        """Returns the note of the next call; `number` is 0 before the processes have agreed on the program."""
        assert self.job is not None
        step = self.job.activity.step + 1
        return Note(f"called {self._programs.name}", number, step, *self._arguments, values, makers, *self._ways)

    def compare(self, given: Given, makers: Sequence[int], is_first: bool) -> None:
        """Compares the next call with the calls of the other processes: a first call now, later calls while they run.

        Args:
          given: by position, the arguments that are arrays of this process.
          makers: per argument, the number of the call result that it is.
          is_first: the return value of `prepare`.

        Raises:
          ScheduleError: this call or an earlier one differs.
        """
        if self.job is None or self._next_piece is None:
            return
        number = self._next_piece >> wires.NUMBER_BITS
        values = values_to_compare(given, is_first)
        if self._num_steps == 1 and self.job.rank == self.ranks[0]:
            self._tell_of_uncompared([i for i, x in values if x is None])
        self.call_number = self.job.calls.note(self.ranks, self._note(number, values, makers))
        if is_first:
            self.job.calls.settle(self.ranks)

    def _tell_of_uncompared(self, positions: Sequence[int]) -> None:
        """Warns, in the second call, of arguments that only the first call compared. State is an `MpmdArray` by now."""
        if names := ", ".join(self._arguments[0][i] for i in dict.fromkeys(positions)):
            warnings.warn(
                f"mpmd: {names} of {self._programs.name} come on a device. From the second call on their values are not"
                " compared with those of the other processes, which may read other data. Give numpy arrays to have them"
                " compared in every call.",
                stacklevel=users_frame(),
            )

    @property
    def position(self) -> int:
        """The number of the instruction that was begun last."""
        return self.flight.position

    @property
    def notes(self) -> list[str]:
        """Lines of `explain()` about the way it runs."""
        return []

    @property
    def transport(self) -> str:
        """The means of transfer between groups, for `explain()`."""
        if self.job is None:
            return "by jax.device_put"
        return f"by jax.device_put in this process, between processes by {wires.wire_class(self.job).name}"

    def recorded(self) -> dict[str, Any]:
        """Returns the flight recorder's entry for this step's program."""
        return {
            "name": self._programs.name,
            "steps": self.flight.steps(),
            "instructions": [[b.group, b.text] for b in self.bindings.instructions],
            "plan": self._program_of_call,
            "ranks": list(map(list, self._programs.mesh.processes)),
        }

    @property
    def _program_of_call(self) -> Program:
        return self.program

    @property
    def _counts(self) -> dict[int, int]:
        """The number of microbatches of each loop for which every call chooses that number."""
        return {}

    def text(self, position: int) -> str:
        """Returns an instruction in words, for the watchdog."""
        instructions = self.bindings.instructions
        return instructions[position].text if position < len(instructions) else ""

    def peers(self, position: int) -> tuple[int, ...]:
        """Returns the other ranks that an instruction may wait for."""
        instructions = self.bindings.instructions
        if self.job is None or position >= len(instructions) or instructions[position].code != RUN:
            return ()
        ranks = self._programs.mesh.processes[instructions[position].group]
        return tuple(r for r in ranks if r != self.job.rank)

    @contextlib.contextmanager
    def _step(self) -> Iterator[int]:
        """Lets the watchdog watch the instructions of a step. Yields the number of the step's first piece."""
        self._num_steps += 1
        if self._activity is None:
            self.flight.begin(self._num_steps)
            yield 0
            self.flight.end()
            return
        base = 0
        if self.job is not None:
            self.prepare()
            base = self._first_piece()
        self._activity.enter_step(self)
        try:
            with contextlib.nullcontext() if self.job is None else self.job.as_a_whole():
                yield base
        finally:
            self._activity.leave_step()

    def _first_piece(self) -> int:
        """Takes the piece numbers of the next step, and returns the first."""
        assert self._next_piece is not None
        base = self._next_piece
        self._next_piece += self.bindings.num_pieces
        return base

    def _walk(self, slots: SlotValues, instructions: Sequence[Instruction], base: int) -> None:
        """Runs the instructions one after the other."""
        number, begun, now = 0, self.flight.times, time.perf_counter
        try:
            for code, act, reads, writes, frees, number in instructions:
                begun[number] = now()
                if code == RUN:
                    for slot, value in zip(writes, act(*[slots[i] for i in reads]), strict=False):
                        slots[slot] = value
                elif code == MOVE:
                    slots[writes] = act(slots[reads])
                elif code == SEND:
                    act(slots[reads], base)
                elif code == RECV:
                    slots[writes] = act(None if reads is None else slots[reads], base)
                else:
                    slots[writes] = slots[reads]
                for slot in frees:
                    slots[slot] = None
        except Exception as e:
            self._failed(e, number, (i for i in instructions if i[-1] >= number), base)
            raise

    def _failed(self, error: Exception, number: int, left: Iterable[Instruction], base: int) -> None:
        """Handles an error of an instruction: releases processes that wait for the instructions left."""
        give_up((self._instructions[i[-1]][1] for i in left), base)
        error.add_note(f"jax-mpmd: while it ran {self.text(number)}")
        if self._alone is not None:  # in a job the watchdog does this, for uncaught errors
            error.add_note(self._alone.failed(error))

    def _chosen(self) -> list[Instruction]:
        """Returns the instructions: each in its own span during a profile, each with a check if NaNs are errors."""
        if not self._is_finished:
            if not compat.is_profiling() and not nans.are_errors():
                return self._first()
            self.finish()
        found = self._annotated if compat.is_profiling() else self._instructions
        if not nans.are_errors():
            return found
        return [
            (code, act and nans.checked(act, self.text(number), code == RUN), reads, writes, frees, number)
            for code, act, reads, writes, frees, number in found
        ]

    def _bound(self) -> list[Instruction]:
        return [b.walked(number) for number, b in enumerate(self.bindings.instructions)]

    def _take(self, bindings: Bindings, instructions: list[Instruction], flight: Flight) -> None:
        """Makes the next call run these instructions."""
        self.bindings, self._instructions, self.flight = bindings, instructions, flight
        for name in ("_recorder", "_annotated"):
            vars(self).pop(name, None)

    def _first(self) -> list[Instruction]:
        """Returns the instructions of a first step, which begins while later programs are compiled or loaded.

        Each waits for its own program. One that takes over an argument waits for all, so that no error loses arguments.
        """
        arguments = {slot for where in self.bindings.inputs for _, slot in where}

        def after_all(act: Callable, *arrays: jax.Array) -> object:
            self.finish()
            return act(*arrays)

        donates = [not arguments.isdisjoint(b.donates) for b in self.bindings.instructions]
        return [
            (code, functools.partial(after_all, act) if donates[number] else act, reads, writes, frees, number)
            for code, act, reads, writes, frees, number in self._instructions
        ]

    @functools.cached_property
    def _recorder(self) -> Recorder:
        return Recorder(self.bindings.instructions, self._programs.mesh.groups, jax.process_index())

    @functools.cached_property
    def _annotated(self) -> list[Instruction]:
        return [
            (b.code, b.act and _annotated(b.act, b.name, b.group, b.tasks), b.reads, b.writes, b.frees, number)
            for number, b in enumerate(self.bindings.instructions)
        ]

    def _fill(self, arguments: Sequence[Mapping[int, jax.Array]]) -> SlotValues:
        slots = self.bindings.template.copy()
        for arrays, where in zip(arguments, self.bindings.inputs, strict=True):
            for group, slot in where:
                slots[slot] = arrays[group]
        return slots

    def _collect(self, slots: SlotValues) -> list[dict[int, jax.Array]]:
        return [{group: slots[slot] for group, slot in where} for where in self.bindings.outputs]


def _annotated(fun: Callable, name: str, group: int, tasks: Sequence[Task]) -> Callable:
    """Wraps `fun` so that profiles show it as `name`, with the group and the tasks that it runs.

    The span of a task has a name that ends with the microbatch (`gpt_stage2_F microbatch 3`), and the group, the
    stage, the kind and the microbatch as arguments.
    """
    details: dict[str, object] = {"group": group}
    if tasks:
        for key in ("stage", "kind", "microbatch"):
            details[key] = ",".join(str(getattr(t, key)) for t in tasks)
        name = f"{name} microbatch {details['microbatch']}"

    def spanned(*args):
        with TraceAnnotation(name, **details):
            return fun(*args)

    return spanned
