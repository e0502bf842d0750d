"""Measures small real steps, with hardly more work than their start: processor time against plain `jax.jit`.

    python benchmarks/small_steps.py [--steps 120]
    scripts/launch_multihost.sh -n 2 --cpu-devices 1 -- python benchmarks/small_steps.py

A PPO-like update (actor and critic, clipped objective, 64 rows) and a GCN-like one (two graph convolutions over 64
nodes and 256 edges), each with 4 microbatches, Adam and two stages, in two groups of one CPU device. The batch comes
from numpy at each step, and the loss is read. The two take turns. Prints the median processor time of a step.

In two processes, also with a GPT of two layers, it prints the cost of comparing their calls: the main thread's part and
all threads' part of a step's time, the part of a step's processor time, and the time of a step by the clock, against
steps that are not compared.
"""

import argparse
import os
import pathlib
import statistics
import sys
import threading
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd
from mpmd.run.executor import Executor

WIDTH, NODES, EDGES, NUM_MICROBATCHES = 64, 64, 256, 4
TARGET = 4.0
TARGET_SHARE = 0.01  # of a step, for the comparison of calls
BLOCK = 40  # steps


def ppo_loss(params: Any, m: Any) -> jax.Array:
    """Returns the clipped objective, the value's error and the entropy."""
    x = m["observation"]
    actor, critic = mpmd.mark_stage_end((jnp.tanh(x @ params["actor_0"]), jnp.tanh(x @ params["critic_0"])))
    logs = jax.nn.log_softmax(jnp.tanh(actor @ params["actor_1"]) @ params["actor_2"])
    value = (jnp.tanh(critic @ params["critic_1"]) @ params["critic_2"])[:, 0]
    ratio = jnp.exp(jnp.take_along_axis(logs, m["action"][:, None], 1)[:, 0] - m["log_probability"])
    policy = -jnp.minimum(ratio * m["advantage"], jnp.clip(ratio, 0.8, 1.2) * m["advantage"]).mean()
    return policy + ((value - m["target"]) ** 2).mean() + 0.01 * (jnp.exp(logs) * logs).sum(-1).mean()


