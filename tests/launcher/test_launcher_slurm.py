"""The launcher inside a Slurm allocation: the same line, as tasks of a step. One real node, with two cores or more."""

import os
import re
import signal
import socket

import pytest
from launching import (
    LAUNCHER,
    PATIENCE_S,
    Launched,
    alive,
    command,
    counting,
    launch,
    python,
    run,
    shell,
    torn,
    until,
)
from slurm import Cluster, cluster, missing
from test_launcher_local import FAMILY, JAX_PROGRAM

REASON = missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or "")]
SALLOC = ("salloc", "-Q", "--nodes=1", "--overcommit")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def inside(slurm: Cluster, *arguments, salloc: tuple = SALLOC) -> tuple[int, Launched]:
    """Runs the launcher in an allocation, to its end."""
    result = run(*arguments, prefix=salloc, **slurm.environment)
    until(lambda: not slurm.jobs(), "the end of the job", 30)
    return result


SAY = shell(
    'echo "$MPMD_PROCESS_ID $MPMD_LOCAL_ID $SLURM_PROCID $SLURM_STEP_NUM_TASKS $MPMD_COORDINATOR $MPMD_LOCAL_ONLY"'
)


def test_ranks_are_tasks_of_one_step(slurm):
    status, job = inside(slurm, "-n", 3, "--port", 23977, *SAY)
    assert status == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[{r}] {r} {r} {r} 3 127.0.0.1:23977 1" for r in range(3)]
    assert job.err == ""


def test_without_n_the_allocation_says_how_many(slurm):
    program = shell("echo $MPMD_NUM_PROCESSES")
    for asked, number in ((["--ntasks=2"], 2), (["--ntasks-per-node=2"], 2), ([], 1)):
        status, job = inside(slurm, *program, salloc=(*SALLOC, *asked))
        assert status == 0, job.err
        assert sorted(job.out.splitlines()) == [f"[{r}] {number}" for r in range(number)]


@pytest.mark.slow
def test_a_batch_job_runs_the_same_line(slurm, tmp_path):
    output = tmp_path / "out"
    script = f"{LAUNCHER} -n 2 -- bash -c 'echo rank $MPMD_PROCESS_ID'"
    result = slurm.command("sbatch", "--ntasks=2", f"--output={output}", "--wrap", script)
    assert result.returncode == 0, result.stderr
    until(lambda: not slurm.jobs(), "the end of the job", 60)  # `--wait` looks every ten seconds
    assert sorted(output.read_text().splitlines()) == ["[0] rank 0", "[1] rank 1"]


def test_inside_a_step_the_processes_are_local(slurm):
    status, job = inside(slurm, "-n", 2, *SAY, salloc=(*SALLOC, "srun", "-n1"))
    assert status == 0, job.err
    lines = sorted(re.sub(r":\d+", ":PORT", line) for line in job.out.splitlines())
    assert lines == [f"[{r}] {r} {r} 0 1 127.0.0.1:PORT 1" for r in range(2)]


def test_hosts_go_before_the_allocation(slurm):
    status, job = inside(slurm, "-H", "localhost:2", *shell("echo ${SLURM_STEP_ID-no step}"))
    assert (status, sorted(job.out.splitlines())) == (0, ["[0] no step", "[1] no step"])


def test_a_dry_run_shows_the_step(slurm):
    status, job = inside(slurm, "-n", 2, "--dry-run", "--", "train")
    assert status == 0, job.err
    assert job.out.splitlines()[0] == (
        "tasks: srun --kill-on-bad-exit=1 --nodes=1 --ntasks=2 --ntasks-per-node=2 --distribution=block --input=all"
    )
    name = socket.gethostname().split(".")[0]
    assert [line.split(":")[0] for line in job.out.splitlines()[2:]] == [f"[0] {name}", f"[1] {name}"]


@pytest.mark.parametrize(
    "how, status, text", [("exit 3", 3, "exit status 3"), ("kill -9 $$", 137, "killed by SIGKILL")]
)
def test_the_first_failure_ends_the_step_and_is_shown_last(slurm, how, status, text):
    program = f"[[ $MPMD_PROCESS_ID != 1 ]] || {{ echo '  last'; {how}; }}; sleep 1000"
    got, job = inside(slurm, "-n", 2, *shell(program))
    assert got == status
    assert job.summary()[0] == f"jax-mpmd: rank 1: {text}"
    assert job.summary()[2:] == ["  |   last"]


@pytest.mark.parametrize("name, status", [pytest.param("INT", 130, marks=pytest.mark.exhaustive), ("TERM", 143)])
@pytest.mark.slow
def test_a_signal_leaves_no_process_behind(slurm, name, status):
    script = ("bash", "-c", 'echo "launcher=$$"; exec "$@"', "bash")
    with launch("-n", 2, *FAMILY, prefix=(*SALLOC, *script), **slurm.environment) as job:
        job.wait_for_line(r"child=\d+", 2)
        os.kill(int(job.wait_for_line(r"launcher=(\d+)")[0]), getattr(signal, f"SIG{name}"))
        assert job.finish() == status
        assert job.summary() == [f"jax-mpmd: ended by SIG{name}"]


