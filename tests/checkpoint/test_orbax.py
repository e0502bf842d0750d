"""Orbax's own checkpointers take trees with MpmdArrays, and what they write is a checkpoint like any other."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import bytes_read, check_equal, mesh_of, nbytes, place, place_all, random_values, shardings_for
from processes import environment

import reshard.checkpoint
from mpmd.arrays import keys as key_data
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from mpmd.errors import ReshardError
from reshard.checkpoint import Part, TensorFormat, abstract, restore, save

MESH = mesh_of(4)


def mixed_tree():
    """What a training state may hold: arrays in one or several groups, SPMD arrays, keys, host values."""
    values = random_values()
    return {
        "params": place_all(values, shardings_for(MESH)),
        "spmd": place(np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(MESH.jax_mesh, P("data"))),
        "bf16": place(np.arange(32, dtype=jnp.bfloat16), MpmdSharding(MESH, 2, P("data"))),
        "flag": place(np.array([True, False, True]), MpmdSharding(MESH, 1)),
        "key": keys(MpmdSharding(MESH, {1, 2})),
        "keys": keys(MpmdSharding(MESH, 3, P("data")), 4),
        "split_keys": keys(MpmdSharding(MESH, range(4), P(("stage", "data"))), 8),
        "spmd_key": jax.random.key(5),
        "position": np.array([3, 1, 4], np.int64),
        "epoch": 7,
        "rate": 0.125,
    }


def keys(sharding, number=None):
    values = jax.random.key(11) if number is None else jax.random.split(jax.random.key(11), number)
    parts = {
        p.key: values[slice(p.offset[0], p.offset[0] + p.shape[0])] if p.shape else values
        for p in sharding.parts(values.shape)
    }
    groups = {p.key: p.group for p in sharding.parts(values.shape)}
    return MpmdArray(
        {k: jax.device_put(part, sharding.group_sharding(groups[k])) for k, part in parts.items()}, sharding
    )


def plain(leaf):
    """Any leaf as numpy."""
    if isinstance(leaf, (MpmdArray, jax.Array)) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = key_data.to_data(leaf)
    return np.asarray(leaf)


def check_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(plain(a), plain(b))
        assert getattr(a, "dtype", type(a)) == getattr(b, "dtype", type(b))
        if isinstance(b, MpmdArray):
            assert isinstance(a, MpmdArray)
            assert a.mpmd_sharding == b.mpmd_sharding
            for key, array in b._arrays.items():
                np.testing.assert_array_equal(plain(a._arrays[key]), plain(array))


def test_the_standard_checkpointer_saves_and_restores_a_mixed_tree(tmp_path):
    tree = mixed_tree()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", tree)
        checkpointer.wait_until_finished()
        check_same(checkpointer.restore(tmp_path / "state", tree), tree)
        check_same(checkpointer.restore(tmp_path / "state", abstract(tree)), tree)


def of_v1():
    """Orbax's new API, and a context in which it loads a part of a tree."""
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")
    context = v1.Context()
    context.pytree.loading.partial_load = True
    return v1, context


def test_orbaxs_new_api_saves_and_loads_a_mixed_tree_and_each_api_reads_the_others(tmp_path):
    v1, _ = of_v1()
    tree = mixed_tree() | {"name": "a run"}
    v1.save(tmp_path / "a", tree)
    for target in (abstract(tree), tree):  # arrays say where they go, too
        check_same(v1.load(tmp_path / "a", target), tree)
    check_same(restore(tmp_path / "a", abstract(tree)), tree)
    target = abstract(tree)
    arguments = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        check_same(checkpointer.restore(tmp_path / "a" / "state", args=arguments), tree)
    save(tmp_path / "b", tree)
    elsewhere = abstract(tree["params"], MpmdSharding(MESH, 3))
    found = v1.load(tmp_path / "b", {**abstract(tree), "params": elsewhere})
    assert {leaf.mpmd_idxs for leaf in jax.tree.leaves(found["params"])} == {(3,)}
    check_same({**found, "params": None}, {**tree, "params": None})
    for a, b in zip(*map(jax.tree.leaves, (found["params"], tree["params"])), strict=True):
        np.testing.assert_array_equal(plain(a), plain(b))
    for a, b in zip(*map(jax.tree.leaves, (v1.load(tmp_path / "b"), tree)), strict=True):  # numpy arrays
        np.testing.assert_array_equal(plain(a), plain(b))
    metadata = v1.metadata(tmp_path / "a").metadata
    assert (metadata["bf16"].shape, metadata["bf16"].dtype) == ((32,), jnp.bfloat16)


