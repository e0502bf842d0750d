"""The launcher on one machine: what the ranks get, how their output comes, and how the job ends."""

import collections
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest
from hosts import missing, two_hosts
from launching import (
    LAUNCHER,
    PATIENCE_S,
    PYTHON,
    ROOT,
    alive,
    clean_environment,
    launch,
    python,
    run,
    shell,
    torn,
    until,
)

SAY_VARIABLES = (
    "for v in COORDINATOR NUM_PROCESSES PROCESS_ID LOCAL_ID LOCAL_ONLY HANG_TIMEOUT_S SERVICE; do"
    ' n=MPMD_$v; echo "$n=${!n-unset}"; done; ls -d "$MPMD_STATUS_DIR"'
)

# A rank in its place in a mesh of all processes; uses JAX alone.
JAX_PROGRAM = """
import os
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
e = os.environ
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(
    e["MPMD_COORDINATOR"], int(e["MPMD_NUM_PROCESSES"]), int(e["MPMD_PROCESS_ID"]),
    coordinator_bind_address="127.0.0.1:0" if e.get("MPMD_SERVICE") == "external" else None,
)
n = jax.device_count()
mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
x = jax.make_array_from_callback((n,), split, lambda i: np.arange(n, dtype=np.float32)[i])
total = jax.jit(lambda x: x.sum(), out_shardings=whole)(x)
print("sum", float(total), "local", jax.local_device_count(), "service", e.get("MPMD_SERVICE"))
"""


@pytest.mark.parametrize("streams", ["2>&1", "2>&1 >/dev/null"])
def test_a_job_goes_on_to_its_own_end_when_nobody_reads_its_output_any_more(streams):
    program = "for i in 1 2 3; do echo out; echo err >&2; sleep .3; done; exit 3"
    pipe = f"{LAUNCHER} -n 2 -- bash -c '{program}' {streams} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 3 and len(done.stdout.splitlines()) == 1, done


def test_one_process_gets_the_contract_and_no_service():
    status, job = run("--hang-timeout", "7.5", *shell(SAY_VARIABLES))
    assert status == 0, job.err
    lines = [line.removeprefix("[0] ") for line in job.out.splitlines()]
    assert re.fullmatch(r"MPMD_COORDINATOR=127\.0\.0\.1:2\d{4}", lines[0])
    assert lines[1:7] == [
        "MPMD_NUM_PROCESSES=1", "MPMD_PROCESS_ID=0", "MPMD_LOCAL_ID=0", "MPMD_LOCAL_ONLY=1", "MPMD_HANG_TIMEOUT_S=7.5",
        "MPMD_SERVICE=unset",
    ]  # fmt: skip
    assert not os.path.exists(lines[7])  # it was there for the rank, and is gone
    assert job.err == ""


def test_four_processes_have_ranks_of_their_own_and_one_coordinator():
    status, job = run("-n", 4, "--port", 23987, *shell('echo "$MPMD_PROCESS_ID $MPMD_LOCAL_ID $MPMD_COORDINATOR"'))
    assert status == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[{r}] {r} {r} 127.0.0.1:23987" for r in range(4)]


def test_gpus_are_dealt_out_in_order_and_from_the_visible_ones():
    command = shell('echo "gpus=$CUDA_VISIBLE_DEVICES"')
    status, job = run("-n", 2, "--gpus-per-process", 2, *command, CUDA_VISIBLE_DEVICES="7,5,3,1")
    assert status == 0, job.err
    assert sorted(job.out.splitlines()) == ["[0] gpus=7,5", "[1] gpus=3,1"]


def test_too_few_gpus_are_one_clear_line():
    status, job = run("-n", 2, "--gpus-per-process", 2, *shell("true"), CUDA_VISIBLE_DEVICES="7,5,3")
    assert (status, job.out) == (69, "")
    assert job.err == "jax-mpmd: 3 GPUs (CUDA_VISIBLE_DEVICES=7,5,3), but 2 processes with 2 each need 4\n"


def test_the_environment_is_the_callers_with_names_that_the_launcher_uses_itself():
    names = {"http_proxy": "a b", "job": "mine", "ranks": "1 2", "QUOTED": "'\"$x`\n*"}
    program = f"import os; print(*(repr(os.environ[n]) for n in {list(names)}), repr(os.environ['added']))"
    status, job = run("--env", "added=x=*", *python(program), **names)
    assert status == 0, job.err
    assert job.out == "[0] " + " ".join(map(repr, [*names.values(), "x=*"])) + "\n"


def test_variables_that_have_a_meaning_in_bash_arrive_as_they_were_given():
    given = {"IFS": "a", "OPTIND": "x", "UID": "7", "_": "u", "BASH_ENV": "/no", "SHELLOPTS": "xtrace", "RANDOM": "3",
             "TMOUT": "1", "IFS2": "$(exit 9)", "lines": "one\n two\n"}  # fmt: skip
    options = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
    program = f"import os; print([os.environ[n] for n in {list(given)}])"
    status, job = run(*options, *python(program))
    assert (status, job.out, job.err) == (0, f"[0] {list(given.values())}\n", "")
    names = ["OPTIND", "SECONDS", "hosts", "value"]  # sent as this process has them, not as the shell does
    options = [word for name in names for word in ("--env", name)]
    status, job = run(
        *options, *python(f"import os; print([os.environ[n] for n in {names}])"), **dict.fromkeys(names, "x ")
    )
    assert (status, job.out, job.err) == (0, f"[0] {['x '] * 4}\n", "")


def test_a_path_that_is_given_is_where_the_command_is_looked_for(tmp_path):
    (tmp_path / "tool").write_text("#!/bin/sh\necho found $PATH\n")
    (tmp_path / "tool").chmod(0o755)
    status, job = run("--env", f"PATH={tmp_path}", "--", "tool")
    assert (status, job.out, job.err) == (0, f"[0] found {tmp_path}\n", "")
    status, job = run("--env", "PATH=/nowhere", *shell("true"))
    assert (status, job.err) == (127, "jax-mpmd: command not found: bash (PATH=/nowhere)\n")


@pytest.mark.slow
def test_a_time_limit_of_the_callers_shell_does_not_end_the_job():
    status, job = run(*shell("sleep 3; echo $TMOUT"), TMOUT="1")
    assert (status, job.out, job.err) == (0, "[0] 1\n", "")


def test_variables_of_a_job_outside_do_not_come_through():
    status, job = run(*shell("env | grep -c -e SERVICE -e 4711"), MPMD_SERVICE="external", MPMD_COORDINATOR="x:4711")
    assert (status, job.out) == (1, "[0] 0\n")


