"""Floating-point operations and bytes, by XLA's cost analysis of each executable, or counted where XLA has none."""

from collections.abc import Callable

from mpmd import _jax_compat as compat
from mpmd.compile.compiler import Executable
from mpmd.compile.step import StepPrograms
from mpmd.partition.graph import Place
from mpmd.report.work import work_of
from scheduler import Program, Run


def flops_per_step(programs: StepPrograms, program: Program) -> float:
    """Floating-point operations of all calls of one step."""
    return _per_step(programs, program, flops_of)


def nbytes_per_step(programs: StepPrograms, program: Program) -> float:
    """Bytes that all calls of one step read from and write to device memory, on all devices."""
    return _per_step(programs, program, lambda executable: _cost_of(executable)[1])


def flops_of(executable: Executable) -> float:
    """Floating-point operations of a call, on all devices of its group."""
    return _cost_of(executable)[0]


def _per_step(programs: StepPrograms, program: Program, cost: Callable[[Executable], float]) -> float:
    total = sum(map(cost, programs.segments.values()))
    loops = [loop.executables for loop in programs.loops]
    runs = (i for instructions in program.groups for i in instructions if isinstance(i, Run))
    for run in runs:
        for task in run.tasks:
            if (executable := loops[run.loop].get(Place(task.stage, task.kind))) is not None:
                total += cost(executable)
    return total


def _cost_of(executable: Executable) -> tuple[float, float]:
    """Operations and bytes of a call, on all devices of its group."""
    if compat.is_described(executable.mesh.devices.flat[0]):  # XLA tells nothing
        works = [work_of(program.closed.jaxpr) for program in executable.runs]
        return sum(work.flops for work in works), sum(work.nbytes for work in works)
    analysis = executable.call.cost_analysis() or {}
    flops, nbytes = (max(0.0, float(analysis.get(key, 0.0))) for key in ("flops", "bytes accessed"))
    return flops * executable.mesh.size, nbytes * executable.mesh.size