def test_a_checkpointer_of_orbaxs_new_api_saves_behind_the_training_and_keeps_steps(tmp_path):
    v1, _ = of_v1()
    tree = mixed_tree()
    with v1.training.Checkpointer(
        tmp_path / "steps", preservation_policy=v1.training.preservation_policies.LatestN(1)
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save_async(step, tree | {"epoch": step}).result()
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [2]
        for target in (abstract(tree), tree):
            check_same(checkpointer.load(2, target), tree | {"epoch": 2})
    check_same(restore(tmp_path / "steps" / "2", tree), tree | {"epoch": 2})
    values = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    w = place(values, MpmdSharding(MESH, 1, P("data")))
    response = v1.save_async(tmp_path / "state", {"w": w})
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(w.array_in(1)).block_until_ready()
    response.result()
    np.testing.assert_array_equal(v1.load(tmp_path / "state")["w"], values)


def test_orbaxs_new_api_saves_and_loads_parts_of_a_tree(tmp_path):
    v1, some = of_v1()
    tree = mixed_tree()
    for names in ({"params"}, tree.keys() - {"params"}):
        v1.partial.save(tmp_path / "a", {name: tree[name] for name in names})
    v1.partial.finalize(tmp_path / "a")
    check_same(v1.load(tmp_path / "a", abstract(tree)), tree)
    with some:
        found = v1.load(tmp_path / "a", {"bf16": abstract(tree["bf16"]), "params": {"split": tree["params"]["split"]}})
    check_same(found, {"bf16": tree["bf16"], "params": {"split": tree["params"]["split"]}})
    left_out = jax.tree.map(lambda _: ..., tree) | {"keys": abstract(tree["keys"])}
    check_same(v1.load(tmp_path / "a", left_out)["keys"], tree["keys"])
    v1.save_checkpointables(tmp_path / "b", {"model": tree["params"], "data": {"position": 9}})
    found = v1.load_checkpointables(tmp_path / "b", {"model": abstract(tree["params"])})
    check_same(found, {"model": tree["params"]})


def test_both_apis_of_orbax_say_what_is_not_as_the_checkpoint_has_it(tmp_path):
    v1, _ = of_v1()
    bf16, flag, key = (mixed_tree()[name] for name in ("bf16", "flag", "key"))
    save(tmp_path / "state", {"bf16": bf16, "flag": flag, "n": 3})
    good = abstract({"bf16": bf16, "flag": flag, "n": 3})

    def other(shape, dtype):
        return {**good, "bf16": jax.ShapeDtypeStruct(shape, dtype, sharding=good["bf16"].sharding)}

    head = f"restore: the checkpoint at {tmp_path / 'state'} is not what was expected:\n"
    hint = (
        "\n  To restore some of its leaves alone, use reshard.checkpoint.restore(path, like, partial=True), or in"
        " Orbax PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like),"
        " partial_restore=True), in its v1 a context with pytree.loading.partial_load = True."
    )
    cases = {
        head + "  more/w: expected bfloat16[32], but the checkpoint has nothing there": {**good, "more": {"w": bf16}},
        head + "  flag: expected nothing, but the checkpoint has a jax.Array\n"
        "  n: expected nothing, but the checkpoint has a scalar" + hint: {"bf16": bf16},
        "bf16: expected shape (16,), but the checkpoint has (32,).": other((16,), jnp.bfloat16),
        "bf16: expected int8[32], but the checkpoint has bfloat16[32], of which a cast would lose more than digits.": (
            other((32,), np.int8)
        ),
        "bf16: expected key<fry>, but the checkpoint has no typed keys there.": other((32,), key.dtype),
    }
    with ocp.StandardCheckpointer() as older:
        for load in (v1.load, older.restore):
            for message, target in cases.items():
                with pytest.raises(ReshardError) as caught:
                    load(tmp_path / "state", target)
                assert str(caught.value) == message
            found = load(tmp_path / "state", other((32,), np.float32))["bf16"]  # as Orbax casts
            assert found.dtype == np.float32 and (plain(found) == plain(bf16)).all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_pytree_save_and_restore_take_it(tmp_path, asynchronous):
    tree = mixed_tree() | {"name": "a run"}
    kind = ocp.AsyncCheckpointer if asynchronous else ocp.Checkpointer
    with kind(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "state", args=ocp.args.PyTreeSave(tree))
        if asynchronous:
            checkpointer.wait_until_finished()
        target = abstract(tree)
        found = checkpointer.restore(
            tmp_path / "state",
            args=ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)),
        )
    check_same(found, tree)


