"""A BERT of Equinox modules for one sequence, vmapped: padding masks, a key for each example, a classifier."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from plain_and_pipelined import stage_mesh, train_both

import mpmd

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH, BATCH, NUM_MICROBATCHES, NUM_STAGES, CLASSES = 32, 2, 64, 40, 8, 4, 4, 4, 3


class Embedder(eqx.Module):
    words: eqx.nn.Embedding
    segments: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        w, s, p = jax.random.split(key, 3)
        self.words = eqx.nn.Embedding(VOCABULARY, WIDTH, key=w)
        self.segments = eqx.nn.Embedding(2, WIDTH, key=s)
        self.positions = eqx.nn.Embedding(LENGTH, WIDTH, key=p)
        self.norm, self.dropout = eqx.nn.LayerNorm(WIDTH), eqx.nn.Dropout(0.1)

    def __call__(self, tokens, segments, *, key):
        x = jax.vmap(self.words)(tokens) + jax.vmap(self.segments)(segments)
        x = x + jax.vmap(self.positions)(jnp.arange(len(tokens)))
        return self.dropout(jax.vmap(self.norm)(x), key=key)


class Layer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        a, u, d = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            HEADS, WIDTH, use_query_bias=True, use_value_bias=True, use_output_bias=True, dropout_p=0.1, key=a
        )
        self.up, self.down = eqx.nn.Linear(WIDTH, HIDDEN, key=u), eqx.nn.Linear(HIDDEN, WIDTH, key=d)
        self.attention_norm, self.norm = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, mask, *, key):
        a, b, c = jax.random.split(key, 3)
        pairs = mask[:, None] * mask[None]
        x = jax.vmap(self.attention_norm)(x + self.dropout(self.attention(x, x, x, mask=pairs, key=a), key=b))
        h = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))
        return jax.vmap(self.norm)(x + self.dropout(h, key=c))


class Classifier(eqx.Module):
    embedder: Embedder
    layers: list[Layer]
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        e, p, h, *layers = jax.random.split(key, 3 + NUM_STAGES)
        self.embedder, self.layers = Embedder(e), [Layer(k) for k in layers]
        self.pooler, self.head = eqx.nn.Linear(WIDTH, WIDTH, key=p), eqx.nn.Linear(WIDTH, CLASSES, key=h)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, inputs, key):
        first, last, *keys = jax.random.split(key, 2 + NUM_STAGES)
        x = self.embedder(inputs["tokens"], inputs["segments"], key=first)
        for i, (layer, k) in enumerate(zip(self.layers, keys, strict=True)):
            x = layer(x if i == 0 else mpmd.mark_stage_end(x), inputs["tokens"] != 0, key=k)
        return self.head(self.dropout(jnp.tanh(self.pooler(x[0])), key=last))


def _home(path):
    if found := re.search(r"layers\[(\d)\]", path):
        return int(found[1])
    return 0 if "embedder" in path else NUM_STAGES - 1 if re.search("pooler|head", path) else None


@pytest.mark.exhaustive
def test_a_bert_of_equinox_modules_is_trained_as_under_plain_jax():
    params, static = eqx.partition(eqx.filter_jit(Classifier)(jax.random.key(0)), eqx.is_inexact_array)
    optimizer = optax.adamw(1e-2, eps=1e-4, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree))

    def loss(model, inputs, key):
        logits = jax.vmap(model)(inputs, jax.random.split(key, BATCH))
        return optax.softmax_cross_entropy_with_integer_labels(logits, inputs["label"]).mean()

    def step(state, batch, schedule):
        params, opt, key = state
        key, now = jax.random.split(key)
        model = eqx.combine(params, static)
        keys = jax.random.split(now, NUM_MICROBATCHES)
        value, grads = mpmd.treduce(
            lambda xs: eqx.filter_value_and_grad(loss)(model, *xs),
            (batch, keys),
            schedule=schedule,
            operation=mpmd.Mean,
        )
        updates, opt = optimizer.update(grads, opt, params)
        return (eqx.apply_updates(params, updates), opt, key), value

    def batch(key):
        t, s, y = jax.random.split(key, 3)
        shape = (NUM_MICROBATCHES, BATCH, LENGTH)
        tokens = jax.random.randint(t, shape, 0, VOCABULARY).at[..., 0].set(1)
        labels = jax.random.randint(y, shape[:2], 0, CLASSES)
        return {"tokens": tokens, "segments": jax.random.randint(s, shape, 0, 2), "label": labels}

    state = params, jax.jit(optimizer.init)(params), jax.random.key(3)
    batches = [jax.jit(batch)(k) for k in jax.random.split(jax.random.key(1), 3)]
    train_both(step, state, batches, stage_mesh(NUM_STAGES), home=_home, rtol=1e-4)
