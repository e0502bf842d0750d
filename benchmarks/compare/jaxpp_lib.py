"""JaxPP in one process: the step of one device, with entered stages, a schedule and a mesh."""

import functools

import jax
import jax.numpy as jnp
import jax_models
import jaxpp.api as jaxpp
import numpy as np
import optax
import problem


def start(task: problem.Problem):
    """The state before the first step, and `step(state, x, y) -> (state, loss)`."""
    optimizer = optax.adam(problem.LEARNING_RATE)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[: problem.NUM_STAGES]), ("stages",)), "stages")
    loss_of_rows = jax_models.make_loss(task.name, jaxpp.pipeline_enter_stage)

    def loss(params, microbatch):
        # JaxPP sums over microbatches, and wants the last stage to be entered too.
        return jaxpp.pipeline_enter_stage(loss_of_rows(params, *microbatch) / task.num_microbatches)

    @functools.partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mesh)
    def train_step(params, opt_state, x, y):
        microbatches = jax.tree.map(lambda a: a.reshape(task.num_microbatches, -1, *a.shape[1:]), (x, y))
        values, grads = jaxpp.treduce(
            functools.partial(jax.value_and_grad(loss), params), microbatches, schedule=jaxpp.Std1F1B(mesh.mpmd_dim)
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jnp.array(values)

    def step(state, x, y):
        *state, values = train_step(*state, x, y)
        return state, np.sum(values.to_mpmd_local_array)

    params = jax.tree.map(jnp.asarray, task.params)
    return (params, optimizer.init(params)), step
