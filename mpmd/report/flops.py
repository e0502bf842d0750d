"""Floating-point operations, by XLA's cost analysis of each executable, or counted where XLA has none."""

from mpmd import _jax_compat as compat
from mpmd.compile.compiler import Executable
from mpmd.compile.step import StepPrograms
from mpmd.partition.graph import Place
from mpmd.report.work import work_of
from scheduler import Program, Run


def flops_per_step(programs: StepPrograms, program: Program) -> float:
    """Floating-point operations of all calls of one step."""
    total = sum(map(flops_of, programs.segments.values()))
    loops = [loop.executables for loop in programs.loops]
    runs = (i for instructions in program.groups for i in instructions if isinstance(i, Run))
    for run in runs:
        for task in run.tasks:
            if (executable := loops[run.loop].get(Place(task.stage, task.kind))) is not None:
                total += flops_of(executable)
    return total


def flops_of(executable: Executable) -> float:
    """Floating-point operations of a call, on all devices of its group."""
    if compat.is_described(executable.mesh.devices.flat[0]):  # XLA tells nothing
        return sum(work_of(program.closed.jaxpr).flops for program in executable.runs)
    analysis = executable.call.cost_analysis() or {}
    return max(0.0, float(analysis.get("flops", 0.0))) * executable.mesh.size
