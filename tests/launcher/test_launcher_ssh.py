"""The launcher over ssh, between two hosts that have nothing but a cable in common."""

import os
import re
import signal
import time

import pytest
from hosts import Hosts, missing, two_hosts
from launching import PATIENCE_S, ROOT, counting, launch, python, run, shell, torn, until
from test_launcher_local import JAX_PROGRAM

REASON = missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def over(hosts: Hosts, *arguments, **more):
    """Runs the launcher on `here`, to its end, with nothing left on either host."""
    status, job = run("--ssh", hosts.ssh, *arguments, prefix=hosts.here.prefix, **more)
    for host in hosts.both:
        host.wait_until_empty()
    return status, job


def start_over(hosts: Hosts, *arguments):
    return launch("--ssh", hosts.ssh, *arguments, prefix=hosts.here.prefix)


SAY = shell('echo "$(hostname) $MPMD_PROCESS_ID $MPMD_LOCAL_ID $MPMD_COORDINATOR ${MPMD_LOCAL_ONLY-far} $MPMD_SERVICE"')


def test_ranks_are_numbered_host_by_host(hosts):
    status, job = over(hosts, "-H", "hosta,root@hostb:2", "-n", 1, "--port", 23999, *SAY)
    assert status == 0, job.err
    assert sorted(job.out.splitlines()) == [
        "[0] hosta 0 0 hosta:23999 far external",
        "[1] hostb 1 0 hosta:23999 far external",
        "[2] hostb 2 1 hosta:23999 far external",
    ]


def test_localhost_among_hosts_goes_by_its_own_name(hosts):
    status, job = over(hosts, "-H", "localhost,hostb", *SAY)
    assert status == 0, job.err
    lines = sorted(re.sub(r":\d+", ":PORT", line) for line in job.out.splitlines())
    assert lines == ["[0] hosta 0 0 hosta:PORT far external", "[1] hostb 1 0 hosta:PORT far external"]


def test_a_single_other_host_keeps_to_its_loopback(hosts):
    status, job = over(hosts, "-H", "hostb", "-n", 2, *SAY)
    assert status == 0, job.err
    lines = sorted(re.sub(r":\d+", ":PORT", line) for line in job.out.splitlines())
    assert lines == [f"[{r}] hostb {r} {r} 127.0.0.1:PORT 1 external" for r in range(2)]


def test_the_environment_goes_along_as_documented(hosts, tmp_path):
    (tmp_path / "bin dir").mkdir()
    tool = tmp_path / "bin dir" / "my-tool"
    tool.write_text(
        '#!/bin/bash\necho "$PWD|$JAX_A|$XLA_B|$MPMD_C|$NCCL_D|$CUDA_E|${OTHER-no}|$NAMED|$lower|$PYTHONPATH"\n'
    )
    tool.chmod(0o755)
    variables = {"JAX_A": "a b", "XLA_B": "'", "MPMD_C": "$c", "NCCL_D": "*", "CUDA_E": '"', "OTHER": "x", "NAMED": "n"}
    path = f"{tool.parent}:{os.environ['PATH']}"
    options = ["-H", "hostb", "--env", "NAMED", "--env", "lower=l", "--", "my-tool"]
    status, job = over(hosts, *options, cwd=tmp_path, PATH=path, **variables)
    assert status == 0, job.err
    assert job.out == f"[0] {tmp_path}|a b|'|$c|*|\"|no|n|l|{ROOT}\n"


def test_a_folder_or_command_that_is_missing_there_is_one_clear_line(hosts):
    status, job = over(hosts, "-H", "hosta,hostb", "--", "no-such-command", PATH="/usr/bin:/bin")
    assert status == 127
    assert re.fullmatch(r"jax-mpmd: host host[ab]: command not found: no-such-command \(PATH=.*\)\n", job.err)


def test_a_host_that_cannot_be_reached_is_one_clear_line(hosts):
    status, job = over(hosts, "-H", "hosta,nowhere.invalid", *shell("echo never"))
    assert (status, job.out) == (69, "")
    assert job.err.startswith("jax-mpmd: host nowhere.invalid: ssh: Could not resolve hostname nowhere.invalid: ")
    assert job.err.count("\n") == 1


