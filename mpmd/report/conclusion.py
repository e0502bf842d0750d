"""The first sentences of a report: how busy the groups are, the largest loss of time, and one thing to do about it."""

import contextlib
from collections.abc import Sequence

from mpmd.compile.step import LoopProgram
from mpmd.report.profile import Profile, TimeShare, loop_parts, stragglers
from scheduler.base.texts import in_seconds

_ADVICE = {
    "uneven stages": "Give that stage fewer layers. With mpmd.mark_layer_end after each layer the library chooses the"
    " cut, and mpmd.tune cuts again by measured times.",
    "microbatches of several shapes": "Look for another order (scheduler.order_microbatches with profile.costs()), or"
    " deal documents so that microbatches take equally long.",
    "transfers that nothing hides": "Use larger microbatches or fewer stages, or a schedule that sends ahead"
    " (EagerOneFOneB).",
    "before and after the loops": "Look at the grey programs: an update of the optimizer that waits for other groups,"
    " or work that could be inside the loop.",
    "late hosts": "Tasks are short beside the time that Python needs to start them: use larger microbatches.",
    "the rest": "Tasks take unequally long from one microbatch to the next: is something else running on the machines?",
}


def conclusion(profile: Profile | None, loops: Sequence[LoopProgram]) -> list[str]:
    """Returns sentences: how busy the groups are, the largest cost, and one thing to do about it, if there is a cost.

    They are about the profile. Without one, they are about the schedule if all tasks take equally long. Empty if there
    is no loop either.
    """
    if profile is not None:
        return _measured(profile, loops)
    if not loops:
        return []
    loop = loops[0]
    bubble = loop.loop.simulated().bubble_fraction
    busy = f"The groups compute for {1 - bubble:.0%} of loop {loop.loop.number}, if all tasks take equally long."
    if bubble <= 0.005:
        return [busy]
    return [busy, f"The rest, {bubble:.0%}, is the bubble of the schedule.", f"Advice: {_more_microbatches(loop)}"]


def _measured(profile: Profile, loops: Sequence[LoopProgram]) -> list[str]:
    step = profile.typical
    seconds = max(step.seconds, 1e-12)
    share = sum(spent.busy for spent in step.spent) / len(step.spent) / seconds
    busy = f"The groups compute for {share:.0%} of a step of {in_seconds(seconds)}."
    indices = profile.measured_loops
    losses = [(part, k) for k in indices for part in loop_parts(profile, k)[1:]]
    if indices:
        outside = seconds - sum(profile.timeline(k).makespan for k in indices)
        losses.append((TimeShare(outside, "before and after the loops"), indices[0]))
    part, index = max(losses, key=lambda one: one[0].seconds, default=(TimeShare(0.0, ""), 0))
    if part.seconds < 0.01 * seconds:
        return [busy]
    cause = part.detail if part.name == "the rest" else f"{part.name}{part.detail and ': ' + part.detail}"
    loss = f"Most of the rest, {in_seconds(part.seconds)} ({part.seconds / seconds:.0%}), goes to {cause}."
    return [busy, loss, f"Advice: {_advice(profile, index, part, loops)}"]


def _advice(profile: Profile, index: int, part: TimeShare, loops: Sequence[LoopProgram]) -> str:
    if part.name == "bubble of the schedule":
        return _more_microbatches(next(x for x in loops if x.loop.number == profile.loops[index].number))
    if part.name == "the rest" and max(spent.late for spent in profile.typical.spent) > part.seconds / 2:
        return _ADVICE["late hosts"]
    if part.name in ("uneven stages", "the rest") and (slow := next(stragglers(profile, index), "")):
        return f"{slow[0].upper()}{slow[1:]}."
    return _ADVICE[part.name]


def _more_microbatches(loop: LoopProgram) -> str:
    count = loop.loop.partition.info.num_microbatches
    with contextlib.suppress(ValueError):  # custom orders are for one number of microbatches
        more, now = loop.loop.bubble(2), loop.loop.simulated().bubble_fraction
        return (
            f"Use more microbatches: with {2 * count} in place of {count} the bubble is {more:.0%} of the loop in place"
            f" of {now:.0%}. mpmd.tune also compares schedules."
        )
    return "Use a schedule with a smaller bubble: mpmd.tune compares them."
