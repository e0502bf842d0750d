"""The instructions of a group of devices, the program that they make up, and the graph of tasks that it comes from."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.base.texts import counted
from scheduler.ordering import chain, readers_of
from scheduler.task import Reads, Task


class Value(NamedTuple):
    """The name of one array: of one microbatch (``a0[3]``), or of the whole step (``a0``)."""

    name: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return self.name if self.microbatch is None else f"{self.name}[{self.microbatch}]"


class Edge(NamedTuple):
    """One array that a task of each microbatch hands to other tasks of the same microbatch.

    Args:
        name: The value's name, unique in its graph.
        producer: Stage and kind (``F``, ``R``, ``I`` or ``W``) of the task that writes it.
        consumers: Stage and kind of each task that reads it.
        nbytes: Its size, for the peak of live bytes.
    """

    name: str
    producer: tuple[int, str]
    consumers: tuple[tuple[int, str], ...]
    nbytes: int = 0

    def __str__(self) -> str:
        readers = ", ".join(f"{stage}{kind}" for stage, kind in self.consumers)
        return f"{self.name}: {self.producer[0]}{self.producer[1]} -> {readers} ({self.nbytes} B)"


@dataclass(frozen=True)
class TaskGraph:
    """The values that tasks hand to each other, for one microbatch of a pipelined loop.

    Stated in kinds F, R, I and W; a stage has an R if an edge starts at it. A whole backward ``B`` of a schedule is the
    I and the W of its stage: it writes and reads whatever either does, and the values that pass between the two stay
    inside.

    Args:
        num_stages: The number of pipeline stages.
        edges: The arrays that pass between tasks.
        empty: Stage and kind of tasks that do nothing. They stay in the order, and read and write nothing.
        forward_only: The loop has no backward part: B, I and W tasks of a schedule are left out.
    """

    num_stages: int
    edges: tuple[Edge, ...]
    empty: frozenset[tuple[int, str]] = frozenset()
    forward_only: bool = False

    def __post_init__(self) -> None:
        faults = []
        for stage, kind in sorted(self.empty):
            if not self._has(stage, kind):
                faults.append(f"empty names ({stage}, {kind!r})")
        seen: set[str] = set()
        for edge in self.edges:
            if edge.name in seen:
                faults.append(f"two edges are named {edge.name!r}")
            seen.add(edge.name)
            for end in (edge.producer, *edge.consumers):
                if not self._has(*end):
                    faults.append(f"edge {edge.name!r} names the task {end!r}")
            if edge.producer in edge.consumers:
                faults.append(f"edge {edge.name!r} is read by the task that writes it")
        if faults:
            raise ValueError(
                "TaskGraph: "
                + "; ".join(faults)
                + f". Expected distinct edges between tasks of stages 0 to {self.num_stages - 1} and kinds F, R, I, W."
            )

    @property
    def recomputed(self) -> frozenset[int]:
        """The stages that have an R."""
        return frozenset(edge.producer[0] for edge in self.edges if edge.producer[1] == "R")

    def _has(self, stage: object, kind: object) -> bool:
        return isinstance(stage, int) and 0 <= stage < self.num_stages and kind in ("F", "R", "I", "W")

    def __str__(self) -> str:
        head = f"{counted(self.num_stages, 'stage')}, {'forward only' if self.forward_only else 'forward and backward'}"
        empty = [f"  nothing to do: {', '.join(f'{s}{k}' for s, k in sorted(self.empty))}"] if self.empty else []
        return "\n".join([head, *(f"  {edge}" for edge in self.edges), *empty])

    @classmethod
    def chain(cls, num_stages: int, activation_bytes: int = 1, forward_only: bool = False) -> "TaskGraph":
        """Returns an ordinary pipeline: activations down, gradients up, residuals kept from forward to backward.

        ``a{s}`` is the activation of stage s, ``r{s}`` the residuals of its backward, ``g{s}`` the gradient that its I
        hands to the stage before, ``w{s}`` the input of its W from its I. Each has ``activation_bytes`` bytes.
        """
        return cls.over(chain(num_stages), activation_bytes, forward_only)

    @classmethod
    def over(cls, reads: Reads, activation_bytes: int = 1, forward_only: bool = False) -> "TaskGraph":
        """Returns a pipeline of stages that read these others; ``g{s}.{t}`` is the gradient for stage t, if several.

        Args:
            reads: For each stage, the earlier stages whose activations it reads.
        """
        edges = []
        for s, (own, readers) in enumerate(zip(reads, readers_of(reads), strict=True)):
            if readers:
                edges.append(Edge(f"a{s}", (s, "F"), tuple((t, "F") for t in readers), activation_bytes))
            if forward_only:
                continue
            edges.append(Edge(f"r{s}", (s, "F"), ((s, "I"), (s, "W")), activation_bytes))
            for t in own:
                name = f"g{s}" if len(own) == 1 else f"g{s}.{t}"
                edges.append(Edge(name, (s, "I"), ((t, "I"),), activation_bytes))
            edges.append(Edge(f"w{s}", (s, "I"), ((s, "W"),), activation_bytes))
        return cls(len(reads), tuple(edges), forward_only=forward_only)


@dataclass(frozen=True, slots=True)
class Run:
    """Runs a task's executable.

    Args:
        task: The task.
        reads: Its inputs, all alive in this group.
        writes: Its outputs. A value that is read, donated and written is updated in place.
        donates: The values of ``reads`` that are donated to it: they are gone afterwards, as after a Free.
        also: Further tasks fused into the same executable; reads and writes are those of all, without internal values.
        loop: The loop of the step that the task belongs to.
    """

    task: Task
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    donates: tuple[Value, ...] = ()
    also: tuple[Task, ...] = ()
    loop: int = 0

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks of this executable."""
        return (self.task, *self.also)

    def __str__(self) -> str:
        name = "+".join(str(task) for task in self.tasks) + (f" (loop {self.loop})" if self.loop else "")
        return f"run {name}{_signature(self.reads, self.writes, self.donates)}"


