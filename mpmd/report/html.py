"""One HTML file about a step: schedule, timeline, stages, memory over time, transfers, plan against measurement."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from mpmd.compile.step import StepPrograms
from mpmd.graphs import equations
from mpmd.report.conclusion import conclusion
from mpmd.report.explain import StepTraffic, sent_by
from mpmd.report.flops import cost_per_step, flops_of
from mpmd.report.memory import KINDS, measured, over_time
from mpmd.report.profile import Profile, loop_parts, shape_table, stragglers, task_seconds
from mpmd.report.provenance import provenance
from mpmd.report.roles import Roles
from mpmd.report.shares import Shares
from scheduler import Program, Timeline
from scheduler.base.texts import counted, in_bytes, in_flops, in_seconds
from scheduler.timing.colours import colour

# A picture with more bars than this would make a browser slow.
_MOST_BARS = 20000
_TOOLS = (
    '<div class="tools"><button data-k="-" aria-label="zoom out">−</button><button data-k="+" aria-label="zoom in">+'
    '</button><button data-k="0">all</button><span class="soft">keys: + − 0 to zoom, ← → from one to the next; or ctrl'
    " and the wheel</span></div>"
)


@dataclasses.dataclass(frozen=True)
class Facts:
    """The content of the page."""

    programs: StepPrograms
    program: Program
    explanation: str  # the text of `explain()`
    estimate: Mapping[int, Mapping[str, int]]  # the bytes per device of each group, as estimated before compiling
    profile: Profile | None  # the measurement; None if there is none
    shares: Shares  # the shares of the microbatches of lists


def report_page(facts: Facts) -> str:
    """Returns the whole page."""
    name = escape(facts.programs.name)
    made = {what: escape(text) for what, text in provenance(facts.programs.mesh).items()}
    where = f"<p class=soft>{made['date']} on {made['host']}, {made['devices']}</p>"
    parts = [f"<h1>{name}</h1>", where, *_verdict(facts), *_cards(facts)]
    parts += [*_measured(facts), *_simulated(facts), *_stages(facts), *_memory(facts), *_transfers(facts)]
    parts += [*_against(facts), "<h2>Made with</h2>"]
    parts.append(f"<dl>{''.join(f'<dt>{what}</dt><dd>{text}</dd>' for what, text in made.items())}</dl>")
    text = f"<pre>{escape(facts.explanation)}</pre>"
    parts.append(f"<details><summary>The text of <code>compiled.explain()</code></summary>{text}</details>")
    return _page(f"{name}: report", "\n".join(parts))


def _page(title: str, body: str) -> str:
    """Returns a page with its style (`page.css`) and its little script (`page.js`), so that it needs no other file."""
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width,initial-scale=1"><title>{title}</title><style>\n{style}</style></head>\n'
        f"<body>{body}<script>\n{script}</script></body></html>\n"
    )


def _verdict(facts: Facts) -> Iterator[str]:
    sentences = map(escape, conclusion(facts.profile, facts.programs.loops))
    lines = [f"<span>{text}</span>" if number else f"<b>{text}</b>" for number, text in enumerate(sentences)]
    if facts.profile is None:
        lines.append("<span>Nothing was measured: call <code>compiled.profile(args)</code> before the report.</span>")
    yield f'<div class="verdict">{"".join(lines)}</div>'


def _cards(facts: Facts) -> Iterator[str]:
    mesh, program = facts.programs.mesh, facts.program
    traffic = StepTraffic.of_all(program, "", facts.shares)
    shown = [
        (str(mesh.num_groups), f"groups of {mesh.groups[0].size} device{'s' * (mesh.groups[0].size > 1)}"),
        (str(len(program.placement)), "stages"),
        (in_flops(cost_per_step(facts.programs, program, facts.shares)[0]), "a step"),
        (in_bytes(traffic.bytes_moved), f"sent a step, in {traffic.num_moves} transfers"),
    ]
    for loop in facts.programs.loops:
        info = loop.loop.partition.info
        shown.append((type(loop.loop.schedule).__name__, counted(info.num_microbatches, "microbatch")))
    if facts.profile is not None:
        lengths = [s.seconds for s in facts.profile.steps]
        shown.insert(0, (in_seconds(statistics.median(lengths)), f"a step, median of {len(lengths)}"))
    cards = "".join(f"<div class=card><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in shown)
    yield f"<div class=cards>{cards}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], cls: str = "") -> str:
    """Returns a table. Cells are HTML. In a table of the class `last`, the last column is text."""
    cells = "".join(f"<th>{h}</th>" for h in head)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{cls}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


# --- timelines ------------------------------------------------------------------------------------


def _bar(start: float, length: float, whole: float, cls: str, said: str, text: str = "", fill: str = "") -> str:
    place = f"left:{100 * start / whole:.4f}%;width:{100 * max(length, 0.0) / whole:.4f}%"
    shade = f";background-color:{fill};color:{_ink(fill)}" if fill else ""
    return f'<div class="bar {cls}" style="{place}{shade}" data-t="{escape(said)}" title="{escape(said)}">{text}</div>'


def _ink(fill: str) -> str:
    """Returns black or white, whichever is easier to read on a colour."""
    red, green, blue = ((channel / 255) ** 2.2 for channel in bytes.fromhex(fill[1:]))
    return "#111" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#fff"


def _key(style: str, name: str) -> str:
    """Returns an entry of a legend: a square and its meaning, in one line."""
    return f'<span class=named><span class=key style="background:var({style})"></span>{name}</span> '


def _chart(lanes: Sequence[tuple[str, list[str]]], label: str, seconds: float | None = None) -> str:
    """Returns lanes; if the time is measured, with a clock of this many seconds below."""
    rows = "".join(f'<div class="lane"><span class="name">{name}</span>{"".join(bars)}</div>' for name, bars in lanes)
    return (
        f'<div class="zoomed">{_TOOLS}<div class="chart" tabindex="0" role="group" aria-label="{escape(label)}">'
        f'<div class="inner">{rows}{"" if seconds is None else _clock(seconds)}</div></div>'
        '<div class="said soft" aria-live="polite"></div></div>'
    )


def _clock(seconds: float) -> str:
    """Returns a clock with at most eleven round times."""
    shown = (
        f'<span{" class=last" * (t > 0.85 * seconds)} style="left:{100 * t / seconds:.3f}%">'
        f"{in_seconds(t) if t else '0'}</span>"
        for t in _round_ticks(seconds, 10)
    )
    return f'<div class="clock">{"".join(shown)}</div>'


def _measured(facts: Facts) -> Iterator[str]:
    profile = facts.profile
    if profile is None:
        return
    step = profile.typical
    whole, num_stages = max(step.seconds, 1e-9), max(1, len(facts.program.placement))
    yield f"<h2>Measured: a typical step, {in_seconds(step.seconds)}</h2>"
    if len(step.runs) + len(step.moves) > _MOST_BARS:
        yield f"<p class=soft>{len(step.runs)} programs are too many to draw here; see profile.to_chrome_trace().</p>"
    else:
        yield _chart([(f"group {g}", _measured_bars(profile, g, whole, num_stages)) for g in range(len(profile.ranks))],
                     "what each group ran in a measured step", whole)  # fmt: skip
        keys = (("--accent", "a value on its way to the group"), ("--move", "the group waits for it"))
        shown = "".join(_key(c, n) for c, n in keys)
        yield f"<p class='soft keys'>One colour a stage; B, I and W are hatched; grey: other programs. {shown}</p>"
    yield "<h2>Where the time of the step goes</h2>"
    yield _table(("group", "", "computes", "waits for others", "waits for transfers", "waits for its host"),
                 [_spent_row(profile, g) for g in range(len(profile.ranks))])  # fmt: skip
    for index, loop in enumerate(profile.loops):
        if any(r.tasks and r.loop == loop.number for r in step.runs):
            parts = loop_parts(profile, index)
            yield f"<h2>Loop {loop.number}: measured against simulated</h2>"
            yield _table(("part", "time", ""), [
                (escape(p.name), in_seconds(p.seconds) if p.seconds >= 0 else f"−{in_seconds(-p.seconds)}",
                 f'<span class="soft">{escape(p.detail)}</span>') for p in parts
            ], "last")  # fmt: skip
            if shapes := shape_table(profile, index):
                head, *rows = shapes
                yield _table(head, ([escape(cell) for cell in row] for row in rows))
            yield from (f"<p>{escape(line)}</p>" for line in stragglers(profile, index))


def _spent_row(profile: Profile, group: int) -> tuple[str, ...]:
    spent, seconds = profile.typical.spent[group], max(profile.typical.seconds, 1e-12)
    shares = [(spent.busy, "--busy"), (spent.waiting, "--wait"), (spent.exposed, "--move"), (spent.late, "--late")]
    stack = "".join(f'<i style="width:{100 * s / seconds:.2f}%;background:var({c})"></i>' for s, c in shares)
    cells = (f'<span class=key style="background:var({c})"></span>{in_seconds(s)} {s / seconds:.0%}' for s, c in shares)
    return f"group&nbsp;{group}", f'<div class="stack">{stack}</div>', *cells


def _measured_bars(profile: Profile, group: int, whole: float, num_stages: int) -> list[str]:
    """Returns bars for the runs of a group, its waits for transfers, and the values that came to it."""
    step, bars = profile.typical, []
    for w in step.waits[group]:
        r, start, seconds = w.run, w.run.start - step.start, w.run.end - w.run.start
        if r.by is not None and w.there > w.offered:
            bars.append(_bar(w.offered - step.start, w.there - w.offered, whole, "stuck", f"waits for {r.by}"))
        kind, text, fill = "call", escape(r.name), ""
        if r.tasks:
            t = r.tasks[0]
            kind, text, fill = t.kind, f"{t.kind}{t.microbatch}", colour(t.stage, t.kind, num_stages)
        said = f"{r.title}: {in_seconds(seconds)}, {in_seconds(start)} after the start"
        bars.append(_bar(start, seconds, whole, kind, said, text, fill))
    for m in step.moves:
        if m.way.target == group:
            said = f"{m.way}: {in_bytes(m.nbytes)} in {in_seconds(m.end - m.start)}"
            bars.append(_bar(m.start - step.start, m.end - m.start, whole, "thin", said))
    return bars


def _simulated(facts: Facts) -> Iterator[str]:
    for index, loop in enumerate(facts.programs.loops):
        if facts.profile is not None and index in facts.profile.measured_loops:
            timeline = facts.profile.simulated(loop=index)
            title = f"simulated with the measured tasks and transfers: {in_seconds(timeline.makespan)}"
        else:
            timeline = loop.loop.simulated()
            title = f"the schedule, if all tasks take equally long: bubble {timeline.bubble_fraction:.1%}"
        yield f"<h2>Loop {loop.loop.number}, {escape(title)}</h2>"
        if sum(map(len, timeline.orders)) > _MOST_BARS:
            yield "<p class=soft>Too many tasks to draw here.</p>"
            continue
        lanes = [(f"group {g}", _simulated_bars(timeline, g)) for g in range(timeline.num_groups)]
        clock = timeline.makespan if facts.profile is not None and timeline.makespan else None
        yield _chart(lanes, "the schedule on a simulated clock", clock)


def _simulated_bars(timeline: Timeline, group: int) -> list[str]:
    whole = max(timeline.makespan, 1e-12)
    return [
        _bar(a, b - a, whole, t.kind, str(t), f"{t.kind}{t.microbatch}", timeline.colour(t.stage, t.kind))
        for t, a, b in timeline.row(group)
    ]


# --- tables ---------------------------------------------------------------------------------------


def _stages(facts: Facts) -> Iterator[str]:
    roles = Roles(facts.programs.outline)
    for index, loop in enumerate(facts.programs.loops):
        took = {} if facts.profile is None else task_seconds(facts.profile, facts.profile.loops[index])
        rows = []
        for stage, group in enumerate(loop.loop.schedule.placement):
            tasks = {p.kind: t for p, t in loop.tasks.items() if p.stage == stage}
            own = roles.read_by(t.body for t in tasks.values())
            nbytes = sum(equations.nbytes(v.aval) for v in own)
            work = " · ".join(
                f"{k} {in_flops(flops_of(t.executable))}" for k, t in tasks.items() if t.executable is not None
            )
            times = " · ".join(
                f"{k} {in_seconds(statistics.median(took[stage, k].values()))}" for k in tasks if (stage, k) in took
            )
            label = loop.loop.partition.labels[stage]
            named = f"{stage} {escape(label)}" if label else str(stage)
            rows.append((named, str(group), f"{len(own)}", in_bytes(nbytes), work, times or "–"))
        yield f"<h2>Stages{f' of loop {index}' if len(facts.programs.loops) > 1 else ''}</h2>"
        yield _table(("stage", "group", "arrays", "bytes", "work of a microbatch", "measured"), rows)


def _memory(facts: Facts) -> Iterator[str]:
    mesh = facts.programs.mesh
    if not mesh.local_groups:
        return
    yield "<h2>Memory of a device over a step</h2>"
    names = {} if Roles(facts.programs.outline).trains else {"gradients": "results"}
    keys = "".join(_key(f"--{k}", names.get(k, k)) for k in KINDS)
    others = sorted(set(range(mesh.num_groups)) - set(mesh.local_groups))
    elsewhere = (
        f" Groups {', '.join(map(str, others))} are in other processes, whose reports show them." if others else ""
    )
    yield f"<p class='soft keys'>After each instruction, as computed from the program.{elsewhere} {keys}</p>"
    histories = {g: over_time(facts.programs, facts.program, g) for g in sorted(mesh.local_groups)}
    most = max((now["peak"] for history in histories.values() for now in history), default=0) or 1
    charts = "".join(
        _memory_chart(history, most, f"group {g}: at most {in_bytes(max((n['peak'] for n in history), default=0))}")
        for g, history in histories.items()
    )
    yield f'<div class="memory">{charts}</div>'


def _transfers(facts: Facts) -> Iterator[str]:
    groups = range(len(facts.program.groups))
    sent = {(g, target): sizes for g in groups for target, sizes in sent_by(facts.program, g, facts.shares).items()}
    if not sent:
        return
    took: dict[tuple[int, int], list[float]] = defaultdict(list)
    moved: dict[tuple[int, int], float] = defaultdict(float)
    for step in facts.profile.steps if facts.profile is not None else ():
        for m in step.moves:
            took[m.way.source, m.way.target].append(m.end - m.start)
            moved[m.way.source, m.way.target] += m.nbytes
    rows = []
    for pair, sizes in sorted(sent.items()):
        seconds = sum(took[pair])
        measured_as = (
            (in_seconds(seconds / len(took[pair])), f"{in_bytes(moved[pair] / seconds)}/s" if seconds else "–")
            if took[pair] else ("–", "–")
        )  # fmt: skip
        rows.append(
            (f"{pair[0]} → {pair[1]}", str(len(sizes)), in_bytes(sum(sizes)), in_bytes(max(sizes)), *measured_as)
        )
    yield "<h2>Transfers of a step</h2>"
    yield _table(("groups", "values", "bytes", "largest", "mean time", "rate"), rows)


def _against(facts: Facts) -> Iterator[str]:
    found = measured(facts.programs, facts.program)
    rows: list[tuple[str, ...]] = []
    for group, planned in sorted(facts.estimate.items()):
        compiled, stats = found.get(group), _device_peak(facts, group) if group in found else 0
        rows.append((f"memory of a device, group&nbsp;{group}", in_bytes(planned.get("peak", 0)),
                     in_bytes(compiled["peak"]) if compiled else "–", in_bytes(stats) if stats else "–"))  # fmt: skip
    if facts.profile is not None:
        for index in facts.profile.measured_loops:
            loop = facts.profile.loops[index]
            real = statistics.median(facts.profile.timeline(index, s).makespan for s in facts.profile.steps)
            rows.append((f"time of loop {loop.number}", "–", in_seconds(facts.profile.simulated(loop=index).makespan),
                         in_seconds(real)))  # fmt: skip
    yield "<h2>Plan against measurement</h2>"
    yield _table(("", "estimated before compiling", "by the compiled programs, simulated", "measured"), rows)


def _device_peak(facts: Facts, group: int) -> int:
    """Returns the most bytes that a device of a group has used, where it counts them."""
    device = facts.programs.mesh.groups[group].devices.flat[0]
    if facts.profile is None or facts.programs.mesh.is_described:
        return 0
    return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))


# --- the memory of a device over a step: kinds on top of each other, with axes ---------------------


def _round_ticks(most: float, count: int) -> list[float]:
    """Returns about `count` round numbers from 0 to `most`.

    Examples:
      >>> _round_ticks(64.8, 10), _round_ticks(4.47, 4)
      ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [0.0, 2.0, 4.0])
    """
    power = 10.0 ** math.floor(math.log10(most / count))
    every = next(power * k for k in (1, 2, 5, 10) if most / (power * k) <= count)
    return [every * k for k in range(int(most / every) + 1)]


def _memory_chart(history: Sequence[Mapping[str, int]], most: float, title: str) -> str:
    """Returns a figure: bytes by kind, up to `most`, over the number of the instruction."""
    count = max(1, len(history))
    down = [(100 - 100 * y / most, in_bytes(y) if y else "0") for y in _round_ticks(most, 4)]
    along = [(100 * x / count, f"{x:.0f}") for x in _round_ticks(count, 6) if x == int(x)]
    lines = "".join(f'<line x1="0" x2="{count}" y1="{y:.2f}" y2="{y:.2f}"/>' for y, _ in down)
    return (
        f'<figure class="curve"><figcaption>{title}</figcaption><div class="up">'
        + "".join(f'<span style="top:{y:.2f}%">{text}</span>' for y, text in down)
        + f'</div><svg viewBox="0 0 {count} 100" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'{_areas(history, most)}<g class="grid">{lines}</g></svg><div class="along">'
        + "".join(f'<span style="left:{x:.2f}%">{text}</span>' for x, text in along)
        + "</div></figure>"
    )


def _areas(history: Sequence[Mapping[str, int]], most: float) -> str:
    below = [0.0] * len(history)
    shapes = []
    for kind in KINDS:
        above = [b + now.get(kind, 0) for b, now in zip(below, history, strict=True)]
        if above != below:
            upper, lower = ([f"{100 - 100 * v / most:.2f}" for v in edge] for edge in (above, below))
            top = [f"{x},{y} {x + 1},{y}" for x, y in enumerate(upper)]
            under = [f"{x + 1},{y} {x},{y}" for x, y in enumerate(lower)]
            points = " ".join([*top, *reversed(under)])
            shapes.append(f'<polygon points="{points}" fill="var(--{kind})"><title>{kind}</title></polygon>')
        below = above
    return "".join(shapes)
