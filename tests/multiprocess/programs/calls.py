"""A rank that differs from the others after some steps.

calls.py WHAT [FOLDER]
"""

import functools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import mpmd
import reshard.checkpoint

NUM_STEPS, FIRST_UNLIKE = 12, 4


def main(what: str, folder: str = "") -> None:
    mpmd.initialize()
    rank, guilty = int(os.environ["MPMD_PROCESS_ID"]), 1
    num_groups = 2 if what == "outside" else jax.device_count()
    mesh = mpmd.MpmdMesh(jax.make_mesh((num_groups,), ("stage",), devices=jax.devices()[:num_groups]), "stage")

    def loss(ws, x):
        for w in ws[:-1]:
            x = mpmd.mark_stage_end(jnp.tanh(x @ w))
        return jnp.sum((x @ ws[-1]) ** 2)

    @mpmd.jit(mpmd_mesh=mesh)
    def train(ws, xs, key):
        noise = jax.random.normal(key, xs.shape[1:])
        grads = mpmd.treduce(lambda x: jax.grad(loss)(ws, x + noise), xs, schedule="1f1b")
        return jax.tree.map(lambda p, g: p - 0.01 * g, ws, grads)

    @mpmd.jit(mpmd_mesh=mesh)
    def evaluate(ws, xs):
        return mpmd.treduce(lambda x: loss(ws, x), xs, schedule="1f1b", operation=mpmd.Mean)

    ws, xs = [np.eye(4, dtype=np.float32)] * num_groups, np.ones((2, 3, 4), np.float32)
    for number in range(NUM_STEPS):
        differs = number >= FIRST_UNLIKE and rank == guilty
        if what == "late" and number == FIRST_UNLIKE and rank == 2:
            time.sleep(300)
        batch = xs * (1 + differs) if what in ("values", "late", "outside") else xs
        calls = [functools.partial(train, ws, batch, jax.random.key(number + (differs and what == "key")))]
        if number % 2 == 0 and not (differs and what == "skipped"):
            calls.append(functools.partial(evaluate, ws, xs))
        for call in calls[::-1] if differs and what == "order" else calls:
            before, result = ws, call()
            ws = result if isinstance(result, list) else ws
        if number + 1 == FIRST_UNLIKE and rank == guilty and what == "older":
            ws = before
        if differs and what == "device_get":
            mpmd.device_get(ws)
    if folder:
        for save in (reshard.checkpoint.save, saved_by_orbax):
            try:
                save(os.path.join(folder, save.__name__), ws)
            except ValueError as e:
                print(save.__name__, "refused:", str(e).splitlines()[0])


def saved_by_orbax(folder: str, tree) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()


if __name__ == "__main__":
    main(*sys.argv[1:])
