"""SpectraX: `sxjit` with stage marks and a schedule gives loss and gradients; the optimizer runs stage by stage."""

import functools

import jax
import jax_models
import numpy as np
import optax
import problem
from spectrax.runtime.mpmd import sxjit, sxstage_iter, sxvalue_and_grad
from spectrax.runtime.schedules import Std1F1B
from spectrax.runtime.types import MpMdMesh


def start(task: problem.Problem):
    """The state before the first step, and `step(state, x, y) -> (state, loss)`."""
    optimizer = optax.adam(problem.LEARNING_RATE)
    devices = jax.devices()[: problem.NUM_STAGES]
    mesh = MpMdMesh(jax.sharding.Mesh(np.array(devices), ("stage",)), "stage")
    schedule = Std1F1B(microbatches=task.num_microbatches)
    loss = sxjit(jax_models.make_loss(task.name, sxstage_iter), mesh=mesh, schedule=schedule, batch_argnums=(1, 2))
    value_and_grad = sxvalue_and_grad(loss)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(state, x, y):
        params, opt_states = state
        value, (grads,) = value_and_grad(params, x, y)
        updated = [update(*stage) for stage in zip(params, opt_states, grads, strict=True)]
        return ([params for params, _ in updated], [opt_state for _, opt_state in updated]), value

    params = [jax.device_put(stage, device) for stage, device in zip(task.params, devices, strict=True)]
    return (params, [jax.jit(optimizer.init)(stage) for stage in params]), step
