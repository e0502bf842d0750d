"""An instruction of this process: its callable, and the slots that it reads and writes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mpmd.compile.executable import Executable
from scheduler import Task, Value

RUN, MOVE, ALIAS, SEND, RECV = range(5)
# The form that the executor walks: code, callable, slots that are read, written and freed, and the number.
Instruction = tuple[int, Any, Any, Any, tuple[int, ...], int]


class Crossing(NamedTuple):
    """A value that goes from one group to another."""

    value: Value
    source: int
    target: int
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class HostCall:
    """A host function that takes the role of an `Executable`."""

    name: str
    call: Callable[..., list[jax.Array]] | None

    def start(self) -> None:
        """Does nothing: a host function needs no loading."""


@dataclasses.dataclass
class BoundInstruction:
    """One instruction of this process.

    Attributes:
      act: the callable. RUN: from arrays to arrays; MOVE: from an array to an array; SEND and RECV: takes an array or
        None, and the number of the step's first piece; ALIAS: None. Before `Bindings.finish`, RUN has an `Executable`.
      reads, writes: slots; several for RUN, else one or None.
    """

    code: int  # RUN, MOVE (to another group of this process), ALIAS (the same devices), SEND or RECV (another process)
    act: Any
    reads: Any
    writes: Any
    group: int  # the group that it belongs to
    text: str  # the instruction in words
    tasks: tuple[Task, ...] = ()  # the tasks that a RUN runs
    frees: tuple[int, ...] = ()  # slots that are dead afterwards
    donates: tuple[int, ...] = ()  # slots of the buffers that a RUN takes over
    loop: int = 0  # the loop of the tasks
    crossing: Crossing | None = None  # the value that a transfer moves
    executable: Executable | None = None  # the executable of a RUN

    def __post_init__(self):
        if self.code == RUN and self.executable is None:  # a copy made after `Bindings.finish` has it already
            self.executable = self.act

    def walked(self, number: int) -> Instruction:
        """Returns the instruction in the form that the executor walks."""
        return self.code, self.act, self.reads, self.writes, self.frees, number

    @property
    def name(self) -> str:
        """The name of the program that it calls; else the instruction in words."""
        return self.text if self.executable is None else self.executable.name
