"""Chooses where the stages of a loop end, by what its units cost on the devices of the mesh."""

from collections.abc import Mapping

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import Layout
from mpmd.arrays.mesh import MpmdMesh
from mpmd.cutting.candidates import Candidates
from mpmd.cutting.costs import unit_costs
from mpmd.cutting.devices import machine_of, memory_limit
from mpmd.tracing.trace import Trace
from scheduler import Schedule
from scheduler.optimize.cuts import Cut, choose_cut
from scheduler.optimize.units import Units


def choose(
    trace: Trace,
    eqn: compat.JaxprEqn,
    candidates: Candidates,
    schedule: Schedule,
    mesh: MpmdMesh,
    layouts: Mapping[compat.Var, Layout],
) -> Cut:
    """The cut of a loop that takes least time, among those that fit the memory of the devices.

    Args:
      trace: the step.
      eqn: its `treduce` equation.
      candidates: where its stages may end.
      schedule: the loop's.
      mesh: the groups.
      layouts: of arguments of the step, where they are known.
    """
    machine = machine_of(mesh)
    units = unit_costs(trace, eqn, candidates, mesh, machine, layouts)
    limit = memory_limit(mesh, machine)
    limits = None if limit is None else (limit - _temporaries(units),) * schedule.num_groups
    return choose_cut(units, schedule, eqn.params["info"].num_microbatches, limits)


def _temporaries(units: Units) -> float:
    """What a backward task needs beside what is held: about as much again as one unit keeps."""
    return max(units.activations)
