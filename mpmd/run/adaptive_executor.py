"""Runs a step in which groups may run another ready task than the planned next one (`scheduler.Adaptive`).

`scheduler/programs/ahead.py` says which tasks may run out of turn, and why that is right; here an event is an
instruction of this process. Since a device runs its queue in order, a group is given its next task only when the
task's inputs from other groups have arrived. So the host keeps pace with the step, and sleeps while devices work.
"""

import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax

from mpmd.compile.program import loop_graph
from mpmd.compile.step import LoopProgram
from mpmd.job import wires
from mpmd.run.bound_instruction import ALIAS, MOVE, RECV, RUN, SEND, BoundInstruction, Instruction
from mpmd.run.executor import Executor
from mpmd.run.run_ahead import after
from mpmd.run.slots import SlotValues
from scheduler import Adaptive
from scheduler.programs.ahead import EventPlan, PlannedEvent, PlanProgress
from scheduler.programs.jitter import kinds_ahead

_PAUSE_S = 1e-4
# Where tasks are shorter in so many steps, the host takes longer to choose than it can gain.
_SHORT_S, _NUM_SHORT = 1e-3, 5


def is_adaptive(loop: LoopProgram) -> bool:
    """Returns whether the tasks of a loop may run out of turn."""
    return isinstance(loop.loop.schedule, Adaptive)


class AdaptiveExecutor(Executor):
    """Runs this process's part of a checked program, and departs from its order where that is allowed and worth it."""

    _is_free = False  # whether the current step may depart from the plan
    _begun_last = 0
    _num_short = 0

    @property
    def position(self) -> int:
        """The number of the instruction that was begun last."""
        return self._begun_last if self._is_free else super().position

    @property
    def notes(self) -> list[str]:
        """Lines of `explain()` about the way it runs."""
        if self._planned_because:
            return [f"adaptive: each group keeps its planned order, because {self._planned_because}"]
        kinds = ", ".join(self._kinds)
        return [f"adaptive: a group whose next task is not ready may run a later one of its plan (kinds {kinds})"]

    @functools.cached_property
    def _planned_because(self) -> str:
        """The reason to keep the planned order; empty if there is none."""
        mesh = self._programs.mesh
        if mesh.groups_share_devices:
            return "groups share devices, which are busy anyway"
        if self.job is not None and wires.wire_class(self.job).is_ordered:
            return "both ends of a transfer between processes must come to it in one order"
        if self.job is not None and any(m.size > 1 for m in mesh.groups):
            return "in a job its groups have several devices"
        if any(hasattr(b.act, "give_up") for b in self.bindings.instructions):
            return "a loop that goes only forward is held back by its receivers, in order"
        if not self._kinds:
            return "running ahead does not make such a pipeline faster within the memory of its plan"
        return ""

    @property
    def _is_in_order(self) -> bool:
        return bool(self._planned_because)

    def _look_at(self, seconds: float) -> None:
        """After steps of short tasks keeps their order from now on, unless the user chose the kinds that run ahead."""
        tasks = max(sum(self._events.events[k].may_move for k in own) for own in self._events.lists)
        self._num_short = self._num_short + 1 if seconds < _SHORT_S * tasks else 0
        schedules = [p.loop.schedule for p in self._loops]
        if self._num_short == _NUM_SHORT and all(isinstance(s, Adaptive) and s.ahead is None for s in schedules):
            self._planned_because = f"its tasks take less than {_SHORT_S * 1e3:.0f} ms"

    @property
    def _loops(self) -> list[LoopProgram]:
        """The loops with tasks that may run out of turn."""
        return [p for p in self._programs.loops if is_adaptive(p)]

    @functools.cached_property
    def _kinds(self) -> str:
        """The kinds of tasks that may run ahead."""
        loops = [(p.loop.schedule, p.loop.partition.info.num_microbatches) for p in self._loops]
        found = [kinds_ahead(schedule, num) for schedule, num in loops if isinstance(schedule, Adaptive)]
        return "".join(sorted(set("".join(found))))

    @functools.cached_property
    def _events(self) -> EventPlan:
        """This process's instructions as events."""
        loops = {n for n, p in enumerate(self._programs.loops) if is_adaptive(p)}
        values = {e.name for n in loops for e in loop_graph(self._programs.loops[n].loop).edges}
        sizes = self.bindings.slots.sizes(self.program.nbytes)
        held = [0] * self.program.num_groups
        for group, slot in (place for where in self.bindings.inputs for place in where):
            held[group] += sizes.get(slot, (group, 0))[1]
        events = [_event(b, loops, values) for b in self.bindings.instructions]
        return EventPlan(events, self.program.num_groups, sizes, held)

    @functools.cached_property
    def _brought(self) -> list[tuple[int, ...]]:
        """Per instruction, the slots among its inputs that other groups fill."""
        bound, feeds = self.bindings.instructions, self._events.feeds
        return [tuple(bound[k].writes for k in found) for found in feeds]

    def _walk(self, slots: SlotValues, instructions: Sequence[Instruction], base: int) -> None:
        """Runs the instructions, each as soon as that is allowed and worth it."""
        self._is_free = not self._is_in_order
        if not self._is_free:
            self._note_order(range(len(self.bindings.instructions)))
            super()._walk(slots, instructions, base)
            return
        progress, order, start = PlanProgress(self._events, self._kinds), list[int](), time.perf_counter()
        try:
            self._go_along(progress, order, slots, instructions, base)
        except Exception as e:
            self._failed(e, self._begun_last, (i for i in instructions if not progress.is_done[i[-1]]), base)
            raise
        self._note_order(order)
        self._look_at(time.perf_counter() - start)

    def _note_order(self, order: Sequence[int]) -> None:
        for recorder in (vars(self).get("_recorder"), self._accounts and self._accounts.recorder):
            if recorder is not None:
                recorder.order = order

    def _go_along(
        self,
        progress: PlanProgress,
        order: list[int],
        slots: SlotValues,
        instructions: Sequence[Instruction],
        base: int,
    ) -> None:
        in_flight: dict[int, deque[Any]] = {g: deque() for g in self._programs.mesh.local_groups}
        late: list[Any] = []  # arrays that tasks wait for
        begun, brought, events = self.flight.times, self._brought, self._events.events

        def has_arrived(number: int) -> bool:
            missing = next((slots[s] for s in brought[number] if not slots[s].is_ready()), None)
            if missing is not None:
                late.append(missing)
            return missing is None

        while progress.num_left:
            late.clear()
            is_idle = True
            for group, running in in_flight.items():
                while running and running[0].is_ready():
                    running.popleft()
                while (number := progress.next(group, has_arrived, len(running))) is not None:
                    is_idle = False
                    self._begun_last = number
                    begun[number] = time.perf_counter()
                    order.append(number)
                    results = _do(instructions[number], slots, base)
                    progress.do(number)
                    if results and events[number].may_move:
                        running.append(after(results[-1].addressable_shards[0].data))
            if is_idle:
                waiting = [*late, *(running[0] for running in in_flight.values() if running)]
                assert waiting, "some instruction may always be done (scheduler/programs/ahead.py)"
                while not any(x.is_ready() for x in waiting):
                    time.sleep(_PAUSE_S)


