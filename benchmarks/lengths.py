"""Measures steps over documents of many lengths: padded to the longest, as they come, and put in order.

    python benchmarks/lengths.py

Four processes with emulated accelerators: a task calls back to the host and sleeps, for a time that follows from the
length of its microbatch (tokens, and attention to all of them). Lengths are drawn from a log-normal distribution and
rounded up to powers of two. Prints for each schedule the mean time of a step, relative to the work of the busiest
group, a lower bound for every order: with all microbatches padded to the longest, as a list in the order drawn, and in
the order that `scheduler.order_microbatches` finds.

    python benchmarks/lengths.py --simulate

does the same on a clock for 200 draws.
"""

import argparse
import math
import os
import random
import statistics
import sys
import time

from pipeline_efficiency import NUM_GROUPS, slow_down_the_wire
from ranks import start_ranks

import scheduler

LONGEST = 8192
SCHEDULES = ("1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of a step (default: %(default)s)")
    parser.add_argument("--median", type=int, default=1500, help="of the lengths (default: %(default)s)")
    parser.add_argument("--spread", type=float, default=0.6, help="of their logarithm (default: %(default)s)")
    parser.add_argument("--task-ms", type=float, default=20.0, help="forward of 2,048 tokens (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=2.0, help="of a transfer (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="draws that are measured (default: %(default)s)")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, help="by name (default: %(default)s)")
    parser.add_argument("--simulate", action="store_true", help="on a clock; nothing runs")
    args = parser.parse_args()
    if not args.simulate and "MPMD_PROCESS_ID" not in os.environ:
        return start_ranks(NUM_GROUPS)
    (simulate if args.simulate else run)(args)
    return 0


def lengths_of(args, step: int) -> list[int]:
    """Draws the lengths of a step's microbatches."""
    rng = random.Random(f"lengths {step}")
    drawn = (rng.lognormvariate(math.log(args.median), args.spread) for _ in range(args.microbatches))
    return [2 ** math.ceil(math.log2(min(max(n, 128), LONGEST))) for n in drawn]


def work_of(length: int) -> float:
    """Returns a microbatch's work relative to 2,048 tokens, where attention is a quarter of the work."""
    share = length / 2048
    return 0.75 * share + 0.25 * share**2


def costs_of(lengths: list[int], schedule, args) -> scheduler.Costs:
    """Returns the costs. A group's forward of 2,048 tokens takes one unit, for any number of stages in the group."""
    part = NUM_GROUPS / schedule.num_stages
    return scheduler.Costs(part, part, part, args.delay_ms / args.task_ms, microbatches=[*map(work_of, lengths)])


def busiest(timeline: scheduler.Timeline) -> float:
    return max(timeline.busy)


def simulate(args) -> None:
    for name in args.schedules:
        schedule = scheduler.make(name, num_groups=NUM_GROUPS)
        rows = []
        for step in range(200):
            lengths = lengths_of(args, step)
            costs = costs_of(lengths, schedule, args)
            padded = costs_of([max(lengths)] * len(lengths), schedule, args)
            orders = costs, costs.in_order(scheduler.order_microbatches(schedule, costs))
            found = [scheduler.simulate(schedule, len(lengths), one) for one in (padded, *orders)]
            rows.append([one.makespan / busiest(found[1]) for one in found])
        told(name, [statistics.fmean(column) for column in zip(*rows, strict=True)])


def told(name: str, ratios: list[float]) -> None:
    padded, given, best = ratios
    print(
        f"{name:17} padded {padded:.2f}, as drawn {given:.2f}, put in order {best:.2f} of the busiest group's work",
        flush=True,
    )


def run(args) -> None:
    import jax
    import numpy as np

    import mpmd

    mpmd.initialize()
    slow_down_the_wire(args.delay_ms / 1000)
    mesh = mpmd.MpmdMesh(jax.make_mesh((NUM_GROUPS,), ("stage",)), "stage")
    for name in args.schedules:
        schedule = scheduler.make(name, num_groups=NUM_GROUPS)
        ws = [np.float32(1.0)] * schedule.num_stages
        loss = loss_of(args.task_ms / 1000 * NUM_GROUPS / schedule.num_stages)

        @mpmd.jit(mpmd_mesh=mesh)
        def step(ws, xs, schedule=schedule, loss=loss):
            return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)

        def seconds(lengths, step=step, ws=ws) -> float:
            xs = [np.ones((length, 1), np.float32) for length in lengths]
            start = time.perf_counter()
            jax.block_until_ready(jax.tree.map(lambda a: a.to_mpmd_local_array, step(ws, xs)))
            return time.perf_counter() - start

        seconds(sorted({n for step in range(args.steps) for n in lengths_of(args, step)}) * NUM_GROUPS)
        rows = []
        for number in range(args.steps):
            lengths = lengths_of(args, number)
            costs = costs_of(lengths, schedule, args)
            order = scheduler.order_microbatches(schedule, costs)
            work = busiest(scheduler.simulate(schedule, len(lengths), costs)) * args.task_ms / 1000
            ways = [max(lengths)] * len(lengths), lengths, [lengths[i] for i in order]
            rows.append([seconds(way) / work for way in ways])
        if jax.process_index() == 0:
            told(name, [statistics.fmean(column) for column in zip(*rows, strict=True)])


def loss_of(task_s: float):
    """Returns a model's loss for a microbatch, with tasks that sleep for a time set by its length."""
    import jax
    import jax.numpy as jnp

    import mpmd

    def work(x):
        """Returns `x` after the time that a task takes."""

        def wait(x):
            time.sleep(task_s * work_of(length))
            return x

        length = x.shape[0]
        return x.at[0, 0].set(jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x[0, 0]))

    @jax.custom_vjp
    def stage(w, x):
        return work(x) * w

    def backward(residuals, dy):
        w, x = residuals
        return jnp.vdot(work(dy), x), work(dy * 1.0) * w

    stage.defvjp(lambda w, x: (stage(w, x), (w, x)), backward)

    def loss(ws, x):
        for i, w in enumerate(ws):
            x = stage(w, x)
            if i < len(ws) - 1:
                x = mpmd.mark_stage_end(x)
        return (x * x).mean()

    return loss


if __name__ == "__main__":
    sys.exit(main())
