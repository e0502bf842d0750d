"""The levels of a step that is written as tasks and transfers: each task is a program, in the order of the text.

What depends on nothing new would else run as early as it can: the forwards of all microbatches in one program of the
first group, while all others wait for it.
"""

from collections import defaultdict
from collections.abc import Container, Sequence

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.ops.cross_group import place_p
from mpmd.partition.flat_step import FlatStep, Item
from mpmd.partition.levels import Levels, Placed
from mpmd.partition.outline import Loop

_ARRIVES = {"reshard", "sharding_constraint", "device_put", "copy"}  # what a transfer does after it has moved a value
Spot = tuple[int, int]  # the position of an item, and a group that runs it


def _ends_task(item: Item) -> bool:
    """Whether an item is the end of a task."""
    return not isinstance(item, Loop) and item.primitive is place_p and bool(item.params.get("ends_task"))


def has_tasks(step: FlatStep) -> bool:
    """Whether a step is written as tasks, without a pipelined loop."""
    return not step.loops and any(map(_ends_task, step.items))


def by_task(placed: Placed) -> Levels | None:
    """Each task at a level of its own, after the task before it in its group and after what it reads has arrived.

    None if that cannot be: within a task of several groups, these exchange values.
    """
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
            level = max(level, made[v][group] if group in made[v] else made[v][min(made[v])] + 1)
        last[group] = level
        runs.update(dict.fromkeys(task, level))
        for v in inner:
            made.setdefault(v, {})[group] = level
    return Levels(runs, {}, made)


def _tasks(placed: Placed) -> list[list[Spot]]:
    """The equations of each task in each group, in the order of the text; what arrives belongs to its first reader."""
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
    for spot in spots:  # what arrives and is read elsewhere alone: a result of the step, or on its way to a third group
        join(spot, [])
    return sorted({id(task): task for task in by_spot.values()}.values(), key=max)


def _arriving(items: Sequence[Item]) -> dict[compat.Var, int]:
    """What transfers make, and the position of the item that makes it."""
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
