"""Orders that repeat a building block: every microbatch follows the pattern of the one before, six slots later.

A slot is the time of one task. Each group runs one task in a slot; two stages of F, I and W take six.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from scheduler.ordering import graph_needs
from scheduler.schedules.list_scheduling import Problem, Ranking, list_schedule
from scheduler.task import Kind, Orders, Task

PERIOD = 6
Slots = list[dict[int, Task]]
_KINDS: tuple[Kind, ...] = ("F", "F", "I", "I")  # the kinds of a block's ways
_HELD = {"F": 1, "I": 0, "W": -1}  # what a task adds to the activations that its group holds


class BuildingBlock(NamedTuple):
    """The slots of the first microbatch's F and I in each group, down and up. W takes a slot that is left."""

    forward_down: tuple[int, ...]
    forward_up: tuple[int, ...]
    input_grad_up: tuple[int, ...]
    input_grad_down: tuple[int, ...]


def there_and_back(num_groups: int, down: int, up: int, pauses: Sequence[int]) -> BuildingBlock:
    """Returns a block down the groups and up, so many slots from group to group, and the gradients in the same way.

    Args:
        down: The slots from the start of one group's task to the start of the next group's, on the way down.
        up: The slots on the way up.
        pauses: Slots to wait before F up, before I up, and before I down.
    """
    last, ways, start = num_groups - 1, list[tuple[int, ...]](), 0
    for step, pause, leg in zip((down, up, down, up), (0, *pauses), range(4), strict=True):
        start += pause
        slots = tuple(start + step * group for group in range(num_groups))
        ways.append(slots if leg % 2 == 0 else slots[::-1])
        start += step * last + 1
    return BuildingBlock(*ways)


def straight(num_groups: int) -> BuildingBlock:
    """Returns a block straight down the groups and up, and back the same way: activations live as briefly as they can.

    If the number of groups is a multiple of 3, the turn has a pause of two slots; otherwise two tasks would meet.
    """
    return there_and_back(num_groups, 1, 1, (0, 0 if num_groups % 3 else 2, 0))


def half_speed_down(num_groups: int) -> BuildingBlock:
    """Returns a block down at half speed, up at full speed, both times: slack for transfers, at half of 1F1B's memory.

    If the number of groups is even, the turn has a pause of three slots; otherwise two tasks would meet in a group.
    """
    return there_and_back(num_groups, 2, 1, (0, 0 if num_groups % 2 else 3, 1))


def blocks_within(num_groups: int, num_microbatches: int, memory: int) -> Iterator[BuildingBlock]:
    """Yields the blocks of this kind, one to three slots from group to group, that repeat within a bound of memory.

    Blocks with the longest-lived activations come first: they leave most room to draw the ends of the order together.
    ``memory`` counts activations of one stage.
    """
    found = set[tuple[int, BuildingBlock]]()  # with one group, speeds make no difference
    for down, up, *pauses in product(*[range(1, 4)] * 2, *[range(PERIOD)] * 3):
        block = there_and_back(num_groups, down, up, pauses)
        by_group = list(zip(*block, strict=True))
        lives = max(i_up - f_up + i_down - f_down for f_down, f_up, i_up, i_down in by_group)
        if lives < PERIOD * memory and all(len({slot % PERIOD for slot in slots}) == len(slots) for slots in by_group):
            found.add((lives, block))
    for _, block in sorted(found, reverse=True):
        if all(max(_live(row, max(row) + 1)) <= memory for row in repeat(block, num_microbatches)):
            yield block


def repeat(block: BuildingBlock, num_microbatches: int) -> Slots:
    """Repeats the block for all microbatches. Each slot that is left goes to the W that has waited longest."""
    p = len(block.forward_down)
    slots: Slots = []
    for group in range(p):
        down, up = group, 2 * p - 1 - group
        fixed = {
            first[group] + PERIOD * microbatch: Task(stage, kind, microbatch)
            for first, kind, stage in zip(block, _KINDS, (down, up, up, down), strict=True)
            for microbatch in range(num_microbatches)
        }
        slots.append(_with_weights(fixed))
    return slots


