"""Proves that every value is there when it is used, and counts the bytes that are alive at once."""

from functools import cached_property

from scheduler.programs.instructions import WORK, Call, Free, Program, Recv, Run, Send, Value


def located(group: int, index: int, instruction: object) -> str:
    """Returns an instruction and its place, for messages."""
    return f"group {group}, #{index} {instruction}"


class Liveness:
    """One group's list, run once against the set of values that are alive.

    A right list costs a few set operations an instruction. Why a value is absent is only looked up for a fault.
    """

    def __init__(self, program: Program, group: int) -> None:
        self.program = program
        self.group = group
        self.alive = set(program.inputs_of(group))
        self.live = self.peak = sum(program.nbytes.get(value.name, 0) for value in self.alive)  # peak: the most bytes
        self.faults: list[str] = []
        self.index = 0

    def run(self) -> list[str]:
        """Runs the list; returns its faults.

        Raises:
            TypeError: An entry is not an instruction, or contains something that is not a value or a number.
        """
        alive = self.alive
        for index, instruction in enumerate(self.program.groups[self.group]):
            self.index = index
            if type(instruction) is Free:
                if not self._let_go(instruction.value):
                    self._fault(self._why_not_freed(instruction.value))
            elif type(instruction) is Send:
                if instruction.value not in alive:
                    self._fault(f"sends {instruction.value} {self._why_absent(instruction.value)}")
            elif type(instruction) is Recv:
                self._make("receives", instruction.value)
            elif isinstance(instruction, WORK):
                self._work(instruction)
            else:
                raise TypeError(f"{instruction!r} is no instruction")
        outputs = self.program.outputs_of(self.group)
        self.faults += [
            f"group {self.group}: {value} is never freed, and is no output"
            for value in sorted(alive - outputs, key=self._first_made)
        ]
        self.index = len(self.program.groups[self.group])
        for value in sorted(outputs - alive, key=str):
            self.faults.append(f"group {self.group}: output {value} is {self._fate(value) or 'never made there'}")
        return self.faults

    def _work(self, instruction: Run | Call) -> None:
        if not self.alive.issuperset(instruction.reads):
            for value in instruction.reads:
                if value not in self.alive:
                    self._fault(f"reads {value} {self._why_absent(value)}")
        for value in instruction.donates:
            if value not in instruction.reads:
                self._fault(f"donates {value}, which it does not read")
            else:
                self._let_go(value)
        for value in instruction.writes:
            self._make("writes", value)

    def _make(self, verb: str, value: Value) -> None:
        if type(value) is not Value:
            raise TypeError(f"{value!r} is no value")
        if value in self.alive:
            self._fault(f"{verb} {value}, which is already there")
            return
        self.alive.add(value)
        self.live += self.program.nbytes.get(value.name, 0)
        if self.live > self.peak:
            self.peak = self.live

    def _let_go(self, value: Value) -> bool:
        """Frees a value; returns whether it was alive."""
        if value not in self.alive:
            return False
        self.alive.remove(value)
        self.live -= self.program.nbytes.get(value.name, 0)
        return True

    # --- the words for a fault -----------------------------------------------------------------------

    def _fault(self, text: str) -> None:
        where = located(self.group, self.index, self.program.groups[self.group][self.index])
        self.faults.append(f"{where}: {text}")

    def _fate(self, value: Value) -> str | None:
        """Returns what became of a value before this point: freed, donated, or None if it was never there."""
        for index in range(self.index - 1, self._first_made(value), -1):
            instruction = self.program.groups[self.group][index]
            if isinstance(instruction, Free) and instruction.value == value:
                return "freed"
            if isinstance(instruction, WORK) and value in instruction.donates:
                return "donated"
        return None

    def _why_not_freed(self, value: Value) -> str:
        match self._fate(value):
            case "freed":
                return f"{value} was already freed"
            case "donated":
                return f"frees {value} after it was donated"
            case _:
                return f"frees {value} {self._why_absent(value)}"

    def _why_absent(self, value: Value) -> str:
        if fate := self._fate(value):
            return f"after it was {fate}"
        if value in self._made:
            index = self._made[value]
            verb = "arrives" if isinstance(self.program.groups[self.group][index], Recv) else "is written"
            return f"before it {verb} at #{index}"
        others = (g for g in range(self.program.num_groups) if g != self.group and _makes(self.program, g, value))
        other = next(others, None)
        return "which nobody writes" if other is None else f"which is in group {other} and never arrives here"

    def _first_made(self, value: Value) -> int:
        """Returns the first instruction that makes a value; for an input, the place before the first one."""
        never = len(self.program.groups[self.group])
        return -1 if value in self.program.inputs_of(self.group) else self._made.get(value, never)

    @cached_property
    def _made(self) -> dict[Value, int]:
        """The first instruction that makes each value, for values that this group writes or receives."""
        made: dict[Value, int] = {}
        for index, instruction in enumerate(self.program.groups[self.group]):
            for value in (instruction.value,) if isinstance(instruction, Recv) else getattr(instruction, "writes", ()):
                made.setdefault(value, index)
        return made


def _makes(program: Program, group: int, value: Value) -> bool:
    """Returns whether a group starts with a value or writes it."""
    return value in program.inputs_of(group) or any(
        value in instruction.writes for instruction in program.groups[group] if isinstance(instruction, WORK)
    )
