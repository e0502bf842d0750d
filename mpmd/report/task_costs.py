"""The seconds and bytes of a loop's tasks before compilation, by the roofline of a machine."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpmd.arrays.mesh import MpmdMesh
from mpmd.compile.program import loop_graph
from mpmd.compile.tasks import task_bodies, task_jaxpr
from mpmd.costs.machine import Machine
from mpmd.costs.work import Work, works_of_program
from mpmd.graphs.body import Place
from mpmd.partition.outline import Loop, Outline, with_changes
from mpmd.report.memory import Sizes
from scheduler import Costs
from scheduler.schedules.graph import graph_of, with_graph
from scheduler.task import Reads, reads_of


def task_works(loop: Loop) -> dict[Place, list[Work]]:
    """Returns the work of each equation of each task that computes something."""
    found = {}
    for body in task_bodies(loop):
        if not body.is_empty:
            jaxpr = task_jaxpr(loop.partition, body).jaxpr
            found[body.place] = works_of_program(jaxpr.eqns, [*jaxpr.invars, *jaxpr.outvars])
    return found


def task_seconds(
    loop: Loop, works: Mapping[Place, Sequence[Work]], mesh: MpmdMesh, machine: Machine
) -> dict[Place, float]:
    """Returns the seconds of each task that computes something, from its work."""
    return {place: machine.compute_s(own, mesh.groups[loop.group(place)].size) for place, own in works.items()}


def ordered_by_costs(outline: Outline, mesh: MpmdMesh, machine: Machine) -> Outline:
    """Returns the step with loops over graphs of stages ordered by the seconds of their tasks."""
    schedules = {}
    for loop in outline.loops:
        graph = graph_of(loop.schedule)
        if graph is not None and graph.costs is None:
            seconds = task_seconds(loop, task_works(loop), mesh, machine)
            forward, backward = (
                tuple(seconds.get(Place(s, kind), 0.0) for s in range(graph.num_stages)) for kind in "FB"
            )
            graph = dataclasses.replace(graph, costs=Costs(forward, backward, 0.0))
            schedules[loop.number] = {"schedule": with_graph(loop.schedule, graph)}
    return with_changes(outline, schedules)


def costs_of(
    loop: Loop, works: Mapping[Place, Sequence[Work]], mesh: MpmdMesh, machine: Machine, sizes: Sizes
) -> Costs:
    """Returns the seconds of tasks and transfers, and the bytes per device that a stage keeps for a backward."""
    placement = loop.schedule.placement
    kept = [0.0] * len(placement)
    for edge in loop_graph(loop).edges:
        for stage in {s for s, reader in edge.consumers if edge.producer[1] == "F" and reader != "F"}:
            kept[stage] += sizes.nbytes(edge.name, placement[stage])[0]
    return Costs(
        **by_stage(task_seconds(loop, works, mesh, machine), len(placement)),
        transfer_s=boundary_seconds(loop, mesh, machine, sizes),
        activation_bytes=tuple(kept),
    )


def by_stage(amounts: Mapping[Place, float], num_stages: int) -> dict[str, Any]:
    """Returns the amounts of all tasks as arguments for `Costs`. A backward counts once, also if the schedule runs it
    whole for some microbatches, and in halves for others.
    """
    of = {kind: tuple(amounts.get(Place(s, kind), 0.0) for s in range(num_stages)) for kind in "FBIWR"}
    backward = tuple(i if i or w else b for b, i, w in zip(of["B"], of["I"], of["W"], strict=True))
    return {"forward": of["F"], "input_grad": backward, "weight_grad": of["W"], "recompute": of["R"]}


def boundary_seconds(loop: Loop, mesh: MpmdMesh, machine: Machine, sizes: Sizes) -> tuple[float, ...]:
    """Returns the seconds of a microbatch's transfers over the boundary behind each stage, in the slower direction."""
    placement, seconds = loop.schedule.placement, defaultdict[tuple[int, int], float](float)
    for edge in loop_graph(loop).edges:
        source = placement[edge.producer[0]]
        for target in {placement[s] for s, _ in edge.consumers} - {source}:
            nbytes = sizes.nbytes(edge.name, target)[0]
            seconds[source, target] += machine.between_s(nbytes, mesh.groups[source], mesh.groups[target])
    return boundaries(placement, reads_of(loop.schedule), lambda a, b: max(seconds[a, b], seconds[b, a]))


def boundaries(
    placement: Sequence[int], reads: Reads | None, seconds: Callable[[int, int], float]
) -> tuple[float, ...]:
    """Returns the seconds over the boundary behind each stage, from the seconds between two groups: the most to any
    stage that reads it. `reads` are the stages that each stage reads; None for a chain.
    """
    stages = range(len(placement))
    readers = [[t for t in stages if s in (range(t - 1, t) if reads is None else reads[t])] for s in stages]
    return tuple(
        max((seconds(placement[s], placement[t]) for t in readers[s] if placement[s] != placement[t]), default=0.0)
        for s in stages
    )
