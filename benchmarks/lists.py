"""Measures the cost of lists of microbatches of several shapes: a call's plan, and the tasks of a list of one shape.

    python benchmarks/lists.py [--schedule 1f1b] [--repeats 30]

8 groups of one CPU device each and up to 64 microbatches of 8 shapes. Prints the median milliseconds of processor time
(of the main thread) for the plan of a new order, and of a new number of microbatches; how much longer steps of these
numbers would take in the plan for all, on a clock; then the microseconds that each task takes Python, for a list of one
shape and for an array. The two take turns.
"""

import argparse
import os
import statistics
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
import scheduler
from mpmd.bucketed_step import BucketedStep
from mpmd.run.executor import Executor
from scheduler.timing.simulate import simulate_orders

NUM_GROUPS, NUM_MICROBATCHES, NUM_SHAPES, WIDTH = 8, 64, 8, 4
NUMBERS = (63, 60, 56, 48, 40, 32, 24, 16)
TARGET_MS = 2.0


class Stopwatch:
    """The main thread's processor time in calls of a method."""

    def __init__(self, owner: type, name: str):
        self.seconds: list[float] = []
        method = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            result = method(*args)
            self.seconds.append(time.thread_time() - start)
            return result

        setattr(owner, name, timed)


def make_step(schedule: Any) -> Any:
    """Returns a step with a chain of matrix products, one for each stage, and their gradients."""

    def loss(params: Any, x: Any) -> jax.Array:
        for stage, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = mpmd.mark_stage_end(x) if stage + 1 < len(params) else x
        return jnp.vdot(x, x)

    def step(params: Any, xs: Any) -> Any:
        grads = mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, schedule)
        return [p - 0.01 * g for p, g in zip(params, grads, strict=True)]

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(NUM_GROUPS, 1), ("stage", "data"))
    return mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))


def lengthened(schedule: Any, count: int) -> float:
    """Simulates how much longer a step of `count` microbatches takes in the plan for all, without the later ones."""

    def stays(*tasks: scheduler.Task) -> bool:
        return all(task.microbatch < count for task in tasks)

    orders = tuple(tuple(filter(stays, order)) for order in schedule.orders(NUM_MICROBATCHES))
    pairs = frozenset(pair for pair in schedule.fused(NUM_MICROBATCHES) if stays(*pair))
    cut = simulate_orders(orders, schedule.placement, count, fused=pairs)
    return cut.makespan / scheduler.simulate(schedule, count, fuse=True).makespan


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="a name of the catalogue (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="orders, and calls of each (default: %(default)s)")
    options = parser.parse_args()
    two_stages = options.schedule in ("zb-v", "v-half", "v-min", "dualpipe-v", "interleaved-1f1b", "interleaved-zb")
    schedule = scheduler.make(options.schedule, NUM_GROUPS * (2 if two_stages else 1))
    params = [np.eye(WIDTH, dtype=np.float32)] * schedule.num_stages
    plans, walks = Stopwatch(BucketedStep, "_prepare"), Stopwatch(Executor, "_walk")
    rng = np.random.default_rng(0)

    def microbatches(count: int) -> list[np.ndarray]:
        rows = [*range(NUM_SHAPES), *rng.integers(0, NUM_SHAPES, count - NUM_SHAPES)]
        return [np.ones((2, 1 + n, WIDTH), np.float32) for n in rng.permutation(rows)]

    def planned(step: Any, xs: Any) -> float:
        plans.seconds.clear()
        jax.block_until_ready(list(step(params, xs)))
        return sum(plans.seconds) * 1e3

    def reordered(count: int) -> mpmd.Reordered:
        return mpmd.Reordered(microbatches(count), rng.permutation(count).tolist())

    step = make_step(schedule)
    planned(step, microbatches(NUM_MICROBATCHES))
    orders = [planned(step, microbatches(NUM_MICROBATCHES)) for _ in range(options.repeats)]
    in_turn = [planned(step, reordered(NUM_MICROBATCHES)) for _ in range(options.repeats)]
    rounds = NUM_GROUPS if options.schedule.startswith("interleaved") else 1
    numbers = {count: planned(step, microbatches(count)) for count in NUMBERS if count % rounds == 0}
    print(f"plan, {schedule}, {NUM_GROUPS} groups, {NUM_SHAPES} shapes (target {TARGET_MS} ms):")
    print(f"  a new order of {NUM_MICROBATCHES} microbatches: {statistics.median(orders):.2f} ms")
    print(f"  the same, as mpmd.Reordered in a random order: {statistics.median(in_turn):.2f} ms")
    print("  a new number:", ", ".join(f"{count}: {x:.2f} ms" for count, x in numbers.items()))
    ratios = ", ".join(f"{count}: {lengthened(schedule, count):.3f}" for count in numbers)
    print(f"  steps in the plan for {NUM_MICROBATCHES}, cut short, as multiples of their own: {ratios}")

    one = np.ones((NUM_MICROBATCHES, 2, 3, WIDTH), np.float32)
    found: dict[str, list[float]] = {"a list of one shape": [], "an array": []}
    steps = {name: (make_step(schedule), list(one) if "list" in name else one) for name in found}
    for number in range(options.repeats):
        for name, (other, xs) in steps.items():
            walks.seconds.clear()
            jax.block_until_ready(list(other(params, xs)))
            if number > 1:
                found[name].append(sum(walks.seconds) * 1e6 / (2 * NUM_MICROBATCHES * schedule.num_stages))
    for name, times in found.items():
        print(f"a task of {name}: {statistics.median(times):.2f} us, at least {min(times):.2f}")


if __name__ == "__main__":
    main()
