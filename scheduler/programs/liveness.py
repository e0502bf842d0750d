"""Proves that every value is there when it is used, and counts the bytes that are alive at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from scheduler.programs.instructions import WORK, Call, Program, Recv, Run, Send, Value


def located(group: int, index: int, instruction: object) -> str:
    """An instruction and where it is, for messages."""
    return f"group {group}, #{index} {instruction}"


def groups_that_write(program: Program) -> dict[Value, int]:
    """For each value, the group that writes it or starts with it."""
    writers: dict[Value, int] = {}
    for group, instructions in enumerate(program.groups):
        writers.update(dict.fromkeys(program.inputs_of(group), group))
        for instruction in instructions:
            if isinstance(instruction, WORK):
                writers.update(dict.fromkeys(instruction.writes, group))
    return writers


class Liveness:
    """One group's list, run against a table of what is alive.

    Args:
        program: The program.
        group: The group.
        writers: For each value, the group that writes it.

    Attributes:
        peak: The most bytes alive at once.
    """

    def __init__(self, program: Program, group: int, writers: Mapping[Value, int]) -> None:
        self.program = program
        self.group = group
        self.writers = writers
        self.state: dict[Value, str] = dict.fromkeys(program.inputs_of(group), "alive")
        self.live = self.peak = sum(map(self._size, self.state))
        self.faults: list[str] = []
        self.index = 0

    def run(self) -> list[str]:
        """Runs the list once; returns its faults."""
        for index, instruction in enumerate(self.program.groups[self.group]):
            self.index = index
            if isinstance(instruction, WORK):
                self._execute(instruction)
            elif isinstance(instruction, Send):
                self._use("sends", instruction.value)
            elif isinstance(instruction, Recv):
                self._create("receives", instruction.value)
            else:
                self._free(instruction.value)
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
        where = located(self.group, self.index, self.program.groups[self.group][self.index])
        self.faults.append(f"{where}: {text}")

    def _size(self, value: Value) -> int:
        return self.program.nbytes.get(value.name, 0)

    def _execute(self, instruction: Run | Call) -> None:
        for value in instruction.reads:
            self._use("reads", value)
        for value in instruction.donates:
            if value not in instruction.reads:
                self._fault(f"donates {value}, which it does not read")
            elif self.state.get(value) == "alive":
                self.state[value] = "donated"
                self.live -= self._size(value)
        for value in instruction.writes:
            self._create("writes", value)

    def _use(self, verb: str, value: Value) -> None:
        state = self.state.get(value)
        if state is None:
            self._fault(f"{verb} {value} {self._why_absent(value)}")
        elif state != "alive":
            self._fault(f"{verb} {value} after it was {state}")

    @cached_property
    def _first_made(self) -> dict[Value, int]:
        """For each value that this group writes or receives, the first instruction that does."""
        made: dict[Value, int] = {}
        for index, instruction in enumerate(self.program.groups[self.group]):
            for value in (instruction.value,) if isinstance(instruction, Recv) else getattr(instruction, "writes", ()):
                made.setdefault(value, index)
        return made

    def _why_absent(self, value: Value) -> str:
        if value in self._first_made:
            index = self._first_made[value]
            verb = "arrives" if isinstance(self.program.groups[self.group][index], Recv) else "is written"
            return f"before it {verb} at #{index}"
        if value in self.writers:
            return f"which is in group {self.writers[value]} and never arrives here"
        return "which nobody writes"

    def _create(self, verb: str, value: Value) -> None:
        if self.state.get(value) == "alive":
            self._fault(f"{verb} {value}, which is already there")
            return
        self.state[value] = "alive"
        self.live += self._size(value)
        self.peak = max(self.peak, self.live)

    def _free(self, value: Value) -> None:
        state = self.state.get(value)
        if state == "freed":
            self._fault(f"{value} was already freed")
        elif state == "donated":
            self._fault(f"frees {value} after it was donated")
        elif state is None:
            self._fault(f"frees {value} {self._why_absent(value)}")
        else:
            self.state[value] = "freed"
            self.live -= self._size(value)
