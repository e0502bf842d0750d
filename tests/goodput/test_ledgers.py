"""Ledgers: what a process writes adds up to its life; what is read of a job's processes, by hand."""

import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler
from mpmd.__main__ import main
from mpmd.goodput import ledgers
from mpmd.observe import ledger, pace
from mpmd.observe.ledger import Ledger
from mpmd.observe.records import Moved, Ran, RecordedTimes, Way
from mpmd.run.accounts import Accounts, seconds_by_part

ROOT = Path(__file__).parents[2]


class Result:
    """An array that is there `after_s` from now; or an error is."""

    def __init__(self, after_s: float, error: Exception | None = None):
        self._until, self._error = time.perf_counter() + after_s, error

    def block_until_ready(self):
        time.sleep(max(0.0, self._until - time.perf_counter()))
        if self._error is not None:
            raise self._error


class About(NamedTuple):
    """Equals seconds that were slept; other work on the machine makes them more."""

    seconds: float

    def __eq__(self, other):
        return self.seconds - 0.06 <= other <= self.seconds + 0.4


@pytest.fixture
def begun(tmp_path):
    """A ledger, as it is begun; gives what begins one of a name, and what reads it."""
    made = []

    def begin(attempt: int = 0, age_s: float = 0.0):
        of = Ledger(tmp_path / f"rank-{len(made)}.ledger", len(made), attempt, age_s)
        made.append(of)
        return of

    yield begin
    for of in made:
        of.close("the test is over")


def lines(folder: Path, number: int = 0) -> list[ledgers.LedgerLine]:
    (found,) = [p for p in ledgers.read(folder) if p.number == number]
    return list(found.lines)


def seconds(folder: Path, number: int = 0) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines(folder, number):
        for part, amount in line.parts.items():
            found[part] = found.get(part, 0.0) + amount
    return found


def call(of: Ledger, seconds: float, shares: dict[str, float], **more) -> None:
    of.end_call(of.begin_call(), [Result(seconds)], shares, **more)


def write_ledger(folder: Path, number: int, *texts: str, attempt: int = 0, begun: str = "00.0000") -> None:
    name = f"rank-{number}{f'.restart-{attempt}' if attempt else ''}.ledger"
    head = f"# jax-mpmd: where the seconds of process {number} went, attempt {attempt}, on host;"
    head += f" begun 2026-01-01 10:00:{begun}Z"
    (folder / name).write_text("\n".join([head, *(f"2026-01-01 10:00:{text}" for text in texts)]))


# --- the writer -----------------------------------------------------------------------------------


def test_each_second_is_counted_once_and_the_parts_add_up_to_the_life_of_the_process(begun, tmp_path):
    of, start = begun(age_s=2.0), time.perf_counter()
    with of.during(ledger.COMPILING):
        time.sleep(0.05)
        with of.during(ledger.CHECKPOINT):  # within another stretch
            time.sleep(0.01)
    call(of, 0.05, {}, part=ledger.COMPILING)
    shares = {ledger.COMPUTE: 0.75, ledger.BUBBLE: 0.25}
    for step in range(3):
        of.step = step
        call(of, 0.1 if step < 2 else 0.6, shares)
    with of.during(ledger.CHECKPOINT):  # the devices work, 0.6 s of it
        time.sleep(0.75)
    time.sleep(0.1)
    of.leave_loop()
    time.sleep(0.05)
    of._queue.put(None)
    of._thread.join()
    of.close("the end")
    life = 2.0 + time.perf_counter() - start
    found = seconds(tmp_path)
    assert sum(found.values()) == pytest.approx(life, abs=0.2)
    assert found[ledger.STARTING] == About(2.0)
    assert found[ledger.COMPILING] == About(0.11)
    assert found[ledger.COMPUTE] == pytest.approx(3 * found[ledger.BUBBLE], rel=0.01)
    assert found[ledger.CHECKPOINT] == About(0.15)
    assert found[ledger.HOST] == About(0.1) and found[ledger.OTHER] == About(0.05)
    (process,) = ledgers.read(tmp_path)
    assert process.end - process.begun == pytest.approx(sum(found.values()), abs=0.002)
    assert [line.steps for line in process.lines if line.steps] == [(0, 2)]