def test_a_checkpoint_manager_saves_restores_and_keeps_the_last_steps(tmp_path):
    tree = mixed_tree()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave(tree | {"epoch": step}))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        assert manager.latest_step() == 3
        found = manager.restore(3, args=ocp.args.StandardRestore(abstract(tree)))
    check_same(found, tree | {"epoch": 3})
    check_same(restore(tmp_path / "run" / "2", tree), tree | {"epoch": 2})


def test_items_of_a_composite_checkpoint_go_each_to_its_layout(tmp_path):
    tree = {"w": place(np.arange(8.0, dtype=np.float32), MpmdSharding(MESH, 1, P("data")))}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(
            4, args=ocp.args.Composite(state=ocp.args.StandardSave(tree), data=ocp.args.JsonSave({"position": 9}))
        )
        manager.wait_until_finished()
        found = manager.restore(
            4, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract(tree)), data=ocp.args.JsonRestore())
        )
    check_same(found["state"], tree)
    assert found["data"] == {"position": 9}


def test_restoring_to_other_groups_reads_no_more_than_the_arrays(tmp_path):
    values = random_values(scale=8)
    save(tmp_path / "state", place_all(values, shardings_for(MESH)))
    for groups in (1, 2, 8):
        mesh = mesh_of(groups)
        before = bytes_read()
        tree = restore(tmp_path / "state", values, shardings_for(mesh))
        assert bytes_read() - before < nbytes(values) * 1.05 + 50_000
        jax.tree.map(check_equal, tree, values)


def test_every_byte_is_written_once_whatever_the_replicas(tmp_path):
    values = random_values(scale=8)
    everywhere = jax.tree.map(lambda _: MpmdSharding(MESH, range(4)), values)
    save(tmp_path / "state", place_all(values, everywhere))
    written = sum(file.stat().st_size for file in (tmp_path / "state").rglob("*") if file.is_file())
    assert nbytes(values) <= written < nbytes(values) * 1.05 + 50_000


def test_what_is_on_disk_has_no_trace_of_groups(tmp_path):
    tree = mixed_tree()
    save(tmp_path / "state", tree)
    metadata = json.loads((tmp_path / "state" / "_METADATA").read_text())
    kinds = {entry["value_metadata"]["value_type"] for entry in metadata["tree_metadata"].values()}
    assert kinds == {"jax.Array", "np.ndarray", "scalar"}
    assert not (tmp_path / "state" / "_sharding").exists()
    text = "".join(p.read_text() for p in (tmp_path / "state").iterdir() if p.is_file() and p.name[0] == "_")
    assert "mpmd" not in text.lower()
    assert "group" not in text.lower()


