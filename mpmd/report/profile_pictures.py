"""Pictures of a profile: SVG for documents, a Chrome trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from scheduler.base.texts import in_bytes, in_seconds
from scheduler.timing.pictures import colour, pattern_definitions, pattern_of

if TYPE_CHECKING:
    from mpmd.observe.records import Ran
    from mpmd.report.profile import Profile, Step
    from scheduler import Task, Timeline

_LEFT, _TOP, _ROW, _WIDTH, _RIGHT = 80.0, 40.0, 34.0, 1400.0, 190.0


def to_chrome_trace(profile: Profile) -> str:
    """Chrome-trace JSON: a process for each rank, with its host, its groups' devices, and what comes to it."""
    first = min((s.start for s in profile.steps), default=0.0)
    return json.dumps({"traceEvents": list(_events(profile, first)), "displayTimeUnit": "ms"})


def _events(profile: Profile, first: float) -> Iterator[dict[str, Any]]:
    ranks = sorted({r for ranks in profile.ranks for r in ranks})
    per_rank = 1 + len(profile.ranks)
    # Of its host; that of group g is g + 1 more. Perfetto takes id 0, and its process's, for the main thread.
    threads = {rank: ranks[-1] + 1 + i * per_rank for i, rank in enumerate(ranks)}
    for rank, host in threads.items():
        yield _named("process_name", rank, host, name=f"rank {rank}")
        yield _named("process_sort_index", rank, host, sort_index=rank)
        yield _named("thread_name", rank, host, name="host: starts programs")
        for group, of_group in enumerate(profile.ranks):
            if rank in of_group:
                yield _named("thread_name", rank, host + 1 + group, name=f"group {group}: devices")
    number = 0
    for count, step in enumerate(profile.steps):
        for r in step.runs:
            yield from _run_events(r, count, first, threads[r.rank])
        for m in step.moves:
            number += 1
            common = {"cat": "transfer", "id2": {"local": hex(number)}, "pid": m.rank, "tid": threads[m.rank]}
            common["name"] = f"from group {m.way.source} to {m.way.target}"  # Perfetto shows a row a name
            args = {"value": str(m.way.value), "bytes": m.nbytes, "step": count}
            yield {**common, "ph": "b", "ts": _micros(m.start - first), "args": args}
            yield {**common, "ph": "e", "ts": max(_micros(m.start - first), _micros(m.end - first))}


def _run_events(r: Ran, step: int, first: float, host: int) -> Iterator[dict[str, Any]]:
    args: dict[str, Any] = {"step": step, "program": r.name}
    if r.tasks:
        task = r.tasks[0]
        args |= {"stage": task.stage, "kind": "+".join(t.kind for t in r.tasks), "microbatch": task.microbatch}
        args["loop"] = r.loop
    if r.by is not None:
        args["waited for"] = str(r.by)
    for tid, start, end in ((host, r.dispatched, r.returned), (host + 1 + r.group, r.start, r.end)):
        yield {
            "ph": "X", "name": r.title, "cat": "task" if r.tasks else "call", "pid": r.rank, "tid": tid,
            "ts": _micros(start - first), "dur": max(0.0, _micros(end - first) - _micros(start - first)), "args": args,
        }  # fmt: skip


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def to_svg(profile: Profile) -> str:
    """The typical step, a row a group, and below it the simulated loop on the same scale."""
    step = profile.typical
    loops = [i for i, facts in enumerate(profile.loops) if any(r.tasks and r.loop == facts.number for r in step.runs)]
    simulated = profile.simulated(loop=loops[-1]) if loops else None
    longest = max(step.seconds, simulated.makespan if simulated else 0.0, 1e-9)
    scale = _WIDTH / longest
    num_rows = len(profile.ranks) * (2 if simulated else 1)
    height = _TOP + _ROW * num_rows + (40 if simulated else 0) + 40
    title = f"{profile.name}: a step, {in_seconds(step.seconds)}"
    width = f"{_LEFT + _WIDTH + _RIGHT:.0f}"
    box = f'width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="9" role="img">',
        f"<title>{escape(title)}</title>",
        pattern_definitions(),
        f'<rect width="{width}" height="{height:.0f}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="13">{escape(title)}; measured</text>',
    ]
    num_stages = len(profile.loops[loops[-1]].placement) if loops else 1
    for group in range(len(profile.ranks)):
        parts += _measured_row(profile, step, group, scale, num_stages)
    if simulated is not None:
        top = _TOP + _ROW * len(profile.ranks) + 40
        said = f"simulated, with the measured times of tasks and transfers: {in_seconds(simulated.makespan)}"
        parts.append(f'<text x="{_LEFT}" y="{top - 12}" font-size="13">{escape(said)}</text>')
        offset = (min(r.start for r in step.runs if r.tasks) - step.start) * scale
        for group in range(simulated.num_groups):
            parts += _simulated_row(simulated, group, top + _ROW * group, scale, offset, num_stages)
    parts += [*_legend(height - 24), "</svg>"]
    return "\n".join(parts) + "\n"