def _do(instruction: Instruction, slots: SlotValues, base: int) -> Sequence[jax.Array]:
    """Runs an instruction, and returns the results of a program. (`Executor._walk` has this inline, to save a call.)"""
    code, act, reads, writes, frees, _ = instruction
    results: Sequence[jax.Array] = ()
    if code == RUN:
        results = act(*[slots[i] for i in reads])
        for slot, value in zip(writes, results, strict=False):
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
    return results


def _event(b: BoundInstruction, loops: set[int], values: set[str]) -> PlannedEvent:
    """Returns an instruction as an event. Tasks of `loops` may run out of turn; `values` go between these tasks."""
    if b.code == RUN:
        if b.tasks and b.loop in loops:
            kind, key = "".join(t.kind for t in b.tasks), (b.group, b.loop, *((t.stage, t.kind) for t in b.tasks))
            return PlannedEvent((b.group,), tuple(b.reads), tuple(b.writes), b.frees, kind, key)
        return PlannedEvent((b.group,), tuple(b.reads), tuple(b.writes), b.frees, "call", None, False)
    assert b.crossing is not None
    ends = [b.crossing.source] if b.code == SEND or b.reads is not None else []
    ends += [b.crossing.target] if b.code in (MOVE, ALIAS, RECV) else []
    reads, writes = (() if slot is None else (slot,) for slot in (b.reads, b.writes))
    in_loop = b.crossing.value.microbatch is not None and b.crossing.value.name in values
    return PlannedEvent(tuple(ends), reads, writes, b.frees, may_move=in_loop)