def test_time_between_the_end_of_a_call_on_the_devices_and_the_next_call_is_the_hosts(begun, tmp_path):
    of = begun()
    for _ in range(2):
        call(of, 0.05, {ledger.COMPUTE: 1.0})
        time.sleep(0.15)
    of.close("the end")
    assert seconds(tmp_path)[ledger.HOST] == About(0.2)


def test_a_measured_call_divides_itself_and_those_after_it(begun, tmp_path):
    of, shares = begun(), {}
    call(of, 0.1, shares, divide=lambda begin, end: {ledger.COMPUTE: 3.0, ledger.TRANSFERS: 1.0})
    time.sleep(0.15)
    call(of, 0.1, shares)
    time.sleep(0.15)
    of.close("the end")
    found = seconds(tmp_path)
    assert found[ledger.COMPUTE] == pytest.approx(3 * found[ledger.TRANSFERS], rel=0.01)
    assert found[ledger.COMPUTE] + found[ledger.TRANSFERS] == About(0.2)


def test_a_call_that_fails_is_lost_and_recovery_lasts_until_the_next_one(begun, tmp_path):
    of, shares = begun(), {ledger.COMPUTE: 1.0}
    call(of, 0.0, shares)
    of.end_call(of.begin_call(), [Result(0.1, RuntimeError("a rank was lost"))], shares)
    time.sleep(0.2)
    of.event("lost: rank 1", is_recovering=True)
    with of.during(ledger.OTHER):
        time.sleep(0.1)
    call(of, 0.1, shares)
    time.sleep(0.2)
    of.close("the end")
    found = seconds(tmp_path)
    assert found[ledger.LOST] == About(0.1)
    assert found[ledger.RECOVERY] == About(0.2)
    assert [line.text for line in lines(tmp_path)] == ["lost: rank 1", "ended: the end"]


def test_of_a_successor_all_before_its_second_call_is_recovery(begun, tmp_path):
    of = begun(attempt=1, age_s=1.0)
    with of.during(ledger.COMPILING):
        time.sleep(0.05)
    call(of, 0.05, {}, part=ledger.COMPILING)
    time.sleep(0.1)
    call(of, 0.05, {ledger.COMPUTE: 1.0})
    time.sleep(0.1)
    of.close("the end")
    found = seconds(tmp_path)
    assert found[ledger.RECOVERY] == About(1.15) and ledger.COMPILING not in found


def test_a_process_that_is_ended_in_a_call_has_lost_it(begun, tmp_path):
    of, start = begun(), time.perf_counter()
    call(of, 60, {})
    time.sleep(0.1)
    of.close("rank 1 was killed")
    assert 0.09 < seconds(tmp_path)[ledger.LOST] < time.perf_counter() - start + 0.01


def test_lines_come_about_once_a_second_and_are_there_at_once(begun, tmp_path):
    of, end = begun(), time.perf_counter() + 2.5
    while time.perf_counter() < end:
        call(of, 0.0, {ledger.COMPUTE: 1.0})
        time.sleep(0.01)
    assert 1 <= len(lines(tmp_path)) <= 3  # a process that is killed now has left these


def test_what_a_full_disk_does_not_take_is_in_the_next_line(begun, tmp_path):
    of, limits = begun(age_s=2.0), resource.getrlimit(resource.RLIMIT_FSIZE)
    start, file = time.perf_counter(), tmp_path / "rank-0.ledger"
    size = file.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))  # a part of a line has room
    try:
        for _ in range(3):
            of.step = 0
            call(of, 0.05, {ledger.COMPUTE: 1.0})
            time.sleep(0.1)
            of.event("the disk is full")
            time.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.stat().st_size == size
    of.close("the end")
    assert sum(seconds(tmp_path).values()) == pytest.approx(2.0 + time.perf_counter() - start, abs=0.2)
    assert file.read_text().count("the disk is full") == 3