@dataclass(frozen=True, slots=True)
class Call:
    """Runs an executable that is not a task: work before, between or after the loops of a step."""

    name: str
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    donates: tuple[Value, ...] = ()

    def __str__(self) -> str:
        return f"call {self.name}{_signature(self.reads, self.writes, self.donates)}"


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a value to another group, which has a matching Recv. The value stays alive here."""

    value: Value
    to_group: int

    def __str__(self) -> str:
        return f"send {self.value} to group {self.to_group}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Receives a value from another group, which has a matching Send. The value is alive here from now on."""

    value: Value
    from_group: int

    def __str__(self) -> str:
        return f"recv {self.value} from group {self.from_group}"


@dataclass(frozen=True, slots=True)
class Free:
    """Frees a value: nothing in this group reads or sends it any more."""

    value: Value

    def __str__(self) -> str:
        return f"free {self.value}"


Instruction = Run | Call | Send | Recv | Free
WORK = (Run, Call)
TRANSFERS = (Send, Recv)


class Transfer(NamedTuple):
    """A value that goes from one group to another."""

    value: Value
    source: int
    target: int

    @classmethod
    def of(cls, group: int, instruction: Send | Recv) -> "Transfer":
        """Returns the transfer that a group's instruction takes part in."""
        if isinstance(instruction, Send):
            return cls(instruction.value, group, instruction.to_group)
        return cls(instruction.value, instruction.from_group, group)


def _signature(reads: tuple[Value, ...], writes: tuple[Value, ...], donates: tuple[Value, ...]) -> str:
    taken = set(donates)
    arguments = ", ".join(f"{value}!" if value in taken else str(value) for value in reads)
    results = ", ".join(map(str, writes))
    return f"({arguments})" + (f" -> {results}" if results else "")


@dataclass(frozen=True)
class Program:
    """The instructions of each group, in order, and the conditions around them. Plain data; :func:`check` proves it.

    Args:
        groups: For each group, its instructions.
        placement: For each stage, the group that runs it.
        tasks: For each loop, the tasks it must run, in kinds F, R, I and W (a Run of ``B`` does its I and its W).
        inputs: For each group, the values that are alive at the start. Empty means none.
        outputs: For each group, the values that must be alive at the end. Empty means none.
        nbytes: The size of each value by its name; a name that is missing counts as 0.
        placements: For each loop, its own placement. Empty means that all loops have the one above.

    Examples:
        >>> from scheduler import GPipe, TaskGraph, lower
        >>> print(lower(TaskGraph.chain(2, forward_only=True), GPipe(2), 1))
        2 groups, 2 stages, 6 instructions
        group 0
             0  run 0F0() -> a0[0]
             1  send a0[0] to group 1
             2  free a0[0]
        group 1
             0  recv a0[0] from group 0
             1  run 1F0(a0[0])
             2  free a0[0]
    """

    groups: tuple[tuple[Instruction, ...], ...]
    placement: tuple[int, ...]
    tasks: tuple[Set[Task], ...]
    inputs: tuple[frozenset[Value], ...] = ()
    outputs: tuple[frozenset[Value], ...] = ()
    nbytes: Mapping[str, int] = field(default_factory=dict)
    placements: tuple[tuple[int, ...], ...] = ()

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def placement_of(self, loop: int) -> tuple[int, ...]:
        """Returns, for each stage of a loop, the group that runs it."""
        return self.placements[loop] if self.placements else self.placement

    def inputs_of(self, group: int) -> frozenset[Value]:
        """Returns the values alive in ``group`` at the start."""
        return self.inputs[group] if group < len(self.inputs) else frozenset()

    def outputs_of(self, group: int) -> frozenset[Value]:
        """Returns the values that must be alive in ``group`` at the end."""
        return self.outputs[group] if group < len(self.outputs) else frozenset()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = sum(map(len, self.groups))
        groups, stages = counted(self.num_groups, "group"), counted(self.num_stages, "stage")
        yield f"{groups}, {stages}, {counted(count, 'instruction')}"
        for group, instructions in enumerate(self.groups):
            yield f"group {group}"
            if self.inputs_of(group):
                yield f"    starts with {', '.join(map(str, sorted(self.inputs_of(group), key=str)))}"
            for index, instruction in enumerate(instructions):
                yield f"  {index:4d}  {instruction}"
            if self.outputs_of(group):
                yield f"    ends with {', '.join(map(str, sorted(self.outputs_of(group), key=str)))}"
