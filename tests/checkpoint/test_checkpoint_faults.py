"""What goes wrong leaves the last finished checkpoint as it was, and is said with the path."""

import asyncio
import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from layouts import check_equal, mesh_of, place, place_all, random_values, shardings_for
from orbax.checkpoint import msgpack_utils
from processes import READ_ONLY, environment, finish, run, start
from samples import slow_first

from mpmd.arrays.sharding import MpmdSharding
from mpmd.errors import ReshardError
from mpmd.job.processes import started
from reshard.__main__ import main
from reshard.checkpoint import Part, TensorFormat, leaf_handler, restore, save
from reshard.storage import finder, safetensors, tensor_files

MESH = mesh_of(4)


@pytest.mark.parametrize("seed", slow_first(0, 1, 2, 3))
def test_whenever_a_process_is_killed_the_last_finished_step_restores_and_no_other_is_listed(tmp_path, seed):
    choose = random.Random(seed)
    folder = tmp_path / "run"
    folder.mkdir()
    workers = start("manager", 2, path=str(folder), groups=2, steps=1000, scale=32)
    try:
        lines = iter(workers[0].stdout.readline, "")
        finished = next(json.loads(line)["finished"] for line in lines if line.startswith("{"))
        time.sleep(choose.uniform(0, 1.0))
        victim = choose.choice(workers)
        victim.send_signal(signal.SIGKILL)
        time.sleep(choose.uniform(0, 0.5))
    finally:
        for worker in workers:
            worker.kill()
        printed, *_ = [worker.communicate()[0] for worker in workers]
    later = [json.loads(line)["finished"] for line in printed.splitlines() if line.startswith("{")]
    finished = max([finished, *later])
    left = sorted(path.name for path in folder.iterdir())
    with ocp.CheckpointManager(folder) as manager:
        steps = manager.all_steps()
    assert steps == list(range(1, steps[-1] + 1))
    assert steps[-1] >= finished, left
    for step in steps[-2:]:
        values = random_values(step, 32)
        found = restore(folder / str(step), values, shardings_for(MESH))
        jax.tree.map(check_equal, found, values)
    if seed == 0:  # and the run goes on from there
        saved = run("manager", 2, path=str(folder), groups=2, steps=1, scale=32)
        assert saved[0]["steps"] == [*steps, steps[-1] + 1]


def test_an_unfinished_save_is_not_taken_for_a_checkpoint(tmp_path):
    save(tmp_path / "state", {"w": np.arange(3.0)})
    unfinished = tmp_path / "state.orbax-checkpoint-tmp"
    (tmp_path / "state").rename(unfinished)
    assert message_of(FileNotFoundError, tmp_path / "state") == (
        f"there is no checkpoint at {tmp_path / 'state'}.\n"
        "  A save that was not finished has left state.orbax-checkpoint-tmp beside it."
    )
    assert message_of(FileNotFoundError, unfinished) == (
        f"{unfinished} is what an unfinished save has left; it is not a checkpoint."
    )


def message_of(kind, path, like=None, shardings=None) -> str:
    with pytest.raises(kind) as caught:
        restore(path, {"w": np.zeros(3)} if like is None else like, shardings)
    return str(caught.value)


def test_a_folder_that_is_no_checkpoint_says_what_it_is(tmp_path):
    assert message_of(FileNotFoundError, tmp_path / "none") == f"there is no checkpoint at {tmp_path / 'none'}."
    (tmp_path / "file").write_text("")
    assert message_of(FileNotFoundError, tmp_path / "file") == (
        f"{tmp_path / 'file'} is a file; a checkpoint is a folder."
    )
    (tmp_path / "empty").mkdir()
    assert message_of(FileNotFoundError, tmp_path / "empty") == (
        f"{tmp_path / 'empty'} is not a checkpoint: it has no _METADATA, no items that have one, and no steps.\n"
        "  It holds nothing."
    )
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (5, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": np.zeros(3)}))
    assert message_of(FileNotFoundError, tmp_path / "run") == (
        f"{tmp_path / 'run'} is not a checkpoint: it is a CheckpointManager's folder with steps 5, 10; "
        f"give {tmp_path / 'run' / '10'}."
    )
    assert message_of(FileNotFoundError, tmp_path / "run" / "7") == (
        f"there is no checkpoint at {tmp_path / 'run' / '7'}.\n  {tmp_path / 'run'} has the steps 5, 10."
    )


def test_saving_never_replaces_what_is_there(tmp_path):
    save(tmp_path / "state", {"w": np.arange(3.0)})
    with pytest.raises(FileExistsError) as caught:
        save(tmp_path / "state", {"w": np.zeros(3)})
    assert str(caught.value) == (
        f"[Errno {errno.EEXIST}] save: there is something already; give another path, or delete it first: "
        f"'{tmp_path / 'state'}'"
    )
    np.testing.assert_array_equal(restore(tmp_path / "state", {"w": np.zeros(3)})["w"], np.arange(3.0))


def test_a_path_that_orbax_takes_for_a_pattern_is_refused(tmp_path):
    with pytest.raises(ReshardError) as caught:
        save(tmp_path / "lr=[1?]" / "state", {"w": np.zeros(3)})
    assert str(caught.value) == (
        f"save: {tmp_path / 'lr=[1?]' / 'state'} has ? and [ in it, which Orbax takes for a pattern: it would not find "
        "what it has written. Give another path."
    )
    assert not list(tmp_path.iterdir())


def test_of_two_jobs_that_save_to_one_path_one_wins_and_the_other_is_told(tmp_path, monkeypatch):
    target = tmp_path / "state"
    write, names = leaf_handler.write_tree, []

    def write_later(folder, tree, **options):
        names.append(folder.name)
        write(folder, tree, **options)
        if len(names) == 1:  # another job comes and is done first
            save(target, {"w": np.arange(3.0)})

    monkeypatch.setattr(leaf_handler, "write_tree", write_later)
    with pytest.raises(FileExistsError) as caught:
        save(target, {"w": np.zeros(3)})
    assert str(caught.value) == (
        f"[Errno {errno.EEXIST}] save: another job has put something there while this one was saving, and nothing of"
        f" this save was kept; give each job a path of its own: '{target}'"
    )
    assert len(set(names)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    np.testing.assert_array_equal(restore(target, {"w": np.zeros(3)})["w"], np.arange(3.0))


def test_what_a_job_that_was_killed_has_left_is_removed_and_what_a_running_one_writes_is_not(tmp_path, monkeypatch):
    names = []

    def interrupted(folder, *_, **__):
        names.append(folder.name)
        folder.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(leaf_handler, "write_tree", interrupted)
        save(tmp_path / "state", {"w": np.zeros(3)})
    assert list(tmp_path.iterdir()) == []
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    own, other = f"-{os.getpid()}.{started(os.getpid())}-", f"-{os.getppid()}.{started(os.getppid())}-"
    assert own in names[0]
    running = names[0].replace(own, other)
    for left in (
        names[0],
        names[0].replace(own, f"-{gone.pid}.7-"),
        names[0].replace(own, f"-{os.getpid()}.7-"),
        running,
    ):
        (tmp_path / left).mkdir()
    save(tmp_path / "state", {"w": np.zeros(3)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", running]


@pytest.mark.slow
def test_jobs_that_save_to_one_path_at_once_never_mix(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BOTH)
    words = [sys.executable, str(script), str(tmp_path)]
    jobs = [subprocess.Popen([*words, str(i)], env=environment(), stdout=subprocess.PIPE, text=True) for i in range(2)]
    try:
        printed = [job.communicate(timeout=120)[0].splitlines() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    for i, ended in enumerate(zip(*printed, strict=True)):
        assert sorted(ended) == ["FileExistsError", "saved"]
        found = restore(tmp_path / str(i), {"a": [np.zeros((256, 256))] * 8})
        assert all((x == ended.index("saved")).all() for x in found["a"])


BOTH = """
import sys, time
from pathlib import Path
import numpy as np
from reshard.checkpoint import save
folder, me = Path(sys.argv[1]), int(sys.argv[2])
for i in range(12):
    (folder / f"ready-{i}-{me}").touch()
    while not (folder / f"ready-{i}-{1 - me}").exists():
        pass
    try:
        time.sleep(0.05 * (i % 3) * me)
        save(folder / str(i), {"a": [np.full((256, 256), float(me))] * 8})
        print("saved", flush=True)
    except FileExistsError as error:
        print(type(error).__name__, flush=True)
"""


def test_everything_in_a_tree_that_cannot_be_saved_is_named_at_once(tmp_path):
    gone = place(np.zeros(4, np.float32), MpmdSharding(MESH, 1))
    gone.delete()
    with pytest.raises(ReshardError) as caught:
        save(tmp_path / "state", {"a": [gone, np.zeros((0, 3))], "b": object(), "c": np.zeros(2)})
    assert str(caught.value) == (
        "save: the tree cannot be saved:\n"
        "  a/0: float32[4] has been deleted, or donated to a step: save what the step returned\n"
        "  a/1: float64[0,3] has no elements, and Orbax stores no empty arrays\n"
        "  b: an object is no array, number or string"
    )
    with pytest.raises(ReshardError) as caught:
        save(
            tmp_path / "state",
            {
                "a.b": 1,
                "a": {"b": 2},
                "c\t": 3,
                "d": np.array(["x"]),
                "e": np.bool_(1),
                "e1": ml_dtypes.bfloat16(1),
                "e2": np.longdouble(1),
                "e3": np.datetime64("2026-01-01"),
                "f": jax.numpy.ones(2, "uint4"),
            },
        )
    assert str(caught.value) == (
        "save: the tree cannot be saved:\n"
        "  d: str32[1] is of a dtype that Orbax does not store\n"
        "  e: a numpy.bool is not stored by Orbax; give bool(…), or an array\n"
        "  e1: a numpy.bfloat16 is not stored by Orbax; give float(…), or an array\n"
        "  e2: a numpy.longdouble is not stored by Orbax; give float(…), or an array\n"
        "  e3: a numpy.datetime64 is not stored by Orbax; give float(…), or an array\n"
        "  f: uint4[2] is of a dtype that Orbax does not store\n"
        "  a.b: 2 leaves would be stored by this name\n"
        "  'c\\t': a name with such characters is none"
    )
    with pytest.raises(ReshardError) as caught:
        save(tmp_path / "state", {})
    assert str(caught.value) == "save: the tree cannot be saved:\n  it has no leaves"
    assert list(tmp_path.iterdir()) == []


def test_names_that_no_tensor_may_have_are_refused_before_anything_is_written(tmp_path):
    for tree in (np.arange(4.0), {"": np.arange(4.0)}, {"x" * 5000: np.arange(4.0)}):
        with pytest.raises(ReshardError, match="has a name that is empty, too long or not printable"):
            save(tmp_path / "state", tree, tensors=TensorFormat())
    assert list(tmp_path.iterdir()) == []


def test_a_file_ends_before_its_header_is_too_long_to_be_read(monkeypatch):
    described = [(f"layer{i}", np.dtype(np.float32), (2,)) for i in range(40)]
    monkeypatch.setattr(safetensors, "MOST_HEADER_NBYTES", 4096)
    files = tensor_files.plan_files(described).files
    assert len(files) > 1 and all(len(first) <= 8 + 4096 for first, _ in files.values())
    assert sum(len(tensors) for _, tensors in files.values()) == 40


def test_integers_that_jax_would_cut_are_an_error_and_come_back_as_numpy(tmp_path):
    save(tmp_path / "state", {"seen": np.array([7, 2**40 + 7])})
    seen = jax.ShapeDtypeStruct((2,), np.int64, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(ReshardError, match="seen: the checkpoint has numbers beyond int32"):
        restore(tmp_path / "state", {"seen": seen})
    assert restore(tmp_path / "state", {"seen": np.zeros(2, np.int64)})["seen"].tolist() == [7, 2**40 + 7]


@pytest.mark.slow
def test_two_threads_may_save_at_once(tmp_path):
    errors = []

    def saving(name):
        try:
            for i in range(8):
                save(tmp_path / f"{name}{i}", {"w": np.full((64, 64), i, np.float32), "n": i})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=saving, args=(name,)) for name in "ab"]
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        for thread in threads:
            thread.start()
        for step in range(8):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(64, step, np.float32)}))
        for thread in threads:
            thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for name in "ab":
        assert restore(tmp_path / f"{name}7", {"w": np.zeros((64, 64), np.float32), "n": 0})["w"].sum() == 7 * 64 * 64
    assert sorted(os.listdir(tmp_path / "steps")) == [str(step) for step in range(8)]


def test_the_hint_for_a_renamed_leaf_with_a_slash_in_its_name_can_be_followed(tmp_path):
    save(tmp_path / "state", {"mlp/~/linear_0": {"w": np.arange(3, dtype=np.float32)}})
    with pytest.raises(ReshardError) as caught:
        restore(tmp_path / "state", {"first": {"w": np.zeros(3, np.float32)}})
    part = "Part('mlp%2F~%2Flinear_0/w', (), jax.ShapeDtypeStruct((3,), 'float32'))"
    assert f"put {part} for first/w" in str(caught.value)
    like = {"first": {"w": Part("mlp%2F~%2Flinear_0/w", (), jax.ShapeDtypeStruct((3,), "float32"))}}
    np.testing.assert_array_equal(restore(tmp_path / "state", like)["first"]["w"], np.arange(3))


def test_bytes_in_another_order_fit_and_what_is_no_sharding_is_named(tmp_path):
    save(tmp_path / "state", tree := {"x": np.arange(3, dtype=">f4")})
    np.testing.assert_array_equal(restore(tmp_path / "state", tree)["x"], tree["x"])
    with pytest.raises(ReshardError, match=r"x: P\('data',\) is a P, not a sharding"):
        restore(tmp_path / "state", tree, jax.P("data"))


def test_orbax_checkpointers_name_the_arrays_that_cannot_be_saved(tmp_path):
    gone = place(np.zeros(4, np.float32), MpmdSharding(MESH, 1))
    tree = {"w": place(np.zeros(4, np.float32), MpmdSharding(MESH, 1)), "gone": gone}
    gone.delete()
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ReshardError) as caught:
        checkpointer.save(tmp_path / "state", tree)
    assert str(caught.value) == (
        "the tree cannot be saved:\n"
        "  gone: float32[4] has been deleted, or donated to a step: save what the step returned"
    )