def test_arguments_arrive_as_they_were_given():
    words = ["two words", "*", "$HOME", "", "it's", '"', "new\nline", "\\", "-n", "--", "é"]
    status, job = run(*python("import sys; print(sys.argv[1:])"), *words)
    assert (status, job.out) == (0, f"[0] {words}\n")


def test_a_rank_starts_with_stdin_at_its_end_default_signals_and_no_other_files():
    program = (
        "import os, signal; print(repr(os.read(0, 1)), os.getsid(0) == os.getpid(),"
        " signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM).name,"
        " *sorted(n for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n)))"
    )
    status, job = run("-n", 2, *python(program))
    assert status == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[{r}] b'' True True SIG_DFL 0 1 2" for r in range(2)]


def test_an_open_line_is_ended_and_a_carriage_return_ends_a_line():
    status, job = run(*shell(r"printf 'one\rtwo\n\n  three'; printf 'four' >&2"))
    assert (status, job.out, job.err) == (0, "[0] one\n[0] two\n[0] \n[0]   three\n", "[0] four\n")


def test_a_line_comes_when_it_is_written(tmp_path):
    go = tmp_path / "go"
    with launch(*shell(f'echo first; echo other >&2; until [[ -e "{go}" ]]; do sleep 0.05; done')) as job:
        job.wait_for_line(r"^\[0\] first$")
        until(lambda: job.err == "[0] other\n", "the line on stderr")
        go.touch()
        assert job.finish() == 0


