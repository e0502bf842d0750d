"""Proves that sends and receives match, and that the program cannot deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from scheduler.programs.instructions import TRANSFERS, Instruction, Program, Recv, Send, Transfer, Value

Meeting = tuple[Hashable, frozenset[int]]
"""Something that several do together: its name, and who has to come to it."""


def transfer_faults(program: Program) -> list[str]:
    """Sends and receives that do not match, and the circle in which groups wait for each other's."""
    faults = _unmatched(program)
    return faults + _deadlock(program)


def _unmatched(program: Program) -> list[str]:
    """For each pair of groups, sends and receives that have no partner, or that come in different orders."""
    sends: dict[tuple[int, int], list[Value]] = defaultdict(list)
    recvs: dict[tuple[int, int], list[Value]] = defaultdict(list)
    for group, instructions in enumerate(program.groups):
        for instruction in instructions:
            if isinstance(instruction, Send):
                sends[group, instruction.to_group].append(instruction.value)
            elif isinstance(instruction, Recv):
                recvs[instruction.from_group, group].append(instruction.value)
    faults = []
    for pair in sorted(set(sends) | set(recvs), key=repr):
        sent, received = sends[pair], recvs[pair]
        if sent == received:
            continue
        names = f"from group {pair[0]} to group {pair[1]}"
        unmatched = Counter(sent) - Counter(received), Counter(received) - Counter(sent)
        for value in unmatched[0].elements():
            faults.append(f"{value} {names}: a send without a receive")
        for value in unmatched[1].elements():
            faults.append(f"{value} {names}: a receive without a send")
        both = [
            [value for value in side if not lone[value]] for side, lone in zip((sent, received), unmatched, strict=True)
        ]
        for index, (one, other) in enumerate(zip(*both, strict=False)):
            if one != other:
                faults.append(
                    f"transfers {names} come in different orders: "
                    f"number {index} is sent as {one} and received as {other}"
                )
                break
    return faults


def _deadlock(program: Program) -> list[str]:
    """The circle in which groups wait for each other's transfers, if any. What has no partner is left out."""
    numbered = [_numbered(group, instructions) for group, instructions in enumerate(program.groups)]
    sides = Counter(name for own in numbered for name, _ in own)
    matched = [[one for one in own if sides[one[0]] == 2] for own in numbered]
    todo: list[list[Meeting]] = []
    for group, own in enumerate(matched):
        partners = [_partner(instruction) for _, instruction in own]
        both = [{group, -1 if partner == group else partner} for partner in partners]  # nobody meets itself
        todo.append([(name, frozenset(pair)) for (name, _), pair in zip(own, both, strict=True)])
    position, _ = run_meetings(todo)
    stuck = {g: own[at][1] for g, (own, at) in enumerate(zip(matched, position, strict=True)) if at < len(own)}
    if not stuck:
        return []
    group = min(stuck)
    path: list[int] = []
    while group not in path:
        path.append(group)
        group = _partner(stuck[group])
    cycle = path[path.index(group) :]
    links = [f"group {one} at '{stuck[one]}' waits for group {_partner(stuck[one])}" for one in cycle]
    return [f"deadlock: {', '.join(links)}"]


def _numbered(group: int, instructions: Sequence[Instruction]) -> list[tuple[Hashable, Send | Recv]]:
    """A group's transfers, each with a name that its partner has too: the first send of a value is that of its first
    receive.
    """
    count: Counter[Hashable] = Counter()
    found: list[tuple[Hashable, Send | Recv]] = []
    for instruction in instructions:
        if isinstance(instruction, TRANSFERS):
            transfer = Transfer.of(group, instruction)
            count[type(instruction), transfer] += 1
            found.append(((transfer, count[type(instruction), transfer]), instruction))
    return found


def _partner(instruction: Send | Recv) -> int:
    return instruction.to_group if isinstance(instruction, Send) else instruction.from_group


def run_meetings(todo: Sequence[Sequence[Meeting]]) -> tuple[list[int], dict[Hashable, set[int]]]:
    """How far each comes if a meeting happens when all whom it needs have come to it; and who has come to which."""
    position = [0] * len(todo)
    arrived: dict[Hashable, set[int]] = defaultdict(set)
    ready = list(range(len(todo)))
    while ready:
        one = ready.pop()
        if position[one] == len(todo[one]):
            continue
        name, wanted = todo[one][position[one]]
        arrived[name].add(one)
        if arrived[name] >= wanted:
            for other in wanted:
                position[other] += 1
                ready.append(other)
    return position, arrived
