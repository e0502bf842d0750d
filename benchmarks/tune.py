"""Compares what `mpmd.tune` predicts with what runs, over four processes with emulated accelerators.

    python benchmarks/tune.py

Accelerators are emulated as in pipeline_efficiency.py: each layer calls back to the host and sleeps. The last layer
takes twice as long as the others. `mpmd.tune` chooses among schedules and cuts and measures the tasks of the best one.
Its prediction for a step is compared with the measured step (aim: within 5 %). The exit status says whether it fits.
"""

import argparse
import functools
import os
import sys
import time
from typing import Any

from ranks import start_ranks

NUM_GROUPS, NUM_LAYERS = 4, 11
TARGET = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of a step (default: %(default)s)")
    parser.add_argument("--layer-ms", type=float, default=10.0, help="milliseconds of a layer (default: %(default)s)")
    args = parser.parse_args()
    if "MPMD_PROCESS_ID" in os.environ:
        return run(args)
    return start_ranks(NUM_GROUPS)


def run(args) -> int:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd

    mpmd.initialize()
    mesh = mpmd.MpmdMesh(jax.make_mesh((NUM_GROUPS,), ("stage",)), "stage")

    def work(x, seconds):
        """Returns `x` after some seconds."""

        def wait(x):
            time.sleep(seconds)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def layer(w, x, seconds):
        return work(x, seconds) * w

    def layer_forward(w, x, seconds):
        return layer(w, x, seconds), (w, x)

    def layer_backward(seconds, residuals, dy):
        w, x = residuals
        return jnp.vdot(work(dy, seconds), x), work(dy * 1.0, seconds) * w

    layer.defvjp(layer_forward, layer_backward)
    seconds = args.layer_ms / 1000

    def loss(ws, x):
        for w in ws[:-1]:
            x = mpmd.mark_layer_end(layer(w, x, seconds))
        out: Any = layer(ws[-1], x, 2 * seconds)
        return (out**2).mean()

    def build(schedule, num_microbatches):
        def step(ws, xs):
            return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)

        ws = [jax.ShapeDtypeStruct((), np.float32)] * NUM_LAYERS
        return mpmd.jit(step, mpmd_mesh=mesh), (ws, jax.ShapeDtypeStruct((num_microbatches, 1 << 14), np.float32))

    tuning = mpmd.tune(build, schedules=["1f1b", "zb-h1"], num_microbatches=args.microbatches)
    best = tuning.best
    assert best.prediction is not None and best.measured_s is not None
    error = best.prediction.seconds / best.measured_s - 1
    if jax.process_index() == 0:
        print(tuning, f"\npredicted against measured: {error:+.1%} (aim: within {TARGET:.0%})", flush=True)
    return int(abs(error) > TARGET) if jax.process_index() == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
