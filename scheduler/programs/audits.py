"""Programs in which other groups run an instruction again, in time when they would idle, to compare bits.

The instruction's arguments are copied before it runs, and sent to the groups that run it again: its *auditors*. Each
auditor runs it where it idles long enough on the clock of :func:`merge`, or else after its last work.

The instructions of an audit are inserted into the order that :func:`merge` makes of all instructions, where each Recv
directly follows its Send. The result is still one order that each group follows; so sends and receives match, and
nobody waits in a circle. Only that values are there when they are used is proved again, for the groups involved.
"""

import dataclasses
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from scheduler.ordering import raise_faults
from scheduler.programs.fewer import later_values
from scheduler.programs.instructions import WORK, Call, Free, Instruction, Program, Recv, Run, Send, Value
from scheduler.programs.liveness import Liveness
from scheduler.programs.merging import GroupInstruction, duration, merge

# The calls that an audit adds. The calls of auditors end with the number of their group.
BEFORE, TAKE, RESULT, AGAIN = "audit.before", "audit.take", "audit.result", "audit.again."
_RESULT = Value("audited results")
# The largest share of a step's time that a vote may add to it.
MOST_DELAY = 0.005


class WorkTime(NamedTuple):
    """A task or a call, with its times on the clock."""

    instruction: Run | Call  # The task or the call
    start: int  # When it runs; a forward task takes 1
    end: int
    place: int  # Its position in the order of :func:`merge`
    stays: bool  # Whether it is run: it may belong to a microbatch that the call does not have


class AuditSlot(NamedTuple):
    """The place where a group runs an instruction again."""

    delay: int  # How much later the step ends
    start: int  # When the second run begins
    group: int  # The auditor
    place: int  # The position in the merged order of the group's next work


@dataclasses.dataclass(frozen=True)
class PlannedAudit:
    """An audit of one instruction."""

    program: Program  # The program with the audit
    added: tuple[tuple[int, tuple[GroupInstruction, ...]], ...]  # By place in :func:`merge`, those to do before it
    auditors: tuple[int, ...]  # The groups that run the instruction again
    copies: Mapping[Value, Value]  # By value, the name of its copy
    delay: int  # How much longer the step takes on the clock, where a forward task takes 1


class AuditPlanner:
    """Plans audits of the instructions of a program, one at a time.

    Args:
        program: A right program.
        counts: By the number of a loop, how many of its microbatches are run (:func:`with_fewer`); otherwise all are. A
            plan also holds without the later ones, because an audit does not use them.

    Examples:
        >>> from scheduler import OneFOneB, TaskGraph, lower
        >>> plain = lower(TaskGraph.chain(4), OneFOneB(4), 8)
        >>> planner = AuditPlanner(plain)
        >>> runs = [work.instruction for work in planner.work[1]]
        >>> number = next(k for k, run in enumerate(runs) if str(run.task) == "1B5")
        >>> found = planner.plan(1, number, runs[number].reads, runs[number].writes)
        >>> found.auditors, found.delay, planner.makespan
        ((3, 2), 0, 33)
    """

    def __init__(self, program: Program, counts: Mapping[int, int] | None = None) -> None:
        self._program = program
        steps = merge(program)
        self._num_steps = len(steps)
        self._places: list[list[int]] = [[] for _ in program.groups]
        for place, (group, _) in enumerate(steps):
            self._places[group].append(place)
        self.work = _on_clock(program, steps, counts or {})
        self.makespan = max((work.end for own in self.work for work in own), default=0)

    def plan(
        self,
        group: int,
        number: int,
        reads: Sequence[Value],
        writes: Sequence[Value],
        donates: Collection[Value] = (),
        candidates: Collection[int] | None = None,
        num_auditors: int = 2,
    ) -> PlannedAudit:
        """Plans an audit: the program in which other groups run one instruction again.

        Args:
            group, number: The instruction: its group, and its number among the group's tasks and calls.
            reads: All its inputs in the memory of its group, also those that the instruction does not name.
            writes: All its outputs there, also values that it updates in place.
            donates: The values of `reads` that are donated to it.
            candidates: The groups that may run it again; all others by default.
            num_auditors: How many groups do, if enough of them do not delay the step's end noticeably more than one
                does.

        Raises:
            ScheduleError: A value is read that is not there, or not written.
            ValueError: There is no other group.
        """
        others = [h for h in (range(self._program.num_groups) if candidates is None else candidates) if h != group]
        if not others:
            raise ValueError(f"AuditPlanner: no other group can run what group {group} runs.")
        audited = self.work[group][number]
        best, *more = sorted(self._slot(h, audited) for h in others)[:num_auditors]
        slots = [best, *(slot for slot in more if slot.delay <= max(best.delay, MOST_DELAY * self.makespan))]
        copies = {v: Value(f"audited {v}") for v in dict.fromkeys(reads)}
        added: dict[int, list[GroupInstruction]] = defaultdict(list)
        if held := tuple(v for v in copies if v in self._program.inputs_of(group)):
            added[0].append((group, Call(BEFORE, held)))
        added[audited.place] += _taking(group, copies, [slot.group for slot in slots])
        added[audited.place + 1].append((group, Call(RESULT, tuple(writes))))
        for slot in slots:
            added[slot.place] += _again(slot.group, copies, donates)
        found = self._with(added, copies, writes)
        faults = [fault for g in (group, *(s.group for s in slots)) for fault in Liveness(found, g).run()]
        raise_faults("AuditPlanner: the program with an audit", faults)
        return PlannedAudit(
            found,
            tuple((place, tuple(instructions)) for place, instructions in sorted(added.items())),
            tuple(s.group for s in slots),
            copies,
            max(s.delay for s in slots),
        )

    def _slot(self, group: int, audited: WorkTime) -> AuditSlot:
        """Finds the first time after the audited instruction in which a group idles long enough to run it again."""
        free, needed = audited.end, audited.end - audited.start
        for work in self.work[group]:
            if work.stays:
                if work.place > audited.place and work.start - free >= needed:
                    return AuditSlot(0, free, group, work.place)
                free = max(free, work.end)
        return AuditSlot(max(0, free + needed - self.makespan), free, group, self._num_steps)

    def _with(
        self, added: Mapping[int, Sequence[GroupInstruction]], copies: Mapping[Value, Value], writes: Sequence[Value]
    ) -> Program:
        own: dict[int, list[Instruction]] = {}
        for place, instructions in sorted(added.items(), reverse=True):  # so that earlier places stay where they are
            for group, instruction in reversed(instructions):
                instructions_of = own.setdefault(group, [*self._program.groups[group]])
                instructions_of.insert(bisect_left(self._places[group], place), instruction)
        nbytes = self._program.nbytes
        new = {copy.name: nbytes.get(v.name, 0) for v, copy in copies.items()}
        new[_RESULT.name] = sum(nbytes.get(v.name, 0) for v in writes)
        groups = [tuple(own.get(g, instructions)) for g, instructions in enumerate(self._program.groups)]
        return dataclasses.replace(self._program, groups=tuple(groups), nbytes={**nbytes, **new})


