"""Checks that a step for microbatches of another shape can be a bucket of a step: work, sums and tasks are the same."""

from collections.abc import Hashable

from mpmd import _jax_compat as compat
from mpmd.compile.donation import donations
from mpmd.compile.program import step_program
from mpmd.compile.step import StepPrograms
from mpmd.errors import StageError
from mpmd.graphs import equations
from mpmd.ops.loop_primitive import treduce_p
from mpmd.ops.reductions import check_alike
from mpmd.partition.outline import Outline, Segment, with_microbatches
from mpmd.stages import Lowered
from scheduler import Free, Instruction, Program, Recv, Run, Send
from scheduler.base.collector import without_collection


def check_bucket(first: StepPrograms, lowered: Lowered) -> bool:
    """Checks that a step for microbatches of another shape has the same work outside its loops, the same tasks, and
    transfers between the same groups (else a StageError). Returns whether its whole program is the same.
    """
    counts = {loop.number: loop.partition.info.num_microbatches for loop in first.outline.loops}
    one, two = first.outline, with_microbatches(lowered._outline, counts)
    for a, b in zip(_loops(one), _loops(two), strict=True):
        check_alike(a.params["jaxpr"].out_avals, b.params["jaxpr"].out_avals, a.params["info"].operations)
    donated = donations(two, first.mesh, lowered._donated)
    with without_collection():
        programs = [step_program(o, first.mesh.num_groups, d) for o, d in ((one, first.donated), (two, donated))]
    for what, a, b in (
        ("work around its loops", _segments(one), _segments(two)),
        ("sums", _accumulators(one), _accumulators(two)),
        ("instructions", *map(_skeleton, programs)),
        ("arguments and results", *((p.inputs, p.outputs) for p in programs)),
        ("tasks", _tasks(one), _tasks(two)),
    ):
        if a != b:
            raise StageError(
                f"treduce: the step has other {what} for microbatches of some shapes of the list than for others"
                f"{_first_difference(one, two) or _other_reads(*programs)}.\n"
                "  Python code that looks at the shape of a microbatch may do that. Let what is around fun, and what a"
                " stage hands to the next, be the same for all shapes."
            )
    return programs[0].groups == programs[1].groups


def _other_reads(one: Program, two: Program) -> str:
    """Returns which arguments only one of two programs reads, or reads in other groups; "" if there are none."""
    first, second = ({(v.name, group) for group, vs in enumerate(p.inputs) for v in vs} for p in (one, two))
    names = sorted({name for name, _ in first ^ second})
    return f": it does not read {' and '.join(names)} for all of them" if names else ""


def _skeleton(program: Program) -> list[list[Hashable]]:
    """Returns, per group, the tasks, transfers and calls in order, without the values that stay in a group."""
    return [[what for i in instructions if (what := _what(i)) is not None] for instructions in program.groups]


def _what(i: Instruction) -> Hashable:
    match i:
        case Run():
            return "run", i.tasks, i.loop
        case Free() if i.value.microbatch is not None:
            return None
        case Send() if i.value.microbatch is not None:
            return "send", i.to_group, i.value.microbatch
        case Recv() if i.value.microbatch is not None:
            return "receive", i.from_group, i.value.microbatch
    return i


def _loops(outline: Outline) -> list[compat.JaxprEqn]:
    return [eqn for eqn in outline.trace.jaxpr.eqns if eqn.primitive is treduce_p]


def _segments(outline: Outline) -> list[Hashable]:
    items = [item for item in outline.items if isinstance(item, Segment)]
    keys = [compat.traced_again_key(compat.make_jaxpr(s.reads, s.writes, s.eqns, s.name)) for s in items]
    return [(s.name, s.group, key) for s, key in zip(items, keys, strict=True)]


def _first_difference(one: Outline, two: Outline) -> str:
    """Returns where the first equation around the loops stands that differs; "" if none does."""

    def key(eqn: compat.JaxprEqn) -> Hashable:
        alone = compat.make_jaxpr(equations.free_variables([eqn]), equations.outputs(eqn), [eqn], "")
        return compat.traced_again_key(alone)

    first, second = ([e for item in o.items if isinstance(item, Segment) for e in item.eqns] for o in (one, two))
    differs = next((b for a, b in zip(first, second, strict=False) if key(a) != key(b)), None)
    line = "" if differs is None else compat.source_line(differs)
    return f", first at {line}" if line else ""


def _accumulators(outline: Outline) -> list[Hashable]:
    found = [(loop.number, a) for loop in outline.loops for a in loop.partition.accumulators]
    return [(n, a.place, a.operation, a.value.aval.shape, a.value.aval.dtype) for n, a in found]


def _tasks(outline: Outline) -> list[Hashable]:
    """Returns all tasks, and whether each is empty."""
    return [(loop.number, [(t.place, t.is_empty) for t in loop.partition.tasks]) for loop in outline.loops]
