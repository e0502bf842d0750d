"""Proof that a program is right, before anything runs: every fault at once, and the memory it needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from scheduler.errors import ScheduleError
from scheduler.ordering import coverage_faults, raise_faults
from scheduler.programs.instructions import TRANSFERS, WORK, Call, Free, Instruction, Program, Recv, Run, Send, Value
from scheduler.task import KINDS, Task

_ON_ONE_VALUE = (*TRANSFERS, Free)


@dataclass(frozen=True)
class Report:
    """What :func:`check` found out about a right program.

    Attributes:
        peak_bytes: For each group, the most bytes alive at once, inputs and outputs included.
        num_instructions: For each group, the length of its list.
        num_transfers: How many values cross from one group to another.
    """

    peak_bytes: tuple[int, ...]
    num_instructions: tuple[int, ...]
    num_transfers: int

    def __str__(self) -> str:
        rows = [
            f"  group {group}: {count} instructions, at most {peak} bytes alive"
            for group, (count, peak) in enumerate(zip(self.num_instructions, self.peak_bytes, strict=True))
        ]
        return "\n".join([f"right: {len(rows)} groups, {self.num_transfers} transfers", *rows])


def check(program: Program) -> Report:
    """Proves that each group can run its list in order, and that every value is where it is used, when it is used.

    Proved: each loop runs every task once, in the group of its stage, as B or as I and W; nothing is read before it
    is written or has arrived, nor after a free or a donation; everything is freed once, outputs excepted; sends and
    receives match, in the same order for each pair of groups; and no deadlock, even if a send blocks until the other
    group has come to its receive, and a receive until the value is sent. Linear in instructions.

    Args:
        program: Any program, however broken.

    Returns:
        The peak of live bytes for each group, among others.

    Raises:
        ScheduleError: With every fault that was found. A deadlock is told as its cycle.

    Example:
        >>> from scheduler import OneFOneB, TaskGraph, lower
        >>> check(lower(TaskGraph.chain(4, activation_bytes=10), OneFOneB(4), 8)).peak_bytes
        (50, 60, 50, 30)
    """
    faults, legible = _shape_faults(program)
    if legible:
        faults += _task_faults(program)
        walks = [_Walk(program, group) for group in range(program.num_groups)]
        written = {value: walk.group for walk in walks for value in walk.written}
        for one in walks:
            faults += one.run(written)
        matched = _transfer_faults(program)
        faults += matched
        faults += _deadlock_faults(_only_matched(program) if matched else program)
    else:
        walks = []
    raise_faults(ScheduleError, "check: the program", faults)
    return Report(
        tuple(one.peak for one in walks),
        tuple(map(len, program.groups)),
        sum(isinstance(step, Send) for steps in program.groups for step in steps),
    )


def _at(group: int, index: int, instruction: object) -> str:
    return f"group {group}, #{index} {instruction}"


def _shape_faults(program: Program) -> tuple[list[str], bool]:
    """What makes the program unreadable: no instruction at all, or groups that do not exist."""
    faults = []
    legible = True
    groups = range(program.num_groups)
    for name, sets in (("inputs", program.inputs), ("outputs", program.outputs)):
        if len(sets) not in (0, program.num_groups):
            faults.append(
                f"{name} has {len(sets)} entries; expected one for each of {program.num_groups} groups, or none"
            )
    for stage, group in enumerate(program.placement):
        if group not in groups:
            faults.append(f"stage {stage} is placed in group {group!r}; expected 0 to {program.num_groups - 1}")
    for group, instructions in enumerate(program.groups):
        for index, instruction in enumerate(instructions):
            values: tuple[object, ...]
            if isinstance(instruction, WORK):
                values = (*instruction.reads, *instruction.writes, *instruction.donates)
            elif isinstance(instruction, _ON_ONE_VALUE):
                values = (instruction.value,)
            else:
                faults.append(f"{_at(group, index, repr(instruction))}: not an instruction")
                legible = False
                continue
            strange = [value for value in values if not isinstance(value, Value)]
            if isinstance(instruction, Run):
                strange = [*(task for task in instruction.tasks if not _is_task(task)), *strange]
            if strange:
                faults.append(f"group {group}, #{index}: {strange[0]!r} is no task and no value")
                legible = False
            elif isinstance(instruction, TRANSFERS):
                other = instruction.to_group if isinstance(instruction, Send) else instruction.from_group
                if other not in groups:
                    faults.append(f"{_at(group, index, instruction)}: there is no group {other!r}")
                elif other == group:
                    faults.append(f"{_at(group, index, instruction)}: that is the group itself")
    return faults, legible


def _is_task(task: object) -> bool:
    return (
        isinstance(task, Task)
        and isinstance(task.stage, int)
        and isinstance(task.microbatch, int)
        and task.kind in KINDS
    )


def _task_faults(program: Program) -> list[str]:
    runs: dict[int, list[tuple[int, Task]]] = defaultdict(list)
    for group, instructions in enumerate(program.groups):
        for instruction in instructions:
            if isinstance(instruction, Run):
                runs[instruction.loop] += [(group, task) for task in instruction.tasks]
    faults = []
    for loop in sorted(set(range(len(program.tasks))) | set(runs), key=repr):
        where = f" of loop {loop}" if len(program.tasks) > 1 else ""
        if not isinstance(loop, int) or not 0 <= loop < len(program.tasks):
            faults.append(f"task {runs[loop][0][1]} belongs to loop {loop!r}; the program has {len(program.tasks)}")
            continue
        expected = frozenset(part for task in program.tasks[loop] for part in task.parts)
        outside = sorted({task.stage for task in expected if not 0 <= task.stage < len(program.placement)})
        if outside:
            faults.append(f"stages {outside}{where} have no place; placement names {len(program.placement)} stages")
            expected = frozenset(task for task in expected if task.stage not in outside)
        faults += coverage_faults(runs[loop], program.placement, expected, where)
    return faults


class _Walk:
    """One group's list, run against a table of what is alive."""

    def __init__(self, program: Program, group: int) -> None:
        self.program = program
        self.group = group
        self.state: dict[Value, str] = dict.fromkeys(program.inputs_of(group), "alive")
        self.arrives: dict[Value, int] = {}
        self.written: set[Value] = set(self.state)
        for index, instruction in enumerate(program.groups[group]):
            made = (instruction.value,) if isinstance(instruction, Recv) else getattr(instruction, "writes", ())
            for value in made:
                self.arrives.setdefault(value, index)
            if not isinstance(instruction, Recv):
                self.written.update(made)
        self.live = sum(map(self._size, self.state))
        self.peak = self.live
        self.faults: list[str] = []
        self.index = 0

    def run(self, written: dict[Value, int]) -> list[str]:
        for index, instruction in enumerate(self.program.groups[self.group]):
            self.index = index
            if isinstance(instruction, WORK):
                self._execute(instruction, written)
            elif isinstance(instruction, Send):
                self._use("sends", instruction.value, written)
            elif isinstance(instruction, Recv):
                self._create("receives", instruction.value)
            else:
                self._free(instruction.value, written)
        outputs = self.program.outputs_of(self.group)
        for value, state in self.state.items():
            if state == "alive" and value not in outputs:
                self.faults.append(f"group {self.group}: {value} is never freed, and is no output")
        for value in sorted(outputs, key=str):
            state = self.state.get(value, "never made there")
            if state != "alive":
                self.faults.append(f"group {self.group}: output {value} is {state}")
        return self.faults

    def _fault(self, text: str) -> None:
        where = _at(self.group, self.index, self.program.groups[self.group][self.index])
        self.faults.append(f"{where}: {text}")

    def _size(self, value: Value) -> int:
        return self.program.nbytes.get(value.name, 0)

    def _execute(self, instruction: Run | Call, written: dict[Value, int]) -> None:
        for value in instruction.reads:
            self._use("reads", value, written)
        for value in instruction.donates:
            if value not in instruction.reads:
                self._fault(f"donates {value}, which it does not read")
            elif self.state.get(value) == "alive":
                self.state[value] = "donated"
                self.live -= self._size(value)
        for value in instruction.writes:
            self._create("writes", value)

    def _use(self, verb: str, value: Value, written: dict[Value, int]) -> None:
        state = self.state.get(value)
        if state is None:
            self._fault(f"{verb} {value} {self._why_absent(value, written)}")
        elif state != "alive":
            self._fault(f"{verb} {value} after it was {state}")

    def _why_absent(self, value: Value, written: dict[Value, int]) -> str:
        if value in self.arrives:
            source = self.program.groups[self.group][self.arrives[value]]
            verb = "arrives" if isinstance(source, Recv) else "is written"
            return f"before it {verb} at #{self.arrives[value]}"
        if value in written:
            return f"which is in group {written[value]} and never arrives here"
        return "which nobody writes"

    def _create(self, verb: str, value: Value) -> None:
        if self.state.get(value) == "alive":
            self._fault(f"{verb} {value}, which is already there")
            return
        self.state[value] = "alive"
        self.live += self._size(value)
        self.peak = max(self.peak, self.live)

    def _free(self, value: Value, written: dict[Value, int]) -> None:
        state = self.state.get(value)
        if state == "freed":
            self._fault(f"{value} was already freed")
        elif state == "donated":
            self._fault(f"frees {value} after it was donated")
        elif state is None:
            self._fault(f"frees {value} {self._why_absent(value, written)}")
        else:
            self.state[value] = "freed"
            self.live -= self._size(value)


