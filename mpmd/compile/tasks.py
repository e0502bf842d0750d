"""The tasks of a loop as programs: which tasks exist, what each computes, the accumulators of a group; their names.

A task's program is called after the step, the stage and the kind: `gpt_stage2_F`, or `gpt_stage2_decoder_F` where the
mark at the stage's end has the name "decoder". Equal programs are compiled once, under the name of the first of them.
"""

from collections import Counter
from collections.abc import Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.partition.loop import LoopPartition, TaskBody
from mpmd.partition.outline import Loop, Outline, Segment
from mpmd.tracing.new_equations import trace_equations, trace_operation


def accumulators_of(loop: Loop) -> dict[int, tuple[int, ...]]:
    """Returns, per group with accumulators, the numbers of the accumulators that its tasks update."""
    found: dict[int, tuple[int, ...]] = {}
    for k, accumulator in enumerate(loop.partition.accumulators):
        group = loop.group(accumulator.place)
        found[group] = (*found.get(group, ()), k)
    return dict(sorted(found.items()))


def task_bodies(loop: Loop) -> list[TaskBody]:
    """Returns the bodies of the tasks that a loop's schedule has, in data-flow order.

    If there are `I` and `W`, a `B` is both of them, and comes after them.
    """
    partition = loop.partition
    kinds = {t.kind for order in loop.orders for t in order}
    bodies = {b.place: b for b in partition.tasks}
    if "B" in kinds and any(p.kind == "I" for p in bodies):
        for stage in range(loop.schedule.num_stages):
            bodies[Place(stage, "B")] = _whole_backward(partition, stage)
    rank = {"F": 0, "R": 1, "I": 2, "W": 3, "B": 4}
    stages = loop.schedule.num_stages
    order = sorted(bodies, key=lambda p: (rank[p.kind], p.stage if p.kind == "F" else stages - p.stage))
    return [bodies[p] for p in order if p.kind in kinds]


def _whole_backward(partition: LoopPartition, stage: int) -> TaskBody:
    """Joins `I` and `W` of a stage into one task."""
    i, w = partition.task(Place(stage, "I")), partition.task(Place(stage, "W"))
    seen: set[int] = set()
    eqns = []
    bound: set[compat.Var] = set()
    for eqn in (*i.eqns, *w.eqns):
        if id(eqn) not in seen and not bound.intersection(equations.outputs(eqn)):
            seen.add(id(eqn))
            bound.update(equations.outputs(eqn))
            eqns.append(eqn)
    others = {v for t in partition.tasks if t.place not in (i.place, w.place) for v in t.reads}
    return TaskBody(
        Place(stage, "B"),
        tuple(eqns),
        tuple(dict.fromkeys((*i.operands, *w.operands))),
        tuple(v for v in dict.fromkeys((*i.reads, *w.reads)) if v not in bound),
        tuple(v for v in (*i.writes, *w.writes) if v in others),
        (*i.accumulates, *w.accumulates),
        i.uses_index or w.uses_index,
    )


def task_jaxpr(partition: LoopPartition, body: TaskBody) -> compat.ClosedJaxpr:
    """Returns a task and its accumulation as a closed jaxpr. Its arguments: [index], operands, reads, accumulators."""
    accs = [partition.accumulators[k] for k in body.accumulates]
    old = [compat.Var(a.result.aval) for a in accs]
    eqns, new = list(body.eqns), []
    for acc, start in zip(accs, old, strict=True):
        if isinstance(acc.value, compat.Literal):
            more, (total,) = trace_equations(
                lambda a, i, acc=acc, value=acc.value: acc.operation.update(a, value.val, i), start, partition.index
            )
        else:
            more, (total,) = trace_operation(acc.operation, "update", (start, acc.value, partition.index))
        eqns += more
        new.append(total)
    args = [*([partition.index] if body.uses_index else []), *body.operands, *body.reads, *old]
    outs = [*new, *body.writes]
    return compat.make_jaxpr(args, outs, _sums_with_their_values(eqns, len(body.eqns)), str(body.place))


def _sums_with_their_values(eqns: Sequence[compat.JaxprEqn], num_body: int) -> list[compat.JaxprEqn]:
    """Moves each sum after the first `num_body` equations to right after its terms, so that a layer stays together."""
    maker = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    place = list(range(len(eqns)))
    for i in range(num_body, len(eqns)):
        place[i] = max((place[maker[v]] for v in equations.variables(eqns[i].invars) if v in maker), default=i)
    return [eqns[i] for i in sorted(range(len(eqns)), key=lambda i: place[i])]


# --- names for profiles and dumps -----------------------------------------------------------------


def task_name(step: str, loop: Loop, *places: Place) -> str:
    """Returns the name of the program of a task, or of a pair of tasks that run as one."""
    parts = [step, _number(loop)]
    for place in places:
        parts += [f"stage{place.stage}", loop.partition.labels[place.stage], place.kind]
    return "_".join(p for p in parts if p)


def zeros_name(step: str, loop: Loop, group: int) -> str:
    """Returns the name of the program that makes a group's accumulators."""
    return "_".join(p for p in (step, _number(loop), "zeros", f"group{group}") if p)


def segment_names(step: str, outline: Outline) -> dict[str, str]:
    """Returns the name of each segment's program: its place (before, between or after the loops) and its group."""
    passed, count = 0, Counter()
    names = {}
    for item in outline.items:
        if isinstance(item, Loop):
            passed += 1
        elif isinstance(item, Segment):
            total = len(outline.loops)
            where = "before_loop" if passed == 0 else "after_loop" if passed == total else "between_loops"
            name = "_".join(p for p in (step, where if total else "", f"group{item.group}") if p)
            count[name] += 1
            names[item.name] = name if count[name] == 1 else f"{name}_{count[name]}"
    return names


def _number(loop: Loop) -> str:
    return f"loop{loop.number}" if loop.number else ""
