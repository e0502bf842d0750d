"""Adds up the bytes that a compiled step needs on each device, for any checked program.

A walk over the program of each group adds up the live values: arguments, accumulators, and the activations of the
microbatches in flight, each in its sharding.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import REPLICATED, Layout, fit
from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.executable import Executable, nbytes_on_a_device
from mpmd.compile.program import edge_name
from mpmd.compile.step import StepPrograms
from mpmd.partition.outline import Outline
from mpmd.report.roles import Roles
from scheduler import Call, Free, Program, Recv, Run, Value

KINDS = ("parameters", "state", "data", "gradients", "activations", "temporaries")
# From a value, its bytes on each device and whether they are in host memory, to other bytes and another place.
Change = Callable[[Value, int, bool], tuple[int, bool]]


def measured(programs: StepPrograms, program: Program) -> dict[int, dict[str, int]]:
    """Returns the bytes per device of each group, with the temporaries that XLA reports.

    Returns:
      For each group of this process: `parameters`, `state` (the optimizer's state, and other returned arguments),
      `data`, their sum `arguments` (new state takes the place of the donated argument); the peaks of `gradients`
      (accumulators, values computed from them, and new state while the old one lives) and of `activations` (values of
      microbatches); the largest `temporaries` of an executable; `peak`, the most of all kinds together at one time;
      and `host`, the peak in host memory.
    """
    sizes = Sizes(programs.outline, programs.mesh, programs.layouts)
    temporaries = temporaries_of(programs)
    return {g: peaks(program, g, sizes, temporaries) for g in programs.mesh.local_groups}


def over_time(programs: StepPrograms, program: Program, group: int) -> list[dict[str, int]]:
    """Returns the bytes of each of `KINDS` on a device of a local group, after each instruction that adds any."""
    sizes = Sizes(programs.outline, programs.mesh, programs.layouts)
    return list(_alive(program, group, sizes, temporaries_of(programs)))


def temporaries_of(programs: StepPrograms) -> Callable[[Run | Call], int]:
    """Returns a function for the bytes on each device that XLA reports as an instruction's temporaries."""

    @functools.cache
    def of_one(executable: Executable) -> int:
        return getattr(executable.call.memory_analysis(), "temp_size_in_bytes", 0)

    return lambda instruction: max(map(of_one, programs.executables_of(instruction)), default=0)


class Sizes:
    """The bytes of each value of a program on a device of a group, and its kind.

    Args:
      layouts: spec and memory kind of each variable of the step; variables without a layout are replicated.
    """

    def __init__(self, outline: Outline, mesh: MpmdMesh, layouts: Mapping[compat.Var, Layout]):
        roles = Roles(outline)
        role, args = roles.role, roles.args
        self._mesh, self._layouts = mesh, layouts
        self._vars = {name: v for v, name in outline.names.items()}
        for loop in outline.loops:
            self._vars.update((edge_name(loop, v), v) for v in loop.partition.names)
        self._kinds = {outline.names[v]: role.get(v, "data") for v in outline.trace.jaxpr.invars}
        self.successors = {  # for each new state leaf, the argument that it replaces
            outline.names[v]: outline.names[args[donor]]
            for (v, _), donor in zip(outline.outputs, outline.donors, strict=True)
            if donor is not None and not isinstance(v, compat.Literal)
        }
        self._known: dict[tuple[str, int], tuple[int, bool]] = {}

    def nbytes(self, name: str, group: int) -> tuple[int, bool]:
        """Returns the bytes of a variable on each device, and whether they are in host memory."""
        key = name, group
        if key not in self._known:
            v = self._vars[name]
            layout = self._layouts.get(v, REPLICATED)
            nbytes = nbytes_on_a_device(v, fit(layout, self._mesh.groups[group], v.aval.shape))
            self._known[key] = nbytes, (layout[1] or compat.memory_kind(v.aval)) in ("pinned_host", "unpinned_host")
        return self._known[key]

    def kind(self, value: Value) -> str:
        """Returns one of `KINDS`."""
        return "activations" if value.microbatch is not None else self._kinds.get(value.name, "gradients")


def peaks(
    program: Program, group: int, sizes: Sizes, temporaries: Callable[[Run | Call], int], change: Change | None = None
) -> dict[str, int]:
    """Returns the most bytes of each kind that a device of a group holds at one time, in the form of `measured`, after
    a change of the sizes of some values.
    """
    most: dict[str, int] = dict.fromkeys((*KINDS, "peak", "host"), 0)
    for now in _alive(program, group, sizes, temporaries, change):
        for kind, nbytes in now.items():
            most[kind] = max(most[kind], nbytes)
    return {"arguments": sum(most[kind] for kind in ("parameters", "state", "data")), **most}


def _alive(
    program: Program, group: int, sizes: Sizes, temporaries: Callable[[Run | Call], int], change: Change | None = None
) -> Iterator[dict[str, int]]:
    """Yields bytes by kind, in all (`peak`) and in host memory (`host`): at first, and when an instruction adds any."""
    account = _Account(group, sizes, change)
    account.add(program.inputs[group])
    yield account.now()
    for instruction in program.groups[group]:
        if isinstance(instruction, (Run, Call)):
            account.remove(v for v in instruction.donates if v not in instruction.writes)
            account.add(instruction.writes)
            yield account.now(temporaries(instruction))
        elif isinstance(instruction, Recv):
            account.add([instruction.value])
            yield account.now()
        elif isinstance(instruction, Free):
            account.remove([instruction.value])


class _Account:
    """The live values in a group."""

    def __init__(self, group: int, sizes: Sizes, change: Change | None):
        self._group, self._sizes, self._change = group, sizes, change
        self._live: dict[Value, str] = {}  # with its kind
        self._gone: set[str] = set()
        self._now: dict[str, int] = dict.fromkeys((*KINDS, "host"), 0)

    def add(self, values: Iterable[Value]) -> None:
        for value in values:
            if value not in self._live:  # else it is an accumulator that a task updates in place
                self._live[value] = self._kind(value)
                self._count(value, 1)

    def remove(self, values: Iterable[Value]) -> None:
        for value in values:
            if value in self._live:
                self._count(value, -1)
                del self._live[value]
                self._gone.add(value.name)

    def now(self, temporaries: int = 0) -> dict[str, int]:
        now = {**self._now, "temporaries": temporaries}
        return {**now, "peak": sum(now[kind] for kind in KINDS)}

    def _kind(self, value: Value) -> str:
        """Returns the kind of a value; for new state, the kind of the argument that it replaces, once that is gone."""
        replaced = self._sizes.successors.get(value.name)
        return self._sizes.kind(Value(replaced) if replaced in self._gone else value)

    def _count(self, value: Value, sign: int) -> None:
        nbytes, is_in_host = self._sizes.nbytes(value.name, self._group)
        if self._change is not None:
            nbytes, is_in_host = self._change(value, nbytes, is_in_host)
        self._now["host" if is_in_host else self._live[value]] += sign * nbytes
