"""Writes `explain()`: the programs of each group, the transfers, and the costs of a step."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpmd.compile.step import LoopProgram, StepPrograms
from mpmd.costs.collectives import collectives_of
from mpmd.graphs import equations
from mpmd.report.crossings import crossing_lines
from mpmd.report.flops import cost_per_step, flops_of
from mpmd.report.loop_notes import loop_lines, order_lines
from mpmd.report.memory import measured
from mpmd.report.repetition import repetition
from mpmd.report.roles import Roles
from mpmd.report.shares import Shares
from scheduler import Call, Program, Run, Send
from scheduler.base.texts import counted, in_bytes, in_seconds
from scheduler.optimize.cuts import Cut


class StepTraffic(NamedTuple):
    """The calls and transfers of one process (or of all of them) in a step."""

    num_calls: int  # the number of calls of executables
    num_moves: int  # the number of transfers that the process takes part in
    bytes_moved: int  # the bytes of these transfers
    transport: str  # how values go between groups

    @classmethod
    def of_all(cls, program: Program, transport: str, shares: Shares) -> "StepTraffic":
        """Returns the traffic of all groups, by the program."""
        num_calls = sum(isinstance(i, (Run, Call)) for group in program.groups for i in group)
        every = (sent_by(program, group, shares) for group in range(len(program.groups)))
        sent = [nbytes for of_group in every for sizes in of_group.values() for nbytes in sizes]
        return cls(num_calls, len(sent), sum(sent), transport)


def explain(
    programs: StepPrograms,
    program: Program,
    traffic: StepTraffic,
    shares: Shares,
    notes: Sequence[str] = (),
    limit: float | None = None,
) -> str:
    """Returns a table for each group and stage, and the step's totals.

    Args:
      notes: lines on the values that cross outside of the loops.
      limit: bytes that a group may use on each device; None if that is not known.
    """
    lines = [f"step on {programs.mesh}"]
    memory, roles = measured(programs, program), Roles(programs.outline)
    for group in range(programs.mesh.num_groups):
        lines += _group_lines(programs, program, group, roles, memory.get(group), shares)
    lines += _memory_lines(memory, limit)
    for compiled in programs.loops:
        loop = compiled.loop
        info = loop.partition.info
        timeline = loop.simulated()
        lines.append(
            f"loop {loop.number}: {info.schedule}, {counted(info.num_microbatches, 'microbatch')},"
            f" bubble {timeline.bubble_fraction:.1%} if all tasks take equally long"
        )
        if info.cuts is not None:
            lines.append(_cut_line(info.cuts, info.choice))
        lines += loop_lines(compiled, roles, timeline.bubble_fraction)
        if loop.number in shares.lists:
            lines += order_lines(loop, shares.lists[loop.number].costs)
    if not programs.loops and (marks := programs.outline.trace.num_marks):
        lines.append(
            f"no pipelined loop: one batch passes {marks} stage end{'s' * (marks > 1)} one after the other, so groups"
            " wait for each other; a treduce over several batches keeps them busy (docs/inference.md)"
        )
    if (repeated := repetition(programs)) is not None:
        lines.append(f"warning: {repeated}")
    lines += [*crossing_lines(programs.outline), *notes]
    lines += _collective_lines(programs)
    compiler = programs.compiler
    in_use = len(programs.segments) + sum(len(p.executables) + len(p.fused) + len(p.zeros) for p in programs.loops)
    stored = f"{compiler.num_stored} from the compilation cache, " if compiler.num_stored else ""
    here = counted(compiler.num_programs + compiler.num_loaded, "program")
    lines.append(
        f"{in_use} executables of all groups; {here} on devices of this process: {compiler.num_compiled} compiled,"
        f" {stored}{compiler.num_loaded} copies of these loaded on other devices (equal executables share programs, a"
        " long one may run as several);"
        f" {counted(traffic.num_calls, 'call')} and {counted(traffic.num_moves, 'transfer')}"
        f" ({in_bytes(traffic.bytes_moved)}) a step;"
        f" {cost_per_step(programs, program, shares)[0] / 1e9:.3g} GFLOP a step; transfers {traffic.transport}"
    )
    return "\n".join(lines)


def _cut_line(layers: tuple[int, ...], cut: Cut | None) -> str:
    """Returns a line on the number of layers in each stage, and on the costs of other cuts."""
    if cut is None:
        return f"  layers of each stage: {layers}, as given by cuts="

    def more(seconds: float, excess: float = 0.0) -> str:
        if excess and not cut.excess:
            return "does not fit"
        return f"{seconds / cut.makespan - 1:+.1%}" if cut.makespan else "+0.0%"

    text = (
        f"  layers of each stage: {layers}, chosen: {in_seconds(cut.makespan)} by the operations and bytes of each"
        f" layer; even {cut.even} {more(cut.even_makespan, cut.even_excess)}"
    )
    if cut.near not in (cut.layers, cut.even):
        moved = "with one layer moved" if cut.near_makespan >= cut.makespan else "the fastest that was found"
        text += f", {moved} {cut.near} {more(cut.near_makespan)}"
    if cut.excess:
        return f"{text}; a device lacks {in_bytes(cut.excess)}, and no cut that was tried needs less"
    return f"{text}; {'no cut is faster' if cut.is_best else f'at most {cut.gap:.1%} above the lower bound'}"


def sent_by(program: Program, group: int, shares: Shares) -> dict[int, list[int]]:
    """Returns the bytes of each value that a group sends in a step, by the group that it goes to."""
    sent: dict[int, list[int]] = defaultdict(list)
    for i in program.groups[group]:
        if isinstance(i, Send):
            sent[i.to_group].append(round(program.nbytes.get(i.value.name, 0) * shares.sent(i.value, i.to_group)))
    return dict(sorted(sent.items()))


def _group_lines(
    programs: StepPrograms, program: Program, group: int, roles: Roles, memory: dict[str, int] | None, shares: Shares
) -> Iterator[str]:
    devices = list(programs.mesh.groups[group].devices.flat)
    shown = ", ".join(map(str, devices[:4])) + (" …" if len(devices) > 4 else "")
    per_device = "" if memory is None else _per_device(memory, roles)
    yield f"group {group} on {shown}: {_held(group, roles)}{per_device}"
    for loop in programs.loops:
        placement = loop.loop.schedule.placement
        for stage in range(len(placement)):
            if placement[stage] == group:
                yield from _stage_lines(loop, stage, roles)
    for target, sizes in sent_by(program, group, shares).items():
        yield f"  sends {in_bytes(sum(sizes))} to group {target} in {counted(len(sizes), 'transfer')} a step"


def _memory_lines(memory: Mapping[int, Mapping[str, int]], limit: float | None) -> Iterator[str]:
    """Yields a line that compares the group with the largest need to the memory of a device."""
    if limit is None or not memory:
        return
    group = max(memory, key=lambda g: memory[g]["peak"])
    peak = memory[group]["peak"]
    share = f"{in_bytes(peak)} of the {in_bytes(limit)} that it may use on each device ({peak / limit:.0%})"
    yield f"memory: group {group} needs most, {share}"
    if over := [str(g) for g in sorted(memory) if memory[g]["peak"] > limit]:
        those = f"groups {', '.join(over)} need" if len(over) > 1 else f"group {over[0]} needs"
        yield (
            f"warning: it does not fit: {those} more than a device has for a group.\n"
            "  jax.checkpoint around layers, smaller microbatches, more stages or another schedule need less;"
            " python -m mpmd plan estimates what each of them saves (docs/planning.md)."
        )


def _stage_lines(loop: LoopProgram, stage: int, roles: Roles) -> Iterator[str]:
    tasks = [t for p, t in loop.tasks.items() if p.stage == stage]
    parameters = roles.read_by(t.body for t in tasks)
    count, nbytes = (sum(size(v.aval) for v in parameters) for size in (equations.size, equations.nbytes))
    costs = [
        f"{t.body.place.kind} {f'{flops_of(t.executable) / 1e6:.3g} MFLOP' if t.executable else 'empty'}" for t in tasks
    ]
    names = sorted(roles.names[v] for v in parameters)
    more = f", … {len(names) - 4} more" if len(names) > 4 else ""
    named = f" ({', '.join(names[:4])}{more})" if names else ""
    label = loop.loop.partition.labels[stage]
    title = f"stage {stage} ({label})" if label else f"stage {stage}"
    held = f"{count:,} parameters," if roles.trains else "reads arguments of"
    yield f"  {title}: {held} {in_bytes(nbytes)}{named}; {', '.join(costs)}"
    for t in tasks:
        if t.body.place.kind == "W":
            yield f"    W keeps {in_bytes(sum(equations.nbytes(v.aval) for v in t.body.reads))} a microbatch"


_BESIDE = " beside products"


def collectives(programs: StepPrograms) -> dict[str, dict[str, int]]:
    """Counts the collectives of XLA in each program that this process runs: `{"B0": {"all-reduce": 1}}`.

    A collective that runs while matrix products run is counted as `"all-reduce beside products"`.

    If a gradient is summed over devices once a step, its `all-reduce` is in a segment after the loop. In a backward
    task it runs once a microbatch. docs/compatibility.md explains how to write the former.
    """
    local = [programs.mesh.groups[g] for g in programs.mesh.local_groups]
    named = dict(programs.segments)
    for loop in programs.loops:
        prefix = programs.prefix_of(loop)
        named.update((f"{prefix}{place}", executable) for place, executable in loop.executables.items())
        pairs = {f"{prefix}{first}+{second}": executable for (first, second), executable in loop.fused.items()}
        named.update(sorted(pairs.items()))
    found: dict[str, dict[str, int]] = {}
    for name, executable in named.items():
        if executable.mesh in local and executable.mesh.size > 1:
            all_of_them = collectives_of(executable.call.as_text(), executable.mesh.size)
            count = Counter(c.kind + _BESIDE * c.is_hidden for c in all_of_them)
            if count:
                found[name] = dict(sorted(count.items()))
    return found


def _collective_lines(programs: StepPrograms) -> Iterator[str]:
    """Yields the collectives inside of groups: in tasks they run once a microbatch, elsewhere once a step."""
    found = collectives(programs)
    groups = sorted(programs.mesh.local_groups)
    here = f", in group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))} of this process"
    here = "" if len(groups) == programs.mesh.num_groups else here
    kinds = {n: "a step, around the loops" if n in programs.segments else "a microbatch, in tasks" for n in found}
    kinds |= {n: "of two tasks that run as one" for n in found if "+" in n}
    for where in dict.fromkeys(kinds.values()):
        chosen = {n: c for n, c in found.items() if kinds[n] == where}
        if chosen:
            each = ", ".join(f"{name} {_counted(count)}" for name, count in chosen.items())
            yield f"collectives {where}{here}: {_counted(sum(map(Counter, chosen.values()), Counter()))} ({each})"


def _counted(count: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in count.items())


def _held(group: int, roles: Roles) -> str:
    held = roles.bytes_in(group)
    parameters, state, data = (in_bytes(held[role]) for role in ("parameters", "state", "data"))
    if roles.trains:
        return f"parameters {parameters}, optimizer and other state {state}, data {data}"
    return f"parameters and data {in_bytes(held['parameters'] + held['data'])}, caches and other state {state}"


def _per_device(m: dict[str, int], roles: Roles) -> str:
    made = "gradients" if roles.trains else "results"
    in_host = f", in host memory {in_bytes(m['host'])}" if m["host"] else ""
    return (
        f"; per device: arguments {in_bytes(m['arguments'])}, {made} {in_bytes(m['gradients'])}, activations in flight"
        f" {in_bytes(m['activations'])} (peak), temporaries {in_bytes(m['temporaries'])}, at most {in_bytes(m['peak'])}"
        f"{in_host}"
    )
