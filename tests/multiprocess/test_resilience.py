"""Jobs whose processes are lost under `mpmd.resilient`: each loss, and its sum total, must leave no trace in any bit.

Each job is started by the launcher, as a user starts it. Several losses follow each other in one job, an attempt each.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import hypothesis
import jax
import losses
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st
from ports import free_port
from samples import slow_first

from mpmd.goodput import ledgers

sys.path.insert(0, str(Path(__file__).parents[1] / "launcher"))

import hosts as network  # pyright: ignore[reportMissingImports]
import slurm  # pyright: ignore[reportMissingImports]
from launching import PYTHON, ROOT, Launched, alive, command, launch, until  # pyright: ignore[reportMissingImports]

PROGRAM = Path(__file__).parent / "programs" / "resilience.py"
NUM_STEPS = 8
LIMIT_S = 400


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What programs are compiled to once."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", PROGRAM.parent))),
    }


@pytest.fixture(scope="module")
def unbroken(environment):
    """What the losses, and the end, are where nothing is lost: in one process, which has all devices."""
    found = {}

    def of(case: str, devices: int, **more):
        if (key := (case, devices, repr(more))) not in found:
            with started(environment, "-n", 1, "--cpu-devices", devices, case=case, **more) as job:
                assert job.finish(LIMIT_S) == 0, job.err
            found[key] = steps(job), end(job)
        return found[key]

    return of


def started(environment, *options, case: str = "1f1b", faults=(), prefix=(), num_steps: int = NUM_STEPS):
    command = [PYTHON, PROGRAM, case, num_steps, *[json.dumps(fault) for fault in faults]]
    return launch(*options, "--", *command, prefix=prefix, **environment)


def steps(job: Launched) -> dict[int, str]:
    """The metrics of each step, of which every rank and every attempt must have printed the same bits."""
    found: dict[int, set[str]] = {}
    for step, text in re.findall(r"^\[\d+\] step (\d+) (.*)$", job.out, re.MULTILINE):
        found.setdefault(int(step), set()).add(text)
    assert all(len(texts) == 1 for texts in found.values()), found
    return {step: texts.pop() for step, texts in sorted(found.items())}


def end(job: Launched) -> str:
    (text,) = set(job.matches(r"^\[\d\] end (\w+)$"))
    return text


def said(job: Launched) -> list[str]:
    return re.findall(r"^\[\d+\] mpmd\.resilient: (.*)$", job.err, re.MULTILINE)


def run(environment, *options, **more) -> Launched:
    with started(environment, *options, **more) as job:
        assert job.finish(LIMIT_S) == 0, job.out + job.err
    return job


def kill(attempt: int, rank: int, step: int, number: int = signal.SIGKILL, after_s: float = 0.0) -> dict:
    return {"attempt": attempt, "rank": rank, "step": step, "what": "signal", "signal": int(number), "after_s": after_s}


@pytest.mark.slow
def test_no_loss_of_a_process_in_a_group_of_several_leaves_a_trace(environment, unbroken):
    """All start over each time."""
    faults = [
        kill(0, 1, 2, signal.SIGSTOP),
        {"attempt": 1, "rank": 0, "step": 6, "what": "damage", "steps": [5], "owners": [1]},
    ]
    options = "-n 2 --cpu-devices 2 --restarts 2 --hang-timeout 5".split()
    job = run(environment, *options, case="explicit", faults=faults)
    assert (steps(job), end(job)) == unbroken("explicit", 4)
    assert not taken(job)
    first, damaged = said(job)
    assert first in ("goes on after step 0, from memory", "goes on after step 1, from memory")
    assert damaged.startswith("goes on after step 4, from memory (of the state after step 5, ")


@pytest.mark.parametrize("case", slow_first("1f1b", "uneven"))
def test_killed_and_stopped_processes_are_started_again_and_an_error_has_all_start_over(environment, unbroken, case):
    """Processes 2, 3 and 4 are started in the places of 0, 1 and 3; the last error is in the place of rank 0."""
    damaged = {"attempt": 0, "rank": 3, "step": 6, "what": "damage", "steps": [5], "owners": [0]}
    faults = [
        {"attempt": 0, "rank": 0, "step": 2, "what": "copy"}, kill(0, 1, 4, signal.SIGSTOP), damaged,
        {"attempt": 0, "rank": 2, "step": 7, "what": "raise"},
    ]  # fmt: skip
    options = "-n 2 --cpu-devices 2 --restarts 1 --hang-timeout 5".split()
    publishing = environment | {"TEST_PUBLISH": str(free_port())}  # of which who takes a place knows nothing
    job = run(publishing, *options, case=case, faults=faults)
    assert (steps(job), end(job)) == unbroken(case, 4)
    assert taken(job) == [f"{rank}: killed by SIGKILL; spare {spare}" for rank, spare in ("02", "13", "14")]
    went_on = [line for line in said(job) if line.startswith("goes on")]
    assert went_on[0] in ("goes on after step 0, from memory", "goes on after step 1, from memory")
    assert went_on[2].startswith("goes on after step 4, from memory (of the state after step 5, ")
    assert went_on[3] == "goes on after step 6, from memory" and len(went_on) == 4
    assert "\n  | RuntimeError: as was asked for\n" in job.err  # the last lines of process 2


@pytest.mark.slow
def test_what_was_computed_of_data_that_differ_is_not_gone_on_with(environment, unbroken):
    """Where the difference is found, and where a process is lost before that."""
    faults = [{"attempt": attempt, "rank": 1, "step": 3 + attempt, "what": "data"} for attempt in (0, 1)]
    faults += [kill(1, 0, 4, after_s=0.01)]
    job = run(environment, *"-n 2 --cpu-devices 2 --restarts 2".split(), faults=faults)
    assert end(job) == unbroken("1f1b", 4)[1]
    assert re.search(r"ScheduleError: rank 1 gave other values of .*targets", job.err)
    went_on = [int(step) for step in re.findall(r"goes on after step (\d), from memory", job.err)]
    assert went_on[0] in (1, 2) and went_on[1] in (2, 3), went_on


@pytest.mark.slow
def test_a_notice_is_kept_in_mind_when_another_process_is_lost(environment, unbroken):
    faults = [kill(0, 0, 3, signal.SIGTERM), kill(0, 1, 3, after_s=0.01)]
    job = run(environment, *"-n 2 --cpu-devices 2 --restarts 2".split(), faults=faults)
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    assert "rank 0 was told to end (SIGTERM)" in job.err


@pytest.mark.slow
def test_after_a_notice_no_step_is_computed_again(environment, unbroken):
    faults = [kill(0, 1, 2, signal.SIGTERM), kill(0, 0, 4, signal.SIGTERM, 0.01)]  # in time before the last step
    job = run(environment, *"-n 2 --cpu-devices 2 --restarts 2".split(), faults=faults)
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    assert taken(job) == [f"{rank}: killed by SIGTERM; spare {spare}" for rank, spare in ("12", "03")]
    told, went_on, told_again, went_on_again = [line for line in said(job) if "was lost" not in line]
    kept = [int(re.search(r"\(SIGTERM\); the state after step (\d) is kept", line)[1]) for line in (told, told_again)]
    assert [f"goes on after step {step}, from memory" for step in kept] == [went_on, went_on_again]
    of_rank_1 = [int(step) for step in job.matches(r"^\[1\] step (\d) ")]
    assert [of_rank_1.count(step) for step in range(kept[0] + 1)] == [1] * (kept[0] + 1)


@pytest.mark.slow
def test_where_each_host_has_one_process_a_notice_and_a_loss_of_its_successor_are_mended_in_place(
    environment, unbroken
):
    faults = [kill(0, 1, 3, signal.SIGTERM), {"attempt": 0, "rank": 2, "step": -1, "what": "signal", "signal": 9}]
    options = "-H localhost,127.0.0.1 --cpu-devices 2 --restarts 1".split()
    job = run(environment, *options, faults=faults)
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    assert taken(job) == ["1: killed by SIGTERM; spare 2", "1: killed by SIGKILL; spare 3"]


@pytest.mark.slow
def test_a_failure_after_the_same_number_of_calls_is_none_at_the_same_step(environment, unbroken):
    faults = [{"attempt": n, "rank": 1, "step": 2 * n + 1, "what": "raise"} for n in range(4)]
    job = run(environment, *"-n 2 --cpu-devices 2 --restarts 4".split(), faults=faults)
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    assert job.err.count("starts over") == 4


@pytest.mark.slow
def test_a_keeper_that_dies_ends_no_job_and_has_a_successor(environment, unbroken):
    """At once; where also the process is killed that starts it, when all start over."""
    faults = [
        {"attempt": 0, "rank": 1, "step": 1, "what": "keeper"}, kill(0, 1, 4),
        {"attempt": 0, "rank": 0, "step": 5, "what": "keeper", "for_good": True}, kill(0, 0, 7),
        {"attempt": 1, "rank": 0, "step": 7, "what": "damage", "steps": [6, 5], "owners": [0, 1]},
    ]  # fmt: skip
    job = run(environment, *"-n 2 --cpu-devices 2 --restarts 3".split(), faults=faults)
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    *first, from_the_start = said(job)
    text = "\n".join(first)
    assert len(re.findall("the keeper on 127.0.0.1 was killed, and has a successor: what it had is lost", text)) == 1
    assert re.search(r"^goes on after step [23], from memory$", text, re.MULTILINE)
    assert taken(job)[0] == "1: killed by SIGKILL; spare 2"
    assert re.search(
        r"the keeper on 127\.0\.0\.1 cannot be used any more \(|rank \d has no keeper left: no more copies", text
    )
    assert re.search(r"^begins with step 0 and the given state: no keeper has a copy$", text, re.MULTILINE)
    assert "a rank was lost, and no whole state lies in memory (of the state after step 6, " in job.err
    assert from_the_start == "begins with step 0 and the given state: no keeper has a copy"
    assert "jax-mpmd: starts a new keeper on localhost: what lay in the memory of the last one is lost" in job.err


@pytest.mark.slow
def test_what_is_kept_goes_with_the_job_also_if_all_but_the_keeper_are_killed(environment):
    """Compiled programs too, where the user keeps them nowhere else."""
    faults = [{"attempt": 0, "rank": 1, "step": 2, "what": "wait"}]
    environment = {k: v for k, v in environment.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    before = set(os.listdir("/dev/shm"))
    with started(environment, *"-n 2 --cpu-devices 1 --restarts 3".split(), case="1f1b", faults=faults) as job:
        job.wait_for_line(r"^\[1\] waits")
        keepers = [pid for pid in job.left() if b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(keepers) == 2
        assert (programs := list(Path(job._temporary.name).rglob("*-mpmd")))
        for pid in (job.process.pid, *job.left()):
            if pid not in keepers:
                with contextlib.suppress(ProcessLookupError):  # it ended because another one did
                    os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, keepers)), "the end of the keeper")
        assert not any(path.exists() for path in programs)
        folder = job._temporary.name  # what is killed may still remove a part of it
        until(lambda: shutil.rmtree(folder, ignore_errors=True) or not os.path.exists(folder), "an empty place")
        os.mkdir(folder)  # what was killed can remove nothing
    assert set(os.listdir("/dev/shm")) <= before


# --- ledgers --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_error_leaves_no_trace_and_the_ledgers_say_what_it_cost(environment, unbroken, tmp_path):
    """Compiled programs are found again, although the user keeps them nowhere."""
    options = f"-n 2 --cpu-devices 2 --restarts 1 --log-dir {tmp_path}".split()
    plain = {k: v for k, v in environment.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    job = run(plain, *options, case="pairs", faults=[{**kill(0, 1, 4), "what": "raise"}])
    assert (steps(job), end(job)) == unbroken("pairs", 4)
    first, second, *later = map(int, job.matches(r"^\[\d\] finds (\d+) programs$"))
    assert first == second == 0 < min(later)
    (line,) = said(job)
    assert re.fullmatch(r"goes on after step [23], from memory", line)  # which, depends on how far the copies were
    processes = ledgers.read(tmp_path)
    assert sorted((p.number, p.attempt) for p in processes) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = ledgers.put_together(processes)
    lives = [max(p.end for p in processes if p.number == r) - min(p.begun for p in processes) for r in range(2)]
    assert found.total == pytest.approx(sum(lives), abs=0.2)  # the processes do not begin at the same instant
    assert found.seconds["recovery"] > 2.0 and found.seconds["lost"] > 0 and found.seconds["compute"] > 0
    begins, ends, goes_on, *rest = found.events
    assert begins.endswith(" begins with step 0") and " ended: rank 1 " in ends and not rest
    assert re.search(
        r"attempt 1: goes on after step [23], from memory, [\d.]+ s after the last step before(; [12] steps? again)?$",
        goes_on,
    )


# --- spares ---------------------------------------------------------------------------------------


def taken(job: Launched) -> list[str]:
    """Who took whose place."""
    return re.findall(
        r"^jax-mpmd: rank (\d: killed.*; spare \d) (?:takes|is started in) its place$", job.err, re.MULTILINE
    )


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_killed_process_and_the_others_stay(environment, unbroken, tmp_path):
    """Barriers of the saves before and after it are counted anew in all: the spare has not been at the earlier ones."""
    saves, ledger = tmp_path / "saves", tmp_path / "ledger"
    saves.mkdir()
    options = f"-n 2 --cpu-devices 2 --restarts 1 --spares 1 --log-dir {ledger}".split()
    job = run({**environment, "TEST_SAVES": str(saves)}, *options, case="pairs", faults=[kill(0, 1, 4)])
    assert (steps(job), end(job)) == unbroken("pairs", 4)
    assert taken(job) == ["1: killed by SIGKILL; spare 2"] and "starts over" not in job.err
    first, second = said(job)
    assert first == "rank 1 was lost; all others wait for the spare that takes the place"
    assert re.fullmatch(r"goes on after step [23], from memory", second)
    assert {rank for rank, step in re.findall(r"^\[(\d)\] step (\d)", job.out, re.MULTILINE) if step == "7"} == {
        "0",
        "2",
    }
    assert sorted(folder.name for folder in saves.iterdir()) == ["1", "3", "5", "7"]
    with ocp.StandardCheckpointer() as checkpointer:
        first, last = (checkpointer.restore(saves / name) for name in "17")
    assert jax.tree.structure(first) == jax.tree.structure(last)
    check_ledgers_with_a_spare(ledger)


@pytest.mark.slow
def test_losses_amid_saves_of_a_manager_that_was_made_before_the_loop_are_mended_in_place(
    environment, unbroken, tmp_path
):
    """Who takes a place restores a newer checkpoint than the others began with. Unfinished saves are made again.

    All gather small values before the loop and in each step; who takes a place hears what was gathered before.
    """
    faults = [kill(0, 1, 5), kill(0, 0, 9)]
    restored = []
    for n, losses_here in ((1, []), (4, faults)):
        saves = tmp_path / str(n)
        options = f"-n {n} --cpu-devices {4 // n} --restarts 1".split()
        variables = {**environment, "TEST_MANAGER": str(saves), "TEST_GATHERS": "small"}
        job = run(variables, *options, faults=losses_here, num_steps=12)
        assert (steps(job), end(job)) == unbroken("1f1b", 4, num_steps=12)
        assert (saves / "10").is_dir()
        with ocp.CheckpointManager(saves) as manager:
            restored.append(manager.restore(10, args=ocp.args.StandardRestore()))
    assert taken(job) == ["1: killed by SIGKILL; spare 4", "0: killed by SIGKILL; spare 5"]
    jax.tree.map(np.testing.assert_array_equal, *restored)
    assert "starts over" not in job.err and "Traceback" not in job.err, job.err
    assert job.matches(r"^\[4\] restores step (\d)$") and job.matches(r"^\[5\] restores step (\d)$")


def check_ledgers_with_a_spare(folder: Path) -> None:
    """They say how long it waited, and whose place it took. The next one may have begun its own."""
    processes = {p.number: p for p in ledgers.read(folder)}
    assert list(processes) in ([0, 1, 2], [0, 1, 2, 3])
    assert (taken := processes[2].taken) is not None and taken[0] == 1
    found = ledgers.put_together(list(processes.values()))
    lives = [p.end - p.begun for p in processes.values()]
    assert found.total == pytest.approx(sum(lives) + taken[1] - processes[1].end, abs=0.1)
    assert found.seconds["idle spare"] > 1.0 and found.seconds["recovery"] > 0 and found.seconds["lost"] > 0
    text = "\n".join(found.events)
    assert found.num_ranks == 2
    assert " spare 2 takes the place of rank 1" in text and " lost: rank 1 (spare 2 in its place)" in text
    assert re.search(r" goes on after step [23], from memory, [\d.]+ s after the last step before", text)


@pytest.mark.parametrize("case", slow_first("1f1b", "zb-h1"))
def test_one_spare_after_the_other_takes_the_places_of_rank_0_and_of_a_spare(environment, unbroken, case):
    """Where a process was killed, another one waits from then on."""
    copy = {"attempt": 0, "rank": 2, "step": 6, "what": "copy"}
    faults = [kill(0, 0, 2), kill(0, 4, 4), copy, kill(0, 3, 7)]
    options = "-n 4 --cpu-devices 1 --restarts 1 --spares 1".split()
    job = run(environment, *options, case=case, faults=faults)
    assert (steps(job), end(job)) == unbroken(case, 4)
    taker = dict(text.split(": killed by SIGKILL; spare ") for text in taken(job)[1:])
    assert taken(job)[0] == "0: killed by SIGKILL; spare 4" and taker == {"0": "5", "2": "6", "3": "7"}
    assert "starts over" not in job.err and "recoverable" not in job.err


@pytest.mark.slow
def test_a_spare_that_is_killed_while_it_waits_has_a_successor_that_takes_a_place(environment, unbroken):
    faults = [{"attempt": 0, "rank": 1, "step": 4, "what": "wait"}]
    options = "-n 2 --cpu-devices 2 --restarts 1 --spares 1".split()
    with started(environment, *options, case="pairs", faults=faults) as job:
        job.wait_for_line(r"^\[1\] waits")

        def kill_number(number):
            mark = f"MPMD_PROCESS_ID={number}".encode()
            for pid in job.left():
                with contextlib.suppress(OSError):
                    if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        os.kill(pid, signal.SIGKILL)

        kill_number(2)
        until(lambda: "jax-mpmd: spare 2: killed by SIGKILL; spare 3 waits in its place\n" in job.err, "a successor")
        kill_number(1)
        assert job.finish(LIMIT_S) == 0, job.out + job.err
    assert (steps(job), end(job)) == unbroken("pairs", 4)
    assert taken(job) == ["1: killed by SIGKILL; spare 3"] and "starts over" not in job.err


@pytest.mark.slow
def test_nobody_waits_for_a_spare_that_is_stopped_and_it_goes_on_when_it_takes_a_place(environment, unbroken):
    stopped = {"attempt": 0, "rank": 2, "step": -2, "what": "soon", "signal": int(signal.SIGSTOP)}
    options = "-n 2 --cpu-devices 2 --restarts 1 --spares 1 --hang-timeout 5".split()
    job = run(environment, *options, faults=[stopped, kill(0, 1, 4)])
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    assert taken(job) == ["1: killed by SIGKILL; spare 2"] and "starts over" not in job.err


@pytest.mark.slow
def test_spares_take_the_places_of_processes_that_stop_or_do_not_come_to_the_next_step(environment, unbroken):
    faults = [kill(0, 1, 3, signal.SIGSTOP, 0.01), {"attempt": 0, "rank": 2, "step": 6, "what": "wait"}]
    options = "-n 4 --cpu-devices 1 --restarts 1 --spares 2 --hang-timeout 8".split()
    job = run(environment, *options, faults=faults)
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    assert [text[0] for text in taken(job)] == ["1", "2"] and "starts over" not in job.err
    stopped, still = re.findall(r"jax-mpmd: rank (\d: .*); it is killed, to be replaced$", job.err, re.MULTILINE)
    assert re.match(r"1: process \d+ on \S+ is stopped for \d+ s \(", stopped)
    assert re.match(r"2: did not come to the next step for \d+ s \(.*/resilience\.py:\d+ in begin\)", still)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_process_that_becomes_slow_and_no_finished_step_comes_again(environment, unbroken):
    faults = [{"attempt": 0, "rank": 1, "step": 20, "what": "slow", "times": 20}]
    options = "-n 3 --cpu-devices 1 --restarts 1 --spares 1 --replace-slow 3".split()
    job = run(environment, *options, faults=faults, num_steps=48)
    assert (steps(job), end(job)) == unbroken("1f1b", 3, faults=faults, num_steps=48)
    assert taken(job) == ["1: killed, because its devices are unfit; spare 3"] and "starts over" not in job.err
    text = r"^\[0\] jax-mpmd: rank 1: takes (\S+) times its usual \S+ s a step \(3 measured steps, others \S+\); it is "
    (times,) = re.findall(text + "killed, to be replaced$", job.err, re.MULTILINE)
    assert float(times) > 3
    lost, went_on = said(job)
    assert lost.startswith("rank 1 was lost; ")
    last = int(re.fullmatch(r"goes on after step (\d+), from memory", went_on)[1])  # pyright: ignore[reportOptionalSubscript]
    done = [int(step) for step in job.matches(r"^\[\d\] step (\d+) ")]
    assert last >= 28 and [done.count(step) for step in (last, last + 1)] == [3, 3], job.out


@pytest.mark.parametrize("spares, what", slow_first((1, "flip"), (0, "rest"), (1, "rest"), (0, "flip")))
def test_what_a_device_computes_or_holds_wrong_is_found_and_does_not_count(environment, unbroken, spares, what):
    """The ninth call audits a program of rank 2, whose device begins to compute wrong in that call, or loses a bit."""
    faults = [{"attempt": 0, "rank": 2, "step": 8, "what": what}]
    options = f"-n 4 --cpu-devices 1 --restarts 1 --spares {spares}".split()
    job = run({**environment, "TEST_AUDIT_EVERY": "1"}, *options, faults=faults, num_steps=12)
    text = r"group 2 \(rank 2: \S+\) gets other bits than group \d and group \d for \S+ in call 9 of step"
    if what == "rest":
        text = r"group 2 \(rank 2: \S+\): a result of call 9 of step has changed in memory"
    assert re.search(text + ("; it is killed, to be replaced" if spares else ""), job.err), job.err
    assert ("starts over" in job.err) == (not spares)
    assert taken(job) == ["2: killed, because its devices are unfit; spare 4"] * spares
    *_, went_on = said(job)
    assert re.fullmatch("goes on after step [67], from memory", went_on)
    last = dict(re.findall(r"^\[\d\] step (\d+) (.*)$", job.out, re.MULTILINE))
    losses, state = unbroken("1f1b", 4, num_steps=12)
    assert ({int(step): text for step, text in last.items()}, end(job)) == (losses, state)


@pytest.mark.parametrize(
    "case, step, gathers", slow_first(("pairs", -1, ""), ("pairs", 2, "large"), ("explicit", 2, ""), num_slow=2)
)
def test_a_loss_where_another_process_cannot_do_alone_what_all_have_done_has_all_start_over(
    environment, unbroken, case, step, gathers
):
    """Outside of the loop, where all have computed together before the loop, in a group of several processes."""
    options = "-n 2 --cpu-devices 2 --restarts 1 --spares 1".split()
    job = run({**environment, "TEST_GATHERS": gathers}, *options, case=case, faults=[kill(0, 1, step)])
    assert (steps(job), end(job)) == unbroken(case, 4)
    assert not taken(job) and "starts over" in job.err


@pytest.mark.parametrize("num_cases", slow_first(2, 100))
def test_random_losses_leave_no_trace(environment, unbroken, tmp_path, num_cases):
    """Two or three, of any process, with or without a spare: in transfers, updates, copies, checkpoints, recoveries.

    No finished step comes again but the last one, unless a host has lost its keeper with a process.
    """

    @hypothesis.settings(max_examples=num_cases, deadline=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.integers(0, 10**9), st.sampled_from((0, 1)))
    def check(seed, num_spares):
        drawn = losses.draw(random.Random(seed), NUM_STEPS, num_spares)
        (saves := tmp_path / f"{seed}-{num_spares}").mkdir(exist_ok=True)
        job = run(environment | drawn.environment(saves), *drawn.options, faults=drawn.faults)
        assert (steps(job), end(job)) == unbroken("1f1b", 4)
        found = losses.read(job.out, job.err)
        assert max(found.repeated, default=0) <= 1 or (found.given and losses.KEEPER_LOST in job.err), found

    check()


@pytest.mark.exhaustive  # each of these losses has a slow test of its own, at an instruction that is always the same
def test_no_loss_at_any_instruction_leaves_a_trace(environment, unbroken):
    """Four losses a job, of any rank and at any time, a rank that stops among them."""

    @hypothesis.settings(max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.data())
    def check(data):
        faults = []
        for rank, what in enumerate(data.draw(st.permutations(["kill", "copy", "stop", "term"]))):
            step = data.draw(st.integers(0, NUM_STEPS - 1))
            number = {"stop": signal.SIGSTOP, "term": signal.SIGTERM}.get(what, signal.SIGKILL)
            fault = kill(0, rank, step, number, data.draw(st.integers(0, 60)) / 1000)
            faults.append({**fault, "what": "copy"} if what == "copy" else fault)
        options = "-n 4 --cpu-devices 1 --restarts 4 --hang-timeout 5".split()
        job = run(environment, *options, faults=faults)
        assert (steps(job), end(job)) == unbroken("1f1b", 4)

    check()


# --- two hosts ------------------------------------------------------------------------------------

REASON = network.missing()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with network.two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def over(environment, hosts, *options, **more):
    options = ("--ssh", hosts.ssh, "-H", "hosta,hostb", *options)
    return started(environment, *options, prefix=hosts.here.prefix, **more)


@pytest.mark.slow
@needs_hosts
def test_a_host_that_is_lost_with_its_memory_and_a_damaged_copy_are_no_loss(environment, unbroken, hosts):
    """All processes of the other host are killed, its keeper too; the host itself answers again at once.

    Later a damaged copy gives way to the one on the other host.
    """
    faults = [
        {"attempt": 0, "rank": 3, "step": 4, "what": "wait"},
        {"attempt": 1, "rank": 1, "step": 6, "what": "damage", "steps": [5], "owners": [0, 1, 3]},  # and is killed
    ]
    with over(environment, hosts, *"-n 2 --cpu-devices 1 --restarts 2".split(), faults=faults) as job:
        job.wait_for_line(r"^\[3\] waits")
        for pid in hosts.there.pids():
            with contextlib.suppress(ProcessLookupError):  # it ended because another one did
                os.kill(pid, signal.SIGKILL)
        assert job.finish(LIMIT_S) == 0, job.out + job.err
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    *_, after_the_host, _, after_the_damage = said(job)
    assert taken(job) == ["1: killed by SIGKILL; spare 4"]
    assert after_the_host in [f"goes on after step {step}, from memory" for step in (1, 2, 3)]
    assert after_the_damage == "goes on after step 5, from memory"
    assert "starts a new keeper on hostb" in job.err


@pytest.mark.slow
@needs_hosts
def test_a_process_that_stops_on_another_host_is_replaced(environment, unbroken, hosts):
    """The rank that says so is on the first host; the keeper of the other one kills the process."""
    options = "-n 2 --cpu-devices 1 --restarts 1 --spares 1 --hang-timeout 8".split()
    with over(environment, hosts, *options, faults=[kill(0, 3, 4, signal.SIGSTOP)]) as job:
        assert job.finish(LIMIT_S) == 0, job.out + job.err
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    assert taken(job) == ["3: killed by SIGKILL; spare 4"] and "starts over" not in job.err
    assert re.search(
        r"^\[0\] jax-mpmd: rank 3: .* is stopped for .*; it is killed, to be replaced$", job.err, re.MULTILINE
    )


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("comes_back", slow_first(True, False))
def test_spares_take_the_places_of_all_ranks_of_a_host_whose_cable_is_cut(
    environment, unbroken, hosts, tmp_path, comes_back
):
    """The ranks there end by themselves; where the cable is mended before they have, since others have their places.

    Their agent would end them then too, but it is held up.
    """
    faults = [{"attempt": 0, "rank": 3, "step": 4, "what": "wait"}]
    options = f"--spares 2 -n 2 --cpu-devices 1 --restarts 1 --log-dir {tmp_path}".split()
    options += ["--ssh", hosts.ssh, "-H", "hosta,hostb,localhost:0"]
    try:
        with started(environment, *options, prefix=hosts.here.prefix, faults=faults) as job:
            job.wait_for_line(r"^\[3\] waits")
            hosts.cable("down", "a" if comes_back else "b")
            until(lambda: "takes the place" in job.err or job.process.poll() is not None, "a spare")
            agents = [pid for pid in hosts.there.pids() if comes_back and "jax-mpmd-agent" in command(pid)]
            for pid in agents:
                os.kill(pid, signal.SIGSTOP)
            if comes_back:
                hosts.cable("up")
                text = r"was cut off, and spare [45] has its place: this process ends\n"
                logs = [tmp_path / f"rank-{rank}.log" for rank in (2, 3)]
                until(lambda: all(re.search(text, log.read_text()) for log in logs), "the end of the ranks")
            for pid in agents:
                os.kill(pid, signal.SIGCONT)
            assert job.process.wait(LIMIT_S) == 0, job.out + job.err
            left = [command(pid) for pid in hosts.there.pids()]
            until(lambda: not [pid for pid in hosts.there.pids() if "sshd" not in command(pid)], str(left), 90)
    finally:
        hosts.cable("up")
        hosts.cable("up", "b")
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    places = "; spare 4 takes the place of rank 2; spare 5 takes the place of rank 3"
    assert re.search(rf"^jax-mpmd: host hostb was lost \(.*\){places}$", job.err, re.MULTILINE)
    assert "Killed" not in job.err and "starts over" not in job.err
    lost, went_on = said(job)
    assert lost == "the ranks 2, 3 were lost; all others wait for the spares that take the places"
    assert re.fullmatch("goes on after step [23], from memory", went_on)


@pytest.mark.slow
@needs_hosts
def test_a_cable_that_is_mended_soon_is_no_loss(environment, unbroken, hosts):
    options = "-n 2 --cpu-devices 1 --restarts 1 --spares 1".split()
    try:
        with over(environment, hosts, *options, num_steps=40) as job:
            job.wait_for_line(r"^\[3\] step 3 ")
            hosts.cable("down", "b")
            time.sleep(5)
            hosts.cable("up", "b")
            assert job.finish(LIMIT_S) == 0, job.out + job.err
    finally:
        hosts.cable("up", "b")
    assert (steps(job), end(job)) == unbroken("1f1b", 4, num_steps=40)
    assert "lost" not in job.err and not said(job)


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("spares", slow_first(0, 1))
def test_the_job_goes_on_without_a_host_whose_cable_is_cut(environment, unbroken, hosts, spares):
    """First with as many processes, two of which are started beside the others. A spare on the lost host is lost too.

    After an error then on half of the devices: two of the four groups are on another device, with fewer processes.
    """
    faults = [
        {"attempt": 0, "rank": 3, "step": 4, "what": "wait"},
        {"attempt": 0, "rank": 0, "step": 6, "what": "raise"},
    ]
    options = f"-n 2 --cpu-devices 1 --restarts 1 --min-hosts 1 --spares {spares}".split()
    try:
        with over(environment, hosts, *options, case="shared", faults=faults) as job:
            job.wait_for_line(r"^\[3\] waits")
            hosts.cable("down")
            cut = time.monotonic()
            assert job.process.wait(LIMIT_S) == 0, job.out + job.err
            assert time.monotonic() - cut < LIMIT_S
            lines = [f"goes on after step {step}, from memory" for step in range(1, 6)]
            lost, in_place, over_again = said(job)
            assert lost == "the ranks 2, 3 were lost; all others wait for the spares that take the places"
            assert in_place in lines[:3] and over_again in lines[2:], job.err
            assert "jax-mpmd: starts 2 processes on the other hosts\n" in job.err
            assert "jax-mpmd: goes on without host hostb, which does not answer" in job.err
            assert (steps(job), end(job)) == unbroken("shared", 4)
            left = [command(pid) for pid in hosts.there.pids()]
            until(lambda: not [pid for pid in hosts.there.pids() if "sshd" not in command(pid)], str(left), 90)
    finally:
        hosts.cable("up")


@pytest.mark.exhaustive
@needs_hosts
def test_a_spare_stands_in_for_a_host_whose_cable_is_cut(environment, unbroken, hosts):
    """That of rank 0 and of the coordination service: all start over, as many as before, with the same groups."""
    faults = [{"attempt": 0, "rank": 0, "step": 4, "what": "wait"}]
    options = ["--ssh", hosts.ssh, *"-H hostb,hosta --spares 1 --cpu-devices 2 --restarts 1 --hang-timeout 5".split()]
    try:
        with started(environment, *options, case="pairs", prefix=hosts.here.prefix, faults=faults) as job:
            job.wait_for_line(r"^\[0\] waits")
            hosts.cable("down")
            assert job.process.wait(LIMIT_S) == 0, job.out + job.err
            assert "jax-mpmd: goes on without host hostb, which does not answer" in job.err
            assert said(job)[-1] in [f"goes on after step {step}, from memory" for step in (1, 2, 3)]
            assert (steps(job), end(job)) == unbroken("pairs", 4)
            left = [command(pid) for pid in hosts.there.pids()]
            until(lambda: not [pid for pid in hosts.there.pids() if "sshd" not in command(pid)], str(left), 90)
    finally:
        hosts.cable("up")


# --- nodes of a Slurm allocation ------------------------------------------------------------------

needs_nodes = pytest.mark.skipif((REASON or slurm.missing()) is not None, reason=REASON or slurm.missing() or "")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory, hosts):
    """The two hosts as nodes of a cluster."""
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), hosts) as cluster:
        yield cluster


def allocated(environment, nodes, options: str, **more):
    prefix = (*nodes.prefix, *"salloc -Q --nodes=2 --overcommit --no-kill".split())
    return started(environment | nodes.environment, *options.split(), prefix=prefix, **more)


@pytest.mark.slow
@needs_nodes
def test_under_slurm_spares_and_restarts_go_on_from_memory(environment, unbroken, nodes):
    """Four ranks and two spares: one is killed, one stops, a spare gets SIGTERM, another is killed; one raises."""
    wrong = {"attempt": 0, "rank": 2, "step": 7, "what": "raise"}
    faults = [kill(0, 3, 2), kill(0, 1, 4, signal.SIGSTOP), kill(0, 4, 5, signal.SIGTERM), kill(0, 6, 6), wrong]
    options = "-n 3 --cpu-devices 1 --restarts 1 --spares 2 --hang-timeout 8"
    with allocated(environment, nodes, options, faults=faults) as job:
        assert job.finish(LIMIT_S) == 0, job.out + job.err
    assert (steps(job), end(job)) == unbroken("1f1b", 4)
    names = {"34": "KILL", "15": "KILL", "36": "TERM", "37": "KILL"}
    assert taken(job) == [f"{key[0]}: killed by SIG{name}; spare {key[1]}" for key, name in names.items()], job.err
    assert re.search("^jax-mpmd: starts over in", job.err, re.MULTILINE)
    assert said(job)[-1] in [f"goes on after step {step}, from memory" for step in (4, 5, 6)]


@pytest.mark.exhaustive
@needs_nodes
def test_under_slurm_the_job_goes_on_without_a_node_whose_cable_is_cut(environment, unbroken, hosts, nodes):
    """Slurm does not know yet that it is lost."""
    faults = [{"attempt": 0, "rank": 3, "step": 4, "what": "wait"}]
    options = "-n 2 --cpu-devices 1 --restarts 1 --min-hosts 1 --hang-timeout 5"
    try:
        with allocated(environment, nodes, options, case="shared", faults=faults) as job:
            job.wait_for_line(r"^\[3\] waits")
            hosts.cable("down")
            assert job.process.wait(LIMIT_S) == 0, job.out + job.err
            assert "jax-mpmd: goes on without host hostb, which does not answer" in job.err
            assert said(job)[-1] in [f"goes on after step {step}, from memory" for step in (1, 2, 3)]
            assert (steps(job), end(job)) == unbroken("shared", 4)
            job.check_nothing_left(90)
    finally:
        hosts.cable("up")
        nodes.bring_back("hostb")


@pytest.mark.slow
@needs_nodes
def test_under_slurm_the_job_goes_on_without_a_node_that_slurm_takes_for_lost(environment, unbroken, nodes):
    """The node answers, but Slurm ends what runs there, and starts nothing on it."""
    faults = [{"attempt": 0, "rank": 3, "step": 4, "what": "wait"}]
    try:
        options = "-n 2 --cpu-devices 1 --restarts 1 --min-hosts 1"
        with allocated(environment, nodes, options, case="shared", faults=faults) as job:
            job.wait_for_line(r"^\[3\] waits")
            nodes.command(*"scontrol update nodename=hostb reason=test state=down".split())
            assert job.process.wait(LIMIT_S) == 0, job.out + job.err
            until(lambda: not job.left(), "the end of all processes")  # agents that Slurm kills leave their folders
        assert "jax-mpmd: the ranks' step was lost: srun: error: Node failure on hostb\n" in job.err
        assert "jax-mpmd: goes on without host hostb, which does not answer" in job.err
        assert said(job)[-1] in [f"goes on after step {step}, from memory" for step in (1, 2, 3)]
        assert (steps(job), end(job)) == unbroken("shared", 4)
    finally:
        nodes.bring_back("hostb")


@pytest.mark.slow
def test_a_spare_that_begins_with_another_list_takes_a_place(environment):
    """Its first list has another number of microbatches than that of the others, and another first shape."""
    program = PROGRAM.with_name("lists_in_place.py")
    lists = [[4] * 5, [4] * 3, [8, 4], [4, 4, 8], [4, 4], [8, 8, 8, 4], [2, 4]]
    found = []
    for killed_at in (4, -1):
        options = "-n 2 --cpu-devices 1 --restarts 1 --spares 1".split()
        with launch(*options, "--", PYTHON, program, json.dumps(lists), killed_at, **environment) as job:
            assert job.finish(LIMIT_S) == 0, job.out + job.err
        assert "starts over" not in job.err
        found.append(steps(job))
    assert found[0] == found[1] and len(found[0]) == len(lists)
    assert taken(job) == []
