"""Chooses where the stages of a loop end, by what its units cost on the devices of the mesh."""

import dataclasses
from collections.abc import Mapping

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout
from mpmd.arrays.mesh import MpmdMesh
from mpmd.cutting.candidates import Candidates
from mpmd.cutting.costs import unit_costs
from mpmd.cutting.devices import machine_for_cuts, memory_limit
from mpmd.tracing.trace import Trace
from scheduler import Schedule
from scheduler.optimize.cuts import Cut, choose_cut
from scheduler.optimize.units import Units

_ALIKE = 1.005
"""Cuts whose simulated steps differ by less count as equally fast: costs are not known better."""


def choose(
    trace: Trace,
    eqn: compat.JaxprEqn,
    candidates: Candidates,
    schedule: Schedule,
    mesh: MpmdMesh,
    layouts: Mapping[compat.Var, Layout],
) -> Cut:
    """The cut of a loop that takes least time, among those that fit the memory of the devices; the even one, if it is
    about as fast.

    Args:
      trace: the step.
      eqn: its `treduce` equation.
      candidates: where its stages may end.
      schedule: the loop's.
      mesh: the groups.
      layouts: of arguments of the step, where they are known.
    """
    machine = machine_for_cuts(mesh)
    units = unit_costs(trace, eqn, candidates, mesh, machine, layouts)
    limits = limits_of(units, schedule, memory_limit(mesh, machine))
    return _even_if_alike(choose_cut(units, schedule, eqn.params["info"].num_microbatches, limits))


def _even_if_alike(cut: Cut) -> Cut:
    """The even cut in the place of one that is hardly faster: each group then holds about the same."""
    if cut.layers == cut.even or cut.even_excess or cut.even_makespan > _ALIKE * cut.makespan:
        return cut
    return dataclasses.replace(
        cut, layers=cut.even, makespan=cut.even_makespan, is_best=False, near=cut.layers, near_makespan=cut.makespan
    )


def limits_of(units: Units, schedule: Schedule, limit: float | None) -> tuple[float, ...] | None:
    """Bytes that each group may hold on a device. A backward task needs about as much beside it as one unit keeps."""
    return None if limit is None else (limit - max(units.activations),) * schedule.num_groups
