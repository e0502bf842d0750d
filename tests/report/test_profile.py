"""`Compiled.profile`: what ran when, on one process; where the time went; pictures and traces that others can open."""

import concurrent.futures
import itertools
import json
import re
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler
from mpmd.observe.records import Moved, Ran, RecordedTimes, Way
from mpmd.report import html
from mpmd.report.conclusion import conclusion
from mpmd.report.profile import LoopFacts, Profile, loop_parts
from mpmd.report.steps import steps_of
from scheduler.timing.colours import colour

STAGES, MICROBATCHES, WIDTH, STEPS = 3, 4, 16, 3
SLOW_STAGE, SLEEP_S = 1, 0.01


def sleeping(x):
    """A microbatch of 8 rows takes SLEEP_S, others in proportion."""
    time.sleep(SLEEP_S * len(x) / 8)
    return np.asarray(x)


def loss(weights, x):
    for stage, w in enumerate(weights):
        x = jnp.tanh(x @ w)
        if stage == SLOW_STAGE:
            x = x + 0 * jax.pure_callback(sleeping, jax.typeof(x), jax.lax.stop_gradient(x))
        x = mpmd.mark_stage_end(x) if stage < STAGES - 1 else x
    return jnp.mean(x**2)


def jitted_step():
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:STAGES]), ("stage",)), "stage")

    def step(state, xs):
        def gradients(x):
            return jax.value_and_grad(loss)(state["w"], x)

        value, grads = mpmd.treduce(gradients, xs, schedule=scheduler.OneFOneB(STAGES))
        count = state["count"] + 1
        return {"w": [w - 0.1 * g for w, g in zip(state["w"], grads, strict=True)], "count": count}, value

    return mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)


@pytest.fixture(scope="module")
def made():
    """A compiled step whose middle stage is slow; the arguments that it was profiled with, and the profile."""
    step, rng = jitted_step(), np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(STAGES)]
    state, xs = {"w": weights, "count": np.int32(0)}, rng.normal(size=(MICROBATCHES, 8, WIDTH)).astype(np.float32)
    compiled = step.lower(state, xs).compile()
    return compiled, (state, xs), compiled.profile((state, xs), steps=STEPS)


