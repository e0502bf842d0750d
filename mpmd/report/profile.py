"""A measured run: where its time went, compared with a simulation of the same steps."""

import dataclasses
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from typing import Any

from mpmd.compile.program import loop_of
from mpmd.pytrees import PyTree
from mpmd.report.chrome_trace import trace_events
from mpmd.report.steps import Step
from mpmd.report.task_costs import boundaries
from scheduler import Costs, Timeline
from scheduler.base import texts
from scheduler.base.texts import counted, in_bytes, in_seconds
from scheduler.task import Orders, Reads
from scheduler.timing.simulate import simulate_orders, timeline_of
from scheduler.timing.timeline import to_text

# A rank or a group that is slower by this factor than similar ones is named.
_SLOW = 1.15
# This many tasks of a group can be told apart in a row of text.
_DRAWN = 60


@dataclasses.dataclass(frozen=True)
class LoopFacts:
    """The facts about a pipelined loop in a profile.

    Attributes:
      flops: the operations of a task by stage and kind, on all devices of its group; for a list, the mean over its
        microbatches.
    """

    number: int
    schedule: str
    placement: tuple[int, ...]  # the group of each stage
    reads: Reads | None  # the stages that each stage exchanges values with; None for a chain
    orders: Orders  # the planned tasks of each group, in order
    shapes: tuple[str, ...]  # the shape of each microbatch; "" for all microbatches of arrays
    flops: Mapping[tuple[int, str], float]
    labels: tuple[str, ...]  # the name of each stage; empty if it has none

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches in each measured step."""
        return len(self.shapes)


@dataclasses.dataclass(frozen=True, repr=False)
class Profile:
    """A measurement by `Compiled.profile`. `str()` lists the parts of the time and their reasons."""

    name: str  # the name of the step
    steps: tuple[Step, ...]  # the measured steps, in order
    ranks: tuple[tuple[int, ...], ...]  # the processes of each group
    loops: tuple[LoopFacts, ...]  # the pipelined loops of the step
    clock_error_s: float  # the largest error of the difference between the clocks of two processes
    result: PyTree = None  # the result of the last step, as a call returns it

    @functools.cached_property
    def typical(self) -> Step:
        """The step of median length."""
        return sorted(self.steps, key=lambda s: s.seconds)[(len(self.steps) - 1) // 2]

    @functools.cached_property
    def measured_loops(self) -> tuple[int, ...]:
        """The indices of the loops with tasks that ran. A loop whose work is all outside of it has none."""
        ran = {r.loop for r in self.typical.runs if r.tasks} if self.steps else set()
        return tuple(k for k, facts in enumerate(self.loops) if facts.number in ran)

    def _facts_of(self, loop: int) -> LoopFacts:
        """Returns the facts about a loop by its index in the step; negative indices count from the last loop. Raises a
        ValueError if there is no such loop.
        """
        if not -len(self.loops) <= loop < len(self.loops):
            number = counted(len(self.loops), "treduce loop")
            raise ValueError(f"profile: the step has {number}, so there is no loop {loop}.")
        if loop % len(self.loops) not in self.measured_loops:
            raise ValueError(f"profile: no task of loop {loop} ran, since none of its work depends on a microbatch.")
        return self.loops[loop]

    def timeline(self, loop: int = -1, step: Step | None = None) -> Timeline:
        """Returns a loop of a step (by default of the typical one) as a `scheduler.Timeline` with median durations."""
        facts = self._facts_of(loop)
        step = self.typical if step is None else step
        runs = [r for group in step.by_group for r in group if r.tasks and r.loop == facts.number]
        return timeline_of(((r.group, r.tasks, r.start, r.end) for r in runs), facts.placement, "measured")

    def costs(self, loop: int = -1) -> Costs:
        """Returns the costs of a loop over all steps: medians by stage and kind, mean transfers by pair of groups.

        In a list with several shapes, each shape is measured separately, for `Costs.microbatches`.
        """
        facts = self._facts_of(loop)
        found = {shape: self._costs_of(facts, {shape}) for shape in dict.fromkeys(facts.shapes)}
        if len(found) == 1:
            return found[facts.shapes[0]]
        every = tuple(found[shape] for shape in facts.shapes)
        return dataclasses.replace(self._costs_of(facts, found), microbatches=every)

    def _costs_of(self, facts: LoopFacts, shapes: Container[str]) -> Costs:
        """Returns the costs of the microbatches of some shapes."""
        own = {m for m, shape in enumerate(facts.shapes) if shape in shapes}
        durations = [
            (task, (r.end - r.start) / len(r.tasks))
            for s in self.steps for group in s.by_group for r in group if r.loop == facts.number for task in r.tasks
            if task.microbatch in own
        ]  # fmt: skip
        seconds: dict[frozenset[int], list[float]] = defaultdict(list)
        for s in self.steps:
            for m in s.moves:
                if m.microbatch in own and loop_of(m.way.value) == facts.number:
                    seconds[frozenset((m.way.source, m.way.target))].append(m.end - m.start)
        means = {pair: statistics.fmean(values) for pair, values in seconds.items()}
        transfers = boundaries(facts.placement, facts.reads, lambda a, b: means.get(frozenset((a, b)), 0.0))
        measured = Costs.measured(durations)
        names = ("forward", "input_grad", "weight_grad", "recompute")
        have: dict[str, Any] = {name: getattr(measured, name) for name in names}
        num = len(facts.placement)
        have = {n: (*v, *[0.0] * (num - len(v))) if isinstance(v, tuple) else v for n, v in have.items()}
        return Costs(transfer_s=transfers, **have)

    def simulated(self, costs: Costs | None = None, loop: int = -1) -> Timeline:
        """Simulates the loop with these costs for its tasks; by default with the measured ones."""
        facts = self._facts_of(loop)
        runs = [r for group in self.typical.by_group for r in group if r.loop == facts.number]
        kinds = {task.kind for r in runs for task in r.tasks}
        orders = tuple(tuple(t for t in order if kinds - {"F"} or t.kind == "F") for order in facts.orders)
        fused = frozenset((r.tasks[0], r.tasks[1]) for r in runs if len(r.tasks) == 2)
        costs = self.costs(loop) if costs is None else costs
        return simulate_orders(
            orders, facts.placement, facts.num_microbatches, costs, fused, facts.schedule, facts.reads
        )

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = object.__repr__

    def to_chrome_trace(self) -> str:
        """Returns all steps as Chrome-trace JSON, which Perfetto opens: one process for each rank."""
        events = trace_events(self.steps, self.ranks, {facts.number: facts.shapes for facts in self.loops})
        return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"})


@dataclasses.dataclass(frozen=True)
class TimeShare:
    """A part of the time of a loop, and its cause."""

    seconds: float  # the seconds of the part; the parts of a loop add up to the measured time
    name: str  # the cause in a few words
    detail: str = ""  # a detail to look at; may be empty


def _lines(profile: Profile) -> Iterator[str]:
    lengths = [s.seconds for s in profile.steps]
    spread = "" if len(lengths) == 1 else f" ({in_seconds(min(lengths))} to {in_seconds(max(lengths))})"
    num_ranks = len({r for ranks in profile.ranks for r in ranks})
    yield (
        f"{profile.name}: a step takes {in_seconds(statistics.median(lengths))}{spread}, median of {len(lengths)};"
        f" {counted(len(profile.ranks), 'group')} in {counted(num_ranks, 'process')}"
    )
    if profile.clock_error_s:
        yield f"clocks of different machines agree within {in_seconds(profile.clock_error_s)}"
    yield from _group_table(profile)
    for index, facts in enumerate(profile.loops):
        if index not in profile.measured_loops:
            continue
        timeline = profile.timeline(index)
        shown = _middle(timeline)
        part = "" if shown is timeline else f", of which {in_seconds(shown.makespan)} in the middle"
        yield f"loop {facts.number}, measured, typical step ({in_seconds(timeline.makespan)}{part}):"
        yield from (f"  {line}" for line in _picture(shown))
        for part in loop_parts(profile, index):
            sign = "+" if part.seconds >= 0 else "-"
            yield f"  {sign} {in_seconds(abs(part.seconds)):>8} {part.name}{f': {part.detail}' if part.detail else ''}"
        yield from (f"  {line}" for line in texts.table(shape_table(profile, index), "<" * len(SHAPE_HEAD)))
        yield from (f"  {line}" for line in stragglers(profile, index))


def _picture(timeline: Timeline) -> list[str]:
    """Returns a row for each group. Tasks that take unequally long are drawn by their share of the time."""
    return [line[: line.rindex("|") + 1] for line in to_text(timeline).splitlines()[1:] if "|" in line]


def _middle(timeline: Timeline) -> Timeline:
    """Returns the largest middle part that can be drawn task by task."""
    share = _DRAWN / max(map(len, timeline.orders))
    if share >= 1:
        return timeline
    first = timeline.makespan * (1 - share) / 2
    last = timeline.makespan - first
    kept = [
        [(t, max(a, first) - first, min(b, last) - first) for t, a, b in timeline.row(g) if b > first and a < last]
        for g in range(timeline.num_groups)
    ]
    orders, starts, ends = (tuple(tuple(row[k] for row in rows) for rows in kept) for k in range(3))
    return dataclasses.replace(timeline, orders=orders, starts=starts, ends=ends)


def _group_table(profile: Profile) -> Iterator[str]:
    """Yields a table of how each group spent the typical step."""
    step = profile.typical
    rows: list[tuple[str, ...]] = [
        ("group", "ranks", "computes", "waits for others", "waits for transfers", "waits for its host")
    ]
    for group, spent in enumerate(step.spent):
        shares = (spent.busy, spent.waiting, spent.exposed, spent.late)
        ranks = profile.ranks[group]
        shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        rows.append((str(group), shown, *(f"{in_seconds(s)} {s / step.seconds:.0%}" for s in shares)))
    yield from (f"  {line}" for line in texts.table(rows, "<" * len(rows[0])))


def loop_parts(profile: Profile, index: int = -1) -> list[TimeShare]:
    """Returns the parts of a loop's time. Each part is the difference between two successive simulations."""
    facts, num_stages = profile.loops[index], len(profile.loops[index].placement)
    measured = statistics.median(profile.timeline(index, step).makespan for step in profile.steps)
    costs = profile.costs(index)
    mean = dataclasses.replace(costs.of_mean(num_stages), transfer_s=0.0)
    own = tuple(dataclasses.replace(one, transfer_s=0.0) for one in costs.of_microbatches(facts.num_microbatches))
    no_transfers = dataclasses.replace(mean, microbatches=own)
    even = sum(profile.simulated(no_transfers, index).busy) / len(profile.ranks)
    with_bubble = profile.simulated(_equal(mean, facts), index).makespan
    with_stages = profile.simulated(mean, index).makespan
    with_shapes = profile.simulated(no_transfers, index).makespan
    with_transfers = profile.simulated(costs, index).makespan
    bubble = f"{facts.schedule}, {counted(facts.num_microbatches, 'microbatch')}"
    shapes = []
    if costs.microbatches:
        detail = _longest(costs, num_stages)
        shapes = [TimeShare(with_shapes - with_stages, "microbatches of several shapes", detail)]
    return [
        TimeShare(even, "work, if every group had the same and never waited"),
        TimeShare(with_bubble - even, "bubble of the schedule", bubble),
        TimeShare(with_stages - with_bubble, "uneven stages", _slowest_stage(mean, facts)),
        *shapes,
        TimeShare(with_transfers - with_shapes, "transfers that nothing hides", _slowest_link(profile)),
        TimeShare(measured - with_transfers, "the rest", _rest(profile)),
    ]


