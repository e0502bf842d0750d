"""The work and transfers of each microbatch of a list, as a share of the largest one's.

A step over a list is described by the step for its largest microbatch. Figures of a whole step count each microbatch
with its share of the largest. In a step without lists every share is 1.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.executable import Executable
from mpmd.compile.program import loop_graph
from mpmd.compile.step import StepPrograms
from mpmd.costs.machine import Machine
from mpmd.costs.work import Work
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.partition.outline import Loop, Outline, is_of_list
from mpmd.report.memory import Sizes
from mpmd.report.roles import Roles
from mpmd.report.task_costs import costs_of, task_works
from scheduler import Call, Costs, Program, Run, Task, Value


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchFigures:
    """The figures of a microbatch."""

    costs: Costs  # seconds and bytes of its tasks, by the roofline
    works: Mapping[Place, Work]  # the work of each task that computes something
    sent: Mapping[tuple[tuple[int, str], int], int]  # bytes that go from the tasks of a stage and kind to a group
    kept: int  # bytes that all stages keep for its backward, over all devices
    data: int  # bytes of its own arrays
    rows: int  # the length of their first axis


@dataclasses.dataclass(frozen=True)
class ListFigures:
    """The figures of a list's microbatches."""

    largest: MicrobatchFigures  # the microbatch that the step is described for
    producers: Mapping[str, tuple[int, str]]  # by a value's name, the stage and kind of the task that makes it
    microbatches: tuple[MicrobatchFigures, ...]  # all microbatches; microbatches of one shape are the same object

    @property
    def costs(self) -> Costs:
        """The costs of the largest microbatch, with the costs of each microbatch."""
        return dataclasses.replace(self.largest.costs, microbatches=tuple(one.costs for one in self.microbatches))


# For some tasks: the place, the figures of its microbatch, and the figures of the largest one.
_Beside = tuple[tuple[Place, MicrobatchFigures, MicrobatchFigures], ...]


class Shares:
    """The shares of all microbatches of a step, from the figures of each loop over a list, by the loop's number."""

    def __init__(self, lists: Mapping[int, ListFigures] | None = None):
        self.lists = lists or {}
        self._loop_of = {name: loop for loop, found in self.lists.items() for name in found.producers}

    def seconds(self, loop: int, tasks: Sequence[Task]) -> float:
        """Returns the seconds of some tasks of a loop, divided by the seconds for the largest microbatch."""
        return _share(self._beside(loop, tasks), lambda one, p: one.costs.duration(p.kind, p.stage))  # type: ignore[arg-type]

    def sent(self, value: Value, target: int) -> float:
        """Returns the bytes of a value to a group, divided by the bytes for the largest microbatch."""
        loop = self._loop_of.get(value.name)
        if loop is None or value.microbatch is None:
            return 1.0
        found = self.lists[loop]
        key = found.producers[value.name], target
        most = found.largest.sent.get(key, 0)
        return found.microbatches[value.microbatch].sent.get(key, 0) / most if most else 1.0

    def calls(self, programs: StepPrograms, program: Program) -> "Counter[tuple[Executable, Called]]":
        """Counts the calls of each executable in a step, over all groups, with their microbatches."""
        done = (i for instructions in program.groups for i in instructions if isinstance(i, (Run, Call)))
        return Counter(
            (executable, Called(self._beside(i.loop if isinstance(i, Run) else -1, tasks)))
            for i in done
            for executable, tasks in programs.calls(i)
        )

    def _beside(self, loop: int, tasks: Sequence[Task]) -> _Beside:
        found = self.lists.get(loop)
        if found is None:
            return ()
        return tuple((Place(t.stage, t.kind), found.microbatches[t.microbatch], found.largest) for t in tasks)


@dataclasses.dataclass(frozen=True)
class Called:
    """The tasks of a call; for a list, each with the figures of its microbatch and of the largest one."""

    beside: _Beside = ()

    def share(self, figure: Callable[[Work], float]) -> float:
        """Returns a figure of the tasks, divided by the figure for the largest microbatch."""
        return _share(self.beside, lambda one, place: figure(one.works.get(place, Work())))

    def of(self, work: Work) -> Work:
        """Returns the work of the call, from the work for the largest microbatch."""
        if not self.beside:
            return work
        names = [field.name for field in dataclasses.fields(Work)]
        return Work(**{name: getattr(work, name) * self.share(lambda w, name=name: getattr(w, name)) for name in names})


def _share(beside: _Beside, figure: Callable[[MicrobatchFigures, Place], float]) -> float:
    own = sum(figure(one, place) for place, one, _ in beside)
    most = sum(figure(largest, place) for place, _, largest in beside)
    return own / most if most else 1.0


def figures_of(loop: Loop, outline: Outline, mesh: MpmdMesh, machine: Machine, sizes: Sizes) -> MicrobatchFigures:
    """Returns the figures of the microbatch that a step was cut for."""
    works = task_works(loop)
    placement, sent = loop.schedule.placement, Counter[tuple[tuple[int, str], int]]()
    for edge in loop_graph(loop).edges:
        for group in {placement[s] for s, _ in edge.consumers} - {placement[edge.producer[0]]}:
            sent[edge.producer, group] += edge.nbytes
    roles = Roles(outline)
    read = roles.arguments({v for task in loop.partition.tasks for v in task.operands})
    own = [v.aval for v in read if is_of_list(roles.names[v])]
    return MicrobatchFigures(
        costs_of(loop, works, mesh, machine, sizes),
        {place: sum(of_task, Work()) for place, of_task in works.items()},
        sent,
        kept_bytes(loop),
        sum(map(equations.nbytes, own)),
        max((aval.shape[0] for aval in own if aval.shape), default=1),
    )


def kept_bytes(loop: Loop) -> int:
    """Returns the bytes that all stages keep of a microbatch for its backward, over all devices."""
    tasks = loop.partition.tasks
    made = {v for t in tasks if t.place.kind == "F" for v in t.writes}
    read = {v for t in tasks if t.place.kind != "F" for v in t.reads}
    return sum(equations.nbytes(v.aval) for v in made & read)
