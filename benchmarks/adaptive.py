"""Measures orders that adapt against fixed ones, where tasks take longer or shorter than planned.

    python benchmarks/adaptive.py

Four processes with emulated accelerators, as in `pipeline_efficiency.py`: a task calls back to the host and sleeps. The
duration is drawn for each step, stage, kind and microbatch, and is the same in all schedules, so the fixed and the
adaptive order have the same durations. Prints for each schedule the mean time of a step in the planned order and as
`mpmd.Adaptive`: without jitter, with jitter of 30 % (log-normal) of each task, and with hiccups (one task in twenty
takes five times as long). Also prints the decision of `Adaptive`. Both orders return the same bits.

    python benchmarks/adaptive.py --simulate

does the same on a clock, 200 times with other durations, in seconds; no order can be faster than the work of the
busiest group, which is printed too.
"""

import argparse
import os
import random
import statistics
import sys
import time

from pipeline_efficiency import NUM_GROUPS, slow_down_the_wire
from ranks import start_ranks

JITTERS = ("none", "jitter of 30 %", "hiccups")
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of a step (default: %(default)s)")
    parser.add_argument("--task-ms", type=float, default=20.0, help="of a forward task (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=2.0, help="of a transfer (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each (default: %(default)s)")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, help="by name (default: %(default)s)")
    parser.add_argument("--simulate", action="store_true", help="on a clock; nothing runs")
    parser.add_argument("--ahead", default=None, help="kinds that may run ahead (default: as Adaptive decides)")
    args = parser.parse_args()
    if args.simulate:
        simulate(args)
        return 0
    if "MPMD_PROCESS_ID" in os.environ:
        run(args)
        return 0
    return start_ranks(NUM_GROUPS)


def simulate(args) -> None:
    import scheduler
    from scheduler.programs.ahead import EventPlan
    from scheduler.programs.jitter import kinds_ahead, makespan

    for name in args.schedules:
        schedule = scheduler.make(name, num_groups=NUM_GROUPS)
        graph = scheduler.TaskGraph.chain(schedule.num_stages)
        orders = scheduler.CustomSchedule(schedule.orders(args.microbatches), schedule.placement)
        plan = EventPlan.of(scheduler.lower(graph, orders, args.microbatches))
        kinds = kinds_ahead(scheduler.Adaptive(schedule), args.microbatches) if args.ahead is None else args.ahead
        for jitter in JITTERS:
            found = [], [], [], []
            for seed in range(200 if jitter != "none" else 1):
                rng = random.Random(f"step {seed}")
                factors = [factor(jitter, rng) for _ in plan.events]
                lasts = [0.1 if not e.kind else len(e.kind.replace("B", "IW")) for e in plan.events]
                seconds = [last * times for last, times in zip(lasts, factors, strict=True)]
                for times, ahead in zip(found, ("", kinds, "FBIW"), strict=False):
                    times.append(makespan(plan, ahead, seconds.__getitem__))
                found[3].append(max(sum(seconds[k] for k in own if plan.events[k].kind) for own in plan.lists))
            fixed, adaptive, every, work = map(statistics.fmean, found)
            print(
                f"{name:17} {jitter:14} fixed {fixed:6.1f}, adaptive ({kinds or 'as planned'}) {adaptive:6.1f},"
                f" all kinds {every:6.1f}, work of the busiest group {work:6.1f}: {fixed / adaptive:.3f} times as"
                f" fast, with all kinds {fixed / every:.3f}"
            )


def factor(jitter: str, rng: random.Random) -> float:
    """Draws the ratio of a task's duration to its planned duration."""
    slow, share = rng.random() < 0.05, rng.lognormvariate(0.0, 0.3)
    return {"none": 1.0, "hiccups": 5.0 if slow else 1.0}.get(jitter, share)


def run(args) -> None:
    import jax
    import numpy as np

    import mpmd
    import scheduler

    mpmd.initialize()
    slow_down_the_wire(args.delay_ms / 1000)
    mesh = mpmd.MpmdMesh(jax.make_mesh((NUM_GROUPS,), ("stage",)), "stage")
    now = {"jitter": "none", "step": 0}
    loss = loss_of(args.task_ms / 1000, now)
    xs = np.ones((args.microbatches, 4096, 1), np.float32), np.ones((args.microbatches, 1), np.float32)
    xs[1][:, 0] = np.arange(args.microbatches)

    def seconds(compiled) -> float:
        start = time.perf_counter()
        jax.block_until_ready(jax.tree.map(lambda a: a.to_mpmd_local_array, compiled(ws, xs)))
        return time.perf_counter() - start

    for name in args.schedules:
        schedule = scheduler.make(name, num_groups=NUM_GROUPS)
        ws, steps = [np.float32(1.0)] * schedule.num_stages, []
        for its in (schedule, scheduler.Adaptive(schedule, args.ahead)):

            @mpmd.jit(mpmd_mesh=mesh)
            def step(ws, xs, schedule=its):
                return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, *x), xs, schedule=schedule)

            steps.append(as_an_accelerator(step.lower(ws, xs).compile()))
            for _ in range(2):  # the first steps take longer
                seconds(steps[-1])
        for jitter in JITTERS:
            times = [[], []]
            for number in range(args.steps):
                now.update(jitter=jitter, step=number)
                for compiled, found in zip(steps, times, strict=True):
                    found.append(seconds(compiled))
            fixed, adaptive = map(statistics.fmean, times)
            if jax.process_index() == 0:
                print(
                    f"{name:17} {jitter:14} fixed {fixed * 1e3:7.1f} ms, adaptive {adaptive * 1e3:7.1f} ms,"
                    f" {fixed / adaptive:.3f} times as fast",
                    flush=True,
                )
        if jax.process_index() == 0:
            print("  " + next(line for line in steps[1].explain().splitlines() if line.startswith("adaptive")))


