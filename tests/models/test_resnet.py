"""ResNets with batch statistics, of Linen, Equinox, NNX and Haiku modules: each library's own way of keeping them."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType
from plain_and_pipelined import stage_mesh, train_both
from programs.parts import normal

import mpmd

SIZE, BATCH, NUM_MICROBATCHES, NUM_STAGES, CLASSES = 8, 4, 4, 4, 5
FILTERS = (8, 8, 16, 16)


def _images(key):
    x, y = jax.random.split(key)
    return {
        "image": normal(x, NUM_MICROBATCHES, BATCH, SIZE, SIZE, 3),
        "label": jax.random.randint(y, (NUM_MICROBATCHES, BATCH), 0, CLASSES),
    }


def _batches():
    return [jax.jit(_images)(k) for k in jax.random.split(jax.random.key(1), 3)]


def _in_float64(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _metrics(logits, labels):
    loss = optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)).mean()
    return {"loss": loss, "accuracy": (logits.argmax(-1) == labels).mean()}


def _home(path):
    if found := re.search(r"block_?(\d)|blocks\[(\d)\]|blocks'\]\[(\d)", path):
        return int(next(filter(None, found.groups())))
    return 0 if "stem" in path else NUM_STAGES - 1 if "head" in path else None


@pytest.mark.exhaustive
def test_a_linen_resnet_with_a_train_state():
    """Statistics of the microbatches are averaged; weight decay is part of the loss, so the loss reads every kernel."""

    class TrainState(train_state.TrainState):
        batch_stats: Any

    class Block(nn.Module):
        filters: int
        strides: int

        @nn.compact
        def __call__(self, x, norm):
            y = nn.Conv(self.filters, (3, 3), self.strides, use_bias=False)(x)
            y = nn.Conv(self.filters, (3, 3), use_bias=False)(nn.relu(norm()(y)))
            y = norm(scale_init=nn.initializers.constant(0.5))(y)
            if x.shape != y.shape:
                x = norm(name="norm_proj")(nn.Conv(self.filters, (1, 1), self.strides, use_bias=False, name="proj")(x))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            def norm(**kwargs):
                return nn.BatchNorm(use_running_average=not train, momentum=0.9, **kwargs)

            x = nn.relu(norm(name="stem_norm")(nn.Conv(FILTERS[0], (3, 3), use_bias=False, name="stem")(x)))
            for i, filters in enumerate(FILTERS):
                strides = 1 if i == 0 or filters == FILTERS[i - 1] else 2
                x = Block(filters, strides, name=f"block{i}")(x if i == 0 else mpmd.mark_stage_end(x), norm)
            return nn.Dense(CLASSES, name="head")(x.mean((1, 2)))

    model = ResNet()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((BATCH, SIZE, SIZE, 3)))
    schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 10)
    state = TrainState.create(
        apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"],
        tx=optax.sgd(schedule, momentum=0.9, nesterov=True),
    )  # fmt: skip

    def step(state, batch, schedule):
        def loss(params, microbatch):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, microbatch["image"], mutable=["batch_stats"])
            metrics = _metrics(logits, microbatch["label"])
            decay = 0.5 * sum((p**2).sum() for p in jax.tree.leaves(params) if p.ndim > 1)
            return metrics["loss"] + 1e-4 * decay, (new["batch_stats"], metrics)

        (_, (stats, metrics)), grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss, has_aux=True)(state.params, m), batch,
            schedule=schedule, operation=mpmd.Mean,
        )  # fmt: skip
        return state.apply_gradients(grads=grads, batch_stats=stats), metrics

    train_both(step, state, _batches(), stage_mesh(NUM_STAGES), home=_home, rtol=2e-4)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(AxisType.Auto, marks=pytest.mark.slow),
        # `eqx.nn.State.set` compares the type of a constant, which has no mesh, with that of an argument.
        pytest.param(
            AxisType.Explicit,
            marks=[pytest.mark.exhaustive, pytest.mark.xfail(raises=ValueError, reason="constants have no mesh")],
        ),
    ],
)
def test_an_equinox_resnet_with_a_state_in_float64(axes):
    """`eqx.nn.State` goes through the model; the batch is vmapped with an axis name, over which BatchNorm averages.

    In float32 the first step, in which all running variances are zero, turns rounding into several percent.
    """

    class Block(eqx.Module):
        first: eqx.nn.Conv2d
        second: eqx.nn.Conv2d
        norms: list
        short: eqx.nn.Conv2d | None

        def __init__(self, num_in, num_out, key):
            a, b, c = jax.random.split(key, 3)
            stride = 1 if num_in == num_out else 2
            self.first = eqx.nn.Conv2d(num_in, num_out, 3, stride, 1, use_bias=False, key=a)
            self.second = eqx.nn.Conv2d(num_out, num_out, 3, 1, 1, use_bias=False, key=b)
            self.norms = [eqx.nn.BatchNorm(num_out, "batch", mode="ema") for _ in range(2)]
            self.short = None if num_in == num_out else eqx.nn.Conv2d(num_in, num_out, 1, 2, key=c)

        def __call__(self, x, state):
            y, state = self.norms[0](self.first(x), state)
            y, state = self.norms[1](self.second(jax.nn.relu(y)), state)
            return jax.nn.relu(y + (x if self.short is None else self.short(x))), state

    class ResNet(eqx.Module):
        stem: eqx.nn.Conv2d
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key):
            s, h, *keys = jax.random.split(key, 2 + NUM_STAGES)
            self.stem = eqx.nn.Conv2d(3, FILTERS[0], 3, 1, 1, key=s)
            sizes = zip((FILTERS[0], *FILTERS), FILTERS, keys, strict=False)
            self.blocks = [Block(n, m, k) for n, m, k in sizes]
            self.head = eqx.nn.Linear(FILTERS[-1], CLASSES, key=h)

        def __call__(self, x, state):
            x = self.stem(jnp.moveaxis(x, -1, 0))
            for i, block in enumerate(self.blocks):
                x, state = block(x if i == 0 else mpmd.mark_stage_end(x), state)
            return self.head(x.mean((1, 2))), state

    model, stats = eqx.filter_jit(eqx.nn.make_with_state(ResNet))(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(1e-3, eps=1e-4)

    def loss(params, stats, batch):
        model = jax.vmap(eqx.combine(params, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, stats = model(batch["image"], stats)
        return _metrics(logits, batch["label"])["loss"], stats

    def step(state, batch, schedule):
        params, opt, stats = state

        def one(m):
            (value, new), grads = eqx.filter_value_and_grad(loss, has_aux=True)(params, stats, m)
            return value, grads, eqx.filter(new, eqx.is_inexact_array)

        value, grads, averaged = mpmd.treduce(one, batch, schedule=schedule, operation=mpmd.Mean)
        stats = eqx.combine(averaged, stats)
        updates, opt = optimizer.update(grads, opt, params)
        return (eqx.apply_updates(params, updates), opt, stats), value

    with jax.enable_x64(True):
        state, batches = _in_float64((params, jax.jit(optimizer.init)(params), stats)), _in_float64(_batches())
        train_both(step, state, batches, stage_mesh(NUM_STAGES, axes), home=_home, rtol=1e-10)


@pytest.mark.exhaustive
def test_an_nnx_resnet_with_an_optimizer_and_metrics():
    """The model, `nnx.Optimizer` and `nnx.MultiMetric` are split and merged, as in NNX's functional training loops."""

    class Block(nnx.Module):
        def __init__(self, num_in, num_out, rngs):
            strides = 1 if num_in == num_out else 2
            self.first = nnx.Conv(num_in, num_out, (3, 3), strides, use_bias=False, rngs=rngs)
            self.second = nnx.Conv(num_out, num_out, (3, 3), use_bias=False, rngs=rngs)
            self.norm, self.last = (nnx.BatchNorm(num_out, momentum=0.9, rngs=rngs) for _ in range(2))
            self.short = None if num_in == num_out else nnx.Conv(num_in, num_out, (1, 1), strides, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            y = self.last(self.second(nnx.relu(self.norm(self.first(x)))))
            return nnx.relu(self.dropout(y) + (x if self.short is None else self.short(x)))

    class ResNet(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(3, FILTERS[0], (3, 3), rngs=rngs)
            sizes = zip((FILTERS[0], *FILTERS), FILTERS, strict=False)
            self.blocks = nnx.List([Block(n, m, rngs) for n, m in sizes])
            self.head = nnx.Linear(FILTERS[-1], CLASSES, rngs=rngs)

        def __call__(self, x):
            x = self.stem(x)
            for i, block in enumerate(self.blocks):
                x = block(x if i == 0 else mpmd.mark_stage_end(x))
            return self.head(x.mean((1, 2)))

    @nnx.jit
    def build():
        model = ResNet(nnx.Rngs(0, dropout=1))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3, eps=1e-4), wrt=nnx.Param)
        measured = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Average("accuracy"))
        return model, optimizer, measured

    graph, state = nnx.split(build())

    def step(state, batch, schedule):
        model, optimizer, measured = nnx.merge(graph, state)
        model_graph, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)

        def loss(params, m):
            model = nnx.merge(model_graph, params, stats, rest, copy=True)
            metrics = _metrics(model(m["image"]), m["label"])
            return metrics["loss"], (nnx.state(model, nnx.BatchStat), metrics)

        (_, (stats, metrics)), grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss, has_aux=True)(params, m), batch, schedule=schedule, operation=mpmd.Mean
        )
        nnx.update(model, stats)
        optimizer.update(model, grads)
        measured.update(**metrics)
        return nnx.state((model, optimizer, measured)), measured.compute()

    train_both(step, state, _batches(), stage_mesh(NUM_STAGES), home=_home, rtol=2e-4)


