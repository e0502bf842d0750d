"""Measures a loop of a trainer and a sampler on one mesh, with a lag of one step: the longer of the two, or their sum?

    python benchmarks/roles.py [--task-ms 30] [--steps 10]

Four processes with one CPU device each. Accelerators are emulated, as in `pipeline_efficiency.py`: a task calls back to
the host and sleeps. Two groups train and two sample, each with four microbatches in two stages. Prints the times of a
step of the trainer alone, of the sampler alone, and of the loop, where a reshard moves the weights and where a stream
does, relative to the longer of the two (aim: 1.05).
"""

import argparse
import os
import sys
import time

from ranks import start_ranks

NUM_MICROBATCHES = 4
TARGET = 1.05


def main() -> int:
    """Measures and prints. Returns 1 if the loop takes too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task-ms", type=float, default=30.0, help="of a forward task (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps (default: %(default)s)")
    args = parser.parse_args()
    return run(args) if "MPMD_PROCESS_ID" in os.environ else start_ranks(4)


def run(args) -> int:
    del sys.path[0]  # this folder, whose reshard.py would hide the package
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd
    from reshard.api import mpmd_to_mpmd_reshard
    from reshard.streams.stream import stream as stream_between

    mpmd.initialize()
    mesh = mpmd.MpmdMesh(jax.make_mesh((4,), ("stage",)), "stage")
    trainer, sampler = mesh.mpmd_submesh([0, 1]), mesh.mpmd_submesh([2, 3])

    def work(x, tasks):
        """Returns `x` after the time of `tasks` tasks."""

        def wait(number):
            time.sleep(tasks * args.task_ms / 1000)
            return number

        return x.at[0, 0].set(jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x[0, 0]))

    @jax.custom_vjp
    def layer(w, x, tasks):
        return jnp.tanh(work(x, 1) @ w)

    layer.defvjp(
        lambda w, x, tasks: (layer(w, x, tasks), (w, x)),
        lambda residuals, dy: (residuals[1].T @ work(dy, 2), dy @ residuals[0].T, None),
    )

    def loss_of(params, x):
        h = mpmd.mark_stage_end(layer(params["first"], x, 1.0))
        return jnp.mean((layer(params["last"], h, 1.0) - x) ** 2)

    @mpmd.jit(mpmd_mesh=trainer, donate_argnums=0)
    def train(params, xs):
        one = lambda x: jax.value_and_grad(loss_of)(params, x)  # noqa: E731
        loss, grads = mpmd.treduce(one, xs, schedule="1f1b", operation=mpmd.Mean)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def answer(params, x):
        h = mpmd.mark_stage_end(jnp.tanh(work(x, 2) @ params["first"]))
        return jnp.tanh(work(h, 2) @ params["last"])

    @mpmd.jit(mpmd_mesh=sampler)
    def sample(params, xs):
        return mpmd.treduce(lambda x: answer(params, x), xs, schedule="gpipe", operation=mpmd.Concat)

    rng = np.random.default_rng(0)
    xs = rng.normal(size=(NUM_MICROBATCHES, 8, 16)).astype(np.float32)
    params = {name: rng.normal(size=(16, 16)).astype(np.float32) / 4 for name in ("first", "last")}
    sources, targets = (
        {name: mpmd.MpmdSharding(group, i) for i, name in enumerate(params)} for group in (trainer, sampler)
    )
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=targets[name]) for name, x in params.items()}
    stream = stream_between(sources, like)

    def timed(step, state):
        """Returns the seconds of a step in a loop of several, which waits only at its end."""
        for i in range(args.steps + 2):
            if i == 2:
                jax.block_until_ready(state)
                mpmd.device_get(state[1])
                start = time.perf_counter()
            state = step(i, *state)
        mpmd.device_get(state[1])
        return (time.perf_counter() - start) / args.steps

    def by_reshard(i, trained, sampled, weights):
        sampled = sample(weights, xs)
        trained, _ = train(trained, xs)
        return trained, sampled, mpmd_to_mpmd_reshard(trained, targets, donate=False)

    def by_stream(i, trained, sampled, weights):
        sampled = sample(weights, xs)
        trained, _ = train(trained, xs)
        if stream.sends:
            stream.send(trained, version=i)
        return trained, sampled, stream.receive()[0] if stream.receives else weights

    first = jax.tree.map(np.copy, params)
    alone = {
        "trainer": timed(lambda i, p, loss: train(p, xs), (first, None)),
        "sampler": timed(lambda i, p, y: (p, sample(p, xs)), (params, None)),
    }
    loops = {"reshard": by_reshard, "stream": by_stream}
    together = {way: timed(loop, (jax.tree.map(np.copy, params), None, params)) for way, loop in loops.items()}
    longest = max(alone.values())
    if jax.process_index() == 0:
        for name, seconds in alone.items():
            print(f"{name} alone: {1e3 * seconds:.1f} ms a step")
        for way, seconds in together.items():
            print(f"both, weights by a {way}: {1e3 * seconds:.1f} ms a step, {seconds / longest:.3f} of the longer one")
    return int(max(together.values()) > TARGET * longest)


if __name__ == "__main__":
    sys.exit(main())