def test_a_message_that_a_timeout_cuts_in_two_is_not_lost():
    script = (ROOT / "scripts" / "launch_multihost.sh").read_text()
    function = re.search(r"^read_line\(\).*?^}", script, re.DOTALL | re.MULTILINE)
    assert function is not None
    words = 2 * 'until read_line 0 0.05; do :; done; echo "[$line]"; '
    program = f"{function[0]}\n{{ printf exi; sleep 0.3; printf 'ted 3\\nnext\\n'; }} | {{ {words} }}"
    done = subprocess.run(["bash", "-uc", program], text=True, capture_output=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["[exited 3]", "[next]"]


def test_lines_stay_whole_under_load():
    program = (
        "import os, sys\nr = os.environ['MPMD_PROCESS_ID']\n"
        "for i in range(20_000):\n"
        "    stream = sys.stderr if i % 10 == 0 else sys.stdout\n"
        "    stream.write(f'{r} {i} ' + r * (i % 300) + f' {i}\\n')\n"
    )
    status, job = run("-n", 4, *python(program), PYTHONUNBUFFERED="")
    assert status == 0
    lines = [*job.out.splitlines(), *job.err.splitlines()]
    assert torn(lines, longest=300) == []
    assert collections.Counter(line[1] for line in lines) == dict.fromkeys("0123", 20_000)


def test_a_very_long_line_is_broken_into_prefixed_ones():
    status, job = run("-n", 2, *python("import os; print(os.environ['MPMD_PROCESS_ID'] * 100_000)"))
    assert status == 0
    for rank in "01":
        pieces = [line for line in job.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert "".join(piece.removeprefix(f"[{rank}] ") for piece in pieces) == rank * 100_000
        assert max(map(len, pieces)) <= 3904


def test_log_files_hold_each_ranks_lines_without_prefix(tmp_path):
    logs = tmp_path / "deep" / "my logs"
    program = shell('echo "out $MPMD_PROCESS_ID"; echo "err $MPMD_PROCESS_ID" >&2')
    status, job = run("-n", 2, "--log-dir", logs, *program)
    assert status == 0, job.err
    assert sorted(p.name for p in logs.iterdir()) == ["rank-0.log", "rank-1.log"]
    for rank in range(2):
        assert sorted((logs / f"rank-{rank}.log").read_text().splitlines()) == [f"err {rank}", f"out {rank}"]
        assert f"[{rank}] out {rank}" in job.out and f"[{rank}] err {rank}" in job.err


def test_a_log_that_cannot_grow_holds_no_rank_up(tmp_path):
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    program = python("for i in range(4000): print(i, 'x' * 60)")
    status, job = run("-n", 1, "--log-dir", tmp_path, *program)
    assert status == 0 and "[0] 3999 " in job.out
    assert job.err == f"[0] jax-mpmd: {tmp_path}/rank-0.log cannot be written; tried again every 5s\n"


@pytest.mark.slow
def test_a_log_goes_on_when_it_can_be_written_again(tmp_path):
    log = tmp_path / "rank-0.log"
    log.symlink_to("/dev/full")
    program = shell("echo lost; sleep 2; rm rank-0.log; for i in {0..59}; do echo $i; sleep 0.1; done")
    status, job = run("-n", 1, "--log-dir", tmp_path, *program, cwd=tmp_path)
    assert status == 0 and job.err.count("cannot be written") == 1
    lines = log.read_text().splitlines()
    assert lines == [str(i) for i in range(60 - len(lines), 60)] and len(lines) > 10


def test_what_gloo_prints_when_processes_meet_is_left_out_and_nothing_else(tmp_path):
    line = "[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
    others = [f"{line}!", f"-{line}", line.replace("3", "three"), line.split(".")[0]]
    program = python(f"print({line!r}, *{others!r}, sep='\\n'); print({line!r}, end='')")
    status, job = run("-n", 1, "--log-dir", tmp_path, *program)
    assert status == 0, job.err
    assert job.out.splitlines() == [f"[0] {other}" for other in others]
    assert (tmp_path / "rank-0.log").read_text().splitlines() == others


# --- failures -------------------------------------------------------------------------------------


def failing(how: str, others: str = "exec sleep 1000") -> tuple[str, ...]:
    """Rank 1 fails in this way; the others would go on for ever."""
    return shell(f"if [[ $MPMD_PROCESS_ID == 1 ]]; then {how}; else {others}; fi")


@pytest.mark.parametrize(
    "how, status, text",
    [
        ("exit 3", 3, "exit status 3"),
        ("kill -9 $$", 137, "killed by SIGKILL"),
        ("kill -SEGV $$", 139, "killed by SIGSEGV"),
        ("kill -ABRT $$", 134, "killed by SIGABRT"),
        (f"exec {PYTHON} -c 'raise SystemExit(5)'", 5, "exit status 5"),
    ],
)
def test_the_first_failure_ends_all_and_is_shown_last(how, status, text):
    got, job = run("-n", 3, *failing(f"printf '  before\\n'; {how}"))
    assert got == status
    summary = job.summary()
    assert summary[0] == f"jax-mpmd: rank 1: {text}"
    assert re.fullmatch(r"  on \S+, pid \d+, \d+ s after the start; its last lines:", summary[1])
    assert summary[2:] == ["  |   before"]


def test_an_exceptions_traceback_is_in_the_summary():
    program = "import os\nif os.environ['MPMD_PROCESS_ID'] == '1':\n    raise ValueError('bad * data')\n"
    status, job = run("-n", 2, *python(program + "import time; time.sleep(1000)"))
    assert status == 1
    summary = job.summary()
    assert summary[0] == "jax-mpmd: rank 1: exit status 1"
    assert [summary[2], summary[-1]] == ["  | Traceback (most recent call last):", "  | ValueError: bad * data"]


def test_the_error_of_a_rank_is_the_headline_also_where_all_raise_at_once():
    program = "import mpmd\nmpmd.initialize()\nraise ValueError('bad * \\'data\\'')\n"
    status, job = run("-n", 2, "--cpu-devices", 1, *python(program), PYTHONPATH=str(ROOT))
    assert status == 1
    assert re.fullmatch(r"jax-mpmd: rank [01]: ValueError: bad \* 'data' \(between steps\)", job.summary()[0])


def test_only_the_last_twenty_lines_are_repeated(tmp_path):
    for options in ((), ("--log-dir", tmp_path)):
        status, job = run("-n", 2, *options, *failing("seq 1 100; exit 1"))
        assert status == 1
        assert job.summary()[2:] == [f"  | {i}" for i in range(81, 101)]


def test_a_rank_that_prints_nothing_is_said_to():
    status, job = run("-n", 2, *failing("exit 9"))
    assert status == 9
    assert re.fullmatch(r"  on \S+, pid \d+, \d+ s after the start; it printed nothing", job.summary()[1])


def test_ranks_that_end_early_with_success_do_not_end_the_others():
    status, job = run("-n", 3, *shell("sleep 0.$MPMD_PROCESS_ID; echo done"))
    assert (status, len(job.out.splitlines()), job.err) == (0, 3, "")


def test_a_stopped_rank_is_ended_too():
    with launch("-n", 3, *failing("echo pid=$$; kill -STOP $$", "sleep 0.5; exit 4")) as job:
        assert job.finish() == 4


@pytest.mark.parametrize("how", ["failure", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_rank_that_has_written_over_its_environment_is_ended_too(how):
    """As one does that gives its process a title."""
    lost = "echo pid=$$; exec env -i sleep 1000"
    with launch("-n", 2, *shell(f'if [ "$MPMD_PROCESS_ID" = 0 ]; then {lost}; else sleep 1; exit 4; fi')) as job:
        (pid,) = job.wait_for_line(r"^\[0\] pid=(\d+)")
        if how == "kill":
            os.kill(job.process.pid, signal.SIGKILL)
        else:
            assert job.finish() == 4
        until(lambda: not alive(int(pid)), "the end of the rank")


@pytest.mark.slow
def test_ranks_that_ignore_sigterm_are_killed():
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); "
    with launch("-n", 2, *python(program + "import time; time.sleep(1000)")) as job:
        pids = job.wait_for_line(r"^\[\d\] ready")
        job.wait_for_line(r"^\[\d\] ready", 2)
        assert pids
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish() == 143


# Each rank has a child in a session of its own, which ignores what it can and would live for ever.
FAMILY = shell(
    "setsid bash -c 'trap \"\" INT TERM HUP; sleep 1000 & wait; sleep 1000' & echo \"child=$!\";"
    " echo \"pid=$$\"; wait; sleep 1000"
)  # fmt: skip


@pytest.mark.parametrize(
    "name, status", [("INT", 130), *(pytest.param(*p, marks=pytest.mark.slow) for p in (("TERM", 143), ("HUP", 129)))]
)
def test_a_signal_to_the_launcher_leaves_no_process_behind(name, status):
    with launch("-n", 2, *FAMILY) as job:
        pids = [int(p) for p in job.wait_for_line(r"^\[\d\] (?:pid|child)=(\d+)", 4)]
        assert all(map(alive, pids))
        os.kill(job.process.pid, getattr(signal, f"SIG{name}"))
        assert job.finish() == status
        assert job.summary() == [f"jax-mpmd: ended by SIG{name}"]
        assert not any(map(alive, pids))


def test_ctrl_c_reaches_the_whole_foreground_group_and_output_still_comes_through():
    program = "trap 'echo leaving; exit 0' TERM; echo ready; sleep 1000 & wait"
    with launch("-n", 2, *shell(program)) as job:
        job.wait_for_line("ready", 2)
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        assert job.finish() == 130
        assert sorted(job.matches(r"^\[\d\] leaving")) == ["[0] leaving", "[1] leaving"]


def test_a_second_ctrl_c_does_not_wait():
    program = "trap 'echo told' TERM; echo ready; while true; do sleep 0.1; done"
    with launch("-n", 2, *shell(program)) as job:
        job.wait_for_line("ready", 2)
        os.kill(job.process.pid, signal.SIGINT)
        job.wait_for_line("told", 2)
        start = time.monotonic()
        os.kill(job.process.pid, signal.SIGINT)
        assert job.finish() == 130
        assert time.monotonic() - start < 60


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed():
    with launch("-n", 2, *FAMILY) as job:
        job.wait_for_line(r"^\[\d\] child=", 2)
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.process.wait(PATIENCE_S) == -signal.SIGKILL
        job.check_nothing_left(PATIENCE_S)


def test_nothing_outlives_an_agent_that_is_killed():
    with launch("-n", 2, *FAMILY) as job:
        job.wait_for_line(r"^\[\d\] child=", 2)
        agents = [p for p in job.left() if is_session_leader(p) and b"jax-mpmd-agent" in command_line(p)]
        assert len(agents) == 1
        os.kill(agents[0], signal.SIGKILL)
        assert job.finish() == 69
        assert job.summary()[0] == "jax-mpmd: rank 0: its host localhost was lost: bash: killed by SIGKILL"


def is_session_leader(pid: int) -> bool:
    return alive(pid) and os.getsid(pid) == pid


def command_line(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def test_what_ranks_leave_behind_is_ended_after_success():
    status, job = run("-n", 2, *shell("setsid sleep 1000 & echo done"))
    assert (status, job.err) == (0, "")


# --- victims and status files ---------------------------------------------------------------------

# A rank with a watchdog, as the launcher sees it: a status file, and status 75 for a victim.
WATCHED = """
import json, os, pathlib, sys, time
rank = int(os.environ["MPMD_PROCESS_ID"])
folder = pathlib.Path(os.environ["MPMD_STATUS_DIR"])
def status(verdict=None, waiting_for=None, doing="1F0 in group 1"):
    data = {"rank": rank, "host": "h", "pid": os.getpid(), "phase": "step", "step": 7, "doing": doing,
            "since": time.time() - 40, "waiting_for": waiting_for, "verdict": verdict}
    new = folder / f"new-{rank}"
    new.write_text(json.dumps(data)); new.rename(folder / f"rank-{rank}.json")
def wait_for_failure():
    while not (folder / "failed.json").exists():
        time.sleep(0.02)
    return json.loads((folder / "failed.json").read_text())
"""


def test_victims_have_time_to_print_their_table_and_the_guilty_rank_is_named():
    program = """
if rank == 1:
    status(); print("boom"); sys.exit(3)
status()
print("told", sorted(wait_for_failure().items()), file=sys.stderr)
time.sleep(1); print("my table", file=sys.stderr); os._exit(75)
"""
    status, job = run("-n", 3, *python(WATCHED + program))
    assert status == 3
    assert job.err.count("told [('rank', 1), ('status', 3), ('what', 'exit status 3')]") == 2
    assert job.err.count("my table") == 2
    summary = job.summary()
    assert (summary[0], summary[2:]) == ("jax-mpmd: rank 1: exit status 3", ["  | boom"])


@pytest.mark.slow
def test_when_all_are_victims_the_watchdogs_verdict_counts():
    program = """
if rank == 1:
    status(doing="2B3"); print("stuck"); time.sleep(1000)
verdict = 'jax-mpmd: rank 1: does not move in "2B3" for 40 s'
time.sleep(rank); status(verdict); os._exit(75)
"""
    status, job = run("-n", 3, *python(WATCHED + program))
    assert status == 75
    summary = job.summary()
    assert (summary[0], summary[2:]) == ('jax-mpmd: rank 1: does not move in "2B3" for 40 s', ["  | stuck"])


def test_a_rank_that_left_with_success_can_be_the_guilty_one():
    program = """
if rank == 0:
    print("bye"); status(); sys.exit(0)
while not os.path.exists(os.environ["MPMD_STATUS_DIR"] + "/rank-0.json"):
    time.sleep(0.01)
status("jax-mpmd: rank 0: left the program after step 7"); os._exit(75)
"""
    status, job = run("-n", 3, *python(WATCHED + program))
    assert status == 75
    assert job.summary()[0] == "jax-mpmd: rank 0: left the program after step 7"
    assert job.summary()[2:] == ["  | bye"]


@pytest.mark.slow
def test_the_launcher_prints_the_table_when_no_rank_could():
    program = """
if rank == 1:
    status(doing="in user code"); os.kill(os.getpid(), 9)
status(waiting_for={"value": "the output of 1F0", "ranks": [1], "since": time.time() - 100})
time.sleep(1000)
"""
    status, job = run("-n", 2, *python(WATCHED + program))
    assert status == 137
    lines = job.summary()
    assert lines[0] == "jax-mpmd: rank 1: killed by SIGKILL"
    assert lines[2].split() == ["rank", "host", "pid", "ended", "step", "for", "doing"]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[3:]]
    assert [row[3] for row in rows] == ["by the launcher", "killed by SIGKILL"]
    assert [row[4] for row in rows] == ["7", "7"]
    assert re.fullmatch(r"1\d\d s", rows[0][5]) and re.fullmatch(r"\d\d s", rows[1][5])
    assert [row[6] for row in rows] == [
        "1F0 in group 1, waits for the output of 1F0 from rank 1",
        "in user code",
    ]


# --- starting over --------------------------------------------------------------------------------


def test_restarts_begin_anew_with_another_port_and_say_so(tmp_path):
    program = shell(
        'echo "try $MPMD_ATTEMPT $MPMD_COORDINATOR"; [[ $MPMD_ATTEMPT == 2 || $MPMD_PROCESS_ID == 0 ]] || exit 6'
    )
    status, job = run("-n", 2, "--restarts", 3, "--log-dir", tmp_path, *program)
    assert status == 0
    said = [line for line in job.err.splitlines() if line.startswith("jax-mpmd: ")]
    assert said == [
        "jax-mpmd: rank 1: exit status 6", "jax-mpmd: starts over in 1 s (restart 1 of 3)",
        "jax-mpmd: rank 1: exit status 6", "jax-mpmd: starts over in 2 s (restart 2 of 3)",
    ]  # fmt: skip
    ports = {m[1] for m in re.finditer(r"try \d 127\.0\.0\.1:(\d+)", job.out)}
    assert len(ports) == 3
    names = ["rank-0.log", "rank-0.restart-1.log", "rank-0.restart-2.log"]
    assert sorted(p.name for p in tmp_path.glob("rank-0*")) == names


@pytest.mark.parametrize("name", ["log dir", "ledgers"])
def test_ledgers_of_an_earlier_job_are_gone_and_those_of_an_earlier_attempt_are_not(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    for old in ("rank-0.ledger", "rank-3.ledger", "rank-1.restart-4.ledger", "notes.ledger"):
        (folder / old).touch()
    variables = {} if name == "log dir" else {"MPMD_LEDGER_DIR": str(folder)}
    program = shell('touch "$MPMD_LEDGER_DIR/rank-$MPMD_ATTEMPT.ledger"; ((MPMD_ATTEMPT))')
    status, job = run("--restarts", 1, "--log-dir", tmp_path / "log dir", *program, **variables)
    assert status == 0, job.err
    assert sorted(p.name for p in folder.glob("*.ledger")) == ["notes.ledger", "rank-0.ledger", "rank-1.ledger"]


def test_a_keeper_that_was_killed_leaves_no_folder():
    program = python(
        "import os, socket, struct\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.connect('\\0' + os.environ['MPMD_KEEPER'].split(':')[1])\n"
        "pid, *_ = struct.unpack('iII', connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))\n"
        "os.kill(pid, 9)\n"
        "print('killed', os.path.isdir(os.environ['MPMD_KEEPER'].split(':')[2]))"
    )
    status, job = run("--restarts", 1, *program)
    assert status == 0 and job.out == "[0] killed True\n" and "Killed" not in job.err


@pytest.mark.parametrize("command", [("nice", PYTHON, "-c", "{}"), ("bash", "-c", f"exec {PYTHON} -c '{{}}'")])
def test_keepers_have_the_python_that_the_command_names_behind_other_words(command):
    program = 'import os; print("MPMD_KEEPER" in os.environ)'
    status, job = run("--restarts", 1, "--", *(word.format(program) for word in command), PATH="/usr/bin:/bin")
    assert status == 0 and job.out == "[0] True\n", job.err


def test_keepers_have_a_python_with_an_equals_sign_in_its_path(tmp_path):
    python = tmp_path / "lr=0.1" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    python.chmod(0o755)
    program = 'import os; print("MPMD_KEEPER" in os.environ, os.environ["MPMD_SERVICE"])'
    status, job = run("-n", 2, "--restarts", 1, "--", python, "-c", program)
    assert status == 0 and job.out.count("True external") == 2, job.err


def test_a_job_in_a_rank_of_another_one_leaves_its_files_alone(tmp_path):
    inner = f'unset CDPATH; {LAUNCHER} -n 1 -- bash -c "env | grep -c -e LEDGER -e FLIGHT -e HANG"'
    program = shell(f"touch $MPMD_LEDGER_DIR/rank-0.ledger; {inner}; ls $MPMD_LEDGER_DIR")
    status, job = run("--hang-timeout", 60, "--log-dir", tmp_path, *program)
    assert (status, job.out) == (0, "[0] [0] 0\n[0] rank-0.ledger\n[0] rank-0.log\n"), job.err


@pytest.fixture
def nodeb(tmp_path):
    """Connects to `nodeb`, which greets who comes, and is away for some connections after a file `away` is made."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        rf"""#!/bin/bash
        while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift 2 || shift; done
        if [[ -e {tmp_path}/away ]]; then
          echo x >>{tmp_path}/away
          (($(wc -l <{tmp_path}/away) < 5)) || rm {tmp_path}/away
          echo "ssh: connect to host nodeb port 22: Connection refused" >&2
          exit 255
        fi
        echo "Welcome to node, dear user"
        exec bash -c "${{*:2}}"
        """.replace("\n        ", "\n")
    )
    ssh.chmod(0o755)
    return ("--ssh", ssh, "-H", "localhost,nodeb")


@pytest.mark.slow
def test_a_host_that_is_away_for_a_while_ends_no_job_that_has_begun(nodeb, tmp_path):
    program = shell(
        f"echo keeps ${{MPMD_KEEPER%%:*}}; ((MPMD_ATTEMPT || !MPMD_PROCESS_ID)) || {{ touch {tmp_path}/away; exit 5; }}"
    )
    status, job = run(*nodeb, "--restarts", 9, *program)
    assert status == 0, job.err
    assert "jax-mpmd: host nodeb: ssh: connect to host nodeb port 22: Connection refused\n" in job.err
    assert len(re.findall(r"^\[1\] keeps \d+$", job.out, re.MULTILINE)) == 2, job.out
    assert job.err.count("starts over") > 2 and "three" not in job.err


@pytest.mark.slow
def test_a_host_that_answers_again_takes_part_in_the_next_attempt(nodeb, tmp_path):
    program = shell(
        f"((MPMD_ATTEMPT)) || touch {tmp_path}/away; [[ $MPMD_ATTEMPT != 1 ]] || rm -f {tmp_path}/away;"
        "echo of $MPMD_NUM_PROCESSES; ((MPMD_ATTEMPT == 2)) || exit $((5 + MPMD_ATTEMPT))"
    )
    no_keepers = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ""}  # nobody has noticed so far that the host is away
    status, job = run(*nodeb, "--restarts", 2, "--min-hosts", 1, *program, **no_keepers)
    assert status == 0, job.err
    assert "goes on without host nodeb" in job.err and "host nodeb answers again" in job.err
    assert job.matches(r"^\[0\] of (\d)") == ["2", "1", "2"]


def test_a_full_temporary_folder_is_one_clear_line():
    full = 'mount -t tmpfs -o size=64k tmpfs /mnt && exec env TMPDIR=/mnt "$@"'
    inside = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c", full, "-")
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system of their own")
    status, job = run("-n", 2, *shell("true"), prefix=inside)
    assert (status, job.err) == (69, "jax-mpmd: no space in /mnt\n")


@pytest.mark.slow
def test_restarts_end_when_the_job_fails_in_the_same_way_again_and_again():
    status, job = run("-n", 2, "--restarts", 9999, *shell("exit 6"))
    assert status == 6
    said = [line for line in job.err.splitlines() if "restart" in line]
    assert said[:-1] == [f"jax-mpmd: starts over in {n} s (restart {n} of 9999)" for n in (1, 2)]
    assert said[-1] == "jax-mpmd: gives up after restart 2 of 9999: exit status 6, 3 times in a row"


@pytest.mark.slow
def test_a_restart_leaves_out_devices_that_were_unfit_where_others_are_left():
    """Processes 1 and 2 end as those whose devices are unfit; there is one spare, so that 2 is used again."""
    program = shell("""
        echo "try $MPMD_ATTEMPT on $MPMD_LOCAL_ID"
        [[ $MPMD_ATTEMPT == 0 ]] || exit 0
        echo '{"goes_on": true}' >"$MPMD_STATUS_DIR/rank-$MPMD_PROCESS_ID.json"
        [[ $MPMD_PROCESS_ID != 2 ]] || until [[ -e $MPMD_STATUS_DIR/taken ]]; do sleep 0.1; done
        [[ $MPMD_PROCESS_ID == 0 ]] && sleep 600 || kill -64 $$
    """)
    status, job = run("-n", 2, "--spares", 1, "--restarts", 1, *program)
    assert status == 0
    said = [line for line in job.err.splitlines() if line.startswith("jax-mpmd: ")]
    assert said == [
        "jax-mpmd: rank 1: killed, because its devices are unfit; spare 2 takes its place",
        "jax-mpmd: rank 1: killed, because its devices are unfit",
        "jax-mpmd: starts over in 1 s (restart 1 of 1)",
        "jax-mpmd: goes on without the devices of process 1 on localhost, which are unfit",
        "jax-mpmd: uses the devices of process 2 on localhost again, which are unfit: no others are left",
    ]
    assert sorted(re.findall(r"try 1 on (\d)", job.out)) == ["0", "2"]


@pytest.mark.slow
def test_a_spare_that_is_killed_has_a_successor_unless_three_in_a_row_are_killed_soon(tmp_path):
    program = shell(f"""
        died={tmp_path}/died
        if [[ $MPMD_PROCESS_ID == 0 ]]; then
          until [[ -e $died && $(wc -l <$died) == 3 ]]; do sleep 0.1; done
          sleep 2 # so that another one would come
        else
          echo "$MPMD_PROCESS_ID on $MPMD_LOCAL_ID" | tee -a $died
          kill -9 $$
        fi
    """)
    status, job = run("--spares", 1, "--restarts", 1, *program)
    assert status == 0
    lines = [re.sub(r"^\[\d\] ", "", line) for line in job.out.splitlines()]
    assert lines == ["1 on 1", "2 on 1", "3 on 1"]
    assert [line for line in job.err.splitlines() if "spare" in line] == [
        f"jax-mpmd: spare {n}: killed by SIGKILL{more}"
        for n, more in ((1, "; spare 2 waits in its place"), (2, "; spare 3 waits in its place"), (3, ""))
    ]


@pytest.mark.slow
def test_the_last_lines_are_those_of_the_process_that_has_taken_the_place():
    program = shell("""
        [[ $MPMD_ATTEMPT == 0 ]] || exit 0
        echo "process $MPMD_PROCESS_ID"
        echo '{"goes_on": true}' >"$MPMD_STATUS_DIR/rank-1.json"
        case $MPMD_PROCESS_ID in
          1) kill -9 $$ ;;
          2) until [[ -s $MPMD_STATUS_DIR/taken ]]; do sleep 0.1; done; exit 5 ;;
          *) sleep 600 ;;
        esac
    """)
    status, job = run("-n", 2, "--restarts", 1, *program)
    assert status == 0
    assert "jax-mpmd: rank 1: killed by SIGKILL; spare 2 is started in its place\n" in job.err
    lines = job.summary()
    assert lines[lines.index("jax-mpmd: rank 1: exit status 5") + 2] == "  | process 2"


@pytest.mark.slow
def test_a_failure_at_another_step_is_another_one():
    program = WATCHED.replace('"step": 7', '"step": 7 + int(os.environ["MPMD_ATTEMPT"]) // 2') + "status(); sys.exit(3)"
    status, job = run("--restarts", 3, *python(program))
    assert status == 3
    assert [line for line in job.err.splitlines() if "restart" in line] == [
        f"jax-mpmd: starts over in {2**n} s (restart {n + 1} of 3)" for n in range(3)
    ]


def test_ctrl_c_between_two_attempts_ends_the_launcher_at_once():
    with launch("--restarts", 5, *shell("exit 6")) as job:
        until(lambda: "in 2 s" in job.err, "the second restart")
        os.kill(job.process.pid, signal.SIGINT)
        assert job.finish() == 130
        assert job.err.splitlines()[-1] == "jax-mpmd: ended by SIGINT"


def test_ranks_that_end_well_after_sigterm_are_no_failure():
    with launch("-n", 2, *shell("trap 'exit 0' TERM; echo ready; while true; do sleep 0.1; done")) as job:
        job.wait_for_line("ready", 2)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish() == 143
        assert job.summary() == ["jax-mpmd: stopped by SIGTERM; all ranks ended by themselves, with status 0"]


def test_ctrl_c_is_no_reason_to_start_over():
    with launch("--restarts", 5, *shell("echo ready; sleep 1000")) as job:
        job.wait_for_line("ready")
        os.kill(job.process.pid, signal.SIGINT)
        assert job.finish() == 130
        assert job.summary() == ["jax-mpmd: ended by SIGINT"]


@pytest.mark.slow
def test_ctrl_c_leaves_what_each_rank_of_a_job_that_hangs_did_last(tmp_path):
    faults = ROOT / "tests" / "multiprocess" / "programs" / "faults.py"
    with launch("-n", 3, "--cpu-devices", 1, "--log-dir", tmp_path, "--", PYTHON, faults, "callback", 1) as job:
        job.wait_for_line(r"about to callback$")
        time.sleep(5)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.finish() == 130
    said = subprocess.run(
        [PYTHON, "-m", "mpmd", "replay", tmp_path], env=clean_environment(), capture_output=True, text=True, check=True
    )
    lines = said.stdout.splitlines()
    assert lines[0] == "records of 3 of 3 ranks"
    assert re.fullmatch(r"jax-mpmd: rank 1: is in the host callback on_host .*; then SIGTERM came", lines[1])
    assert "so rank 1 explains what the others waited for" in lines


# --- the coordination service ---------------------------------------------------------------------


@pytest.mark.slow
def test_jax_runs_on_two_processes_with_two_devices_each():
    status, job = run("-n", 2, "--cpu-devices", 2, *python(JAX_PROGRAM))
    assert status == 0, job.err
    assert sorted(job.matches(r"^.*sum.*$")) == [f"[{r}] sum 6.0 local 2 service external" for r in range(2)]


# A sum over two processes, and the addresses at which this one listens.
LISTENERS = f"""
import json, os, sys
import jax, mpmd
mpmd.initialize()
from jax.experimental.multihost_utils import process_allgather
mpmd.job.joining.current().wire
sys.path.append({str(ROOT / "tests")!r})
from ports import listening
assert int(process_allgather(jax.process_index() + 1).sum()) == 3
print("listens", json.dumps(listening(os.getpid())))
"""


@pytest.mark.slow
def test_all_ports_of_a_job_on_one_machine_are_on_loopback_whatever_its_name_is(tmp_path):
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n192.0.2.1 {socket.gethostname()}\n")
    elsewhere = ("unshare", "--mount", "bash", "-c", f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"', "-")
    status, job = run("-n", 2, "--cpu-devices", 1, *python(LISTENERS), prefix=elsewhere)
    assert status == 0, job.err
    found = [json.loads(text) for text in re.findall(r"listens (.*)", job.out)]
    assert [set(ports.values()) for ports in found] == [{"127.0.0.1"}, {"127.0.0.1"}]
    assert min(map(len, found)) >= 4


@pytest.mark.slow
@pytest.mark.skipif((reason := missing(with_ssh=False)) is not None, reason=reason or "")
def test_ports_of_a_job_on_two_hosts_are_on_the_interface_between_them_but_for_the_coordinators(tmp_path):
    with two_hosts(tmp_path, with_ssh=False) as hosts:
        job = {"MPMD_COORDINATOR": "hosta:5000", "MPMD_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
        ranks = [
            subprocess.Popen(
                [*host.prefix, *python(LISTENERS)[1:]], env=clean_environment() | job | {"MPMD_PROCESS_ID": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank, host in enumerate(hosts.both)
        ]  # fmt: skip
        for host, rank in zip(hosts.both, ranks, strict=True):
            out, err = rank.communicate(timeout=120)
            assert rank.returncode == 0, err[-3000:]
            found = json.loads(out.rpartition("listens ")[2])
            if host is hosts.here:
                assert found.pop("5000") == "::"
            assert set(found.values()) == {host.address}
            assert len(found) >= 5  # with that at which the kernel answers for the process


# On PYTHONPATH, it makes an installed package impossible to import.
HIDE_MPMD = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "mpmd":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
"""


@pytest.mark.slow
def test_rank_0_serves_where_mpmd_cannot_be_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE_MPMD)
    status, job = run("-n", 2, "--cpu-devices", 1, *python(JAX_PROGRAM), PYTHONPATH=str(tmp_path))
    assert status == 0, job.err
    assert sorted(job.matches(r"^.*sum.*$")) == [f"[{r}] sum 1.0 local 1 service None" for r in range(2)]


