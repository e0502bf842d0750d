"""Lists of microbatches of several shapes, in a job: the losses of all steps, or the last order on one rank alone."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
import scheduler
from mpmd.job import audits

ORDERS = [(2, 3, 2, 4), (4, 2, 3, 3), (3, 2), (2, 2, 5, 3), (5, 2, 4), (4, 2, 5)]
WIDTH = 6


def batch(rows, seed):
    """Microbatches of so many rows."""
    rng = np.random.default_rng(seed)
    return [{name: rng.normal(size=(4, n, WIDTH)).astype(np.float32) for name in ("x", "y")} for n in rows]


def step(params, microbatches, schedule="1f1b"):
    """One step of two stages."""

    def one(x):
        def of(params):
            h = mpmd.mark_stage_end(jnp.tanh(x["x"] @ params[0]))
            return jnp.vdot(h @ params[1], x["y"]), x["x"].shape[1]

        return jax.value_and_grad(of, has_aux=True)(params)

    (value, rows), grads = mpmd.treduce(one, microbatches, schedule)
    return [p - 0.001 * g for p, g in zip(params, grads, strict=True)], (value, rows)


def evaluate(params, microbatches):
    """The loss alone: nothing goes back, so only what is said to the sender holds it up."""

    def one(x):
        h = mpmd.mark_stage_end(jnp.tanh(x["x"] @ params[0]))
        return jnp.vdot(h @ params[1], x["y"])

    return mpmd.treduce(one, microbatches, "1f1b")


def groups(what):
    """Two groups of one device; or groups of two devices in different processes, two or one."""
    devices = np.array(jax.devices()).reshape(2, -1)
    if what == "spread":
        devices = devices.T
    elif what == "one":
        devices = devices.reshape(1, 2)
    return mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data")), "stage")


def audited():
    """What is audited from now on."""
    found, compare = [], audits.put_down
    audits.put_down = lambda audit: found.append(audit.what) or compare(audit)
    return found


def main(what):
    mpmd.initialize()
    mesh = groups(what)
    rows = jax.P("data") if what in ("spread", "one") else None  # of each microbatch
    schedule = scheduler.InterleavedOneFOneB(2, 1) if what == "one" else "1f1b"
    found, every = audited(), int(what in ("same", "spread") and jax.process_count() > 1)
    train = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(None, rows, None), static_argnums=2, audit_every=every)
    params = [np.eye(WIDTH, dtype=np.float32)] * 2
    losses = []
    for seed, rows in enumerate(ORDERS):
        if seed == len(ORDERS) - 1 and jax.process_index() == 1:
            rows = {"other": rows[::-1], "shorter": rows[:-1]}.get(what, rows)
        params, told = train(params, batch(rows, seed), schedule)
        losses.append([float(x) for x in mpmd.device_get(told)])
    audits.settle()
    assert len(found) == every * len(ORDERS), found
    profile = (
        train.lower(params, batch(ORDERS[3], 3), schedule).compile().profile((params, batch(ORDERS[4], 4)), steps=2)
    )
    params, told = profile.result
    losses += [[float(x) for x in mpmd.device_get(told)], profile.loops[0].shapes, len(profile.costs().microbatches)]
    if what == "same":
        test, rng = mpmd.jit(evaluate, mpmd_mesh=mesh), np.random.default_rng(0)
        found = [test(params, batch(rng.integers(2, 6, size=1 + n % 8), n)) for n in range(100)]
        losses.append([float(x) for x in map(mpmd.device_get, found)])
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1])
