"""Orders that repeat one pattern: every microbatch goes the way of the one before it, six tasks' time later.

The time of a task is a slot: a whole number, one task a slot in each group. Two stages of F, I and W make the six.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler.listing import Problem, Ranking, list_schedule
from scheduler.task import Kind, Orders, Task

PERIOD = 6
_Slots = list[dict[int, Task]]


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


def repeat(pattern: Pattern, num_microbatches: int) -> _Slots:
    """The pattern for all microbatches, with the W that has waited longest in each slot that is left."""
    p = len(pattern.forward_down)
    slots: _Slots = []
    for group in range(p):
        down, up = group, 2 * p - 1 - group
        fixed = {
            first[group] + PERIOD * microbatch: Task(stage, kind, microbatch)
            for first, kind, stage in _parts(pattern, down, up)
            for microbatch in range(num_microbatches)
        }
        row: dict[int, Task] = {}
        waiting: list[Task] = []
        slot, last = 0, max(fixed)
        while slot <= last or waiting:
            if slot in fixed:
                row[slot] = fixed[slot]
                if fixed[slot].kind == "I":
                    waiting.append(fixed[slot]._replace(kind="W"))
            elif waiting:
                row[slot] = waiting.pop(0)
            slot += 1
        slots.append(row)
    return slots


def _parts(pattern: Pattern, down: int, up: int) -> tuple[tuple[tuple[int, ...], Kind, int], ...]:
    return (
        (pattern.forward_down, "F", down),
        (pattern.forward_up, "F", up),
        (pattern.input_grad_up, "I", up),
        (pattern.input_grad_down, "I", down),
    )


def squeeze(slots: _Slots, pattern: Pattern, num_microbatches: int, memory: int) -> _Slots:
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


def in_order(slots: _Slots, before: int | None = None) -> Orders:
    """Each group's tasks by slot, or those before a slot."""
    return tuple(tuple(row[slot] for slot in sorted(row) if before is None or slot < before) for row in slots)


def let_run_out(slots: _Slots, pattern: Pattern, problem: Problem, start: int) -> Orders | None:
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
