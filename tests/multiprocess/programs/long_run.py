"""Many steps of a pipeline with gradients; prints, as JSON, what the process holds after some of them.

long_run.py NUM_STEPS EVERY
"""

import contextlib
import gc
import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import mpmd
import scheduler
from mpmd.job import joining

WIDTH, MICROBATCHES = 32, 4


def open_files() -> list[str]:
    """What the file descriptors of this process stand for."""
    links = []
    time.sleep(0.02)
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def held(job) -> dict[str, int]:
    """Memory, threads, file descriptors and sockets of this process, live arrays, and keys in the store."""
    gc.collect()
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    links = min((open_files() for _ in range(5)), key=len)  # the watchdog opens a file now and then
    return {
        "kilobytes": int(fields["VmRSS"].split()[0]),
        "threads": int(fields["Threads"]),
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "arrays": len(jax.live_arrays()),
        "keys": len(job.store.key_value_dir_get("mpmd/")),
    }


def main() -> None:
    num_steps, every = map(int, sys.argv[1:])
    mpmd.initialize()
    job = joining.current()
    assert job is not None
    n = jax.device_count()
    mesh = mpmd.MpmdMesh.from_groups([Mesh(np.array([d]), ("data",)) for d in jax.devices()])

    def loss(ws, x):
        for stage, w in enumerate(ws):
            x = jnp.tanh((x if stage == 0 else mpmd.mark_stage_end(x)) @ w)
        return jnp.mean(x**2)

    def step(ws, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=scheduler.OneFOneB(n), operation=mpmd.Mean
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    step = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)
    ws = [0.9 * np.eye(WIDTH, dtype=np.float32)] * n
    found = []
    for number in range(1, num_steps + 1):
        ws, value = step(ws, np.full((MICROBATCHES, 8, WIDTH), 0.01 * (number % 7), np.float32))
        if number % 20 == 0:
            assert np.isfinite(float(value))
            mpmd.device_get(ws)
        if number % every == 0:
            jax.block_until_ready(jax.tree.leaves(ws))
            job.exchange("counting", "", range(job.num_ranks))
            found.append(held(job))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