@pytest.mark.slow
def test_the_death_of_the_coordination_service_is_said():
    with launch("-n", 2, *python("print('ready'); import time; time.sleep(1000)")) as job:
        job.wait_for_line("ready", 2)
        until(lambda: service_of(job), "the coordination service")
        os.kill(service_of(job)[0], signal.SIGKILL)
        assert job.finish() == 137
        assert job.summary() == ["jax-mpmd: coordination service: killed by SIGKILL"]


def test_a_rank_whose_devices_cannot_be_had_ends_the_job_at_once():
    wrong = "import os\nif os.environ['MPMD_PROCESS_ID'] == '1': os.environ['JAX_PLATFORMS'] = 'cpuu'\n"
    start = time.monotonic()
    status, job = run("-n", 2, *python(f"{wrong}import mpmd\nmpmd.initialize()"))
    assert status == 1 and time.monotonic() - start < 60  # JAX's own barrier is 120 s
    assert job.summary()[0] == "jax-mpmd: rank 1: exit status 1"
    assert "Backend 'cpuu' is not in the list of known backends" in job.err


def service_of(job) -> list[int]:
    return [p for p in job.left() if b"mpmd.coordinator" in command_line(p) and is_session_leader(p)]


def test_two_jobs_at_once_do_not_meet():
    with launch("-n", 2, *shell("echo $MPMD_COORDINATOR; sleep 1")) as one, launch("-n", 2, *shell("exit 1")) as two:
        assert two.finish() == 1
        assert one.finish() == 0
        assert one.err == ""


