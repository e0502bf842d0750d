"""Lists of microbatches of several shapes where training goes on from a checkpoint in the middle of an epoch."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from samples import slow_first

import mpmd
from reshard.checkpoint import abstract

WIDTH = 6
EPOCH = [(2, 3, 2, 4), (4, 2, 3, 3), (3, 2), (2, 5, 5, 3, 2), (5, 2, 4), (4, 2, 5)]
SHORT = [(2, 3), (3, 2, 2)]


def lists(epoch, seed):
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=(4, n, WIDTH)).astype(np.float32) for n in rows] for rows in epoch]


def train(state, microbatches):
    def one(x):
        def loss(params):
            return jnp.vdot(mpmd.mark_stage_end(jnp.tanh(x @ params[0])) @ params[1], x)

        return jax.grad(loss)(state["params"])

    grads = mpmd.treduce(one, microbatches, "1f1b", operation=mpmd.Mean, weights=lambda x: x.shape[1])
    moments = [0.9 * m + g for m, g in zip(state["moments"], grads, strict=True)]
    params = [p - 0.001 * m for p, m in zip(state["params"], moments, strict=True)]
    return {"params": params, "moments": moments, "step": state["step"] + 1}


def start():
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(2)]
    return {"params": params, "moments": [np.zeros_like(p) for p in params], "step": np.int32(0)}


def jitted():
    mesh = mpmd.MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
    return mpmd.jit(train, mpmd_mesh=mesh, in_shardings=(None, P("data")), donate_argnums=0)


def after(state, step, batches):
    for microbatches in batches:
        state = step(state, microbatches)
    return jax.tree.map(np.asarray, mpmd.device_get(state))


@pytest.mark.parametrize(
    ("epoch", "place"),
    [(SHORT, 1), *slow_first((EPOCH, 3), (EPOCH, 1))],
    ids=["short-1", "3", "1"],
)
def test_an_epoch_goes_on_from_an_orbax_checkpoint_with_the_same_bits(tmp_path, epoch, place):
    batches = lists(epoch, 1)
    expected = after(start(), jitted(), batches)
    first, state = jitted(), start()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for number, microbatches in enumerate(batches[:place], start=1):
            state = first(state, microbatches)
            manager.save(number, args=ocp.args.StandardSave(state))
        shardings = jax.tree.map(lambda x: x.mpmd_sharding, state)
        manager.wait_until_finished()
        last = manager.latest_step()
        state = manager.restore(last, args=ocp.args.StandardRestore(abstract(state, shardings)))
    found = after(state, jitted(), batches[last:])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
