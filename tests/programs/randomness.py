"""Keys: in the state, in the batch, made from the microbatch's index, used in every stage."""

import jax
import jax.numpy as jnp

import mpmd
from programs.parts import (
    NUM_MICROBATCHES,
    momentum_state,
    momentum_update,
    regression_batch,
    residual,
    squared_error,
    stages_params,
)
from programs.program import Program


def _dropout_chain(tools, params, x, key):
    """A key of each stage, folded from the microbatch's."""
    for stage, p in enumerate(params):
        x = residual(p, x if stage == 0 else tools.mark(x))
        kept = jax.random.bernoulli(jax.random.fold_in(key, stage), 0.8, x.shape)
        x = jnp.where(kept, x / 0.8, 0.0)
    return x


def _loss(tools):
    def loss(params, microbatch, key):
        return squared_error(_dropout_chain(tools, params, microbatch["x"], key), microbatch["y"])

    return loss


def _dropout_by_index(tools):
    """`treduce_i`: the microbatch's index picks its rows and is folded into a raw key."""
    loss = _loss(tools)

    def step(state, batch):
        key = jax.random.fold_in(state["key"], state["step"])

        def one(i):
            microbatch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batch)
            return jax.value_and_grad(loss)(state["params"], microbatch, jax.random.fold_in(key, i))

        loss_value, grads = tools.reduce_i(one, NUM_MICROBATCHES, operation=mpmd.Mean)
        return momentum_update(state, grads), {"loss": loss_value}

    return step


def _raw_key_state(key):
    return {**momentum_state(stages_params(key)), "key": jax.random.PRNGKey(5)}


def _dropout_keys_in_xs(tools):
    """One typed key for each microbatch, sliced like the data; the state's key moves on."""
    loss = _loss(tools)

    def step(state, batch):
        key, used = jax.random.split(state["key"])
        keys = jax.random.split(used, NUM_MICROBATCHES)
        loss_value, grads = tools.reduce(
            lambda xs: jax.value_and_grad(loss)(state["params"], *xs), (batch, keys), operation=mpmd.Mean
        )
        return {**momentum_update(state, grads), "key": key}, {"loss": loss_value}

    return step


def _typed_key_state(key):
    return {**momentum_state(stages_params(key)), "key": jax.random.key(5)}


def _keys_through_marks(tools):
    """A typed key rides through the marks with the activation and is split in each stage."""

    def loss(params, microbatch, key):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x, key = (x, key) if stage == 0 else tools.mark((x, key))
            key, used = jax.random.split(key)
            x = residual(p, x) + 0.1 * jax.random.normal(used, x.shape)
        return squared_error(x, microbatch["y"])

    def step(state, batch):
        keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), NUM_MICROBATCHES)
        loss_value, grads = tools.reduce(
            lambda xs: jax.value_and_grad(loss)(state["params"], *xs), (batch, keys), operation=mpmd.Mean
        )
        return momentum_update(state, grads), {"loss": loss_value}

    return step


def _key_chain_over_stages(tools):
    """One chain of splits: stage s uses what s + 1 splits gave, from one key that no mark carries.
    Both kinds of key, typed and raw, are in the state.
    """

    def loss(params, microbatch, typed, raw):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            typed, used = jax.random.split(typed)
            x = residual(p, x if stage == 0 else tools.mark(x))
            x = x + 0.1 * jax.random.normal(used, x.shape) * jax.random.uniform(jax.random.fold_in(raw, stage))
        return squared_error(x, microbatch["y"])

    def step(state, batch):
        typed, raw = jax.random.fold_in(state["typed"], 1), jax.random.fold_in(state["raw"], 2)

        def one(xs):
            microbatch, seed = xs
            return jax.value_and_grad(loss)(
                state["params"], microbatch, jax.random.fold_in(typed, seed), jax.random.fold_in(raw, seed)
            )

        loss_value, grads = tools.reduce(one, (batch, jnp.arange(NUM_MICROBATCHES)), operation=mpmd.Mean)
        return {**momentum_update(state, grads), "typed": typed, "raw": raw}, {"loss": loss_value}

    return step


def _both_keys_state(key):
    return {**momentum_state(stages_params(key)), "typed": jax.random.key(3), "raw": jax.random.PRNGKey(4)}


PROGRAMS = (
    Program("dropout_by_index", _raw_key_state, regression_batch, _dropout_by_index),
    Program("dropout_keys_in_xs", _typed_key_state, regression_batch, _dropout_keys_in_xs),
    Program("keys_through_marks", _typed_key_state, regression_batch, _keys_through_marks),
    Program("key_chain_over_stages", _both_keys_state, regression_batch, _key_chain_over_stages),
)
