"""State space models: S5 (complex states, an associative scan, rates by kind) and Mamba (a selective scan)."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from plain_and_pipelined import stage_mesh, train_both
from programs.parts import normal

import mpmd

WIDTH, STATES, LENGTH, BATCH, NUM_MICROBATCHES, NUM_STAGES, VOCABULARY = 16, 8, 8, 2, 4, 4, 20


def _home(path):
    if found := re.search(r"layer_?(\d)", path):
        return int(found[1])
    return 0 if re.search("encoder|embed", path) else NUM_STAGES - 1 if re.search("decoder|final", path) else None


# --- S5 -------------------------------------------------------------------------------------------


def _diagonal(key):
    """Eigenvalues as (real, imaginary) columns: parameters are real, the state is complex."""
    return jnp.stack([-0.5 * jnp.ones(STATES), jnp.pi * jnp.arange(STATES, dtype=jnp.float32)], -1)


class S5(nn.Module):
    @nn.compact
    def __call__(self, u):
        diagonal = self.param("Lambda", _diagonal)
        b = self.param("B", nn.initializers.lecun_normal(), (STATES, WIDTH, 2))
        c = self.param("C", nn.initializers.lecun_normal(), (WIDTH, STATES, 2))
        d = self.param("D", nn.initializers.normal(1.0), (WIDTH,))
        log_step = self.param("log_step", lambda k: jax.random.uniform(k, (STATES,), minval=-4.0, maxval=-2.0))
        eigenvalues, step = jax.lax.complex(diagonal[:, 0], diagonal[:, 1]), jnp.exp(log_step)
        discrete = jnp.exp(eigenvalues * step)
        b = ((discrete - 1) / eigenvalues)[:, None] * jax.lax.complex(b[..., 0], b[..., 1])
        inputs = u @ b.T
        factors = jnp.broadcast_to(discrete, inputs.shape)
        _, states = jax.lax.associative_scan(lambda i, j: (j[0] * i[0], j[0] * i[1] + j[1]), (factors, inputs))
        return 2 * (states @ jax.lax.complex(c[..., 0], c[..., 1]).T).real + d * u


class S5Layer(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x):
        h = S5(name="seq")(nn.BatchNorm(not self.train, momentum=0.9, axis_name="batch", name="norm")(x))
        drop = nn.Dropout(0.1, broadcast_dims=(0,), deterministic=not self.train)
        h = drop(nn.gelu(h))
        return x + drop(h * nn.sigmoid(nn.Dense(WIDTH, name="gate")(h)))


class S5Classifier(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="encoder")(x)
        for i in range(NUM_STAGES):
            x = S5Layer(self.train, name=f"layer_{i}")(x if i == 0 else mpmd.mark_stage_end(x))
        return nn.log_softmax(nn.Dense(3, name="decoder")(x.mean(0)))


def _kinds(params):
    def kind(path, _):
        name = path[-1].key
        return "none" if name == "D" else "ssm" if name in ("Lambda", "B", "log_step") else "regular"

    return jax.tree.map_with_path(kind, params)


@pytest.mark.exhaustive
@pytest.mark.xfail(
    jax.__version_info__ >= (0, 12),
    raises=ValueError,
    reason="plain jax.jit of JAX 0.12 cannot compile pmean under vmap on Explicit axes either",
)
def test_s5_with_its_own_learning_rates():
    batched = nn.vmap(
        S5Classifier, variable_axes={"params": None, "dropout": None, "batch_stats": None},
        split_rngs={"params": False, "dropout": True}, axis_name="batch",
    )  # fmt: skip
    model = batched()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(model.init)(keys, jnp.ones((BATCH, LENGTH, 2)))
    optimizer = optax.multi_transform(
        {
            "none": optax.inject_hyperparams(optax.sgd)(learning_rate=0.0),
            "ssm": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, eps=1e-4),
            "regular": optax.inject_hyperparams(optax.adamw)(learning_rate=4e-3, weight_decay=0.05, eps=1e-4),
        },
        _kinds,
    )
    params, stats = variables["params"], variables["batch_stats"]

    def step(state, batch, schedule):
        params, stats, opt, key = state
        key, now = jax.random.split(key)

        def loss(params, m):
            x, label, key = m
            logits, new = model.apply(
                {"params": params, "batch_stats": stats},
                x,
                rngs={"dropout": key},
                mutable=["intermediates", "batch_stats"],
            )
            one_hot = jax.nn.one_hot(label, 3)
            return -(one_hot * logits).sum(-1).mean(), (new["batch_stats"], (logits.argmax(-1) == label).mean())

        xs = (*batch, jax.random.split(now, NUM_MICROBATCHES))
        (value, (stats, accuracy)), grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss, has_aux=True)(params, m), xs, schedule=schedule, operation=mpmd.Mean
        )
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), stats, opt, key), (value, accuracy)

    def batch(key):
        x = normal(key, NUM_MICROBATCHES, BATCH, LENGTH, 2)
        return x, jax.random.randint(key, (NUM_MICROBATCHES, BATCH), 0, 3)

    state = params, stats, jax.jit(optimizer.init)(params), jax.random.key(2)
    batches = [jax.jit(batch)(k) for k in jax.random.split(jax.random.key(3), 3)]
    train_both(step, state, batches, stage_mesh(NUM_STAGES), home=_home, rtol=2e-4)


# --- Mamba ----------------------------------------------------------------------------------------


class MambaBlock(nn.Module):
    """Selective: step, input and output matrices are functions of the input; the recurrence is a `lax.scan`."""

    @nn.compact
    def __call__(self, x):
        inner, rank = 2 * WIDTH, 2
        x, gate = jnp.split(nn.Dense(2 * inner, use_bias=False, name="in_proj")(nn.RMSNorm()(x)), 2, -1)
        x = nn.silu(nn.Conv(inner, (4,), padding=[(3, 0)], feature_group_count=inner, name="conv")(x))
        step, b, c = jnp.split(nn.Dense(rank + 2 * STATES, use_bias=False, name="x_proj")(x), [rank, rank + STATES], -1)
        step = nn.softplus(nn.Dense(inner, name="dt_proj")(step))
        log_a = self.param("A_log", lambda _: jnp.log(jnp.tile(jnp.arange(1.0, STATES + 1), (inner, 1))))
        decay = jnp.exp(step[..., None] * -jnp.exp(log_a))
        inputs = (step * x)[..., None] * b[..., None, :]

        def one(h, now):
            decay, u, c = now
            h = decay * h + u
            return h, (h * c[:, None]).sum(-1)

        h = jnp.zeros((x.shape[0], inner, STATES))
        _, y = jax.lax.scan(one, h, jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), (decay, inputs, c)))
        y = jnp.moveaxis(y, 0, 1) + x * self.param("D", nn.initializers.ones, (inner,))
        return nn.Dense(WIDTH, use_bias=False, name="out_proj")(y * nn.silu(gate))


class Mamba(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(tokens)
        for i in range(NUM_STAGES):
            x = x if i == 0 else mpmd.mark_stage_end(x)
            x = x + nn.remat(MambaBlock)(name=f"layer_{i}")(x)
        return embed.attend(nn.RMSNorm(name="final")(x))


@pytest.mark.slow
def test_mamba_with_a_selective_scan_and_a_tied_embedding():
    model = Mamba()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((BATCH, LENGTH), int))["params"]
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-4)), 2)

    def step(state, batch, schedule):
        params, opt = state

        def loss(params, tokens):
            logits = model.apply({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, m), batch, schedule=schedule, operation=mpmd.Mean
        )
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    def home(path):
        return None if "embed" in path else _home(path)  # in the first stage and in the last

    shape = (NUM_MICROBATCHES, BATCH, LENGTH + 1)
    batches = [jax.random.randint(k, shape, 0, VOCABULARY) for k in jax.random.split(jax.random.key(1), 3)]
    train_both(
        step, (params, jax.jit(optimizer.init)(params)), batches, stage_mesh(NUM_STAGES), home=home, rtol=2e-4,
        shared=4 * VOCABULARY * WIDTH,
    )  # fmt: skip
