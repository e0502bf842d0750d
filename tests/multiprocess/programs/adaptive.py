"""Trains in the planned order and out of turn, where tasks take random times: prints the states of both, and orders."""

import json
import random
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
import scheduler

WIDTH = 6


def step_of(schedule, num_stages):
    """A step whose forward tasks sleep."""
    rng = random.Random(jax.process_index())

    def wait(x):
        time.sleep(rng.random() * 0.01)
        return x

    def loss(ws, x):
        for k, w in enumerate(ws):
            x = jnp.tanh(x @ w)
            x = x.at[0, 0].set(
                jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(x[0, 0]))
            )
            x = mpmd.mark_stage_end(x) if k < num_stages - 1 else x
        return jnp.vdot(x, x)

    def step(ws, xs):
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule)
        return [w - 0.01 * g for w, g in zip(ws, grads, strict=True)], value

    return step


def main(name):
    mpmd.initialize()
    mesh = mpmd.MpmdMesh(jax.make_mesh((2, len(jax.devices()) // 2), ("stage", "data")), "stage")
    schedule = scheduler.make(name, num_groups=2)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(8, 4, WIDTH)).astype(np.float32)
    found = {}
    for its in (schedule, scheduler.Adaptive(schedule, "FBIWR")):
        state = [np.eye(WIDTH, dtype=np.float32)] * schedule.num_stages
        compiled = (
            mpmd.jit(step_of(its, schedule.num_stages), mpmd_mesh=mesh, donate_argnums=0).lower(state, xs).compile()
        )
        values = []
        for _ in range(4):
            state, value = compiled(state, xs)
            values.append(float(mpmd.device_get(value)))
        found[type(its).__name__] = [values, [x.tobytes().hex() for x in mpmd.device_get(state)]]
        numbers = [s.get("numbers") for s in compiled._executor.recorded()["steps"]]
        told = [line for line in compiled.explain().splitlines() if line.startswith("adaptive")]
    print(json.dumps({"states": list(found.values()), "out of turn": any(numbers), "told": told}), flush=True)


main(*sys.argv[1:])
