"""Measures step times of a pipeline over four processes, against the simulated schedule.

    python benchmarks/pipeline_efficiency.py

Accelerators and their network are emulated: each task calls back to the host and sleeps, because the host is free while
an accelerator computes, and a value is sent `--delay-ms` after it is there. So two cores can stand for four devices.
First the benchmark measures how long such a task takes alone (the sleep and the call), and a transfer between two
processes. Then `mpmd.jit` runs an ordinary step in four processes of one CPU device each. Prints for each schedule the
measured time of a step, the time that `scheduler.simulate` returns for tasks and transfers of the measured length
(fused pairs of tasks as one), and the efficiency, simulated / measured (aim: 0.98).
"""

import argparse
import os
import statistics
import sys
import threading
import time

from ranks import start_ranks

NUM_GROUPS = 4
HOPS = 20  # in the chain that measures a transfer
TARGET = 0.98


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of a step (default: %(default)s)")
    parser.add_argument(
        "--task-ms",
        type=float,
        default=50.0,
        help="of a forward task; a backward takes twice as long (default: %(default)s)",
    )
    parser.add_argument(
        "--delay-ms", type=float, default=16.0, help="of a transfer, beside what it takes here (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps (default: %(default)s)")
    parser.add_argument(
        "--kbytes", type=int, default=256, help="of one microbatch's activations (default: %(default)s)"
    )
    args = parser.parse_args()
    if "MPMD_PROCESS_ID" in os.environ:
        run(args)
        return 0
    return start_ranks(NUM_GROUPS)


def run(args) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd
    import scheduler

    mpmd.initialize()
    slow_down_the_wire(args.delay_ms / 1000)
    wanted = args.task_ms / 1000
    mesh = mpmd.MpmdMesh(jax.make_mesh((NUM_GROUPS,), ("stage",)), "stage")

    def work(x):
        """Returns `x` after `wanted` seconds."""

        def wait(number):
            time.sleep(wanted)
            return number

        return x.at[0].set(jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x[0]))

    @jax.custom_vjp
    def stage(w, x):
        return work(x) * w

    def stage_forward(w, x):
        return stage(w, x), (w, x)

    def stage_backward(residuals, dy):
        # Each gradient needs only one of the two waits, so a schedule may split them.
        w, x = residuals
        return jnp.vdot(work(dy), x), work(dy * 1.0) * w

    stage.defvjp(stage_forward, stage_backward)

    def loss(ws, x):
        for i, w in enumerate(ws):
            x = stage(w, x)
            if i < len(ws) - 1:
                x = mpmd.mark_stage_end(x)
        return (x * x).mean()

    xs = np.ones((args.microbatches, args.kbytes << 8), np.float32)
    x = jnp.asarray(xs[0])
    seconds = time_alone(jax.jit(lambda x: work(x) * 1.0), x)
    transfer = time_of_a_transfer(mesh, x)
    for schedule in (
        scheduler.OneFOneB(NUM_GROUPS),
        scheduler.InterleavedOneFOneB(2 * NUM_GROUPS, NUM_GROUPS),
        scheduler.ZeroBubbleH1(NUM_GROUPS),
        scheduler.ZeroBubbleV(NUM_GROUPS),
        scheduler.DualPipeV(NUM_GROUPS),
    ):
        name, num_stages = type(schedule).__name__, schedule.num_stages

        @mpmd.jit(mpmd_mesh=mesh)
        def step(ws, xs, schedule=schedule):
            return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)

        ws = [np.float32(1.0)] * num_stages
        compiled = step.lower(ws, xs).compile()
        times = []
        for _ in range(args.steps + 1):
            start = time.perf_counter()
            jax.block_until_ready(jax.tree.map(lambda a: a.to_mpmd_local_array, compiled(ws, xs)))
            times.append(time.perf_counter() - start)
        costs = scheduler.Costs(
            forward=seconds,
            input_grad=(0.0, *[seconds] * (num_stages - 1)),  # no stage needs the gradient of the first stage's input
            weight_grad=seconds,
            transfer_s=transfer,
        )
        simulated = scheduler.simulate(schedule, args.microbatches, costs, fuse=True).makespan
        measured = statistics.median(times[1:])
        if jax.process_index() == 0:
            print(
                f"{name:19} tasks of {seconds * 1e3:.1f} ms, transfers of {transfer * 1e3:.1f} ms: measured"
                f" {measured * 1e3:7.1f} ms, simulated {simulated * 1e3:7.1f} ms, efficiency {simulated / measured:.3f}"
                f" (aim {TARGET})",
                flush=True,
            )


def slow_down_the_wire(seconds: float) -> None:
    """Delays each value by `seconds` after it is computed, all independently of each other."""
    from mpmd.job import joining

    job = joining.current()
    assert job is not None
    send = job.wire.send

    def send_later(number, array, target):
        def wait_and_send():
            array.block_until_ready()
            time.sleep(seconds)
            send(number, array, target)

        threading.Thread(target=wait_and_send, daemon=True).start()

    job.wire.send = send_later


def time_of_a_transfer(mesh, x) -> float:
    """Returns the seconds until `x` is in another process, the median of 5 chains through all groups."""
    import jax

    import mpmd

    @mpmd.jit(mpmd_mesh=mesh)
    def chain(x):
        for hop in range(HOPS):
            x = mpmd.place(x, hop % NUM_GROUPS) * 1.0
        return x

    times = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(chain(x).to_mpmd_local_array)
        times.append(time.perf_counter() - start)
    multiply = time_alone(jax.jit(lambda x: x * 1.0), x)
    return max(0.0, statistics.median(times[1:]) / (HOPS - 1) - multiply)


def time_alone(call, x) -> float:
    """Returns the seconds per call, the median of 20 calls."""
    times = []
    for _ in range(21):
        start = time.perf_counter()
        call(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
