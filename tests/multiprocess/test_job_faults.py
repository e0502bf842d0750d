"""When one rank goes wrong, the others end in time, and say who it was and what it did."""

import re
import signal
import socket
import time

import jobs
import pytest

from mpmd.job.verdict import SILENT_S

HANG_TIMEOUT_S = 4
# Seconds where a busy machine gives them; well below the 100 s after which JAX itself would end the processes.
DEATH_LIMIT_S = 50
STALL_LIMIT_S = HANG_TIMEOUT_S + 45
START_LIMIT_S = 120
HOST = re.escape(socket.gethostname())
WHERE = r"\((after step \d+|between steps|step \d+, in .*|.*)\)"

# fault: (what the verdict says of the guilty rank, its exit status)
DEATHS = {
    "kill": (rf"died: process PID on {HOST} is gone {WHERE}", -signal.SIGKILL),
    "os_exit": (rf"died: process PID on {HOST} is gone {WHERE}", 7),
    "segfault": (rf"died: process PID on {HOST} is gone {WHERE}", -signal.SIGSEGV),
    "exception": (r"ValueError: a bad batch \(after step 4\)", 1),
    "memory": (r"MemoryError: no room for the batch \(after step 4\)", 1),
    "exit0": (r"came to the end of its program where ranks \d and \d called .*, in step 5", 1),
    "exit3": ("exit status 3", 3),
    "exit_text": ("exit status 1", 1),
    "raise_exit": (r"came to the end of its program where ranks \d and \d called .*, in step 5", 1),
    "raise": (r"ValueError: a bad callback in the host callback on_host \(.*/faults\.py:\d+\) " + WHERE, 1),
}
CALLBACK = r"is in the host callback on_host \(.*/faults\.py:\d+\) for \d+ s " + WHERE
STALLS = {
    "stop": rf"process PID on {HOST} is stopped for \d+ s {WHERE}(; rank \d waits for .*)?",
    "absent": r"did not come to the next step for \d+ s \(after step 4, at \S+ in go_wrong\); rank \d waits for .*",
    "lost": rf"sent the transfer of F\d\.0\[0\] from group \d to \d, which did not reach rank \d for \d+ s {WHERE}",
    "hold_for_ever": rf"has held Python's lock for \d+ s, in C code {WHERE}; rank 2 waits for the transfer of .*",
    "callback": CALLBACK + r"(; rank \d waits for .*)?",
    "collective": CALLBACK + r"(; rank \d waits for .*)?",
}


def by_length(cases):
    """A few of the cases are quick enough to run always; others are like one of these, or like a slow one."""
    always = {("kill", 1), ("absent", 1)}
    like_others = {("kill", 0), ("os_exit", 1), ("memory", 1), ("exit_text", 1), ("raise_exit", 2)}
    like_others |= {("stop", 0), ("absent", 0), ("lost", 0), ("callback", 2)}

    def marks(case):
        return () if case in always else pytest.mark.exhaustive if case in like_others else pytest.mark.slow

    return [pytest.param(*case, marks=marks(case)) for case in cases]


def check_verdicts(ended, guilty: int, pid: int, pattern: str) -> None:
    """Every rank that could speak says the same of the same rank, over a table with a row for each."""
    line = rf"jax-mpmd: rank {guilty}: {pattern.replace('PID', str(pid))}"
    verdicts = {e.rank: e.verdict for e in ended if e.status == jobs.VICTIM_STATUS}
    assert verdicts
    for rank, verdict in verdicts.items():
        assert verdict is not None, f"rank {rank} ended without a word"
        assert re.fullmatch(line, verdict), verdict
    assert len(set(verdicts.values())) == 1, verdicts
    assert sum(e.table != [] for e in ended if e.rank in verdicts) == 1  # the first that said so
    for e in ended:
        if e.rank in verdicts and e.table:
            head, *rows = e.table
            assert head.split() == ["rank", "host", "pid", "step", "at", "waits", "for", "from", "seconds"]
            by_rank = {int(row.split()[0]): row.split() for row in rows}
            assert by_rank.keys() == {*range(len(ended))}
            assert all(by_rank[other.rank][2] == str(other.pid) for other in ended)