@pytest.mark.exhaustive
def test_a_haiku_resnet_with_a_state():
    """`hk.transform_with_state`: parameters and moving averages are named by the modules' paths."""
    hk = pytest.importorskip("haiku")

    def block(i, x, training):
        with hk.name_scope(f"block{i}"):
            stride = 1 if x.shape[-1] == FILTERS[i] else 2
            y = hk.Conv2D(FILTERS[i], 3, stride, with_bias=False, name="first")(x)
            y = jax.nn.relu(hk.BatchNorm(True, True, 0.9, name="norm")(y, training))
            y = hk.BatchNorm(True, True, 0.9, name="last")(
                hk.Conv2D(FILTERS[i], 3, with_bias=False, name="second")(y), training
            )
            short = x if stride == 1 else hk.Conv2D(FILTERS[i], 1, stride, name="short")(x)
            return jax.nn.relu(y + short)

    def forward(x, training):
        x = hk.Conv2D(FILTERS[0], 3, name="stem")(x)
        for i in range(NUM_STAGES):
            x = block(i, x if i == 0 else mpmd.mark_stage_end(x), training)
        return hk.Linear(CLASSES, name="head")(x.mean((1, 2)))

    model = hk.transform_with_state(forward)
    params, stats = jax.jit(model.init, static_argnums=2)(jax.random.key(0), jnp.zeros((BATCH, SIZE, SIZE, 3)), True)
    optimizer = optax.adam(1e-3, eps=1e-4)

    def step(state, batch, schedule):
        params, stats, opt = state

        def loss(params, m):
            logits, new = model.apply(params, stats, None, m["image"], True)
            metrics = _metrics(logits, m["label"])
            return metrics["loss"], (new, metrics)

        kinds = jax.tree.map(lambda x: mpmd.Mean if jnp.issubdtype(x.dtype, jnp.floating) else mpmd.Max, stats)
        (_, (stats, metrics)), grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss, has_aux=True)(params, m), batch,
            schedule=schedule, operation=((mpmd.Mean, (kinds, mpmd.Mean)), mpmd.Mean),
        )  # fmt: skip
        updates, opt = optimizer.update(grads, opt)
        return (optax.apply_updates(params, updates), stats, opt), metrics

    state = params, stats, jax.jit(optimizer.init)(params)
    train_both(step, state, _batches(), stage_mesh(NUM_STAGES), home=_home, rtol=2e-4)
