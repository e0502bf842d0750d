"""Measures small real steps, whose work is hardly more than their start: processor time against plain `jax.jit`.

    python benchmarks/small_steps.py [--steps 120]

A PPO-like update (actor and critic, clipped objective, 64 rows) and a GCN-like one (two graph convolutions over 64
nodes and 256 edges), each with 4 microbatches, Adam and two stages, in two groups of one CPU device. The batch comes
from numpy at each step, and the loss is read. The two take turns. Prints the median processor time of a step.
"""

import argparse
import os
import statistics
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd

WIDTH, NODES, EDGES, NUM_MICROBATCHES = 64, 64, 256, 4
TARGET = 4.0


def ppo_loss(params: Any, m: Any) -> jax.Array:
    """The clipped objective, the value's error and the entropy."""
    x = m["observation"]
    actor, critic = mpmd.mark_stage_end((jnp.tanh(x @ params["actor_0"]), jnp.tanh(x @ params["critic_0"])))
    logs = jax.nn.log_softmax(jnp.tanh(actor @ params["actor_1"]) @ params["actor_2"])
    value = (jnp.tanh(critic @ params["critic_1"]) @ params["critic_2"])[:, 0]
    ratio = jnp.exp(jnp.take_along_axis(logs, m["action"][:, None], 1)[:, 0] - m["log_probability"])
    policy = -jnp.minimum(ratio * m["advantage"], jnp.clip(ratio, 0.8, 1.2) * m["advantage"]).mean()
    return policy + ((value - m["target"]) ** 2).mean() + 0.01 * (jnp.exp(logs) * logs).sum(-1).mean()


def gcn_loss(params: Any, m: Any) -> jax.Array:
    """The cross-entropy of the nodes' labels after two convolutions."""

    def convolution(x, w):
        return jax.ops.segment_sum((x @ w)[m["source"]], m["target"], NODES)

    hidden = mpmd.mark_stage_end(jax.nn.relu(convolution(m["x"], params["first"])))
    logits = convolution(hidden, params["second"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, m["label"]).mean()


def cases() -> dict[str, tuple[Any, Any, Any]]:
    """Loss, parameters and batch of each."""
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


def measure(loss: Any, params: Any, batch: Any, num_steps: int) -> dict[str, float]:
    """Median seconds of the processor for a step, plain and as a pipeline. Their losses are compared."""
    optimizer = optax.adam(1e-3)

    def step(state, batch):
        params, moments = state
        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, m), batch, schedule="1f1b", operation=mpmd.Mean
        )
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

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


def main() -> int:
    """Measures and prints. Returns 1 if a ratio is above its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    failed = 0
    for name, case in cases().items():
        plain, ours = measure(*case, args.steps).values()
        failed |= ours / plain > TARGET
        print(
            f"{name}: jax.jit {1e6 * plain:.0f} µs, mpmd.jit {1e6 * ours:.0f} µs, {ours / plain:.1f} (target {TARGET})"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