@pytest.mark.parametrize(
    ("fault", "guilty"),
    by_length([("kill", 0), ("kill", 1), ("os_exit", 1), ("segfault", 2), ("exception", 0), ("memory", 1),
              ("exit0", 1), ("exit3", 2), ("exit_text", 1), ("raise_exit", 2), ("raise", 1)]),
)  # fmt: skip
def test_a_death_ends_all(fault, guilty):
    pattern, status = DEATHS[fault]
    with jobs.Job("faults.py", fault, guilty, processes=3, hang_timeout_s=300) as job:
        job.wait_for(f"about to {fault}", START_LIMIT_S, (guilty,))
        start = time.monotonic()
        ended = job.wait(DEATH_LIMIT_S + 10)
        assert max(e.ended_at for e in ended) - start < DEATH_LIMIT_S
        assert [e.status for e in ended] == [status if e.rank == guilty else jobs.VICTIM_STATUS for e in ended]
        check_verdicts(ended, guilty, ended[guilty].pid, pattern)


@pytest.mark.parametrize(
    ("fault", "guilty"),
    by_length([("stop", 0), ("stop", 1), ("absent", 0), ("absent", 1), ("lost", 0), ("lost", 1),
              ("callback", 2), ("collective", 1), ("hold_for_ever", 1)]),
)  # fmt: skip
def test_a_stall_ends_all(fault, guilty):
    processes = 4 if fault == "collective" else 3
    with jobs.Job("faults.py", fault, guilty, processes=processes, hang_timeout_s=HANG_TIMEOUT_S) as job:
        job.wait_for(f"about to {fault}", START_LIMIT_S, (guilty,))
        start = time.monotonic()
        stays = fault in ("stop", "hold_for_ever")
        victims = job.wait(STALL_LIMIT_S + 10, but=guilty if stays else None)
        assert max(e.ended_at for e in victims) - start < STALL_LIMIT_S
        if stays:
            job.signal(guilty, signal.SIGKILL)
        ended = job.wait(5)
        assert [e.status for e in victims] == [jobs.VICTIM_STATUS] * len(victims)
        check_verdicts(ended, guilty, ended[guilty].pid, STALLS[fault])
        if fault == "hold_for_ever":
            assert re.search(r"at \S*/faults\.py:\d+ in go_wrong\)", victims[0].verdict)
        elif fault != "stop":
            stacks = ended[guilty].err
            assert f"Rank {guilty}, MainThread (most recent call last):" in stacks
            where = {"absent": "in go_wrong", "lost": "in main"}.get(fault, "in on_host")
            assert re.search(rf'faults\.py", line \d+,? {where}$', stacks, re.MULTILINE), stacks


@pytest.mark.slow
def test_the_death_of_a_silent_process_of_another_machine_ends_all():
    """Its kernel answers as long as it lives; the limit is far."""
    with jobs.Job("faults.py", "hold_for_ever", 1, processes=3, hang_timeout_s=300, apart=True) as job:
        job.wait_for("about to hold_for_ever", START_LIMIT_S, (1,))
        time.sleep(SILENT_S + 5)
        assert job.running() == [0, 1, 2]
        start = job.signal(1, signal.SIGKILL)
        ended = job.wait(DEATH_LIMIT_S)
        assert max(e.ended_at for e in ended) - start < 10
        line = rf"jax-mpmd: rank 1: no sign of life from {HOST} for \d+ s: process 1 died, or its machine .*"
        assert all(re.fullmatch(line, ended[rank].verdict) for rank in (0, 2))


