"""Measures steps with the head in one stage, and steps with the head divided over all groups.

    python benchmarks/vocabulary.py

Four processes with emulated accelerators, as in `pipeline_efficiency.py`: a task calls back to the host and sleeps. The
head over the vocabulary takes `--head` times as long as a stage of the model. Either the last stage has it, or each
group has a part of the words as a role of its own, which the loss reads (docs/stages.md). Prints the mean time of a
step of both, relative to the work of a group if all groups had the same, a lower bound, and the peak of microbatches in
flight.

    python benchmarks/vocabulary.py --simulate

does the same on a clock for other heads and numbers of groups.
"""

import argparse
import os
import statistics
import sys
import time

from pipeline_efficiency import NUM_GROUPS, slow_down_the_wire
from ranks import start_ranks

import scheduler

LOSS = 0.02  # the loss without the head, as a part of a stage's time


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of a step (default: %(default)s)")
    parser.add_argument("--head", type=float, default=1.0, help="its time, in stages (default: %(default)s)")
    parser.add_argument("--task-ms", type=float, default=40.0, help="forward of a stage (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=2.0, help="of a transfer (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="that are measured (default: %(default)s)")
    parser.add_argument("--simulate", action="store_true", help="on a clock; nothing runs")
    args = parser.parse_args()
    if args.simulate:
        for groups in (4, 8, 16):
            for head in (0.5, 1.0, 2.0):
                told(f"{groups} groups, head {head:g}: ", groups, head, simulated(groups, head, args), args)
    elif "MPMD_PROCESS_ID" not in os.environ:
        return start_ranks(NUM_GROUPS)
    else:
        run(args)
    return 0


def divided(groups: int, head: float) -> scheduler.GraphSchedule:
    """Returns a schedule of the model's stages, the parts of the head, and the loss."""
    chain = tuple((s - 1,) if s else () for s in range(groups))
    reads = (*chain, *((groups - 1,),) * groups, tuple(range(groups, 2 * groups)))
    each = (*(1.0,) * groups, *(head / groups,) * groups, LOSS)
    costs = scheduler.Costs(each, each, each)
    return scheduler.GraphSchedule(reads, (*range(groups), *range(groups), groups - 1), costs=costs)


def simulated(groups: int, head: float, args) -> list[float]:
    """Simulates a step with the head on the last stage, and divided. Returns times in forwards of a stage."""
    each = (*(1.0,) * (groups - 1), 1.0 + head + LOSS)
    transfer = args.delay_ms / args.task_ms
    whole = scheduler.simulate(
        scheduler.OneFOneB(groups), args.microbatches, scheduler.Costs(each, each, each, transfer)
    )
    schedule = divided(groups, head)
    assert schedule.costs is not None
    costs = scheduler.Costs(schedule.costs.forward, schedule.costs.forward, schedule.costs.forward, transfer)
    return [whole.makespan, scheduler.simulate(schedule, args.microbatches, costs).makespan]


def told(title: str, groups: int, head: float, times: list[float], args) -> None:
    work = 3 * args.microbatches * (groups + head + LOSS) / groups
    whole, parts = (x / work for x in times)
    held = scheduler.simulate(divided(groups, head), args.microbatches).peak_activations[0]
    print(
        f"{title}head in the last stage {whole:.2f}, divided {parts:.2f} of the even work ({whole / parts:.2f} times as"
        f" fast); group 0 holds {groups} microbatches, and {held} of stages and parts of the head",
        flush=True,
    )


def run(args) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd

    mpmd.initialize()
    slow_down_the_wire(args.delay_ms / 1000)
    mesh = mpmd.MpmdMesh(jax.make_mesh((NUM_GROUPS,), ("stage",)), "stage")
    unit_s = args.task_ms / 1000

    def work(x, share: float):
        def wait(number):
            time.sleep(unit_s * share)
            return number

        return x.at[0].set(jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x[0]))

    def task_of(share: float):
        """Returns a product that takes `share` of a stage's time, and twice as long backward."""

        @jax.custom_vjp
        def task(w, x):
            return work(x, share) * w

        def backward(residuals, dy):
            w, x = residuals
            dy = work(dy, 2 * share)
            return jnp.vdot(dy, x), dy * w

        task.defvjp(lambda w, x: (task(w, x), (w, x)), backward)
        return task

    stage, part, whole, end = map(task_of, (1.0, args.head / NUM_GROUPS, args.head, LOSS))

    def model(ws, x):
        for w in ws:
            x = mpmd.mark_layer_end(stage(w, x))
        return x

    def head_in_the_last_stage(params, x):
        for i, w in enumerate(params["model"]):
            x = stage(w, x)
            x = mpmd.mark_stage_end(x) if i < NUM_GROUPS - 1 else x
        return jnp.mean(end(1.0, whole(params["head"][0], x)) ** 2)

    def head_in_parts(params, x):
        x = mpmd.role("model")(model)(params["model"], x)
        parts = [mpmd.role(f"words {k}")(part)(w, x) for k, w in enumerate(params["head"])]
        return mpmd.role("loss")(lambda parts: jnp.mean(end(1.0, sum(parts)) ** 2))(parts)

    schedule = divided(NUM_GROUPS, args.head)
    roles = {"model": tuple(range(NUM_GROUPS)), "loss": NUM_GROUPS - 1}
    roles |= {f"words {k}": k for k in range(NUM_GROUPS)}
    params = {"model": [np.float32(1.0)] * NUM_GROUPS, "head": [np.float32(1.0)] * NUM_GROUPS}
    xs = np.ones((args.microbatches, 1 << 14), np.float32)
    times = []
    for loss, one, table in (
        (head_in_the_last_stage, scheduler.OneFOneB(NUM_GROUPS), None),
        (head_in_parts, schedule, roles),
    ):

        @mpmd.jit(mpmd_mesh=mesh, roles=table)
        def step(params, xs, loss=loss, one=one):
            return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=one)

        seconds = []
        for _ in range(args.steps + 1):
            start = time.perf_counter()
            jax.block_until_ready(jax.tree.map(lambda a: a.to_mpmd_local_array, step(params, xs)))
            seconds.append(time.perf_counter() - start)
        times.append(statistics.fmean(seconds[1:]) / unit_s)
    if jax.process_index() == 0:
        told("", NUM_GROUPS, args.head, times, args)


if __name__ == "__main__":
    sys.exit(main())
