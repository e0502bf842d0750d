"""Predicts a step before compilation: its simulated time, its memory, and the effect of recomputation."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Set
from typing import Any

from mpmd.arrays.mesh import MpmdMesh
from mpmd.costs.machine import Machine
from mpmd.costs.simulation import simulate_program
from mpmd.costs.work import works_of_program
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.partition.outline import Loop, Outline, Segment
from mpmd.planning.advice import recomputed_peak
from mpmd.planning.costs import StepCosts
from mpmd.report.estimate import Draft
from mpmd.report.roles import Roles
from mpmd.report.shares import Shares
from mpmd.report.task_costs import task_seconds, task_works
from scheduler import Call, Costs, Run, Value


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a step."""

    seconds: float  # seconds of a step
    idle: float  # the part of the devices' time in which they do not compute
    busy: tuple[float, ...]  # the seconds in which each group computes
    memory: tuple[int, ...]  # the most bytes that each device of a group needs, for each group
    recomputed: tuple[int, ...] = ()  # the stages that have to recompute their forward in the backward pass for this


class Predictor:
    """A lowered step (an `mpmd.stages.Lowered`) that can be predicted under several assumptions."""

    def __init__(self, lowered: Any, machine: Machine):
        self.outline: Outline = lowered._outline
        self.mesh: MpmdMesh = lowered._mesh
        self.machine = machine
        self.draft: Draft = lowered._draft
        self._estimate = {g: m["peak"] for g, m in self.draft.memory().items()}
        self.memory: dict[int, float] = dict(self._estimate)
        """The bytes that each device of a group needs: estimated, or from XLA once the step is compiled."""
        self._of_microbatches = lowered._of_microbatches()
        self.shares: Shares = lowered._shares_on(machine)
        """The shares of the microbatches of lists."""
        self.compiled: StepCosts | None = None
        """Seconds of the compiled programs, with the collectives that XLA put into them; None before compilation."""
        self._seconds: dict[str | tuple[int, Place], float] = {}
        for item in self.outline.items:
            if isinstance(item, Segment):
                works = works_of_program(item.eqns, [*item.reads, *item.writes])
                self._seconds[item.name] = machine.compute_s(works, self.mesh.groups[item.group].size)
            elif isinstance(item, Loop):
                found = task_seconds(item, task_works(item), self.mesh, machine)
                self._seconds |= {(item.number, place): seconds for place, seconds in found.items()}

    @functools.cached_property
    def num_elements(self) -> int:
        """The size of a step's data, to compare configurations that take different amounts."""
        found = (Roles(one._outline).role.items() for one in self._of_microbatches)
        return sum(max((equations.size(v.aval) for v, role in roles if role == "data"), default=1) for roles in found)

    def correct_memory(self, ratio: float) -> None:
        """Multiplies the estimate of the memory by a ratio that was found for a compiled step."""
        self.memory = {group: nbytes * ratio for group, nbytes in self._estimate.items()}

    def task_s(self, loop: int, stage: int, kind: str) -> float:
        """Returns the seconds of a task by the roofline."""
        return self._seconds.get((loop, Place(stage, kind)), 0.0)

    def corrections(self) -> Iterator[tuple[str, float, float]]:
        """Yields the kind of each compiled program ("": once a step), its seconds, and its seconds by the roofline."""
        assert self.compiled is not None
        programs = self.compiled.programs
        for name, executable in programs.segments.items():
            yield "", self.compiled.cost(executable).seconds, self._seconds.get(name, 0.0)
        for loop in programs.loops:
            for place, executable in loop.executables.items():
                by_roofline = self.task_s(loop.loop.number, place.stage, place.kind)
                yield place.kind, self.compiled.cost(executable).seconds, by_roofline

    def predict(
        self,
        scale: Mapping[str, float] | None = None,
        measured: Mapping[int, Costs] | None = None,
        recomputed: Set[int] = frozenset(),
    ) -> Prediction:
        """Simulates the step.

        Args:
          scale: by kind of task, the ratio of measured seconds to seconds by the roofline.
          measured: by the number of a loop, the seconds of its tasks; for a list, of the largest microbatch's.
          recomputed: the stages that recompute their forward in the backward.
        """
        known = measured or {}

        def duration(group: int, instruction: Run | Call) -> float:
            if self.compiled is not None and (isinstance(instruction, Call) or instruction.loop not in known):
                again = 0.0
                if isinstance(instruction, Run):
                    stages = [t.stage for t in instruction.tasks if t.kind in "BI" and t.stage in recomputed]
                    again = sum(task(instruction.loop, stage, "F") for stage in stages)
                return self.compiled.duration(group, instruction) + again
            if isinstance(instruction, Call):
                return self._seconds.get(instruction.name, 0.0) * (scale or {}).get("", 1.0)
            loop = instruction.loop
            return sum(task(loop, t.stage, t.kind) * self.shares.seconds(loop, [t]) for t in instruction.tasks)

        @functools.cache
        def task(loop: int, stage: int, kind: str) -> float:
            again = task(loop, stage, "F") if kind in "BI" and stage in recomputed else 0.0
            if loop in known:
                return known[loop].duration(kind, stage) + again  # type: ignore[arg-type]
            return self.task_s(loop, stage, kind) * (scale or {}).get(kind, 1.0) + again

        step = simulate_program(self.draft.program, duration, self._transfer)
        memory = [round(self._need(group, recomputed)) for group in range(self.mesh.num_groups)]
        shared = {groups for groups in self.mesh.groups_by_device.values() if len(groups) > 1}  # they take turns
        seconds = max([step.seconds, *(sum(step.busy[group] for group in groups) for groups in shared)])
        idle = 1 - sum(step.busy) / (len(step.busy) * seconds) if seconds else 0.0
        return Prediction(seconds, idle, step.busy, tuple(memory), tuple(sorted(recomputed)))

    def _transfer(self, source: int, target: int, value: Value) -> float:
        groups = self.mesh.groups
        nbytes = self.draft.sizes.nbytes(value.name, target)[0] * self.shares.sent(value, target)
        return self.machine.between_s(nbytes, groups[source], groups[target])

    def _need(self, group: int, recomputed: Set[int]) -> float:
        """Returns the bytes that each device of a group needs if these stages recompute their forward."""
        if not recomputed:
            return self.memory[group]
        program, sizes, temporaries = self.draft
        peak = recomputed_peak(self.outline.loops, program, sizes, group, temporaries, recomputed)
        return self.memory[group] - (self._estimate[group] - peak)

    def recomputation(self, limit: float) -> frozenset[int] | None:
        """Returns the stages that have to recompute so that every group fits; None if that is not enough."""
        chosen: set[int] = set()
        for group, need in self.memory.items():
            if need <= limit:
                continue
            own = {stage for loop in self.outline.loops for stage in loop.stages_of(group)}
            most_first = sorted(own, key=lambda stage: self._need(group, {stage}))
            prefixes = (most_first[:count] for count in range(1, len(own) + 1))
            found = next((stages for stages in prefixes if self._need(group, set(stages)) <= limit), None)
            if found is None:
                return None
            chosen.update(found)
        return frozenset(chosen)
