"""What a fast stage sends to a slow one, without a backward pass that would hold it up."""

import jobs
import pytest

WIDTH = 1 << 20  # 4 MiB a value


def _values_held(what: str, steps: int, num_microbatches: int, seconds: float) -> list[float]:
    """By how many values the memory of each process has grown at most."""
    arguments = (what, steps, num_microbatches, seconds, WIDTH)
    with jobs.Job("ahead.py", *arguments, processes=2, hang_timeout_s=60) as job:
        ended = job.wait(limit_s=120)
    assert [e.status for e in ended] == [0, 0], ended[0].err
    return [e.result["values"] for e in ended]


@pytest.mark.slow
def test_no_stage_runs_far_ahead_of_a_slow_one_in_a_loop_that_only_goes_forward():
    assert max(_values_held("loop", 4, 32, 0.03)) < 40  # of 128


@pytest.mark.slow
def test_no_group_runs_far_ahead_of_a_slow_one_in_steps_without_a_loop():
    assert max(_values_held("chain", 200, 1, 0.02)) < 70  # of 200


@pytest.mark.slow
def test_all_processes_of_a_group_count_alike_also_those_that_send_nothing():
    """Else one waits for a report that the receiver has made of another turn, and reports that nobody reads pile up."""
    with jobs.Job("ahead.py", "wide", 30, 2, 0, WIDTH // 4, processes=3, hang_timeout_s=30) as job:
        ended = job.wait(limit_s=120)
    assert [e.status for e in ended] == [0, 0, 0], ended[0].err
    assert max(e.result["keys"] for e in ended) < 20
