"""Plain `jax.jit` on one device: a `lax.scan` over the microbatches adds up the gradients."""

import jax
import jax.numpy as jnp
import jax_models
import optax
import problem


def start(task: problem.Problem):
    """The state before the first step, and `step(state, x, y) -> (state, loss)`."""
    loss = jax_models.make_loss(task.name)
    optimizer = optax.adam(problem.LEARNING_RATE)

    @jax.jit(donate_argnums=0)
    def step(state, x, y):
        params, opt_state = state

        def add(total, microbatch):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *microbatch)), None

        microbatches = jax.tree.map(lambda a: a.reshape(task.num_microbatches, -1, *a.shape[1:]), (x, y))
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zeros, microbatches)
        value, grads = jax.tree.map(lambda a: a / task.num_microbatches, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jax.tree.map(jnp.asarray, task.params)
    return (params, optimizer.init(params)), step
