"""Measures the executor's cost per task: `mpmd.jit` against a loop written by hand, in one process.

    python benchmarks/dispatch.py [--microbatches 32] [--steps 200] [--devices-per-group 1]

There are four groups of one CPU device each (or of several, which do the same). The schedule is 1F1B. The layers are
so small that their start is nearly all the work. The loop by hand calls jitted stage functions and `device_put` in the
order of the same program, keeps the same residuals, and accumulates gradients in the same place, inside the backward
functions. The two take turns, step by step, so that other work on the machine slows both alike. Prints the median
microseconds of each for one task (a forward or backward of one microbatch in one stage), and their ratio.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "16"

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
import scheduler

NUM_STAGES = 4
ROWS, WIDTH = 4, 16
TARGET = 1.15


def stage(weight: jax.Array, x: jax.Array) -> jax.Array:
    """The single layer of a stage."""
    return jnp.tanh(x @ weight)


def stage_backward(weight: jax.Array, x: jax.Array, y: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of the weight and of x, from the stage's input and output."""
    dz = dy * (1 - y * y)
    return x.T @ dz, dz @ weight.T


def make_step(mesh: mpmd.MpmdMesh, schedule: scheduler.OneFOneB) -> Callable:
    """`step(weights, xs) -> (loss, grads)` as a user writes it."""

    def loss(weights, x):
        for index, weight in enumerate(weights):
            x = stage(weight, x)
            if index < NUM_STAGES - 1:
                x = mpmd.mark_stage_end(x)
        return jnp.sum(x * x)

    @mpmd.jit(mpmd_mesh=mesh)
    def step(weights, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule=schedule)

    return step


def make_loop_by_hand(devices: Sequence[Any], order: list[scheduler.Task], num_microbatches: int) -> Callable:
    """The same step written by hand, for these devices (or shardings) and with its tasks in this order."""

    @jax.jit
    def first_forward(weight, xs, m):
        x = jax.lax.dynamic_index_in_dim(xs, m, keepdims=False)
        return x, stage(weight, x)

    @jax.jit
    def forward(weight, x):
        return stage(weight, x)

    def last_forward(weight, x, total):
        y = stage(weight, x)
        return y, total + jnp.sum(y * y)

    def first_backward(weight, x, y, dy, grad):
        return grad + stage_backward(weight, x, y, dy)[0]

    def backward(weight, x, y, dy, grad):
        dweight, dx = stage_backward(weight, x, y, dy)
        return dx, grad + dweight

    def last_backward(weight, x, y, grad):
        dweight, dx = stage_backward(weight, x, y, 2 * y)
        return dx, grad + dweight

    last_forward = jax.jit(last_forward, donate_argnums=2)
    first_backward = jax.jit(first_backward, donate_argnums=4)
    backward = jax.jit(backward, donate_argnums=4)
    last_backward = jax.jit(last_backward, donate_argnums=3)

    indices = [jax.device_put(np.int32(m), devices[0]) for m in range(num_microbatches)]
    new_grads = [jax.jit(lambda: jnp.zeros((WIDTH, WIDTH)), out_shardings=on_device(device)) for device in devices]
    new_total = jax.jit(lambda: jnp.zeros(()), out_shardings=on_device(devices[-1]))
    last = NUM_STAGES - 1

    def step(weights, xs):
        grads = [new() for new in new_grads]
        total = new_total()
        inputs, outputs, cotangents = {}, {}, {}
        for s, kind, m in order:
            if kind == "F":
                if s == 0:
                    inputs[s, m], y = first_forward(weights[0], xs, indices[m])
                elif s == last:
                    y, total = last_forward(weights[s], inputs[s, m], total)
                else:
                    y = forward(weights[s], inputs[s, m])
                outputs[s, m] = y
                if s < last:
                    inputs[s + 1, m] = jax.device_put(y, devices[s + 1])
            else:
                x, y = inputs.pop((s, m)), outputs.pop((s, m))
                if s == 0:
                    grads[0] = first_backward(weights[0], x, y, cotangents.pop((0, m)), grads[0])
                    continue
                if s == last:
                    dx, grads[s] = last_backward(weights[s], x, y, grads[s])
                else:
                    dx, grads[s] = backward(weights[s], x, y, cotangents.pop((s, m)), grads[s])
                cotangents[s - 1, m] = jax.device_put(dx, devices[s - 1])
        return total, grads

    return step


def on_device(device: Any) -> jax.sharding.Sharding:
    """The sharding of an array that is only on this device, or has this sharding."""
    return device if isinstance(device, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(device)


def main() -> int:
    """Measures and prints. Returns 1 if the ratio is above the target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices-per-group", type=int, choices=(1, 2, 4), default=1)
    args = parser.parse_args()

    schedule = scheduler.OneFOneB(NUM_STAGES)
    grid = np.array(jax.devices()[: NUM_STAGES * args.devices_per_group]).reshape(NUM_STAGES, -1)
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(grid, ("stage", "data")), "stage")
    devices: list[Any] = list(grid[:, 0])
    if args.devices_per_group > 1:
        devices = [jax.sharding.NamedSharding(group, jax.sharding.PartitionSpec()) for group in mesh.groups]
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for _ in devices]
    xs = rng.normal(size=(args.microbatches, ROWS, WIDTH)).astype(np.float32)

    compiled = make_step(mesh, schedule).lower(weights, xs).compile()
    compiled_arguments = place(mesh, compiled, weights, xs)
    order = [step.task for _, step in scheduler.merge(compiled.program) if isinstance(step, scheduler.Run)]
    by_hand = make_loop_by_hand(devices, order, args.microbatches)
    by_hand_arguments = (
        [jax.device_put(w, d) for w, d in zip(weights, devices, strict=True)],
        jax.device_put(xs, devices[0]),
    )

    runs = {"by hand": lambda: by_hand(*by_hand_arguments), "mpmd.jit": lambda: compiled(*compiled_arguments)}
    (expected_loss, expected_grads), (loss, grads) = (run() for run in runs.values())
    np.testing.assert_allclose(float(loss), float(expected_loss), rtol=2e-5)
    for grad, expected in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(np.asarray(grad), np.asarray(expected), rtol=2e-5, atol=1e-5)

    seconds = {name: [] for name in runs}
    for _ in range(args.steps):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)

    num_tasks = 2 * NUM_STAGES * args.microbatches
    per_task = {name: 1e6 * statistics.median(times) / num_tasks for name, times in seconds.items()}
    for name, microseconds in per_task.items():
        print(f"{name:10} {microseconds:7.1f} µs a task")
    ratio = per_task["mpmd.jit"] / per_task["by hand"]
    print(f"{'ratio':10} {ratio:7.2f} (target {TARGET})")
    return int(ratio > TARGET)


def place(mesh: mpmd.MpmdMesh, compiled, *arguments):
    """The arguments in the layout of the compiled step, so that no step has to move them."""
    placed = mpmd.jit(lambda *xs: xs, mpmd_mesh=mesh, out_shardings=compiled.input_shardings[0])
    return placed(*arguments)


if __name__ == "__main__":
    sys.exit(main())
