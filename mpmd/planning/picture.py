"""The picture of a planned loop. A loop with many microbatches is drawn with fewer, so that each task can be seen."""

import dataclasses

from mpmd.compile.step import StepPrograms
from mpmd.costs.simulation import SimulatedStep
from mpmd.planning.costs import StepCosts
from mpmd.report.task_costs import boundary_seconds
from scheduler import Program, Schedule, ScheduleError, Timeline
from scheduler.base.texts import in_seconds
from scheduler.ordering import recomputing
from scheduler.task import reads_of
from scheduler.timing.simulate import simulate_orders, timeline_of

COLUMNS = 150  # of a terminal


@dataclasses.dataclass(frozen=True)
class Picture:
    """The picture of a simulated loop."""

    timeline: Timeline  # all planned tasks of the loop
    shown: Timeline  # the same loop, perhaps with fewer microbatches
    microbatches: int  # the number of shown microbatches

    def __str__(self) -> str:
        rows = [line.rpartition("| ")[0] or line for line in str(self.shown).splitlines()[1:]]
        seconds = in_seconds(self.shown.makespan)
        what = f"the loop, {seconds} from left to right:"
        if self.shown is not self.timeline:
            what = f"drawn with {self.microbatches} microbatches, so that each task can be seen ({seconds}):"
        return "\n".join([what, *(f"  {row}" for row in rows)])


def picture_of(programs: StepPrograms, program: Program, step: SimulatedStep, costs: StepCosts) -> Picture | None:
    """Returns the picture of the longest loop of a step; None if there is no loop."""
    if not programs.loops:
        return None
    longest = max((p.loop.number for p in programs.loops), key=step.seconds_of)
    whole = timeline_of(step.runs(longest), program.placement_of(longest), "planned")
    microbatches = 1 + max(task.microbatch for order in whole.orders for task in order)
    if _columns(whole) <= COLUMNS:
        return Picture(whole, whole, microbatches)
    loop = next(p.loop for p in programs.loops if p.loop.number == longest)
    seconds = boundary_seconds(loop, programs.mesh, costs.machine, costs.sizes)
    shorter = _shortened(loop.schedule, whole, seconds, microbatches)
    return Picture(whole, *(shorter or (whole, microbatches)))


def _shortened(
    schedule: Schedule, whole: Timeline, transfer_s: tuple[float, ...], microbatches: int
) -> tuple[Timeline, int] | None:
    """Returns the loop with fewer microbatches, so that it can be drawn task by task; None if no tried number works."""
    costs = dataclasses.replace(whole.costs, transfer_s=transfer_s)
    recomputed = costs.recomputed(schedule.num_stages)
    while microbatches > 1:
        microbatches = microbatches * 3 // 4
        if microbatches > schedule.num_groups:  # some schedules take multiples only
            microbatches -= microbatches % schedule.num_groups
        try:
            orders = recomputing(schedule, microbatches, schedule.orders(microbatches), recomputed)
        except (ScheduleError, ValueError):
            continue
        pairs, reads = schedule.fused(microbatches), reads_of(schedule)
        found = simulate_orders(orders, schedule.placement, microbatches, costs, pairs, reads=reads)
        if _columns(found) <= COLUMNS:
            return found, microbatches
    return None


def _columns(timeline: Timeline) -> float:
    """Returns the width of a picture in which the shortest task has one column."""
    lengths = [seconds for _, seconds in timeline.durations if seconds > 0]
    return timeline.makespan / min(lengths, default=1.0)
