"""Conversions between what stages save and what stages restore."""

import jax
import numpy as np
from jax.sharding import PartitionSpec
from stored_states import save

import reshard
from mpmd.mesh import MpmdMesh, MpmdSharding
from reshard import checkpoint, stored
from reshard.__main__ import main


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
    assert [leaf.shape for leaf in stored.find(tmp_path / "stages").leaves] == [(8, 6)] * 4
    assert main(["convert", str(tmp_path / "stages"), str(tmp_path / "stacked"), "--stack", "layers", "--verify"]) == 0
    like = {"layers": {"w": jax.ShapeDtypeStruct((4, 8, 6), np.float32)}}
    restored = checkpoint.restore(tmp_path / "stacked", like)
    np.testing.assert_array_equal(np.asarray(restored["layers"]["w"]), np.stack([layer["w"] for layer in layers]))
