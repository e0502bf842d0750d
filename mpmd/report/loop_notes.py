"""Notes on a loop before a big run: balance, transfers and their reasons, repeated work, sums over groups."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpmd import _jax_compat as compat
from mpmd.compile.step import LoopProgram
from mpmd.costs.work import work_of_equation
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.partition.loop import TaskBody
from mpmd.partition.outline import Loop
from mpmd.report.flops import flops_of
from mpmd.report.roles import Roles
from mpmd.report.task_costs import by_stage
from scheduler import Costs, order_microbatches, simulate
from scheduler.base.texts import counted, in_bytes, in_flops
from scheduler.task import reads_of

_SHOWN = 6
_SMALL = 64  # elements; a smaller gradient is worth no warning
# Advice that saves less than this share of a loop's time is not worth a line.
_WORTH = 0.1
_BUBBLE = 0.3
_MOST_TASKS = 100_000  # simulated for a line of text


def loop_lines(program: LoopProgram, roles: Roles, bubble: float) -> Iterator[str]:
    """Yields the notes on one loop. `bubble` is the share of time that groups idle if all tasks take equally long."""
    loop = program.loop
    yield from _balance(program, bubble)
    yield from _crossings(loop)
    if (gathered := gathered_gradients(loop)) is not None:
        yield f"warning: {gathered}"
    yield from _repeats(loop)
    if (undivided := undivided_backward(loop)) is not None:
        yield f"warning: {undivided}"
    yield from dict.fromkeys(_sums_over_groups(loop, roles))  # each row of a stacked array has its own sum


# --- balance --------------------------------------------------------------------------------------


def _balance(program: LoopProgram, bubble: float) -> Iterator[str]:
    """Yields notes on unequal stages, the savings of equal ones, and the share of time in which groups idle."""
    loop = program.loop
    info, num_stages = loop.partition.info, len(loop.schedule.placement)
    operations = by_stage({place: flops_of(e) for place, e in program.executables.items()}, num_stages)
    work = [sum(parts) for parts in zip(*operations.values(), strict=True)]
    if num_stages > 1 and sum(work):
        mean = sum(work) / num_stages
        least, most = (f(range(num_stages), key=work.__getitem__) for f in (min, max))
        saved = _saved(loop, operations)
        if work[most] < 1.01 * work[least]:
            yield "  balance: all stages do the same number of operations"
        else:
            yield (
                f"  balance, by operations ({in_flops(mean)} a stage and microbatch): stage {least} does"
                f" {work[least] / mean:.2f}, stage {most} {work[most] / mean:.2f} times the mean; with equal stages the"
                f" loop would take {saved:.0%} less time"
            )
        if saved > _WORTH and reads_of(info.schedule) is not None:
            yield f"warning: stage {most} holds the other stages up. Give its role more groups, or other roles fewer."
        elif saved > _WORTH and info.cuts is None:
            yield (
                f"warning: stage {most} holds the other stages up.\n"
                "  Put mark_layer_end after each layer, and the library chooses where stages end; or move marks;"
                " python -m mpmd tune compares cuts (docs/stages.md)."
            )
    if bubble > _BUBBLE:
        yield (
            f"warning: groups idle {bubble:.0%} of loop {loop.number} even with equal tasks, for it has"
            f" {counted(info.num_microbatches, 'microbatch')} for {counted(num_stages, 'stage')}.\n"
            "  More microbatches (smaller ones), or another schedule, make that less (docs/schedules.md)."
        )


def order_lines(loop: Loop, costs: Costs) -> Iterator[str]:
    """Yields notes on the cost of the order of a list's microbatches, by the costs of each microbatch."""
    schedule, num = loop.schedule, len(costs.microbatches)
    now, num_tasks = simulate(schedule, num, costs), sum(map(len, loop.orders))
    busy = max(now.busy)
    if not busy or num_tasks > _MOST_TASKS:
        return
    order = order_microbatches(schedule, costs, tries=min(1000, 10 * _MOST_TASKS // num_tasks))
    given, best = now.makespan / busy, simulate(schedule, num, costs.in_order(order)).makespan / busy
    yield (
        f"  its {num} microbatches have {len(set(costs.microbatches))} shapes; by the roofline it takes {given:.2f}"
        f" times the work of the busiest group in this order, {best:.2f} times in the best one found;"
        " figures of a task or a microbatch are those of the largest"
    )
    if best < (1 - _WORTH) * given:
        yield (
            f"warning: another order of the microbatches would save {1 - best / given:.0%} of the loop.\n"
            "  scheduler.order_microbatches(schedule, step.lower(...).costs()) gives it (docs/stages.md)."
        )


def _saved(loop: Loop, operations: Mapping[str, Any]) -> float:
    """Returns the share of the loop's time that equal stages would save."""
    placement = loop.schedule.placement
    equal = {name: sum(value) / len(value) for name, value in operations.items()}
    if sum(map(len, loop.orders)) > _MOST_TASKS:  # then only the busiest group counts
        busy = [0.0] * (max(placement) + 1)
        for stage, group in enumerate(placement):
            busy[group] += sum(value[stage] for value in operations.values())
        return 1 - sum(busy) / len(busy) / max(busy)
    now, best = (loop.simulated(Costs(**costs)).makespan for costs in (operations, equal))
    return max(0.0, 1 - best / now)


# --- transfers ------------------------------------------------------------------------------------


def _crossings(loop: Loop) -> Iterator[str]:
    """Yields lines on a microbatch's values that go to another group, the largest first; equal ones share a line."""
    group = loop.group
    makers = {v: t for t in loop.partition.tasks for v in t.writes}
    readers: dict[compat.Var, list[TaskBody]] = defaultdict(list)
    for t in loop.partition.tasks:
        for v in t.reads:
            readers[v].append(t)
    alike: dict[tuple[int, str, str, str], list[str]] = defaultdict(list)
    gradients = num_gradients = 0
    for v, maker in makers.items():
        first = {group(t.place): t for t in reversed(readers[v])}  # the first reader in each group
        for target in sorted(first.keys() - {group(maker.place)}):
            reader = first[target]
            nbytes = equations.nbytes(v.aval)
            if maker.place.kind != "F":
                gradients, num_gradients = gradients + nbytes, num_gradients + 1
                continue
            key = nbytes, v.aval.str_short(short_dtypes=True), _made(maker, v), _read(reader, v)
            alike[key].append(f"{maker.place.stage} to {reader.place.stage}")
    if not alike and not num_gradients:
        return
    forward = sum(nbytes * len(ways) for (nbytes, *_), ways in alike.items())
    yield (
        f"  of each microbatch {in_bytes(forward)} cross forward in {sum(map(len, alike.values()))} values,"
        f" {in_bytes(gradients)} of gradients backward in {num_gradients}:"
    )
    ranked = sorted(alike, key=lambda key: -key[0] * len(alike[key]))
    for key in ranked[:_SHOWN]:
        nbytes, kind, made, read = key
        yield f"    {kind} ({in_bytes(nbytes)}) from stage {_listed(alike[key])}: {made}; {read}"
    if len(ranked) > _SHOWN:
        yield f"    … and {len(ranked) - _SHOWN} more, of at most {in_bytes(ranked[_SHOWN][0])}"


def gathered_gradients(loop: Loop) -> str | None:
    """Describes whole gradients that go to another group in each microbatch, for work on the gradients of all stages.

    These are the large values of the backward pass that cross and that no other gradient is computed from.
    """
    tasks = loop.partition.tasks
    makers = {v: t.place for t in tasks if t.place.kind != "F" for v in t.writes}
    needed: set[compat.Var] = set()
    for eqn in (e for t in reversed(tasks) for e in reversed(t.eqns)):
        differentiates = compat.is_transposed(eqn) and not equations.is_view(eqn)
        if differentiates or eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(equations.variables(eqn.invars))
    sent: dict[compat.Var, TaskBody] = {}
    for t in tasks:
        for v in t.reads:
            crosses = v in makers and loop.group(makers[v]) != loop.group(t.place)
            if crosses and v not in needed and equations.size(v.aval) > _SMALL:
                sent.setdefault(v, t)
    if not sent:
        return None
    total = sum(equations.nbytes(v.aval) for v in sent)
    largest = max(sent, key=lambda v: equations.nbytes(v.aval))
    return (
        f"in each microbatch {in_bytes(total)} of whole gradients go to stage {sent[largest].place.stage}:"
        f" {_read(sent[largest], largest)}.\n"
        "  It needs the gradients of several stages, so it runs in one of them, which sums them too.\n"
        "  If it multiplies a gradient by a number (clipping, dropping what is not finite), write two loops: the first"
        " returns\n"
        "  the numbers, of which scalars cross; the second multiplies the loss by them (docs/splitting.md)."
    )


def _made(task: TaskBody, v: compat.Var) -> str:
    eqn = next((e for e in task.eqns if v in e.outvars), None)
    return "made there" if eqn is None else f"{eqn.primitive.name} makes it{_at(eqn)}"


def _read(task: TaskBody, v: compat.Var) -> str:
    viewed = {v}
    for eqn in task.eqns:
        if not viewed.isdisjoint(equations.variables(eqn.invars)):
            if not equations.is_view(eqn):
                return f"{eqn.primitive.name} reads it{_at(eqn)}"
            viewed.update(eqn.outvars)
    return "summed there"


def _at(eqn: compat.JaxprEqn) -> str:
    line = compat.source_line(eqn)
    return f" at {line}" if line else ""


def _listed(ways: Sequence[str]) -> str:
    return ", ".join(ways[:4]) + (f" and {len(ways) - 4} more" if len(ways) > 4 else "")


# --- repeated work --------------------------------------------------------------------------------


def _repeats(loop: Loop) -> Iterator[str]:
    """Yields notes on cheap equations that several stages compute, and on the recomputation of `jax.checkpoint`."""
    tasks = loop.partition.tasks
    stages: dict[compat.Var, set[int]] = defaultdict(set)
    made: dict[compat.Var, compat.JaxprEqn] = {}
    for t in tasks:
        for e in t.eqns:
            if e.outvars:
                stages[e.outvars[0]].add(t.place.stage)
                made[e.outvars[0]] = e
    again = [made[v] for v, found in stages.items() if len(found) > 1 and not equations.is_free_view(made[v])]
    if again:
        largest = max(again, key=lambda e: (bool(compat.source_line(e)), equations.size(e.outvars[0].aval)))
        where = sorted({s for e in again for s in stages[e.outvars[0]]})
        yield (
            f"  computed in several stages ({', '.join(map(str, where))}): {len(again)} cheap equations on the"
            f" microbatch, such as {largest.primitive.name}{_at(largest)}"
        )
    forward = sum(work_of_equation(e).flops for t in tasks if t.place.kind == "F" for e in t.eqns)
    twice = sum(_recomputed(e) for t in tasks if t.place.kind != "F" for e in t.eqns)
    if twice and forward:
        yield f"  computed again by the backward pass (jax.checkpoint): {twice / forward:.0%} of the forward pass"


def undivided_backward(loop: Loop) -> str | None:
    """Describes the stages where the schedule splits the weight half of a backward off in vain, and the reason."""
    tasks = {t.place: t for t in loop.partition.tasks}
    held: dict[int, compat.JaxprEqn] = {}
    for place, task in tasks.items():
        if place.kind == "I" and not any(map(equations.works_hard, tasks[Place(place.stage, "W")].eqns)):
            several = [e for e in task.eqns if equations.works_hard(e) and len(equations.outputs(e)) > 1]
            if several and task.accumulates:
                held[place.stage] = max(several, key=lambda e: (work_of_equation(e).flops, sum(map(_size, e.outvars))))
    if not held:
        return None
    eqn = next(iter(held.values()))
    return (
        f"the weight half (W) of the backward of stage{'s' * (len(held) > 1)} {', '.join(map(str, sorted(held)))} is"
        " empty: all of it is in the first half (I).\n"
        f"  {eqn.primitive.name} gives several gradients at once{_at(eqn)}, and cannot be divided. The schedule gains"
        " nothing over one without W\n"
        "  (1F1B, interleaved). Compute the gradients of weights by an operation of their own, or take such a schedule."
    )


def _size(v: compat.Var) -> int:
    return equations.size(v.aval)


def _recomputed(eqn: compat.JaxprEqn) -> float:
    if compat.is_recomputed(eqn):
        return work_of_equation(eqn).flops
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return times * sum(_recomputed(e) for jaxpr in compat.jaxprs_in(eqn.params) for e in jaxpr.eqns)


def _sums_over_groups(loop: Loop, roles: Roles) -> Iterator[str]:
    """Yields notes on gradients with parts from several groups."""
    partition = loop.partition
    arguments: dict[int, set[compat.Var]] = defaultdict(set)  # the arguments that each stage reads
    for t in partition.tasks:
        arguments[t.place.stage] |= roles.arguments(t.operands)
    stages = {a.result: {a.place.stage} for a in partition.accumulators}
    for eqn in partition.after:
        here = set().union(*(stages[v] for v in equations.variables(eqn.invars) if v in stages))
        groups = {loop.schedule.placement[s] for s in here}
        if len(groups) > 1 and eqn.primitive.name in ("add", "add_any"):
            aval = eqn.outvars[0].aval
            shared = set.intersection(*(arguments[s] for s in here))
            alike = [roles.names[v] for v in shared if v.aval.shape == aval.shape and roles.role[v] == "parameters"]
            what = f"the gradient of {alike[0]}" if len(alike) == 1 else aval.str_short(short_dtypes=True)
            yield (
                f"  {what} ({in_bytes(equations.nbytes(aval))}) arises in groups {', '.join(map(str, sorted(groups)))}:"
                " its parts are summed once a step"
            )
        stages.update(dict.fromkeys(eqn.outvars, here))
