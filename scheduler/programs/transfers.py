"""Proves that sends and receives match, and that the program cannot deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict

from scheduler.programs.instructions import TRANSFERS, Instruction, Program, Recv, Send, Transfer, Value


def transfer_faults(program: Program) -> list[str]:
    """Sends and receives that do not match, and the circle in which groups wait for each other's."""
    faults = _unmatched(program)
    return faults + _deadlock(_only_matched(program) if faults else program)


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
    """The circle in which groups wait for each other's transfers, if any. Every transfer has its partner."""
    position = _run_transfers(program)
    stuck = {
        g: program.groups[g][position[g]] for g in range(program.num_groups) if position[g] < len(program.groups[g])
    }
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


def _run_transfers(program: Program) -> list[int]:
    """How far each group comes if a send and its receive wait for each other, and nothing else waits."""
    position = [0] * program.num_groups
    waiting: dict[type, set[Transfer]] = {Send: set(), Recv: set()}
    ready = list(range(program.num_groups))
    while ready:
        group = ready.pop()
        instructions = program.groups[group]
        index = position[group]
        while index < len(instructions):
            instruction = instructions[index]
            if isinstance(instruction, TRANSFERS):
                transfer, other = Transfer.of(group, instruction), _partner(instruction)
                partners = waiting[Recv if isinstance(instruction, Send) else Send]
                if transfer not in partners:
                    waiting[type(instruction)].add(transfer)
                    break
                partners.remove(transfer)
                position[other] += 1
                ready.append(other)
            index += 1
        position[group] = index
    return position


def _partner(instruction: Instruction) -> int:
    assert isinstance(instruction, TRANSFERS)
    return instruction.to_group if isinstance(instruction, Send) else instruction.from_group


def _only_matched(program: Program) -> Program:
    """The program without sends and receives that have no partner."""
    counts: dict[type, Counter[Transfer]] = {Send: Counter(), Recv: Counter()}
    for group, instructions in enumerate(program.groups):
        for instruction in instructions:
            if isinstance(instruction, TRANSFERS):
                counts[type(instruction)][Transfer.of(group, instruction)] += 1
    both = counts[Send] & counts[Recv]
    left = {Send: both.copy(), Recv: both.copy()}

    def has_partner(group: int, instruction: Instruction) -> bool:
        if not isinstance(instruction, TRANSFERS):
            return True
        transfer = Transfer.of(group, instruction)
        left[type(instruction)][transfer] -= 1
        return left[type(instruction)][transfer] >= 0

    groups = tuple(
        tuple(instruction for instruction in instructions if has_partner(group, instruction))
        for group, instructions in enumerate(program.groups)
    )
    return Program(groups, program.placement, program.tasks)
