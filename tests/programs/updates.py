"""What happens before and after the loop, over the parameters of all stages at once."""

import functools

import jax
import jax.numpy as jnp
import optax

import mpmd
from programs.parts import (
    NUM_MICROBATCHES,
    ROWS,
    WIDTH,
    chain,
    dense,
    momentum_state,
    momentum_update,
    normal,
    regression_batch,
    squared_error,
    stages_params,
    stages_state,
    train,
)
from programs.program import Program


def _optax_program(name, make_optimizer, **kwargs):
    """Mean gradients of a chain, through an optimizer of optax."""

    def make_state(key):
        params = stages_params(key)
        return {"params": params, "optimizer": make_optimizer().init(params)}

    def build(tools):
        optimizer = make_optimizer()

        def loss(params, microbatch):
            return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

        def step(state, batch):
            loss_value, grads = tools.reduce(
                lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
            )
            updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            metrics = {"loss": loss_value, "norm": optax.tree.norm(grads)}
            return {"params": params, "optimizer": optimizer_state}, metrics

        return step

    return Program(name, make_state, regression_batch, build, **kwargs)


def _adamw():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=2, decay_steps=10, end_value=1e-3)
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(schedule, eps=1e-3, weight_decay=0.1))


def _masked_decay():
    """Weight decay for matrices only, Lion for them and Adam for the rest."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.multi_transform(
            {"matrix": optax.sgd(0.05, momentum=0.9), "vector": optax.adam(1e-2, eps=1e-3)},
            lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params),
        ),
    )


def _trust_ratio():
    return optax.chain(optax.scale_by_adam(eps=1e-3), optax.scale_by_trust_ratio(), optax.scale(-0.05))


def _ema_and_drift(tools):
    """A moving average of the parameters, and how far all of them are from where they began."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        inner, metrics = train(tools, loss)(state["inner"], batch)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state["ema"], inner["params"])
        moved = jax.tree.map(lambda p, start: jnp.sum((p - start) ** 2), inner["params"], state["start"])
        size = sum(jnp.sum(p**2) for p in jax.tree.leaves(inner["params"]))
        drift = jnp.sqrt(sum(jax.tree.leaves(moved)) / size)
        state = {"inner": inner, "ema": ema, "start": state["start"], "worst": jnp.maximum(state["worst"], drift)}
        return state, {**metrics, "drift": drift, "moved": moved}

    return step


def _ema_state(key):
    inner = momentum_state(stages_params(key))
    copies = (jax.tree.map(jnp.copy, inner["params"]) for _ in range(2))
    return {"inner": inner, "ema": next(copies), "start": next(copies), "worst": jnp.float32(0.0)}


def _loss_scaling(tools):
    """Dynamic loss scaling; the second step's gradient is not finite, and is skipped."""

    def step(state, batch):
        poison = jnp.where(state["step"] == 1, jnp.inf, 1.0)

        def loss(params, microbatch):
            value = squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])
            return value * state["scale"] * poison, value

        (_, loss_value), grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss, has_aux=True)(state["params"], microbatch),
            batch,
            operation=mpmd.Mean,
        )
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        select = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
        params = select(jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), state["params"])
        good = jnp.where(finite, state["good"] + 1, 0)
        scale = jnp.where(finite, jnp.where(good >= 2, state["scale"] * 2, state["scale"]), state["scale"] / 2)
        new = {"params": params, "scale": scale, "good": good, "step": state["step"] + 1}
        return new, {"loss": loss_value, "finite": finite}

    return step


def _loss_scale_state(key):
    return {
        "params": stages_params(key),
        "scale": jnp.float32(8.0),
        "good": jnp.int32(0),
        "step": jnp.int32(0),
    }


def _skip_by_cond(tools):
    """`lax.cond` around the whole update of all stages, on a global norm."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
        )
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        state = jax.lax.cond(norm < state["limit"], momentum_update, lambda state, _: state, state, grads)
        return {**state, "limit": 0.9 * state["limit"]}, {"loss": loss_value, "norm": norm}

    return step


def _limit_state(key):
    return {**momentum_state(stages_params(key)), "limit": jnp.float32(3.0)}


def _prepared_batch(tools):
    """The batch arrives flat; it is normalised over all its rows, reshaped into microbatches, and labelled."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        x = (batch - jnp.mean(batch, axis=0)) / (jnp.std(batch, axis=0) + 1e-3)
        y = jnp.roll(x, 1, axis=-1) * state["gain"]
        microbatches = jax.tree.map(lambda a: a.reshape(NUM_MICROBATCHES, ROWS, WIDTH), {"x": x, "y": y})
        new, metrics = train(tools, loss)(state, microbatches)
        return new, {**metrics, "mean": jnp.mean(batch)}

    return step


