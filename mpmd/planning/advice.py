"""Estimates how much less memory a group would need with recomputation, offloading, more stages or fewer rows.

Most of these estimates repeat the walk of `mpmd/report/memory.py` with other sizes of values.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.compile.program import edge_name
from mpmd.compile.step import StepPrograms
from mpmd.graphs import equations
from mpmd.graphs.body import Place
from mpmd.partition.outline import Loop
from mpmd.report.memory import Change, Sizes, peaks
from scheduler import Call, Program, Recv, Run, Value


class Saving(NamedTuple):
    """A change, and the bytes that it would save on each device of the group, roughly."""

    text: str
    nbytes: int


def savings(
    programs: StepPrograms,
    program: Program,
    sizes: Sizes,
    group: int,
    memory: dict[str, int],
    temporaries: Callable[[Run | Call], int],
) -> tuple[Saving, ...]:
    """Returns the savings of a group, the largest first, without savings of less than a hundredth. `memory` is the
    group's, from `measured`; `temporaries` returns those of an instruction that XLA reports.
    """

    def peak(change: Change, scaled: Callable[[Run | Call], int] = temporaries) -> int:
        return peaks(program, group, sizes, scaled, change)["peak"]

    def offloaded(value: Value, nbytes: int, is_in_host: bool) -> tuple[int, bool]:
        return nbytes, is_in_host or sizes.kind(value) == "state"

    def halved(value: Value, nbytes: int, is_in_host: bool) -> tuple[int, bool]:
        return nbytes // (1 if value.microbatch is None else 2), is_in_host

    held = sum(memory[kind] for kind in ("parameters", "state", "gradients"))
    found = [
        Saving("jax.checkpoint around each stage, which runs its forward pass once more",
               memory["peak"] - recomputed_peak(programs.outline.loops, program, sizes, group, temporaries)),
        Saving("the optimizer's state in host memory, but for what its update reads", memory["peak"] - peak(offloaded)),
        Saving("twice as many stages and groups (parameters, state and gradients halved)", held // 2),
        Saving("microbatches of half as many rows, and twice as many of them",
               memory["peak"] - peak(halved, lambda i: temporaries(i) // 2)),
    ]  # fmt: skip
    if (nbytes := _replicated(programs, sizes, group)) > 0:
        found.append(Saving("parameters and state divided over the devices of the group", nbytes))
    worth_while = memory["peak"] // 100
    return tuple(sorted((s for s in found if s.nbytes > worth_while), key=lambda s: -s.nbytes))


def recomputed_peak(
    loops: Iterable[Loop],
    program: Program,
    sizes: Sizes,
    group: int,
    temporaries: Callable[[Run | Call], int],
    stages: Collection[int] | None = None,
) -> int:
    """Returns the bytes that a group needs if backward tasks recompute residuals from the inputs of their stage.

    The stage's input is kept instead of the residuals, and a backward task has all residuals as temporaries.

    Args:
      stages: the stages that recompute; None for all of the group.
    """
    received = {i.value.name for i in program.groups[group] if isinstance(i, Recv)}
    remaining: dict[str, int] = {}
    again: dict[int, int] = defaultdict(int)
    for loop in loops:
        for stage, own in enumerate(loop.schedule.placement):
            if own != group or (stages is not None and stage not in stages):
                continue
            residuals, inputs = ([edge_name(loop, v) for v in vs] for vs in _residuals(loop, stage))
            nbytes = sum(sizes.nbytes(name, group)[0] for name in residuals)
            of_input = sum(sizes.nbytes(name, group)[0] for name in inputs if name in received)  # not kept yet
            if of_input < nbytes:
                remaining |= dict.fromkeys(residuals, 0) | {residuals[0]: of_input}
                again[stage] += nbytes

    def recomputed(value: Value, nbytes: int, is_in_host: bool) -> tuple[int, bool]:
        return (nbytes if value.microbatch is None else remaining.get(value.name, nbytes)), is_in_host

    def with_recomputation(instruction: Run | Call) -> int:
        backward = [t.stage for t in instruction.tasks if t.kind != "F"] if isinstance(instruction, Run) else []
        return temporaries(instruction) + max((again[s] for s in backward if s in again), default=0)

    return peaks(program, group, sizes, with_recomputation, recomputed)["peak"]


def _residuals(loop: Loop, stage: int) -> tuple[list[compat.Var], list[compat.Var]]:
    """Returns a stage's residuals for its own backward only, and forward inputs that the backward does not read."""
    tasks = loop.partition.tasks
    elsewhere = {v for t in tasks if t.place.stage != stage for v in t.reads}
    here = {v for t in tasks if t.place.stage == stage and t.place.kind != "F" for v in t.reads}
    forward = loop.partition.task(Place(stage, "F"))
    return [v for v in forward.writes if v in here and v not in elsewhere], [v for v in forward.reads if v not in here]


def _replicated(programs: StepPrograms, sizes: Sizes, group: int) -> int:
    """Returns the bytes that each device would save if the group's replicated parameters and state were divided."""
    count = programs.mesh.groups[group].size
    found = 0
    outline = programs.outline
    for v, groups in zip(outline.trace.jaxpr.invars, outline.inputs, strict=True):
        name = outline.names[v]
        if group not in groups or sizes.kind(Value(name)) not in ("parameters", "state"):
            continue
        nbytes, is_in_host = sizes.nbytes(name, group)
        if not is_in_host:
            whole = equations.nbytes(v.aval)
            found += nbytes - nbytes // count if nbytes == whole and v.aval.size >= count else 0
    return found
