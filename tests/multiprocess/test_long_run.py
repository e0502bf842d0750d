"""A job may run for weeks: what it holds after many steps is what it held after few."""

import jobs
import pytest

from mpmd.goodput import ledgers
from mpmd.observe import ledger


@pytest.mark.slow
def test_500_steps_need_no_more_than_100():
    for rank, found in enumerate(jobs.results("long_run.py", 500, 100, processes=4, limit_s=200)):
        after_100, after_500 = found[0], found[-1]
        what = f"rank {rank}: {after_100} after 100 steps, {after_500} after 500"
        for name in ("threads", "descriptors", "sockets", "keys"):
            assert after_500[name] <= after_100[name], what
        # What is on its way is not counted alike every time; memory has room for what the watchdog remembers.
        assert after_500["arrays"] <= after_100["arrays"] + 8, what
        assert after_500["kilobytes"] <= after_100["kilobytes"] + 2000, what


@pytest.mark.slow
def test_a_process_that_makes_no_result_of_a_step_accounts_for_its_work(tmp_path):
    with jobs.Job("frozen.py", tmp_path, 40, processes=2) as job:
        ended = job.wait(limit_s=120)
    assert [e.status for e in ended] == [0, 0], job.report()
    first = next(process for process in ledgers.read(tmp_path) if process.number == 0)
    seconds = {part: sum(line.parts.get(part, 0.0) for line in first.lines) for part in ledger.DIVIDED}
    assert seconds[ledger.COMPUTE] > seconds[ledger.HOST]
