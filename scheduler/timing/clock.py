"""Orders on a clock: when each task of a pipeline starts and ends."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.base.collector import without_collection
from scheduler.engine import blocked, run_until_blocked
from scheduler.errors import ScheduleError
from scheduler.ordering import chain, deadlock, graph_needs, paired, readers_of
from scheduler.task import Kind, Orders, Reads, Task

Times = tuple[array, ...]


@dataclass
class Clock:
    """Each group runs its order, each task as soon as what it waits for has arrived.

    Args:
        placement: For each stage, its group.
        num_microbatches: The number of microbatches.
        seconds: For each kind, the time of its tasks, at stage times microbatches plus microbatch.
        over: The time over the boundary behind a stage, at the same places.
        reads: For each stage, the stages that it exchanges values with; None for a chain.
    """

    placement: Sequence[int]
    num_microbatches: int
    seconds: Mapping[Kind, Sequence[float]]
    over: Sequence[float]
    reads: Reads | None = None
    happened: array = field(init=False)
    """When each event has happened, -1 before. The end of F is event number stage times microbatches plus microbatch;
    the end of I or B is that number plus ``size``."""

    def __post_init__(self) -> None:
        self.happened = array("d", [-1.0]) * (2 * self.size)
        self._readers = readers_of(self.reads or chain(len(self.placement)))

    @property
    def size(self) -> int:
        """The number of tasks of a kind."""
        return len(self.placement) * self.num_microbatches

    def run(self, orders: Orders, second: Mapping[Task, Task]) -> tuple[Times, Times]:
        """The starts and the ends of every group's tasks.

        Args:
            orders: The orders.
            second: For the first task of each fused pair, the other one, which must come next.

        Raises:
            ScheduleError: The orders deadlock; with the cycle.
        """
        starts: Times = tuple(array("d") for _ in orders)
        ends: Times = tuple(array("d") for _ in orders)

        def advance(group: int, happened: Callable[[int], None]) -> int | None:
            if second or self.reads is not None:
                return self._advance_units(orders[group], second, starts[group], ends[group], happened)
            return self._advance(orders[group], starts[group], ends[group], happened)

        with without_collection():
            run_until_blocked(len(orders), advance)
        if blocked([len(times) for times in ends], orders):
            cycle = _stuck(orders, second, self.reads, len(self.placement))
            raise ScheduleError(f"simulate: the orders deadlock: {cycle}.")
        return starts, ends

    def _advance(self, order: Sequence[Task], starts: array, ends: array, happens: Callable[[int], None]) -> int | None:
        """Runs a group's tasks until one has to wait. The loop that a large simulation spends its time in."""
        m, last, size = self.num_microbatches, len(self.placement) - 1, self.size
        happened, over, seconds = self.happened, self.over, self.seconds
        now = ends[-1] if ends else 0.0
        add_start, add_end = starts.append, ends.append
        for index in range(len(ends), len(order)):
            stage, kind, microbatch = order[index]
            at = stage * m + microbatch
            if kind == "F":
                if stage:
                    arrival = happened[at - m]
                    if arrival < 0:
                        return at - m
                    arrival += over[at - m]
                    if arrival > now:
                        now = arrival
            elif kind == "W":
                if happened[size + at] < 0:
                    return size + at
            else:
                if happened[at] < 0:
                    return at
                if stage < last and kind != "R":
                    arrival = happened[size + at + m]
                    if arrival < 0:
                        return size + at + m
                    arrival += over[at]
                    if arrival > now:
                        now = arrival
            add_start(now)
            now += seconds[kind][at]
            add_end(now)
            if kind != "W" and kind != "R":
                event = at if kind == "F" else size + at
                happened[event] = now
                happens(event)
        return None

    def _advance_units(
        self,
        order: Sequence[Task],
        second: Mapping[Task, Task],
        starts: array,
        ends: array,
        happens: Callable[[int], None],
    ) -> int | None:
        """The same for any graph and for fused pairs, which start when both tasks could, and hand on all at the end."""
        while len(ends) < len(order):
            task = order[len(ends)]
            unit = (task, second[task]) if task in second else (task,)
            start = ends[-1] if ends else 0.0
            own = set(map(self._event_of, unit))
            for one in unit:
                for event, late in self._events(one):
                    if event in own:
                        continue
                    end = self.happened[event]
                    if end < 0:
                        return event
                    start = max(start, end + late)
            for one in unit:
                starts.append(start)
                start += self.seconds[one.kind][one.stage * self.num_microbatches + one.microbatch]
                ends.append(start)
            for one in unit:
                if one.kind not in "WR":  # no other group waits for these
                    event = self._event_of(one)
                    self.happened[event] = start
                    happens(event)
        return None

    def _events(self, task: Task) -> Iterator[tuple[int, float]]:
        """The events that a task waits for, each with the seconds until the group can read its result."""
        m, size = self.num_microbatches, self.size
        at = task.stage * m + task.microbatch
        if task.kind == "F":
            for stage in (task.stage - 1,) if self.reads is None else self.reads[task.stage]:
                if stage >= 0:
                    yield at + (stage - task.stage) * m, self._late(stage, task)
        elif task.kind == "W":
            yield size + at, 0.0
        else:
            yield at, 0.0
            for stage in self._readers[task.stage] if task.kind != "R" else ():
                yield size + at + (stage - task.stage) * m, self._late(task.stage, task._replace(stage=stage))

    def _late(self, sender: int, reader: Task) -> float:
        """The time between a stage and one that reads it; a skip over others takes the time over its own boundary."""
        if self.placement[sender] == self.placement[reader.stage]:
            return 0.0
        return self.over[sender * self.num_microbatches + reader.microbatch]

    def _event_of(self, task: Task) -> int:
        """The event of a task's end. That of W and R is no event: no other group waits for them."""
        at = task.stage * self.num_microbatches + task.microbatch
        return at if task.kind == "F" else -1 if task.kind in "WR" else self.size + at


def _stuck(orders: Orders, second: Mapping[Task, Task], reads: Reads | None, num_stages: int) -> str | None:
    """Why no group can go on; a fused pair waits as one."""
    units = [list(paired(order, second)) for order in orders]
    name = {task: "+".join(map(str, unit)) for row in units for unit in row for task in unit}
    waits_for = graph_needs(reads, num_stages)

    def is_needed(need: Task) -> bool:
        """Of B and I, which stand for each other, only the one that some group runs."""
        other = need._replace(kind="I" if need.kind == "B" else "B")
        return need in name or need.kind not in "BI" or other not in name

    needs = {
        name[unit[0]]: [
            name.get(need, str(need))
            for task in unit
            for need in waits_for(task)
            if need not in unit and is_needed(need)
        ]
        for row in units
        for unit in row
    }
    return deadlock([[name[unit[0]] for unit in row] for row in units], needs)
