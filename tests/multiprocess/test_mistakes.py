"""Mistakes that would otherwise pass without a word."""

import jobs
import pytest


def ended(what: str, processes: int = 2) -> list[jobs.Ended]:
    with jobs.Job("mistakes.py", what, processes=processes, hang_timeout_s=20) as job:
        return job.wait(limit_s=120)


def test_processes_that_do_not_join_are_told_to():
    for rank in ended("alone"):
        assert rank.status == 1
        assert rank.err.count("Traceback") == 1 and rank.err.count("  File ") == 2  # of the program
        assert (
            "\nRuntimeError: MpmdMesh: the launcher has started 2 processes, but this one is alone."
            " Call mpmd.initialize() first, before any other use of JAX.\n"
        ) in rank.err


def test_a_host_array_that_two_processes_use_is_the_same_in_both():
    message = (
        "scheduler.errors.ScheduleError: the processes gave different host arrays to the step:\n"
        "  tied: ranks 0 and 1 have different values\n"
        "  Host arrays are given alike in every process. What each has a part of is an MpmdArray, or a jax.Array"
        " made by jax.make_array_from_process_local_data.\n"
    )
    both = ended("values")
    assert all(rank.status in (1, jobs.VICTIM_STATUS) for rank in both)
    assert any(message in rank.err for rank in both)


@pytest.mark.slow
def test_a_host_array_that_differs_where_nobody_uses_it_is_warned_about_once():
    first, second = ended("unused")
    assert (first.status, second.status) == (0, 0)
    assert "mpmd: the processes gave different host arrays to the step: xs (rank 0 uses its own)." in first.err
    assert first.err.count("different host arrays") == 1
    assert "different host arrays" not in second.err


@pytest.mark.slow
def test_a_process_without_devices_of_the_mesh_is_told_so():
    first, second, spare = ended("spare", processes=3)
    assert (first.status, second.status, spare.status) == (0, 0, 0)
    assert "mpmd: process 2 has none of the mesh's devices, which are those of 0, 1" in spare.err
    assert "none of the mesh's devices" not in first.err + second.err


@pytest.mark.slow
def test_a_step_that_just_one_rank_takes_does_not_end_with_success():
    first, second = ended("extra")
    assert (first.status, second.status) == (jobs.VICTIM_STATUS, 0)  # the rank that left ends as its program did
    for rank in (first, second):
        assert rank.verdict is not None
        assert rank.verdict.startswith(
            "jax-mpmd: rank 1: left the program after step 2, while rank 0 waits for the transfer"
        )