def test_a_host_that_refuses_us_is_one_clear_line(hosts):
    status, job = over(hosts, "-H", "hosta,nobody@hostb", *shell("echo never"))
    assert (status, job.out) == (69, "")
    assert job.err == "jax-mpmd: host nobody@hostb: nobody@hostb: Permission denied (publickey).\n"
    refusing = hosts.ssh.replace("-p 2222", "-p 2223")
    status, job = run("--ssh", refusing, "-H", "hostb", *shell("echo never"), prefix=hosts.here.prefix)
    assert (status, job.out) == (69, "")
    assert job.err == "jax-mpmd: host hostb: ssh: connect to host hostb port 2223: Connection refused\n"


def test_a_failure_on_another_host_ends_all_and_names_it(hosts):
    program = '[[ $MPMD_PROCESS_ID != 2 ]] || { echo "  last words"; kill -9 $$; }; sleep 1000'
    status, job = over(hosts, "-H", "hosta:2,hostb:2", *shell(program))
    assert status == 137
    summary = job.summary()
    assert summary[0] == "jax-mpmd: rank 2: killed by SIGKILL"
    assert re.fullmatch(r"  on hostb, pid \d+, \d+ s after the start; its last lines:", summary[1])
    assert summary[2:] == ["  |   last words"]


