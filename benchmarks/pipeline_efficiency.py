"""Measures step times of a pipeline over four processes, against the simulated schedule.

    python benchmarks/pipeline_efficiency.py

Accelerators are emulated: each task calls back to the host and sleeps, because the host is free while an accelerator
computes. So two cores can stand for four devices. First the benchmark measures how long such a task takes alone (the
sleep and the call). Then `mpmd.jit` runs an ordinary step in four processes of one CPU device each, transfers included.
Prints for each schedule the measured time of a step, the time that `scheduler.simulate` gives for tasks of the measured
length and transfers that take no time, and the efficiency, simulated / measured (aim: 0.97).
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

NUM_STAGES = 4
TARGET = 0.97


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--task-ms", type=float, default=50.0, help="of a forward task; a backward takes twice as long")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kbytes", type=int, default=256, help="of one microbatch's activations")
    args = parser.parse_args()
    if "MPMD_PROCESS_ID" in os.environ:
        run(args)
        return 0
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = os.environ | {
        "MPMD_COORDINATOR": f"127.0.0.1:{port}", "MPMD_NUM_PROCESSES": str(NUM_STAGES), "MPMD_LOCAL_ONLY": "1",
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
    }  # fmt: skip
    command = [sys.executable, *sys.argv]
    processes = [subprocess.Popen(command, env=environment | {"MPMD_PROCESS_ID": str(i)}) for i in range(NUM_STAGES)]
    return max(p.wait() for p in processes)


def run(args) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd
    import scheduler

    mpmd.initialize()
    wanted = args.task_ms / 1000
    mesh = mpmd.MpmdMesh(jax.make_mesh((NUM_STAGES,), ("stage",)), "stage")

    def work(x):
        """Returns `x` after `wanted` seconds."""

        def wait(x):
            time.sleep(wanted)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

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
            if i < NUM_STAGES - 1:
                x = mpmd.mark_stage_end(x)
        return (x * x).mean()

    xs = np.ones((args.microbatches, args.kbytes << 8), np.float32)
    seconds = time_alone(jax.jit(lambda x: work(x) * 1.0), jnp.asarray(xs[0]))
    for name in ("OneFOneB", "ZeroBubbleH1"):
        schedule = getattr(scheduler, name)(NUM_STAGES)

        @mpmd.jit(mpmd_mesh=mesh)
        def step(ws, xs, schedule=schedule):
            return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)

        ws = [np.float32(1.0)] * NUM_STAGES
        compiled = step.lower(ws, xs).compile()
        times = []
        for _ in range(args.steps + 1):
            start = time.perf_counter()
            jax.block_until_ready(jax.tree.map(lambda a: a.to_mpmd_local_array, compiled(ws, xs)))
            times.append(time.perf_counter() - start)
        # No stage needs the gradient of the first stage's input.
        costs = scheduler.Costs(forward=seconds, input_grad=(0.0, *[seconds] * (NUM_STAGES - 1)), weight_grad=seconds)
        simulated = scheduler.simulate(schedule, args.microbatches, costs).makespan
        measured = statistics.median(times[1:])
        if jax.process_index() == 0:
            print(
                f"{name:14} tasks of {seconds * 1e3:.1f} ms: measured {measured * 1e3:7.1f} ms,"
                f" simulated {simulated * 1e3:7.1f} ms, efficiency {simulated / measured:.3f} (aim {TARGET})",
                flush=True,
            )


def time_alone(call, x) -> float:
    """Seconds per call, the median of 20 calls."""
    times = []
    for _ in range(21):
        start = time.perf_counter()
        call(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
