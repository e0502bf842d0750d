"""A run that is broken off goes on, in whatever layout, with the losses that it would have had."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layouts import mesh_of
from processes import ROOT
from samples import slow_first

import mpmd
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.sharding import MpmdSharding
from reshard.checkpoint import abstract, restore, save
from scheduler import GPipe, InterleavedOneFOneB, OneFOneB

pytestmark = pytest.mark.slow

NUM_LAYERS, WIDTH, ROWS, MICROBATCHES = 8, 16, 8, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
DATA = np.random.default_rng(0).normal(size=(400, WIDTH)).astype(np.float32)


def init(key):
    keys = jax.random.split(key, 1 + NUM_LAYERS)
    layers = [
        {
            "up": jax.random.normal(k, (WIDTH, 4 * WIDTH)) / 4,
            "down": jax.random.normal(jax.random.fold_in(k, 1), (4 * WIDTH, WIDTH)) / 8,
        }
        for k in keys[1:]
    ]
    params = {"embed": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 4, "layers": layers}
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "step": jnp.int32(0),
        "position": jnp.int32(0),  # in the data
        "key": jax.random.key(3),  # of the dropout that comes next
    }


def make_step(num_stages, schedule):
    """One training step: a tied embedding, residual layers with dropout, clipping by the global norm, and Adam."""

    def loss(params, x, key):
        h = x @ params["embed"]
        for i, layer in enumerate(params["layers"]):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape)
            h = h + jnp.where(kept, jnp.tanh(h @ layer["up"]) @ layer["down"], 0)
            if (i + 1) % (NUM_LAYERS // num_stages) == 0 and i + 1 < NUM_LAYERS:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h @ params["embed"].T - jnp.sin(x)) ** 2)

    def step(state, x):
        key, dropout_key = jax.random.split(state["key"])
        microbatches = (x.reshape(MICROBATCHES, -1, WIDTH), jax.random.split(dropout_key, MICROBATCHES))
        value, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss)(state["params"], *mb),
            microbatches,
            schedule=schedule,
            operation=mpmd.Mean,
        )
        updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        position = state["position"] + ROWS
        return {
            "params": params,
            "opt_state": opt_state,
            "step": state["step"] + 1,
            "position": position,
            "key": key,
        }, value

    return step


def pipeline(num_groups, num_stages, schedule):
    """The compiled step, and where its state lies."""
    abstract_state = jax.eval_shape(init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    step = make_step(num_stages, schedule)
    mesh = mesh_of(num_groups)
    compiled = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0).lower(abstract_state, batch).compile()
    return compiled, compiled.input_shardings[0][0]


def train(step, state, num_steps):
    losses = []
    for _ in range(num_steps):
        start = int(state["position"])
        state, loss = step(state, DATA[start : start + ROWS])
        losses.append(float(loss))
    return state, losses


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory):
    """Losses of six steps on four stages, and the folder with a checkpoint after three."""
    folder = tmp_path_factory.mktemp("run")
    step, layout = pipeline(4, 4, OneFOneB(4))
    state = mpmd.jit(init, mpmd_mesh=mesh_of(4), out_shardings=layout)(jax.random.key(0))
    with ocp.CheckpointManager(folder) as manager:
        state, before = train(step, state, 3)
        manager.save(3, args=ocp.args.StandardSave(state))
        # Not waited for: the next steps are donated the arrays that are being saved.
        state, after = train(step, state, 3)
    assert len(set(before + after)) == 6
    return folder, step, layout, after


def like():
    return jax.eval_shape(init, jax.random.key(0))


def test_on_the_same_stages_the_losses_are_the_same_bits(broken_run):
    folder, step, layout, expected = broken_run
    with ocp.CheckpointManager(folder) as manager:
        assert manager.latest_step() == 3
        state = manager.restore(3, args=ocp.args.StandardRestore(abstract(like(), layout)))
    assert int(state["step"]) == 3
    assert int(state["position"]) == 3 * ROWS
    assert train(step, state, 3)[1] == expected


@pytest.mark.parametrize(
    ("num_groups", "num_stages", "schedule"),
    slow_first((4, 8, InterleavedOneFOneB(8, 4)), (2, 2, OneFOneB(2)), (8, 8, GPipe(8))),
    ids=["eight stages on four groups, interleaved", "two stages", "eight stages and GPipe"],
)
def test_on_other_stages_and_schedules_the_losses_are_the_same(broken_run, num_groups, num_stages, schedule):
    folder, *_, expected = broken_run
    step, layout = pipeline(num_groups, num_stages, schedule)
    state = restore(folder / "3", like(), layout)
    np.testing.assert_allclose(train(step, state, 3)[1], expected, rtol=2e-5)


@pytest.mark.slow
def test_on_one_device_under_plain_jit_the_losses_are_the_same(broken_run):
    folder, *_, expected = broken_run
    state = restore(folder / "3", like(), jax.sharding.SingleDeviceSharding(jax.devices()[3]))
    assert all(leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(state))
    step = jax.jit(make_step(1, None))
    np.testing.assert_allclose(train(step, state, 3)[1], expected, rtol=2e-5)


def split(sharding, path):
    """Tensor parallelism: the up projection by columns, the down projection by rows."""
    spec = {"up": (None, "data"), "down": ("data", None)}.get(getattr(path[-1], "key", None), ())
    if isinstance(sharding, MpmdSharding):
        return sharding.replace(spec=PartitionSpec(*spec))
    return NamedSharding(sharding, PartitionSpec(*spec))


@pytest.mark.slow
def test_with_the_layers_split_over_the_devices_of_a_group_the_losses_are_the_same(broken_run):
    folder, *_, expected = broken_run
    _, layout = pipeline(2, 2, OneFOneB(2))
    paths = jax.tree_util.tree_map_with_path(lambda path, _: path, like())
    parallel = jax.tree.map(split, layout, paths, is_leaf=lambda x: isinstance(x, MpmdSharding))
    state = restore(folder / "3", like(), parallel)
    assert state["params"]["layers"][0]["up"].addressable_shards[0].data.shape == (WIDTH, WIDTH)
    step = mpmd.jit(make_step(2, OneFOneB(2)), mpmd_mesh=mesh_of(2), donate_argnums=0)
    np.testing.assert_allclose(train(step, state, 3)[1], expected, rtol=2e-5)


@pytest.mark.slow
def test_on_an_spmd_mesh_the_losses_are_the_same_and_it_goes_back_into_stages(broken_run, tmp_path):
    folder, pipelined, layout, expected = broken_run
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    spmd = jax.tree_util.tree_map_with_path(lambda path, _: split(mesh, path), like())
    state = restore(folder / "3", like(), spmd)
    step = jax.jit(make_step(1, None))
    state, losses = train(step, state, 1)
    np.testing.assert_allclose(losses, expected[:1], rtol=2e-5)
    save(tmp_path / "spmd", state)  # written by Orbax's own handler: there is no MpmdArray in it
    state = restore(tmp_path / "spmd", like(), layout)
    assert all(isinstance(leaf, MpmdArray) for leaf in jax.tree.leaves(state))
    np.testing.assert_allclose(train(pipelined, state, 2)[1], expected[1:], rtol=2e-5)


# The example, as a user starts it.


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("--resume", "--resume needs --checkpoint-dir, the folder to go on from"),
        ("--save-every 0", "--save-every is 0; it must be at least 1"),
        ("--keep 0", "--keep is 0; it must be at least 1"),
        ("--layers 0", "--layers is 0; it must be at least 1"),
        ("--lr -1", "--lr is -1.0; it must be positive"),
        ("--lr nan", "--lr is nan; it must be positive"),
        ("--seed -1", "--seed is -1; it must be at least 0 and below 2**63"),
        (f"--seed {2**63}", f"--seed is {2**63}; it must be at least 0 and below 2**63"),
        ("--audit-every -1", "--audit-every is -1; it must be at least 0"),
        ("--plot /no/such/folder/loss.svg", "--plot /no/such/folder/loss.svg: there is no folder /no/such/folder"),
        (f"--checkpoint-dir {__file__}", f"--checkpoint-dir {__file__} is not a folder"),
    ],
)
def test_the_example_refuses_options_that_make_no_sense_before_it_trains(options, fault, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    parse_args = importlib.import_module("train_gpt").parse_args
    with pytest.raises(SystemExit) as exit_:
        parse_args(options.split())
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].partition(": error: ")[2] == fault