def _with_weights(fixed: dict[int, Task]) -> dict[int, Task]:
    """Returns a group's F and I, with its W: each slot that is left goes to the W that has waited longest."""
    row: dict[int, Task] = {}
    waiting: deque[Task] = deque()
    slot, last = 0, max(fixed)
    while slot <= last or waiting:
        if slot in fixed:
            row[slot] = fixed[slot]
            if fixed[slot].kind == "I":
                waiting.append(fixed[slot]._replace(kind="W"))
        elif waiting:
            row[slot] = waiting.popleft()
        slot += 1
    return row


def squeeze(slots: Slots, block: BuildingBlock, num_microbatches: int, memory: int) -> Slots:
    """Draws both ends together: each task there moves to the first free slot that it can take.

    The ends are the tasks that start before the first microbatch is back, and the tasks that start after the last one
    is in. Everything between them stays, with the block's slack. No move makes a group hold more than ``memory``.
    """
    length = max(map(max, slots)) + 1
    live = [_live(row, length) for row in slots]

    def moves(group: int, slot: int, free: int) -> bool:
        row, kind = slots[group], slots[group][slot].kind
        if kind == "F" and max(live[group][free:slot]) >= memory:
            return False
        row[free] = row.pop(slot)
        for index in range(free, slot):
            live[group][index] += _HELD[kind]
        return True

    # The slots in which the first microbatch is back in group 0, and in which the last one starts there.
    back, closed = block.input_grad_down[0], block.forward_down[0] + PERIOD * (num_microbatches - 1)
    done: dict[Task, int] = {}
    waits_for = graph_needs(None, 2 * len(slots))
    for slot, group, task in sorted(
        (slot, group, task) for group, row in enumerate(slots) for slot, task in row.items()
    ):
        at = slot
        if not back <= slot < closed:
            # The microbatches of a kind and stage stay in order; there is no B.
            before = [task._replace(microbatch=task.microbatch - 1), *waits_for(task)]
            first = 1 + max((done[need] for need in before if need.kind != "B" and need.microbatch >= 0), default=-1)
            free = (index for index in range(first, slot) if index not in slots[group])
            at = next((index for index in free if moves(group, slot, index)), slot)
        done[task] = at
    return slots


def _live(row: dict[int, Task], length: int) -> list[int]:
    """Returns how many activations a group holds after each slot."""
    return list(accumulate(_HELD[row[slot].kind] if slot in row else 0 for slot in range(length)))


def in_order(slots: Slots, before: int | None = None) -> Orders:
    """Returns each group's tasks by slot; with ``before``, only the tasks before that slot."""
    return tuple(tuple(row[slot] for slot in sorted(row) if before is None or slot < before) for row in slots)


def let_run_out(slots: Slots, block: BuildingBlock, problem: Problem, start: int) -> Orders | None:
    """Returns the slots before ``start``, then list scheduling in the block's order, with W if nothing else can run."""
    p = problem.num_groups
    ranking = Ranking(
        {
            "F": [*block.forward_down, *reversed(block.forward_up)],
            "I": [*block.input_grad_down, *reversed(block.input_grad_up)],
            "W": [0.0] * (2 * p),
        },
        pace=PERIOD,
    )
    return list_schedule(problem, ranking, in_order(slots, start))


def orders_of(block: BuildingBlock, problem: Problem, memory: int) -> Iterator[Orders]:
    """Yields orders that repeat a block, with its ends as they are, drawn together, and run out from several places."""
    p, m = problem.num_groups, problem.num_microbatches
    slots = repeat(block, m)
    yield in_order(slots)
    slots = squeeze(slots, block, m, memory)
    yield in_order(slots)
    for later in sorted({0, p, max(0, 2 * p - 3), 2 * p - 2, 2 * p, 2 * p + 2}):
        orders = let_run_out(slots, block, problem, PERIOD * (m - 1) + later)
        if orders is not None:
            yield orders
