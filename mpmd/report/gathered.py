"""Joins the times that all processes noted of measured steps into a `Profile`."""

import statistics
from collections.abc import Mapping, Sequence

from mpmd.compile.executable import Executable
from mpmd.compile.step import StepPrograms
from mpmd.graphs.body import Place
from mpmd.job import clocks
from mpmd.job.job import Job
from mpmd.observe.records import RecordedTimes, joined
from mpmd.partition.outline import Loop
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
    result: object,
) -> Profile:
    """Returns the profile of some steps, the same in all of `ranks`, which call this together. `rows` are the times of
    this process, for each step; `job` is None where it runs everything.
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


def facts_of(
    loop: Loop, executables: Sequence[Mapping[Place, Executable]], shapes: Sequence[int], names: Sequence[str] = ("",)
) -> LoopFacts:
    """Returns the facts about a loop for profiles. `executables` are those of its tasks, for each shape of a
    microbatch; `shapes` has the number of each microbatch's shape.
    """
    partition, schedule = loop.partition, loop.schedule

    def mean_flops(place: Place) -> float:
        of_shape = {shape: flops_of(executables[shape][place]) for shape in set(shapes)}
        return statistics.fmean(of_shape[shape] for shape in shapes)

    return LoopFacts(
        loop.number,
        type(schedule).__name__,
        tuple(schedule.placement),
        reads_of(schedule),
        loop.orders,
        tuple(names[shape] for shape in shapes),
        {(place.stage, place.kind): mean_flops(place) for place in executables[0]},
        tuple(partition.labels[s] or "" for s in range(schedule.num_stages)),
    )
