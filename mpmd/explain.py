"""What a compiled step is, in words and numbers: what runs where, what is sent, what it costs."""

from collections import defaultdict

import scheduler
from mpmd import costs
from mpmd.stepping import StepPrograms
from scheduler import Program, Run, Send


def explain(programs: StepPrograms, program: Program, executor, in_avals, in_shardings) -> str:
    """A table per group and stage, and the step's totals."""
    lines = [f"step on {programs.mesh}"]
    memory = memory_by_group(programs, in_avals, in_shardings)
    sends = _sends(program)
    for group in range(programs.mesh.num_groups):
        m = memory[group]
        devices = list(programs.mesh.groups[group].devices.flat)
        shown = ", ".join(map(str, devices[:4])) + (" …" if len(devices) > 4 else "")
        lines.append(
            f"group {group} on {shown}:"
            f" arguments {_bytes(m['arguments'])}, activations in flight {_bytes(m['activations'])}"
            f" (peak), temporaries {_bytes(m['temporaries'])}"
        )
        for loop in programs.loops:
            lines += _stages(loop, group, in_shardings, programs)
        for target, (count, nbytes) in sorted(sends[group].items()):
            lines.append(f"  sends {_bytes(nbytes)} to group {target} in {count} transfers a step")
    for loop in programs.loops:
        info = loop.loop.partition.info
        timeline = scheduler.simulate(info.schedule, info.num_microbatches)
        lines.append(
            f"loop {loop.loop.number}: {info.schedule}, {info.num_microbatches} microbatches,"
            f" bubble {timeline.bubble_fraction:.1%} if all tasks take equally long"
        )
    compiler = programs.compiler
    programs_in_use = len(programs.segments) + sum(
        sum(t.executable is not None for t in loop.tasks.values()) + len(loop.zeros) for loop in programs.loops
    )
    lines.append(
        f"{programs_in_use} executables, {compiler.num_compiled} compiled"
        f" ({compiler.num_loaded} loaded on other devices);"
        f" {executor.num_calls} calls and {executor.num_moves} transfers ({_bytes(executor.bytes_moved)}) a step;"
        f" {flops_per_step(programs, program) / 1e9:.3g} GFLOP a step; transfers by jax.device_put"
    )
    return "\n".join(lines)


def _stages(loop, group, in_shardings, programs):
    placement = loop.loop.schedule.placement
    names = programs.outline.names
    for stage in (s for s in range(len(placement)) if placement[s] == group):
        bodies = [t for p, t in loop.tasks.items() if p.stage == stage]
        operands = {v for t in bodies for v in t.body.operands}
        nbytes = sum(costs.nbytes(v.aval) for v in operands)
        parts = []
        for t in bodies:
            flops = _flops(t.executable) if t.executable else 0.0
            parts.append(f"{t.body.place.kind} {'empty' if t.executable is None else f'{flops / 1e6:.3g} MFLOP'}")
        shown = sorted(names.get(v, "computed before the loop") for v in operands)
        more = f", … {len(shown) - 4} more" if len(shown) > 4 else ""
        yield f"  stage {stage}: reads {_bytes(nbytes)} ({', '.join(shown[:4])}{more}); {', '.join(parts)}"
        for t in bodies:
            if t.body.place.kind == "W":
                kept = sum(costs.nbytes(v.aval) for v in t.body.reads)
                yield f"    W keeps {_bytes(kept)} a microbatch"


def memory_by_group(programs: StepPrograms, in_avals, in_shardings) -> dict[int, dict[str, int]]:
    """Per group and device: bytes of arguments, of activations at their peak, of the largest temporaries."""
    found = {}
    report = scheduler.check(_program_of(programs))
    for group, mesh in enumerate(programs.mesh.groups):
        arguments = sum(
            _shard_bytes(aval, s, group) for aval, s in zip(in_avals, in_shardings, strict=True) if group in s.groups
        )
        resident = sum(costs.nbytes(aval) for aval, s in zip(in_avals, in_shardings, strict=True) if group in s.groups)
        temporaries = [
            getattr(e.call.memory_analysis(), "temp_size_in_bytes", 0) for e in executables(programs) if e.mesh == mesh
        ]
        found[group] = {
            "arguments": arguments,
            "activations": max(0, report.peak_bytes[group] - resident) // mesh.size,
            "temporaries": max(temporaries, default=0),
        }
    return found


def _program_of(programs):
    from mpmd.program import _Builder

    return _Builder(programs).build()


def executables(programs: StepPrograms):
    """Every executable of a step."""
    yield from programs.segments.values()
    for loop in programs.loops:
        yield from (t.executable for t in loop.tasks.values() if t.executable is not None)
        yield from (e for _, e in loop.zeros.values())


def flops_per_step(programs: StepPrograms, program: Program) -> float:
    """Floating-point operations of all calls of one step."""
    from mpmd.placing import Place

    total = sum(map(_flops, programs.segments.values()))
    for instructions in program.groups:
        for i in instructions:
            if isinstance(i, Run):
                for task in i.tasks:
                    entry = programs.loops[i.loop].tasks.get(Place(task.stage, task.kind))
                    if entry is not None and entry.executable is not None:
                        total += _flops(entry.executable)
    return total


def _flops(executable) -> float:
    analysis = executable.call.cost_analysis() or {}
    return max(0.0, float(analysis.get("flops", 0.0))) * executable.mesh.size


def _shard_bytes(aval, sharding, group) -> int:
    shape = sharding.group_sharding(group).shard_shape(aval.shape)
    whole = costs.size(aval)
    part = 1
    for n in shape:
        part *= n
    return costs.nbytes(aval) * part // whole if whole else 0


def _sends(program: Program):
    sends: list[dict[int, tuple[int, int]]] = [defaultdict(lambda: (0, 0)) for _ in program.groups]
    for group, instructions in enumerate(program.groups):
        for i in instructions:
            if isinstance(i, Send):
                count, nbytes = sends[group][i.to_group]
                sends[group][i.to_group] = count + 1, nbytes + program.nbytes.get(i.value.name, 0)
    return sends


def _bytes(n: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError
