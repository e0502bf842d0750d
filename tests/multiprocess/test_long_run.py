"""A job may run for weeks: what it holds after many steps is what it held after few."""

import jobs
import pytest


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