@pytest.mark.parametrize(
    ("fault", "guilty"),
    [
        pytest.param("exception", 0, marks=pytest.mark.slow),
        pytest.param("exception", 2, marks=pytest.mark.exhaustive),
        pytest.param("kill", 1, marks=pytest.mark.slow),
        pytest.param("exit0", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_verdicts_reach_all_where_rank_0_serves(fault, guilty):
    """The rank that serves the key-value store leaves last, by the watchdog: JAX ends the others when it goes."""
    pattern, status = DEATHS[fault]
    with jobs.Job("faults.py", fault, guilty, processes=3, external=False, hang_timeout_s=300) as job:
        job.wait_for(f"about to {fault}", START_LIMIT_S, (guilty,))
        ended = job.wait(DEATH_LIMIT_S)
        assert [e.status for e in ended] == [status if e.rank == guilty else jobs.VICTIM_STATUS for e in ended]
        check_verdicts(ended, guilty, ended[guilty].pid, pattern)
    assert jobs.is_free(job.port)


@pytest.mark.slow
@pytest.mark.parametrize("external", [True, False], ids=["service", "rank-0"])
def test_the_death_of_the_coordinator_ends_all(external):
    """JAX ends the processes from C++ then, without a word; the launcher has to speak."""
    with jobs.Job("faults.py", "absent", 0, processes=3, external=external, hang_timeout_s=300) as job:
        job.wait_for("step 4", START_LIMIT_S)
        start = job.kill_service() if external else job.signal(0, signal.SIGKILL)
        ended = job.wait(DEATH_LIMIT_S + 10)
        assert max(e.ended_at for e in ended) - start < DEATH_LIMIT_S
        assert all(e.status != 0 for e in ended)
    assert jobs.is_free(job.port)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "difference"),
    [
        ("shape", ("arguments", "xs: float32[4,2,4] in groups [0]", "xs: float32[4,4,4] in groups [0]")),
        ("schedule", ("loops", "OneFOneB(num_stages=3), 4 microbatches", "GPipe(num_stages=3), 4 microbatches")),
    ],
)
def test_ranks_with_another_program_are_told_so_before_the_first_step(fault, difference):
    what, of_0, of_1 = difference
    with jobs.Job("faults.py", fault, 1, processes=3, hang_timeout_s=300) as job:
        ended = job.wait(START_LIMIT_S)
        for e in ended:
            assert e.status == 1
            assert e.out.splitlines()[-1] in ("step 0", "about to " + fault)
            assert (
                "ScheduleError: the processes are about to run different programs:"
                f" {what} of rank 1 differ from those of rank 0.\n  rank 0: {of_0}\n  rank 1: {of_1}\n"
                "  Every process must call the same step with arguments of the same shapes, in the same order"
                " (a different seed, data shape, option or code version makes another program).\n"
            ) in e.err


SLOW_BUT_NO_HANG = {
    "slow": ("slow", 2.5 * HANG_TIMEOUT_S, {"hang_timeout_s": HANG_TIMEOUT_S}),
    "long-trace": ("long_trace", 3 * HANG_TIMEOUT_S, {"hang_timeout_s": HANG_TIMEOUT_S}),
}
MORE_OF_THESE = {
    "idle": ("idle", 2 * HANG_TIMEOUT_S, {"hang_timeout_s": HANG_TIMEOUT_S}),
    "late": ("late", 0.6 * HANG_TIMEOUT_S, {"hang_timeout_s": HANG_TIMEOUT_S}),
    "held": ("hold", SILENT_S + 5, {"hang_timeout_s": 300}),
    "held-on-another-machine": ("hold", SILENT_S + 5, {"hang_timeout_s": 300, "apart": True}),
    "no-limit-0": ("late", 10, {"hang_timeout_s": 0}),
    "no-limit-None": ("late", 10, {"timeout": "None"}),
}


@pytest.mark.parametrize(
    ("fault", "seconds", "options"),
    [
        pytest.param(*case, id=name, marks=mark)
        for mark, cases in ((pytest.mark.slow, SLOW_BUT_NO_HANG), (pytest.mark.exhaustive, MORE_OF_THESE))
        for name, case in cases.items()
    ],
)
def test_what_is_slow_is_no_hang(fault, seconds, options):
    timeout = options.get("timeout", "300")
    with jobs.Job(
        "faults.py", fault, 1, "--seconds", seconds, "--timeout", timeout, processes=3,
        hang_timeout_s=options.get("hang_timeout_s"), apart=options.get("apart", False),
    ) as job:  # fmt: skip
        ended = job.wait(START_LIMIT_S)
        assert [e.status for e in ended] == [0, 0, 0], job.report()
        assert len({e.out.splitlines()[-1] for e in ended}) == 1
        assert ended[0].out.splitlines()[-1].startswith("done 0.")
        assert all(e.verdict is None for e in ended)


@pytest.mark.slow
def test_a_rank_that_waits_for_the_store_at_its_end_ends_well():
    """A thread that came back from C++ to a Python that is gone would abort the process."""
    with jobs.Job("faults.py", "late_store", 1, "--seconds", 3, processes=2) as job:
        ended = job.wait(START_LIMIT_S)
        assert [e.status for e in ended] == [0, 0], job.report()
        assert [e.err for e in ended] == ["", ""]
