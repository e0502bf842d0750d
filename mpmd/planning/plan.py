"""The plan of a step on a machine: memory, work and transfers of each group, whether it fits, and the time it takes."""

import dataclasses
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpmd.compile.step import StepPrograms
from mpmd.costs.collectives import Collective
from mpmd.costs.machine import Machine
from mpmd.costs.simulation import SimulatedStep, simulate_program
from mpmd.costs.work import Work
from mpmd.graphs import equations
from mpmd.partition.outline import Loop
from mpmd.planning.advice import Saving, savings
from mpmd.planning.copies import CopiesPlan, plan_copies
from mpmd.planning.costs import StepCosts, TaskCost
from mpmd.planning.picture import Picture, picture_of
from mpmd.planning.unpipelined import Unpipelined, unpipelined
from mpmd.report.explain import sent_by
from mpmd.report.memory import KINDS, measured, temporaries_of
from mpmd.report.roles import Roles
from mpmd.report.shares import Shares
from scheduler import Costs, Program, check
from scheduler.base.texts import counted, in_bytes, in_seconds, table


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """The plan of a group of the step."""

    group: int
    num_devices: int
    stages: tuple[int, ...]  # the stages that it runs
    memory: dict[str, int]  # bytes on each device, by kind, and the `peak` of all
    largest: tuple[tuple[str, int], ...]  # the largest arguments, with their bytes on each device
    sent: dict[int, tuple[int, int]]  # by other group: values and bytes that go there in a step, from all devices
    tasks: dict[str, TaskCost]  # of one task of each kind and stage
    pairs: dict[str, TaskCost]  # of two tasks that run as one (`"F3+B4"`)
    once: tuple[Collective, ...]  # the collectives outside of tasks, which run once a step
    busy_s: float  # seconds of a step in which it computes
    exposed_s: float  # seconds of a step in which it waits for a transfer
    savings: tuple[Saving, ...]  # estimates of changes that would need less memory


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """The plan of a pipelined loop of the step."""

    number: int
    schedule: str
    num_microbatches: int
    num_shapes: int  # the number of shapes of its microbatches
    cuts: tuple[int, ...] | None  # how many layers each stage gets; None where the user's marks end stages
    even_cuts: tuple[int, ...] | None  # the even cut, where the library chose `cuts`
    seconds: float  # from the start of its first task to the end of its last one


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step on a machine. `str()` prints it; `faults` lists the groups that do not fit."""

    title: str
    machine: Machine
    groups: tuple[GroupPlan, ...]
    loops: tuple[LoopPlan, ...]
    step: SimulatedStep
    num_programs: int
    total: Work  # over all devices
    tokens: int | None  # of a step, for the rate; None if not known
    unpipelined: Unpipelined  # a bound for the same step on the same devices
    picture: Picture | None  # of the longest loop; None if there is no loop
    costs_are_measured: bool  # whether the costs of tasks were measured; else they follow from the roofline
    copies: CopiesPlan | None = None  # of the state in the memory of other hosts; None if not asked for

    @property
    def num_devices(self) -> int:
        return sum(g.num_devices for g in self.groups)

    @property
    def utilization(self) -> float:
        """Model FLOP utilization (MFU): the part of the devices' peak that matrix products take, each counted once."""
        return self._of_peak(self.total.products - self.total.recomputed)

    @property
    def hardware_utilization(self) -> float:
        """The same as `utilization`, including the matrix products that `jax.checkpoint` repeats."""
        return self._of_peak(self.total.products)

    def _of_peak(self, flops: float) -> float:
        """Returns the part of the operations that the devices could do in the time of a step; 0 if it takes no time."""
        peak = self.step.seconds * self.num_devices * self.machine.target.flops
        return flops / peak if peak else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens of a step, divided by its seconds; None if either is not known."""
        return self.tokens / self.step.seconds if self.tokens and self.step.seconds else None

    @property
    def verdict(self) -> str:
        """Whether to pipeline at all, where that is known."""
        if self.costs_are_measured:  # the bound is by the roofline, which real tasks may not reach
            return f"without a pipeline, by the roofline: {self.unpipelined}"
        return self.unpipelined.verdict(self.step.seconds, self.machine.usable_nbytes)

    @property
    def faults(self) -> list[str]:
        """The groups that do not fit, with changes that would help."""
        return [_fault_text(g, self.machine) for g in self.groups if g.memory["peak"] > self.machine.usable_nbytes]

    def as_json(self) -> str:
        """Returns all figures, in bytes and seconds."""
        return json.dumps(
            {
                "title": self.title,
                "machine": dataclasses.asdict(self.machine),
                "groups": [dataclasses.asdict(g) for g in self.groups],
                "loops": [dataclasses.asdict(loop) for loop in self.loops],
                "step": {
                    "seconds": self.step.seconds,
                    "idle_fraction": self.step.idle_fraction,
                    "utilization": self.utilization,
                    "hardware_utilization": self.hardware_utilization,
                    "tokens_per_s": self.tokens_per_s,
                },
                "costs_are_measured": self.costs_are_measured,
                "copies": None if self.copies is None else dataclasses.asdict(self.copies),
                "num_programs": self.num_programs,
                "unpipelined": dataclasses.asdict(self.unpipelined),
                "verdict": self.verdict,
                "faults": self.faults,
            },
            indent=2,
        )

    def __str__(self) -> str:
        lines = [self.title, str(self.machine)]
        if self.costs_are_measured:
            lines.append("The times of tasks were measured; all others follow from the figures above.")
        lines += ["", *_memory_table(self), "", *_cost_table(self), "", *_collective_lines(self)]
        lines += [_loop_line(loop) for loop in self.loops]
        lines += [str(self.picture), ""] if self.picture else []
        per_s = self.tokens_per_s
        rate = f", {per_s:,.0f} tokens/s, {per_s / self.num_devices:,.0f} a device" if per_s else ""
        again = f"; {self.hardware_utilization:.1%} with recomputation" if self.total.recomputed else ""
        exposed = max(g.exposed_s for g in self.groups)
        lines.append(
            f"step: {in_seconds(self.step.seconds)}, of which devices idle {self.step.idle_fraction:.1%};"
            f" at most {in_seconds(exposed)} of a group wait for transfers;"
            f" {self.utilization:.1%} of peak (MFU{again}){rate}; {counted(self.num_programs, 'program')}"
        )
        lines += [self.copies.text(self.step.seconds)] if self.copies else []
        lines.append(self.verdict)
        lines.append("order: proved free of deadlock, also where devices do their transfers and collectives in order.")
        faults = self.faults
        lines += faults[:2] or ["It fits."]
        if len(faults) > 2:
            lines.append(f"Nor do {len(faults) - 2} other groups fit.")
        return "\n".join(lines)


def plan_step(
    programs: StepPrograms,
    program: Program,
    machine: Machine,
    tokens: int | None = None,
    costs: Costs | None = None,
    copies: int | None = None,
    shares: Shares | None = None,
    told: Callable[[tuple[str, float]], object] = lambda shown: None,
) -> Plan:
    """Returns the plan of a compiled step.

    Args:
      tokens: the tokens of a step. None takes the size of the largest integer argument that is data.
      costs: measured seconds of tasks, used instead of the roofline.
      copies: the number of copies of the state, as for `mpmd.resilient`.
      told: called with the next piece of work, and the approximate share of all work that is done.

    Raises:
      ValueError: `costs` have another number of stages.
      ScheduleError: devices that do everything in order, including transfers and collectives, would deadlock.
    """
    told(("mpmd: checking that the step cannot deadlock", 0.0))
    check(program, streams=list(dict.fromkeys(programs.mesh.groups_by_device.values())))
    roles = Roles(programs.outline)
    shares = shares or Shares()
    found = StepCosts(programs, machine, costs, shares)
    told(("mpmd: simulating the step", 0.35))
    step = simulate_program(program, found.duration, found.transfer)
    memory = measured(programs, program)
    temporaries = temporaries_of(programs)
    groups = []
    for group, mesh in enumerate(programs.mesh.groups):
        told((f"mpmd: memory and communication of group {group}", 0.7 + 0.3 * group / programs.mesh.num_groups))
        groups.append(
            GroupPlan(
                group,
                mesh.size,
                tuple(sorted({s for p in programs.loops for s in p.loop.stages_of(group)})),
                memory[group],
                found.largest_arguments(group, roles),
                {target: (len(sizes), sum(sizes)) for target, sizes in sent_by(program, group, shares).items()},
                found.tasks(group),
                found.pairs(group),
                found.once(program, group),
                step.busy[group],
                step.exposed[group],
                savings(programs, program, found.sizes, group, memory[group], temporaries),
            )
        )
    total = found.total(program)
    return Plan(
        f"{programs.name} on {programs.mesh}",
        machine,
        tuple(groups),
        tuple(_loop_plan(loop.loop, step, shares) for loop in programs.loops),
        step,
        programs.compiler.num_programs,
        total,
        tokens or tokens_of(roles),
        unpipelined(programs, roles, machine, total, shares),
        picture_of(programs, program, step, found),
        costs is not None,
        None if copies is None else plan_copies(programs.mesh, roles, machine, copies),
    )


def plan_lowered(lowered: Any, machine: Machine, tokens: int | None = None, **options: Any) -> Plan:
    """Returns the plan of a step that `mpmd.jit` has lowered. Each microbatch of a list counts by its shape.

    Arguments and errors are the same as for `plan_step`.
    """
    compiled = lowered.compile()
    tokens = tokens or sum(tokens_of(Roles(one._outline)) or 0 for one in lowered._of_microbatches())
    shares = lowered._shares_on(machine)
    return plan_step(compiled._programs, compiled.program, machine, tokens, shares=shares, **options)


def _loop_plan(loop: Loop, step: SimulatedStep, shares: Shares) -> LoopPlan:
    info = loop.partition.info
    even = None if info.choice is None else info.choice.even
    seconds = step.seconds_of(loop.number)
    shapes = len(set(shares.lists[loop.number].microbatches)) if loop.number in shares.lists else 1
    return LoopPlan(loop.number, str(info.schedule), info.num_microbatches, shapes, info.cuts, even, seconds)


def tokens_of(roles: Roles) -> int | None:
    """Returns the tokens of a step, or of a list's microbatch: the size of the largest argument of integer data."""
    # A list also passes the number of its microbatches, a scalar.
    data = [v.aval for v, role in roles.role.items() if role == "data" and v.aval.dtype.kind in "iu" and v.aval.shape]
    return max((equations.size(aval) for aval in data), default=0) or None


