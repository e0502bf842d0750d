"""A loop under `mpmd.resilient` over lists of other numbers of microbatches, in other orders; rank 1 is killed once.

lists_in_place.py LISTS STEP    LISTS is JSON: the rows of each microbatch of each step; STEP is where it is killed
"""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

WIDTH = 8
NUMBER = int(os.environ["MPMD_PROCESS_ID"])  # before it joins: a spare has another number


def loss(w, x):
    return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1] - 1) ** 2)


def main(lists: list[list[int]], killed_at: int) -> None:
    mpmd.initialize()
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")

    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=0)
    def step(w, xs):
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(w, x), xs, schedule="1f1b", operation=mpmd.Mean)
        return [p - 0.1 * g for p, g in zip(w, grads, strict=True)], value

    def body(i, w):
        if i == killed_at and NUMBER == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        w, value = step(w, [np.full((rows, WIDTH), i, np.float32) for rows in lists[i]])
        print(f"step {i} {float(mpmd.device_get(value)).hex()}", flush=True)
        return w

    each = [mpmd.MpmdSharding(mesh, [group], jax.P()) for group in (0, 1)]
    mpmd.resilient(body, mpmd.jit(lambda: [jnp.eye(WIDTH)] * 2, mpmd_mesh=mesh, out_shardings=each)(), len(lists))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