def _measured_row(profile: Profile, step: Step, group: int, scale: float, num_stages: int) -> Iterator[str]:
    top = _TOP + _ROW * group
    spent = step.spent[group]
    yield f'<text x="{_LEFT - 8}" y="{top + 15:.1f}" text-anchor="end" font-size="11">group {group}</text>'
    yield f'<rect x="{_LEFT}" y="{top:.1f}" width="{_WIDTH}" height="22" fill="#f2f2f2"/>'
    free = step.start
    for r in step.by_group[group]:
        if r.by is not None and r.start > free:  # what was on its way while the group waited
            since = max(free, step.sent.get(r.by, free))
            if (until := min(r.ready, r.start)) > since:
                x = _LEFT + (since - step.start) * scale
                yield (
                    f'<rect x="{x:.1f}" y="{top + 6:.1f}" width="{(until - since) * scale:.2f}" height="10"'
                    f' fill="#d33"><title>waits for {escape(str(r.by))}</title></rect>'
                )
        said, task = f"{r.title}: {in_seconds(r.end - r.start)}", r.tasks[0] if r.tasks else None
        x, wide = _LEFT + (r.start - step.start) * scale, (r.end - r.start) * scale
        yield from _bar(task, said, r.name, x, top, wide, num_stages)
        free = r.end
    for m in step.moves:
        if m.way.target == group:
            x, wide = _LEFT + (m.start - step.start) * scale, max((m.end - m.start) * scale, 0.5)
            said = f"{m.way}: {in_bytes(m.nbytes)} in {in_seconds(m.end - m.start)}"
            yield (
                f'<rect x="{x:.1f}" y="{top + 23:.1f}" width="{wide:.2f}" height="4" fill="#36c"'
                f' fill-opacity="0.6"><title>{escape(said)}</title></rect>'
            )
    side = f"computes {spent.busy / max(step.seconds, 1e-12):.0%}, waits {in_seconds(spent.waiting + spent.exposed)}"
    yield f'<text x="{_LEFT + _WIDTH + 8}" y="{top + 15:.1f}" font-size="11">{side}</text>'


def _bar(task: Task | None, said: str, name: str, x: float, top: float, wide: float, num_stages: int) -> Iterator[str]:
    """A task, or (None) another program of this name; `said` is shown when one points at it."""
    place = f'x="{x:.1f}" y="{top:.1f}" width="{max(wide, 0.5):.2f}" height="22"'
    fill = colour(task.stage, task.kind, num_stages) if task else "#bbb"
    yield f'<rect {place} fill="{fill}" stroke="#555" stroke-width="0.4"><title>{escape(said)}</title></rect>'
    if task and (pattern := pattern_of(task.kind)):
        yield f'<rect {place} fill="{pattern}" pointer-events="none"/>'
    name = f"{task.kind}{task.microbatch}" if task else name
    if wide > 5.5 * len(name):
        yield f'<text x="{x + wide / 2:.1f}" y="{top + 15:.1f}" text-anchor="middle">{escape(name)}</text>'


def _simulated_row(
    timeline: Timeline, group: int, top: float, scale: float, offset: float, num_stages: int
) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8}" y="{top + 15:.1f}" text-anchor="end" font-size="11">group {group}</text>'
    yield f'<rect x="{_LEFT}" y="{top:.1f}" width="{_WIDTH}" height="22" fill="#f2f2f2"/>'
    rows = zip(timeline.orders[group], timeline.starts[group], timeline.ends[group], strict=True)
    for task, start, end in rows:
        x, wide = _LEFT + offset + start * scale, (end - start) * scale
        yield from _bar(task, str(task), "", x, top, wide, num_stages)


def _legend(y: float) -> Iterator[str]:
    x = _LEFT
    shown = (("#d33", "waits for a transfer"), ("#36c", "values on their way to the group"), ("#bbb", "other programs"))
    for fill, name in shown:
        yield f'<rect x="{x}" y="{y}" width="18" height="10" fill="{fill}"/>'
        yield f'<text x="{x + 24}" y="{y + 9}" font-size="11">{name}</text>'
        x += 220
    said = "a colour for each stage; F plain, B crossed, I hatched, W dotted"
    yield f'<text x="{x}" y="{y + 9}" font-size="11">{said}</text>'