def test_another_thread_says_nothing(begun, tmp_path):
    of = begun()

    def work():
        with of.during(ledger.CHECKPOINT):
            time.sleep(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    of.close("the end")
    assert ledger.CHECKPOINT not in seconds(tmp_path)


# --- how a call divides ---------------------------------------------------------------------------


def ran(group: int, start: float, end: float, ready: float = 0.0, by: Way | None = None) -> Ran:
    return Ran(0, 0, group, "f", (), 0, 0.0, 0.0, start, end, ready, by)


def test_a_call_divides_by_what_the_devices_of_the_process_waited_for():
    x, y = Way("x", 0, 1), Way("y", 2, 1)  # group 2 is another process's
    rows = RecordedTimes(
        (ran(0, 1, 3), ran(1, 5, 6, 4.5, x), ran(1, 8, 9, 8, y)),
        (Moved(0, 0, x, 8, 0, 3, 4.5, True), Moved(0, 0, y, 8, 0, 0, 8, True)),
    )
    assert seconds_by_part(rows, [0, 1, 2], 0, 10) == {
        ledger.COMPUTE: 2 + 1 + 1,
        ledger.TRANSFERS: 1.5,  # x was there at 3, and came at 4.5
        ledger.HOST: 1 + 0.5,  # group 0 was not told before 1, group 1 not before 5
        ledger.BUBBLE: 7 + 3 + 2 + 1,
    }
    both = seconds_by_part(rows, [0, 0, 2], 0, 10)  # groups that share their devices
    assert sum(both.values()) == 10 and both[ledger.COMPUTE] == 4


# --- a program ------------------------------------------------------------------------------------


def run_steps(num_steps: int):
    groups = [jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])] * 2
    mesh = mpmd.MpmdMesh.from_groups(groups)

    def loss(w, x):
        return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)

    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=0)
    def step(w, xs):
        grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule=scheduler.OneFOneB(2))
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)

    xs = np.ones((4, 32, 256), np.float32)
    return mpmd.resilient(lambda i, w: step(w, xs), [jnp.eye(256)] * 2, num_steps), step


def test_a_program_with_donation_has_the_same_results_and_a_ledger_of_all_its_steps(tmp_path, monkeypatch):
    plain, step = run_steps(13)
    (compiled,) = (c for found in step._cache.values() for c in found)
    assert compiled._executor._accounts is None
    monkeypatch.setenv(ledger.VARIABLE, str(tmp_path))
    noted, _ = run_steps(13)
    of = ledger.of_process()
    assert of is not None
    of._finish()
    for a, b in zip(plain, noted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    found, (process,) = seconds(tmp_path), ledgers.read(tmp_path)
    assert sum(found.values()) == pytest.approx(process.end - process.begun, abs=0.002 * len(process.lines))
    assert found[ledger.COMPUTE] > 0 and found[ledger.COMPILING] > 0
    steps = [line.steps for line in process.lines if line.steps]
    assert steps[0][0] == 1 and steps[-1][1] == 12  # the first call counts as compiling
    assert process.lines[-1].text == ledger.ENDED + ledger.AT_END


def test_calls_that_there_was_no_memory_to_measure_are_not_divided(tmp_path, monkeypatch):
    full = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000, "peak_bytes_in_use": 1000})
    monkeypatch.setattr(Accounts, "_devices", property(lambda _: [full], lambda *_: None), raising=False)
    monkeypatch.setenv(ledger.VARIABLE, str(tmp_path))
    run_steps(3)
    of = ledger.of_process()
    assert of is not None
    of._finish()
    found = seconds(tmp_path)
    assert found[ledger.UNDIVIDED] > 0 and ledger.COMPUTE not in found


