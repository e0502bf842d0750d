"""JAX transformations and control flow inside a stage, and around marks where that is legal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from programs.parts import (
    WIDTH,
    chain,
    dense,
    momentum_state,
    normal,
    regression_batch,
    residual,
    squared_error,
    stages_params,
    stages_state,
    train,
    train_stages,
)
from programs.program import Program


def _train_stages(apply):
    """The builder of a step whose stage is `apply(params, x)`."""
    return functools.partial(train_stages, apply=apply)


def _two_layers(p, x):
    return residual(p, jnp.sin(residual(p, x)))


_checkpointed = _train_stages(jax.checkpoint(_two_layers))
_checkpointed_dots = _train_stages(
    jax.checkpoint(_two_layers, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
)


def _scan_over_layers(tools):
    """Each stage is a `lax.scan` over its own stacked layers, rematerialised, with a scanned output that is used."""

    @jax.checkpoint
    def layer(x, p):
        x = residual(p, x)
        return x, jnp.mean(x)

    def loss(params, microbatch):
        x, means = microbatch["x"], []
        for stage, layers in enumerate(params):
            x, mean = jax.lax.scan(layer, x if stage == 0 else tools.mark(x), layers)
            means.append(mean)
        return squared_error(x, microbatch["y"]) + 0.1 * jnp.sum(jnp.stack(means) ** 2)

    return train(tools, loss)


def _layers_state(key):
    stacked = [jax.tree.map(lambda *p: jnp.stack(p), *stages_params(k, 3)) for k in jax.random.split(key, 4)]
    return momentum_state(stacked)


@_train_stages
def _cond(p, x):
    return jax.lax.cond(jnp.mean(x) > 0, residual, lambda p, x: 0.5 * x + dense(p, x), p, x)


@_train_stages
def _switch(p, x):
    branches = [residual, lambda p, x: x - dense(p, x), lambda p, x: x * jnp.cos(dense(p, x))]
    return jax.lax.switch(jnp.int32(jnp.sum(jnp.abs(x)) * 7) % 3, branches, p, x)


@_train_stages
def _fori_loop(p, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: x + 0.3 * jnp.tanh(dense(p, x) + i), x)


@_train_stages
def _while_loop(p, x):
    """The number of halvings depends on the values; only the forward sees the loop."""
    y = dense(p, x)
    scale = jax.lax.while_loop(
        lambda scale: jnp.linalg.norm(jax.lax.stop_gradient(y)) * scale > 1.0, lambda scale: scale / 2, jnp.float32(1)
    )
    return x + jax.lax.stop_gradient(scale) * y


@jax.custom_vjp
def _clipped_identity(x):
    return x


def _clipped_forward(x):
    return x, jnp.max(jnp.abs(x))


def _clipped_backward(largest, cotangent):
    return (jnp.clip(cotangent, -0.05, 0.05) / (1 + largest),)


_clipped_identity.defvjp(_clipped_forward, _clipped_backward)


@_train_stages
def _custom_vjp(p, x):
    return residual(p, _clipped_identity(x))


@jax.custom_jvp
def _rounded(x):
    return jnp.round(4 * x) / 4


@_rounded.defjvp
def _rounded_jvp(primals, tangents):
    return _rounded(*primals), tangents[0]


@_train_stages
def _custom_jvp(p, x):
    """Straight-through rounding of weights and activations; sizes keep clear of the rounding points."""
    return x + jnp.tanh(x @ _rounded(p["w"]) + p["b"])


@_train_stages
def _gradient_inside_a_stage(p, x):
    """Each stage descends the gradient of an energy of its own: transposed equations in the forward."""

    def energy(x):
        return jnp.sum(jax.nn.softplus(dense(p, x)))

    return x - 0.3 * jax.grad(energy)(x)


@_train_stages
def _jvp_inside_a_stage(p, x):
    value, tangent = jax.jvp(functools.partial(residual, p), (x,), (jnp.ones_like(x),))
    return value + 0.1 * tangent


def _vmap_over_marks(tools):
    """The model is written for one example, marks included, and vmapped over the microbatch."""

    def one(params, x, y):
        return squared_error(chain(tools, params, x), y)

    def loss(params, microbatch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0, 0))(params, microbatch["x"], microbatch["y"]))

    return train(tools, loss)


def _jit_around_marks(tools):
    """The whole model is a jitted function with marks inside, in another jitted function."""

    @jax.jit
    def model(params, x):
        return chain(tools, params, x)

    @jax.jit
    def loss(params, microbatch):
        return squared_error(model(params, microbatch["x"]), microbatch["y"])

    return train(tools, loss)


def _one_jitted_block(tools):
    """The same jitted block is called once per stage, so that all stages share one cached jaxpr."""
    return train_stages(tools, jax.jit(lambda p, x: residual(p, x)))


def _one_jitted_block_with_its_mark(tools):
    """The jitted block holds the mark as well: one cached jaxpr with one mark, called four times."""

    @jax.jit
    def block(p, x):
        return tools.mark(residual(p, x))

    def loss(params, microbatch):
        x = microbatch["x"]
        for p in params:
            x = block(p, x)
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _value_and_grad_under_jit(tools):
    """`jit(value_and_grad)` inside the loop: forward and backward in one call with marks."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    gradient = jax.jit(jax.grad(loss))

    def step(state, batch):
        grads = tools.reduce(lambda microbatch: gradient(state["params"], microbatch), batch)
        params = jax.tree.map(lambda w, dw: w - 0.02 * dw, state["params"], grads)
        return {"params": params}, {"size": sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))}

    return step


