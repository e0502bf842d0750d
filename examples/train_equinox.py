"""Trains an Equinox transformer as a pipeline.

    pip install -e '.[examples]' equinox
    python examples/train_equinox.py                   # 2 stages, 1F1B; under a minute on a CPU

An Equinox module is a pytree whose leaves are arrays, functions and sizes. `eqx.partition` separates the arrays, which
are the state of the step, from the rest, which the step closes over. Each block is written for one sequence and mapped
over the batch by `jax.vmap`; the marks are outside the vmap.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpmd
import scheduler

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        a, m = jax.random.split(key)
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=a)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=m)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(x)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, num_stages: int, key):
        e, h, *bs = jax.random.split(key, 2 + num_stages)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=e)
        self.blocks = [Block(b) for b in bs]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=h)

    def __call__(self, tokens):
        """Returns logits of a batch of sequences."""
        x = jax.vmap(jax.vmap(self.embed))(tokens)
        for stage, block in enumerate(self.blocks):
            x = jax.vmap(block)(x if stage == 0 else mpmd.mark_stage_end(x))
        return jax.vmap(jax.vmap(self.head))(x)


@eqx.filter_value_and_grad
def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_step(static, optimizer, schedule):
    """Returns `step(params, state, batch) -> (params, state, loss)`; the batch has microbatches on axis 0."""

    def step(params, state, batch):
        model = eqx.combine(params, static)
        value, grads = mpmd.treduce(lambda tokens: loss(model, tokens), batch, schedule=schedule, operation=mpmd.Mean)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    return step


def batch_at(step: int, microbatches: int = 4, rows: int = 8):
    """Returns sequences that count up from a random start: easy to learn."""
    start = jax.random.randint(jax.random.key(step), (microbatches, rows, 1), 0, VOCABULARY)
    return (start + jnp.arange(LENGTH + 1)) % VOCABULARY


def main(arguments=None) -> list[float]:
    parser = argparse.ArgumentParser(description="Trains an Equinox transformer as a pipeline.")
    parser.add_argument("--steps", type=int, default=60, help="steps (default: %(default)s)")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages (default: %(default)s)")
    options = parser.parse_args(arguments)

    if jax.config.values["jax_num_cpu_devices"] < options.stages:
        jax.config.update("jax_num_cpu_devices", options.stages)  # where there are no GPUs
    devices = jax.devices()  # with fewer than stages, groups share them
    groups = [jax.sharding.Mesh([devices[s % len(devices)]], ("data",)) for s in range(options.stages)]
    mesh = mpmd.MpmdMesh.from_groups(groups)
    params, static = eqx.partition(Transformer(options.stages, jax.random.key(0)), eqx.is_array)
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(params)
    schedule = scheduler.OneFOneB(options.stages)
    step = mpmd.jit(make_step(static, optimizer, schedule), mpmd_mesh=mesh, donate_argnums=(0, 1))
    losses = []
    for i in range(options.steps):
        params, state, value = step(params, state, batch_at(i))
        losses.append(float(value))
        if i % 10 == 0 or i == options.steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
