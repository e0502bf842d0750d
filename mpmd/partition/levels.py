"""Gives each equation of a placed step a level; values cross between groups after each level."""

import dataclasses
from collections import defaultdict
from collections.abc import Container, Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.ops.cross_group import place_p
from mpmd.partition.flat_step import FlatStep, Item
from mpmd.partition.outline import Groups, Loop
from mpmd.partition.pins import runs_once

END = 1 << 30  # the level of reads of the step's results


@dataclasses.dataclass(frozen=True)
class Placed:
    """A step, and the groups that run it."""

    step: FlatStep
    runs: tuple[Groups, ...]  # per item, the groups that run the equation; empty for loops
    inputs: tuple[Groups, ...]  # per input, the groups that hold it
    outputs: tuple[Groups, ...]  # per result, the groups that hold it
    committed: tuple[bool, ...]  # per result, whether a placed value determines where it is

    def __str__(self):
        items = zip(self.step.items, self.runs, strict=True)
        return "\n".join(f"loop {i.number}" if isinstance(i, Loop) else f"{sorted(groups)} {i}" for i, groups in items)


@dataclasses.dataclass(frozen=True)
class Levels:
    """The level of each item in each group that runs it; loops have levels of their own.

    Attributes:
      made: per variable, the groups that have it without a transfer, each with the first level where it is ready.
    """

    runs: dict[tuple[int, int], int]  # per equation (by its position among the items) and group, its level
    loops: dict[int, int]  # per loop (by its position), its level
    made: dict[compat.Var, dict[int, int]]

    def __str__(self):
        levels = defaultdict(list)
        for (i, group), level in sorted(self.runs.items()):
            levels[level].append(f"{i} in group {group}")
        for i, level in self.loops.items():
            levels[level].append(f"loop {i}")
        return "\n".join(f"level {level}: {', '.join(levels[level])}" for level in sorted(levels))


def as_early_as_possible(placed: Placed) -> Levels:
    """Puts each equation at the first level at which its operands are in its group."""
    step = placed.step
    made = {v: dict.fromkeys(g, 0) for v, g in zip(step.invars, placed.inputs, strict=True)}
    runs: dict[tuple[int, int], int] = {}
    loops: dict[int, int] = {}
    floor = last_effect = 0

    for i, item in enumerate(step.items):
        if isinstance(item, Loop):
            floor = max([floor, *(_ready(made[v], g) for v, groups in item.needs().items() for g in groups)]) + 1
            if any(compat.is_ordered(eqn) for task in item.partition.tasks for eqn in task.eqns):
                floor = max(floor, last_effect + 1)
                last_effect = floor + 1
            loops[i] = floor
            for acc in item.partition.accumulators:
                made[acc.result] = {item.group(acc.place): floor + 1}
            continue
        for g in sorted(placed.runs[i]):
            level = max((_ready(made[v], g) for v in equations.variables(item.invars)), default=0)
            if compat.is_ordered(item):
                level = last_effect = max(level, last_effect)
            while level in loops.values():
                level += 1
            runs[i, g] = level
            for v in item.outvars:
                made.setdefault(v, {})[g] = level
    return Levels(runs, loops, made)


def _ready(made: dict[int, int], group: int) -> int:
    """Returns the first level at which a group can read a value, which it makes or receives after that level."""
    return made[group] if group in made else made[min(made)] + 1


def as_late_as_possible(placed: Placed, levels: Levels) -> Levels:
    """Puts each equation as late as its readers allow, if that does not keep more bytes alive.

    Scalars from before the loops that no loop reads (counters) move to the last level of their group, and so need no
    program of their own.
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


# --- steps that are written as tasks and transfers: each task is a program, in the order of the text ---

_ARRIVES = {"reshard", "sharding_constraint", "device_put", "copy"}  # equations of a transfer, after the value moved
Spot = tuple[int, int]  # the position of an item, and a group that runs it


def _ends_task(item: Item) -> bool:
    return not isinstance(item, Loop) and item.primitive is place_p and bool(item.params.get("ends_task"))


def by_task(placed: Placed) -> Levels | None:
    """Puts each task at its own level, after the previous task of its group and after its inputs have arrived.

    Otherwise, tasks that depend on nothing new would run as early as possible: the forwards of all microbatches in one
    program of the first group, while all other groups wait. Returns None if the step is not written as tasks, has a
    pipelined loop, or has a task of several groups that exchange values within it.
    """
    if placed.step.loops or not any(map(_ends_task, placed.step.items)):
        return None
    made = {v: dict.fromkeys(g, 0) for v, g in zip(placed.step.invars, placed.inputs, strict=True)}
    runs: dict[Spot, int] = {}
    last: dict[int, int] = defaultdict(lambda: -1)
    for task in _tasks(placed):
        group = task[0][1]
        level = last[group] + 1
        inner = {v for i, _ in task for v in placed.step.items[i].outvars}
        for v in (v for i, _ in task for v in equations.variables(placed.step.items[i].invars) if v not in inner):
            if v not in made:
                return None
            level = max(level, _ready(made[v], group))
        last[group] = level
        runs.update(dict.fromkeys(task, level))
        for v in inner:
            made.setdefault(v, {})[group] = level
    return Levels(runs, {}, made)


def _tasks(placed: Placed) -> list[list[Spot]]:
    """Returns the equations of each task in each group, in the order of the text. Arrivals go to their first reader."""
    items = placed.step.items
    spots = [(i, g) for i, groups in enumerate(placed.runs) for g in sorted(groups)]
    arriving = _arriving(items)
    by_spot: dict[Spot, list[Spot]] = {}

    def join(spot: Spot, task: list[Spot]) -> None:
        if spot in by_spot:
            return
        by_spot[spot] = task
        i, group = spot
        for v in equations.variables(items[i].invars):
            if v in arriving and group in placed.runs[arriving[v]]:
                join((arriving[v], group), task)
        task.append(spot)

    current: dict[int, list[Spot]] = {}
    positions = set(arriving.values())
    for i, group in (spot for spot in spots if spot[0] not in positions):
        task = current.get(group)
        if task is None or (_ends_task(items[task[-1][0]]) and not _ends_task(items[i])):
            task = current[group] = []
        join((i, group), task)
    for spot in spots:  # arrivals without a reader in their group: results of the step, or on the way to another group
        join(spot, [])
    return sorted({id(task): task for task in by_spot.values()}.values(), key=max)


def _arriving(items: Sequence[Item]) -> dict[compat.Var, int]:
    """Maps the results of transfers to the positions of the items that make them."""
    found: dict[compat.Var, int] = {}
    for i, item in enumerate(items):
        if not _ends_task(item) and _arrives(item, found):
            found.update(dict.fromkeys(item.outvars, i))
    return found


def _arrives(item: Item, arriving: Container[compat.Var]) -> bool:
    assert not isinstance(item, Loop)
    if item.primitive is place_p:
        return True
    operands = equations.variables(item.invars)
    return item.primitive.name in _ARRIVES and bool(operands) and all(v in arriving for v in operands)
