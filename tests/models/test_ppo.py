"""PPO: an actor and a critic of two stages each, advantages by a reverse scan, minibatches, a limit of the KL."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax.sharding import AxisType
from plain_and_pipelined import stage_mesh, train_both
from programs.parts import normal

import mpmd

WIDTH, OBSERVED, ACTIONS, STEPS, ENVS, NUM_MINIBATCHES, NUM_STAGES = 32, 6, 4, 8, 4, 4, 2


class ActorCritic(nn.Module):
    """Both towers start from the observation; the mark stands where both are halfway."""

    @nn.compact
    def __call__(self, x):
        def dense(size, scale, name):
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale), name=name)

        a = nn.tanh(dense(WIDTH, 2**0.5, "actor_0")(x))
        v = nn.tanh(dense(WIDTH, 2**0.5, "critic_0")(x))
        a, v = mpmd.mark_stage_end((a, v))
        a = nn.tanh(dense(WIDTH, 2**0.5, "actor_1")(a))
        v = nn.tanh(dense(WIDTH, 2**0.5, "critic_1")(v))
        return dense(ACTIONS, 0.01, "actor_1_logits")(a), dense(1, 1.0, "critic_1_value")(v)[..., 0]


def _advantages(rollout, last):
    def one(carry, now):
        advantage, following = carry
        delta = now["reward"] + 0.99 * following * (1 - now["done"]) - now["value"]
        advantage = delta + 0.99 * 0.95 * (1 - now["done"]) * advantage
        return (advantage, now["value"]), advantage

    _, advantages = jax.lax.scan(one, (jnp.zeros_like(last), last), rollout, reverse=True, unroll=4)
    return advantages, advantages + rollout["value"]


def _loss(apply, params, m):
    logits, value = apply({"params": params}, m["observation"])
    log_probabilities = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probabilities, m["action"][:, None], 1)[:, 0]
    clipped = m["value"] + jnp.clip(value - m["value"], -0.2, 0.2)
    value_loss = 0.5 * jnp.maximum((value - m["target"]) ** 2, (clipped - m["target"]) ** 2).mean()
    log_ratio = chosen - m["log_probability"]
    ratio = jnp.exp(log_ratio)
    advantage = (m["advantage"] - m["advantage"].mean()) / (m["advantage"].std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
    entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1).mean()
    metrics = {"value": value_loss, "policy": policy_loss, "entropy": entropy, "kl": ((ratio - 1) - log_ratio).mean()}
    return policy_loss + 0.5 * value_loss - 0.01 * entropy, metrics


def _home(path):
    found = re.search(r"(?:actor|critic)_(\d)", path)
    return int(found[1]) if found else None


def _batch(key):
    names = ("reward", "value", "log_probability")
    keys = dict(zip((*names, "observation", "action", "done", "last", "order"), jax.random.split(key, 8), strict=True))
    rollout = {name: normal(keys[name], STEPS, ENVS) for name in names}
    rollout["log_probability"] = -jnp.abs(rollout["log_probability"])
    rollout["done"] = jax.random.bernoulli(keys["done"], 0.2, (STEPS, ENVS)).astype(jnp.float32)
    rollout["observation"] = normal(keys["observation"], STEPS, ENVS, OBSERVED)
    rollout["action"] = jax.random.randint(keys["action"], (STEPS, ENVS), 0, ACTIONS)
    return rollout, normal(keys["last"], ENVS), keys["order"]


def _train(step, state, axes=AxisType.Explicit):
    batches = [jax.jit(_batch)(k) for k in jax.random.split(jax.random.key(1), 3)]
    train_both(step, state, batches, stage_mesh(NUM_STAGES, axes), home=_home, rtol=2e-4)


def _minibatches(rollout, last, key):
    advantages, targets = _advantages(rollout, last)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), {**rollout, "advantage": advantages, "target": targets})
    order = jax.random.permutation(key, STEPS * ENVS)
    return jax.tree.map(lambda x: x[order].reshape(NUM_MINIBATCHES, -1, *x.shape[1:]), flat)


@pytest.mark.exhaustive
def test_an_update_over_accumulated_minibatches():
    """The rollout's advantages, the order of its rows and the loop are one step; the rate falls linearly."""
    model = ActorCritic()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, OBSERVED)))["params"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(3e-3, 0, 20), eps=1e-4),
    )
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch, schedule):
        (_, metrics), grads = mpmd.treduce(
            lambda m: jax.value_and_grad(_loss, argnums=1, has_aux=True)(state.apply_fn, state.params, m),
            _minibatches(*batch), schedule=schedule, operation=mpmd.Mean,
        )  # fmt: skip
        return state.apply_gradients(grads=grads), metrics

    _train(step, state, AxisType.Auto)


@pytest.mark.slow
def test_two_epochs_in_one_step_end_where_the_policy_has_moved_too_far():
    """Two loops after one another; an update is applied only while the KL is small, by a `cond` around it."""
    model = ActorCritic()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, OBSERVED)))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3, eps=1e-4))

    def step(state, batch, schedule):
        rollout, last, key = batch
        history = []
        for order in jax.random.split(key, 2):
            params, opt = state
            (_, metrics), grads = mpmd.treduce(
                lambda m, params=params: jax.value_and_grad(_loss, argnums=1, has_aux=True)(model.apply, params, m),
                _minibatches(rollout, last, order), schedule=schedule, operation=mpmd.Mean,
            )  # fmt: skip

            def update(state, grads=grads):
                params, opt = state
                updates, opt = optimizer.update(grads, opt, params)
                return optax.apply_updates(params, updates), opt

            state = jax.lax.cond(metrics["kl"] < 100.0, update, lambda state: state, (params, opt))
            history.append(metrics)
        return state, history

    _train(step, (params, jax.jit(optimizer.init)(params)))
