"""A schedule on a clock: how long it takes, where it idles, what it holds in memory, its critical path, its pictures.

The pictures are text for the terminal, SVG for documents, and a Chrome trace for Perfetto.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape

from scheduler.base.texts import counted
from scheduler.ordering import graph_needs
from scheduler.task import Orders, Pairs, Reads, Task
from scheduler.timing.colours import HATCHES, colour, pattern_definitions
from scheduler.timing.costs import Costs

_WIDTH = 150
_ROWS = 64
_UNIT, _ROW, _LEFT, _TOP, _RIGHT = 22.0, 26.0, 70.0, 34.0, 150.0


@dataclass(frozen=True, repr=False)
class Timeline:
    """The start and end of each task of a schedule, and figures derived from them. ``str()`` draws it.

    Attributes:
        orders: For each group, its tasks in order.
        starts, ends: For each group, the times of those tasks, in the unit of the costs.
        placement: For each stage, its group.
        costs: The costs that made it.
        peak_activations: For each group, the most activations of a stage and microbatch held at once: from F to B or W.
        peak_bytes: For each group, the same in bytes; bytes that are released at I count until there.
    """

    orders: Orders
    starts: tuple[Sequence[float], ...] = field(repr=False)
    ends: tuple[Sequence[float], ...] = field(repr=False)
    placement: tuple[int, ...]
    costs: Costs
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    fused: Pairs = frozenset()
    name: str = "schedule"
    reads: Reads | None = None

    @property
    def num_groups(self) -> int:
        return len(self.orders)

    @property
    def durations(self) -> Iterator[tuple[Task, float]]:
        """Each task and how long it took, group by group, as :meth:`Costs.measured` takes them."""
        return ((task, end - start) for group in range(self.num_groups) for task, start, end in self.row(group))

    def row(self, group: int) -> Iterator[tuple[Task, float, float]]:
        """Yields a group's tasks in order, each with its start and its end."""
        return zip(self.orders[group], self.starts[group], self.ends[group], strict=True)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((ends[-1] for ends in self.ends if len(ends)), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each group, the time it works."""
        return tuple(math.fsum(ends) - math.fsum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """The share of all groups' time, from the first start to the last end, in which they idle."""
        total = self.num_groups * self.makespan
        return self._idle(total - math.fsum(self.busy)) / total if total else 0.0

    @property
    def idle_within_span(self) -> tuple[float, ...]:
        """For each group, the time it idles between its own first start and its own last end.

        This figure counts if steps follow each other without a barrier.
        """
        spans = (
            ends[-1] - starts[0] if len(ends) else 0.0 for starts, ends in zip(self.starts, self.ends, strict=True)
        )
        return tuple(self._idle(span - busy) for span, busy in zip(spans, self.busy, strict=True))

    def _idle(self, seconds: float) -> float:
        """Returns a time without the errors of rounding."""
        return seconds if seconds > 1e-9 * self.makespan else 0.0

    @cached_property
    def critical_path(self) -> tuple[Task, ...]:
        """A chain of tasks as long as the makespan. Each waits for the one before."""
        where = {task: (group, index) for group, order in enumerate(self.orders) for index, task in enumerate(order)}
        if not where:
            return ()
        num_stages = len(self.placement)
        every = self.costs.of_microbatches(1 + max(task.microbatch for task in where))
        over = [
            costs.transfers_between(self.placement) if self.reads is None else costs.transfers(num_stages)
            for costs in every
        ]
        waits_for = graph_needs(self.reads, num_stages)
        second = {then: first for first, then in self.fused}
        first_of = dict(self.fused)

        def end(task: Task) -> float:
            group, index = where[task]
            return self.ends[group][index]

        task = max(where, key=lambda one: (end(one), one))
        path = [task]
        while True:
            group, index = where[task]
            start = self.starts[group][index]
            if index and self.ends[group][index - 1] >= start:
                task = self.orders[group][index - 1]
                path.append(task)
                continue
            candidates: list[tuple[float, Task]] = []
            unit = [task, *([second[task]] if task in second else []), *([first_of[task]] if task in first_of else [])]
            for one in unit:
                for need in (need for need in waits_for(one) if need in where and need not in unit):
                    near = self.placement[need.stage] == self.placement[one.stage]
                    late = 0.0 if near else over[one.microbatch][min(need.stage, one.stage)]
                    last = first_of.get(need, need)
                    candidates.append((end(last) + late, last))
            if not candidates or start <= 0:
                return tuple(reversed(path))
            task = max(candidates)[1]
            path.append(task)

    def colour(self, stage: int, kind: str) -> str:
        """Returns the colour of a task."""
        return colour(stage, kind, len(self.placement))

    def __str__(self) -> str:
        return to_text(self)

    __repr__ = object.__repr__

    def to_svg(self) -> str:
        """Returns the picture as SVG text.

        Groups are rows, a stage is a hue, a kind is a shade and a pattern as well as its letter (F plain, B crossed, I
        hatched, W dotted), followed by the microbatch; fused pairs share a frame. At the side is the most activations
        held.
        """
        shortest = _step(self) or 1.0
        scale = min(_UNIT / shortest, 20000 / max(self.makespan, 1e-12))
        chart = self.makespan * scale
        width, height = _LEFT + chart + _RIGHT, _TOP + _ROW * self.num_groups + 40
        parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
                f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="9" role="img">'
            ),
            f"<title>{escape(summary(self))}</title>",
            pattern_definitions("BIWR" if any(task.kind == "R" for order in self.orders for task in order) else "BIW"),
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
            f'<text x="{_LEFT}" y="18" font-size="13">{escape(summary(self))}</text>',
        ]
        for group in range(self.num_groups):
            parts.extend(_svg_row(self, group, scale, chart))
        parts.extend(_svg_legend(self, _TOP + _ROW * self.num_groups + 14))
        parts.append("</svg>")
        return "\n".join(parts) + "\n"

    def to_chrome_trace(self) -> str:
        """Returns a Chrome trace as JSON: one thread a group, one complete event a task, a unit of time as a second."""
        events: list[Mapping[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": self.name}}
        ]
        for group in range(self.num_groups):
            title = {"name": f"group {group}"}
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": group, "args": title})
            for task, start, end in self.row(group):
                event = {"ph": "X", "name": str(task), "cat": task.kind, "pid": 0, "tid": group, "args": task._asdict()}
                events.append(event | {"ts": start * 1e6, "dur": (end - start) * 1e6})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def summary(timeline: Timeline) -> str:
    """Returns one line: the name, the size, the makespan, and the share of the bubble."""
    tasks = sum(map(len, timeline.orders))
    groups, stages = counted(timeline.num_groups, "group"), counted(len(timeline.placement), "stage")
    time = f"makespan {timeline.makespan:g}, bubble {timeline.bubble_fraction:.1%}"
    return f"{timeline.name}: {groups}, {stages}, {counted(tasks, 'task')}, {time}"


def to_text(timeline: Timeline, width: int = _WIDTH) -> str:
    """Draws the timeline in characters: one row a group, time to the right.

    Tasks carry their names if there is room, or a letter for each step of time, or a letter for each slice of time,
    which is what the group does for most of the slice. A dot is idle.
    """
    lines = [summary(timeline)]
    for group in range(min(timeline.num_groups, _ROWS)):
        row = "".join(_cells(timeline, group, width))
        peak = f"{timeline.peak_activations[group]} held, idle {timeline.idle_within_span[group]:g}"
        lines.append(f"{group:4d} |{row}| {peak}")
    if timeline.num_groups > _ROWS:
        lines.append(f"     … and {timeline.num_groups - _ROWS} more groups")
    return "\n".join(lines)


def critical_path_text(timeline: Timeline, limit: int = 60) -> str:
    """Returns the critical path as names of tasks, its middle left out if it is long."""
    names = [str(task) for task in timeline.critical_path]
    if len(names) > limit:
        names = [*names[: limit // 2], f"… {len(names) - limit // 2 * 2} tasks …", *names[-(limit // 2) :]]
    return "critical path: " + " ".join(names)


def _cells(timeline: Timeline, group: int, width: int) -> Iterator[str]:
    step = _step(timeline)
    if not step:
        yield from _slices(timeline, group, width) if timeline.makespan else ()
        return
    columns = round(timeline.makespan / step)
    longest = max((len(_label(timeline, task)) for order in timeline.orders[:_ROWS] for task in order[-1:]), default=1)
    if columns * (longest + 1) <= width:
        cell = longest + 1
    elif columns <= width:
        cell = 1
    else:
        yield from _slices(timeline, group, width)
        return
    at = 0
    for task, start, end in timeline.row(group):
        begin, stop = round(start / step) * cell, round(end / step) * cell
        yield "." * (begin - at) if cell == 1 else " " * (begin - at)
        label = "" if stop == begin else _label(timeline, task)
        yield (task.kind * (stop - begin)) if cell == 1 else label.ljust(stop - begin)
        at = max(at, stop)
    yield (("." if cell == 1 else " ") * (columns * cell - at))


def _slices(timeline: Timeline, group: int, width: int) -> Iterator[str]:
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    scale = width / timeline.makespan
    for task, start, end in timeline.row(group):
        first, last = int(start * scale), min(width - 1, int(end * scale))
        for index in range(first, last + 1):
            part = min(end * scale, index + 1) - max(start * scale, index)
            shares[index][task.kind] = shares[index].get(task.kind, 0.0) + part
    for share in shares:
        busy = sum(share.values())
        yield "." if busy < 0.5 else max(sorted(share), key=share.__getitem__)


def _step(timeline: Timeline) -> float:
    """Returns the step of time in which all tasks of the first groups can be drawn; 0 if all are tiny."""
    lengths = {
        round(end - start, 9)
        for starts, ends in zip(timeline.starts[:_ROWS], timeline.ends[:_ROWS], strict=True)
        for start, end in zip(starts[:1000], ends[:1000], strict=True)
    } - {0.0}
    return min(lengths, default=0.0)


def _label(timeline: Timeline, task: Task) -> str:
    several = len(timeline.placement) > timeline.num_groups
    return str(task) if several else f"{task.kind}{task.microbatch}"


def _svg_row(timeline: Timeline, group: int, scale: float, chart: float) -> Iterator[str]:
    top = _TOP + _ROW * group
    middle = top + _ROW / 2 + 3
    yield f'<text x="{_LEFT - 8}" y="{middle:.1f}" text-anchor="end" font-size="11">group {group}</text>'
    yield f'<rect x="{_LEFT}" y="{top:.1f}" width="{chart:.1f}" height="{_ROW - 4}" fill="#f2f2f2"/>'
    tasks = list(timeline.row(group))
    for task, start, end in tasks:
        x, wide = _LEFT + start * scale, max((end - start) * scale, 0.5)
        place = f'x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{_ROW - 4}"'
        yield f'<rect {place} fill="{timeline.colour(task.stage, task.kind)}" stroke="#555" stroke-width="0.5"/>'
        if task.kind in HATCHES:
            yield f'<rect {place} fill="url(#{task.kind})"/>'
        if wide > 12:
            name, at = f"{task.kind}{task.microbatch}", f'x="{x + wide / 2:.1f}" y="{middle:.1f}"'
            yield f'<text {at} text-anchor="middle">{name}</text>'
    second = dict(timeline.fused)
    for index, (task, start, _) in enumerate(tasks):
        if task in second:
            end = tasks[index + 1][2]
            yield (
                f'<rect x="{_LEFT + start * scale:.1f}" y="{top:.1f}" width="{(end - start) * scale:.1f}" '
                f'height="{_ROW - 4}" fill="none" stroke="#000" stroke-width="1.6"/>'
            )
    side = f"holds {timeline.peak_activations[group]}, idle {timeline.idle_within_span[group]:g}"
    yield f'<text x="{_LEFT + chart + 8:.1f}" y="{middle:.1f}" font-size="11">{side}</text>'


def _svg_legend(timeline: Timeline, y: float) -> Iterator[str]:
    x = _LEFT
    kinds = {task.kind for order in timeline.orders for task in order}
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "computed again"}
    for kind in (kind for kind in names if kind in kinds):
        yield f'<rect x="{x}" y="{y}" width="18" height="14" fill="{timeline.colour(0, kind)}" stroke="#555"/>'
        if kind in HATCHES:
            yield f'<rect x="{x}" y="{y}" width="18" height="14" fill="url(#{kind})"/>'
        yield f'<text x="{x + 24}" y="{y + 11}" font-size="11">{kind} {names[kind]}</text>'
        x += 130
    count = min(len(timeline.placement), 16)
    for stage in range(count):
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{timeline.colour(stage, "F")}" stroke="#555"/>'
        yield f'<text x="{x + 7}" y="{y + 11}" text-anchor="middle">{stage}</text>'
        x += 16
    yield f'<text x="{x + 4}" y="{y + 11}" font-size="11">stages</text>'
