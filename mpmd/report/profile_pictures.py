"""Pictures of a profile: SVG for documents, a Chrome trace for Perfetto."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from mpmd.observe.records import Ran
from mpmd.report.steps import Step
from scheduler import Task, Timeline
from scheduler.base.texts import in_seconds
from scheduler.timing.colours import colour, pattern_definitions, pattern_of

_LEFT, _TOP, _ROW, _WIDTH, _RIGHT = 80.0, 40.0, 34.0, 1400.0, 190.0


def to_chrome_trace(steps: Sequence[Step], ranks_of: Sequence[Sequence[int]]) -> str:
    """Chrome-trace JSON: a process for each rank, with its host, its groups' devices, and what comes to it.

    Args:
      ranks_of: per group, its processes.
    """
    return json.dumps({"traceEvents": list(_events(steps, ranks_of)), "displayTimeUnit": "ms"})


def _events(steps: Sequence[Step], ranks_of: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    first = min((s.start for s in steps), default=0.0)
    ranks = sorted({r for ranks in ranks_of for r in ranks})
    per_rank = 1 + len(ranks_of)
    # Of its host; that of group g is g + 1 more. Perfetto takes id 0, and its process's, for the main thread.
    threads = {rank: ranks[-1] + 1 + i * per_rank for i, rank in enumerate(ranks)}
    for rank, host in threads.items():
        yield _named("process_name", rank, host, name=f"rank {rank}")
        yield _named("process_sort_index", rank, host, sort_index=rank)
        yield _named("thread_name", rank, host, name="host: starts programs")
        for group, of_group in enumerate(ranks_of):
            if rank in of_group:
                yield _named("thread_name", rank, host + 1 + group, name=f"group {group}: devices")
    number = 0
    for count, step in enumerate(steps):
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


def to_svg(name: str, step: Step, simulated: Timeline | None) -> str:
    """A step, a row a group, and below it the simulated loop on the same scale."""
    scale = _WIDTH / max(step.seconds, simulated.makespan if simulated else 0.0, 1e-9)
    height = _TOP + _ROW * step.num_groups * (2 if simulated else 1) + (40 if simulated else 0) + 40
    title = f"{name}: a step, {in_seconds(step.seconds)}"
    width = f"{_LEFT + _WIDTH + _RIGHT:.0f}"
    box = f'width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="9" role="img">',
        f"<title>{escape(title)}</title>",
        pattern_definitions(),
        f'<rect width="{width}" height="{height:.0f}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="13">{escape(title)}; measured</text>',
    ]
    num_stages = len(simulated.placement) if simulated else 1
    for group in range(step.num_groups):
        parts += _measured_row(step, group, scale, num_stages)
    if simulated is not None:
        top = _TOP + _ROW * step.num_groups + 40
        said = f"simulated, with the measured times of tasks and transfers: {in_seconds(simulated.makespan)}"
        parts.append(f'<text x="{_LEFT}" y="{top - 12}" font-size="13">{escape(said)}</text>')
        offset = (min(r.start for r in step.runs if r.tasks) - step.start) * scale
        for group in range(simulated.num_groups):
            parts += _row_head(group, top + _ROW * group)
            for task, start, end in simulated.row(group):
                x, wide = _LEFT + offset + start * scale, (end - start) * scale
                parts += _bar(task, str(task), "", x, top + _ROW * group, wide, num_stages)
    parts += [*_legend(height - 24), "</svg>"]
    return "\n".join(parts) + "\n"


def _row_head(group: int, top: float) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8}" y="{top + 15:.1f}" text-anchor="end" font-size="11">group {group}</text>'
    yield f'<rect x="{_LEFT}" y="{top:.1f}" width="{_WIDTH}" height="22" fill="#f2f2f2"/>'


def _measured_row(step: Step, group: int, scale: float, num_stages: int) -> Iterator[str]:
    top, spent = _TOP + _ROW * group, step.spent[group]
    yield from _row_head(group, top)
    for bar in step.bars(group):
        x, wide = _LEFT + bar.start * scale, bar.seconds * scale
        title = f"<title>{escape(bar.said)}</title></rect>"
        if bar.run is not None:
            yield from _bar(next(iter(bar.run.tasks), None), bar.said, bar.run.name, x, top, wide, num_stages)
        elif bar.kind == "waits":
            yield f'<rect x="{x:.1f}" y="{top + 6:.1f}" width="{wide:.2f}" height="10" fill="#d33">{title}'
        else:
            place = f'x="{x:.1f}" y="{top + 23:.1f}" width="{max(wide, 0.5):.2f}" height="4"'
            yield f'<rect {place} fill="#36c" fill-opacity="0.6">{title}'
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


def _legend(y: float) -> Iterator[str]:
    x = _LEFT
    shown = (("#d33", "waits for a transfer"), ("#36c", "values on their way to the group"), ("#bbb", "other programs"))
    for fill, name in shown:
        yield f'<rect x="{x}" y="{y}" width="18" height="10" fill="{fill}"/>'
        yield f'<text x="{x + 24}" y="{y + 9}" font-size="11">{name}</text>'
        x += 220
    said = "a colour for each stage; F plain, B crossed, I hatched, W dotted"
    yield f'<text x="{x}" y="{y + 9}" font-size="11">{said}</text>'
