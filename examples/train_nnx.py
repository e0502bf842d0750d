"""Trains a Flax NNX transformer as a pipeline.

    pip install -e '.[examples]' flax
    python examples/train_nnx.py                       # 2 stages, 1F1B; under a minute on a CPU

The model marks its own stages. NNX modules hold their variables. `nnx.split` takes the variables out, so that the step
is a function of arrays, and `nnx.merge` puts them back inside the loss.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpmd
import scheduler

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
    def __init__(self, num_stages: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(num_stages)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for stage, block in enumerate(self.blocks):
            x = block(x if stage == 0 else mpmd.mark_stage_end(x))
        return self.embed.attend(x)


def make_step(graph, optimizer, schedule):
    """Returns `step(params, state, batch) -> (params, state, loss)`; the batch has microbatches on axis 0."""

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(params, state, batch):
        value, grads = mpmd.treduce(
            lambda tokens: jax.value_and_grad(loss)(params, tokens), batch, schedule=schedule, operation=mpmd.Mean
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def batch_at(step: int, microbatches: int = 4, rows: int = 8):
    """Returns sequences that count up from a random start: easy to learn."""
    start = jax.random.randint(jax.random.key(step), (microbatches, rows, 1), 0, VOCABULARY)
    return (start + jnp.arange(LENGTH + 1)) % VOCABULARY


def main(arguments=None) -> list[float]:
    parser = argparse.ArgumentParser(description="Trains a Flax NNX transformer as a pipeline.")
    parser.add_argument("--steps", type=int, default=60, help="steps (default: %(default)s)")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages (default: %(default)s)")
    options = parser.parse_args(arguments)

    if jax.config.values["jax_num_cpu_devices"] < options.stages:
        jax.config.update("jax_num_cpu_devices", options.stages)  # where there are no GPUs
    devices = jax.devices()  # with fewer than stages, groups share them
    groups = [jax.sharding.Mesh([devices[s % len(devices)]], ("data",)) for s in range(options.stages)]
    mesh = mpmd.MpmdMesh.from_groups(groups)
    graph, params = nnx.split(Transformer(options.stages, nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(params)
    schedule = scheduler.OneFOneB(options.stages)
    step = mpmd.jit(make_step(graph, optimizer, schedule), mpmd_mesh=mesh, donate_argnums=(0, 1))
    losses = []
    for i in range(options.steps):
        params, state, value = step(params, state, batch_at(i))
        losses.append(float(value))
        if i % 10 == 0 or i == options.steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
