"""Mistakes that would otherwise pass without a word."""

import json
import re
from types import SimpleNamespace

import jobs
import pytest

from mpmd.errors import ScheduleError
from mpmd.run.agreement import Announcement, agree


def ended(what: str, processes: int = 2, devices: int = 1) -> list[jobs.Ended]:
    with jobs.Job("mistakes.py", what, processes=processes, devices=devices, hang_timeout_s=20) as job:
        return job.wait(limit_s=120)


def test_processes_that_do_not_join_are_told_to():
    for rank in ended("alone"):
        assert rank.status == 1
        assert rank.err.count("Traceback") == 1 and rank.err.count("  File ") == 3  # of forked.py, and of the program
        assert (
            "\nRuntimeError: MpmdMesh: the launcher has started 2 processes, but this one is alone."
            " Call mpmd.initialize() first, before any other use of JAX.\n"
        ) in rank.err


@pytest.mark.slow
def test_what_a_rank_starts_does_not_join_in_its_place():
    for number, rank in enumerate(ended("child")):
        assert rank.status == 0, rank.err
        assert f"RuntimeError: mpmd.initialize: rank {number} of this job is process " in rank.out
        assert "Start it without MPMD_COORDINATOR, MPMD_NUM_PROCESSES, MPMD_PROCESS_ID in" in rank.out


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("values", "tied, xs than rank 0 in step 1 (step)"),
        pytest.param("moved", "['tied'] than rank 0 in step 0 (a reshard)", marks=pytest.mark.slow),
    ],
)
def test_host_arrays_are_the_same_in_all_processes_also_in_those_that_do_not_use_them(what, told):
    """`tied` is used by both, `xs` by the first alone. It is said before the step runs, in all."""
    message = (
        f"scheduler.errors.ScheduleError: rank 1 gave other values of {told}\n"
        "  Host arrays, numbers and keys are given alike in every process. What each has a part of is an MpmdArray, or"
        " a jax.Array made by jax.make_array_from_process_local_data. A state is the result of the same call in every"
        " process. If one process made a call more than the others, this is where they begin to differ.\n"
    )
    for rank in ended(what):
        assert rank.status == 1
        assert message in rank.err


@pytest.mark.slow
def test_a_device_get_of_another_tree_is_told_before_anything_is_sent():
    for rank in ended("trees"):
        assert rank.status == 1
        assert "ScheduleError: rank 1 gave tree[1] as float32[64,64] in MpmdSharding(group 1 of 2, P())" in rank.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "told"), [("values", "gave other values of xs"), ("older", "gave other results as ws[0], ws[1]")]
)
def test_no_checkpoint_is_written_after_ranks_were_given_other_values(way, told, tmp_path):
    with jobs.Job("calls.py", way, str(tmp_path), processes=2, hang_timeout_s=60) as job:
        both = job.wait(limit_s=120)
    what = f"rank 1 {told} than rank 0 in step 7 (train)"
    for rank in both:
        assert rank.status == 1
        assert f"save refused: {what}" in rank.out and f"saved_by_orbax refused: {what}" in rank.out
    assert not list(tmp_path.rglob("*.zarr*")) and not list(tmp_path.rglob("_METADATA"))


@pytest.mark.slow
def test_a_skipped_evaluation_is_told_also_where_no_call_follows():
    with jobs.Job("calls.py", "skipped", processes=2, hang_timeout_s=60) as job:
        first, second = job.wait(limit_s=120)
    # Its own error, or the table that it prints where it hears of the other one's error first.
    assert re.search("rank 1:? called train where rank 0 called evaluate, in step 8", first.err)
    assert "rank 1: called train where rank 0 called evaluate, in step 8" in second.err


@pytest.mark.slow
def test_a_difference_is_told_without_the_rank_that_does_not_come_to_the_call():
    with jobs.Job("calls.py", "late", processes=3, hang_timeout_s=200) as job:
        for rank in job.wait(limit_s=120):
            assert "rank 1: gave other values of xs than rank 0 in step 7 (train)" in rank.err


@pytest.mark.slow
def test_a_process_without_devices_of_the_mesh_is_told_so_and_work_done_twice_is_told_by_rank_0():
    first, second, spare = ended("spare", processes=3, devices=2)
    assert (first.status, second.status, spare.status) == (0, 0, 0)
    assert "mpmd: process 2 has none of the mesh's devices, which are those of 0, 1" in spare.err
    assert "none of the mesh's devices" not in first.err + second.err
    assert first.err.count("step: the 2 devices of each group compute the same") == 1
    assert "compute the same" not in second.err + spare.err


@pytest.mark.slow
def test_a_step_that_just_one_rank_takes_does_not_end_with_success():
    for rank, words in zip(ended("extra"), ("rank 1 came", "came"), strict=True):
        assert rank.status == 1
        assert rank.verdict is not None
        assert f"{words} to the end of its program where rank 0 called step, in step 3" in rank.verdict


def test_lists_with_other_shapes_in_other_processes_are_told():
    """One process knows of a shape of which the other does not."""
    plans = [{"arguments": "xs[*]: f32[4]"}, {"arguments": "xs[*]: f32[4]", "arguments of shape 1": "xs[*]: f32[8]"}]
    texts = [json.dumps(Announcement(plan).hashes) for plan in plans]
    for rank in (0, 1):
        mine = Announcement(plans[rank])

        def exchange(what, text, ranks, mine=mine):
            if what == "comparing plans":
                return dict(enumerate(texts))
            return {r: json.dumps([plan.get("arguments of shape 1", ""), {}]) for r, plan in enumerate(plans)}

        job = SimpleNamespace(
            new_number=lambda *_: 0, exchange=exchange, calls=SimpleNamespace(settle=lambda ranks: None)
        )
        with pytest.raises(ScheduleError) as error:
            agree(job, mine, (0, 1), SimpleNamespace(fixed={}))  # pyright: ignore[reportArgumentType]
        assert "arguments of shape 1 of rank 1 differ from those of rank 0" in str(error.value)
        assert "  rank 0: (nothing)\n  rank 1: xs[*]: f32[8]" in str(error.value)
