"""Measures what a profile costs: steps under `Compiled.profile` against steps without, in turns.

    python benchmarks/profiling.py [--widths 128 256 512] [--repeats 8]

Four groups of one CPU device, 1F1B with 8 microbatches, four tanh layers a stage; a wider layer makes longer tasks. The
threads that note times share the cores with the tasks, unlike with an accelerator. Prints, for each width, the median
seconds of a task and of a step, and the ratio of both kinds of steps.
"""

import argparse
import os
import statistics
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
import scheduler

STAGES, MICROBATCHES, LAYERS, STEPS = 4, 8, 4, 3
TARGET, LEAST_TASK_S = 1.05, 5e-3


def make_step() -> Any:
    """Returns a training step, plain gradient descent."""
    mesh = mpmd.MpmdMesh(jax.make_mesh((STAGES,), ("stage",)), "stage")

    def loss(weights, x):
        for index, stage in enumerate(weights):
            for layer in range(LAYERS):
                x = jnp.tanh(x @ stage[layer])
            x = mpmd.mark_stage_end(x) if index < STAGES - 1 else x
        return jnp.mean(x**2)

    def step(weights, xs):
        def gradients(x):
            return jax.value_and_grad(loss)(weights, x)

        value, grads = mpmd.treduce(gradients, xs, schedule=scheduler.OneFOneB(STAGES))
        return [w - 0.01 * g for w, g in zip(weights, grads, strict=True)], value

    return mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)


def measure(width: int, repeats: int) -> tuple[float, float, float, float]:
    """Returns median seconds of a task, of a step without and with a profile, and the median ratio of neighbours."""
    rng = np.random.default_rng(0)
    weights: Any = [(rng.normal(size=(LAYERS, width, width)) / width**0.5).astype(np.float32) for _ in range(STAGES)]
    xs = rng.normal(size=(MICROBATCHES, 2 * width, width)).astype(np.float32)
    compiled = make_step().lower(weights, xs).compile()
    without, profiled, tasks = [], [], []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(STEPS):
            weights, value = compiled(weights, xs)
            jax.block_until_ready((weights, value))
        without.append((time.perf_counter() - begin) / STEPS)
        profile = compiled.profile((weights, xs), steps=STEPS)
        weights = profile.result[0]
        profiled.append(statistics.median(step.seconds for step in profile.steps))
        tasks += [r.end - r.start for r in profile.typical.runs if r.tasks]
    without, profiled = without[1:], profiled[1:]  # the first ones load programs
    ratio = statistics.median(b / a for a, b in zip(without, profiled, strict=True))
    return statistics.median(tasks), statistics.median(without), statistics.median(profiled), ratio


def main() -> int:
    """Prints a line for each width; exits with 1 if a profile of tasks of 5 ms or more costs more than 5 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[128, 256, 512], help="of the layers (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=8, help="repetitions (default: %(default)s)")
    options = parser.parse_args()
    missed = False
    for width in options.widths:
        task, without, profiled, ratio = measure(width, options.repeats)
        missed |= task >= LEAST_TASK_S and ratio > TARGET
        times = f"task {task * 1e3:6.2f} ms, step {without * 1e3:7.1f} ms, profiled {profiled * 1e3:7.1f} ms"
        print(f"width {width:4}: {times}, ratio {ratio:.3f}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
