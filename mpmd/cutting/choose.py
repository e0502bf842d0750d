"""Chooses where the stages of a loop end, by the costs of its units on the devices of the mesh."""

import dataclasses
from collections.abc import Mapping, Sequence

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout
from mpmd.arrays.mesh import MpmdMesh
from mpmd.costs.devices import machine_for_cuts, memory_limit
from mpmd.cutting.candidates import Candidates
from mpmd.cutting.costs import unit_costs
from mpmd.graphs.scheduled_loop import ScheduledLoop
from mpmd.tracing.trace import Trace
from scheduler import Schedule
from scheduler.optimize.cuts import Cut, choose_cut
from scheduler.optimize.units import CutProblem, Units

_ALIKE = 1.02
"""Cuts count as equally fast if their simulated steps differ by less: the costs are not more exact."""


def choose(
    trace: Trace,
    eqn: compat.JaxprEqn,
    candidates: Candidates,
    schedule: Schedule,
    mesh: MpmdMesh,
    layouts: Mapping[compat.Var, Layout],
) -> Cut:
    """Returns the fastest cut of a loop among those that fit the memory of the devices; the even cut, if it is about as
    fast.

    Args:
      layouts: of the arguments of the step with a known layout.
    """
    machine = machine_for_cuts(mesh)
    units = unit_costs(trace, eqn, candidates, mesh, machine, layouts)
    limits = limits_of(units, schedule, memory_limit(mesh, machine))
    return _even_if_alike(choose_cut(units, schedule, eqn.params["info"].num_microbatches, limits))


def _even_if_alike(cut: Cut) -> Cut:
    """Returns the even cut if the given one is hardly faster: each group then holds about the same."""
    if cut.layers == cut.even or cut.even_excess or cut.even_makespan > _ALIKE * cut.makespan:
        return cut
    return dataclasses.replace(
        cut, layers=cut.even, makespan=cut.even_makespan, is_best=False, near=cut.layers, near_makespan=cut.makespan
    )


def one_cut(choices: Sequence[Cut], infos: Sequence[ScheduledLoop], mesh: MpmdMesh) -> list[Cut]:
    """Returns one cut for several loops: of `choices`, the best cut of each alone, that with the least total time."""
    if len({c.layers for c in choices}) == 1:
        return list(choices)
    memory = memory_limit(mesh, machine_for_cuts(mesh))
    problems = [
        CutProblem(c.units, info.schedule, info.num_microbatches, limits_of(c.units, info.schedule, memory))
        for c, info in zip(choices, infos, strict=True)
    ]

    def cost(layers: tuple[int, ...]) -> tuple[float, float]:
        found = [p.evaluate(layers) for p in problems]
        return sum(excess for excess, _ in found), sum(seconds for _, seconds in found)

    even = choices[0].even
    best = min(sorted({even, *(c.layers for c in choices), *(c.near for c in choices)}), key=cost)
    if cost(even)[0] <= cost(best)[0] and cost(even)[1] <= _ALIKE * cost(best)[1]:
        best = even
    found = []
    for c, problem in zip(choices, problems, strict=True):
        excess, makespan = problem.evaluate(best)
        near, near_makespan = (c.near, c.near_makespan) if c.layers == best else (c.layers, c.makespan)
        is_best = c.is_best and makespan <= c.makespan
        found.append(
            dataclasses.replace(
                c,
                layers=best,
                makespan=makespan,
                excess=excess,
                is_best=is_best,
                near=near,
                near_makespan=near_makespan,
            )
        )
    return found


def limits_of(units: Units, schedule: Schedule, limit: float | None) -> tuple[float, ...] | None:
    """Returns the bytes that each group may hold on a device. Backward tasks need one unit's activations besides."""
    return None if limit is None else (limit - max(units.activations),) * schedule.num_groups
