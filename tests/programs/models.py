"""Whole models, as people write them: deep stages behind an embedding, a GPT, convolutions, Equinox and Flax."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from programs.parts import (
    LENGTH,
    NUM_MICROBATCHES,
    ROWS,
    VOCABULARY,
    WIDTH,
    cross_entropy,
    dense,
    dense_params,
    momentum_state,
    normal,
    regression_batch,
    squared_error,
    token_batch,
    train,
)
from programs.program import Program

HEADS = 2


def _norm(scale, x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-4)


def _block(p, x):
    """Causal attention, then an MLP."""
    rows, length, width = x.shape
    qkv = dense(p["qkv"], _norm(p["norm1"], x)).reshape(rows, length, 3, HEADS, width // HEADS)
    scores = jnp.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1]) / (width // HEADS) ** 0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), qkv[:, :, 2]).reshape(x.shape)
    x = x + dense(p["out"], mixed)
    return x + dense(p["down"], jax.nn.gelu(dense(p["up"], _norm(p["norm2"], x))))


def _block_params(key):
    qkv, out, up, down = jax.random.split(key, 4)
    return {
        "norm1": jnp.ones(WIDTH),
        "norm2": jnp.ones(WIDTH),
        "qkv": dense_params(qkv, WIDTH, 3 * WIDTH),
        "out": dense_params(out),
        "up": dense_params(up, WIDTH, 2 * WIDTH),
        "down": dense_params(down, 2 * WIDTH, WIDTH),
    }


def _optimizer():
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, eps=1e-3))


def _gpt_state(key):
    table, blocks, positions, dropout = jax.random.split(key, 4)
    params = {
        "positions": normal(positions, LENGTH, WIDTH, scale=0.1),
        "embedding": normal(table, VOCABULARY, WIDTH, scale=0.3),
        "blocks": [_block_params(k) for k in jax.random.split(blocks, 4)],
        "norm": jnp.ones(WIDTH),
    }
    return {"params": params, "optimizer": _optimizer().init(params), "key": dropout, "step": jnp.int32(0)}


def _two_microbatches(key):
    return jax.tree.map(lambda a: a[:2], token_batch(key))


def _gpt(tools):
    """Tied embedding, dropout, padding; loss per token, accumulated as sums; clipping, AdamW and a schedule."""
    optimizer = _optimizer()

    def loss(params, microbatch, key):
        tokens, targets = microbatch["tokens"], microbatch["targets"]
        kept = jax.random.bernoulli(key, 0.9, (len(params["blocks"]), *tokens.shape, 1))
        x = params["embedding"][tokens] * WIDTH**0.5 + params["positions"]
        for number, block in enumerate(params["blocks"]):
            x = x if number == 0 else tools.mark(x)
            x = jax.checkpoint(_block)(block, x)
            x = jnp.where(kept[number], x / 0.9, 0)
        logits = _norm(params["norm"], x) @ params["embedding"].T
        weights = (targets != 0).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = jnp.sum(weights * (jnp.argmax(logits, -1) == targets))
        return jnp.sum(losses * weights), {"tokens": jnp.sum(weights), "right": right}

    def step(state, batch):
        key, used = jax.random.split(state["key"])
        keys = jax.random.split(used, batch["tokens"].shape[0])
        (total, counts), grads = tools.reduce(
            lambda xs: jax.value_and_grad(loss, has_aux=True)(state["params"], *xs), (batch, keys)
        )
        grads = jax.tree.map(lambda g: g / counts["tokens"], grads)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "optimizer": optimizer_state,
            "key": key,
            "step": state["step"] + 1,
        }
        metrics = {
            "loss": total / counts["tokens"],
            "accuracy": counts["right"] / counts["tokens"],
            "norm": optax.tree.norm(grads),
        }
        return new, metrics

    return step


def _deep_state(key):
    table, stages, head = jax.random.split(key, 3)
    params = {
        "embedding": normal(table, VOCABULARY, WIDTH, scale=0.3),
        "stages": [_deep_params(k) for k in jax.random.split(stages, 4)],
        "head": dense_params(head, WIDTH, VOCABULARY),
    }
    return momentum_state(params)


def _deep_params(key):
    layers = [dense_params(k) for k in jax.random.split(key, 6)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def _deep(tools):
    """Stages of many equations, between an embedding and a head: these and what is around them are compiled apart."""

    def loss(params, microbatch):
        x = params["embedding"][microbatch["tokens"]]
        for number, stage in enumerate(params["stages"]):
            x = x if number == 0 else tools.mark(x)
            for layer in range(len(stage["b"])):
                p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stage)
                x = x + jnp.tanh(dense(p, jax.nn.standardize(x))) / 4
        return cross_entropy(dense(params["head"], x), microbatch["targets"])

    return train(tools, loss)


def _convolutions(tools):
    """Images: convolutions, pooling, a classifier; each stage has its own shape of activation."""

    def convolve(w, x):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params, microbatch):
        x = jax.nn.relu(convolve(params[0], microbatch["image"]))
        x = tools.mark(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
        x = tools.mark(jax.nn.gelu(convolve(params[1], x)))
        x = tools.mark(jnp.mean(x, axis=(1, 2)))
        logits = dense(params[2], x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["label"]))

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
        )
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {"loss": loss_value}

    return step


def _convolutions_state(key):
    first, second, head = jax.random.split(key, 3)
    return {
        "params": [
            normal(first, 3, 3, 2, 4, scale=0.3),
            normal(second, 3, 3, 4, 6, scale=0.3),
            dense_params(head, 6, 3),
        ]
    }


def _images(key):
    image, label = jax.random.split(key)
    shape = (NUM_MICROBATCHES, ROWS)
    return {"image": normal(image, *shape, 4, 4, 2), "label": jax.random.randint(label, shape, 0, 3)}


def _equinox(tools):
    """An `eqx.Module` with static fields and functions among its leaves, filtered for the gradient."""
    import equinox as eqx

    def loss(model, microbatch):
        x = microbatch["x"]
        for stage, layer in enumerate(model):
            x = jax.vmap(layer)(x if stage == 0 else tools.mark(x))
        return squared_error(x, microbatch["y"])

    def step(state, batch):
        _, static = _equinox_parts(jax.random.key(0))

        def one(microbatch):
            def of_arrays(arrays):
                return loss(eqx.combine(arrays, static), microbatch)

            return jax.value_and_grad(of_arrays)(state["model"])

        loss_value, grads = tools.reduce(one, batch, operation=mpmd.Mean)
        model = eqx.apply_updates(state["model"], jax.tree.map(lambda g: -0.1 * g, grads))
        return {"model": model}, {"loss": loss_value}

    return step


def _equinox_parts(key):
    import equinox as eqx

    model = [eqx.nn.MLP(WIDTH, WIDTH, 6, depth=1, activation=jnp.tanh, key=k) for k in jax.random.split(key, 4)]
    return eqx.partition(model, eqx.is_array)


def _equinox_state(key):
    return {"model": _equinox_parts(key)[0]}


def _flax_model(mark):
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for stage in range(4):
                x = x if stage == 0 else mark(x)
                x = x + nn.Dense(WIDTH)(nn.tanh(nn.LayerNorm()(x)))
            return x

    return Model()


def _flax(tools):
    """A `linen` module that marks its stages itself, in a TrainState."""
    model = _flax_model(tools.mark)

    def step(state, batch):
        def loss(params, microbatch):
            return squared_error(model.apply({"params": params}, microbatch["x"]), microbatch["y"])

        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
        )
        updates, optimizer_state = _optimizer().update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, {
            "loss": loss_value
        }

    return step


def _flax_state(key):
    params = _flax_model(lambda x: x).init(key, jnp.zeros((ROWS, WIDTH)))["params"]
    return {"params": params, "optimizer": _optimizer().init(params)}


PROGRAMS = (
    Program("deep", _deep_state, token_batch, _deep),
    Program("equinox", _equinox_state, regression_batch, _equinox, needs="equinox"),
    Program("convolutions", _convolutions_state, _images, _convolutions),
    Program("gpt", _gpt_state, _two_microbatches, _gpt, num_microbatches=2),
    Program("flax", _flax_state, regression_batch, _flax, needs="flax"),
)