@pytest.mark.parametrize("zarr3", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stock_orbax_that_never_saw_this_library_restores_it_on_any_mesh(tmp_path, zarr3):
    tree = mixed_tree()
    save(tmp_path / "state", tree, use_zarr3=zarr3)
    np.savez(tmp_path / "expected.npz", **{f"{i}": plain(x) for i, x in enumerate(jax.tree.leaves(tree))})
    assert run_stock("check_on_one_device_and_on_a_mesh", tmp_path) == "without this library"


@pytest.mark.slow
@pytest.mark.parametrize("api", ["older", "new"])
def test_stock_orbax_restores_what_its_own_checkpointers_wrote_for_us(tmp_path, api):
    tree = mixed_tree()
    if api == "new":
        of_v1()[0].save(tmp_path / "saved", tree)
        (tmp_path / "state").symlink_to(tmp_path / "saved" / "state")
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", tree)
    np.savez(tmp_path / "expected.npz", **{f"{i}": plain(x) for i, x in enumerate(jax.tree.leaves(tree))})
    assert run_stock("check_on_one_device_and_on_a_mesh", tmp_path) == "without this library"


@pytest.mark.parametrize("zarr3", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stock_checkpoint_restores_straight_into_stages(tmp_path, zarr3):
    values = random_values(scale=4)
    np.savez(tmp_path / "expected.npz", **{f"{i}": x for i, x in enumerate(jax.tree.leaves(values))})
    assert run_stock("save_sharded", tmp_path, str(int(zarr3))) == "without this library"
    before = bytes_read()
    tree = restore(tmp_path / "state", values, shardings_for(MESH))
    assert bytes_read() - before < nbytes(values) * 1.05 + 50_000
    jax.tree.map(check_equal, tree, values)
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "state", abstract(values, shardings_for(MESH)))
    jax.tree.map(check_equal, tree, values)


def run_stock(what: str, folder: Path, *arguments: str) -> str:
    """What `stock.py` says in the end, when all that it checks is right."""
    script = Path(__file__).parent / "stock.py"
    command = [sys.executable, str(script), what, str(folder), *arguments]
    done = subprocess.run(command, env=environment(4), text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def test_a_layer_of_a_stack_is_restored_alone_and_costs_just_its_bytes(tmp_path):
    rng = np.random.default_rng(0)
    stack = rng.integers(0, 2**32, (16, 128, 256), np.uint32).view(np.int32)
    save(tmp_path / "state", {"layers": {"w": place(stack, MpmdSharding(MESH, 0, P(None, "data")))}})
    layer = jax.ShapeDtypeStruct((128, 256), np.int32)
    like = {"stage": [Part("layers/w", 3, layer), Part("layers/w", 12, layer)]}
    before = bytes_read()
    tree = restore(tmp_path / "state", like, {"stage": [MpmdSharding(MESH, 1, P("data")), MpmdSharding(MESH, 3)]})
    read = bytes_read() - before
    check_equal(tree["stage"][0], stack[3])
    check_equal(tree["stage"][1], stack[12])
    assert 2 * layer.size * 4 <= read < 2 * layer.size * 4 + 30_000


def test_any_part_of_a_stored_array_can_be_asked_for(tmp_path):
    values = np.arange(6 * 8 * 10).reshape(6, 8, 10)
    save(tmp_path / "state", {"x": values})
    parts = {
        "rows": Part("x", slice(1, 4), np.zeros((3, 8, 10), values.dtype)),
        "last": Part("x", -1, np.zeros((8, 10), values.dtype)),
        "inner": Part("x", (slice(None), 2, slice(-3, None)), np.zeros((6, 3), values.dtype)),
        "one": Part("x", (5, 7, 9), np.zeros((), values.dtype)),
    }
    found = restore(tmp_path / "state", parts)
    np.testing.assert_array_equal(found["rows"], values[1:4])
    np.testing.assert_array_equal(found["last"], values[-1])
    np.testing.assert_array_equal(found["inner"], values[:, 2, -3:])
    assert found["one"] == values[5, 7, 9]


def test_some_leaves_are_restored_without_the_others(tmp_path):
    values = random_values(scale=8)
    save(tmp_path / "state", {"params": place_all(values, shardings_for(MESH)), "opt": np.zeros((1000, 100))})
    before = bytes_read()
    found = restore(tmp_path / "state", {"params": {"tied": values["tied"]}}, partial=True)
    assert bytes_read() - before < values["tied"].nbytes + 30_000
    np.testing.assert_array_equal(found["params"]["tied"], values["tied"])


def test_groups_on_one_device_share_what_was_read(tmp_path):
    mesh = MpmdMesh.from_groups([Mesh(np.array(jax.devices()[:1]), ("data",))] * 4)
    values = np.random.default_rng(0).integers(0, 2**32, (256, 256), np.uint32)
    save(tmp_path / "state", {"w": place(values, MpmdSharding(mesh, {0, 3}))})
    before = bytes_read()
    found = restore(tmp_path / "state", {"w": values}, MpmdSharding(mesh, {1, 2, 3}))["w"]
    assert bytes_read() - before < values.nbytes + 30_000
    assert found.mpmd_idxs == (1, 2, 3)
    check_equal(found, values)


def test_copies_of_a_restored_array_outlive_the_donation_of_one(tmp_path):
    values = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    sharding = MpmdSharding(MESH, {0, 1}, P())
    save(tmp_path / "state", {"w": place(values, sharding)})
    w = restore(tmp_path / "state", {"w": values}, sharding)["w"]
    mine, other = w._arrays[0], w._arrays[1]
    for _ in range(2):
        mine = jax.jit(lambda x: x.at[0].set(0.0), donate_argnums=0)(mine)
    assert not np.asarray(mine)[0].any()
    check_equal(other, values)


def test_groups_of_different_shapes_restore_one_array(tmp_path):
    devices = np.array(jax.devices())
    mesh = MpmdMesh.from_groups([Mesh(devices[:4], ("data",)), Mesh(devices[4:6], ("data",))])
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    sharding = MpmdSharding(mesh, {0, 1}, P("data"))
    save(tmp_path / "state", {"w": place(values, sharding)})
    check_equal(restore(tmp_path / "state", {"w": values}, sharding)["w"], values)


def test_without_ocdbt_there_is_a_file_for_each_chunk(tmp_path):
    tree = {"w": place(np.arange(64.0, dtype=np.float32).reshape(8, 8), MpmdSharding(MESH, 2, P("data")))}
    with ocp.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "state", tree)
        checkpointer.wait_until_finished()
    assert sorted(p.name for p in (tmp_path / "state" / "w").iterdir()) == [".zarray", "0.0", "1.0"]
    check_same(restore(tmp_path / "state", tree), tree)


def test_the_users_options_for_single_arrays_are_kept(tmp_path):
    tree = {"w": place(np.arange(4096.0, dtype=np.float32).reshape(64, 64), MpmdSharding(MESH, 2, P("data")))}
    save_args = {"w": ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16), chunk_byte_size=1024)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "state", args=ocp.args.PyTreeSave(tree, save_args=save_args))
        meta = checkpointer.metadata(tmp_path / "state").item_metadata["w"]
    assert meta.dtype == jnp.bfloat16
    assert np.prod(meta.storage.chunk_shape) * 2 <= 1024
    found = restore(tmp_path / "state", {"w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)})
    np.testing.assert_array_equal(
        found["w"].astype(np.float32), plain(tree["w"]).astype(jnp.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize("zarr3", [False, True])
def test_arrays_with_checksums_are_compressed_only_if_asked(tmp_path, zarr3):
    values = np.ones((256, 1024), np.float32)
    staged, plain = {"w": place(values, MpmdSharding(MESH, 1, P("data")))}, {"w": values}
    saves = {"as it is": (staged, {}), "compressed": (staged, {"use_compression": True}), "by Orbax": (plain, {})}
    sizes = {}
    for name, (tree, options) in saves.items():
        save(tmp_path / name, tree, use_zarr3=zarr3, **options)
        sizes[name] = sum(file.stat().st_size for file in (tmp_path / name).rglob("d/*"))
        check_equal(restore(tmp_path / name, {"w": values}, MpmdSharding(MESH, 2))["w"], values)
        with ocp.StandardCheckpointer() as checkpointer:
            np.testing.assert_array_equal(checkpointer.restore(tmp_path / name)["w"], values)
    assert 20 * max(sizes["compressed"], sizes["by Orbax"]) < values.nbytes <= sizes["as it is"]


def test_buffers_that_are_donated_right_after_an_async_save_are_saved_as_they_were(tmp_path):
    values = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    tree = {"w": place(values, MpmdSharding(MESH, 1, P("data")))}
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", tree)
        array = tree["w"].array_in(1)
        for _ in range(20):
            array = overwrite(array)
        array.block_until_ready()
        checkpointer.wait_until_finished()
        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "state")["w"], values)


def test_an_async_save_returns_before_the_checkpoint_is_written(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**32, (4096, 4096), np.uint32)
    tree = {"w": place(values, MpmdSharding(MESH, 1, P("data")))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", tree)
        assert not (tmp_path / "state").exists()  # 64 MiB are not on disk yet
        checkpointer.wait_until_finished()
        assert (tmp_path / "state").exists()


@pytest.mark.slow
def test_saving_and_restoring_need_little_memory_beyond_the_arrays(tmp_path):
    benchmark = Path(__file__).parent.parent.parent / "benchmarks" / "checkpoint.py"
    command = [sys.executable, str(benchmark), "--one", "reshard.checkpoint, stages", "--mib", "640"]
    env = environment() | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], env=env, text=True, capture_output=True, check=True, timeout=300
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["save_peak"] < 420 << 20
    assert found["restore_peak"] < 320 << 20


def test_importing_a_second_time_changes_nothing():
    from reshard.checkpoint import leaf_handler

    before = ocp.type_handlers.get_type_handler(jax.Array)
    check = ocp.StandardCheckpointHandler._validate_save_state
    leaf_handler.register()
    assert ocp.type_handlers.get_type_handler(jax.Array) is before
    assert ocp.type_handlers.get_type_handler(MpmdArray) is before
    assert ocp.StandardCheckpointHandler._validate_save_state is check


def test_importing_reshard_leaves_orbax_alone():
    script = "import sys, reshard; print('orbax.checkpoint' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, check=True)
    assert run.stdout == b"False\n"


@pytest.mark.parametrize("tensors", [None, TensorFormat()])
def test_a_save_that_takes_long_says_how_much_is_written(tmp_path, monkeypatch, tensors):
    shown = []

    @contextlib.contextmanager
    def waiting(state):
        shown.append(state())
        yield
        shown.append(state())

    monkeypatch.setattr(reshard.checkpoint, "waiting", waiting)
    folder = tmp_path / "state"
    save(folder, {"w": np.random.default_rng(0).random((64, 4096))}, tensors=tensors)
    (before, nothing), (after, most) = shown
    assert before == f"save: 0 B of about 2.0 MiB written to {folder}" and nothing == 0.0
    assert 0.8 < most < 1 and after.endswith(f"iB of about 2.0 MiB written to {folder}")
