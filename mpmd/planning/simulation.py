"""A whole step on a clock: every run, call and transfer of its program, with the time that each takes."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from scheduler import Call, Costs, Program, Recv, Run, Send, Task, Timeline


@dataclasses.dataclass(frozen=True)
class Event:
    """A run or a call of a group, from `start` to `end`; it waited `waited` seconds for values of other groups."""

    group: int
    instruction: Run | Call
    start: float
    end: float
    waited: float


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """When everything of a step runs.

    Attributes:
      events: of each group, in order.
      seconds: from the start of the step to the end of its last event.
      busy: of each group, seconds in which it computes.
      exposed: of each group, seconds in which it waits for a value that is under way already.
    """

    events: tuple[tuple[Event, ...], ...]
    seconds: float
    busy: tuple[float, ...]
    exposed: tuple[float, ...]

    @property
    def idle_fraction(self) -> float:
        """The part of the devices' time in which they do not compute."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate_program(
    program: Program,
    duration: Callable[[int, Any], float],
    transfer: Callable[[int, int, str], float],
) -> SimulatedStep:
    """Runs a program on a clock.

    Each group does its instructions in order. A send starts when its value is there, takes nothing of the group's time,
    and waits for the sends before it between the same two groups. What reads a received value waits until it is there.

    Args:
      duration: seconds of a `Run` or `Call` of a group.
      transfer: seconds of a value (its name) from one group to another.
    """
    num_groups = len(program.groups)
    position, clock = [0] * num_groups, [0.0] * num_groups
    ready: list[dict[Any, float]] = [{} for _ in range(num_groups)]  # when a value is there
    sent: list[dict[Any, float]] = [{} for _ in range(num_groups)]  # when a received value left its sender
    on_the_way: dict[tuple[Any, int, int], tuple[float, float]] = {}
    link_free: dict[tuple[int, int], float] = {}
    events: list[list[Event]] = [[] for _ in range(num_groups)]
    exposed = [0.0] * num_groups

    def run(g: int, i: Any) -> None:
        there = max((ready[g].get(v, 0.0) for v in i.reads), default=0.0)
        start = max(clock[g], there)
        left = max((sent[g].get(v, 0.0) for v in i.reads if ready[g].get(v, 0.0) > clock[g]), default=start)
        exposed[g] += max(0.0, start - max(clock[g], left))
        end = start + duration(g, i)
        events[g].append(Event(g, i, start, end, start - clock[g]))
        clock[g] = end
        ready[g].update(dict.fromkeys(i.writes, end))

    def advance(g: int) -> bool:
        """Does what group `g` can do; whether that was anything."""
        before = position[g]
        instructions = program.groups[g]
        while position[g] < len(instructions):
            i = instructions[position[g]]
            if isinstance(i, Send):
                start = max(ready[g].get(i.value, 0.0), link_free.get((g, i.to_group), 0.0))
                end = start + transfer(g, i.to_group, i.value.name)
                link_free[g, i.to_group] = end
                on_the_way[i.value, g, i.to_group] = start, end
            elif isinstance(i, Recv):
                if (arrival := on_the_way.pop((i.value, i.from_group, g), None)) is None:
                    break
                sent[g][i.value], ready[g][i.value] = arrival
            elif isinstance(i, (Run, Call)):
                run(g, i)
            position[g] += 1
        return position[g] > before

    while sum(advance(g) for g in range(num_groups)):  # each round does an instruction at least
        pass
    assert all(p == len(i) for p, i in zip(position, program.groups, strict=True)), "the program was not checked"
    busy = tuple(sum(e.end - e.start for e in group) for group in events)
    return SimulatedStep(tuple(map(tuple, events)), max(clock, default=0.0), busy, tuple(exposed))


def timeline(step: SimulatedStep, placement: Sequence[int]) -> Timeline | None:
    """The tasks of the longest loop, from its first start on; None if there is no loop."""
    loops: dict[int, list[tuple[Event, tuple[Task, ...]]]] = defaultdict(list)
    for group in step.events:
        for e in group:
            if isinstance(e.instruction, Run):
                loops[e.instruction.loop].append((e, e.instruction.tasks))
    if not loops:
        return None
    events = max(loops.values(), key=lambda found: max(e.end for e, _ in found) - min(e.start for e, _ in found))
    begin = min(e.start for e, _ in events)
    orders: list[list[Task]] = [[] for _ in step.events]
    starts: list[list[float]] = [[] for _ in step.events]
    ends: list[list[float]] = [[] for _ in step.events]
    for e, tasks in events:
        share = (e.end - e.start) / len(tasks)
        for k, task in enumerate(tasks):
            orders[e.group].append(task)
            starts[e.group].append(e.start - begin + k * share)
            ends[e.group].append(e.start - begin + (k + 1) * share)
    timed = [pair for group in zip(orders, starts, ends, strict=True) for pair in zip(*group, strict=True)]
    costs = Costs.measured((task, end - start) for task, start, end in timed)
    zeros = (0,) * len(orders)
    return Timeline(
        tuple(map(tuple, orders)), tuple(starts), tuple(ends), tuple(placement), costs, zeros, zeros, name="planned"
    )
