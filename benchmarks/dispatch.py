"""Measures the executor's cost per task: `mpmd.jit` against a loop written by hand, in one process.

    python benchmarks/dispatch.py [--stages 4] [--microbatches 32] [--steps 200] [--devices-per-group 1]

There are four groups (or `--stages`) of one CPU device each (or of several, which do the same). The schedule is 1F1B.
The layers are so small that starting them is nearly all the work. Two loops do the same work:

- The loop by hand calls jitted stage functions and `device_put` in the order of the same program, keeps the same
  residuals, and accumulates gradients in the same place, inside the backward functions.
- The bare loop calls the executables that `mpmd.jit` has loaded, in the same order, on arguments that are in place, and
  copies with JAX's batched copy. It frees nothing and notes nothing: no runtime can be faster with these programs.

All take turns, step by step, so that other work on the machine slows all alike. Prints the median microseconds of one
task (a forward or backward of one microbatch in one stage) for each, by the clock and in processor time, and ratios.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import mpmd
import scheduler
from mpmd.run.bound_instruction import RUN

ROWS, WIDTH = 4, 16
TARGETS = {"by hand": 1.15, "bare loop": 1.1}


def stage(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Computes the single layer of a stage."""
    return jnp.tanh(x @ weight)


def stage_backward(weight: jax.Array, x: jax.Array, y: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns gradients of the weight and of x, from the stage's input and output."""
    dz = dy * (1 - y * y)
    return x.T @ dz, dz @ weight.T


def make_step(mesh: mpmd.MpmdMesh, schedule: scheduler.OneFOneB) -> Callable:
    """Returns `step(weights, xs) -> (loss, grads)` as a user writes it."""

    def loss(weights, x):
        for index, weight in enumerate(weights):
            x = stage(weight, x)
            if index < len(weights) - 1:
                x = mpmd.mark_stage_end(x)
        return jnp.sum(x * x)

    @mpmd.jit(mpmd_mesh=mesh)
    def step(weights, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule=schedule)

    return step


def make_loop_by_hand(devices: Sequence[Any], order: list[scheduler.Task], num_microbatches: int) -> Callable:
    """Returns the same step written by hand, for these devices (or shardings), with its tasks in this order."""

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
    last = len(devices) - 1

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
    """Returns the sharding of an array that is only on this device, or the sharding itself."""
    return device if isinstance(device, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(device)


def make_bare_loop(compiled: Any, arguments: Sequence[mpmd.MpmdArray]) -> Callable:
    """Returns a loop over the compiled step's own executables and copies, in its order, on these arguments.

    Args:
      compiled: without donation, so that the arguments can be used again.
      arguments: in the layout of the step.
    """
    bindings = compiled._executor.bindings
    plan = [(b.code, b.act, b.reads, b.writes) for b in bindings.instructions]
    filled = bindings.template.copy()
    for array, where in zip(arguments, bindings.inputs, strict=True):
        for group, slot in where:
            filled[slot] = array._arrays[group]
    outputs = [where[0][1] for where in bindings.outputs]

    def step():
        slots = filled.copy()
        for code, act, reads, writes in plan:
            if code == RUN:
                for slot, value in zip(writes, act(*[slots[i] for i in reads]), strict=False):
                    slots[slot] = value
            else:
                slots[writes] = act(slots[reads])
        return [slots[i] for i in outputs]

    return step


def main() -> int:
    """Measures and prints. Returns 1 if a ratio is above its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=32, help="microbatches of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps (default: %(default)s)")
    parser.add_argument(
        "--devices-per-group", type=int, choices=(1, 2, 4), default=1, help="devices of a group (default: %(default)s)"
    )
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.stages * args.devices_per_group)

    schedule = scheduler.OneFOneB(args.stages)
    mesh = mpmd.MpmdMesh(
        jax.make_mesh((args.stages, args.devices_per_group), ("stage", "data"), (AxisType.Auto,) * 2), "stage"
    )
    devices: list[Any] = [group.devices.flat[0] for group in mesh.groups]
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
    runs = {
        "by hand": lambda: by_hand(*by_hand_arguments),
        "bare loop": make_bare_loop(compiled, jax.tree.leaves(compiled_arguments)),
        "mpmd.jit": lambda: compiled(*compiled_arguments),
    }
    check(*(jax.tree.leaves(run()) for run in runs.values()))
    return report(measure(runs, args.steps), num_tasks=2 * args.stages * args.microbatches)


def check(expected: Sequence[Any], *others: Sequence[Any]) -> None:
    """Checks that all compute the same."""
    for found in others:
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-5)


def measure(runs: dict[str, Callable], num_steps: int) -> dict[str, tuple[float, float]]:
    """Returns median seconds of each, by the clock and of the processor. They take turns."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(num_steps):
        for name, run in runs.items():
            start, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            seconds[name].append((time.perf_counter() - start, time.process_time() - used))
    return {
        name: (statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times))
        for name, times in seconds.items()
    }


def report(seconds: dict[str, tuple[float, float]], num_tasks: int) -> int:
    """Prints microseconds a task and the ratios. Returns 1 if one is above its target in processor time."""
    for name, (wall, cpu) in seconds.items():
        print(f"{name:10} {1e6 * wall / num_tasks:7.1f} µs a task, {1e6 * cpu / num_tasks:7.1f} µs of the processor")
    failed = 0
    for name, target in TARGETS.items():
        wall, cpu = (ours / theirs for ours, theirs in zip(seconds["mpmd.jit"], seconds[name], strict=True))
        print(f"mpmd.jit / {name}: {wall:.2f}, in processor time {cpu:.2f} (target {target})")
        failed |= cpu > target
    return int(failed)


def place(mesh: mpmd.MpmdMesh, compiled, *arguments):
    """Places the arguments in the layout of the compiled step, so that no step has to move them."""
    placed = mpmd.jit(lambda *xs: xs, mpmd_mesh=mesh, out_shardings=compiled.input_shardings[0])
    return placed(*arguments)


if __name__ == "__main__":
    sys.exit(main())
