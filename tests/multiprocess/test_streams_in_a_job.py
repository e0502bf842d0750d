"""Streams between real processes: whole versions, no byte too many, and no hang when one of them dies."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from jobs import PROGRAMS, VICTIM_STATUS, Job, results
from ports import free_port
from samples import slow_first


@pytest.mark.parametrize(
    ("processes", "devices", "seed", "trials"),
    [(2, 2, 0, 12), *[pytest.param(*job, marks=pytest.mark.slow) for job in [(4, 2, 1, 30)]],
     *[pytest.param(4, 2, seed, 100, marks=pytest.mark.exhaustive) for seed in range(2, 8)]],
)  # fmt: skip
def test_random_layouts_arrive_with_the_bytes_that_the_plan_says(processes, devices, seed, trials):
    assert results("streams.py", "layouts", seed, trials, processes=processes, devices=devices) == ["same"] * processes


@pytest.mark.parametrize(("senders", "processes"), slow_first((2, 4), (2, 3)))
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


@pytest.mark.parametrize("victim", ["send", "receive"])
@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.exhaustive)]
)
def test_kills_at_random_moments_mix_no_version_and_the_other_side_goes_on(victim, kills, tmp_path):
    port, random = free_port(), np.random.default_rng(kills)
    other = "receive" if victim == "send" else "send"
    with Job("logged_versions.py", other, port, tmp_path, 0, processes=1, devices=2) as survivor:
        for run in range(1, kills + 2):
            processes = 1 + int(random.integers(2)) if victim == "send" else 1
            with Job("logged_versions.py", victim, port, tmp_path, run, processes=processes, devices=2) as job:
                if victim == "send":
                    survivor.wait_for(f"got {run} ", 120)
                else:
                    job.wait_for("got 0 ", 120)
                if run <= kills:  # the last one shows that all is well
                    time.sleep(0.5 * random.random())
                    rank = int(random.integers(processes))
                    job.signal(rank, signal.SIGKILL)
                    assert job.wait(60)[rank].status == -signal.SIGKILL, job.report()
                assert survivor.running() == [0], survivor.report()
        if victim == "send":
            lost = [line.split()[1] for line in survivor.output(0).splitlines() if line.startswith("lost ")]
            print(f"{sum(nbytes != '0:' for nbytes in lost)} of {kills} publishers were lost between two parts")
        else:
            status = Path(f"/proc/{survivor.ranks[0].pid}/status").read_text()
            resident = int(status.partition("VmRSS:")[2].split()[0]) << 10
            assert resident < 3 << 30, f"{resident:,} bytes: what killed subscribers held was not released"


@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.exhaustive)]
)
def test_a_reader_without_jax_sees_whole_versions_while_writers_are_killed(kills, tmp_path):
    random, place = np.random.default_rng(kills), Path(tempfile.mkdtemp(prefix="mpmd-test-", dir="/dev/shm"))
    said = tmp_path / "reader"
    with said.open("wb") as out:
        command = [sys.executable, str(PROGRAMS / "folder_reader.py"), str(place)]
        reader = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def values() -> list[int]:
        assert reader.poll() is None, said.read_text()
        return [int(line.split()[2]) for line in said.read_text().split("\n")[:-1]]

    try:
        for run in range(1, kills + 2):
            with Job("folder_writer.py", place, 1000 * run, processes=2) as trainer:
                trainer.wait_for("wrote", 120)
                _until(lambda run=run: sum(value >= 1000 * run for value in values()) > 2)
                if run <= kills:
                    time.sleep(0.3 * random.random())
                    trainer.signal(int(random.integers(2)), signal.SIGKILL)
        left = sorted(path.name for path in place.iterdir())
        assert len(left) < 8, left  # of killed writers nothing is left but what the last one was at
        print(f"{len(values())} versions read")
    finally:
        reader.kill()
        reader.wait()
        shutil.rmtree(place)


def _until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
