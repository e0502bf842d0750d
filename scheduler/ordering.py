"""Checks orders of tasks before they are used: are they complete, and can they run?"""

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from scheduler.base.texts import counted
from scheduler.engine import blocked, run_until_blocked
from scheduler.errors import ScheduleError
from scheduler.task import Kind, Orders, Pairs, Reads, Schedule, Task

Unit = TypeVar("Unit", bound=Hashable)
_MOST_SHOWN = 20  # faults in the message of an error


@dataclass(frozen=True, eq=False)
class LoopTasks(Set[Task]):
    """Every task of a loop, in kinds F, R, I and W: a set that stores a few numbers instead of millions of tasks."""

    num_stages: int
    num_microbatches: int
    forward_only: bool = False
    recomputed: frozenset[int] = frozenset()  # The stages that have an R

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that every stage has."""
        return ("F",) if self.forward_only else ("F", "I", "W")

    @property
    def slots(self) -> list[tuple[int, str]]:
        """Stage and kind of its tasks."""
        always = [(stage, kind) for stage in range(self.num_stages) for kind in self.kinds]
        return [*always, *((stage, "R") for stage in sorted(self.recomputed))]

    def __contains__(self, task: object) -> bool:
        return (
            isinstance(task, Task)
            and (task.stage in self.recomputed if task.kind == "R" else task.kind in self.kinds)
            and task.stage in range(self.num_stages)
            and task.microbatch in range(self.num_microbatches)
        )

    def __iter__(self) -> Iterator[Task]:
        return (
            Task(stage, kind, microbatch)  # pyright: ignore[reportArgumentType]
            for stage, kind in self.slots
            for microbatch in range(self.num_microbatches)
        )

    def __len__(self) -> int:
        return len(self.slots) * self.num_microbatches

    def __hash__(self) -> int:
        return self._hash()

    @classmethod
    def _from_iterable(cls, it: Iterable[Task]) -> Set[Task]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return frozenset(it)


class Numbers:
    """The number of whatever runs each task of a loop.

    Attributes:
        of: For stage and kind (F, R, I or W) and then microbatch, the number; -1 for a task that nothing runs.
    """

    def __init__(self, tasks: LoopTasks, typecode: str = "q") -> None:
        self.of = {slot: array(typecode, [-1]) * tasks.num_microbatches for slot in tasks.slots}
        self.left = len(tasks)  # How many tasks have no number yet

    def add(self, task: Task, number: int) -> bool:
        """Gives a task its number; returns False if the task is not one of the loop or has a number already."""
        stage, kind, microbatch = task
        for part in ("I", "W") if kind == "B" else (kind,):
            row = self.of.get((stage, part))
            if row is None or not 0 <= microbatch < len(row) or row[microbatch] >= 0:
                return False
            row[microbatch] = number
            self.left -= 1
        return True


def coverage_faults(
    runs: Iterable[tuple[int, Task]], placement: Sequence[int], expected: Set[Task], where: str = ""
) -> list[str]:
    """Returns missing, repeated and misplaced tasks among (group, task) pairs, as sentences."""
    faults = []
    found: Counter[Task] = Counter()
    wholes: set[tuple[int, int]] = set()
    halves: dict[tuple[int, int], list[Task]] = {}
    strange: set[Task] = set()
    for group, task in runs:
        found[task] += 1
        if task.kind == "B":
            wholes.add((task.stage, task.microbatch))
        elif task.kind in ("I", "W"):
            halves.setdefault((task.stage, task.microbatch), []).append(task)
        if not all(part in expected for part in task.parts):
            strange.add(task)
        elif placement[task.stage] != group:
            faults.append(
                f"task {task}{where} runs in group {group}; stage {task.stage} lives in group {placement[task.stage]}"
            )
    for task, count in sorted(found.items()):
        if count > 1:
            faults.append(f"task {task}{where} runs {count} times; expected once")
    for key in sorted(wholes & halves.keys()):
        parts = " and ".join(map(str, sorted(set(halves[key]))))
        faults.append(
            f"task {Task(key[0], 'B', key[1])}{where} does what {parts} does again; expected B alone, or I and W"
        )
    for task in sorted(strange, key=str):
        faults.append(f"task {task}{where} is no task of this loop")
    missing = {part for part in expected if found[part] == 0 and not (part.kind in "IW" and part[::2] in wholes)}
    for task in sorted(missing):
        if task.kind == "W" and Task(task.stage, "I", task.microbatch) in missing:
            continue
        if task.kind == "I" and Task(task.stage, "W", task.microbatch) in missing:
            faults.append(f"task {Task(task.stage, 'B', task.microbatch)}{where} never runs, nor do its I and W")
        else:
            faults.append(f"task {task}{where} never runs")
    return faults


def chain(num_stages: int) -> Reads:
    """Returns the graph of an ordinary pipeline: each stage reads the one before."""
    return tuple((stage - 1,) if stage else () for stage in range(num_stages))


def readers_of(reads: Reads) -> list[list[int]]:
    """Returns, for each stage, the later stages that read it."""
    readers: list[list[int]] = [[] for _ in reads]
    for stage, own in enumerate(reads):
        for one in own:
            readers[one].append(stage)
    return readers


def graph_needs(reads: Reads | None, num_stages: int) -> Callable[[Task], list[Task]]:
    """Returns a function from a task to its needs, in a chain (None) or a graph of stages: B or I of each reader."""
    reads = chain(num_stages) if reads is None else reads
    readers = readers_of(reads)

    def needs(task: Task) -> list[Task]:
        stage, kind, microbatch = task
        if kind == "F":
            return [Task(one, "F", microbatch) for one in reads[stage]]
        if kind == "W":
            return [Task(stage, "I", microbatch)]
        later = readers[stage] if kind != "R" else ()
        return [
            Task(stage, "F", microbatch),
            *(Task(one, which, microbatch) for one in later for which in ("B", "I")),  # type: ignore[arg-type]
        ]

    return needs


def longest_paths(reads: Reads) -> list[int]:
    """Returns, for each stage, how many stages the longest way from it to an end of the graph has, it among them."""
    found = [1] * len(reads)
    for stage in reversed(range(len(reads))):
        for one in reads[stage]:
            found[one] = max(found[one], found[stage] + 1)
    return found


def paired(order: Sequence[Task], second: Mapping[Task, Task]) -> Iterable[tuple[Task, ...]]:
    """Yields the tasks of an order, each alone or with the task that it is fused with."""
    if not second:
        return zip(order)
    units: list[tuple[Task, ...]] = []
    previous = None
    for task in order:
        if previous is not None and second.get(previous) == task:
            units[-1] = (previous, task)
            previous = None
        else:
            units.append((task,))
            previous = task
    return units


def recomputing(schedule: Schedule, num_microbatches: int, orders: Orders, stages: Set[int]) -> Orders:
    """Returns a schedule's orders with an R right before each I and B of some stages; of a pair, before the first.

    R does not wait for a gradient: it runs while its group would wait for the gradient of its I. At most the forward
    of a pair comes between the two, so the values that R makes are held for a short time.
    """
    return with_recomputing(orders, stages, schedule.fused(num_microbatches)) if stages else orders


def with_recomputing(orders: Orders, stages: Set[int], fused: Pairs) -> Orders:
    """Returns the orders of :func:`recomputing`, from orders and pairs at hand."""
    second = dict(fused)

    def tasks(order: Sequence[Task]) -> Iterator[Task]:
        for unit in paired(order, second):
            yield from (task._replace(kind="R") for task in unit if task.kind in "BI" and task.stage in stages)
            yield from unit

    return tuple(tuple(tasks(order)) for order in orders)


def deadlock(orders: Sequence[Sequence[Unit]], needs: Mapping[Unit, Iterable[Unit]]) -> str | None:
    """Returns why groups that run these lists get stuck, as one sentence: which unit waits for which, round the cycle.

    Returns None if all of them come to their ends.
    """
    done: set[Unit] = set()

    def do(group: int, unit: Unit, happened: Callable[[Unit], None]) -> Unit | None:
        if (blocker := next((need for need in needs[unit] if need not in done), None)) is None:
            done.add(unit)
            happened(unit)
        return blocker

    position = run_until_blocked(orders, do)
    if not (stuck := blocked(position, orders)):
        return None
    group_of = {unit: group for group, order in enumerate(orders) for unit in order}
    step: dict[int, tuple[Unit, Unit]] = {}
    group = stuck[0]
    while group not in step:
        head = orders[group][position[group]]
        need = next(need for need in needs[head] if need not in done)
        if need not in group_of:
            return f"{head} (group {group}) waits for {need}, which no group runs"
        step[group] = head, need
        group = group_of[need]
    path, links = list(step), []
    cycle = path[path.index(group) :]
    for group in cycle:
        head, need = step[group]
        there = group_of[need]
        first = step[there][0]
        behind = "" if need == first else f", which comes after {first}"
        links.append(f"{head} (group {group}) waits for {need} (group {there}){behind}")
    return "; ".join(links)


def order_faults(
    orders: Orders,
    placement: Sequence[int],
    num_microbatches: int,
    forward_only: bool = False,
    reads: Reads | None = None,
) -> list[str]:
    """Returns every fault of a pipeline's orders: missing, repeated or misplaced tasks, and deadlock."""
    runs = [(group, task) for group, order in enumerate(orders) for task in order]
    faults = coverage_faults(runs, placement, LoopTasks(len(placement), num_microbatches, forward_only))
    present = {task for _, task in runs}
    if len(present) == len(runs):
        waits_for = graph_needs(reads, len(placement))
        needs = {task: [need for need in waits_for(task) if need in present] for task in present}
        if (cycle := deadlock(orders, needs)) is not None:
            faults.append(f"the orders deadlock: {cycle}")
    return faults


def raise_faults(subject: str, faults: Sequence[str]) -> None:
    """Raises one error if there are faults. Its message lists the first twenty, its ``faults`` lists all of them."""
    if not faults:
        return
    lines = [f"  {fault}." for fault in faults[:_MOST_SHOWN]]
    if len(faults) > _MOST_SHOWN:
        lines.append(f"  … and {len(faults) - _MOST_SHOWN} more.")
    raise ScheduleError(f"{subject}: {counted(len(faults), 'fault')}.\n" + "\n".join(lines), faults)
