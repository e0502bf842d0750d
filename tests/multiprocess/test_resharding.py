"""Reshards between real processes: the same data, no byte too many, and within the threshold."""

import pytest
from jobs import Job
from samples import slow_first

# The ones of more devices or processes in slow tests.
_JOBS = slow_first((2, 2, 0), (4, 1, 1), (2, 4, 2), (4, 2, 3))


@pytest.mark.parametrize(("processes", "devices", "seed"), _JOBS)
def test_random_layouts_there_and_back_move_what_the_plan_says(processes, devices, seed):
    with Job("reshards.py", seed, 25, processes=processes, devices=devices) as job:
        ended = job.wait(limit_s=300)
    assert [e.status for e in ended] == [0] * processes, "\n".join(e.err for e in ended)
    for rank in ended:
        first, *_ = rank.result["message"].splitlines()
        assert first == "the processes are about to move different arrays; array 0 differs:"
        assert rank.result["again"] == [0, 1, 2, 3]  # the next reshard is not disturbed