# --- what can be said before anything starts ------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--"], "no command; it goes after --"),
        (["-n", "2"], "no command; it goes after --"),
        (["-n", "0", "--", "x"], "-n: '0' is not a whole number of at least 1"),
        (["-n", "two", "--", "x"], "-n: 'two' is not a whole number of at least 1"),
        (["-n", "010", "--", "x"], "-n: '010' has leading zeros"),
        (["-n", "08", "--", "x"], "-n: '08' has leading zeros"),
        (["-n", "a[$(exit 9)]", "--", "x"], "-n: 'a[$(exit 9)]' is not a whole number of at least 1"),
        (["-n", "99999", "--", "x"], "-n: 99999 is more than 9999"),
        (["-n", "", "--", "x"], "-n: the value is empty"),
        (["-H", "", "--", "x"], "-H: the value is empty"),
        (["--ssh= ", "--", "x"], "--ssh: the value is empty"),
        (["-H", "a:08", "--", "x"], "--hosts: a: '08' has leading zeros"),
        (["-H", ":4", "--", "x"], "--hosts: ':4' is not the name of a host"),
        (["--hang-timeout", "1e3", "--", "x"], "--hang-timeout: '1e3' is not a number of seconds"),
        (["--env", "MPMD_PROCESS_ID=7", "--", "x"], "--env: MPMD_PROCESS_ID is set by the launcher"),
        (["-n", "--", "x"], "-n needs a value"),
        (["--port", "70000", "--", "x"], "--port: '70000' is not a whole number from 1 to 65535"),
        (["--bogus", "--", "x"], "unknown option --bogus"),
        (["--bogus=1", "--", "x"], "unknown option --bogus"),
        (["python", "x.py"], "'python' is not an option; the command goes after --"),
        (["--hang-timeout", "-1", "--", "x"], "--hang-timeout: '-1' is not a number of seconds"),
        (["-H", "a,,b", "--", "x"], "--hosts: 'a,,b' is not a list of hosts separated by commas"),
        (["-H", "a:x", "--", "x"], "--hosts: a: 'x' is not a whole number of at least 1"),
        (["-H", "localhost,a", "--ssh", "no-ssh -p 2", "--", "x"], "--ssh: command not found: no-ssh"),
        (["-H", "a,b,a", "--", "x"], "--hosts: a is named twice; write a:K for K processes"),
        (["--replace-slow", "1.0", "--", "x"], "--replace-slow: '1.0' is not a number above 1"),
        (["--replace-slow", "3x", "--", "x"], "--replace-slow: '3x' is not a number above 1"),
        (["--replace-slow", "3", "--", "x"], "--replace-slow needs --spares, one of which takes the place"),
        (["-n", "2", "--spares", "1", "--", "x"], "--spares needs --restarts, which has states kept in memory"),
        (
            ["-H", "a:0,b:0", "--spares", "2", "--restarts", "1", "--", "x"],
            "--hosts: no host has a process that is not a spare",
        ),
        (
            ["-H", "a,b:0,c:0", "--spares", "1", "--restarts", "1", "--", "x"],
            "--spares: 1 for 2 hosts without other processes",
        ),
        (["-H", "a;b", "--", "x"], "--hosts: 'a;b' is not the name of a host"),
        (["--env", "NOT_SET_ANYWHERE", "--", "x"], "--env: NOT_SET_ANYWHERE is not set in this environment"),
        (["--env", "1=2", "--", "x"], "--env: '1=2' is neither NAME nor NAME=VALUE"),
        (
            ["--cpu-devices", "1", "--gpus-per-process", "1", "--", "x"],
            "--cpu-devices and --gpus-per-process cannot be used together",
        ),
    ],
)
def test_a_wrong_option_is_one_clear_line(arguments, message):
    status, job = run(*arguments)
    assert (status, job.out, job.err) == (2, "", f"jax-mpmd: {message} (see --help)\n")


