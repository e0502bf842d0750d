"""Puts what all processes noted of timed steps together, as a `Profile`."""

from collections.abc import Sequence
from typing import Any

from mpmd.compile.step import LoopProgram, StepPrograms
from mpmd.job import clocks
from mpmd.job.job import Job
from mpmd.observe.records import RecordedTimes, joined
from mpmd.report.flops import flops_of
from mpmd.report.profile import LoopFacts, Profile
from mpmd.report.steps import steps_of
from scheduler.task import reads_of


def profile_of(
    programs: StepPrograms,
    loops: tuple[LoopFacts, ...],
    job: Job | None,
    ranks: Sequence[int],
    rows: Sequence[RecordedTimes],
    result: Any,
) -> Profile:
    """The profile of some steps, the same in all of `ranks`, which call this together.

    Args:
      loops: as `facts_of` gives them.
      job: the job of several processes; None where this one runs everything.
      rows: of this process, for each step.
      result: of the last step.
    """
    parts, error = list(rows), 0.0
    if job is not None:
        found = clocks.offset(job, ranks)
        error = max(map(float, job.exchange("comparing clocks", repr(found.error), ranks).values()))
        shifted = [part.shifted(found.seconds).as_text() for part in parts]
        told = [job.exchange("gathering a timed step", text, ranks) for text in shifted]
        parts = [RecordedTimes.of_text(text) for said in told for text in said.values()]
    steps = steps_of(joined(parts), programs.mesh.num_groups)
    return Profile(programs.name, steps, programs.mesh.processes, loops, error, result)


def facts_of(loop: LoopProgram) -> LoopFacts:
    """What profiles have to know of a loop."""
    partition, schedule = loop.loop.partition, loop.loop.schedule
    flops = {(place.stage, place.kind): flops_of(e) for place, e in loop.executables.items()}
    labels = tuple(partition.labels[s] or "" for s in range(schedule.num_stages))
    count, orders = partition.info.num_microbatches, loop.loop.orders
    placement, reads = tuple(schedule.placement), reads_of(schedule)
    return LoopFacts(loop.loop.number, type(schedule).__name__, placement, reads, orders, count, flops, labels)
