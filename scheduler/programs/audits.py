"""Programs in which other groups run an instruction again, in time that they would idle away, to compare bits.

The instruction's arguments are copied before it runs, and sent to the groups that run it again: its *auditors*. Each of
them does so where it idles long enough on the clock of :func:`merge`, or else after its last work.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from scheduler.programs.check import check
from scheduler.programs.instructions import WORK, Call, Free, Instruction, Program, Recv, Send, Value
from scheduler.programs.merging import GroupInstruction, merged_with_times

# The calls that an audit adds. Those of auditors end with the number of their group.
BEFORE, TAKE, RESULT, AGAIN = "audit.before", "audit.take", "audit.result", "audit.again."
_RESULT = Value("audited results")
# By so much of its time at most is a step longer for a vote.
MOST_DELAY = 0.005


class AuditSlot(NamedTuple):
    """Where a group runs an instruction again.

    Attributes:
        delay: How much later the step ends.
        start: When it begins.
        group: The auditor.
        place: The position in the merged order of what the group does next.
    """

    delay: int
    start: int
    group: int
    place: int


@dataclasses.dataclass(frozen=True)
class AuditedProgram:
    """A program with an audit.

    Attributes:
        program: The program, checked.
        auditors: The groups that run the instruction again.
        copies: By value, what its copy is called.
        delay: How much longer it takes on the clock of :func:`merge`, where a forward task takes 1.
        makespan: How long the program takes without the audit.
    """

    program: Program
    auditors: tuple[int, ...]
    copies: Mapping[Value, Value]
    delay: int
    makespan: int


def with_audit(
    program: Program,
    group: int,
    index: int,
    reads: Sequence[Value],
    writes: Sequence[Value],
    donates: Collection[Value] = (),
    candidates: Collection[int] | None = None,
    num_auditors: int = 2,
) -> AuditedProgram:
    """The program, in which other groups run one instruction again.

    Args:
        program: A right program.
        group, index: The instruction: a task, or a call.
        reads: Everything that it takes from the memory of its group, also what its instruction does not name.
        writes: Everything that it leaves there, also what it updates in place.
        donates: Those of `reads` whose memory it takes over.
        candidates: The groups that may run it again; all others by default.
        num_auditors: How many groups do, if there are as many that do not delay the end of the step noticeably.

    Raises:
        ScheduleError: The program is not right.
        ValueError: There is no other group.

    Examples:
        >>> from scheduler import OneFOneB, TaskGraph, Value, lower
        >>> plain = lower(TaskGraph.chain(4), OneFOneB(4), 8)
        >>> index = next(k for k, i in enumerate(plain.groups[1]) if str(i).startswith("run 1B5"))
        >>> run = plain.groups[1][index]
        >>> found = with_audit(plain, 1, index, run.reads, run.writes)
        >>> found.auditors, found.delay, found.makespan
        ((3, 2), 0, 33)
    """
    audited = program.groups[group][index]
    others = [h for h in (range(program.num_groups) if candidates is None else candidates) if h != group]
    if not others:
        raise ValueError(f"with_audit: no other group can run {audited} again.")
    steps = merged_with_times(program)
    place = [at for at, (_, _, g, _) in enumerate(steps) if g == group][index]
    makespan = max(end for _, end, _, _ in steps)
    best, *more = sorted(_slot(steps, h, place, makespan) for h in others)[:num_auditors]
    slots = [best, *(slot for slot in more if slot.delay <= MOST_DELAY * makespan)]
    copies = {v: Value(f"audited {v}") for v in dict.fromkeys(reads)}
    added: dict[int, list[GroupInstruction]] = defaultdict(list)
    if held := tuple(v for v in copies if v in program.inputs_of(group)):
        added[0].append((group, Call(BEFORE, held)))
    added[place] += _taking(group, copies, [slot.group for slot in slots])
    added[place + 1].append((group, Call(RESULT, tuple(writes))))
    for slot in slots:
        added[slot.place] += _again(slot.group, copies, donates)
    groups: list[list[Instruction]] = [[] for _ in program.groups]
    for position, step in enumerate([*(step[2:] for step in steps), None]):
        for g, instruction in (*added[position], *filter(None, (step,))):
            groups[g].append(instruction)
    nbytes = {**program.nbytes, **{copy.name: program.nbytes.get(v.name, 0) for v, copy in copies.items()}}
    nbytes[_RESULT.name] = sum(program.nbytes.get(v.name, 0) for v in writes)
    found = dataclasses.replace(program, groups=tuple(map(tuple, groups)), nbytes=nbytes)
    check(found)
    return AuditedProgram(found, tuple(s.group for s in slots), copies, max(s.delay for s in slots), makespan)


def _taking(group: int, copies: Mapping[Value, Value], auditors: Sequence[int]) -> list[GroupInstruction]:
    """A group copies arguments, and sends them."""
    found: list[GroupInstruction] = [(group, Call(TAKE, tuple(copies), tuple(copies.values())))]
    for auditor, copy in product(auditors, copies.values()):
        found += [(group, Send(copy, auditor)), (auditor, Recv(copy, group))]
    return [*found, *((group, Free(copy)) for copy in copies.values())]


def _again(group: int, copies: Mapping[Value, Value], donates: Collection[Value]) -> list[GroupInstruction]:
    """An auditor runs the instruction, and forgets all that it has of it."""
    taken = tuple(copy for v, copy in copies.items() if v in donates)
    again = Call(f"{AGAIN}{group}", tuple(copies.values()), (_RESULT,), taken)
    left = [_RESULT, *(copy for copy in copies.values() if copy not in taken)]
    return [(group, again), *((group, Free(value)) for value in left)]


def _slot(steps: Sequence[tuple[int, int, int, Instruction]], group: int, place: int, makespan: int) -> AuditSlot:
    """The first time after the audited instruction in which a group idles long enough to run it again."""
    begun, done, *_ = steps[place]
    free = done
    for at, (start, end, g, instruction) in enumerate(steps):
        if g == group and isinstance(instruction, WORK):
            if at > place and start - free >= done - begun:
                return AuditSlot(0, free, group, at)
            free = max(free, end)
    return AuditSlot(max(0, free + done - begun - makespan), free, group, len(steps))
