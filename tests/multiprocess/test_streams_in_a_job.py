"""Streams between real processes: whole versions, no byte too many, and no hang when one of them dies."""

import signal
import time

import numpy as np
import pytest
from jobs import VICTIM_STATUS, Job, results
from ports import free_port


@pytest.mark.parametrize(
    ("processes", "devices", "seed", "trials"),
    [(2, 2, 0, 12), *[pytest.param(*job, marks=pytest.mark.slow) for job in [(4, 2, 1, 30)]],
     *[pytest.param(4, 2, seed, 100, marks=pytest.mark.exhaustive) for seed in range(2, 8)]],
)  # fmt: skip
def test_random_layouts_arrive_with_the_bytes_that_the_plan_says(processes, devices, seed, trials):
    assert results("streams.py", "layouts", seed, trials, processes=processes, devices=devices) == ["same"] * processes


@pytest.mark.parametrize(("senders", "processes"), [(2, 3), pytest.param(2, 4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_slow_receiver_gets_the_last_of_many_versions_whole(senders, processes):
    told = results("streams.py", "flow", senders, 60, processes=processes, devices=2)
    receivers = told[senders:]
    assert all(r["got"][-1] == 59 and r["got"] == receivers[0]["got"] for r in receivers)
    assert len(receivers[0]["got"]) < 60  # it skips
    per_version = sum(r["received"] for r in receivers) / len(receivers[0]["got"])
    size = 64 * 32 * 2
    assert per_version == 3 * size + len(receivers) * size  # three tensors in shards, one whole on each


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_when_one_is_killed_the_others_end_with_its_verdict(victim):
    with Job("streams.py", "forever", 2, processes=3, devices=2, hang_timeout_s=30) as job:
        job.wait_for("flows", 120)
        job.signal(victim, signal.SIGKILL)
        ended = job.wait(60, but=victim)
        assert [e.status for e in ended] == [VICTIM_STATUS] * 2, job.report()
        assert all(e.verdict and e.verdict.startswith(f"jax-mpmd: rank {victim}: died") for e in ended), job.report()


@pytest.mark.slow
def test_mistakes_are_told_in_one_sentence():
    shapes = "tied: its shape is (64, 16), but the target has (64, 32)"
    other = (
        "stream: rank 0 and rank 1 were given other shardings or names; all that send or receive must call it alike."
    )
    assert results("streams.py", "mistakes", 1, processes=2, devices=2) == [
        [
            "receive: this process has no target; rank 1 may receive.",
            "stream N: version 3 after version 3; each must be larger.",
            other,
        ],
        [
            "send: this process has no source; rank 0 may send.",
            f"stream N: what is sent does not fit the targets:\n  {shapes}",
            other,
        ],
    ]


@pytest.mark.slow
def test_jobs_that_publish_and_subscribe_come_and_go():
    port = str(free_port())
    with Job("publishing.py", "send", port, 64, processes=2) as trainer:
        trainer.wait_for("sends", 120)
        with Job("publishing.py", "receive", port, 64, processes=1) as sampler:
            sampler.wait_for("got", 120)
            sampler.signal(0, signal.SIGKILL)
        with Job("publishing.py", "receive", port, 64, processes=2, devices=2) as sampler:
            sampler.wait_for("got", 120)
            assert trainer.running() == [0, 1]
            trainer.signal(1, signal.SIGKILL)
            assert trainer.wait(60, but=1)[0].status == VICTIM_STATUS
            sampler.wait_for("lost: ", 120)
            before = [sampler.output(rank).count("got") for rank in range(2)]
            with Job("publishing.py", "send", port, 64, processes=1, devices=4):  # again, of another size
                _until(lambda: all(sampler.output(r).count("got") > before[r] + 2 for r in range(2)))
            assert sampler.running() == [0, 1], sampler.report()
            lines = [line for line in sampler.output(0).splitlines() if line.startswith("lost")]
            whys = ("the connection has ended", "Connection refused")
            assert lines[0] in [f"lost: subscribe: 127.0.0.1:{port}: {why}" for why in whys]


@pytest.mark.exhaustive
def test_random_kills_of_subscribers_and_publishers_mix_no_version():
    port, random = str(free_port()), np.random.default_rng(0)
    with Job("publishing.py", "receive", port, 65536, processes=1) as sampler:
        for _ in range(20):
            with Job("publishing.py", "send", port, 65536, processes=1, devices=2) as trainer:
                trainer.wait_for("sends", 120)
                got = sampler.output(0).count("got")
                _until(lambda got=got: sampler.output(0).count("got") > got)
                with Job("publishing.py", "receive", port, 65536, processes=1) as other:
                    other.wait_for("got", 120)
                    time.sleep(random.random())
                    other.signal(0, signal.SIGKILL)
                trainer.signal(0, signal.SIGKILL)
        assert sampler.running() == [0], sampler.report()


def _until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