SHAPE_HEAD = ("shape of a microbatch", "how many", "forward", "backward", "times the mean")


def shape_table(profile: Profile, index: int = -1) -> list[tuple[str, ...]]:
    """Returns rows, below a head, with the time of a microbatch of each shape over all stages; none for one shape."""
    facts, costs = profile.loops[index], profile.costs(index)
    if not costs.microbatches:
        return []
    num_stages = len(facts.placement)
    mean = sum(stage_seconds(costs.of_mean(num_stages), num_stages))
    rows = []
    for shape, one in dict(zip(facts.shapes, costs.of_microbatches(facts.num_microbatches), strict=True)).items():
        whole, forward = sum(stage_seconds(one, num_stages)), sum(one.per_stage("forward", num_stages))
        seconds = (in_seconds(forward), in_seconds(whole - forward))
        rows.append((shape, str(facts.shapes.count(shape)), *seconds, f"{whole / mean:.2f}" if mean else "-"))
    return [SHAPE_HEAD, *rows]


def _longest(costs: Costs, num_stages: int) -> str:
    mean = sum(stage_seconds(costs.of_mean(num_stages), num_stages))
    every = costs.of_microbatches(len(costs.microbatches))
    longest = max(sum(stage_seconds(one, num_stages)) for one in every)
    return f"the longest takes {longest / mean:.2f} times the mean" if mean else ""