def test_every_difference_between_what_is_wanted_and_what_is_there_is_named_at_once(tmp_path):
    key = jax.random.key(0)
    save(
        tmp_path / "state",
        {
            "a": np.zeros((4, 3), np.float32),
            "b": np.zeros(4, np.float32),
            "key": place_key(key),
            "n": 3,
            "name": "x",
            "more": {"w": np.zeros(2)},
        },
    )
    like = {
        "a": jax.ShapeDtypeStruct((3, 4), np.float32),
        "b": jax.ShapeDtypeStruct((4,), np.int32),
        "key": jax.ShapeDtypeStruct((2,), np.uint32),
        "n": "three",
        "name": 3,
        "new": [jax.ShapeDtypeStruct((4,), np.int32), Part("a", 9, np.zeros(3, np.float32))],
    }
    assert message_of(ReshardError, tmp_path / "state", like) == (
        f"restore: the checkpoint at {tmp_path / 'state'} is not what was expected:\n"
        "  a: expected float32[3,4], but the checkpoint has float32[4,3]\n"
        "  b: expected int32[4], but the checkpoint has float32[4]\n"
        "  key: expected uint32[2], but the checkpoint has key<fry>[]\n"
        "  n: expected a str, but the checkpoint has int64[]\n"
        "  name: expected an int, but the checkpoint has a string\n"
        "  new/0: expected int32[4], but the checkpoint has nothing there\n"
        "  new/1: expected float32[3] at a[9], but the checkpoint has float32[4,3]\n"
        "  more/w: expected nothing, but the checkpoint has float64[2]\n"
        "  To restore some of its leaves alone, give partial=True."
    )