# --- as text --------------------------------------------------------------------------------------


def _loop_line(loop: LoopPlan) -> str:
    """Returns a line on a loop: all of its microbatches, its cut, its time."""
    shapes = f" of {loop.num_shapes} shapes (tasks and memory above: of the largest)" if loop.num_shapes > 1 else ""
    microbatches = f"{counted(loop.num_microbatches, 'microbatch')}{shapes}"
    text = f"loop {loop.number}: {loop.schedule}, {microbatches}, {in_seconds(loop.seconds)}"
    if loop.cuts is None:
        return f"{text}; stages end where the model marks them"
    if loop.even_cuts is None:
        return f"{text}; layers of each stage: {loop.cuts}, as given by cuts="
    chosen = "the even ones" if loop.cuts == loop.even_cuts else f"chosen, faster than {loop.even_cuts}"
    return f"{text}; layers of each stage: {loop.cuts}, {chosen}"


def _fault_text(g: GroupPlan, machine: Machine) -> str:
    """Returns the reason why a group does not fit, and changes that would help."""
    usable_nbytes = machine.usable_nbytes
    over = g.memory["peak"] - usable_nbytes
    kind = max(KINDS, key=lambda k: g.memory[k])
    named = ", ".join(f"{name} ({in_bytes(nbytes)})" for name, nbytes in g.largest)
    first = (
        f"It does not fit: group {g.group} needs {in_bytes(g.memory['peak'])} on each device ({g.memory['peak']:,} B),"
        f" {in_bytes(over)} more than the {in_bytes(usable_nbytes)} that are usable. Most of it: {kind}"
        f" ({in_bytes(g.memory[kind])}); largest arrays: {named}."
    )
    more = [f"  {machine.more_memory}."] if machine.more_memory else []
    return "\n".join([first, *more, *_savings(g.savings, over)])


