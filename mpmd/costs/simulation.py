"""A whole step on a clock: every run, call and transfer of its program, with its duration."""

import dataclasses
from collections.abc import Callable

from scheduler import Call, Instruction, Program, Recv, Run, Send, Task, Value
from scheduler.engine import blocked, run_until_blocked


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """The times of everything in a step."""

    ran: tuple[tuple[int, Run, float, float], ...]  # group, run of a loop, its start and end: group by group, in order
    seconds: float  # from the start of the step to the end of all its work
    busy: tuple[float, ...]  # for each group, the seconds in which it computes
    exposed: tuple[float, ...]  # for each group, the seconds in which it waits for a value that is already on its way

    @property
    def idle_fraction(self) -> float:
        """The part of the devices' time in which they do not compute."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0

    def runs(self, loop: int) -> list[tuple[int, tuple[Task, ...], float, float]]:
        """Returns the runs of a loop in the form for `timeline_of`: group, tasks, start and end."""
        return [(group, run.tasks, start, end) for group, run, start, end in self.ran if run.loop == loop]

    def seconds_of(self, loop: int) -> float:
        """Returns the seconds from the start of a loop's first task to the end of its last one."""
        runs = self.runs(loop)
        return max((end for *_, end in runs), default=0.0) - min((start for _, _, start, _ in runs), default=0.0)


def simulate_program(
    program: Program,
    duration: Callable[[int, Run | Call], float],
    transfer: Callable[[int, int, Value], float],
) -> SimulatedStep:
    """Runs a program on a clock: `duration` and `transfer` (of a value from one group to another) return seconds.

    Each group runs its instructions in order. A send starts when its value is ready, takes none of the group's time,
    and waits for the earlier sends between the same two groups. Readers of a received value wait until it has arrived.
    """
    groups = program.groups
    clock, busy, exposed = ([0.0] * len(groups) for _ in range(3))
    ready: list[dict[Value, float]] = [{} for _ in groups]  # when a value is ready
    sent: list[dict[Value, float]] = [{} for _ in groups]  # when a received value left its sender
    on_the_way: dict[tuple[Value, int, int], tuple[float, float]] = {}
    link_free: dict[tuple[int, int], float] = {}
    ran: list[list[tuple[int, Run, float, float]]] = [[] for _ in groups]

    def run(g: int, i: Run | Call) -> None:
        there = max((ready[g].get(v, 0.0) for v in i.reads), default=0.0)
        start = max(clock[g], there)
        left = max((sent[g].get(v, 0.0) for v in i.reads if ready[g].get(v, 0.0) > clock[g]), default=start)
        exposed[g] += max(0.0, start - max(clock[g], left))
        end = start + duration(g, i)
        if isinstance(i, Run):
            ran[g].append((g, i, start, end))
        busy[g] += end - start
        clock[g] = end
        ready[g].update(dict.fromkeys(i.writes, end))

    def do(g: int, i: Instruction, happened: Callable[[tuple[Value, int, int]], None]) -> tuple[Value, int, int] | None:
        if isinstance(i, Send):
            key = i.value, g, i.to_group
            start = max(ready[g].get(i.value, 0.0), link_free.get(key[1:], 0.0))
            link_free[key[1:]] = end = start + transfer(g, i.to_group, i.value)
            on_the_way[key] = start, end
            happened(key)
        elif isinstance(i, Recv):
            key = i.value, i.from_group, g
            if key not in on_the_way:
                return key
            sent[g][i.value], ready[g][i.value] = on_the_way.pop(key)
        elif isinstance(i, (Run, Call)):
            run(g, i)
        return None

    assert not blocked(run_until_blocked(groups, do), groups), "the program was not checked"
    return SimulatedStep(
        tuple(one for of_group in ran for one in of_group), max(clock, default=0.0), tuple(busy), tuple(exposed)
    )
