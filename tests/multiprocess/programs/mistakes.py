"""What people get wrong in one rank of two, or in both.

mistakes.py WHAT
"""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
import reshard
import scheduler


def main(what: str) -> None:
    if what == "alone":
        jax.config.update("jax_num_cpu_devices", 2)
    else:
        mpmd.initialize()
    size = (2, 1 if what == "alone" else jax.local_device_count())
    mesh = mpmd.MpmdMesh(jax.make_mesh(size, ("stage", "data"), devices=jax.devices()[: math.prod(size)]), "stage")

    @mpmd.jit(mpmd_mesh=mesh)
    def step(ws, tied, xs):
        def loss(params, x):
            ws, tied = params
            y = mpmd.mark_stage_end(jnp.tanh(x @ ws[0] @ tied))
            return jnp.sum((y @ ws[1] @ tied) ** 2)

        grads = mpmd.treduce(lambda x: jax.grad(loss)((ws, tied), x), xs, schedule=scheduler.OneFOneB(2))
        return jax.tree.map(lambda p, g: p - 0.1 * g, (ws, tied), grads)

    rank = int(os.environ["MPMD_PROCESS_ID"])
    ws, tied, xs = [np.eye(64, dtype=np.float32)] * 2, np.eye(64, dtype=np.float32), np.ones((2, 64, 64), np.float32)
    if what == "values":
        tied = tied * (1 + rank)  # used by both
        xs = xs * (1 + rank)  # used by rank 0 alone
    if what == "moved":
        place = mpmd.MpmdSharding(mesh, 0)
        mpmd.device_get(reshard.spmd_to_mpmd_reshard(mesh, {"tied": tied * (1 + rank)}, place))
    if what == "trees":
        ws, tied = step(ws, tied, xs)
        mpmd.device_get(ws[: 1 + rank])
    if what == "child":
        words = [sys.executable, "-c", "import mpmd; mpmd.initialize()"]
        print(subprocess.run(words, stderr=subprocess.PIPE, text=True).stderr)
    for _ in range(3 if what == "extra" and rank == 0 else 2):
        ws, tied = step(ws, tied, xs)


if __name__ == "__main__":
    main(sys.argv[1])
