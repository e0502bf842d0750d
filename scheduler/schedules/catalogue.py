"""The built-in schedules by name, for the command line, the search and the documents."""

from dataclasses import replace

from scheduler.schedules.one_f_one_b import (
    ChainSchedule,
    EagerOneFOneB,
    GPipe,
    InterleavedGPipe,
    InterleavedOneFOneB,
    LoopSchedule,
    OneFOneB,
)
from scheduler.schedules.v_in_little_memory import VHalf, VMin
from scheduler.schedules.v_shaped import DualPipeV, VSchedule, ZeroBubbleV
from scheduler.schedules.zero_bubble import InterleavedZeroBubble, KimiK2, ZeroBubbleH1, ZeroBubbleH2
from scheduler.task import Schedule
from scheduler.timing.costs import Costs

SCHEDULES: dict[str, type[ChainSchedule] | type[LoopSchedule] | type[VSchedule]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "eager-1f1b": EagerOneFOneB,
    "zb-h1": ZeroBubbleH1,
    "zb-h2": ZeroBubbleH2,
    "interleaved-gpipe": InterleavedGPipe,
    "interleaved-1f1b": InterleavedOneFOneB,
    "kimi-k2": KimiK2,
    "interleaved-zb": InterleavedZeroBubble,
    "zb-v": ZeroBubbleV,
    "v-half": VHalf,
    "v-min": VMin,
    "dualpipe-v": DualPipeV,
}


def find(name: str) -> type[ChainSchedule] | type[LoopSchedule] | type[VSchedule]:
    """Returns the class for a name of the catalogue or of a class, upper or lower case."""
    return SCHEDULES[name_of(name)]


def name_of(name: str) -> str:
    """Returns the catalogue's name for a name of the catalogue or of a class, upper or lower case."""
    wanted = name.lower().replace("_", "-")
    for known, kind in SCHEDULES.items():
        if wanted in (known, kind.__name__.lower()):
            return known
    raise ValueError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}.")


def make(name: str, num_stages: int | None = None, num_groups: int | None = None) -> Schedule:
    """Makes a schedule from its name and whichever of its two numbers it needs.

    Args:
        name: A name of the catalogue (``python -m scheduler compare`` lists them) or of a class, in any case.
        num_stages: The number of stages.
        num_groups: The number of groups; by default one stage a group, and two where a schedule has several.

    Raises:
        ValueError: There is no such schedule, or none for these numbers.

    Examples:
        >>> make("1f1b", 4), make("zb-v", num_groups=2).num_stages
        (OneFOneB(num_stages=4), 4)
    """
    kind = find(name)
    if issubclass(kind, ChainSchedule):
        if num_groups not in (None, num_stages) and num_stages is not None:
            raise ValueError(f"{name} has one stage a group; num_stages is {num_stages} and num_groups {num_groups}.")
        return kind(_given(num_stages or num_groups))
    if issubclass(kind, VSchedule):
        if num_groups is None and num_stages is not None:
            if num_stages % 2:
                raise ValueError(f"{name} has two stages a group; num_stages is {num_stages}. Use an even number.")
            num_groups = num_stages // 2
        if num_stages not in (None, 2 * _given(num_groups)):
            raise ValueError(f"{name} has two stages a group; num_stages is {num_stages} and num_groups {num_groups}.")
        return kind(_given(num_groups))
    stages = _given(num_stages or 2 * _given(num_groups))
    if num_groups is None:
        num_groups = stages // 2 if stages % 2 == 0 else stages
    return kind(stages, num_groups)


def _given(number: int | None) -> int:
    if number is None:
        raise ValueError("the number of stages or of groups is needed.")
    return number


def for_marks(name: str, num_marks: int, num_groups: int) -> Schedule:
    """Returns the schedule of this name for a model with so many stage ends, the last of which may be left out.

    The groups determine the number of stages if each has one or two; if a group may have any number, the marks do.

    Raises:
        ValueError: There is no such schedule, or it needs another number of stages.
    """
    stages = None
    if issubclass(find(name), LoopSchedule):
        stages = next((n for n in (num_marks, num_marks + 1) if n and n % num_groups == 0), None)
        if stages is None:
            raise ValueError(
                f"{name} deals out its stages evenly to {num_groups} groups; "
                f"{num_marks} stage ends make {num_marks + 1} stages{f' or {num_marks}' if num_marks else ''}."
            )
    return make(name, stages, num_groups)


def on_groups(num_groups: int, stages_per_group: int = 2) -> dict[str, Schedule]:
    """Returns every built-in schedule by name, for a number of groups; the looped ones with so many stages a group."""
    return {
        name: kind(num_groups * stages_per_group, num_groups) if issubclass(kind, LoopSchedule) else kind(num_groups)
        for name, kind in SCHEDULES.items()
    }


def split_costs(costs: Costs, schedule: Schedule) -> Costs:
    """Divides the costs of one stage a group, for a schedule that cuts each group's work into several equal stages.

    Times and activations are divided among the group's stages; the cost of a transfer stays the same.
    """
    groups, per_group = schedule.num_groups, schedule.num_stages // schedule.num_groups
    if per_group == 1:
        return costs
    changed = {}
    for name in ("forward", "input_grad", "weight_grad", "activation_bytes", "released_at_input_grad"):
        values = costs.per_stage(name, groups)
        changed[name] = tuple(values[group] / per_group for group in schedule.placement)
    for name in ("transfer_s", "transfer_bytes"):
        values = costs.per_stage(name, groups)
        pairs = zip(schedule.placement, (*schedule.placement[1:], schedule.placement[-1]), strict=True)
        changed[name] = tuple(values[min(one, other)] for one, other in pairs)
    return replace(
        costs,
        **changed,
        microbatches=[split_costs(one, schedule) for one in costs.of_microbatches(len(costs.microbatches))],
    )
