"""Floating-point operations and bytes, by XLA's cost analysis of each executable, or counted in its jaxpr."""

import jax

from mpmd import _jax_compat as compat
from mpmd.compile.executable import Executable
from mpmd.compile.step import StepPrograms
from mpmd.costs.work import work_of
from mpmd.report.shares import Shares
from scheduler import Program


def cost_per_step(programs: StepPrograms, program: Program, shares: Shares) -> tuple[float, float]:
    """Returns the operations, and the bytes to and from device memory, of all calls of one step on all devices."""
    flops = nbytes = 0.0
    for (executable, called), times in shares.calls(programs, program).items():
        own_flops, own_nbytes = _cost_of(executable)
        flops += times * own_flops * called.share(lambda work: work.flops)
        nbytes += times * own_nbytes * called.share(lambda work: work.nbytes)
    return flops, nbytes


def flops_of(executable: Executable) -> float:
    """Returns the floating-point operations of a call, on all devices of its group."""
    return _cost_of(executable)[0]


def _cost_of(executable: Executable) -> tuple[float, float]:
    """Returns the operations and bytes of a call, on all devices of its group."""
    # XLA reports no costs for a described device, and in a job it knows only the programs that this process compiled.
    if compat.is_described(executable.mesh.devices.flat[0]) or jax.process_count() > 1:
        works = [work_of(program.jaxpr) for program in executable.runs]
        return sum(work.flops for work in works), sum(work.nbytes for work in works)
    analysis = executable.call.cost_analysis() or {}
    flops, nbytes = (max(0.0, float(analysis.get(key, 0.0))) for key in ("flops", "bytes accessed"))
    return flops * executable.mesh.size, nbytes * executable.mesh.size
