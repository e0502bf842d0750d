"""The wires between processes: which one is taken, and that steps and reshards do not depend on it."""

import json
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jobs
import pytest

from mpmd.job import joining, wires


@pytest.mark.parametrize(
    ("told", "shared"),
    [
        ([["a", ["0"]], ["a", ["1"]], ["b", ["0"]]], False),
        ([["a", ["0", "1"]], ["a", ["1", "2"]]], True),
        ([["a", ["GPU-1"]], ["a", ["GPU-1"]]], True),
    ],
    ids=["own", "overlapping", "one"],
)
def test_processes_that_share_a_gpu_are_told_apart(told, shared):
    assert wires.are_shared(told) == shared


@pytest.mark.parametrize(("visible", "gpu"), [(None, "0"), ("", "0"), ("3,5", "3"), ("GPU-7", "GPU-7")])
def test_a_process_tells_its_gpus_by_their_names_on_the_host(monkeypatch, visible, gpu):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    host, gpus = json.loads(wires.hardware())
    assert host
    assert gpu in gpus


@pytest.mark.parametrize(
    ("told", "wire"),
    [
        (['["host", ["0"]]', '["host", ["1"]]'], wires.PutWire),
        (['["host", ["0"]]', '["host", ["0"]]'], wires.PullWire),
        (['["host", ["0"]]', ""], wires.PullWire),
    ],
    ids=["own", "shared", "one cannot"],
)
def test_gpus_of_their_own_are_reached_by_device_put(monkeypatch, told, wire):
    class Job:
        """As much of a job as the choice looks at."""

        num_ranks = 2

        def find(self, key, what, rank):
            assert (key, what) == (f"mpmd/devices/{rank}", "finding the devices")
            return told[rank]

    monkeypatch.setattr(wires.compat, "has_cross_host_put", lambda: True)
    job: Any = Job()
    assert wires.wire_class(job) is wire


@pytest.mark.parametrize(
    ("version", "is_told"), [("2.30.7", True), ("2.31.2", False), ("2.4.1+x", True), ("3.0", False)]
)
def test_nccl_that_may_hang_is_warned_of(monkeypatch, version, is_told):
    monkeypatch.setattr(wires.metadata, "version", {"nvidia-nccl-cu12": version}.__getitem__)
    monkeypatch.setattr(wires.metadata, "PackageNotFoundError", KeyError)
    with warnings.catch_warnings(record=True) as warned:
        wires._warn_of_old_nccl()
    assert [f"nvidia-nccl-cu12 {version} is installed" in str(w.message) for w in warned] == [True] * is_told


@pytest.mark.parametrize(
    ("devices", "given", "during"),
    [(4, {}, "8"), (2, {}, None), (4, {"NPROC": "3"}, None), (4, {"PJRT_NPROC": "2"}, "2")],
)
def test_collectives_leave_a_thread_for_transfers(monkeypatch, devices, given, during):
    """Without it, a value that another process pulls waits for collectives, which may wait for that process."""
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining.compat, "num_cpu_devices", lambda: devices)
    monkeypatch.setattr(joining.os, "sched_getaffinity", lambda pid: set(range(4)))
    with joining._threads_beside_collectives():
        assert os.environ.get("PJRT_NPROC") == during
    assert os.environ.get("PJRT_NPROC") == given.get("PJRT_NPROC")


def test_nothing_is_sent_after_something_was_left_on_the_way():
    """By its order alone, what comes next would be taken for the rest."""
    job: Any = None
    wire = wires.PutWire(job)
    wire.interrupt()
    with pytest.raises(RuntimeError, match=r"ended on the way .* Restart the job"):
        wire.send(0, jnp.zeros(1), jax.devices()[0])
    with pytest.raises(RuntimeError, match=r"Restart the job"):
        wire.receive(0, (1,), jnp.float32, jax.devices()[0], jax.devices()[0])


CASES = ("interleaved", "turned")  # several groups in a process, and one over two of them


@pytest.fixture(scope="module")
def alone():
    """What the cases give in one process of four devices."""
    (found,) = jobs.results("training.py", *CASES, processes=1, devices=4, external=False)
    for name in CASES:
        del found[name]["reference"]
    assert found.pop("uncommitted") == [0, 1, 2, 3]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "processes", "case"), [("put", 2, CASES[0]), ("meeting", 4, CASES[1])])
def test_a_step_gives_the_same_bits_over_any_wire(alone, wire, processes, case):
    options = {"devices": 4 // processes, "wire": wire, "hang_timeout_s": 60}
    for of_rank in jobs.results("training.py", case, processes=processes, **options):
        assert of_rank["uncommitted"] == [0, 1, 2, 3] and of_rank[case] == alone[case]


@pytest.mark.slow
def test_a_timed_step_of_groups_that_share_devices_keeps_the_order():
    options = {"devices": 2, "wire": "put", "hang_timeout_s": 60}
    for found in jobs.results("training.py", "shared", "timed:shared", processes=2, **options):
        assert found["timed:shared"] == found["shared"]


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "processes", "devices"), [("put", 2, 4), ("meeting", 4, 2)])
def test_reshards_go_over_any_wire(wire, processes, devices):
    options = {"processes": processes, "devices": devices, "wire": wire, "hang_timeout_s": 60}
    for of_rank in jobs.results("reshards.py", 5, 15, **options):
        assert of_rank["again"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_values_that_cross_each_other_never_wait_in_a_circle():
    found = jobs.results("moving.py", 2, processes=4, devices=2, wire="meeting", hang_timeout_s=60)
    assert found == [64] * 4
