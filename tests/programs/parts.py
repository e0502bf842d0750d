"""The layers, batches and steps that most programs are made of. All sizes are tiny: what matters is the shape
of the program.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

WIDTH = 8
ROWS = 3  # of one microbatch
NUM_MICROBATCHES = 4
NUM_STAGES = 4
VOCABULARY = 11
LENGTH = 5


_MANY = 1 << 16


def normal(key, *shape, scale=1.0):
    """Outside of traced functions cut out of one array of many: for each shape JAX compiles its random numbers anew, in
    half a second, and an element has the same value in all of them.
    """
    if (size := math.prod(shape)) <= _MANY and not isinstance(key, jax.core.Tracer):
        many = jax.random.normal(key, (_MANY,))
        if not isinstance(many, jax.core.Tracer):
            return jnp.asarray(np.float32(scale) * np.asarray(many)[:size].reshape(shape))
    return scale * jax.random.normal(key, shape)


def dense_params(key, num_in=WIDTH, num_out=WIDTH):
    weight, bias = jax.random.split(key)
    return {"w": normal(weight, num_in, num_out, scale=num_in**-0.5), "b": normal(bias, num_out, scale=0.1)}


def dense(params, x):
    return x @ params["w"] + params["b"]


def residual(params, x):
    """What a stage computes where the program is about something else."""
    return x + jnp.tanh(dense(params, x))


def stages_params(key, num_stages=NUM_STAGES):
    return [dense_params(k) for k in jax.random.split(key, num_stages)]


def chain(tools, params, x):
    """Residual stages with a mark between any two."""
    for stage, p in enumerate(params):
        x = residual(p, x if stage == 0 else tools.mark(x))
    return x


def squared_error(prediction, target):
    return jnp.mean((prediction - target) ** 2)


def regression_batch(key):
    """Microbatches on axis 0: `x` and `y`, both float32 (microbatch, row, feature)."""
    x, y = jax.random.split(key)
    shape = (NUM_MICROBATCHES, ROWS, WIDTH)
    return {"x": normal(x, *shape), "y": normal(y, *shape)}


def token_batch(key):
    """`tokens` and `targets`, both int32 (microbatch, row, position)."""
    tokens = jax.random.randint(key, (NUM_MICROBATCHES, ROWS, LENGTH + 1), 0, VOCABULARY)
    return {"tokens": tokens[..., :-1], "targets": tokens[..., 1:]}


def cross_entropy(logits, targets):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(chosen)


def momentum_state(params):
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0)}


def stages_state(key, num_stages=NUM_STAGES):
    return momentum_state(stages_params(key, num_stages))


def momentum_update(state, grads):
    """SGD with momentum, and a step counter."""
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.05 * m, state["params"], momentum)
    return {**state, "params": params, "momentum": momentum, "step": state["step"] + 1}


def train(tools, loss):
    """The plainest step: mean loss and mean gradients of `loss(params, microbatch)`, then momentum."""

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
        )
        return momentum_update(state, grads), {"loss": loss_value}

    return step


def train_stages(tools, apply):
    """A step whose stages are `apply(params, x)`, with a mark between any two."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = apply(p, x if stage == 0 else tools.mark(x))
        return squared_error(x, microbatch["y"])

    return train(tools, loss)
