"""A forward-only loop, or a step without one, over two processes: how much runs ahead of a slow last stage.

ahead.py loop|chain STEPS MICROBATCHES SECONDS WIDTH
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


def main(what: str, steps: int, num_microbatches: int, seconds: float, width: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    mpmd.initialize()
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
