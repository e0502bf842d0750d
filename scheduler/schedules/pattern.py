"""Orders that repeat one pattern: every microbatch goes the way of the one before it, six tasks' time later.

The time of a task is a slot: a whole number, one task a slot in each group. Two stages of F, I and W make the six.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler.schedules.list_scheduling import Problem, Ranking, list_schedule
from scheduler.task import Kind, Orders, Task

PERIOD = 6
Slots = list[dict[int, Task]]


class Pattern(NamedTuple):
    """For each group, the slots of the first microbatch's F and I, down and up; W goes where there is room."""

    forward_down: tuple[int, ...]
    forward_up: tuple[int, ...]
    input_grad_up: tuple[int, ...]
    input_grad_down: tuple[int, ...]


def straight(num_groups: int) -> Pattern:
    """Straight down the groups and up, and back the same way: activations live as briefly as they can.

    A pause of two slots at the turn where the number of groups is a multiple of 3; else two tasks would meet.
    """
    p, pause = num_groups, 0 if num_groups % 3 else 2
    return Pattern(
        tuple(range(p)),
        tuple(2 * p - 1 - group for group in range(p)),
        tuple(2 * p + pause + group for group in range(p)),
        tuple(4 * p + pause - 1 - group for group in range(p)),
    )


def half_speed_down(num_groups: int) -> Pattern:
    """Down at half speed, up at full speed, both times: slack for transfers, at half of 1F1B's memory.

    A pause of three slots at the turn where the number of groups is even; else two tasks would meet in a group.
    """
    p, pause = num_groups, 0 if num_groups % 2 else 3
    return Pattern(
        tuple(2 * group for group in range(p)),
        tuple(3 * p - 2 - group for group in range(p)),
        tuple(3 * p - 1 + pause + 2 * group for group in range(p)),
        tuple(6 * p - 2 + pause - group for group in range(p)),
    )


def repeat(pattern: Pattern, num_microbatches: int) -> Slots:
    """The pattern for all microbatches, with the W that has waited longest in each slot that is left."""
    p = len(pattern.forward_down)
    slots: Slots = []
    for group in range(p):
        down, up = group, 2 * p - 1 - group
        fixed = {
            first[group] + PERIOD * microbatch: Task(stage, kind, microbatch)
            for first, kind, stage in _parts(pattern, down, up)
            for microbatch in range(num_microbatches)
        }
        slots.append(_with_weights(fixed))
    return slots


def _with_weights(fixed: dict[int, Task], up_first: bool = False) -> dict[int, Task]:
    """A group's F and I, and in each slot that is left the W that has waited longest, or one of the later stage."""
    row: dict[int, Task] = {}
    waiting: list[Task] = []
    slot, last = 0, max(fixed)
    while slot <= last or waiting:
        if slot in fixed:
            row[slot] = fixed[slot]
            if fixed[slot].kind == "I":
                waiting.append(fixed[slot]._replace(kind="W"))
        elif waiting:
            latest = max(task.stage for task in waiting) if up_first else waiting[0].stage
            row[slot] = waiting.pop(next(index for index, task in enumerate(waiting) if task.stage == latest))
        slot += 1
    return row


def weights_up_first(slots: Slots) -> Slots:
    """The same slots for F and I, and those of W given to the later stage of a group first."""
    return [_with_weights(_without_weights(row), up_first=True) for row in slots]


def _without_weights(row: dict[int, Task]) -> dict[int, Task]:
    return {slot: task for slot, task in row.items() if task.kind != "W"}


def _parts(pattern: Pattern, down: int, up: int) -> tuple[tuple[tuple[int, ...], Kind, int], ...]:
    return (
        (pattern.forward_down, "F", down),
        (pattern.forward_up, "F", up),
        (pattern.input_grad_up, "I", up),
        (pattern.input_grad_down, "I", down),
    )


