"""Profiles of several processes; what the flight recorder leaves, and what `python -m mpmd replay` says of it."""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from jobs import ROOT, VICTIM_STATUS, Job, results

import scheduler
from mpmd.observe import flight_files
from mpmd.observe.flight import Flight, Samples
from mpmd.report.replay import _verdict, reach
from scheduler.programs.stored import of_data, to_data

NUM_RANKS, GUILTY = 3, 1


def replayed(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mpmd", "replay", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


# --- profiles -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled():
    """What each of two processes says."""
    return results("profiles.py", processes=2)


@pytest.mark.slow
def test_all_processes_get_one_profile_on_one_clock(profiled):
    first, *others = profiled
    for other in others:
        assert {k: other[k] for k in ("text", "trace", "loss")} == {k: first[k] for k in ("text", "trace", "loss")}
    assert first["ranks"] == [[0], [1]] and first["clock_error_s"] == 0.0
    for rank in profiled:  # nobody compiles what another process runs
        assert rank["programs"][0] == rank["programs"][1]
    assert first["tasks"][1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]
    assert " 2 groups in 2 processes" in first["text"]
    ends = first["ends"]
    assert len(first["moves"]) >= 8
    for value, source, target, start, end, sent in first["moves"]:
        assert start <= end and sent <= end
        if value.startswith("F0"):  # an activation: from the end of its forward to the start of the next
            microbatch = value[value.index("[") + 1 : -1]
            assert (source, target) == (0, 1)
            # a thread of a busy machine notes the end of a task late, and of another process before it
            assert abs(ends[f"0F{microbatch}"][1] - sent) < 1.0 and end <= ends[f"1F{microbatch}"][1] + 1.0
    names = [e["args"]["name"] for e in json.loads(first["trace"])["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]


@pytest.mark.slow
def test_clocks_that_differ_by_seconds_are_compared_to_within_milliseconds(profiled):
    first, second = profiled
    assert first["offset"] == [0.0, 0.0]
    seconds, error = second["offset"]
    assert abs(seconds + 5.0) <= error and 0 < error < 0.5  # milliseconds, but for a busy machine


# --- the flight recorder --------------------------------------------------------------------------


def fault(name: str, folder: Path) -> list:
    with Job("faults.py", name, GUILTY, processes=NUM_RANKS, hang_timeout_s=3, flight=folder) as job:
        job.wait_for(f"about to {name}", 60, (GUILTY,))
        ended = job.wait(60, but=GUILTY)
        job.signal(GUILTY, signal.SIGKILL)
    return ended


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path):
    ended = fault("kill", tmp_path)
    for e in ended:
        assert f"jax-mpmd: what each rank did last: python -m mpmd replay {tmp_path}" in e.err.splitlines()
    said = replayed(tmp_path)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == "records of 2 of 3 ranks; none of rank 1"
    assert lines[1].startswith("jax-mpmd: rank 1: died: process ")
    assert any(line.startswith("rank 1 was gone (") for line in lines)
    assert "no deadlock; so the order of the instructions is not the cause" in said.stdout


def check_stalled(text: str) -> None:
    """What `replay` says where rank 1 gives nothing any more to rank 2."""
    assert "rank 2 waited " in text and " s for the transfer of F1.0[0] from group 1 to 2, from rank 1" in text
    assert "stopped before it sends F1.0[0], which 1F0 in group 1 makes:" in text
    assert "  group 2 (rank 2) waits for F1.0[0] from group 1, as it did" in text
    assert "so rank 1 explains what the others waited for" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stop", "callback"])
def test_a_stalled_rank_is_named_with_the_value_that_others_waited_for(name, tmp_path):
    ended = fault(name, tmp_path)
    assert {e.status for e in ended} == {VICTIM_STATUS}
    text = replayed(tmp_path).stdout
    check_stalled(text)
    assert ("rank 1 was stopped (" if name == "stop" else "rank 1 waited for no other rank (") in text


def hangs(folder: Path) -> bool:
    """Whether by the records that were asked for each rank has waited for a while, and knows that rank 1 calls back."""
    records = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    views = [record["views"] for record in records]
    waits = [(record["views"]["2"]["board"]["wait"] or {}).get("for_s", 0.0) for record in records]
    return len(records) == NUM_RANKS and min(waits) > 2.5 and all(v["1"]["board"]["callback"] for v in views)


@pytest.mark.slow
def test_a_job_that_hangs_says_why_when_somebody_ends_it(tmp_path):
    with Job("faults.py", "callback", GUILTY, processes=NUM_RANKS, flight=tmp_path) as job:
        job.wait_for("about to callback", 60, (GUILTY,))
        end = time.monotonic() + 60
        while not hangs(tmp_path) and time.monotonic() < end:
            (tmp_path / "now").touch()
            time.sleep(0.3)
        job.signal(0, signal.SIGINT)
        for rank in range(1, NUM_RANKS):
            job.signal(rank, signal.SIGTERM)
        ended = job.wait(60)
    assert ended[0].status in (130, VICTIM_STATUS)  # Ctrl-C, or the others had gone by then
    assert [e.status for e in ended[1:]] == [-signal.SIGTERM] * (NUM_RANKS - 1)
    for e in ended:
        assert f"jax-mpmd: what each rank did last: python -m mpmd replay {tmp_path}" in e.err.splitlines()
    lines = replayed(tmp_path).stdout.splitlines()
    assert lines[0] == "records of 3 of 3 ranks"
    assert lines[1].startswith("jax-mpmd: rank 1: is in the host callback on_host (")
    assert lines[1].endswith(("; then SIGINT came", "; then SIGTERM came"))  # whose record it is depends on the moment
    # JAX runs a small program at once, in the main thread, if its inputs have come before it is called.
    stood = r"rank 1 stood at .*faults\.py:\d+ in on_host( \(in a thread of JAX\))?"
    assert any(re.fullmatch(stood, line) for line in lines), lines
    check_stalled("\n".join(lines))


LONE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
import time, jax, jax.numpy as jnp, numpy as np, mpmd
def on_host(x):
    print("sleeps", flush=True)
    time.sleep(100)
mesh = mpmd.MpmdMesh(jax.make_mesh((1,), ("stage",)), "stage")
step = mpmd.jit(lambda x: jax.pure_callback(on_host, jax.typeof(x), mpmd.mark_stage_end(x)), mpmd_mesh=mesh)
step(jnp.ones(3)).block_until_ready()
"""


EVENT_LOOP = """
mpmd.jit(lambda x: 2 * mpmd.mark_stage_end(x), mpmd_mesh=mesh)(jnp.ones(3))
import asyncio
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)  # takes the descriptor for signals away
asyncio.run(main())
step("""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, first", [(signal.SIGINT, "\nstep("), (signal.SIGTERM, "\nstep("), (signal.SIGTERM, EVENT_LOOP)]
)
def test_a_process_that_is_alone_says_where_it_stood_when_somebody_ended_it(number, first, tmp_path):
    environment = os.environ | {"MPMD_FLIGHT_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LONE.replace("\nstep(", first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"sleeps\n"
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode in (1, -number)  # JAX makes an error of a KeyboardInterrupt in a callback
    lines = replayed(tmp_path).stdout.splitlines()
    assert lines[0] == "records of 1 of 1 ranks"
    assert lines[1].startswith(f"jax-mpmd: {number.name} came to rank 0 (")


@pytest.mark.slow
def test_a_child_that_gets_a_signal_does_not_end_its_parent(tmp_path):
    program = (
        LONE.split("mesh =")[0]
        + """
import multiprocessing, os
from mpmd.job import alone
alone.alone()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
child.start()
time.sleep(0.3)
child.terminate()
child.join()
time.sleep(0.3)
print(child.exitcode, os.listdir(os.environ["MPMD_FLIGHT_DIR"]))
"""
    )
    environment = os.environ | {"MPMD_FLIGHT_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert said.stdout == "-15 []\n"


@pytest.mark.slow
def test_a_rank_that_raises_leaves_a_record_too_and_the_next_job_takes_it_away(tmp_path):
    with Job("faults.py", "exception", GUILTY, processes=NUM_RANKS, flight=tmp_path) as job:
        job.wait(60)
    text = replayed(tmp_path).stdout
    assert text.startswith("records of 3 of 3 ranks\njax-mpmd: rank 1: ValueError: a bad batch (after step ")
    with Job("faults.py", "none", GUILTY, processes=NUM_RANKS, flight=tmp_path) as job:
        job.wait_for("step 2", 60)
        (tmp_path / "now").touch()  # asks for the records of a job that goes on
        end = time.monotonic() + 5
        while len(list(tmp_path.glob("rank-*"))) < NUM_RANKS and time.monotonic() < end and job.running():
            time.sleep(0.05)
        assert [e.status for e in job.wait(60)] == [0] * NUM_RANKS
    assert "asked for" in replayed(tmp_path).stdout or not list(tmp_path.glob("rank-*"))


@pytest.mark.slow
def test_a_folder_without_records_is_an_error_of_one_line(tmp_path):
    said = replayed(tmp_path)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        f"python -m mpmd replay: {tmp_path} holds no rank-N.flight.json. A job writes them when it ends badly, into the"
        " folder of the launcher's --log-dir or of MPMD_FLIGHT_DIR.\n"
    )
    (tmp_path / "rank-0.flight.json").write_text('{"programs": [{}]}')
    assert replayed(tmp_path).stderr == (
        f"python -m mpmd replay: {tmp_path}/rank-0.flight.json is no record of this library: KeyError: 'plan'\n"
    )
    (tmp_path / "rank-0.flight.json").write_text('{"programs": []}')
    assert "is no record of this library: KeyError: 'num_ranks'" in replayed(tmp_path).stderr


# --- parts ----------------------------------------------------------------------------------------


def test_the_ring_keeps_the_last_steps_and_knows_the_instruction():
    flight = Flight(2000)  # two steps are kept
    for step in (1, 2, 3):
        flight.begin(step)
        for number in range(2000 if step < 3 else 5):
            flight.times[number] = 10.0 * step + number
        assert flight.position == (1999 if step < 3 else 4)
        if step < 3:
            flight.end()
    kept = flight.steps()
    assert [(s["step"], len(s["times"]), s["ended"] is None) for s in kept] == [(2, 2000, False), (3, 5, True)]


def test_the_rank_that_failed_is_named_also_where_two_records_say_different_things():
    own, other = {"why": "ValueError: a bad batch"}, {"why": "jax-mpmd: rank 1: ValueError: a bad batch"}
    assert _verdict({0: other, 1: own}) == _verdict({0: own, 1: other}) == other["why"]
    assert _verdict({1: own}) == "rank 1: ValueError: a bad batch"
    assert _verdict({0: {"why": "asked for"}, 1: {"why": "asked for"}}) == "asked for"


@pytest.mark.parametrize("is_hung", [False, True])
def test_what_came_first_counts_a_signal_or_a_verdict(is_hung):
    told = {"why": "jax-mpmd: rank 2: is stopped; then SIGTERM came", "interrupted": True, "wall": 2.0}
    judged = {"why": "jax-mpmd: rank 0: is gone", "wall": 1.0 if is_hung else 3.0}
    asked = {"why": "asked for", "wall": 0.0}
    assert _verdict({0: told, 1: judged, 2: asked}) == (judged if is_hung else told)["why"]


def test_a_sample_that_says_the_same_extends_the_one_before():
    samples = Samples()
    for what in ("", "", "a", "a", "a", ""):
        samples.add("step", 1, "x", what, ())
    assert [s.what for s in samples.list()] == ["", "a", ""]
    assert samples.list()[1].first <= samples.list()[1].last


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_a_program_comes_back_from_its_file(schedule):
    made = scheduler.make(schedule, 4)
    program = scheduler.lower(scheduler.TaskGraph.chain(made.num_stages, 10), made, 8)
    assert of_data(json.loads(json.dumps(to_data(program)))) == program


def test_what_stops_when_a_group_stops():
    program = scheduler.lower(scheduler.TaskGraph.chain(3), scheduler.OneFOneB(3), 4)
    assert reach(program, {}) == [None, None, None]
    index = next(k for k, i in enumerate(program.groups[1]) if isinstance(i, scheduler.Send))
    stuck = reach(program, {1: index})
    assert stuck[2] == (scheduler.Value("a1", 0), 1) and stuck[0] == (scheduler.Value("g1", 0), 1) and stuck[1] is None


def test_the_folder_and_the_file_follow_the_environment():
    assert flight_files.folder({}) is None
    where = flight_files.folder({"MPMD_FLIGHT_DIR": "logs"})
    assert where is not None
    assert flight_files.path_of(where, 3, {"MPMD_ATTEMPT": "2"}).name == "rank-3.restart-2.flight.json"


def test_ranks_with_one_process_number_write_one_program_at_the_same_time(tmp_path):
    """Each container may have process 1 as its only one."""
    plan = scheduler.lower(scheduler.TaskGraph.chain(2), scheduler.OneFOneB(2), 4)
    for attempt in range(20):
        where, begin = tmp_path / str(attempt), threading.Barrier(8)

        def write(rank, where=where, begin=begin):
            begin.wait()
            flight_files.write(where / f"rank-{rank}.flight.json", rank, "why", [{"plan": plan}], num_ranks=8)

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        assert len(list(where.glob("rank-*.flight.json"))) == 8 and len(list(where.glob("program-*.json"))) == 1
