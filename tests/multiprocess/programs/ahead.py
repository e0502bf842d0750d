"""A forward-only loop, or a step without one, over two processes: how much runs ahead of a slow last stage.

For `wide`, the first group has two processes, of which only one sends some of the values; the loop is over a list, with
fewer microbatches than its plan has.

ahead.py loop|chain|wide STEPS MICROBATCHES SECONDS WIDTH
"""

import json
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
import scheduler
from mpmd.job import joining


def make_step(what: str, width: int, seconds: float):
    def slow(x):
        time.sleep(seconds)
        return x

    def one(x, w):
        y = jnp.broadcast_to(x, (width,)) * w
        y = mpmd.mark_stage_end(y) if what == "loop" else mpmd.place(y, 1)
        y = jnp.sum(y)
        return jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), y) if seconds else y

    def loop(xs, w):
        return mpmd.treduce(lambda x: one(x, w), xs, schedule=scheduler.GPipe(2), operation=mpmd.Concat)

    return loop if what == "loop" else lambda xs, w: jnp.stack([one(x, w) for x in xs])


def wide_step(width: int):
    def one(x, w):
        y = jax.lax.with_sharding_constraint(jnp.broadcast_to(x[:, None], (2, width)) * w, jax.P("data"))
        z = jax.lax.with_sharding_constraint(jnp.full((width,), 1.0) * w, jax.P())
        y, z = mpmd.mark_stage_end((y, jax.lax.with_sharding_constraint(z * x.sum(), jax.P())))
        return jnp.sum(y) + jnp.sum(z)

    return lambda xs, w: mpmd.treduce(lambda x: one(x, w), xs, schedule=scheduler.GPipe(2))


def run_wide(steps: int, num_microbatches: int, width: int) -> None:
    groups = [jax.sharding.Mesh(np.array(of), ("data",)) for of in (jax.devices()[:2], jax.devices()[2:])]
    step = mpmd.jit(wide_step(width), mpmd_mesh=mpmd.MpmdMesh.from_groups(groups))
    xs, store = [np.ones(2, np.float32)] * num_microbatches, joining.current().store
    most, found = 0, None
    for _ in range(steps):
        found = step(xs, np.float32(1))
        most = max(most, len(store.key_value_dir_get("mpmd/ahead/")))
    assert mpmd.device_get(found) == 4 * width * num_microbatches
    print(json.dumps({"keys": most}))


def main(what: str, steps: int, num_microbatches: int, seconds: float, width: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    mpmd.initialize()
    if what == "wide":
        run_wide(steps, num_microbatches, width)
        return
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    weight = mpmd.MpmdSharding(mesh, [0], jax.P())
    step = mpmd.jit(make_step(what, width, seconds), mpmd_mesh=mesh, in_shardings=(None, weight))
    xs = np.arange(num_microbatches, dtype=np.float32)
    mpmd.device_get(step(xs, np.float32(1)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    found = [step(xs, np.float32(1)) for _ in range(steps)]
    sums = [mpmd.device_get(x) for x in found]
    np.testing.assert_allclose(sums[-1], xs * width, rtol=1e-3)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (4 * width)
    print(json.dumps({"values": round(grown, 1), "seconds": round(time.perf_counter() - begin, 3)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