def squeeze(slots: Slots, pattern: Pattern, num_microbatches: int, memory: int) -> Slots:
    """The same with both ends drawn together: each task there moves to the first free slot that it can.

    The ends are what starts before the first microbatch is back, and what starts after the last one is in. Between
    them everything stays, with the pattern's slack. No group comes to hold more than ``memory`` that way.
    """
    num_stages = 2 * len(slots)
    length = max(map(max, slots)) + 1
    live = [_live(row, length) for row in slots]
    back, closed = pattern.input_grad_down[0], pattern.forward_down[0] + PERIOD * (num_microbatches - 1)
    done: dict[Task, int] = {}
    for slot, group, task in sorted(
        (slot, group, task) for group, row in enumerate(slots) for slot, task in row.items()
    ):
        at = slot
        if slot < back or slot >= closed:
            first = 1 + max((done[need] for need in _needs(task, num_stages)), default=-1)
            for free in range(first, slot):
                if free in slots[group] or (task.kind == "F" and max(live[group][free:slot]) >= memory):
                    continue
                del slots[group][slot]
                slots[group][free] = task
                for index in range(free, slot):
                    live[group][index] += {"F": 1, "I": 0, "W": -1}[task.kind]
                at = free
                break
        done[task] = at
    return slots


def settle(slots: Slots, num_microbatches: int, memory: int) -> Slots:
    """Squeezed slots with both ends drawn together once more, F and I now going before any W.

    W then takes the slots that are left. What moves is what starts before the first microbatch is back in group 0, and
    what starts after the last one is in.
    """
    num_stages = 2 * len(slots)
    rows = [_without_weights(row) for row in slots]
    at_first = {task: slot for slot, task in rows[0].items()}
    back, closed = at_first[Task(0, "I", 0)], at_first[Task(0, "F", num_microbatches - 1)]
    done: dict[Task, int] = {}
    for slot, group, task in sorted(
        (slot, group, task) for group, row in enumerate(rows) for slot, task in row.items()
    ):
        row = rows[group]
        at = slot
        if slot < back or slot >= closed:
            first = 1 + max((done[need] for need in _needs(task, num_stages)), default=-1)
            for free in range(first, slot):
                if free in row:
                    continue
                del row[slot]
                row[free] = task
                if _peak(row) <= memory:
                    at = free
                    break
                del row[free]
                row[slot] = task
        done[task] = at
    return [_with_weights(row) for row in rows]


def _peak(row: dict[int, Task]) -> int:
    """The most activations that a group holds if each slot without F and I goes to a W that waits."""
    most = live = waiting = 0
    for slot in range(max(row) + 1):
        task = row.get(slot)
        if task is None:
            if waiting:
                waiting -= 1
                live -= 1
        elif task.kind == "F":
            live += 1
            if live > most:
                most = live
        else:
            waiting += 1
    return most


def _live(row: dict[int, Task], length: int) -> list[int]:
    """How many activations a group holds after each slot."""
    live, count = [], 0
    for slot in range(length):
        if slot in row:
            count += {"F": 1, "I": 0, "W": -1}[row[slot].kind]
        live.append(count)
    return live


def _needs(task: Task, num_stages: int) -> list[Task]:
    """What has to come before a task, with the microbatches of a kind and stage in order."""
    stage, kind, microbatch = task
    needs = [Task(stage, kind, microbatch - 1)] if microbatch else []
    if kind == "F":
        return needs + ([Task(stage - 1, "F", microbatch)] if stage else [])
    if kind == "W":
        return [*needs, Task(stage, "I", microbatch)]
    needs.append(Task(stage, "F", microbatch))
    return needs + ([Task(stage + 1, "I", microbatch)] if stage + 1 < num_stages else [])


def in_order(slots: Slots, before: int | None = None) -> Orders:
    """Each group's tasks by slot, or those before a slot."""
    return tuple(tuple(row[slot] for slot in sorted(row) if before is None or slot < before) for row in slots)


def let_run_out(slots: Slots, pattern: Pattern, problem: Problem, start: int) -> Orders | None:
    """The slots before ``start``, then whatever the pattern has due first, with W where nothing else can run."""
    p = problem.num_groups
    ranking = Ranking(
        {
            "F": [*pattern.forward_down, *reversed(pattern.forward_up)],
            "I": [*pattern.input_grad_down, *reversed(pattern.input_grad_up)],
            "W": [0.0] * (2 * p),
        },
        pace=PERIOD,
    )
    return list_schedule(problem, ranking, in_order(slots, start))
