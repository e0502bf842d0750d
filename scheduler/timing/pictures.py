"""Pictures of a timeline: text for the terminal, SVG for documents, a Chrome trace for Perfetto."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.task import Task
    from scheduler.timing.timeline import Timeline

_WIDTH = 150
_ROWS = 64


def summary(timeline: Timeline) -> str:
    """One line: what it is, how long it takes, how much of that is bubble."""
    tasks = sum(map(len, timeline.orders))
    return (
        f"{timeline.name}: {timeline.num_groups} groups, {len(timeline.placement)} stages, {tasks} tasks, makespan "
        f"{timeline.makespan:g}, bubble {timeline.bubble_fraction:.1%}"
    )


def to_text(timeline: Timeline, width: int = _WIDTH) -> str:
    """The timeline in characters: one row a group, time to the right.

    Tasks carry their names if there is room, else a letter for each step of time, else a letter for each slice of
    time that tells what the group does for most of it. A dot is idle.
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
    """The critical path as names of tasks, its middle left out where it is long."""
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
    for task, start, end in zip(timeline.orders[group], timeline.starts[group], timeline.ends[group], strict=True):
        begin, stop = round(start / step) * cell, round(end / step) * cell
        yield "." * (begin - at) if cell == 1 else " " * (begin - at)
        yield (task.kind * (stop - begin)) if cell == 1 else _label(timeline, task).ljust(stop - begin)
        at = max(at, stop)
    yield (("." if cell == 1 else " ") * (columns * cell - at))


def _slices(timeline: Timeline, group: int, width: int) -> Iterator[str]:
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    scale = width / timeline.makespan
    for task, start, end in zip(timeline.orders[group], timeline.starts[group], timeline.ends[group], strict=True):
        first, last = int(start * scale), min(width - 1, int(end * scale))
        for index in range(first, last + 1):
            part = min(end * scale, index + 1) - max(start * scale, index)
            shares[index][task.kind] = shares[index].get(task.kind, 0.0) + part
    for share in shares:
        busy = sum(share.values())
        yield "." if busy < 0.5 else max(sorted(share), key=share.__getitem__)


def _step(timeline: Timeline) -> float:
    """The step of time in which all tasks of the first groups can be drawn; 0 if there is none that is not tiny."""
    lengths = {
        round(end - start, 9)
        for starts, ends in zip(timeline.starts[:_ROWS], timeline.ends[:_ROWS], strict=True)
        for start, end in zip(starts[:1000], ends[:1000], strict=True)
    } - {0.0}
    return min(lengths, default=0.0)


def _label(timeline: Timeline, task: Task) -> str:
    several = len(timeline.placement) > timeline.num_groups
    return str(task) if several else f"{task.kind}{task.microbatch}"