def _transfer_faults(program: Program) -> list[str]:
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


def _deadlock_faults(program: Program) -> list[str]:
    """The circle in which groups wait for each other's transfers, if any; every transfer has its partner."""
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
    waiting: set[tuple[bool, int, int, Value]] = set()
    ready = list(range(program.num_groups))
    while ready:
        group = ready.pop()
        instructions = program.groups[group]
        index = position[group]
        while index < len(instructions):
            instruction = instructions[index]
            if isinstance(instruction, TRANSFERS):
                is_send, other = isinstance(instruction, Send), _partner(instruction)
                source, target = (group, other) if is_send else (other, group)
                if (not is_send, source, target, instruction.value) not in waiting:
                    waiting.add((is_send, source, target, instruction.value))
                    break
                waiting.remove((not is_send, source, target, instruction.value))
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
    counts: dict[bool, Counter[tuple[int, int, Value]]] = {True: Counter(), False: Counter()}

    def key(group: int, instruction: Send | Recv) -> tuple[int, int, Value]:
        if isinstance(instruction, Send):
            return group, instruction.to_group, instruction.value
        return instruction.from_group, group, instruction.value

    for group, instructions in enumerate(program.groups):
        for instruction in instructions:
            if isinstance(instruction, TRANSFERS):
                counts[isinstance(instruction, Send)][key(group, instruction)] += 1
    both = counts[True] & counts[False]
    groups = []
    for group, instructions in enumerate(program.groups):
        seen: dict[bool, Counter[tuple[int, int, Value]]] = {True: Counter(), False: Counter()}
        kept = []
        for instruction in instructions:
            if isinstance(instruction, TRANSFERS):
                mine, side = key(group, instruction), seen[isinstance(instruction, Send)]
                side[mine] += 1
                if side[mine] > both[mine]:
                    continue
            kept.append(instruction)
        groups.append(tuple(kept))
    return Program(tuple(groups), program.placement, program.tasks)
