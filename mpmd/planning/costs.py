"""Seconds of the instructions of a step: by a machine's roofline, or measured."""

import dataclasses
from collections.abc import Sequence
from typing import cast

from jax.sharding import Mesh

from mpmd.compile.executable import DistinctProgram, Executable
from mpmd.compile.step import StepPrograms
from mpmd.costs.collectives import Collective, collectives_of
from mpmd.costs.machine import Machine
from mpmd.costs.traffic import traffic_of
from mpmd.costs.work import Work, works_of_program
from mpmd.report.memory import Sizes
from mpmd.report.roles import Roles
from mpmd.report.shares import Shares
from scheduler import Call, Costs, Program, Run, Value
from scheduler.task import Kind, Task


@dataclasses.dataclass(frozen=True)
class TaskCost:
    """The cost of one call of a program."""

    work: Work
    collectives: tuple[Collective, ...]
    seconds: float  # the sum of compute and collectives, except collectives that matrix products hide
    collective_s: float  # the part of the collectives


class StepCosts:
    """Seconds of the instructions of a step. `measured` seconds of tasks are used instead of the roofline. A ValueError
    says that they have another number of stages or microbatches.
    """

    def __init__(
        self,
        programs: StepPrograms,
        machine: Machine,
        measured: Costs | None = None,
        shares: Shares | None = None,
    ):
        self.programs, self.machine, self.measured, self.shares = programs, machine, measured, shares or Shares()
        self.sizes = Sizes(programs.outline, programs.mesh, programs.layouts)
        self._of_program: dict[tuple[DistinctProgram, tuple[int, ...]], TaskCost] = {}
        self._of_executable: dict[Executable, TaskCost] = {}
        if measured is not None:
            for loop in programs.loops:
                for one in set(measured.of_microbatches(loop.loop.partition.info.num_microbatches)):
                    one.seconds(loop.loop.schedule.num_stages)

    def cost(self, executable: Executable) -> TaskCost:
        """Returns the cost of a call of an executable, over all programs that it runs."""
        if executable not in self._of_executable:
            found = [self._cost(d, executable.mesh) for d in executable.runs]
            self._of_executable[executable] = TaskCost(
                sum((c.work for c in found), Work()),
                tuple(one for c in found for one in c.collectives),
                sum(c.seconds for c in found),
                sum(c.collective_s for c in found),
            )
        return self._of_executable[executable]

    def _cost(self, distinct: DistinctProgram, mesh: Mesh) -> TaskCost:
        hosts = [d.id // self.machine.num_near for d in mesh.devices.flat]
        key = distinct, tuple(host - hosts[0] for host in hosts)  # equal programs may run on other hosts
        if key not in self._of_program:
            jaxpr = distinct.jaxpr
            works = works_of_program(jaxpr.eqns, [*jaxpr.invars, *jaxpr.outvars])
            text = distinct.on(mesh).as_text() or ""
            collectives = tuple(collectives_of(text, mesh.size, hosts)) if mesh.size > 1 else ()
            compute_s = self._compute_s(works, text, mesh.size)
            waiting_s = self.machine.waiting_s(collectives, compute_s)
            self._of_program[key] = TaskCost(sum(works, Work()), collectives, compute_s + waiting_s, waiting_s)
        return self._of_program[key]

    def _compute_s(self, works: Sequence[Work], text: str, num_devices: int) -> float:
        """Returns a program's seconds without collectives. XLA's text, if any, shows the work between products."""
        if not text:
            return self.machine.compute_s(works, num_devices)
        products = [dataclasses.replace(work, nbytes=work.nbytes - work.between) for work in works]
        return self.machine.compute_s(products, num_devices) + self.machine.memory_s(traffic_of(text))

    def duration(self, group: int, instruction: Run | Call) -> float:
        """Returns the seconds of an instruction of a group."""
        if self.measured is not None and isinstance(instruction, Run):
            return _seconds_of(self.measured, instruction.tasks)
        share = self.shares.seconds(instruction.loop, instruction.tasks) if isinstance(instruction, Run) else 1.0
        return share * sum(self.cost(e).seconds for e in self.programs.executables_of(instruction))

    def transfer(self, source: int, target: int, value: Value) -> float:
        """Returns the seconds of a transfer; for a value without a microbatch, of the largest microbatch's value."""
        groups = self.programs.mesh.groups
        nbytes = self.sizes.nbytes(value.name, target)[0] * self.shares.sent(value, target)
        return self.machine.between_s(nbytes, groups[source], groups[target])

    def largest_arguments(self, group: int, roles: Roles) -> tuple[tuple[str, int], ...]:
        """Returns the three largest arguments in a group, with their bytes on each device."""
        found = [
            (roles.names[v], self.sizes.nbytes(roles.names[v], group)[0])
            for v, groups in zip(roles.args, roles.groups, strict=True)
            if group in groups
        ]
        return tuple(sorted(found, key=lambda entry: -entry[1])[:3])

    def tasks(self, group: int) -> dict[str, TaskCost]:
        """Returns the cost of one task of each stage and kind in a group."""
        found = {}
        for loop in self.programs.loops:
            for place, task in loop.tasks.items():
                if task.executable is not None and loop.loop.group(place) == group:
                    cost = self.cost(task.executable)
                    if self.measured is not None:
                        seconds = self.measured.duration(cast(Kind, place.kind), place.stage)
                        cost = dataclasses.replace(cost, seconds=seconds)
                    found[f"{self.programs.prefix_of(loop)}{place}"] = cost
        return found

    def pairs(self, group: int) -> dict[str, TaskCost]:
        """Returns the costs of pairs of tasks that a group runs as one program."""
        return {
            f"{self.programs.prefix_of(loop)}{first}+{second}": self.cost(executable)
            for loop in self.programs.loops
            for (first, second), executable in loop.fused.items()
            if loop.loop.group(first) == group
        }

    def once(self, program: Program, group: int) -> tuple[Collective, ...]:
        """Returns the collectives of a group outside of tasks, which run once a step."""
        calls = [i for i in program.groups[group] if isinstance(i, Call)]
        return tuple(c for i in calls for e in self.programs.executables_of(i) for c in self.cost(e).collectives)

    def total(self, program: Program) -> Work:
        """Returns the work of a whole step, over all devices."""
        times = self.shares.calls(self.programs, program)
        return sum((called.of(self.cost(e).work).times(n) for (e, called), n in times.items()), Work())


def _seconds_of(costs: Costs, tasks: Sequence[Task]) -> float:
    """Returns the seconds of tasks, by their microbatches."""
    of = costs.microbatches
    return sum((cast(Costs, of[t.microbatch]) if of else costs).duration(t.kind, t.stage) for t in tasks)
