"""Proves that devices which work in order cannot deadlock, where transfers and collectives block both sides."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence

from scheduler.engine import blocked, run_until_blocked
from scheduler.programs.instructions import TRANSFERS, WORK, Instruction, Program, Recv, Send, Transfer
from scheduler.programs.merging import GroupInstruction, merge

Meeting = tuple[Hashable, frozenset[int]]
"""Work that several streams do together: its name, and the streams that have to come to it."""

# The forms of a stream: the groups that it runs, in the order of `merge`, or its instructions in its own order.
Stream = Collection[int] | Sequence[GroupInstruction]


def stream_faults(program: Program, streams: Sequence[Stream]) -> list[str]:
    """Returns the faults of devices (streams of instructions) that run a program.

    A stream does one instruction after the other. A run or call of a group starts when all streams of the group have
    come to it, since it may contain a collective. A transfer starts when the streams of both groups have come to it;
    within one stream, it only has to be sent before it is received.
    """
    orders = [_order(program, stream) for stream in streams]
    faults = _incomplete(program, orders)
    return faults or _deadlock(orders)


def meetings(orders: Sequence[Sequence[GroupInstruction]]) -> list[list[Meeting]]:
    """Returns each stream's work in order, as meetings: a name, and the streams that have to come to it."""
    homes: dict[int, set[int]] = defaultdict(set)
    for stream, order in enumerate(orders):
        for group, _ in order:
            homes[group].add(stream)
    found: list[list[Meeting]] = []
    for stream, order in enumerate(orders):
        count: Counter[Hashable] = Counter()
        found.append([])
        for group, instruction in order:
            key: Hashable = (group,)
            where = homes[group]
            if isinstance(instruction, TRANSFERS):
                source, target = Transfer.of(group, instruction)[1:]
                both = homes[source] & homes[target]
                where = (homes[source] | homes[target]) - both
                side = "" if stream not in both else "sent" if isinstance(instruction, Send) else "received"
                key, where = (source, target, side), where if stream not in both else {stream}
            elif not isinstance(instruction, WORK):
                continue
            count[key] += 1
            found[-1].append(((key, count[key]), frozenset(where)))
    return found


def _order(program: Program, stream: Stream) -> Sequence[GroupInstruction]:
    groups = [g for g in stream if isinstance(g, int)]
    return merge(program, groups) if groups else [step for step in stream if not isinstance(step, int)]


def _incomplete(program: Program, orders: Sequence[Sequence[GroupInstruction]]) -> list[str]:
    """Returns groups that no stream runs, and groups with other instructions in a stream than in the program."""
    faults, seen = [], set()
    for stream, order in enumerate(orders):
        own: dict[int, list[Instruction]] = defaultdict(list)
        sent: Counter[Transfer] = Counter()
        for group, instruction in order:
            own[group].append(instruction)
            if isinstance(instruction, Send):
                sent[Transfer.of(group, instruction)] += 1
            elif isinstance(instruction, Recv) and any(g == instruction.from_group for g, _ in order):
                transfer = Transfer.of(group, instruction)
                sent[transfer] -= 1
                if sent[transfer] < 0:
                    faults.append(f"stream {stream}: group {group} at '{instruction}' comes before the send")
        for group, instructions in own.items():
            if tuple(instructions) != tuple(program.groups[group]):
                faults.append(f"stream {stream} does not run the instructions of group {group} in their order")
        seen.update(own)
    missing = sorted(g for g in range(program.num_groups) if g not in seen and program.groups[g])
    return faults + [f"no stream runs group {group}" for group in missing]


def _deadlock(orders: Sequence[Sequence[GroupInstruction]]) -> list[str]:
    """Returns the streams that never come to the end, and what each waits for."""
    todo = meetings(orders)
    position, arrived = _run(todo)
    if not (stuck := blocked(position, todo)):
        return []
    texts = []
    for stream in stuck:
        name, wanted = todo[stream][position[stream]]
        absent = ", ".join(map(str, sorted(wanted - arrived[name])))
        texts.append(f"stream {stream} at {_text(name)} waits for stream {absent}")
    return [f"deadlock: {'; '.join(texts)}"]


def _run(todo: Sequence[Sequence[Meeting]]) -> tuple[list[int], dict[Hashable, set[int]]]:
    """Returns how far each comes if a meeting happens once all its streams have come; and who has come to which."""
    arrived: dict[Hashable, set[int]] = defaultdict(set)

    def do(one: int, meeting: Meeting, happened: Callable[[Hashable], None]) -> Hashable | None:
        name, wanted = meeting
        arrived[name].add(one)
        if not arrived[name] >= wanted:
            return name
        happened(name)
        return None

    return run_until_blocked(todo, do), arrived


def _text(name: Hashable) -> str:
    assert isinstance(name, tuple)
    key, count = name
    if len(key) == 1:
        return f"run {count} of group {key[0]}"
    return f"transfer {count} from group {key[0]} to group {key[1]}"
