"""Gives each equation of a placed step a level; values cross between groups after each level."""

import dataclasses
from collections import defaultdict

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.partition.flat_step import FlatStep
from mpmd.partition.outline import Groups, Loop
from mpmd.partition.pins import runs_once

END = 1 << 30  # the level of what the step returns


@dataclasses.dataclass(frozen=True)
class Placed:
    """A step, and the groups that run it.

    Attributes:
      runs: per item, the groups that run the equation; empty for loops.
      inputs: per input, the groups that hold it.
      outputs: per result, the groups that hold it.
      committed: per result, whether something that is placed says where it is.
    """

    step: FlatStep
    runs: tuple[Groups, ...]
    inputs: tuple[Groups, ...]
    outputs: tuple[Groups, ...]
    committed: tuple[bool, ...]

    def __str__(self):
        items = zip(self.step.items, self.runs, strict=True)
        return "\n".join(f"loop {i.number}" if isinstance(i, Loop) else f"{sorted(groups)} {i}" for i, groups in items)


@dataclasses.dataclass(frozen=True)
class Levels:
    """The level of each item in each group that runs it; loops have levels of their own.

    Attributes:
      runs: per equation (by its position among the items) and group, its level.
      loops: per loop (by its position), its level.
      made: per variable, the groups that have it without a transfer, and from which level on.
    """

    runs: dict[tuple[int, int], int]
    loops: dict[int, int]
    made: dict[compat.Var, dict[int, int]]

    def __str__(self):
        levels = defaultdict(list)
        for (i, group), level in sorted(self.runs.items()):
            levels[level].append(f"{i} in group {group}")
        for i, level in self.loops.items():
            levels[level].append(f"loop {i}")
        return "\n".join(f"level {level}: {', '.join(levels[level])}" for level in sorted(levels))


def as_early_as_possible(placed: Placed) -> Levels:
    """Each equation at the first level at which its operands are in its group."""
    step = placed.step
    made = {v: dict.fromkeys(g, 0) for v, g in zip(step.invars, placed.inputs, strict=True)}
    runs: dict[tuple[int, int], int] = {}
    loops: dict[int, int] = {}
    floor = last_effect = 0

    def ready(v: compat.Var, group: int) -> int:
        have = made[v]
        return have[group] if group in have else have[min(have)] + 1

    for i, item in enumerate(step.items):
        if isinstance(item, Loop):
            floor = max([floor, *(ready(v, g) for v, groups in item.needs().items() for g in groups)]) + 1
            loops[i] = floor
            for acc in item.partition.accumulators:
                made[acc.result] = {item.group(acc.place): floor + 1}
            continue
        for g in sorted(placed.runs[i]):
            level = max((ready(v, g) for v in equations.variables(item.invars)), default=0)
            if compat.is_ordered(item):
                level = last_effect = max(level, last_effect)
            while level in loops.values():
                level += 1
            runs[i, g] = level
            for v in item.outvars:
                made.setdefault(v, {})[g] = level
    return Levels(runs, loops, made)


def as_late_as_possible(placed: Placed, levels: Levels) -> Levels:
    """Each equation as late as its readers allow, where that does not keep more bytes alive.

    Scalars from before the loops that none of them reads (counters) are computed with what their group does last, and
    need no program of their own.
    """
    step = placed.step
    first_loop, last = min(levels.loops.values(), default=0), defaultdict[int, int](int)
    for (_, group), level in levels.runs.items():
        last[group] = max(last[group], level)
    runs, made = dict(levels.runs), {v: dict(have) for v, have in levels.made.items()}
    latest: dict[tuple[compat.Var, int], int] = {}

    def bound(v: compat.Var, group: int, level: int) -> None:
        have = made[v]
        source = group if group in have else min(have)
        if source != group and level < END:
            level -= 1
        latest[v, source] = min(latest.get((v, source), level), level)

    for v, groups in zip(step.outvars, placed.outputs, strict=True):
        for g in groups:
            bound(v, g, END)
    for i, item in reversed(list(enumerate(step.items))):
        if isinstance(item, Loop):
            for v, groups in item.needs().items():
                for g in groups:
                    bound(v, g, levels.loops[i] - 1)
            continue
        for g in placed.runs[i]:
            level = runs[i, g]
            counts = equations.is_scalar_work(item) and level < first_loop < last[g]
            stays = runs_once(item) or (equations.shrinks(item) and not counts)
            limit = min((latest[v, g] for v in item.outvars if (v, g) in latest), default=END)
            limit = last[g] if counts and limit == END else limit
            if level < limit < END and not stays:
                while limit in levels.loops.values():
                    limit -= 1
                level = runs[i, g] = max(level, limit)
                for v in item.outvars:
                    made[v][g] = level
            for v in equations.variables(item.invars):
                bound(v, g, level)
    return Levels(runs, levels.loops, made)