def gcn_loss(params: Any, m: Any) -> jax.Array:
    """Returns the cross-entropy of the nodes' labels after two convolutions."""

    def convolution(x, w):
        return jax.ops.segment_sum((x @ w)[m["source"]], m["target"], NODES)

    hidden = mpmd.mark_stage_end(jax.nn.relu(convolution(m["x"], params["first"])))
    logits = convolution(hidden, params["second"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, m["label"]).mean()


def cases() -> dict[str, tuple[Any, Any, Any]]:
    """Returns loss, parameters and batch of each case."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    def whole(high: int, *shape: int) -> np.ndarray:
        return rng.integers(0, high, size=(NUM_MICROBATCHES, *shape), dtype=np.int32)

    ppo = {f"{tower}_{k}": normal(*shape) for tower, outputs in (("actor", 4), ("critic", 1))
           for k, shape in enumerate([(8, WIDTH), (WIDTH, WIDTH), (WIDTH, outputs)])}  # fmt: skip
    rows = {name: normal(NUM_MICROBATCHES, 64) for name in ("log_probability", "advantage", "target")}
    rollout = {**rows, "observation": normal(NUM_MICROBATCHES, 64, 8), "action": whole(4, 64)}
    edges = {"source": whole(NODES, EDGES), "target": whole(NODES, EDGES), "label": whole(8, NODES)}
    graph = {**edges, "x": normal(NUM_MICROBATCHES, NODES, 32)}
    return {
        "PPO-like": (ppo_loss, ppo, rollout),
        "GCN-like": (gcn_loss, {"first": normal(32, 32), "second": normal(32, 8)}, graph),
    }


def step_of(loss: Any, optimizer: Any) -> Any:
    """Returns a training step."""

    def step(state, batch):
        params, moments = state
        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, m), batch, schedule="1f1b", operation=mpmd.Mean
        )
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def measure(loss: Any, params: Any, batch: Any, num_steps: int) -> dict[str, float]:
    """Returns median processor seconds of a step, plain and as a pipeline. Compares their losses."""
    optimizer = optax.adam(1e-3)
    step = step_of(loss, optimizer)
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    runs = {"jax.jit": jax.jit(step), "mpmd.jit": mpmd.jit(step, mpmd_mesh=mesh)}
    states = dict.fromkeys(runs, jax.tree.map(jnp.asarray, (params, optimizer.init(params))))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(20 + num_steps):
        losses = []
        for name, run in runs.items():
            used = time.process_time()
            states[name], value = run(states[name], batch)
            losses.append(float(value))
            seconds[name].append(time.process_time() - used)
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    return {name: statistics.median(times[20:]) for name, times in seconds.items()}


def small_gpt() -> tuple[Any, Any, Any]:
    """Returns step, state and batch of the GPT of `examples/train_gpt.py`, with two layers."""
    # Instead of this folder, whose reshard.py would hide the package.
    sys.path[0] = str(pathlib.Path(__file__).parents[1] / "examples")
    import train_gpt  # pyright: ignore[reportMissingImports]

    model, optimizer = train_gpt.GPT(2, 64, num_stages=2), train_gpt.make_optimizer(1e-3, 1000)
    text = train_gpt.read_text([__file__])
    state = jax.tree.map(np.asarray, train_gpt.make_init(model, optimizer)(jax.random.key(0)))
    return train_gpt.make_step(model, optimizer, "1f1b", 4), state, train_gpt.batch_at(text, 0, 0, 8, 65)


def measure_comparison(step: Any, state: Any, batch: Any, num_steps: int) -> tuple[float, float, float, float]:
    """Measures the cost of comparing calls of several processes.

    Returns:
      The main thread's part and all threads' part of a step's time, all threads' part of the processor time, and the
      extra time of a step over one without the comparison: the two take turns, `BLOCK` steps each.
    """
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    run = mpmd.jit(step, mpmd_mesh=mesh)
    (thread,) = (t.ident for t in threading.enumerate() if t.name == "mpmd-calls")
    assert thread is not None
    clock = time.pthread_getcpuclockid(thread)
    compare: Any = Executor.compare
    noting: list[float] = []
    is_compared = True

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        if is_compared:
            compare(*args)
            noting.append(time.perf_counter() - start)

    seconds: dict[bool, list[float]] = {True: [], False: []}
    used = read = 0.0
    setattr(Executor, "compare", timed)  # noqa: B010 (a type checker knows its signature)
    for block in range(2 + 2 * num_steps // BLOCK):
        is_compared = block < 2 or block % 4 in (0, 3)  # on, off, off, on: drift hits both
        used_before, read_before = time.process_time(), time.clock_gettime(clock)
        for _ in range(BLOCK):
            start = time.perf_counter()
            state, read_by_user = run(state, batch)  # pyright: ignore[reportCallIssue]
            for piece in jax.tree.leaves(read_by_user)[0].addressable_shards:
                np.asarray(piece.data)
            if block >= 2:
                seconds[is_compared].append(time.perf_counter() - start)
        if block >= 2 and is_compared:
            used += time.process_time() - used_before
            read += time.clock_gettime(clock) - read_before
    setattr(Executor, "compare", compare)  # noqa: B010
    noting = noting[2 * BLOCK :]
    of_main = statistics.median(noting) / statistics.median(seconds[True])
    of_all = of_main + read / sum(seconds[True])
    # Means without the longest tenth, which is other work on the machine: a median would miss a turn of the thread.
    with_it, without = (statistics.mean(sorted(s)[: len(s) * 9 // 10]) for s in seconds.values())
    return of_main, of_all, (read + sum(noting)) / used, with_it / without - 1


def main() -> int:
    """Measures and prints. Returns 1 if a ratio or a share is above its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120, help="steps (default: %(default)s)")
    args = parser.parse_args()
    failed = 0
    mpmd.initialize()
    if jax.process_count() > 1:
        adam = optax.adam(1e-3)
        steps: dict[str, tuple[Any, Any, Any]] = {
            name: (step_of(loss, adam), jax.tree.map(np.asarray, (params, adam.init(params))), batch)
            for name, (loss, params, batch) in cases().items()
        }
        for name, case in {**steps, "small GPT": small_gpt()}.items():
            of_main, of_all, of_processor, longer = measure_comparison(*case, args.steps)
            failed |= of_all > TARGET_SHARE
            print(
                f"{name}: comparing takes {of_main:.2%} of a step in the main thread, {of_all:.2%} in all threads"
                f" ({of_processor:.2%} of the processor time); by the clock a step takes {longer:+.2%}"
            )
        return int(failed)
    for name, case in cases().items():
        plain, ours = measure(*case, args.steps).values()
        failed |= ours / plain > TARGET
        print(
            f"{name}: jax.jit {1e6 * plain:.0f} µs, mpmd.jit {1e6 * ours:.0f} µs, {ours / plain:.1f} (target {TARGET})"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
