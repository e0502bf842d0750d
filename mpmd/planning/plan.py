"""A plan of a step on a machine: what each group holds, computes and sends, whether it fits, how long it takes."""

import dataclasses
import json
from collections import Counter, defaultdict
from typing import Any

from mpmd.compile.step import StepPrograms
from mpmd.partition import equations
from mpmd.planning.collectives import Collective, collectives_of
from mpmd.planning.machine import Machine
from mpmd.planning.simulation import SimulatedStep, simulate_program
from mpmd.report.explain import sent_by
from mpmd.report.memory import KINDS, Sizes, executables_of, measured
from mpmd.report.roles import Roles
from mpmd.report.units import in_bytes, in_seconds
from mpmd.report.work import Work, work_of
from scheduler import Call, Program, Run
from scheduler.texts import table

_ADVICE = {
    "activations": "Recompute them (jax.checkpoint), offload them, take smaller microbatches, or a schedule that holds"
    " fewer (1f1b, v-half, v-min).",
    "temporaries": "Take smaller microbatches, recompute, or divide the largest layer over the group's devices.",
    "data": "Divide the batch over the devices of the group.",
}


@dataclasses.dataclass(frozen=True)
class TaskCost:
    """One call of a program.

    Attributes:
      seconds: compute and collectives, one after the other.
      collective_s: the collectives' part of it.
    """

    work: Work
    collectives: tuple[Collective, ...]
    seconds: float
    collective_s: float


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """A group of the step.

    Attributes:
      stages: those it runs.
      memory: bytes on each device, by kind, and the `peak` of all.
      largest: the arguments that take most, with their bytes on each device.
      sent: by group, how many values and bytes go there in a step, from all devices.
      tasks: seconds of one task of each kind and stage.
      busy_s, exposed_s: seconds of a step in which it computes, and in which it waits for a transfer.
    """

    group: int
    num_devices: int
    stages: tuple[int, ...]
    memory: dict[str, int]
    largest: tuple[tuple[str, int], ...]
    sent: dict[int, tuple[int, int]]
    tasks: dict[str, TaskCost]
    busy_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step on a machine. `str()` prints it; `faults` says what does not fit.

    Attributes:
      products: operations of matrix products in a step, over all devices.
      tokens: of a step, for the rate; None if they are not known.
      unpipelined: the same step on the same devices without a pipeline, at best.
    """

    title: str
    machine: Machine
    groups: tuple[GroupPlan, ...]
    step: SimulatedStep
    num_programs: int
    products: float
    tokens: int | None
    unpipelined: "Unpipelined"

    @property
    def num_devices(self) -> int:
        return sum(g.num_devices for g in self.groups)

    @property
    def utilization(self) -> float:
        """Model FLOP utilization: products of the step by the peak of all devices."""
        return self.products / (self.step.seconds * self.num_devices * self.machine.target.flops)

    @property
    def faults(self) -> list[str]:
        """The groups that do not fit, with what would help."""
        return [_fault(g, self.machine) for g in self.groups if g.memory["peak"] > self.machine.usable_nbytes]

    def as_json(self) -> str:
        """All figures, in bytes and seconds."""
        return json.dumps(
            {
                "title": self.title,
                "machine": dataclasses.asdict(self.machine),
                "groups": [dataclasses.asdict(g) for g in self.groups],
                "step": {
                    "seconds": self.step.seconds,
                    "idle_fraction": self.step.idle_fraction,
                    "utilization": self.utilization,
                    "tokens_per_s": self.tokens / self.step.seconds if self.tokens else None,
                },
                "num_programs": self.num_programs,
                "unpipelined": dataclasses.asdict(self.unpipelined),
                "faults": self.faults,
            },
            indent=2,
        )

    def __str__(self) -> str:
        lines = [self.title, str(self.machine), ""]
        lines += _memory_table(self)
        lines.append("")
        lines += _cost_table(self)
        lines.append("")
        lines += _collective_lines(self)
        rate = f", {self.tokens / self.step.seconds:,.0f} tokens/s" if self.tokens else ""
        exposed = max(g.exposed_s for g in self.groups)
        lines.append(
            f"step: {in_seconds(self.step.seconds)}, of which devices idle {self.step.idle_fraction:.1%};"
            f" at most {in_seconds(exposed)} of a group wait for transfers;"
            f" {self.utilization:.1%} of peak (MFU){rate}; {self.num_programs} programs"
        )
        lines.append(f"without a pipeline: {self.unpipelined}")
        faults = self.faults
        lines += faults[:2] or ["It fits."]
        if len(faults) > 2:
            lines.append(f"Nor do {len(faults) - 2} other groups fit.")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Unpipelined:
    """The same step on all devices as one program, with parameters, state and gradients divided among them (FSDP).

    A bound from above on what it can reach: communication is hidden behind computation where there is enough of it.

    Attributes:
      compute_s, communication_s: of a step; the longer one is what it takes.
      peak: bytes on each device.
      rows: of the batch, which have to be divided among the devices.
    """

    num_devices: int
    compute_s: float
    communication_s: float
    peak: int
    rows: int

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.communication_s)

    def __str__(self) -> str:
        text = (
            f"at best {in_seconds(self.seconds)} as one program (FSDP: computes {in_seconds(self.compute_s)},"
            f" communicates {in_seconds(self.communication_s)}, {in_bytes(self.peak)} a device)"
        )
        if self.rows < self.num_devices:
            text += f"; but {self.rows} rows a step cannot be divided among {self.num_devices} devices"
        return text


def plan_step(programs: StepPrograms, program: Program, machine: Machine, tokens: int | None = None) -> Plan:
    """The plan of a compiled step.

    Args:
      tokens: of a step. None takes the largest argument of integers that is neither parameter nor state.
    """
    roles = Roles(programs.outline)
    costs = _Costs(programs, machine)
    step = simulate_program(program, costs.duration, costs.transfer)
    memory = measured(programs, program)
    groups = []
    for group, mesh in enumerate(programs.mesh.groups):
        groups.append(
            GroupPlan(
                group,
                mesh.size,
                tuple(s for s, g in enumerate(program.placement) if g == group),
                memory[group],
                costs.largest_arguments(group, roles),
                {target: (len(sizes), sum(sizes)) for target, sizes in sent_by(program, group).items()},
                costs.tasks(group),
                step.busy[group],
                step.exposed[group],
            )
        )
    total = costs.total(program)
    return Plan(
        f"{programs.name} on {programs.mesh}",
        machine,
        tuple(groups),
        step,
        programs.compiler.num_compiled,
        total.products,
        tokens or _tokens(roles),
        _unpipelined(programs, roles, machine, total),
    )


class _Costs:
    """Seconds of the instructions of a step."""

    def __init__(self, programs: StepPrograms, machine: Machine):
        self.programs, self.machine = programs, machine
        self.sizes = Sizes(programs.outline, programs.mesh, programs.layouts)
        self._of_program: dict[Any, TaskCost] = {}

    def cost(self, executable: Any) -> TaskCost:
        """Of a call of an executable, however many programs it runs."""
        found = [self._cost(d, executable.mesh) for d in executable.runs]
        return TaskCost(
            sum((c.work for c in found), Work()),
            tuple(one for c in found for one in c.collectives),
            sum(c.seconds for c in found),
            sum(c.collective_s for c in found),
        )

    def _cost(self, distinct: Any, mesh: Any) -> TaskCost:
        if distinct not in self._of_program:
            work = work_of(distinct.closed.jaxpr)
            text = distinct.compiled_on(mesh).as_text() if mesh.size > 1 else ""
            collectives = tuple(collectives_of(text, mesh.size))
            waiting = sum(map(self.machine.collective_s, collectives))
            seconds = self.machine.compute_s(work, mesh.size) + waiting
            self._of_program[distinct] = TaskCost(work, collectives, seconds, waiting)
        return self._of_program[distinct]

    def duration(self, group: int, instruction: Run | Call) -> float:
        return sum(self.cost(e).seconds for e in executables_of(self.programs, instruction))

    def transfer(self, source: int, target: int, name: str) -> float:
        nbytes, _ = self.sizes.nbytes_of(name, target)
        return self.machine.transfer_s(nbytes, 1, self._are_near(source, target))

    def _are_near(self, source: int, target: int) -> bool:
        size = max(self.machine.devices_per_host, self.machine.target.devices_per_link_domain)
        meshes = [self.programs.mesh.groups[g] for g in (source, target)]
        return len({d.id // size for mesh in meshes for d in mesh.devices.flat}) == 1

    def largest_arguments(self, group: int, roles: Roles) -> tuple[tuple[str, int], ...]:
        found = [
            (roles.names[v], self.sizes.nbytes_of(roles.names[v], group)[0])
            for v, groups in zip(roles.args, roles.groups, strict=True)
            if group in groups
        ]
        return tuple(sorted(found, key=lambda entry: -entry[1])[:3])

    def tasks(self, group: int) -> dict[str, TaskCost]:
        found = {}
        for loop in self.programs.loops:
            for place, task in loop.tasks.items():
                if task.executable is not None and loop.loop.group(place) == group:
                    found[f"{place.kind}{place.stage}"] = self.cost(task.executable)
        return found

    def total(self, program: Program) -> Work:
        """The work of a whole step, over all devices."""
        calls = Counter()
        for instructions in program.groups:
            for i in instructions:
                if isinstance(i, (Run, Call)):
                    calls.update(executables_of(self.programs, i))
        return sum((self.cost(e).work.times(n) for e, n in calls.items()), Work())


def _tokens(roles: Roles) -> int | None:
    data = [v.aval for v, role in roles.role.items() if role == "data" and v.aval.dtype.kind in "iu"]
    return max((equations.size(aval) for aval in data), default=0) or None


def _unpipelined(programs: StepPrograms, roles: Roles, machine: Machine, total: Work) -> Unpipelined:
    count = sum(mesh.size for mesh in programs.mesh.groups)
    held = {role: sum(equations.nbytes(v.aval) for v, r in roles.role.items() if r == role) for role in KINDS[:3]}
    kept, rows, largest = 0, 1, 0
    for loop in programs.loops:
        forward = {v for t in loop.loop.partition.tasks if t.place.kind == "F" for v in t.writes}
        read = {v for t in loop.loop.partition.tasks if t.place.kind != "F" for v in t.reads}
        kept += sum(equations.nbytes(v.aval) for v in forward & read) * loop.loop.partition.info.num_microbatches
        for t in loop.loop.partition.tasks:
            mine = [v for v in roles.arguments(t.operands) if roles.role[v] == "parameters"]
            largest = max(largest, sum(equations.nbytes(v.aval) for v in mine))
    data = [v.aval.shape for v, role in roles.role.items() if role == "data" and len(v.aval.shape) >= 2]
    rows = max((shape[0] * shape[1] for shape in data), default=1)
    sent = 3 * held["parameters"] * (count - 1) / count  # gathered forward and backward, gradients reduced once
    share = (sum(held.values()) + held["parameters"] + kept) // count
    is_near = count <= max(machine.devices_per_host, machine.target.devices_per_link_domain)
    return Unpipelined(count, machine.compute_s(total, count), sent / machine.bandwidth(is_near), share + largest, rows)


# --- text -----------------------------------------------------------------------------------------


def _fault(g: GroupPlan, machine: Machine) -> str:
    over = g.memory["peak"] - machine.usable_nbytes
    kind = max(KINDS, key=lambda k: g.memory[k])
    named = ", ".join(f"{name} ({in_bytes(nbytes)})" for name, nbytes in g.largest)
    advice = _ADVICE.get(kind, "Use more stages, or divide parameters and optimizer state over the group's devices.")
    return (
        f"It does not fit: group {g.group} needs {in_bytes(g.memory['peak'])} on each device, {in_bytes(over)} more"
        f" than the {in_bytes(machine.usable_nbytes)} that are usable. Most of it: {kind} ({in_bytes(g.memory[kind])});"
        f" largest arrays: {named}.\n  {advice}"
    )


def _memory_table(plan: Plan) -> list[str]:
    rows = [["group", "stages", "devices", *KINDS, "peak", "of usable"]]
    for g in plan.groups:
        stages = ",".join(map(str, g.stages))
        part = f"{g.memory['peak'] / plan.machine.usable_nbytes:.0%}"
        rows.append(
            [str(g.group), stages, str(g.num_devices), *(in_bytes(g.memory[k]) for k in (*KINDS, "peak")), part]
        )
    return ["memory of each device:", *_table(rows)]


def _cost_table(plan: Plan) -> list[str]:
    rows = [["group", "a task takes", "computes", "waits for transfers", "sends a step"]]
    for g in plan.groups:
        tasks = ", ".join(f"{name} {in_seconds(c.seconds)}" for name, c in sorted(g.tasks.items()))
        sent = ", ".join(f"{in_bytes(nbytes)} to {target}" for target, (_, nbytes) in g.sent.items() if nbytes >= 1000)
        rows.append([str(g.group), tasks, in_seconds(g.busy_s), in_seconds(g.exposed_s), sent or "nothing large"])
    return ["time and communication of each group:", *_table(rows)]


def _collective_lines(plan: Plan) -> list[str]:
    """Each kind of task once, with the stages that have the same collectives."""
    stages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for g in plan.groups:
        for name, cost in sorted(g.tasks.items()):
            if cost.collectives:
                count: Counter[str] = Counter()
                nbytes: Counter[str] = Counter()
                for c in cost.collectives:
                    count[c.kind] += c.times
                    nbytes[c.kind] += c.nbytes * c.times
                shown = ", ".join(f"{n} {kind} ({in_bytes(nbytes[kind])})" for kind, n in count.items())
                stages[name[0], f"{shown}, {in_seconds(cost.collective_s)}"].append(name[1:])
    lines = [f"  {kind} of stage {', '.join(where)}: {text}" for (kind, text), where in sorted(stages.items())]
    return ["collectives of each task:", *lines, ""] if lines else []


def _table(rows: list[list[str]]) -> list[str]:
    return [f"  {line}" for line in table(rows, "<" * len(rows[0]))]
