"""Names programs for profiles and dumps.

A task's program is called after the step, the stage and the kind: `gpt_stage2_F`, or `gpt_stage2_decoder_F` where the
mark at the stage's end has the name "decoder". Equal programs are compiled once, under the name of the first of them.
"""

from collections import Counter

from mpmd.graphs.body import Place
from mpmd.partition.outline import Loop, Outline, Segment


def task_name(step: str, loop: Loop, *places: Place) -> str:
    """The program of a task, or of a pair of tasks that run as one."""
    parts = [step, _number(loop)]
    for place in places:
        parts += [f"stage{place.stage}", loop.partition.labels[place.stage], place.kind]
    return "_".join(p for p in parts if p)


def zeros_name(step: str, loop: Loop, group: int) -> str:
    """The program that makes a group's accumulators."""
    return "_".join(p for p in (step, _number(loop), "zeros", f"group{group}") if p)


def segment_names(step: str, outline: Outline) -> dict[str, str]:
    """Each segment's program: where it stands (before, between or after the loops) and its group."""
    passed, count = 0, Counter()
    names = {}
    for item in outline.items:
        if isinstance(item, Loop):
            passed += 1
        elif isinstance(item, Segment):
            total = len(outline.loops)
            where = "before_loop" if passed == 0 else "after_loop" if passed == total else "between_loops"
            name = "_".join(p for p in (step, where if total else "", f"group{item.group}") if p)
            count[name] += 1
            names[item.name] = name if count[name] == 1 else f"{name}_{count[name]}"
    return names


def _number(loop: Loop) -> str:
    return f"loop{loop.number}" if loop.number else ""
