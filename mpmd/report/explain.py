"""What a compiled step is, in words and numbers: what runs where, what is sent, what it costs."""

import re
from collections import Counter, defaultdict
from typing import Protocol

from mpmd.compile.step import StepPrograms
from mpmd.partition import equations
from mpmd.partition.graph import Place
from mpmd.partition.outline import Outline, Segment
from mpmd.report.crossings import crossing_lines
from mpmd.report.memory import measured
from scheduler import Program, Run, Send
from scheduler.timing.simulate import simulate_orders


class Traffic(Protocol):
    """What one process does in a step: executables that it calls, transfers that it has to do with, and their bytes."""

    @property
    def num_calls(self) -> int: ...
    @property
    def num_moves(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...


def explain(programs: StepPrograms, program: Program, traffic: Traffic, transport: str) -> str:
    """A table per group and stage, and the step's totals.

    Args:
      transport: how values go between groups.
    """
    lines = [f"step on {programs.mesh}"]
    memory = memory_by_group(programs, program)
    sends = _sends(program)
    roles = Roles(programs.outline)
    for group, mesh in enumerate(programs.mesh.groups):
        m = memory.get(group)
        devices = list(mesh.devices.flat)
        shown = ", ".join(map(str, devices[:4])) + (" …" if len(devices) > 4 else "")
        lines.append(f"group {group} on {shown}: {_held(group, roles)}{'' if m is None else _per_device(m, roles)}")
        for loop in programs.loops:
            lines += _stages(loop, group, roles)
        for target, (count, nbytes) in sorted(sends[group].items()):
            lines.append(f"  sends {_bytes(nbytes)} to group {target} in {count} transfers a step")
    for loop in programs.loops:
        info = loop.loop.partition.info
        timeline = simulate_orders(loop.loop.orders, info.schedule.placement, info.num_microbatches)
        lines.append(
            f"loop {loop.loop.number}: {info.schedule}, {info.num_microbatches} microbatches,"
            f" bubble {timeline.bubble_fraction:.1%} if all tasks take equally long"
        )
    if not programs.loops and (marks := programs.outline.trace.num_marks):
        lines.append(
            f"no pipelined loop: one batch passes the {marks} stage ends one after the other, so groups wait for each"
            " other; a treduce over several batches keeps them busy (docs/inference.md)"
        )
    lines += crossing_lines(programs.outline, _bytes)
    lines += _collective_lines(programs)
    compiler = programs.compiler
    in_use = sum(1 for _ in executables(programs))
    lines.append(
        f"{in_use} executables, {compiler.num_compiled} compiled ({compiler.num_loaded} loaded on other devices);"
        f" {traffic.num_calls} calls and {traffic.num_moves} transfers ({_bytes(traffic.bytes_moved)}) a step;"
        f" {flops_per_step(programs, program) / 1e9:.3g} GFLOP a step; transfers {transport}"
    )
    return "\n".join(lines)


_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(programs: StepPrograms) -> dict[str, dict[str, int]]:
    """How often each collective of XLA stands in each program that this process runs: `{"B0": {"all-reduce": 1}}`.

    A gradient that is summed over devices once a step has its `all-reduce` in a segment after the loop; in a backward
    task it runs once a microbatch. See docs/compatibility.md for how to write the former.
    """
    local = [programs.mesh.groups[g] for g in programs.mesh.local_groups]
    named = [(name, e) for name, e in programs.segments.items()]
    for loop in programs.loops:
        prefix = f"loop{loop.loop.number}:" if len(programs.loops) > 1 else ""
        named += [(f"{prefix}{p}", t.executable) for p, t in loop.tasks.items() if t.executable is not None]
    found = {}
    for name, executable in named:
        if executable.mesh in local and executable.mesh.size > 1:
            count = Counter(_COLLECTIVE.findall(executable.call.as_text()))
            if count:
                found[name] = dict(sorted(count.items()))
    return found


def _collective_lines(programs: StepPrograms):
    """Collectives inside of groups: those of tasks run once a microbatch, the others once a step."""
    found = collectives(programs)
    for where, chosen in (
        ("a step, around the loops", {n: c for n, c in found.items() if n in programs.segments}),
        ("a microbatch, in tasks", {n: c for n, c in found.items() if n not in programs.segments}),
    ):
        if chosen:
            each = ", ".join(f"{name} {_counted(count)}" for name, count in chosen.items())
            yield f"collectives {where}: {_counted(sum(map(Counter, chosen.values()), Counter()))} ({each})"


def _counted(count) -> str:
    return ", ".join(f"{n} {name}" for name, n in count.items())


def _held(group: int, roles: "Roles") -> str:
    held = {role: _bytes(nbytes) for role, nbytes in roles.bytes_in(group).items()}
    if roles.trains:
        return f"parameters {held['parameters']}, optimizer and other state {held['state']}, data {held['data']}"
    return f"parameters and data {held['data']}, caches and other state {held['state']}"


def _per_device(m: dict[str, int], roles: "Roles") -> str:
    made = "gradients" if roles.trains else "results"
    in_host = f", in host memory {_bytes(m['host'])}" if m["host"] else ""
    return (
        f"; per device: arguments {_bytes(m['arguments'])}, {made} {_bytes(m['gradients'])}, activations in flight"
        f" {_bytes(m['activations'])} (peak), temporaries {_bytes(m['temporaries'])}, at most {_bytes(m['peak'])}"
        f"{in_host}"
    )


class Roles:
    """What each argument is to the step: a parameter (a loop reads it, the step returns it), other state, or data.

    Where no loop has a backward pass, nothing tells parameters from data, and what the step returns is state.
    """

    def __init__(self, outline: Outline):
        num_consts = len(outline.trace.consts)
        self.args = outline.trace.jaxpr.invars[num_consts:]
        self.groups = outline.inputs[num_consts:]
        self.names = outline.names
        self.roots = {v: {v} for v in self.args}
        for item in outline.items:
            if isinstance(item, Segment):
                for eqn in item.eqns:
                    found = set().union(*(self.roots.get(v, set()) for v in equations.variables(eqn.invars)))
                    self.roots.update((v, found) for v in eqn.outvars)
        tasks = [t for loop in outline.loops for t in loop.partition.tasks]
        self.trains = any(t.place.kind != "F" and not t.is_empty for t in tasks)
        returned = {self.args[d] for d in outline.donors if d is not None}
        read = {v for t in tasks for v in self.arguments(t.operands)} if self.trains else set()
        self.role = {
            v: "data" if v not in returned else "parameters" if v in read and equations.size(v.aval) > 1 else "state"
            for v in self.args
        }

    def arguments(self, operands) -> set:
        """The arguments that these values are computed from."""
        return set().union(*(self.roots.get(v, set()) for v in operands))

    def bytes_in(self, group: int) -> dict[str, int]:
        """Bytes in a group by role, over all of its devices, replicas not counted."""
        held = {"parameters": 0, "state": 0, "data": 0}
        for v, groups in zip(self.args, self.groups, strict=True):
            if group in groups:
                held[self.role[v]] += equations.nbytes(v.aval)
        return held


def _stages(loop, group, roles: Roles):
    placement = loop.loop.schedule.placement
    for stage in (s for s in range(len(placement)) if placement[s] == group):
        bodies = [t for p, t in loop.tasks.items() if p.stage == stage]
        found = roles.arguments({v for t in bodies for v in t.body.operands})
        parameters = [v for v in found if roles.role[v] == "parameters" or not roles.trains]
        count, nbytes = (
            sum(equations.size(v.aval) for v in parameters),
            sum(equations.nbytes(v.aval) for v in parameters),
        )
        parts = []
        for t in bodies:
            cost = f"{_flops(t.executable) / 1e6:.3g} MFLOP" if t.executable else "empty"
            parts.append(f"{t.body.place.kind} {cost}")
        shown = sorted(roles.names[v] for v in parameters)
        more = f", … {len(shown) - 4} more" if len(shown) > 4 else ""
        named = f" ({', '.join(shown[:4])}{more})" if shown else ""
        label = loop.loop.partition.labels[stage]
        title = f"stage {stage} ({label})" if label else f"stage {stage}"
        held = f"{count:,} parameters," if roles.trains else "reads arguments of"
        yield f"  {title}: {held} {_bytes(nbytes)}{named}; {', '.join(parts)}"
        for t in bodies:
            if t.body.place.kind == "W":
                kept = sum(equations.nbytes(v.aval) for v in t.body.reads)
                yield f"    W keeps {_bytes(kept)} a microbatch"


def memory_by_group(programs: StepPrograms, program: Program) -> dict[int, dict[str, int]]:
    """Per group of this process, bytes on each device; see `mpmd.memory.measured`."""
    return measured(programs, program, Roles(programs.outline).role)


def executables(programs: StepPrograms):
    """Every executable of a step."""
    yield from programs.segments.values()
    for loop in programs.loops:
        yield from (t.executable for t in loop.tasks.values() if t.executable is not None)
        yield from loop.fused.values()
        yield from (e for _, e in loop.zeros.values())


def flops_per_step(programs: StepPrograms, program: Program) -> float:
    """Floating-point operations of all calls of one step."""
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
