"""A model that scans over stacked layers trains as a pipeline: each group has its layers and nothing else of them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs.parts import normal
from scanned_models import WIDTH, batches, scanned_loss, scanned_params

import mpmd
import scheduler
from mpmd.partition.outline import OutlineTransfer

LAYERS = 12


def step_of(optimizer, schedule, *, loss=scanned_loss, cuts=None, ema=False):
    """A training step: state and batch in, state, loss and the norms of all layers out."""

    def step(state, batch):
        def one(microbatch):
            return jax.value_and_grad(loss, has_aux=True)(state["params"], microbatch)

        operation = ((mpmd.Mean, mpmd.Mean), mpmd.Mean)
        (value, norms), grads = mpmd.treduce(one, batch, schedule=schedule, operation=operation, cuts=cuts)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "moments": moments}
        if ema:
            new["ema"] = optax.incremental_update(params, state["ema"], 0.1)
        return new, {"loss": value, "norms": norms, "gradients": optax.global_norm(grads)}

    return step


def state_of(optimizer, num_layers=LAYERS, ema=False):
    params = scanned_params(jax.random.key(0), num_layers)
    state = {"params": params, "moments": optimizer.init(params)}
    return state | ({"ema": jax.tree.map(jnp.copy, params)} if ema else {})


def mesh_of(num_groups):
    return mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=[d]) for d in jax.devices()[:num_groups]])


def assert_trains_alike(optimizer, schedule, *, steps=3, rtol=2e-4, **options):
    """The pipeline and plain `jax.jit` from one state; returns the compiled step and its last state."""
    ema, dropout = options.pop("ema", False), options.pop("dropout", False)
    step = functools.partial(step_of, optimizer, ema=ema, **options)
    state, plain = (state_of(optimizer, ema=ema) for _ in range(2))
    pipeline = mpmd.jit(step(schedule), mpmd_mesh=mesh_of(schedule.num_groups), donate_argnums=0)
    reference = jax.jit(step(None))
    compiled = pipeline.lower(state, batches(jax.random.key(1), dropout=dropout)).compile()
    for n in range(steps):
        batch = batches(jax.random.key(n), dropout=dropout)
        state, metrics = pipeline(state, batch)
        plain, expected = reference(plain, batch)
        for name in expected:
            np.testing.assert_allclose(mpmd.device_get(metrics[name]), expected[name], rtol=rtol, err_msg=name)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(mpmd.device_get(x), y, rtol=rtol, atol=2e-5), state, plain)
    return compiled, state


def crossing_bytes(compiled):
    """What crosses between groups outside of the loops, in bytes per value."""
    outline = compiled._programs.outline
    return [v.var.aval.size for v in outline.items if isinstance(v, OutlineTransfer)]


@pytest.fixture(scope="module")
def adamw():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return assert_trains_alike(optimizer, scheduler.OneFOneB(4), ema=True, cuts=(3, 3, 3, 3))


@pytest.mark.slow
def test_each_group_has_a_quarter_of_the_layers_and_no_more(adamw):
    compiled, state = adamw
    stacks = jax.tree.leaves([state["params"]["layers"], state["ema"]["layers"]])
    stacks += [x for x in jax.tree.leaves(state["moments"]) if x.ndim and x.shape[0] == LAYERS]
    assert len(stacks) == 3 + 3 + 2 * 3
    for x in stacks:
        assert x.mpmd_sharding.split == {g: ((3 * g, 3 * g + 3),) for g in range(4)}
        assert all(p.devices() == {jax.devices()[start // 3]} for (start, _), p in x.pieces.items())
    held = jax.tree.leaves(state)
    for g, stats in compiled.memory_analysis().items():
        whole = sum(x.nbytes for x in held if not x.pieces and g in x.mpmd_idxs)
        assert stats["parameters"] + stats["state"] == sum(x.nbytes for x in stacks) // 4 + whole
        assert stats["gradients"] < 2 * sum(x.nbytes for x in stacks) // 4


@pytest.mark.slow
def test_nothing_but_scalars_and_the_shared_bias_crosses_outside_of_the_loop(adamw):
    compiled, _ = adamw
    assert max(crossing_bytes(compiled)) <= 32
    assert "needs all layers" not in compiled.explain()
    assert not re.search(r"\[\d+,\d+,\d+\]", compiled.explain().partition("outside of the loops")[2])


@pytest.mark.slow
def test_state_keeps_its_layout_and_is_not_moved(adamw):
    compiled, state = adamw
    assert jax.tree.map(lambda x: x.mpmd_sharding, state) == compiled.output_shardings[0]
    assert compiled.output_shardings[0] == compiled.input_shardings[0][0]


@pytest.mark.slow
def test_prediction_runs_each_layer_where_training_left_its_weights(adamw):
    _, state = adamw
    params, batch = state["params"], jax.tree.map(lambda x: x[0], batches(jax.random.key(5)))
    predict = mpmd.jit(lambda params, batch: scanned_loss(params, batch, checkpointed=False), mpmd_mesh=mesh_of(4))
    compiled = predict.lower(params, batch).compile()
    assert max(crossing_bytes(compiled)) <= 2 * 6 * WIDTH  # activations
    value, norms = predict(params, batch)
    wanted, wanted_norms = scanned_loss(mpmd.device_get(params), batch, checkpointed=False)
    np.testing.assert_allclose(float(value), wanted, rtol=1e-5)
    np.testing.assert_allclose(mpmd.device_get(norms), wanted_norms, rtol=1e-5)
    assert norms.mpmd_sharding.split == params["layers"]["up"].mpmd_sharding.split


@pytest.mark.parametrize(
    ("schedule", "cuts"),
    [
        pytest.param(scheduler.GPipe(3), (3, 7, 3), marks=pytest.mark.exhaustive),
        pytest.param(scheduler.InterleavedOneFOneB(4, 2), (3, 3, 3, 3), marks=pytest.mark.slow),
        pytest.param(scheduler.ZeroBubbleH1(2), (12, 1), marks=pytest.mark.exhaustive),
    ],
)
def test_other_schedules_and_uneven_cuts_train_alike(schedule, cuts):
    _, state = assert_trains_alike(optax.sgd(0.1), schedule, cuts=cuts, steps=2, dropout=cuts == (12, 1))
    split = state["params"]["layers"]["up"].mpmd_sharding.split
    wanted = {
        (3, 3, 3, 3): {0: ((0, 3), (6, 9)), 1: ((3, 6), (9, 12))},
        (3, 7, 3): {0: ((0, 3),), 1: ((3, 10),), 2: ((10, 12),)},
        (12, 1): None,
    }
    assert split == wanted[cuts]


def _experts_loss(params, batch):
    def layer(x, w):
        return mpmd.mark_layer_end(x + jnp.tanh(jnp.einsum("bd,edf->bf", x, w["up"])) @ w["down"].mean(0)), None

    return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()


@pytest.mark.slow
def test_muon_of_stacked_experts_stays_in_each_group():
    """Muon merges the axes of layers and experts for its products; the layers are still apart."""
    matrices = {name: optax.contrib.MuonDimensionNumbers(2, 3) for name in ("up", "down")}
    optimizer = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=matrices)
    keys = dict(zip(matrices, jax.random.split(jax.random.key(0)), strict=True))
    params = {name: normal(key, 4, 3, 8, 8) / 8 for name, key in keys.items()}
    state, batch = (params, optimizer.init(params)), normal(jax.random.key(1), 4, 2, 8)

    def step(state, batch, schedule):
        params, moments = state
        one = lambda x: jax.value_and_grad(_experts_loss)(params, x)  # noqa: E731
        value, grads = mpmd.treduce(one, batch, schedule=schedule, operation=mpmd.Mean)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    pipeline = mpmd.jit(functools.partial(step, schedule="1f1b"), mpmd_mesh=mesh_of(2))
    compiled = pipeline.lower(state, batch).compile()
    assert max(crossing_bytes(compiled)) <= 32
    assert "needs all layers" not in compiled.explain()
    assert compiled.input_shardings[0][0][0]["up"].split == {0: ((0, 2),), 1: ((2, 4),)}
    expected = jax.jit(functools.partial(step, schedule=None))(state, batch)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(mpmd.device_get(x), y, rtol=2e-4, atol=2e-5),
        compiled(state, batch), expected,
    )  # fmt: skip
