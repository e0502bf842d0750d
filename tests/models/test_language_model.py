"""A causal language model of Linen modules in the manner of lm1b: logical axes, a TrainState, dropout, warmup."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_and_pipelined import stage_mesh, train_both

import mpmd

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH, BATCH, NUM_MICROBATCHES, NUM_LAYERS = 32, 2, 64, 40, 8, 4, 4, 4
RULES = (("batch", "data"), ("vocab", "model"), ("heads", "model"), ("mlp", "model"), ("embed", None), ("kv", None))


def _kernel(*names):
    return nn.with_logical_partitioning(nn.initializers.xavier_uniform(), names)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask, train):
        h = nn.LayerNorm(use_bias=False)(x)
        qkv = [
            nn.DenseGeneral(
                (HEADS, WIDTH // HEADS), use_bias=False, kernel_init=_kernel("embed", "heads", "kv"), name=n
            )(h)
            for n in ("query", "key", "value")
        ]
        h = nn.dot_product_attention(
            *qkv, mask=mask, dropout_rate=0.1, deterministic=not train, dropout_rng=self.make_rng("dropout")
        )
        h = nn.DenseGeneral(
            WIDTH, axis=(-2, -1), use_bias=False, kernel_init=_kernel("heads", "kv", "embed"), name="out"
        )(h)
        x = x + nn.Dropout(0.1, deterministic=not train)(h)
        h = nn.Dense(
            HIDDEN,
            kernel_init=_kernel("embed", "mlp"),
            bias_init=nn.with_logical_partitioning(nn.initializers.normal(1e-2), ("mlp",)),
        )(nn.LayerNorm()(x))
        h = nn.with_logical_constraint(nn.relu(h), ("batch", None, "mlp"))
        h = nn.Dense(WIDTH, kernel_init=_kernel("mlp", "embed"))(h)
        return x + nn.Dropout(0.1, deterministic=not train)(h)


class Model(nn.Module):
    num_stages: int
    tied: bool = False

    @nn.compact
    def __call__(self, tokens, train=True):
        mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0))
        embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=_kernel("vocab", "embed"))
        shifted = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
        x = embed(shifted) * WIDTH**0.5 + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        for i in range(NUM_LAYERS):
            if i and i % (NUM_LAYERS // self.num_stages) == 0:
                x = mpmd.mark_stage_end(x)
            x = Block(name=f"block{i}")(x, mask, train)
        x = nn.LayerNorm(name="final")(x)
        if self.tied:
            return embed.attend(x / WIDTH**0.5)
        return nn.Dense(VOCABULARY, kernel_init=_kernel("embed", "vocab"), name="head")(x)


def _training(model):
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1, eps=1e-4))
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(model.init)(keys, jnp.ones((BATCH, LENGTH), int))
    state = train_state.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)

    def step(state, batch, schedule):
        key = jax.random.fold_in(jax.random.key(2), state.step)

        def loss(params, i):
            tokens = batch[i]
            logits = state.apply_fn({"params": params}, tokens, rngs={"dropout": jax.random.fold_in(key, i)})
            weights = (tokens > 0).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens) * weights
            correct = ((logits.argmax(-1) == tokens) * weights).sum()
            return losses.sum() / weights.sum(), {"accuracy": correct, "denominator": weights.sum()}

        (value, metrics), grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss, has_aux=True)(state.params, i), len(batch), schedule=schedule
        )
        grads = jax.tree.map(lambda g: g / len(batch), grads)
        return state.apply_gradients(grads=grads), {"loss": value, "norm": optax.tree.norm(grads), **metrics}

    shape = (NUM_MICROBATCHES, BATCH, LENGTH)
    batches = [jax.random.randint(k, shape, 0, VOCABULARY) for k in jax.random.split(jax.random.key(1), 3)]
    return step, state, batches


def _home(num_stages, tied=False):
    def home(path):
        if found := re.search(r"block(\d)", path):
            return int(found[1]) * num_stages // NUM_LAYERS
        if "Embed_0" in path and tied:
            return {0, num_stages - 1} if path.startswith(".params") else None
        return 0 if re.search("positions|Embed_0", path) else num_stages - 1 if re.search("final|head", path) else None

    return home


@pytest.mark.exhaustive
def test_names_of_logical_axes_mean_nothing_where_no_mesh_is_set():
    """The kernels are boxed with names that the stages' mesh does not have; the embedding is the head's weight too."""
    step, state, batches = _training(Model(4, tied=True))
    shared = 4 * VOCABULARY * WIDTH
    train_both(step, state, batches, stage_mesh(4), home=_home(4, tied=True), rtol=1e-4, shared=shared)


@pytest.mark.exhaustive
def test_partitioned_kernels_are_sharded_inside_of_their_stages():
    """As lm1b does it: `nn.get_partition_spec`, `nn.logical_to_mesh_sharding`, and the rules around the step."""
    mesh = stage_mesh(2, AxisType.Auto, data=2, model=2)
    step, state, batches = _training(Model(2))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(state), mesh, RULES)
    options = {"in_shardings": (shardings, NamedSharding(mesh, P(None, "data")))}

    def with_rules(*args, **kwargs):
        with nn.logical_axis_rules(RULES):
            return step(*args, **kwargs)

    train_both(with_rules, state, batches, mesh, home=_home(2), rtol=1e-4, **options)