def _gain_state(key):
    return {**momentum_state(stages_params(key)), "gain": jnp.float32(0.5)}


def _flat_batch(key):
    return normal(key, NUM_MICROBATCHES * ROWS, WIDTH) * 3 + 1


def _normalised_weights(tools):
    """Weights are normalised before the loop, and their gradients pulled back through that after it."""

    def normalise(params):
        return [{"w": p["w"] / jnp.linalg.norm(p["w"], axis=0), "b": p["b"]} for p in params]

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        params, pull = jax.vjp(normalise, state["params"])
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(params, microbatch), batch, operation=mpmd.Mean
        )
        (grads,) = pull(grads)
        return momentum_update(state, grads), {"loss": loss_value}

    return step


def _mixed_precision(tools):
    """float32 parameters, cast to bfloat16 once before the loop; gradients are accumulated in float32."""

    def loss(params, microbatch):
        y = chain(tools, params, microbatch["x"].astype(jnp.bfloat16))
        return squared_error(y.astype(jnp.float32), microbatch["y"])

    def step(state, batch):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state["params"])

        def one(microbatch):
            value, grads = jax.value_and_grad(loss)(low, microbatch)
            return value, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

        loss_value, grads = tools.reduce(one, batch, operation=mpmd.Mean)
        return momentum_update(state, grads), {"loss": loss_value}

    return step


def _casts_in_the_loop(tools):
    """The cast to bfloat16 is part of the differentiated loss, so gradients come out in float32."""

    def loss(params, microbatch):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        y = chain(tools, low, microbatch["x"].astype(jnp.bfloat16))
        return squared_error(y.astype(jnp.float32), microbatch["y"])

    return train(tools, loss)


def _outputs_from_everywhere(tools):
    """New state made of old parameters, constants, the batch, and arithmetic between different stages."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
        )
        first, *rest = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        mean_bias = sum(p["b"] for p in [first, *rest]) / 4
        params = [{"w": first["w"], "b": 0.5 * (first["b"] + mean_bias)}, *rest]
        new = {"params": params, "previous": state["params"][0], "seen": batch["x"][-1, 0], "zero": jnp.zeros(3)}
        return new, {"loss": loss_value, "mean_bias": mean_bias, "lr": 0.1, "batch": jnp.mean(batch["y"])}

    return step


def _previous_state(key):
    params = stages_params(key)
    previous = jax.tree.map(jnp.zeros_like, params[0])
    return {"params": params, "previous": previous, "seen": jnp.zeros(WIDTH), "zero": jnp.zeros(3)}


def _orthogonalised(tools):
    """The update of each matrix is a small loop of matmuls (Newton-Schulz), its stages stacked for that."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    def orthogonal(m):
        m = m / (jnp.linalg.norm(m) + 1e-3)
        return jax.lax.fori_loop(0, 3, lambda _, m: 1.5 * m - 0.5 * m @ m.T @ m, m)

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
        )
        updates = jax.tree.map(lambda g: orthogonal(g) if g.ndim == 2 else g, grads)
        params = jax.tree.map(lambda p, u: p - 0.05 * u, state["params"], updates)
        return {"params": params}, {"loss": loss_value, "logits": dense(params[0], batch["x"][0])}

    return step


def _params_state(key):
    return {"params": stages_params(key)}


PROGRAMS = (
    _optax_program("clipped_adamw_with_a_schedule", _adamw),
    _optax_program("two_optimizers", _masked_decay),
    _optax_program("trust_ratio", _trust_ratio),
    _optax_program("gradients_of_several_steps", lambda: optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)),
    Program("ema_and_drift", _ema_state, regression_batch, _ema_and_drift),
    Program("loss_scaling", _loss_scale_state, regression_batch, _loss_scaling),
    Program("skip_by_cond", _limit_state, regression_batch, _skip_by_cond),
    Program("prepared_batch", _gain_state, _flat_batch, _prepared_batch),
    Program("normalised_weights", stages_state, regression_batch, _normalised_weights),
    Program("mixed_precision", stages_state, regression_batch, _mixed_precision, rtol=1e-2),
    Program("casts_in_the_loop", stages_state, regression_batch, _casts_in_the_loop, rtol=1e-2),
    Program("outputs_from_everywhere", _previous_state, regression_batch, _outputs_from_everywhere),
    Program("orthogonalised", _params_state, regression_batch, _orthogonalised, rtol=1e-4),
)