def _savings(savings: tuple[Saving, ...], over: int) -> list[str]:
    rows = [[s.text, f"-{in_bytes(s.nbytes)}", "enough" if s.nbytes >= over else ""] for s in savings]
    return ["  Estimates of what would help, on each device:", *(f"  {line}" for line in _table(rows))] if rows else []


def _memory_table(plan: Plan) -> list[str]:
    rows = [["group", "stages", "devices", *KINDS, "peak", "of usable"]]
    for groups in _alike(plan.groups, lambda g: (g.num_devices, g.memory)):
        g = groups[0]
        part = f"{g.memory['peak'] / plan.machine.usable_nbytes:.0%}"
        sizes = [in_bytes(g.memory[k]) for k in (*KINDS, "peak")]
        rows.append([_ids(groups), _stages(groups), str(g.num_devices), *sizes, part])
    return ["memory of each device:", *_table(rows)]


def _alike(groups: Sequence[GroupPlan], of: Callable[[GroupPlan], object]) -> list[list[GroupPlan]]:
    """Joins successive groups with equal values."""
    return [list(some) for _, some in itertools.groupby(groups, of)]


def _ids(groups: Sequence[GroupPlan]) -> str:
    return str(groups[0].group) if len(groups) == 1 else f"{groups[0].group}–{groups[-1].group}"