def test_a_command_that_is_not_there_or_cannot_run_is_one_clear_line(tmp_path):
    status, job = run("-n", 2, "--", "no-such-command-here", PATH="/usr/bin:/bin")
    assert (status, job.err) == (127, "jax-mpmd: command not found: no-such-command-here (PATH=/usr/bin:/bin)\n")
    status, job = run("-n", 2, "--restarts", 3, "--", tmp_path / "missing.py")
    assert (status, job.err) == (127, f"jax-mpmd: command not found: {tmp_path}/missing.py\n")
    (tmp_path / "plain.txt").touch()
    status, job = run("--", tmp_path / "plain.txt")
    assert (status, job.err) == (126, f"jax-mpmd: not an executable file: {tmp_path}/plain.txt\n")


@pytest.mark.slow
def test_of_two_jobs_that_start_on_one_port_one_runs_and_the_other_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--port", port, "-n", 2, "--cpu-devices", 1, *python(JAX_PROGRAM)]
    with launch(*options) as one, launch(*options) as other:
        statuses = {job.finish(): job for job in (one, other)}
    assert statuses.keys() == {0, 69}, (one.err, other.err)
    assert statuses[0].out.count("sum 1.0") == 2
    told = rf"jax-mpmd: (port {port} is in use|coordination service: .*port {port} .*Address already in use.*)"
    assert re.fullmatch(told, statuses[69].err.splitlines()[0])


