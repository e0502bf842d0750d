"""Conversions between what stages save and what stages restore."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from stored_states import save

import reshard
from mpmd.arrays.boxes import Box
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from reshard import checkpoint
from reshard.__main__ import main
from reshard.conversion import copying
from reshard.storage import finder, stored


def test_a_stack_of_somebody_else_is_cut_and_its_layers_restore_into_their_stages(tmp_path):
    w = np.random.default_rng(0).random((4, 8, 6), np.float32)
    source = save(tmp_path / "theirs", {"layers": {"w": w}})
    assert main(["convert", str(source), str(tmp_path / "layers"), "--unstack", "layers", "--verify"]) == 0
    mesh = MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4]), "stage")
    like = {"layers": [{"w": jax.ShapeDtypeStruct((8, 6), np.float32)}] * 4}
    shardings = {"layers": [{"w": MpmdSharding(mesh, i // 2, PartitionSpec("data"))} for i in range(4)]}
    state = checkpoint.restore(tmp_path / "layers", like, shardings)
    for i, layer in enumerate(state["layers"]):
        assert layer["w"].mpmd_idxs == (i // 2,)
        np.testing.assert_array_equal(np.asarray(layer["w"]), w[i])


def test_what_stages_have_saved_is_stacked_like_any_checkpoint(tmp_path):
    mesh = MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4]), "stage")
    layers = [{"w": np.full((8, 6), i, np.float32)} for i in range(4)]
    shardings = [{"w": MpmdSharding(mesh, i // 2, PartitionSpec("data"))} for i in range(4)]
    state = reshard.spmd_to_mpmd_reshard(mesh, layers, shardings)
    checkpoint.save(tmp_path / "stages", {"layers": state})
    assert [leaf.shape for leaf in finder.find(tmp_path / "stages").leaves] == [(8, 6)] * 4
    assert main(["convert", str(tmp_path / "stages"), str(tmp_path / "stacked"), "--stack", "layers", "--verify"]) == 0
    like = {"layers": {"w": jax.ShapeDtypeStruct((4, 8, 6), np.float32)}}
    restored = checkpoint.restore(tmp_path / "stacked", like)
    np.testing.assert_array_equal(np.asarray(restored["layers"]["w"]), np.stack([layer["w"] for layer in layers]))


@pytest.mark.parametrize("threshold", ["1280KiB", "64MiB"])
@pytest.mark.parametrize("seed", range(3))
def test_a_bit_that_has_flipped_in_the_source_is_found_by_verify(tmp_path, capsys, threshold, seed):
    mesh = MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4]), "stage")
    rng = np.random.default_rng(seed)
    layers = [rng.normal(size=(256, 512)).astype(np.float32) for _ in range(2)]
    shardings = [MpmdSharding(mesh, i, PartitionSpec("data")) for i in range(2)]
    source, target = tmp_path / "source", tmp_path / "target"
    checkpoint.save(source, {"layers": reshard.spmd_to_mpmd_reshard(mesh, layers, shardings)})
    convert = ["convert", str(source), str(target), "--verify", "--threshold", threshold]
    assert main([*convert[:2], str(tmp_path / "good"), *convert[3:]]) == 0
    data = max(source.rglob("d/*"), key=lambda file: file.stat().st_size)
    flipped = bytearray(data.read_bytes())
    flipped[int(len(flipped) * rng.uniform(0.2, 0.8))] ^= 4
    data.write_bytes(flipped)
    capsys.readouterr()
    assert main(convert) == 1
    assert "layers/" in (message := capsys.readouterr().err) and "damaged" in message
    assert not target.exists()


def test_the_parts_of_a_box_come_in_order_and_within_the_memory():
    leaf = stored.Leaf(("w",), "jax.Array", (7, 9, 10), np.dtype(np.float32), (2, 4, 5))
    values = np.arange(7 * 9 * 10).reshape(7, 9, 10)
    box = Box((1, 2, 3), (7, 9, 9))
    for nbytes in (160, 400, 900, 10_000):
        parts = list(copying._in_order(box, leaf, nbytes))
        assert [x for p in parts for x in values[p.slices].ravel()] == values[box.slices].ravel().tolist()
        assert all(leaf.cells(p).nbytes(4) <= nbytes for p in parts)