def test_steps_follow_each_other_as_in_training(made):
    compiled, (state, xs), profile = made
    for _ in range(STEPS + 1):
        state, value = compiled(state, xs)
    assert int(profile.result[0]["count"]) == STEPS + 1
    assert float(profile.result[1]) == float(value)
    for a, b in zip(profile.result[0]["w"], state["w"], strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


def test_every_task_runs_once_in_each_step_after_its_inputs_and_after_the_task_before(made):
    compiled, _, profile = made
    wanted = [
        [i.task for i in group if isinstance(i, scheduler.Run)] for group in compiled.program.groups
    ]  # fmt: skip
    assert len(profile.steps) == STEPS
    for step in profile.steps:
        assert [[t for r in runs for t in r.tasks] for runs in step.by_group] == wanted
        ends = {t: r.end for r in step.runs for t in r.tasks}
        for runs in step.by_group:
            assert all(a.end <= b.start for a, b in itertools.pairwise(runs))
        for r in step.runs:
            assert step.start <= r.dispatched and r.dispatched <= r.start <= r.end <= step.end
            for t in r.tasks:
                before = {"F": t._replace(stage=t.stage - 1), "B": t._replace(stage=t.stage + 1)}[t.kind]
                assert ends.get(before, 0.0) <= r.start
        sent = [i for g in compiled.program.groups for i in g if isinstance(i, scheduler.Send)]
        assert len(step.moves) == len(sent)
        assert all(m.start <= m.end for m in step.moves)


def test_the_time_of_a_group_and_of_a_loop_is_accounted_for(made):
    profile = made[2]
    for spent in profile.typical.spent:
        assert spent.busy + spent.waiting + spent.exposed + spent.late == pytest.approx(profile.typical.seconds)
    parts = loop_parts(profile)
    median = np.median([profile.timeline(step=step).makespan for step in profile.steps])
    assert sum(part.seconds for part in parts) == pytest.approx(median)
    uneven = next(part for part in parts if part.name == "uneven stages")
    assert uneven.detail.startswith(f"stage {SLOW_STAGE} in group {SLOW_STAGE} takes ")
    assert uneven.seconds > MICROBATCHES * SLEEP_S / 3
    busy = [spent.busy for spent in profile.typical.spent]
    assert busy[SLOW_STAGE] >= MICROBATCHES * SLEEP_S and busy[SLOW_STAGE] > 2 * busy[0]


def test_the_text_says_where_the_time_went(made):
    lines = str(made[2]).splitlines()
    assert re.fullmatch(r"step: a step takes \S+ ms \(.* to .*\), median of 3; 3 groups in 1 process", lines[0])
    assert lines[1].split() == "group ranks computes waits for others waits for transfers waits for its host".split()
    assert any(re.search(r"\+ +\S+ m?s uneven stages: stage 1 in group 1 takes \S+ times the mean", x) for x in lines)


def test_the_measured_timeline_feeds_the_simulator(made):
    compiled, _, profile = made
    timeline = compiled.last_timeline()
    assert timeline.orders == profile.timeline().orders
    costs = scheduler.Costs.measured(timeline)
    assert costs.duration("F", SLOW_STAGE) > SLEEP_S
    simulated = scheduler.simulate(scheduler.OneFOneB(STAGES), MICROBATCHES, costs)
    assert simulated.makespan == pytest.approx(timeline.makespan, rel=0.5)
    assert profile.simulated().makespan <= timeline.makespan * 1.5


def check_trace(text):
    """What the Trace Event Format asks of a file; spans of one thread must be nested, or Perfetto drops them."""
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    named, open_spans, spans = set(), {}, defaultdict(list)
    for e in data["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} <= set(e) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "process_sort_index", "thread_name") and e["args"]
            named.add((e["name"], e["pid"], e["tid"]))
            continue
        assert isinstance(e["ts"], float) and e["ts"] >= 0
        if e["ph"] == "X":
            assert e["dur"] >= 0 and ("thread_name", e["pid"], e["tid"]) in named
            spans[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
        else:
            key = e["cat"], e["id2"]["local"], e["pid"]
            if e["ph"] == "b":
                assert key not in open_spans
                open_spans[key] = e
            else:
                assert e["ph"] == "e" and open_spans.pop(key)["ts"] <= e["ts"]
    assert not open_spans
    for found in spans.values():
        found.sort()
        assert all(a[1] <= b[0] + 0.002 for a, b in itertools.pairwise(found))
    return data["traceEvents"]


def test_the_trace_is_as_the_format_asks(made):
    events = check_trace(made[2].to_chrome_trace())
    tasks = [e for e in events if e["ph"] == "X" and e["cat"] == "task" and e["tid"] != events[0]["tid"]]
    assert len(tasks) == STEPS * 2 * STAGES * MICROBATCHES
    assert {e["args"]["stage"] for e in tasks} == set(range(STAGES))


class Elements(HTMLParser):
    """Counts elements by class, and sees that each is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.classes, self.links = [], defaultdict(int), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        for name in (named.get("class") or "").split():
            self.classes[name] += 1
        self.links += [named[key] for key in ("src", "href") if key in named]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_file_with_all_tasks_measured_and_simulated(made, tmp_path):
    compiled, _, profile = made
    compiled.report(tmp_path / "run.html", profile)
    text = (tmp_path / "run.html").read_text()
    found = Elements(text)
    assert not found.links and "http" not in text and "prefers-color-scheme:dark" in text
    assert found.classes["zoomed"] == 2 and found.classes["lane"] == 2 * STAGES
    assert found.classes["F"] == found.classes["B"] == 2 * STAGES * MICROBATCHES
    for head in ("Where the time of the step goes", "Stages", "Memory of a device over a step", "Transfers of a step",
                 "Plan against measurement"):  # fmt: skip
        assert f"<h2>{head}</h2>" in text
    assert len(re.findall("<polygon", text)) >= 2 * STAGES and len(re.findall('class="curve"', text)) == STAGES
    assert re.search(
        r'class="verdict"><b>The groups compute for \d+% of a step of .*Most of the rest, .*Advice: ', text
    )
    for what in ("date", "host", "devices", "versions", "command"):
        assert re.search(f"<dt>{what}</dt><dd>[^<]+</dd>", text)
    assert text.index("<details>") < text.index("step on MpmdMesh(")


def test_what_a_report_says_first_is_the_bubble_where_nothing_was_measured(made):
    busy, loss, advice = conclusion(None, made[0]._programs.loops)
    assert busy == "The groups compute for 67% of loop 0, if all tasks take equally long."
    assert loss == "The rest, 33%, is the bubble of the schedule."
    assert advice == (
        "Advice: Use more microbatches: with 8 in place of 4 the bubble is 20% of the loop in place of 33%. mpmd.tune"
        " also compares schedules."
    )


def test_the_names_of_tasks_can_be_read_on_the_colour_of_every_stage_and_none_is_red():
    def light(colour: str) -> float:  # WCAG's relative luminance
        digits = "".join(2 * c for c in colour[1:]) if len(colour) == 4 else colour[1:]
        channels = [c / 255 for c in bytes.fromhex(digits)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for kind in "FBIW":
        for stage in range(16):
            fill = colour(stage, kind, 16)
            red, green, blue = bytes.fromhex(fill[1:])
            assert red < max(green, blue), (stage, kind)
            dark, bright = sorted((light(fill), light(html._ink(fill))))
            assert (bright + 0.05) / (dark + 0.05) > 4.2, (stage, kind)


def test_a_report_without_a_measurement_says_how_to_get_one(tmp_path):
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    step = mpmd.jit(lambda x: mpmd.mark_stage_end(x + 1) * 2, mpmd_mesh=mesh)
    compiled = step.lower(np.ones(3, np.float32)).compile()
    compiled.report(str(tmp_path / "run.html"))
    text = (tmp_path / "run.html").read_text()
    assert Elements(text).classes["zoomed"] == 0 and "<code>compiled.profile(args)</code>" in text
    profile = compiled.profile((np.ones(3, np.float32),), steps=1)  # a step without a loop
    assert np.asarray(profile.result).tolist() == [4.0] * 3 and "1 process" in str(profile)


def test_the_page_on_profiles_runs_as_printed(made, tmp_path, monkeypatch, capsys):
    compiled, (state, batch), _ = made
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "profiling.md").read_text()
    (code,) = re.findall(r"<!-- profiling: python -->\n+```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    step = SimpleNamespace(lower=lambda *args: SimpleNamespace(compile=lambda: compiled))
    exec(code, {"step": step, "state": state, "batch": batch})
    assert "median of 5; 3 groups in 1 process" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"loop.svg", "step.json", "run.html"}
    title = ET.parse(tmp_path / "loop.svg").findtext("{*}title")
    assert f"{2 * STAGES * MICROBATCHES} tasks" in title


def test_a_timed_call_gives_what_an_untimed_one_gives(made):
    compiled, (state, xs), _ = made
    plain = compiled(state, xs)
    compiled.timing = True
    try:
        timed = [compiled(state, xs)]
        assert len(compiled.last_timeline().orders[0]) == 2 * MICROBATCHES
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            timed += threads.map(lambda _: compiled(state, xs), range(16))
    finally:
        compiled.timing = False
    for one in timed:
        for a, b in zip(*map(jax.tree.leaves, (plain, one)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def made_for_lists():
    """The same step for a list of microbatches of 8 and 16 rows."""
    step, rng = jitted_step(), np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(STAGES)]
    state, rows = {"w": weights, "count": np.int32(0)}, (8, 16, 8, 8, 16)
    xs = [rng.normal(size=(n, WIDTH)).astype(np.float32) for n in rows]
    compiled = step.lower(state, xs).compile()
    return step, compiled, (state, xs), compiled.profile((state, xs), steps=STEPS)


def test_a_step_over_a_list_is_measured_by_shape(made_for_lists):
    step, compiled, (state, xs), profile = made_for_lists
    small, large = (f"f32[{rows},{WIDTH}]" for rows in (8, 16))
    assert profile.loops[0].shapes == (small, large, small, small, large)
    costs = profile.costs()
    assert len(costs.microbatches) == len(xs) and costs.microbatches[1] is costs.microbatches[4]
    few, many = (costs.microbatches[k].forward[SLOW_STAGE] for k in (0, 1))
    assert SLEEP_S < few < 2 * SLEEP_S < many < 1.8 * few + SLEEP_S
    for _ in range(STEPS + 1):
        state, value = step(state, xs)
    assert int(profile.result[0]["count"]) == STEPS + 1 and float(profile.result[1]) == float(value)
    host = mpmd.device_get(state)
    assert float(compiled(host, xs[::-1])[1]) == float(step(host, xs[::-1])[1])
    with pytest.raises(TypeError, match="compiled for lists of microbatches"):
        compiled(host, xs[0])
    for measured in profile.steps:
        tasks = [[t for r in runs for t in r.tasks] for runs in measured.by_group]
        assert tasks == list(map(list, scheduler.OneFOneB(STAGES).orders(len(xs))))
        assert {m.microbatch for m in measured.moves} >= set(range(len(xs)))


def test_what_is_told_of_a_list_adds_up_and_names_its_shapes(made_for_lists, tmp_path):
    _, compiled, (_, xs), profile = made_for_lists
    parts = loop_parts(profile)
    median = np.median([profile.timeline(step=step).makespan for step in profile.steps])
    assert sum(part.seconds for part in parts) == pytest.approx(median)
    several = next(part for part in parts if part.name == "microbatches of several shapes")
    assert re.fullmatch(r"the longest takes \d\.\d\d times the mean", several.detail)
    rows = [line.split() for line in str(profile).splitlines() if line.startswith("  f32[")]
    assert [(row[0], row[1]) for row in rows] == [(f"f32[8,{WIDTH}]", "3"), (f"f32[16,{WIDTH}]", "2")]
    check_trace(profile.to_chrome_trace())
    events = json.loads(profile.to_chrome_trace())["traceEvents"]
    shapes = {(e["args"]["microbatch"], e["args"]["shape"]) for e in events if e.get("cat") == "task"}
    assert shapes == {(k, f"f32[{len(x)},{WIDTH}]") for k, x in enumerate(xs)}
    compiled.report(tmp_path / "list.html")
    page = (tmp_path / "list.html").read_text()
    Elements(page)
    assert "<th>shape of a microbatch</th>" in page and "<td>microbatches of several shapes</td>" in page


def test_other_lists_are_measured_by_the_same_compiled_step(made_for_lists):
    _, compiled, (state, xs), _ = made_for_lists
    profile = compiled.profile((state, [*xs[:2], xs[0][:4]]), steps=1)
    assert profile.loops[0].shapes == tuple(f"f32[{rows},{WIDTH}]" for rows in (8, 16, 4))
    assert compiled.last_timeline().orders == profile.timeline().orders
    alike = compiled.profile((state, [xs[0]] * 3), steps=1)
    assert not alike.costs().microbatches
    assert "shape" not in str(alike)
    with pytest.raises(TypeError) as error:
        compiled.profile((state, xs[0]))
    assert str(error.value) == (
        "mpmd: this step was compiled for lists of microbatches; give it lists in the same places."
    )


def test_a_donated_argument_that_no_result_replaces_is_lent_as_copies():
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")

    def step(deep, xs):
        w = deep["a"]["b"]["c"]
        return w + mpmd.treduce(lambda x: jnp.sum(mpmd.mark_stage_end(x @ w)), xs, schedule=scheduler.GPipe(2))

    step = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)
    deep, xs = {"a": {"b": {"c": np.eye(4, dtype=np.float32)}}}, np.ones((2, 3, 4), np.float32)
    compiled = step.lower(deep, xs).compile()
    (placed, xs) = mpmd.jit(lambda *x: x, mpmd_mesh=mesh, out_shardings=compiled.input_shardings[0])(deep, xs)
    profile = compiled.profile((placed, xs), steps=2)
    assert not placed["a"]["b"]["c"].is_deleted()
    assert np.array_equal(np.asarray(profile.result), np.asarray(compiled(placed, xs)))
    assert placed["a"]["b"]["c"].is_deleted()


def test_arguments_that_are_not_those_of_the_step_are_refused(made):
    compiled, (state, xs), _ = made
    with pytest.raises(ValueError) as e:
        compiled.profile((state, xs), steps=0)
    assert str(e.value) == "profile: steps=0, expected a number from 1 on."
    with pytest.raises(TypeError, match="another structure of arguments"):
        compiled.profile((state,))
    with pytest.raises(TypeError, match=r"^profile: pass the arguments of a call as one tuple"):
        compiled.profile(state, xs)


def test_a_step_that_runs_nothing_cannot_be_measured():
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    with pytest.raises(ValueError, match=r"^profile: the step runs no program, so there is nothing to measure\."):
        mpmd.jit(lambda x: None, mpmd_mesh=mesh).lower(1.0).compile().profile((1.0,))


def test_a_step_without_loops_has_no_timeline(made, tmp_path):
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    args = np.eye(4, dtype=np.float32), np.ones((2, 4), np.float32)
    profile = mpmd.jit(lambda w, x: mpmd.mark_stage_end(x @ w) @ w, mpmd_mesh=mesh).lower(*args).compile().profile(args)
    for read in (profile.timeline, profile.costs, profile.simulated):
        with pytest.raises(ValueError, match=r"^profile: the step has 0 treduce loops, so there is no loop -1\.$"):
            read()
    for of_another_step in (profile, {}):
        with pytest.raises(ValueError, match=r"^report: profile is none of this step\."):
            made[0].report(tmp_path / "report.html", of_another_step)


def test_loops_that_only_go_forward_and_loops_whose_tasks_compute_nothing(tmp_path):
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")

    def evaluate(w, xs):
        same = mpmd.treduce(lambda x: mpmd.mark_stage_end(jnp.sum(w) * 0 + 1), xs, schedule="1f1b")
        return same, mpmd.treduce(lambda x: jnp.sum(mpmd.mark_stage_end(x @ w) @ w), xs, schedule="zb-h1")

    args = np.eye(4, dtype=np.float32), np.ones((4, 2, 4), np.float32)
    compiled = mpmd.jit(evaluate, mpmd_mesh=mesh).lower(*args).compile()
    only_forward = 1 - 4 / 5  # of 4 microbatches in 2 stages, without a backward
    assert f"loop 1: ZeroBubbleH1(num_stages=2), 4 microbatches, bubble {only_forward:.1%}" in compiled.explain()
    assert compiled._programs.loops[1].loop.bubble(2) == pytest.approx(1 - 8 / 9)
    profile = compiled.profile(args)
    assert profile.measured_loops == (1,) and "loop 0, measured" not in str(profile)
    compiled.report(tmp_path / "report.html")
    for read in (profile.timeline, profile.costs, profile.simulated):
        with pytest.raises(ValueError, match=r"^profile: no task of loop 0 ran, since none of its work depends on"):
            read(loop=0)
    assert len(compiled.last_timeline().orders) == 2


def test_transfers_count_for_the_loop_and_the_boundary_that_they_belong_to():
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:3]), ("stage",)), "stage")
    roles = {name: mpmd.role(name) for name in "abc"}

    def joined(w, x):
        one, other = roles["a"](lambda x: jnp.tanh(x @ w))(x), roles["b"](lambda x: jnp.tanh(x @ w))(x)
        return roles["c"](lambda x, y: jnp.sum((x + y) @ w))(one, other)

    def step(w, xs):
        return mpmd.treduce(lambda x: joined(w, x), xs, schedule="1f1b")

    args = np.eye(64, dtype=np.float32), np.ones((4, 32, 64), np.float32)
    lowered = mpmd.jit(step, mpmd_mesh=mesh, roles={"a": 0, "b": 1, "c": 2}).lower(*args)
    estimated = lowered.costs().transfer_s  # stage 0 sends to stage 2 as much as stage 1 does
    assert estimated[0] == estimated[1] > 0 == estimated[2]

    def moved(name, loop, seconds):
        way = Way(f"{name}[0]", 0, 1)
        return Moved(0, 0, way, 8, 0.0, 0.0, seconds, 0), Ran(
            0, 0, 1, "F", (scheduler.Task(1, "F", 0),), loop, 0.0, 0.0, seconds, seconds + 1, seconds, way
        )

    facts = [
        LoopFacts(n, "OneFOneB", (0, 1), None, ((), (scheduler.Task(1, "F", 0),)), ("",), {}, ("", "")) for n in (0, 1)
    ]
    moves, runs = zip(moved("a0", 0, 1.0), moved("loop1:a0", 1, 3.0), strict=True)
    profile = Profile("step", steps_of(RecordedTimes(runs, moves), 2), ((0,), (0,)), tuple(facts), 0.0)
    assert [profile.costs(n).transfer_s for n in (0, 1)] == [(1.0, 0.0), (3.0, 0.0)]