def _equal(costs: Costs, facts: LoopFacts) -> Costs:
    """Returns costs of the same total work with equal stages."""
    num = len(facts.placement)
    forward, backward, weights = (sum(costs.per_stage(n, num)) / num for n in ("forward", "input_grad", "weight_grad"))
    return Costs(forward, backward, weights)


def stage_seconds(costs: Costs, num_stages: int) -> list[float]:
    """Returns the seconds of a microbatch in each stage, forward and backward together."""
    lists = (costs.per_stage(name, num_stages) for name in ("forward", "input_grad", "weight_grad"))
    return [sum(parts) for parts in zip(*lists, strict=True)]


def _slowest_stage(costs: Costs, facts: LoopFacts) -> str:
    seconds = stage_seconds(costs, len(facts.placement))
    stage = max(range(len(seconds)), key=seconds.__getitem__)
    mean = sum(seconds) / len(seconds)
    label = f" ({facts.labels[stage]})" if stage < len(facts.labels) and facts.labels[stage] else ""
    times = f"{seconds[stage] / mean:.2f} times the mean" if mean else "nothing"
    return f"stage {stage}{label} in group {facts.placement[stage]} takes {times}, {in_seconds(seconds[stage])}"


def _slowest_link(profile: Profile) -> str:
    """Describes the pair of groups with the longest waits for transfers, in the typical step."""
    step = profile.typical
    exposed: dict[tuple[int, int], float] = defaultdict(float)
    for w in (w for waits in step.waits for w in waits):
        if w.run.by is not None and w.there > w.offered:
            exposed[w.run.by[1:]] += w.there - w.offered
    if not exposed:
        return ""
    pair = max(exposed, key=exposed.__getitem__)
    moves = [m for m in step.moves if m.way[1:] == pair]
    size = statistics.median(m.nbytes for m in moves)
    took = statistics.median(m.end - m.start for m in moves)
    return (
        f"most from group {pair[0]} to {pair[1]}, {in_seconds(exposed[pair])} waited for {len(moves)} values,"
        f" each {in_bytes(size)} in {in_seconds(took)}"
    )