def place_key(key):
    from mpmd.arrays.array import MpmdArray

    sharding = MpmdSharding(MESH, 2)
    return MpmdArray([jax.device_put(key, sharding.group_sharding(2))], sharding)


def test_a_layout_that_does_not_fit_an_array_is_refused_before_anything_is_read(tmp_path):
    save(tmp_path / "state", {"w": np.zeros((3, 4), np.float32)})
    like = {"w": jax.ShapeDtypeStruct((3, 4), np.float32)}
    message = message_of(ReshardError, tmp_path / "state", like, MpmdSharding(MESH, 0, P("data")))
    head, _, fault = message.partition("\n")
    assert head == f"restore: the checkpoint at {tmp_path / 'state'} is not what was expected:"
    assert fault.startswith("  w: ")
    assert "should evenly divide the shape" in fault
    message = message_of(ReshardError, tmp_path / "state", like, {"v": MpmdSharding(MESH, 0)})
    assert message.startswith("restore: shardings: its structure is not that of the arrays, nor a prefix of it.")


def test_orbaxs_own_restore_names_an_array_of_another_shape(tmp_path):
    from reshard.checkpoint import abstract

    save(tmp_path / "state", {"w": np.zeros((3, 4), np.float32)})
    like = abstract({"w": jax.ShapeDtypeStruct((4, 4), np.float32)}, MpmdSharding(MESH, 0))
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ReshardError) as caught:
            checkpointer.restore(tmp_path / "state", like)
        assert str(caught.value) == "w: expected shape (4, 4), but the checkpoint has (3, 4)."
        padded = checkpointer.restore(tmp_path / "state", like, strict=False)["w"]
    assert np.asarray(padded).shape == (4, 4)


