"""Lists of microbatches of several shapes in jobs."""

import jobs
import pytest


@pytest.mark.slow
def test_two_processes_train_on_lists_as_one_process_does():
    with jobs.Job("lists.py", "same", processes=2, hang_timeout_s=60) as job:
        first, second = (rank.result for rank in job.wait(limit_s=240))
    assert first == second
    with jobs.Job("lists.py", "same", processes=1, devices=2, hang_timeout_s=60) as job:
        (alone,) = job.wait(limit_s=240)
    assert alone.result == first


@pytest.mark.slow
def test_a_rank_with_another_order_of_shapes_is_told():
    with jobs.Job("lists.py", "other", processes=2, hang_timeout_s=60) as job:
        for rank in job.wait(limit_s=240):
            assert rank.status != 0
            assert (
                "rank 1: gave microbatches[0]['x'] as float32[4,5,6], rank 0 as float32[4,4,6] in step 6 (step)"
                in rank.err
            )


@pytest.mark.slow
def test_groups_of_two_processes_each_train_on_lists():
    with jobs.Job("lists.py", "spread", processes=2, devices=2, hang_timeout_s=60) as job:
        first, second = (rank.result for rank in job.wait(limit_s=240))
    assert first == second
    with jobs.Job("lists.py", "spread", processes=1, devices=4, hang_timeout_s=60) as job:
        (alone,) = job.wait(limit_s=240)
    assert alone.result == first
