"""Measures data parallelism inside of groups: sums over devices once a step (the default) against sums as written.

    python benchmarks/data_parallel.py [--repeats 20] [--microbatches 16]

A pipeline of two groups, each of 2 and then 4 CPU devices. The rows of a microbatch are sharded over these. The model
is a residual multilayer perceptron, written plainly, with SGD. Both steps are compiled in one process, with JAX's
default settings, and take turns. Prints for each the collectives that a step runs and the median time of a step, and
the ratio of the two. Compares the results, too.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LAYERS, ROWS, NUM_GROUPS = 256, 4, 32, 2


def main() -> int:
    """Measures and prints. Returns 1 if a sum is left in the loop, or if the results differ by more than rounding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20, help="repetitions (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of a step (default: %(default)s)")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    sys.path[0] = str(ROOT)  # instead of this folder, whose reshard.py would hide the package
    failed = 0
    for num_devices in (2, 4):
        failed |= _compare(num_devices, args.microbatches, args.repeats)
    return failed


def _compare(num_devices: int, num_microbatches: int, repeats: int) -> int:
    import jax
    import numpy as np

    from mpmd.report.explain import collectives

    steps, params, batch = _steps(num_devices, num_microbatches)
    times: dict[str, list[float]] = {name: [] for name in steps}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            results[name] = jax.block_until_ready(step(params, batch))
            times[name].append(time.perf_counter() - start)
    left = 0
    for name, step in steps.items():
        found = {p: sum(kinds.values()) for p, kinds in collectives(step._programs).items()}
        in_loop = sum(n for p, n in found.items() if not p.startswith("segment"))
        around = sum(found.values()) - in_loop
        left = in_loop if name == "once" else left
        total = in_loop * num_microbatches + around
        print(
            f"groups of {num_devices}, {name:10} {in_loop:2} collectives a microbatch, {around:2} a step:"
            f" {total:4} in all; {statistics.median(times[name]) * 1e3:7.1f} ms a step"
        )
    pairs = zip(jax.tree.leaves(results["once"]), jax.tree.leaves(results["as written"]), strict=True)
    differs = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    ratio = statistics.median(times["as written"]) / statistics.median(times["once"])
    print(f"groups of {num_devices}: as written / once {ratio:.2f}; results differ by at most {differs:.1e}")
    return int(left > 0 or differs > 1e-5)


def _steps(num_devices: int, num_microbatches: int) -> tuple[dict[str, Any], Any, Any]:
    """Returns the two compiled steps, and their arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    import mpmd
    import scheduler

    devices = np.array(jax.devices()[: NUM_GROUPS * num_devices]).reshape(NUM_GROUPS, num_devices)
    mesh = mpmd.MpmdMesh(Mesh(devices, ("stage", "data")), "stage")

    def loss(params, x):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec("data"))
        for index, stage in enumerate(params):
            x = x if index == 0 else mpmd.mark_stage_end(x)
            for layer in stage:
                x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
        return jnp.mean(x * x)

    def compiled(operation):
        def step(params, batch):
            value, grads = mpmd.treduce(
                lambda x: jax.value_and_grad(loss)(params, x),
                batch,
                schedule=scheduler.OneFOneB(NUM_GROUPS),
                operation=operation,
            )
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return mpmd.jit(step, mpmd_mesh=mesh).lower(params, batch).compile()

    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(scale=0.05, size=shape).astype(np.float32)

    layer = {"up": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,), "down": (4 * WIDTH, WIDTH)}
    params = [[{k: normal(*shape) for k, shape in layer.items()} for _ in range(LAYERS)] for _ in range(NUM_GROUPS)]
    batch = normal(num_microbatches, ROWS, WIDTH)
    return {"once": compiled(mpmd.Mean), "as written": compiled(mpmd.Mean(once=False))}, params, batch


if __name__ == "__main__":
    sys.exit(main())
