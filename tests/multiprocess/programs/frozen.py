"""Training of a head behind frozen layers: the first process makes no result of a step, and does most of the work.

frozen.py FOLDER STEPS
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from mpmd.observe import ledger

WIDTH = 256


def train(head, frozen, xs):
    def loss(head, x):
        for _ in range(12):
            x = jnp.tanh(x @ frozen)
        return jnp.sum(jnp.tanh(mpmd.mark_stage_end(x) @ head))

    return head - 1e-4 * mpmd.treduce(lambda x: jax.grad(loss)(head, x), xs, schedule="1f1b")


def main(folder: str, steps: int) -> None:
    os.environ[ledger.VARIABLE] = folder
    jax.config.update("jax_num_cpu_devices", 1)
    mpmd.initialize()
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    first, last = (mpmd.MpmdSharding(mesh, [group], jax.P()) for group in (0, 1))
    step = mpmd.jit(train, mpmd_mesh=mesh, donate_argnums=0, in_shardings=(last, first, None))
    rng = np.random.default_rng(0)
    frozen = mpmd.jit(lambda x: x * 1, mpmd_mesh=mesh, out_shardings=first)(np.eye(WIDTH, dtype=np.float32))
    head, xs = np.zeros((WIDTH, 8), np.float32), rng.normal(size=(8, 256, WIDTH)).astype(np.float32)
    for _ in range(steps):
        head = step(head, frozen, xs)
    mpmd.device_get(head)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
