"""Proves that sends and receives match, and that groups cannot deadlock where each of them waits for the other."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from scheduler.engine import blocked, run_until_blocked
from scheduler.programs.instructions import Program, Recv, Send, Value

Pair = tuple[int, int]
"""Two groups, the sender first."""
Names = dict[Pair, tuple[list[int], list[int]]]
"""For pairs whose n-th receive is not always that of the n-th send: numbers of the sends, and of the receives."""


def transfer_faults(program: Program) -> list[str]:
    """Sends and receives that do not match, and the circle in which groups wait for each other's."""
    sends, receives = _by_pair(program)
    faults: list[str] = []
    names: Names = {}
    for pair in sorted(set(sends) | set(receives), key=repr):
        sent, received = sends[pair], receives[pair]
        if sent != received:
            faults += _unmatched(pair, sent, received)
            names[pair] = _numbers(sent, received)
    return faults + _deadlock(program, names)


def _by_pair(program: Program) -> tuple[dict[Pair, list[Value]], dict[Pair, list[Value]]]:
    """For each pair of groups, the values in the order in which they are sent, and received."""
    sends: dict[Pair, list[Value]] = defaultdict(list)
    receives: dict[Pair, list[Value]] = defaultdict(list)
    for group, instructions in enumerate(program.groups):
        for instruction in instructions:
            if type(instruction) is Send:
                sends[group, instruction.to_group].append(instruction.value)
            elif type(instruction) is Recv:
                receives[instruction.from_group, group].append(instruction.value)
    return sends, receives


def _unmatched(pair: Pair, sent: Sequence[Value], received: Sequence[Value]) -> list[str]:
    """Sends and receives of a pair that have no partner, or that come in different orders."""
    names = f"from group {pair[0]} to group {pair[1]}"
    lone = Counter(sent) - Counter(received), Counter(received) - Counter(sent)
    faults = [f"{value} {names}: a send without a receive" for value in lone[0].elements()]
    faults += [f"{value} {names}: a receive without a send" for value in lone[1].elements()]
    both = [[value for value in side if not alone[value]] for side, alone in zip((sent, received), lone, strict=True)]
    for index, (one, other) in enumerate(zip(*both, strict=False)):
        if one != other:
            faults.append(
                f"transfers {names} come in different orders: number {index} is sent as {one} and received as {other}"
            )
            break
    return faults


def _numbers(sent: Sequence[Value], received: Sequence[Value]) -> tuple[list[int], list[int]]:
    """A number for each send and each receive of a pair, the same on both sides; -1 for what has no partner."""

    def named(values: Sequence[Value]) -> Iterator[tuple[Value, int]]:
        count: Counter[Value] = Counter()
        for value in values:
            count[value] += 1
            yield value, count[value]

    known = {name: number for number, name in enumerate(named(received))}
    has_send = set(named(sent))
    return (
        [known.get(name, -1) for name in named(sent)],
        [number if name in has_send else -1 for name, number in known.items()],
    )


def _deadlock(program: Program, names: Names) -> list[str]:
    """The circle in which groups wait for each other's transfers, if any. What has no partner is left out."""
    num_groups = program.num_groups
    todo = [array("q", (side for side, _ in _sides(program, group, names))) for group in range(num_groups)]
    position = [0] * num_groups
    waiting = [-1] * num_groups

    def advance(group: int, happened: Callable[[int], None]) -> int | None:
        while position[group] < len(todo[group]):
            side = todo[group][position[group]]
            number, other = divmod(side, num_groups)
            if other == group or waiting[other] != (number ^ 1) * num_groups + group:
                waiting[group] = side
                return group  # until the other group has come, and goes on for both
            waiting[other] = -1
            position[other] += 1
            position[group] += 1
            happened(other)
        return None

    run_until_blocked(num_groups, advance)
    if not (stuck := blocked(position, todo)):
        return []
    group, path = stuck[0], list[int]()
    while group not in path:
        path.append(group)
        group = todo[group][position[group]] % num_groups
    cycle = path[path.index(group) :]
    links = []
    for one in cycle:
        side, instruction = next(islice(_sides(program, one, names), position[one], None))
        links.append(f"group {one} at '{instruction}' waits for group {side % num_groups}")
    return [f"deadlock: {', '.join(links)}"]


def _sides(program: Program, group: int, names: Names) -> Iterator[tuple[int, Send | Recv]]:
    """A group's transfers in order, each with its side: twice the number in its pair, one more for a send; times the
    number of groups, and the other group.
    """
    num_groups, sent, received = program.num_groups, defaultdict[int, int](int), defaultdict[int, int](int)
    for instruction in program.groups[group]:
        if type(instruction) is Send:
            other, count, pair, is_send = instruction.to_group, sent, (group, instruction.to_group), 1
        elif type(instruction) is Recv:
            other, count, pair, is_send = instruction.from_group, received, (instruction.from_group, group), 0
        else:
            continue
        number = count[other]
        count[other] += 1
        if names and pair in names:
            number = names[pair][1 - is_send][number]
        if number >= 0:
            yield (2 * number + is_send) * num_groups + other, instruction