def _params_only_state(key):
    return {"params": stages_params(key)}


def _vjp_by_hand(tools):
    """`jax.vjp` with a cotangent that the program computes itself from the model's output."""

    def step(state, batch):
        def one(microbatch):
            y, pull = jax.vjp(lambda params: chain(tools, params, microbatch["x"]), state["params"])
            error = y - microbatch["y"]
            (grads,) = pull(jnp.clip(error, -1.0, 1.0))
            return jnp.mean(jnp.abs(error)), grads

        total, grads = tools.reduce(one, batch)
        params = jax.tree.map(lambda w, dw: w - 0.01 * dw, state["params"], grads)
        return {"params": params}, {"error": total}

    return step


def _named_scopes(tools):
    """Names that look like the tracer's own must not confuse forward with backward."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            with jax.named_scope("transpose(jvp(block))"):
                x = residual(p, x)
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _normalised_matmuls(tools):
    """Reductions, sorting, gathering and cumulative sums in the stages."""

    def apply(p, x):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3)
        return x + jnp.cumsum(jnp.tanh(dense(p, x)), axis=-1)[:, ::-1] / WIDTH

    return train_stages(tools, apply)


def _linear_algebra(tools):
    """A solve, a Fourier transform and a sort: calls into libraries from inside executables."""

    def apply(p, x):
        system = jnp.eye(WIDTH) + 0.1 * p["w"] @ p["w"].T
        y = jnp.linalg.solve(system, x.T).T + p["b"]
        spectrum = jnp.abs(jnp.fft.rfft(y, axis=-1)).sum(axis=-1, keepdims=True)
        return x + jnp.tanh(jnp.sort(y, axis=-1)) + 0.01 * spectrum

    return train_stages(tools, apply)


def _jit_around_the_step(tools):
    """The step is itself a jitted function, loop and update included."""

    def loss(params, microbatch):
        return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

    return jax.jit(jax.jit(train(tools, loss)))


def _constants(tools):
    """Tables of numpy and of jax, made outside of the step, are read by all stages."""
    table, scale = np.linspace(-1, 1, WIDTH, dtype=np.float32), jnp.arange(1.0, 5.0)

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = residual(p, x if stage == 0 else tools.mark(x)) + table / scale[stage]
        return squared_error(x, microbatch["y"] * table)

    return train(tools, loss)


def _quantised_state(key):
    params = stages_params(key)
    for stage, p in enumerate(params):
        k = jax.random.fold_in(key, stage)
        p["w"] = (jnp.round(4 * p["w"]) + normal(k, WIDTH, WIDTH, scale=0.02)) / 4
    return momentum_state(params)


PROGRAMS = (
    Program("checkpointed", stages_state, regression_batch, _checkpointed),
    Program("checkpointed_dots", stages_state, regression_batch, _checkpointed_dots),
    Program("scan_over_layers", _layers_state, regression_batch, _scan_over_layers),
    Program("cond", stages_state, regression_batch, _cond),
    Program("switch", stages_state, regression_batch, _switch),
    Program("fori_loop", stages_state, regression_batch, _fori_loop),
    Program("while_loop", stages_state, regression_batch, _while_loop),
    Program("custom_vjp", stages_state, regression_batch, _custom_vjp),
    Program("custom_jvp", _quantised_state, regression_batch, _custom_jvp),
    Program("gradient_inside_a_stage", stages_state, regression_batch, _gradient_inside_a_stage),
    Program("jvp_inside_a_stage", stages_state, regression_batch, _jvp_inside_a_stage),
    Program("vmap_over_marks", stages_state, regression_batch, _vmap_over_marks),
    Program("jit_around_marks", stages_state, regression_batch, _jit_around_marks),
    Program("one_jitted_block", stages_state, regression_batch, _one_jitted_block),
    Program("one_jitted_block_with_its_mark", stages_state, regression_batch, _one_jitted_block_with_its_mark),
    Program("value_and_grad_under_jit", _params_only_state, regression_batch, _value_and_grad_under_jit),
    Program("vjp_by_hand", _params_only_state, regression_batch, _vjp_by_hand),
    Program("named_scopes", stages_state, regression_batch, _named_scopes),
    Program("linear_algebra", stages_state, regression_batch, _linear_algebra),
    Program("jit_around_the_step", stages_state, regression_batch, _jit_around_the_step),
    Program("constants", stages_state, regression_batch, _constants),
    Program("normalised_matmuls", stages_state, regression_batch, _normalised_matmuls),
)