def test_a_port_in_use_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, job = run("--port", port, *shell("true"))
    assert (status, job.err) == (69, f"jax-mpmd: port {port} is in use\n")


def test_a_log_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").touch()
    status, job = run("--log-dir", tmp_path / "file", *shell("true"))
    assert (status, job.err) == (69, f"jax-mpmd: cannot write to --log-dir {tmp_path}/file\n")


def test_the_help_shows_every_option_and_examples():
    status, job = run("--help")
    assert (status, job.err) == (0, "")
    for option in (
        "-n, --procs-per-host N", "-H, --hosts", "--cpu-devices K", "--gpus-per-process K", "--port P",
        "--hang-timeout S", "--restarts R", "--spares K", "--replace-slow K", "--log-dir DIR", "--dry-run", "examples:",
    ):  # fmt: skip
        assert option in job.out
    assert run("-h")[1].out == job.out


# --- a dry run ------------------------------------------------------------------------------------

LOCAL_DRY_RUN = f"""\
coordination service on localhost: python -m mpmd.coordinator PORT 2, where mpmd can be imported; else in rank 0
[0] localhost: cd {ROOT} && MPMD_COORDINATOR=127.0.0.1:PORT MPMD_NUM_PROCESSES=2 MPMD_PROCESS_ID=0 MPMD_LOCAL_ID=0 \
MPMD_HANG_TIMEOUT_S=60 MPMD_SERVICE=external MPMD_STATUS_DIR=DIR MPMD_LOCAL_ONLY=1 MPMD_ATTEMPT=0 JAX_PLATFORMS=cpu \
JAX_NUM_CPU_DEVICES=4 CUDA_VISIBLE_DEVICES= python train.py a\\ b
[1] localhost: cd {ROOT} && MPMD_COORDINATOR=127.0.0.1:PORT MPMD_NUM_PROCESSES=2 MPMD_PROCESS_ID=1 MPMD_LOCAL_ID=1 \
MPMD_HANG_TIMEOUT_S=60 MPMD_SERVICE=external MPMD_STATUS_DIR=DIR MPMD_LOCAL_ONLY=1 MPMD_ATTEMPT=0 JAX_PLATFORMS=cpu \
JAX_NUM_CPU_DEVICES=4 CUDA_VISIBLE_DEVICES= python train.py a\\ b
"""