def loss_of(task_s: float, now: dict):
    """Returns a model's loss for microbatch `x` of number `m`, with tasks that sleep for the durations in `now`."""
    import jax
    import jax.numpy as jnp

    import mpmd

    def work(x, stage, kind, m):
        """Returns `x` after the time that this task takes."""

        def wait(x, m):
            rng = random.Random(f"{now['step']} {stage} {kind} {int(m)}")
            time.sleep(task_s * factor(now["jitter"], rng))
            return x

        return x.at[0, 0].set(jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x[0, 0], m[0]))

    def make_stage(s):
        @jax.custom_vjp
        def stage(w, x, m):
            return work(x, s, "F", m) * w

        def backward(residuals, dy):
            w, x, m = residuals
            return jnp.vdot(work(dy, s, "W", m), x), work(dy * 1.0, s, "I", m) * w, jnp.zeros_like(m)

        stage.defvjp(lambda w, x, m: (stage(w, x, m), (w, x, m)), backward)
        return stage

    def loss(ws, x, m):
        for i, w in enumerate(ws):
            x = make_stage(i)(w, x, m)
            if i < len(ws) - 1:
                x = mpmd.mark_stage_end(x)
        return (x * x).mean()

    return loss


def as_an_accelerator(compiled):
    """Starts tasks in the background. On CPU, a program with a callback runs in the call if its inputs are there."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def soon(x):
        """Returns `x`, a little later."""
        a = jnp.full((128, 128), x.ravel()[0], jnp.float32)
        return x + (0.0 * (a @ a)[0, 0]).astype(x.dtype)

    executor = compiled._executor
    for b in executor.bindings.instructions:
        if b.tasks:
            b.act = lambda x, *others, act=b.act: act(soon(x), *others)
    executor._instructions = executor._bound()
    return compiled


if __name__ == "__main__":
    sys.exit(main())