@pytest.mark.slow
def test_scancel_ends_everything(slurm):
    with launch("-n", 2, *FAMILY, prefix=SALLOC, **slurm.environment) as job:
        job.wait_for_line(r"child=\d+", 2)
        (number,) = slurm.jobs()
        slurm.command("scancel", number)
        assert job.finish() != 0
        until(lambda: not slurm.jobs(), "the end of the job", 60)


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(slurm):
    script = ("bash", "-c", 'echo "launcher=$$"; exec "$@"', "bash")
    with launch("-n", 2, *FAMILY, prefix=(*SALLOC, *script), **slurm.environment) as job:
        job.wait_for_line(r"child=\d+", 2)
        os.kill(int(job.wait_for_line(r"launcher=(\d+)")[0]), signal.SIGKILL)
        job.process.wait(PATIENCE_S)  # salloc
        job.check_nothing_left(PATIENCE_S)


def test_a_step_that_slurm_refuses_is_said(slurm):
    status, job = inside(
        slurm, "-n", 2, *shell("echo never"), salloc=(*SALLOC, "env", "MPMD_SRUN=srun --nodelist=nowhere")
    )
    assert (status, job.out) == (69, "")
    assert job.summary()[0].startswith("jax-mpmd: srun: srun: error: ")


@pytest.mark.slow
def test_lines_of_tasks_stay_whole(slurm):
    status, job = inside(slurm, "-n", 3, "--env", "PYTHONUNBUFFERED=", *counting(5_000, longest=800))
    assert status == 0
    lines = job.out.splitlines()
    assert len(lines) == 15_000
    assert torn(lines, longest=800) == []


@pytest.mark.slow
def test_jax_runs_on_the_tasks_of_a_step(slurm):
    status, job = inside(slurm, "-n", 2, "--cpu-devices", 2, *python(JAX_PROGRAM))
    assert status == 0, job.err
    assert sorted(job.matches("^.*sum.*$")) == [f"[{r}] sum 6.0 local 2 service external" for r in range(2)]


# --- keepers and spares; what they do for a job is in tests/multiprocess/test_resilience.py -----------


def test_a_keeper_is_a_step_of_its_own_which_outlives_attempts_and_has_no_gpu(slurm):
    """The allocation asks for GPUs, and its variables would have each step ask for them."""
    program = (
        "import os\nattempt = os.environ['MPMD_ATTEMPT']\nprint('keeper', os.environ['MPMD_KEEPER'])\n"
        "if attempt == '0': os._exit(3)\nos.system('scontrol --oneliner show steps')"
    )
    status, job = inside(slurm, "--restarts", 1, *python(program), salloc=(*SALLOC, "--gpus-per-node=2"))
    assert status == 0, job.err
    first, second = job.matches(r"^\[0\] keeper (\d+:\S+)$")
    assert first == second
    steps = {int(number): "gres:gpu:2" in rest for number, rest in job.matches(r"StepId=\d+\.(\d+) (.*)$")}
    assert steps == {0: False, 2: True}


def test_ranks_go_on_without_a_keeper_that_slurm_refuses(slurm):
    program = python("import os; print(os.environ.get('MPMD_KEEPER'))")
    options = ("env", "MPMD_SRUN=srun --gpus-per-node=2")
    status, job = inside(slurm, "--restarts", 1, *program, salloc=(*SALLOC, "--gpus=2", *options))
    assert (status, job.out) == (0, "[0] None\n"), job.err
    assert re.fullmatch(r"jax-mpmd: no keeper on \S+, so its ranks keep nothing: srun: error: .*\n", job.err)


def test_spares_are_the_last_tasks(slurm):
    options = ("-n", 3, "--restarts", 1)
    status, job = inside(slurm, *options, "--spares", 1, "--dry-run", "--", "train")
    assert status == 0, job.err
    lines = [line.split() for line in job.out.splitlines()[2:]]
    assert [words[0] for words in lines] == ["[0]", "[1]", "[2]"]
    assert all({"MPMD_NUM_PROCESSES=2", "MPMD_NUM_SPARES=1"} <= set(words) for words in lines), job.out
    status, job = inside(slurm, *options, "--spares", 3, "--", "train")
    assert (status, job.err) == (2, "jax-mpmd: --spares: 3 of 3 tasks leave none for ranks (see --help)\n")


@pytest.mark.slow
def test_a_keeper_ends_when_launcher_and_ranks_are_killed_and_the_allocation_stays(slurm):
    script = ("bash", "-c", '"$@" & echo "launcher=$!"; wait; echo "over=$$"; exec sleep 1000', "bash")
    program = python("import os, time; print(f'rank={os.getpid()}', flush=True); time.sleep(1000)")
    with launch("-n", 2, "--restarts", 1, *program, prefix=(*SALLOC, *script), **slurm.environment) as job:
        ranks = job.wait_for_line(r"rank=(\d+)", 2)
        keepers = [pid for pid in job.left() if "keeper.py" in command(pid)]
        assert len(keepers) == 2
        for pid in (*ranks, *job.wait_for_line(r"launcher=(\d+)")):
            os.kill(int(pid), signal.SIGKILL)
        (allocated,) = job.wait_for_line(r"over=(\d+)")
        until(lambda: not any(map(alive, keepers)), "the end of the keeper", 20)  # before it misses the signs of life
        (number,) = slurm.jobs()
        until(
            lambda: slurm.command("squeue", "--noheader", "--steps", f"--jobs={number}").stdout == "",
            "the end of the steps",
        )
        os.kill(int(allocated), signal.SIGKILL)
        job.finish()