HOSTS_DRY_RUN = f"""\
coordination service on ann@h1: python -m mpmd.coordinator 5000 3, where mpmd can be imported; else in rank 0
[0] ann@h1: cd {ROOT} && A=1 MPMD_COORDINATOR=h1:5000 MPMD_NUM_PROCESSES=3 MPMD_PROCESS_ID=0 MPMD_LOCAL_ID=0 \
MPMD_SERVICE=external MPMD_STATUS_DIR=DIR MPMD_ATTEMPT=0 CUDA_VISIBLE_DEVICES=0,1 train
[1] h2: cd {ROOT} && A=1 MPMD_COORDINATOR=h1:5000 MPMD_NUM_PROCESSES=3 MPMD_PROCESS_ID=1 MPMD_LOCAL_ID=0 \
MPMD_SERVICE=external MPMD_STATUS_DIR=DIR MPMD_ATTEMPT=0 CUDA_VISIBLE_DEVICES=0,1 train
[2] h2: cd {ROOT} && A=1 MPMD_COORDINATOR=h1:5000 MPMD_NUM_PROCESSES=3 MPMD_PROCESS_ID=2 MPMD_LOCAL_ID=1 \
MPMD_SERVICE=external MPMD_STATUS_DIR=DIR MPMD_ATTEMPT=0 CUDA_VISIBLE_DEVICES=2,3 train
"""


def test_a_dry_run_prints_what_would_run_where():
    options = ["--dry-run", "-n", 2, "--cpu-devices", 4, "--hang-timeout", 60]
    status, job = run(*options, "--", "python", "train.py", "a b")
    assert (status, job.err) == (0, "")
    assert job.out == LOCAL_DRY_RUN


@pytest.mark.parametrize(
    "hosts, spares, of_spares", [("a,b", 2, "bb"), ("a,b,c:0", 2, "cc"), ("a,b,c:0,d:0", 3, "ccd")]
)
def test_spares_come_after_all_ranks(hosts, spares, of_spares):
    status, job = run("--dry-run", "-H", hosts, "--spares", spares, "--restarts", 1, "--", "x")
    lines = [line.split() for line in job.out.splitlines()[1:]]
    assert (status, job.err) == (0, "")
    assert [words[:2] for words in lines] == [[f"[{i}]", f"{host}:"] for i, host in enumerate(f"ab{of_spares}")]
    assert all({"MPMD_NUM_PROCESSES=2", f"MPMD_NUM_SPARES={spares}"} <= set(words) for words in lines), job.out


def test_a_dry_run_over_hosts_needs_no_host():
    options = ["--dry-run", "-n", 1, "-H", "ann@h1,h2:2", "--gpus-per-process", 2, "--port", 5000, "--env", "A=1"]
    status, job = run(*options, "--", "train")
    assert (status, job.err) == (0, "")
    assert job.out == HOSTS_DRY_RUN
