"""Real processes: each writes what it owns and reads what it needs, whatever groups and processes come next."""

import jax
import numpy as np
import pytest
from layouts import check_equal, mesh_of, nbytes, random_values, shardings_for
from processes import run, run_stock
from samples import slow_first

from reshard.checkpoint import restore
from reshard.checkpoint.write_plan import WrittenLeaf, plan_writing


def on_disk(folder) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# (processes, devices in each, groups): one group a process, several in one, one over two.
LAYOUTS = {"a group each": (2, 2, 2), "several groups each": (2, 2, 4), "a group over two": (4, 1, 2)}


def check_that_it_is_written_once_and_restored_by_one(folder):
    values = random_values(scale=8)
    assert nbytes(values) <= on_disk(folder) < nbytes(values) * 1.05 + 80_000
    found = restore(folder, values, shardings_for(mesh_of(4)))
    for array, expected in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
        check_equal(array, expected)


@pytest.mark.slow
def test_a_state_of_several_groups_in_each_process_is_written_once_and_restored_by_one(tmp_path):
    num_processes, devices, groups = LAYOUTS["several groups each"]
    run("save", num_processes, devices, path=str(tmp_path / "state"), groups=groups, scale=8)
    check_that_it_is_written_once_and_restored_by_one(tmp_path / "state")


@pytest.mark.parametrize(
    ("before", "after", "v1"),
    slow_first(
        *(("a group each", "a group over two", False), ("a group over two", "a group each", True)),
        ("a group over two", "a group each", False),
        num_slow=2,
    ),
)
def test_processes_of_another_layout_read_what_they_need_and_no_more(tmp_path, before, after, v1):
    num_processes, devices, groups = LAYOUTS[before]
    run("save", num_processes, devices, path=str(tmp_path / "state"), groups=groups, scale=8, v1=v1)
    check_that_it_is_written_once_and_restored_by_one(tmp_path / "state")
    num_processes, devices, groups = LAYOUTS[after]
    found = run("restore", num_processes, devices, path=str(tmp_path / "state"), groups=groups, scale=8, v1=v1)
    total = nbytes(random_values(scale=8))
    for one in found:
        assert one["shards"] > 0
        # Chunks of the stack and of the tied array may be wider than what a process needs of them.
        assert one["held"] <= one["read"] < 1.5 * one["held"] + 60_000
        assert one["held"] < total


@pytest.mark.slow
def test_a_checkpoint_of_stock_processes_is_read_into_stages(tmp_path):
    run_stock("save_stock", 2, 2, path=str(tmp_path / "state"), scale=64)
    found = run("restore", 2, 2, path=str(tmp_path / "state"), groups=4, data=None, scale=64)
    for one in found:
        assert one["held"] > 500_000
        assert one["held"] <= one["read"] < one["held"] * 1.02 + 80_000


@pytest.mark.slow
def test_processes_that_save_or_restore_unlike_checkpoints_are_all_told_at_once(tmp_path):
    for found in run("unlike", 2, 1, path=str(tmp_path)):
        paths, trees, steps, restored, by_reshard = (text.replace(" (so process 0 says)", "") for text in found)
        head = "save: the processes do not save the same: rank 1 gave"
        assert paths.replace(" (so process 1 says)", "") == f"{head} the path as PATH/1, rank 0 as PATH/0"
        assert trees.startswith(f"{head} the tree as aa/")
        assert steps.replace(" (so process 1 says)", "") == f"{head} the step as 8, rank 0 as 7"
        assert "restore the same: rank 1 gave the step as 1, rank 0 as 0" in restored
        assert "\n  rank 1 gave the checkpoint as " in restored
        assert "\n  rank 0 reads PATH/run/0/default\n  rank 1 reads PATH/run/1/default" in restored
        assert by_reshard.startswith("rank 1 gave path as PATH/run/1/default (checkpoint ")
        assert ", rank 0 as PATH/run/0/default (checkpoint " in by_reshard


@pytest.mark.slow
@pytest.mark.parametrize("call", ["make", "restore", "save"])
def test_a_process_that_saves_or_restores_alone_is_told_at_once_with_what_the_others_do(tmp_path, call):
    did = "made a CheckpointManager" if call == "make" else f"called Orbax's {call}"
    for found in run("alone", 2, 1, path=str(tmp_path / "run"), call=call):
        assert found.startswith(f"rank 1 called <lambda> where rank 0 {did}, in step 1\n"), found


@pytest.mark.slow
def test_a_checkpoint_manager_of_many_processes_keeps_steps_that_others_restore(tmp_path):
    saved = run("manager", 2, 2, path=str(tmp_path / "run"), groups=2, steps=2)
    assert [one["steps"] for one in saved] == [[1, 2], [1, 2]]
    for num_processes, devices, groups in ((2, 2, 4), (1, 4, 2)):
        found = run("manager", num_processes, devices, path=str(tmp_path / "run"), groups=groups, steps=0, restore=True)
        assert [one["step"] for one in found] == [2] * num_processes


@pytest.mark.slow
def test_a_manager_that_is_told_its_processes_waits_for_them_without_a_computation(tmp_path):
    (tmp_path / "run").mkdir()
    saved = run("manager", 2, 2, path=str(tmp_path / "run"), groups=2, steps=2, named=True)
    assert [one["steps"] for one in saved] == [[1, 2], [1, 2]]
    values = random_values(2)
    jax.tree.map(check_equal, restore(tmp_path / "run" / "2", values, shardings_for(mesh_of(4))), values)


@pytest.mark.parametrize("layout", ["several groups each", pytest.param("a group over two", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_keys_spmd_arrays_and_host_values_are_saved_beside_arrays_of_groups(tmp_path, layout):
    num_processes, devices, groups = LAYOUTS[layout]
    found = run("mixed", num_processes, devices, path=str(tmp_path / "state"), groups=groups)
    holders = [one["keys"] for one in found]
    assert holders == {"several groups each": [0, 1], "a group over two": [0, 0, 1, 1]}[layout]


def test_every_process_plans_alike_and_replicas_spread_the_writing():
    mesh = mesh_of(2)
    values = random_values(scale=8)
    leaves = tuple(
        WrittenLeaf(np.shape(x), np.asarray(x).dtype.itemsize, s)
        for x, s in zip(jax.tree.leaves(values), jax.tree.leaves(shardings_for(mesh)), strict=True)
    )
    assert {process for plan in plan_writing(leaves) for process in plan.boxes} == {0}


@pytest.mark.slow
def test_an_array_that_each_process_has_for_itself_is_refused_in_all_of_them(tmp_path):
    found = run("save_local_array", 2, path=str(tmp_path / "state"))
    assert found == [
        "save: the tree cannot be saved:\n"
        f"  step: int32[] is a jax.Array of process {i} alone, and others have their own; make it an MpmdArray, "
        "a global array, or a numpy array (of which process 0's is saved)"
        for i in range(2)
    ]
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_process_that_does_not_come_is_waited_for_no_longer_than_was_said(tmp_path):
    (found, _) = run("save_without_last", 2, path=str(tmp_path / "state"), timeout_s=4)
    assert found["error"].startswith(f"save: after 4 s, not all processes had come to save {tmp_path / 'state'}")
    assert 3 < found["waited"] < 8
    assert not found["exists"]
