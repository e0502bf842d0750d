"""An instruction of this process: what it calls, and the slots that it reads and writes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mpmd.compile.executable import Executable
from scheduler import Task, Value

RUN, MOVE, ALIAS, SEND, RECV = range(5)
# As the executor walks it: a code, what to call, slots that are read, written and freed, and its number.
Instruction = tuple[int, Any, Any, Any, tuple[int, ...], int]


class Crossing(NamedTuple):
    """A value that goes from one group to another."""

    value: Value
    source: int
    target: int
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class HostCall:
    """A function of the host that stands for an `Executable`."""

    name: str
    call: Callable[..., list[jax.Array]] | None

    def start(self) -> None:
        """There is nothing to load."""


@dataclasses.dataclass
class BoundInstruction:
    """One instruction of this process.

    Attributes:
      code: RUN, MOVE (to another group of this process), ALIAS (the same devices), SEND or RECV (another process).
      act: of RUN, from arrays to arrays; of MOVE, from an array to one; of SEND and RECV, from an array or None and the
        number of the step's first piece; None of ALIAS. Until `Bindings.finish` an `Executable`, which waits.
      reads, writes: slots; several of RUN, else one or None.
      group: the group that it belongs to.
      text: the instruction in words.
      tasks: of RUN, the tasks that it runs.
      frees: slots that nobody reads afterwards.
      donates: of RUN, slots whose memory it takes over.
      loop: of tasks, the loop that they belong to.
      crossing: of transfers.
      executable: of RUN.
    """

    code: int
    act: Any
    reads: Any
    writes: Any
    group: int
    text: str
    tasks: tuple[Task, ...] = ()
    frees: tuple[int, ...] = ()
    donates: tuple[int, ...] = ()
    loop: int = 0
    crossing: Crossing | None = None
    executable: Executable | None = None

    def __post_init__(self):
        if self.code == RUN and self.executable is None:  # one that was replaced after `Bindings.finish` has its own
            self.executable = self.act

    def walked(self, number: int) -> Instruction:
        """As the executor walks it."""
        return self.code, self.act, self.reads, self.writes, self.frees, number

    @property
    def name(self) -> str:
        """Of the program that it calls; else the instruction in words."""
        return self.text if self.executable is None else self.executable.name