def _rest(profile: Profile) -> str:
    late = max(profile.typical.spent, key=lambda s: s.late)
    group = profile.typical.spent.index(late)
    if late.late < 0.01 * profile.typical.seconds:
        return "tasks that vary from one microbatch to the next"
    return f"tasks that vary, and hosts that start programs late: group {group} waited {in_seconds(late.late)} for that"


def stragglers(profile: Profile, index: int = -1) -> Iterator[str]:
    """Yields ranks that are slower than others with the same work, and groups with fewer operations a second."""
    facts = profile.loops[index]
    by_task = task_seconds(profile, facts)
    for (stage, kind), ranks in sorted(by_task.items()):
        usual = statistics.median_low(ranks.values())
        slow = max(ranks, key=ranks.__getitem__)
        if len(ranks) > 1 and ranks[slow] > _SLOW * usual:
            yield (
                f"rank {slow} is slow: it takes {in_seconds(ranks[slow])} for {stage}{kind}, where the median rank of"
                f" group {facts.placement[stage]} takes {in_seconds(usual)}"
            )
    yield from _slow_groups(profile, facts, by_task)


def task_seconds(profile: Profile, facts: LoopFacts) -> dict[tuple[int, str], dict[int, float]]:
    """Returns median seconds of tasks that ran alone, by task, then by rank; for a list, means over microbatches."""
    own: dict[tuple[int, str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in (r for step in profile.steps for r in step.runs):
        if len(r.tasks) == 1 and r.loop == facts.number:
            task = r.tasks[0]
            own[task.stage, task.kind, r.rank][facts.shapes[task.microbatch]].append(r.end - r.start)
    found: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    for (stage, kind, rank), of_shapes in own.items():
        medians = {shape: statistics.median(values) for shape, values in of_shapes.items()}
        found[stage, kind][rank] = statistics.fmean(medians[shape] for shape in facts.shapes if shape in medians)
    return found


def _slow_groups(profile: Profile, facts: LoopFacts, by_task: dict[tuple[int, str], dict[int, float]]) -> Iterator[str]:
    work: dict[int, float] = defaultdict(float)
    spent: dict[int, float] = defaultdict(float)
    for key, ranks in by_task.items():
        if (flops := facts.flops.get(key, 0.0)) > 0:
            group = facts.placement[key[0]]
            work[group] += flops
            spent[group] += max(ranks.values())
    rates_of = {g: work[g] / spent[g] for g in work if spent[g] > 0}
    if len(rates_of) < 3:
        return
    usual = statistics.median_high(rates_of.values())
    slow = min(rates_of, key=rates_of.__getitem__)
    if usual > _SLOW * rates_of[slow]:
        ranks = ", ".join(map(str, profile.ranks[slow][:4]))
        yield (
            f"group {slow} (rank {ranks}) is slow: {rates_of[slow] / 1e9:.3g} GFLOP/s in its tasks, where the median"
            f" group has {usual / 1e9:.3g}: look at its devices, or at operations that are not products"
        )
