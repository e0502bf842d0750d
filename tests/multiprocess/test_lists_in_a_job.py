"""Lists of microbatches of several shapes in jobs."""

import jobs
import pytest
from samples import slow_first


@pytest.mark.slow
def test_two_processes_train_on_lists_as_one_process_does():
    with jobs.Job("lists.py", "same", processes=2, hang_timeout_s=60) as job:
        first, second = (rank.result for rank in job.wait(limit_s=240))
    assert first == second
    with jobs.Job("lists.py", "same", processes=1, devices=2, hang_timeout_s=60) as job:
        (alone,) = job.wait(limit_s=240)
    assert alone.result == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("other", "gave microbatches[0]['x'] as float32[4,5,6], rank 0 as float32[4,4,6]"),
        ("shorter", "gave microbatches[2]['x'] not at all, rank 0 as float32[4,5,6]"),
    ],
)
def test_a_rank_with_another_list_is_told(what, told):
    with jobs.Job("lists.py", what, processes=2, hang_timeout_s=60) as job:
        for rank in job.wait(limit_s=240):
            assert rank.status != 0
            assert f"rank 1: {told} in step 6 (step)" in rank.err


@pytest.mark.parametrize(("groups", "devices"), slow_first(("spread", 2), ("one", 1)))
def test_groups_that_extend_over_two_processes_train_on_lists(groups, devices):
    with jobs.Job("lists.py", groups, processes=2, devices=devices, hang_timeout_s=60) as job:
        first, second = (rank.result for rank in job.wait(limit_s=240))
    assert first == second
    with jobs.Job("lists.py", groups, processes=1, devices=2 * devices, hang_timeout_s=60) as job:
        (alone,) = job.wait(limit_s=240)
    assert alone.result == first