def test_where_slow_processes_are_replaced_one_call_in_four_is_measured_and_no_file_is_needed(tmp_path, monkeypatch):
    of_job, samples, add = SimpleNamespace(has_pace=True, pace=None), [], pace.History.add
    monkeypatch.setattr(Accounts, "_activity", property(lambda _: of_job, lambda *_: None), raising=False)
    monkeypatch.setattr(pace.History, "add", lambda self, work, s: [samples.append(s), add(self, work, s)][1])
    monkeypatch.delenv(ledger.VARIABLE, raising=False)
    monkeypatch.setenv(pace.VARIABLE, "3")
    monkeypatch.chdir(tmp_path)
    run_steps(31)
    of = ledger.of_process()
    assert of is not None
    of._finish()
    assert len(samples) == 9 and statistics.median(samples) > 0  # of the calls 1, 5, 9, 10, 14, …, 30
    assert of_job.pace is not None and of_job.pace.usual_s == pytest.approx(statistics.median(samples[:-3]))
    assert of_job.pace.ratios == pytest.approx([s / of_job.pace.usual_s for s in samples[-3:]])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_ends_no_program(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(ledger.VARIABLE, str(tmp_path / "file"))
    assert ledger.of_process(lambda: 0) is None and ledger.of_process(lambda: 0) is None
    assert capsys.readouterr().err.count("jax-mpmd: no ledger is written to ") == 1


def test_a_program_that_raises_leaves_the_whole_of_its_life(tmp_path):
    program = (
        "import time\nfrom mpmd.observe import ledger\nledger.of_process(lambda: 3)\ntime.sleep(0.2)\nraise ValueError"
    )
    environment = {"PYTHONPATH": str(ROOT), ledger.VARIABLE: str(tmp_path), "JAX_PLATFORMS": "cpu"}
    begun = time.time()
    subprocess.run([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL)
    (process,) = ledgers.read(tmp_path)
    assert process.number == 3 and begun - 0.1 < process.begun and process.end < time.time() + 0.1
    assert process.end - process.begun > 0.5  # the import of JAX is in it


# --- the reader -----------------------------------------------------------------------------------


def test_a_line_that_was_not_finished_is_left_out(tmp_path):
    write_ledger(
        tmp_path, 0, "02.0000Z | 2.0000 s | 1 call | compute 2.0000 |", "03.0000Z | 1.0000 s | 1 call | compute 1.00"
    )
    job = ledgers.put_together(ledgers.read(tmp_path))
    assert job.total == 2.0 and job.goodput == 1.0


def test_after_a_restart_steps_done_before_are_repeated_and_the_time_between_is_recovery(tmp_path):
    first = [
        "01.0000Z | 1.0000 s |  | starting 1.0000 | loop: begins with step 0",
        "05.0000Z | 4.0000 s | steps 0 to 3, 4 calls | compute 3.0000, bubble 1.0000 |",
    ]
    write_ledger(tmp_path, 0, *first, "06.0000Z | 1.0000 s |  | lost 1.0000 | ended: rank 1 died: gone", "")
    write_ledger(tmp_path, 1, *first, "")
    again = [
        "12.0000Z | 2.0000 s |  | recovery 2.0000 | loop: goes on after step 1, from memory",
        "16.0000Z | 4.0000 s | steps 2 to 5, 4 calls | compute 3.0000, data and host 1.0000 |",
        "17.0000Z | 1.0000 s | step 6, 1 call | compute 1.0000 | loop: is over",
        "18.0000Z | 1.0000 s |  | other 1.0000 | ended: the program is at its end",
        "",
    ]
    for rank in range(2):
        write_ledger(tmp_path, rank, *again, attempt=1, begun="10.0000")
    job = ledgers.put_together(ledgers.read(tmp_path))
    assert {part: s for part, s in job.seconds.items() if s} == pytest.approx({
        "starting": 2, "compute": 2 * 3 + 2 * 1.5 + 2 * 1, "bubble": 2, "lost": 1, "data and host": 2 * 0.5,
        "repeated": 2 * 2, "recovery": (10 - 6) + (10 - 5) + 2 * 2, "other": 2,
    })  # fmt: skip
    assert job.total == pytest.approx(2 * 18) and job.goodput == pytest.approx(11 / 36)
    assert job.effective == pytest.approx(14 / 36)
    assert (job.num_ranks, job.num_spares, job.num_restarts) == (2, 0, 1)
    assert job.events == (
        "10:00:01 begins with step 0",
        "10:00:06 ended: rank 1 died: gone",
        "10:00:12 attempt 1: goes on after step 1, from memory, 7.0 s after the last step before; 2 steps again",
    )


def test_a_step_that_one_rank_finished_before_another_went_on_is_not_repeated(tmp_path):
    begins = "10.0000Z | 10.0000 s |  | starting 10.0000 | loop: begins with step 0"
    steps = "20.0000Z | 10.0000 s | steps 0 to 9, 10 calls | compute 10.0000 |"
    goes_on = "{}Z | 5.0000 s |  | recovery 5.0000 | loop: goes on after step {}, from memory"
    write_ledger(
        tmp_path, 0, begins, steps, goes_on.format("25.0000", 8),
        "26.0000Z | 1.0000 s | step 9, 1 call | compute 1.0 |",
        "27.0000Z | 1.0000 s | step 10, 1 call | compute 1.0 |", "",
    )  # fmt: skip
    write_ledger(
        tmp_path, 1, begins, steps, goes_on.format("26.5000", 8),
        "30.0000Z | 3.0000 s | steps 9 to 11, 3 calls | compute 3.0 |", "",
    )  # fmt: skip
    found = ledgers.put_together(ledgers.read(tmp_path)).seconds
    assert found["repeated"] == pytest.approx(2.0)  # step 9, in each of them


def test_a_spare_fills_the_place_of_a_rank_and_only_the_time_until_then_is_empty(tmp_path):
    write_ledger(tmp_path, 0, "10.0000Z | 10.0000 s | 5 calls | compute 10.0000 |", "")
    write_ledger(tmp_path, 1, "04.0000Z | 4.0000 s | 2 calls | compute 4.0000 |", "")
    spare = ["06.0000Z | 6.0000 s |  | idle spare 6.0000 | takes the place of rank 1"]
    write_ledger(tmp_path, 4, *spare, "10.0000Z | 4.0000 s |  | recovery 4.0000 |", "")  # 2 and 3 were lost at once
    write_ledger(tmp_path, 5, "10.0000Z | 3.0000 s |  | starting 3.0000 |", "", begun="07.0000")  # waits where 1 was
    job = ledgers.put_together(ledgers.read(tmp_path))
    assert {part: s for part, s in job.seconds.items() if s} == {
        "compute": 14, "idle spare": 6, "recovery": 4 + 2, "starting": 3
    }  # fmt: skip
    assert (job.num_ranks, job.num_spares) == (2, 1)
    assert job.events == ("10:00:06 spare 4 takes the place of rank 1",)


def test_a_second_loop_repeats_nothing_of_the_first(tmp_path):
    loop = ["| loop: begins with step 0", "| loop: is over"]
    texts = []
    for k in range(2):
        texts += [f"0{3 * k + 1}.0000Z | 1.0000 s |  | other 1.0000 {loop[0]}"]
        texts += [f"0{3 * k + 3}.0000Z | 2.0000 s | steps 0 to 1, 2 calls | compute 2.0000 {loop[1]}"]
    write_ledger(tmp_path, 0, *texts, "")
    job = ledgers.put_together(ledgers.read(tmp_path))
    assert job.seconds["repeated"] == 0 and job.seconds["compute"] == 4


def test_the_command_prints_the_table_and_json(tmp_path, capsys):
    write_ledger(tmp_path, 0, "04.0000Z | 4.0000 s | 2 calls | compute 1.0000, bubble 3.0000 |", "")
    assert main(["goodput", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "1 rank; 2026-01-01 10:00:00 to 10:00:04 UTC\n"
        "  seconds   share  of all processes\n"
        "      1.0   25.0%  compute: devices ran programs\n"
        "      3.0   75.0%  bubble: they waited for other groups, or for values on their way from other processes\n"
        "      4.0  100.0%  in all\n"
        "goodput: 25.0% of the time devices computed steps that count\n"
        "effective training time: 100.0% went to steps that count, with all waits in them\n"
    )
    assert main(["goodput", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"] == 0.25 and found["seconds"]["bubble"] == 3.0


def test_folders_without_ledgers_and_other_files_are_errors_of_one_line(tmp_path, capsys):
    for arguments, why in [
        ([], "name the folder of a job's ledgers, or --simulate."),
        ([tmp_path / "none"], f"{tmp_path}/none is no folder."),
        (
            [tmp_path],
            f"{tmp_path} holds no rank-N.ledger. A job writes them into the folder of the launcher's --log-dir or of "
            + ledger.VARIABLE
            + ".",
        ),
    ]:
        assert main(["goodput", *map(str, arguments)]) == 2
        assert capsys.readouterr().err == f"python -m mpmd goodput: {why}\n"
    (tmp_path / "rank-0.ledger").write_text("something else\n")
    assert main(["goodput", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"python -m mpmd goodput: {tmp_path}/rank-0.ledger is no ledger of this library: line 1 is 'something else'\n"
    )
