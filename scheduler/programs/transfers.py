"""Proves that sends and receives match, and that groups cannot deadlock if both sides of a transfer block."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence

from scheduler.engine import blocked
from scheduler.programs.instructions import TRANSFERS, Instruction, Program, Recv, Send, Transfer, Value
from scheduler.programs.merging import positions

Pair = tuple[int, int]
"""Two groups, the sender first."""


def transfer_faults(program: Program) -> list[str]:
    """Returns sends and receives that do not match, and the cycle of groups that wait for each other's transfers."""
    sends, receives = _by_pair(program)
    faults: list[str] = []
    partners: dict[Pair, Counter[Value]] = {}
    for pair in sorted(set(sends) | set(receives), key=repr):
        sent, received = sends[pair], receives[pair]
        if sent != received:
            faults += _unmatched(pair, sent, received)
            partners[pair] = Counter(sent) & Counter(received)
    return faults + _deadlock(_with_partners(program, partners) if partners else program)


def _by_pair(program: Program) -> tuple[dict[Pair, list[Value]], dict[Pair, list[Value]]]:
    """Returns, for each pair of groups, the values in the order in which they are sent, and received."""
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
    """Returns sends and receives of a pair that have no partner, or that come in different orders."""
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


def _with_partners(program: Program, partners: dict[Pair, Counter[Value]]) -> Program:
    """Returns the program without the sends and receives that have no partner.

    Args:
        partners: For pairs of groups, how often each value is both sent and received. Others are left as they are.
    """
    seen: Counter[tuple[type, Transfer]] = Counter()

    def stays(group: int, instruction: Instruction) -> bool:
        if not isinstance(instruction, TRANSFERS):
            return True
        transfer = Transfer.of(group, instruction)
        seen[type(instruction), transfer] += 1
        both = partners.get((transfer.source, transfer.target))
        return both is None or seen[type(instruction), transfer] <= both[transfer.value]

    groups = (tuple(i for i in group if stays(g, i)) for g, group in enumerate(program.groups))
    return dataclasses.replace(program, groups=tuple(groups))


def _deadlock(program: Program) -> list[str]:
    """Returns the cycle in which groups wait for each other's transfers, if any."""
    position = positions(program)
    if not (stuck := blocked(position, program.groups)):
        return []
    group, links = stuck[0], dict[int, str]()
    while group not in links:
        instruction = program.groups[group][position[group]]
        assert isinstance(instruction, TRANSFERS), "only transfers wait"
        other = instruction.to_group if isinstance(instruction, Send) else instruction.from_group
        links[group] = f"group {group} at '{instruction}' waits for group {other}"
        group = other
    path = list(links)
    return [f"deadlock: {', '.join(links[one] for one in path[path.index(group) :])}"]