@pytest.mark.parametrize("name, status", [("INT", 130), pytest.param("TERM", 143, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_signal_leaves_no_process_on_any_host(hosts, name, status):
    program = shell("setsid bash -c 'trap \"\" TERM HUP; sleep 1000 & wait' & echo ready; sleep 1000")
    with start_over(hosts, "-H", "hosta,hostb", "-n", 2, *program) as job:
        job.wait_for_line("ready", 4)
        os.kill(job.process.pid, getattr(signal, f"SIG{name}"))
        assert job.finish() == status
        for host in hosts.both:
            host.wait_until_empty()


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed_on_any_host(hosts):
    with start_over(hosts, "-H", "hosta,hostb", "-n", 2, *shell("echo ready; sleep 1000")) as job:
        job.wait_for_line("ready", 4)
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.process.wait(PATIENCE_S) == -signal.SIGKILL
        job.check_nothing_left(PATIENCE_S)
        for host in hosts.both:
            host.wait_until_empty(PATIENCE_S)


@pytest.mark.slow
def test_a_connection_that_drops_ends_the_job_on_both_sides(hosts):
    with start_over(hosts, "-H", "hosta,hostb", *shell("echo ready; sleep 1000")) as job:
        job.wait_for_line("ready", 2)
        clients = [p for p in job.left() if is_ssh_to(p, "hostb")]
        assert len(clients) == 1
        os.kill(clients[0], signal.SIGKILL)
        assert job.finish() == 69
        assert job.summary()[0] == "jax-mpmd: rank 1: its host hostb was lost: ssh: killed by SIGKILL"
        for host in hosts.both:
            host.wait_until_empty()


def is_ssh_to(pid: int, name: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return False
    return words[0] == "ssh" and name in words


@pytest.mark.slow
def test_a_cable_that_is_cut_ends_the_job_on_both_sides(hosts):
    with start_over(hosts, "-H", "hosta,hostb", *shell("echo ready; sleep 1000")) as job:
        job.wait_for_line("ready", 2)
        try:
            hosts.cable("down")
            assert job.finish() == 69
            assert job.summary()[0].startswith("jax-mpmd: rank 1: its host hostb was lost: ")
            # The other side hears nothing any more, and gives up by itself.
            until(lambda: not any(is_named(p, "sleep") for p in hosts.there.pids()), "the end of the rank on hostb")
        finally:
            hosts.cable("up")
        for host in hosts.both:
            host.wait_until_empty(PATIENCE_S)


TRAINING = """
import jax, mpmd, numpy as np, scheduler
mpmd.initialize()
mesh = mpmd.MpmdMesh(jax.make_mesh((4,), ("stage",)), "stage")
def loss(ws, x):
    for i, w in enumerate(ws):
        x = x @ w if i == 0 else mpmd.mark_stage_end(x) @ w
    return x.mean()
@mpmd.jit(mpmd_mesh=mesh)
def step(ws, xs):
    return mpmd.treduce(lambda x: loss(ws, x), xs, schedule=scheduler.OneFOneB(4))
for i in range(1_000_000):
    float(step([np.eye(8, dtype=np.float32)] * 4, np.ones((4, 2, 8), np.float32)))
    if i == 3:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_on_both_sides_of_a_cut_cable_the_lost_host_is_named(hosts, tmp_path):
    options = ["-H", "hosta,hostb", "-n", 2, "--cpu-devices", 1, "--log-dir", tmp_path]
    with start_over(hosts, *options, *python(TRAINING)) as job:
        job.wait_for_line("ready", 4)
        try:
            hosts.cable("down")
            start = time.monotonic()
            logs = [tmp_path / f"rank-{rank}.log" for rank in (2, 3)]
            until(lambda: all("jax-mpmd: " in log.read_text() for log in logs), "the verdict on hostb", 22)
            assert job.finish() == 69
            assert time.monotonic() - start < 30
            assert job.summary()[0].startswith("jax-mpmd: rank 2: its host hostb was lost: ")
            for log in logs:
                (verdict,) = re.findall("^jax-mpmd: rank .*$", log.read_text(), re.MULTILINE)
                assert re.fullmatch(
                    r"jax-mpmd: rank 0: no sign of life from hosta for 2\d s: its machine cannot be reached, or the "
                    "coordination service on it has ended", verdict
                )  # fmt: skip
        finally:
            hosts.cable("up")
        for host in hosts.both:
            host.wait_until_empty(PATIENCE_S)


def is_named(pid: int, name: str) -> bool:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip() == name
    except OSError:
        return False


# Rank 1 is killed at step 7; the spare on the other host takes its place, and ends at step 500 with a verdict.
REPLACED = """
import json, os, sys, time
number, folder = int(os.environ["MPMD_PROCESS_ID"]), os.environ["MPMD_STATUS_DIR"]
def say(rank, step, verdict=None):
    with open(f"{folder}/new", "w") as file:
        json.dump({"rank": rank, "step": step, "doing": f"the work of process {number}", "goes_on": True,
                   "since": time.time(), "waiting_for": None, "verdict": verdict}, file)
    os.replace(f"{folder}/new", f"{folder}/rank-{rank}.json")
if number < 2:
    say(number, 7)
    time.sleep(1)
    os.kill(os.getpid(), 9) if number else time.sleep(60)
while not os.path.exists(f"{folder}/taken"):
    time.sleep(0.05)
say(1, 500, "jax-mpmd: rank 1: as the spare says")
sys.exit(1)
"""


@pytest.mark.slow
def test_the_table_is_about_the_process_that_has_taken_the_place_on_another_host(hosts):
    _, job = over(hosts, "-H", "hosta:2,hostb:0", *"--spares 1 --restarts 1".split(), *python(REPLACED))
    assert "jax-mpmd: rank 1: as the spare says\n" in job.err
    assert re.search(r"^  1 +hostb +\d+ +exit status 1 +500 .* the work of process 2$", job.err, re.MULTILINE), job.err


@pytest.mark.slow
def test_lines_from_several_hosts_stay_whole(hosts):
    status, job = over(hosts, "-H", "hosta:2,hostb:2", "--env", "PYTHONUNBUFFERED=", *counting(10_000, longest=300))
    assert status == 0
    lines = job.out.splitlines()
    assert len(lines) == 40_000
    assert torn(lines, longest=300) == []


@pytest.mark.exhaustive
def test_jax_runs_on_two_hosts(hosts):
    status, job = over(hosts, "-H", "hosta,hostb", "-n", 2, "--cpu-devices", 1, *python(JAX_PROGRAM))
    assert status == 0, job.err
    assert sorted(job.matches("^.*sum.*$")) == [f"[{r}] sum 6.0 local 1 service external" for r in range(4)]
