"""What the tasks of a loop take and hold before they are compiled, by the roofline of a machine."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

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


def task_works(loop: Loop) -> dict[Place, list[Work]]:
    """The work of each equation of each task that computes something."""
    found = {}
    for body in task_bodies(loop):
        if not body.is_empty:
            jaxpr = task_jaxpr(loop.partition, body).jaxpr
            found[body.place] = works_of_program(jaxpr.eqns, [*jaxpr.invars, *jaxpr.outvars])
    return found


def task_seconds(
    loop: Loop, works: Mapping[Place, Sequence[Work]], mesh: MpmdMesh, machine: Machine
) -> dict[Place, float]:
    """Seconds of each task that computes something, from its work."""
    return {place: machine.compute_s(own, mesh.groups[loop.group(place)].size) for place, own in works.items()}


def ordered_by_costs(outline: Outline, mesh: MpmdMesh, machine: Machine) -> Outline:
    """The step, in which loops over graphs of stages are ordered by what their tasks take."""
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
    """Seconds of tasks and transfers, and bytes on each device that a stage keeps of a microbatch for its backward."""
    seconds = task_seconds(loop, works, mesh, machine)
    stages, placement = range(loop.schedule.num_stages), loop.schedule.placement

    def of(kind: str) -> list[float]:
        return [seconds.get(Place(s, kind), 0.0) for s in stages]

    whole = [0.0 if Place(s, "I") in seconds else b for s, b in zip(stages, of("B"), strict=True)]
    kept = [0.0] * len(stages)
    crossing: dict[tuple[int, int], float] = defaultdict(float)
    for edge in loop_graph(loop).edges:
        source, kind = edge.producer
        for group in {placement[s] for s, _ in edge.consumers} - {placement[source]}:
            nbytes = sizes.nbytes_of(edge.name, group)[0]
            crossing[placement[source], group] += machine.between_s(
                nbytes, mesh.groups[placement[source]], mesh.groups[group]
            )
        if kind == "F":
            for stage in {s for s, reader in edge.consumers if reader != "F"}:
                kept[stage] += sizes.nbytes_of(edge.name, placement[stage])[0]
    pairs = [(placement[s], placement[s + 1]) for s in stages[:-1]]
    return Costs(
        forward=tuple(of("F")),
        input_grad=tuple(i + b for i, b in zip(of("I"), whole, strict=True)),
        weight_grad=tuple(of("W")),
        recompute=tuple(of("R")),
        transfer_s=(*(max(crossing[a, b], crossing[b, a]) for a, b in pairs), 0.0),
        activation_bytes=tuple(kept),
    )