def _stages(groups: Sequence[GroupPlan]) -> str:
    if len(groups) == 1:
        return ",".join(map(str, groups[0].stages))
    return ",".join(f"{a}–{b}" for a, b in zip(groups[0].stages, groups[-1].stages, strict=False))


def _cost_table(plan: Plan) -> list[str]:
    rows = [["group", "a task takes", "computes", "waits for transfers", "sends a step"]]
    for groups in _alike(plan.groups, _cost_texts):
        g = groups[0]
        tasks, busy, exposed, sent = _cost_texts(g)
        if len(groups) == 1:
            tasks = [f"{name} {in_seconds(c.seconds)}" for name, c in sorted(g.tasks.items())]
            sent = [f"{in_bytes(nbytes)} to {target}" for target, nbytes in _large(g)]
        rows.append([_ids(groups), ", ".join(tasks), busy, exposed, ", ".join(sent) or "nothing large"])
    return ["time and communication of each group:", *_table(rows)]


def _cost_texts(g: GroupPlan) -> tuple[list[str], str, str, list[str]]:
    """Returns the computation and the transfers of a group, in words that are equal for groups with equal work."""
    tasks = [f"{name.rstrip('0123456789')} {in_seconds(c.seconds)}" for name, c in sorted(g.tasks.items())]
    sent = [f"{in_bytes(nbytes)} to {_NEIGHBOURS.get(to - g.group, f'{to - g.group:+}')}" for to, nbytes in _large(g)]
    return tasks, in_seconds(g.busy_s), in_seconds(g.exposed_s), sent


_NEIGHBOURS = {1: "the next", -1: "the one before"}


def _large(g: GroupPlan) -> list[tuple[int, int]]:
    """Returns the groups that it sends much to, with the bytes."""
    return [(target, nbytes) for target, (_, nbytes) in g.sent.items() if nbytes >= 1000]


def _collective_lines(plan: Plan) -> list[str]:
    """Returns lines on the collectives of each kind of task or pair, with its stages, and on those once a step."""
    stages: dict[tuple[str, str], list[str]] = defaultdict(list)
    groups: dict[str, list[str]] = defaultdict(list)
    for g in plan.groups:
        for name, cost in sorted(g.tasks.items()) + sorted(g.pairs.items()):
            if cost.collectives:
                text = f"{_counted(cost.collectives)}, which add {in_seconds(cost.collective_s)}"
                prefix, _, tasks = name.rpartition(":")
                kinds, numbers = ("+".join(re.findall(pattern, tasks)) for pattern in ("[A-Z]", r"\d+"))
                stages[f"{prefix}:{kinds}" if prefix else kinds, text].append(numbers)
        if g.once:
            seconds = sum(map(plan.machine.collective_s, g.once))
            groups[f"{_counted(g.once)}, {in_seconds(seconds)}"].append(str(g.group))
    tasks = [f"  {kinds} of stage {', '.join(where)}: {text}" for (kinds, text), where in sorted(stages.items())]
    steps = [f"  group {', '.join(where)}: {text}" for text, where in groups.items()]
    lines = ["collectives of each task:", *tasks, ""] if tasks else []
    return [*lines, "collectives once a step:", *steps, ""] if steps else lines


def _counted(collectives: Iterable[Collective]) -> str:
    """Returns the number and bytes of collectives by kind, and the bytes that matrix products hide."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    for c in collectives:
        count[c.kind] += c.times
        nbytes[c.kind] += c.nbytes * c.times
        hidden[c.kind] += c.nbytes * c.times * c.is_hidden
    beside = {kind: f", {in_bytes(n)} beside products" * (n > 0) for kind, n in hidden.items()}
    return ", ".join(f"{n} {kind} ({in_bytes(nbytes[kind])}{beside[kind]})" for kind, n in count.items())


def _table(rows: list[list[str]]) -> list[str]:
    return [f"  {line}" for line in table(rows, "<" * len(rows[0]))]
