"""A plan as text: tables of memory, time and communication, the picture of the schedule, and what does not fit."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpmd.costs.collectives import Collective
from mpmd.planning.advice import Saving
from mpmd.report.memory import KINDS
from scheduler.base.texts import in_bytes, in_seconds, table

if TYPE_CHECKING:
    from mpmd.planning.plan import GroupPlan, LoopPlan, Plan


def plan_text(plan: "Plan") -> str:
    """All of a plan, for people."""
    lines = [plan.title, str(plan.machine)]
    if plan.costs_are_measured:
        lines.append("The times of tasks were measured; all others follow from the figures above.")
    lines += ["", *_memory_table(plan), "", *_cost_table(plan), "", *_collective_lines(plan)]
    lines += [_loop_line(loop) for loop in plan.loops]
    lines += [str(plan.picture), ""] if plan.picture else []
    rate = f", {plan.tokens / plan.step.seconds:,.0f} tokens/s" if plan.tokens else ""
    again = f"; {plan.hardware_utilization:.1%} with recomputation" if plan.total.recomputed else ""
    exposed = max(g.exposed_s for g in plan.groups)
    lines.append(
        f"step: {in_seconds(plan.step.seconds)}, of which devices idle {plan.step.idle_fraction:.1%};"
        f" at most {in_seconds(exposed)} of a group wait for transfers;"
        f" {plan.utilization:.1%} of peak (MFU{again}){rate}; {plan.num_programs} programs"
    )
    lines.append(plan.verdict)
    lines.append("order: proved free of deadlock, also where devices do their transfers and collectives in order.")
    faults = plan.faults
    lines += faults[:2] or ["It fits."]
    if len(faults) > 2:
        lines.append(f"Nor do {len(faults) - 2} other groups fit.")
    return "\n".join(lines)


def _loop_line(loop: "LoopPlan") -> str:
    """A loop as it is: all of its microbatches, its cut, its time."""
    text = f"loop {loop.number}: {loop.schedule}, {loop.num_microbatches} microbatches, {in_seconds(loop.seconds)}"
    if loop.cuts is None:
        return f"{text}; stages end where the model marks them"
    if loop.even_cuts is None:
        return f"{text}; layers of each stage: {loop.cuts}, as given by cuts="
    chosen = "the even ones" if loop.cuts == loop.even_cuts else f"chosen, faster than {loop.even_cuts}"
    return f"{text}; layers of each stage: {loop.cuts}, {chosen}"


def fault_text(g: "GroupPlan", usable_nbytes: int) -> str:
    """What does not fit in a group, and what would help."""
    over = g.memory["peak"] - usable_nbytes
    kind = max(KINDS, key=lambda k: g.memory[k])
    named = ", ".join(f"{name} ({in_bytes(nbytes)})" for name, nbytes in g.largest)
    first = (
        f"It does not fit: group {g.group} needs {in_bytes(g.memory['peak'])} on each device ({g.memory['peak']:,} B),"
        f" {in_bytes(over)} more than the {in_bytes(usable_nbytes)} that are usable. Most of it: {kind}"
        f" ({in_bytes(g.memory[kind])}); largest arrays: {named}."
    )
    return "\n".join([first, *_savings(g.savings, over)])


def _savings(savings: tuple[Saving, ...], over: int) -> list[str]:
    rows = [[s.text, f"-{in_bytes(s.nbytes)}", "enough" if s.nbytes >= over else ""] for s in savings]
    return ["  Estimates of what would help, on each device:", *(f"  {line}" for line in _table(rows))] if rows else []


def _memory_table(plan: "Plan") -> list[str]:
    rows = [["group", "stages", "devices", *KINDS, "peak", "of usable"]]
    for g in plan.groups:
        stages = ",".join(map(str, g.stages))
        part = f"{g.memory['peak'] / plan.machine.usable_nbytes:.0%}"
        rows.append(
            [str(g.group), stages, str(g.num_devices), *(in_bytes(g.memory[k]) for k in (*KINDS, "peak")), part]
        )
    return ["memory of each device:", *_table(rows)]


def _cost_table(plan: "Plan") -> list[str]:
    rows = [["group", "a task takes", "computes", "waits for transfers", "sends a step"]]
    for g in plan.groups:
        tasks = ", ".join(f"{name} {in_seconds(c.seconds)}" for name, c in sorted(g.tasks.items()))
        sent = ", ".join(f"{in_bytes(nbytes)} to {target}" for target, (_, nbytes) in g.sent.items() if nbytes >= 1000)
        rows.append([str(g.group), tasks, in_seconds(g.busy_s), in_seconds(g.exposed_s), sent or "nothing large"])
    return ["time and communication of each group:", *_table(rows)]


def _collective_lines(plan: "Plan") -> list[str]:
    """Each kind of task once, with the stages that have the same collectives; then what a step does once."""
    stages: dict[tuple[str, str], list[str]] = defaultdict(list)
    groups: dict[str, list[str]] = defaultdict(list)
    for g in plan.groups:
        for name, cost in sorted(g.tasks.items()):
            if cost.collectives:
                text = f"{_counted(cost.collectives)}, {in_seconds(cost.collective_s)}"
                stages[name[0], text].append(name[1:])
        if g.once:
            seconds = sum(map(plan.machine.collective_s, g.once))
            groups[f"{_counted(g.once)}, {in_seconds(seconds)}"].append(str(g.group))
    tasks = [f"  {kind} of stage {', '.join(where)}: {text}" for (kind, text), where in sorted(stages.items())]
    steps = [f"  group {', '.join(where)}: {text}" for text, where in groups.items()]
    lines = ["collectives of each task:", *tasks, ""] if tasks else []
    return [*lines, "collectives once a step:", *steps, ""] if steps else lines


def _counted(collectives: Iterable[Collective]) -> str:
    """How many of each kind, with their bytes."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for c in collectives:
        count[c.kind] += c.times
        nbytes[c.kind] += c.nbytes * c.times
    return ", ".join(f"{n} {kind} ({in_bytes(nbytes[kind])})" for kind, n in count.items())


def _table(rows: list[list[str]]) -> list[str]:
    return [f"  {line}" for line in table(rows, "<" * len(rows[0]))]