def _on_clock(program: Program, steps: Sequence[GroupInstruction], counts: Mapping[int, int]) -> list[list[WorkTime]]:
    """Returns, for each group, its tasks and calls on the clock of :func:`merge`, in the order of `steps`."""
    is_later = later_values(program, counts)
    free_at, issued = [0] * program.num_groups, [0] * program.num_groups
    work: list[list[WorkTime]] = [[] for _ in program.groups]
    sent_at = 0
    for place, (group, instruction) in enumerate(steps):
        if isinstance(instruction, WORK):
            start = free_at[group]
            stays = isinstance(instruction, Call) or _stays(instruction, counts)
            if stays:
                issued[group], free_at[group] = start, start + duration(instruction)
            work[group].append(WorkTime(instruction, start, free_at[group], place, stays))
        elif isinstance(instruction, Send) and not is_later(instruction.value):
            sent_at = max(free_at[group], issued[instruction.to_group])
            free_at[group] = issued[group] = sent_at
        elif isinstance(instruction, Recv) and not is_later(instruction.value):
            free_at[group], issued[group] = max(free_at[group], sent_at), sent_at
    return work


def _stays(run: Run, counts: Mapping[int, int]) -> bool:
    return any(task.microbatch < counts.get(run.loop, task.microbatch + 1) for task in run.tasks)


def _taking(group: int, copies: Mapping[Value, Value], auditors: Sequence[int]) -> list[GroupInstruction]:
    """Returns the instructions of a group that copies arguments, and sends them."""
    found: list[GroupInstruction] = [(group, Call(TAKE, tuple(copies), tuple(copies.values())))]
    for auditor, copy in product(auditors, copies.values()):
        found += [(group, Send(copy, auditor)), (auditor, Recv(copy, group))]
    return [*found, *((group, Free(copy)) for copy in copies.values())]


def _again(group: int, copies: Mapping[Value, Value], donates: Collection[Value]) -> list[GroupInstruction]:
    """Returns the instructions of an auditor: it runs the instruction again, and frees all its values."""
    taken = tuple(copy for v, copy in copies.items() if v in donates)
    again = Call(f"{AGAIN}{group}", tuple(copies.values()), (_RESULT,), taken)
    left = [_RESULT, *(copy for copy in copies.values() if copy not in taken)]
    return [(group, again), *((group, Free(value)) for value in left)]
