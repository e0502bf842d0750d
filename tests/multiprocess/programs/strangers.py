"""Trains without end, with sums and transfers between the processes; strangers come to its ports meanwhile.

strangers.py FOLDER        prints the port of the transfer server; and once, when FOLDER has a file `check`, what it has
                           reached and what plain JAX reaches, as JSON
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, PartitionSpec

import mpmd
import scheduler
from mpmd.job import joining

ROWS = np.random.default_rng(0).normal(size=(4, 4, 8)).astype(np.float32)
WEIGHTS = [np.eye(8, dtype=np.float32) * 0.5] * 2


def make_step(mark, reduce):
    def loss(weights, x):
        x = mark(jnp.tanh(x @ weights[0]))
        return jnp.mean((x @ weights[1] - 1) ** 2)

    def step(weights, xs):
        value, grads = reduce(lambda x: jax.value_and_grad(loss)(weights, x), xs)
        return [w - 0.01 * g for w, g in zip(weights, grads, strict=True)], value

    return step


def plain_reduce(function, xs):
    found = [function(x) for x in xs]
    return jax.tree.map(lambda *x: sum(x), *found)


def main() -> None:
    mpmd.initialize()
    job = joining.current()
    assert job is not None
    print(json.dumps({"transfers": int(job.wire._server.address().rpartition(":")[2])}), flush=True)
    # Each group has a device of each process, and what goes to the next group goes to the other process.
    meshes = [Mesh(np.array(jax.devices())[list(group)], ("data",)) for group in ((0, 2), (3, 1))]
    wish = {"mpmd_mesh": mpmd.MpmdMesh.from_groups(meshes), "in_shardings": (None, PartitionSpec(None, "data"))}

    def reduce(function, xs):
        return mpmd.treduce(function, xs, schedule=scheduler.OneFOneB(2))

    step, weights, num_steps, is_checked = mpmd.jit(make_step(mpmd.mark_stage_end, reduce), **wish), WEIGHTS, 0, False
    while True:
        weights, value = step(weights, ROWS)
        num_steps += 1
        is_told = job.exchange("looking", str(os.path.exists(f"{sys.argv[1]}/check")), range(2))[0] == "True"
        if num_steps == 2:
            print("TRAINS", flush=True)
        if is_told and not is_checked:
            is_checked = True
            plain, there = jax.jit(make_step(lambda x: x, plain_reduce)), WEIGHTS
            for _ in range(num_steps):
                there, wanted = plain(there, ROWS)
            together = np.unique(process_allgather(np.full(1 << 18, jax.process_index()))).tolist()  # a collective
            print(json.dumps({"value": float(value), "plain": float(wanted), "together": together}), flush=True)


if __name__ == "__main__":
    main()
