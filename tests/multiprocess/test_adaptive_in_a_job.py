"""Groups of several processes that run tasks out of turn."""

import jobs
import pytest
from samples import slow_first


@pytest.mark.parametrize("name", slow_first("zb-v", "gpipe", "interleaved-1f1b"))
def test_two_processes_run_tasks_out_of_turn_with_the_bits_of_the_plan(name):
    with jobs.Job("adaptive.py", name, processes=2, hang_timeout_s=60) as job:
        results = [rank.result for rank in job.wait(limit_s=240)]
    assert results[0]["states"] == results[1]["states"]
    fixed, adaptive = results[0]["states"]
    assert fixed == adaptive
    assert any(r["out of turn"] for r in results)


@pytest.mark.slow
def test_groups_of_several_devices_in_a_job_keep_their_order_and_say_so():
    with jobs.Job("adaptive.py", "gpipe", processes=2, devices=2, hang_timeout_s=60) as job:
        results = [rank.result for rank in job.wait(limit_s=240)]
    for result in results:
        assert result["states"][0] == result["states"][1] and not result["out of turn"]
        assert result["told"] == [
            "adaptive: each group keeps its planned order, because in a job its groups have several devices"
        ]
