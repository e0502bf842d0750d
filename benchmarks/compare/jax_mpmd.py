"""This library: the step of one device, with stage ends, a schedule and a mesh."""

import jax
import jax.numpy as jnp
import jax_models
import optax
import problem

import mpmd


def start(task: problem.Problem):
    """The state before the first step, and `step(state, x, y) -> (state, loss)`."""
    loss = jax_models.make_loss(task.name, mpmd.mark_stage_end)
    optimizer = optax.adam(problem.LEARNING_RATE)
    mesh = mpmd.MpmdMesh(jax.make_mesh((problem.NUM_STAGES,), ("stage",)), "stage")

    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=0)
    def step(state, x, y):
        params, opt_state = state
        microbatches = jax.tree.map(lambda a: a.reshape(task.num_microbatches, -1, *a.shape[1:]), (x, y))
        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, *m), microbatches, schedule="1f1b", operation=mpmd.Mean
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jax.tree.map(jnp.asarray, task.params)
    return (params, optimizer.init(params)), step