@pytest.mark.parametrize("damage", ["cut", "zeros", "missing"])
def test_a_damaged_data_file_is_an_error_that_names_the_array(tmp_path, damage):
    values = random_values(scale=8)
    save(tmp_path / "state", place_all(values, shardings_for(MESH)))
    data = max((tmp_path / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    whole = data.read_bytes()
    if damage == "cut":
        data.write_bytes(whole[:1000])
    elif damage == "zeros":
        data.write_bytes(bytes(len(whole)))
    else:
        data.unlink()
    message = message_of(ReshardError, tmp_path / "state", values, shardings_for(MESH))
    assert str(tmp_path / "state") in message
    what = "is not what was written there" if damage == "zeros" else "cannot be read: "
    assert re.search(rf": the checkpoint is damaged, \[[0-9:, ]*\] of this array {what}", message)
    if damage == "cut":  # the reason is whole, with the brackets that are in it
        assert re.search(r"Requested byte range \[\d+, \d+\) is not valid for value of size 1000$", message)


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_an_error_though_no_decompressor_notices_it(tmp_path, position):
    values = random_values(scale=8)
    save(tmp_path / "state", place_all(values, shardings_for(MESH)))
    data = max((tmp_path / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    flipped = bytearray(data.read_bytes())
    flipped[int(len(flipped) * position)] ^= 4
    data.write_bytes(flipped)
    message = message_of(ReshardError, tmp_path / "state", values, shardings_for(MESH))
    assert str(tmp_path / "state") in message
    assert "the checkpoint is damaged" in message


@pytest.mark.parametrize("sharding", [None, MpmdSharding(MESH, 1)], ids=["numpy", "group"])
def test_a_flipped_bit_in_a_chunk_that_is_read_in_part_is_an_error(tmp_path, sharding):
    values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    save(tmp_path / "state", {"w": place(values, MpmdSharding(MESH, 0, P()))})
    like = {"w": Part("w", slice(40, 48), jax.ShapeDtypeStruct((8, 64), np.float32))}
    check_equal(restore(tmp_path / "state", like, sharding)["w"], values[40:48])

    data = max((tmp_path / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    flipped = bytearray(data.read_bytes())
    flipped[flipped.index(values[3, 60].tobytes())] ^= 4
    data.write_bytes(flipped)
    with pytest.raises(ReshardError, match=r"is not what was written there \(its checksum differs\)"):
        restore(tmp_path / "state", like, sharding)


def test_sums_of_an_older_format_are_not_looked_at(tmp_path):
    everywhere = MpmdSharding(MESH, 1, P())
    values = np.arange(8, dtype=np.float32)
    save(tmp_path / "state", {"w": place(values, everywhere)})
    (sums,) = (tmp_path / "state" / "reshard_checksums").iterdir()
    sums.rename(sums.with_name("process_0.json")).write_text('{"w": [[[0, 8], 7]]}')
    check_equal(restore(tmp_path / "state", {"w": values}, {"w": everywhere})["w"], values)


def test_damaged_sums_are_an_error_that_names_the_file(tmp_path):
    values = np.arange(8, dtype=np.float32)
    save(tmp_path / "state", {"w": place(values, MpmdSharding(MESH, 1, P()))})
    (file,) = (tmp_path / "state" / "reshard_checksums").glob("crc32_of_process_0.*")
    file.write_text("{")
    assert message_of(ReshardError, tmp_path / "state", {"w": values}) == (
        f"{file} does not hold the checksums of a checkpoint: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)."
    )


def test_a_damaged_description_is_an_error_that_names_the_checkpoint(tmp_path):
    save(tmp_path / "state", {"w": np.zeros(3)})
    (tmp_path / "state" / "_METADATA").write_text("{")
    assert message_of(ReshardError, tmp_path / "state").startswith(
        f"the checkpoint at {tmp_path / 'state'} is damaged: "
    )


FULL = """
import sys, jax, mpmd, numpy as np
from pathlib import Path
from reshard.checkpoint import restore, save
folder = Path(sys.argv[1])
if sys.argv[2] == "full":
    save(folder / "good", {"w": np.arange(1000.0)})
x = np.random.default_rng(0).normal(size=(16, 64, 1024)).astype(np.float32)
w = mpmd.MpmdArray([jax.device_put(x)], mpmd.MpmdSharding(mpmd.MpmdMesh(jax.make_mesh((1,), ("s",)), "s"), 0))
try:
    save(folder / "state", {"w": [w] * 4} if sys.argv[3] == "groups" else {"w": [x] * 4, "v": [jax.device_put(x)] * 4})
except OSError as error:
    print(error)
    kept = error  # as one that nobody catches is, until Python ends
print(sorted(path.name for path in folder.iterdir()))
if sys.argv[2] == "full":
    print(restore(folder / "good", {"w": np.zeros(1000)})["w"].sum())
"""


def run_on_mount(tmp_path, options, script, *arguments):
    """Runs a script with a file system of its own, of these options."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "script.py").write_text(script)
    mount = f"mount -t tmpfs -o {options} tmpfs {tmp_path / 'mount'}"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*inside, mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system of their own")
    command = " ".join([mount, "&&", sys.executable, str(tmp_path / "script.py"), str(tmp_path / "mount"), *arguments])
    done = subprocess.run(
        [*inside, command], env=environment(), text=True, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name", "arrays"),
    [("size=2m", "full", "groups"), ("ro", "read-only", "groups"), ("size=2m", "full", "host")],
)
def test_a_target_that_takes_nothing_more_is_named_and_what_was_there_stays(tmp_path, options, name, arrays):
    done = run_on_mount(tmp_path, options, FULL, name, arrays)
    assert "Exception ignored" not in done.stderr
    assert "Event loop is closed" not in done.stderr
    lines = done.stdout.splitlines()
    code, what, left = {
        "full": (errno.ENOSPC, "the disk is full", ["['good']", "499500.0"]),
        "read-only": (errno.EROFS, "the file system is read-only", ["[]"]),
    }[name]
    unchanged = "nothing was saved, and what was saved before is untouched"
    assert lines == [f"[Errno {code}] save: {what}; {unchanged}: '{tmp_path / 'mount' / 'state'}'", *left]


MANAGED = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
from pathlib import Path
import mpmd, reshard.checkpoint
folder = Path(sys.argv[1]) / "run"
sharding = mpmd.MpmdSharding(mpmd.MpmdMesh(jax.make_mesh((1,), ("s",)), "s"), 0)
large = np.random.default_rng(0).normal(size=(1 << 21)).astype(np.float32)
small, large = {"w": np.arange(1000.0)}, {"w": mpmd.MpmdArray([jax.device_put(large)], sharding)}
names = lambda: sorted(p.name for p in folder.iterdir())
with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
    manager.save(1, args=ocp.args.StandardSave(small))
    manager.wait_until_finished()
    manager.save(2, args=ocp.args.StandardSave(large))
    try:
        manager.wait_until_finished()
    except OSError as error:
        print(error.strerror)
    print(manager.all_steps(), manager.latest_step(), names())
    print(manager.restore(1, args=ocp.args.StandardRestore(small))["w"].sum())
    for step in 3, 4:
        manager.save(step, args=ocp.args.StandardSave(small))
    manager.wait_until_finished()
    print(manager.all_steps(), names())
"""


@pytest.mark.slow
def test_after_a_save_in_the_background_that_failed_the_last_good_step_is_listed_and_nothing_is_left_behind(tmp_path):
    lines = run_on_mount(tmp_path, "size=4m", MANAGED).stdout.splitlines()
    assert lines[0].startswith("save: the disk is full")
    assert lines[1:] == ["[1] 1 ['1']", "499500.0", "[4] ['4']"]


@pytest.mark.slow
def test_a_process_whose_disk_is_full_is_told_though_the_others_wait_for_it(tmp_path):
    workers = start("disk_full", 2, path=str(tmp_path / "run"))
    try:
        out, err = workers[1].communicate(timeout=100)  # Orbax's own limit is 20 minutes
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert workers[1].returncode == 0, err[-3000:]
    assert "save: the disk is full; nothing was saved" in json.loads(out.splitlines()[-1])
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == []


@pytest.mark.parametrize(
    "how, unable",
    slow_first(
        *(("manager", 0), ("orbax", 1), ("tensors", 1), ("manager, waiting", 0), ("v1", 1), ("v1 steps", 0)),
        *(("manager", 1), ("orbax", 0), ("manager, waiting", 1), ("v1", 0), ("v1 steps", 1)),
        num_slow=6,
    ),
)
def test_a_save_that_one_process_cannot_do_is_told_to_all_at_once_and_the_next_one_works(tmp_path, how, unable):
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    arguments = {"path": str(bad), "other": str(good), "how": how, "unable": unable}
    workers = start("save_where_one_cannot", 2, prefixes={unable: [*READ_ONLY, str(bad)]}, **arguments)
    text = "save: the file system is read-only; nothing was saved, and what was saved before is untouched"
    for rank, (status, out, err) in enumerate(finish(workers)):
        assert status == 0, err[-3000:]
        found = json.loads(out.splitlines()[-1])
        for name in ("first", "again"):
            kind, message, seconds = found[name]
            by = "" if rank == unable else f" (so process {unable} says)"
            assert kind == "OSError" and message.startswith(f"[Errno {errno.EROFS}] {text}{by}: '{bad}/")
            assert seconds < 30  # others wait for 100 s for one that does not come
        assert (found["mended"][0], found["other"][0]) == ("saved", "saved"), found
        assert found["left"] == ["1" if "manager" in how or "steps" in how else "state"]


@pytest.mark.slow
def test_a_save_that_fails_in_one_process_before_it_returns_is_told_to_the_others_threads_too(tmp_path):
    found = run("copy_where_one_cannot", 2, path=str(tmp_path))
    told = "[Errno 5] save: MemoryError: no memory (so process 1 says)"
    assert found == [[told, True, [2]], ["no memory", True, [2]]]


@pytest.mark.slow
def test_a_folder_that_the_first_process_cannot_complete_is_told_to_the_others_too(tmp_path):
    (first, _), (other, seconds) = run("last_file_where_one_cannot", 2, path=str(tmp_path / "folder"))
    assert "save: the disk is full" in first and "save: the disk is full" in other
    assert "(so process 0 says)" in other and seconds < 30
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import signal, sys
import numpy as np
from reshard.checkpoint import restore, save
tree = {str(i): np.zeros((16, 64, 1024)) + i for i in range(4)}
save(sys.argv[1], tree)
for i in range(20):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.01 * i)
        restore(sys.argv[1], tree)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.slow
def test_a_restore_that_is_interrupted_ends_without_complaints_of_storage(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    words = [sys.executable, str(script), str(tmp_path / "state")]
    done = subprocess.run(words, env=environment(), text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "interrupted" in done.stdout and "Event loop is closed" not in done.stderr, done.stderr[-3000:]


def test_a_notebook_whose_event_loop_is_running_can_save_and_restore(tmp_path):
    async def cell() -> np.ndarray:
        save(tmp_path / "state", {"w": np.arange(3.0)})
        return restore(tmp_path / "state", {"w": np.zeros(3)})["w"]

    np.testing.assert_array_equal(asyncio.run(cell()), np.arange(3.0))


def test_paths_of_all_kinds_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("relative", Path("deep") / "er" / "state", str(tmp_path / "absolute")):
        save(path, {"w": np.arange(3.0)})
        np.testing.assert_array_equal(restore(path, {"w": np.zeros(3)})["w"], np.arange(3.0))


def test_what_cannot_be_a_path_or_a_format_is_named_and_nothing_is_made(tmp_path):
    tree = {"w": np.arange(3)}
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="nothing was saved"):
        save(tmp_path / "file" / "step", tree)
    with pytest.raises(FileExistsError, match="something already"):
        save(tmp_path / "link", tree)
    for path in "~nobody-of-this-name/step", "a" * 5000:
        for call in save, restore:
            with pytest.raises((ReshardError, OSError), match=path[:100]):
                call(path, tree)
    with pytest.raises(ReshardError, match="w: 1180591620717411303424 does not fit in 64 bits"):
        save(tmp_path / "step", {"w": 2**70})
    with pytest.raises(ReshardError, match=r"TensorFormat: .*'foo'"):
        TensorFormat(dtype="foo")
    with pytest.raises(ReshardError, match="TensorFormat: int8 is no floating-point dtype; other arrays are not cast"):
        TensorFormat(dtype="int8")
    (tmp_path / "round").symlink_to("round")
    for path in "round", "a\0b":
        with pytest.raises(ReshardError, match=r"(?i)symlink loop|null"):
            restore(tmp_path / path, tree)
    (tmp_path / "round").unlink()
    with pytest.raises(ReshardError, match="TensorFormat: 'much' is no number of bytes"):
        TensorFormat(file_size="much")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_a_link_that_is_replaced_while_its_folder_is_read_mixes_no_versions(tmp_path):
    for name in ("1", "2"):
        save(tmp_path / name, {"w": np.zeros(4, np.float32)}, tensors=TensorFormat())
    latest, after = tmp_path / "latest", tmp_path / "after"
    latest.symlink_to("1")
    found = [finder.find(latest), finder.find(latest, by_path=True)]
    after.symlink_to("2")
    after.replace(latest)
    assert [checkpoint.folder for checkpoint in found] == [tmp_path.resolve() / "1"] * 2


def test_a_save_in_the_handler_of_another_ones_error_has_its_own_reason(tmp_path):
    (tmp_path / "file").write_text("")
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with pytest.raises(NotADirectoryError):
            save(tmp_path / "file" / "step", {"w": np.arange(3)})


def test_files_are_closed_although_one_cannot_be_brought_to_the_disk(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tree = {str(i): np.zeros(1000, np.float32) for i in range(5)}
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="the disk is full"):
        patched.setattr(os, "fsync", fail)
        save(tmp_path / "folder", tree, tensors=TensorFormat(file_size=4000))
    assert len(os.listdir("/proc/self/fd")) == before and not list(tmp_path.iterdir())


def test_a_file_beside_the_weights_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").mkdir()  # is skipped: no file
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text("{}")
    plan = tensor_files.plan_files([("w", np.dtype(np.float32), (3,))])
    (tmp_path / "out").mkdir()
    dataclasses.replace(plan, beside=tmp_path / "model").finish(tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["tokenizer.json"]
    with pytest.raises(ReshardError, match=r"nothing.json, .*cannot be read: No such file"):
        tensor_files._content(tmp_path / "nothing.json")


def test_scalars_come_back_as_arrays_that_can_be_saved_again(tmp_path):
    save(tmp_path / "one", {"done": jnp.array(False), "step": jnp.int32(3)})
    like = {"done": jax.ShapeDtypeStruct((), bool), "step": jax.ShapeDtypeStruct((), np.int32)}
    found = restore(tmp_path / "one", like)
    assert all(type(x) is np.ndarray and x.shape == () for x in found.values()), found
    save(tmp_path / "two", found)
    assert restore(tmp_path / "two", {"done": True, "step": 0}) == {"done": False, "step": 3}


def test_leaves_that_older_releases_put_into_one_file_are_read(tmp_path):
    """As `SaveArgs(aggregate=True)` of Orbax 0.5 and `save_checkpoint` of Flax wrote them."""
    tree = {"a": np.arange(4, dtype=np.float32), "layers": [{"w": np.ones((2, 3), jnp.bfloat16)}], "n": 3, "s": "text"}
    keys = {("a",): "jax.Array", ("layers", 0, "w"): "np.ndarray", ("n",): "scalar", ("s",): "string"}
    entries = {
        str(path): {
            "key_metadata": [{"key": str(k), "key_type": 1 if isinstance(k, int) else 2} for k in path],
            "value_metadata": {"value_type": kind, "skip_deserialize": True},
        }
        for path, kind in keys.items()
    }
    folder = tmp_path / "checkpoint_5"
    folder.mkdir()
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": entries, "use_zarr3": False}))
    (folder / "checkpoint").write_bytes(msgpack_utils.msgpack_serialize(tree))
    found = restore(folder, tree)
    np.testing.assert_array_equal(found["a"], tree["a"])
    assert found["layers"][0]["w"].dtype == jnp.bfloat16 and (found["n"], found["s"]) == (3, "text")
    place = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), P("x"))
    part = Part("a", (), jax.ShapeDtypeStruct((4,), np.float32, sharding=place))
    np.testing.assert_array_equal(restore(folder, {"b": part}, partial=True)["b"], tree["a"])
    assert main(["convert", str(folder), str(tmp_path / "new"), "--verify"]) == 0
    np.testing.assert_array_equal(restore(tmp_path / "new", tree)["a"], tree["a"])
    (folder / "checkpoint").write_bytes(b"x")
    with pytest.raises(ReshardError, match="checkpoint does not hold the values of this checkpoint"):
        restore(folder, tree)


@pytest.mark.parametrize("tensors", [None, TensorFormat()])
def test_leaves_that_are_made_of_one_array_share_no_memory(tmp_path, tensors):
    save(tmp_path / "kept", {"w": np.ones(1 << 16, np.float32)}, tensors=tensors)
    there = jax.ShapeDtypeStruct((1 << 16,), np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    part = Part("w", (), jax.ShapeDtypeStruct((1 << 16,), np.float32))
    found = restore(tmp_path / "kept", {"params": part, "ema": part, "placed": Part("w", (), there)})
    found["ema"] *= 0.5
    assert (found["params"] == 1).all() and (np.asarray(found["placed"]) == 1).all()
