"""Makes the outline of a placed step: segments, transfers between them, and loops."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.partition.flat_step import FlatStep
from mpmd.partition.levels import END, Levels, Placed
from mpmd.partition.outline import Loop, Outline, OutlineTransfer, Segment
from mpmd.partition.pack_scalars import Readers, pack_scalars
from mpmd.tracing.trace import Trace


def assemble(placed: Placed, levels: Levels) -> Outline:
    """Returns the step as segments (the equations of one group at one level), transfers and loops."""
    step = placed.step
    own: dict[tuple[int, int], list[compat.JaxprEqn]] = defaultdict(list)
    for (i, g), level in sorted(levels.runs.items()):
        own[level, g].append(step.items[i])
    readers = _readers(placed, levels)
    packed = pack_scalars(_transfers(step, levels, readers), readers, set(own), set(levels.loops.values()))
    for key, eqns in packed.first.items():
        own[key][:0] = eqns
    for key, eqns in packed.last.items():
        own[key] += eqns
    readers.update(packed.readers)
    sent = {(t.var, t.source) for t in packed.transfers}
    items: list[Segment | OutlineTransfer | Loop] = [t for t in packed.transfers if t.level < 0]
    loops = {level: step.items[i] for i, level in levels.loops.items()}
    for level in sorted({level for level, _ in own} | {t.level for t in packed.transfers if t.level >= 0} | set(loops)):
        if level in loops:
            items.append(loops[level])
        items += [_segment(step, level, g, own[level, g], readers, sent) for n, g in sorted(own) if n == level]
        items += [t for t in packed.transfers if t.level == level]
    num_consts = len(step.trace.consts)
    return Outline(
        step.trace,
        placed.inputs,
        tuple(zip(step.outvars, placed.outputs, strict=True)),
        tuple(items),
        tuple(d if d is None else d - num_consts for d in step.donors),
        _names(step.trace, items),
        placed.committed,
        packed.sizes,
    )


def _readers(placed: Placed, levels: Levels) -> Readers:
    """Returns, per variable and group, the levels at which it is read there (for results: the very end)."""
    step = placed.step
    readers: Readers = defaultdict(set)
    for (i, g), level in levels.runs.items():
        for v in equations.variables(step.items[i].invars):
            readers[v, g].add(level)
    for i, level in levels.loops.items():
        for v, groups in step.items[i].needs().items():
            for g in groups:
                readers[v, g].add(level)
    for v, groups in zip(step.outvars, placed.outputs, strict=True):
        for g in groups:
            readers[v, g].add(END)
    return readers


def _transfers(step: FlatStep, levels: Levels, readers: Readers) -> list[OutlineTransfer]:
    """Returns a transfer for each variable and each group that reads it without making it."""
    inputs = set(step.invars)
    found = []
    for v, g in readers:
        if g not in levels.made[v]:
            source = min(levels.made[v])
            found.append(OutlineTransfer(v, source, g, -1 if v in inputs else levels.made[v][source]))
    order = {v: i for i, v in enumerate(levels.made)}
    return sorted(found, key=lambda t: (t.level, t.source, t.target, order[t.var]))


def _segment(
    step: FlatStep,
    level: int,
    group: int,
    eqns: Sequence[compat.JaxprEqn],
    readers: Readers,
    sent: Collection[tuple[compat.Var, int]],
) -> Segment:
    reads = equations.free_variables(eqns)
    made = [v for e in eqns for v in equations.outputs(e)]
    writes = [v for v in made if (v, group) in sent or any(r != level for r in readers.get((v, group), ()))]
    # JAX gives donated buffers to results of their type in order; so each result gets its predecessor's buffer.
    next_of = {v: step.next_of[v] for v in reads if step.next_of.get(v) in writes}
    reads = tuple(dict.fromkeys((*next_of, *reads)))
    writes = tuple(dict.fromkeys((*next_of.values(), *writes)))
    return Segment(f"segment{level}.{group}", group, level, tuple(eqns), reads, writes)


def _names(trace: Trace, items: Iterable[Segment | OutlineTransfer | Loop]) -> dict[compat.Var, str]:
    """Returns unique names for the arguments and the results of segments and loops: the program names its values."""
    num_consts = len(trace.consts)
    names: dict[compat.Var, str] = {}
    taken: set[str] = set()
    for i, v in enumerate(trace.jaxpr.invars):
        name = f"const{i}" if i < num_consts else trace.in_names[i - num_consts]
        while name in taken:
            name += "'"
        taken.add(name)
        names[v] = name
    for item in items:
        if isinstance(item, Segment):
            for k, v in enumerate(item.writes):
                names.setdefault(v, f"{item.name}.{k}")
        elif isinstance(item, Loop):
            names.update((acc.result, f"loop{item.number}.{k}") for k, acc in enumerate(item.partition.accumulators))
    return names