def to_chrome_trace(timeline: Timeline) -> str:
    """Chrome-trace JSON: one thread a group, one complete event a task, one unit of time as a second."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": timeline.name}}
    ]
    for group in range(timeline.num_groups):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": group, "args": {"name": f"group {group}"}},
        )
        for task, start, end in zip(timeline.orders[group], timeline.starts[group], timeline.ends[group], strict=True):
            events.append(
                {
                    "ph": "X",
                    "name": str(task),
                    "cat": task.kind,
                    "pid": 0,
                    "tid": group,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"stage": task.stage, "kind": task.kind, "microbatch": task.microbatch},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


_UNIT, _ROW, _LEFT, _TOP, _RIGHT = 22.0, 26.0, 70.0, 34.0, 150.0
_LIGHTNESS = {"F": 82, "B": 58, "I": 66, "W": 90}
_HATCHES = {
    "B": '<path d="M0 0L6 6M6 0L0 6" stroke="#000" stroke-opacity="0.2" stroke-width="0.8"/>',
    "I": '<path d="M0 6L6 0" stroke="#000" stroke-opacity="0.3" stroke-width="1"/>',
    "W": '<circle cx="3" cy="3" r="1" fill="#000" fill-opacity="0.3"/>',
}


def pattern_definitions() -> str:
    """What `pattern_of` refers to, to be put into an SVG once."""
    made = (
        f'<pattern id="{kind}" width="6" height="6" patternUnits="userSpaceOnUse">{drawing}</pattern>'
        for kind, drawing in _HATCHES.items()
    )
    return "\n".join(["<defs>", *made, "</defs>"])


def pattern_of(kind: str) -> str:
    """What to draw over a task of some kind, as a fill; empty for F."""
    return f"url(#{kind})" if kind in _HATCHES else ""


def to_svg(timeline: Timeline) -> str:
    """The picture as SVG text.

    Groups are rows, a stage is a hue, a kind is a shade and a pattern as well as its letter (F plain, B crossed, I
    hatched, W dotted), with the microbatch behind it; fused pairs share a frame. At the side the most activations
    held.
    """
    shortest = _step(timeline) or 1.0
    scale = min(_UNIT / shortest, 20000 / max(timeline.makespan, 1e-12))
    chart = timeline.makespan * scale
    width, height = _LEFT + chart + _RIGHT, _TOP + _ROW * timeline.num_groups + 40
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="9" role="img">'
        ),
        f"<title>{escape(summary(timeline))}</title>",
        pattern_definitions(),
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(summary(timeline))}</text>',
    ]
    for group in range(timeline.num_groups):
        parts.extend(_svg_row(timeline, group, scale, chart))
    parts.extend(_svg_legend(timeline, _TOP + _ROW * timeline.num_groups + 14))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _svg_row(timeline: Timeline, group: int, scale: float, chart: float) -> Iterator[str]:
    top = _TOP + _ROW * group
    middle = top + _ROW / 2 + 3
    yield f'<text x="{_LEFT - 8}" y="{middle:.1f}" text-anchor="end" font-size="11">group {group}</text>'
    yield f'<rect x="{_LEFT}" y="{top:.1f}" width="{chart:.1f}" height="{_ROW - 4}" fill="#f2f2f2"/>'
    tasks = list(zip(timeline.orders[group], timeline.starts[group], timeline.ends[group], strict=True))
    for task, start, end in tasks:
        x, wide = _LEFT + start * scale, max((end - start) * scale, 0.5)
        place = f'x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{_ROW - 4}"'
        yield f'<rect {place} fill="{_colour(timeline, task.stage, task.kind)}" stroke="#555" stroke-width="0.5"/>'
        if task.kind in _HATCHES:
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
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    for kind in (kind for kind in names if kind in kinds):
        yield f'<rect x="{x}" y="{y}" width="18" height="14" fill="{_colour(timeline, 0, kind)}" stroke="#555"/>'
        if kind in _HATCHES:
            yield f'<rect x="{x}" y="{y}" width="18" height="14" fill="url(#{kind})"/>'
        yield f'<text x="{x + 24}" y="{y + 11}" font-size="11">{kind} {names[kind]}</text>'
        x += 130
    count = min(len(timeline.placement), 16)
    for stage in range(count):
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_colour(timeline, stage, "F")}" stroke="#555"/>'
        yield f'<text x="{x + 7}" y="{y + 11}" text-anchor="middle">{stage}</text>'
        x += 16
    yield f'<text x="{x + 4}" y="{y + 11}" font-size="11">stages</text>'


def _colour(timeline: Timeline, stage: int, kind: str) -> str:
    return colour(stage, kind, len(timeline.placement))


def colour(stage: int, kind: str, num_stages: int) -> str:
    """The colour of a task: one hue a stage, from green over blue to violet; one shade a kind.

    No stage is red, which looks like an error. As hex: not every viewer reads hsl().
    """
    hue = (95 + 180 * stage / max(num_stages - 1, 1)) / 360
    lightness = _LIGHTNESS[kind] / 100
    chroma = 0.75 * (1 - abs(2 * lightness - 1))
    channels = []
    for offset in (0.0, 2 / 3, 1 / 3):
        position = math.fmod(hue + offset, 1.0) * 6
        strength = min(max(abs(position - 3) - 1, 0.0), 1.0)
        channels.append(round(255 * (lightness + chroma * (strength - 0.5))))
    return "#" + "".join(f"{channel:02x}" for channel in channels)
