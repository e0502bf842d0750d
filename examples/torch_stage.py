"""Trains a pipeline whose middle stage is written in PyTorch, and whose other two stages are written in JAX.

    pip install -e '.[torch,examples]'
    python examples/torch_stage.py                     # 3 stages, 1F1B; seconds on a CPU

torchax turns a `torch.nn.Module` into a JAX function of its parameters. This function is a stage like any other: JAX
differentiates it, XLA compiles it, and the same optimizer trains its parameters.
"""

import argparse
import importlib.util
import math

import jax
import jax.numpy as jnp
import optax
import torch  # pyright: ignore[reportMissingImports]
import torchax  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh

import mpmd
import scheduler

WIDTH = 32


class Block(torch.nn.Module):
    """The middle of the model: a residual MLP, in PyTorch."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def make_model(key):
    """Returns parameters of the three stages, and the middle one as a JAX function `block(params, (x,))`."""
    torch.manual_seed(0)
    block_params, block = torchax.extract_jax(Block(WIDTH))
    first, last = jax.random.split(key)
    params = {
        "embed": jax.random.normal(first, (2, WIDTH)),
        "block": block_params,
        "head": jax.random.normal(last, (WIDTH, 1)) / math.sqrt(WIDTH),
    }
    return params, block


def make_step(block, optimizer, schedule):
    """Returns `step(params, state, batch) -> (params, state, loss)`; the batch has microbatches on axis 0."""

    def loss(params, microbatch):
        x = mpmd.mark_stage_end(jnp.sin(microbatch["x"] @ params["embed"]))
        x = mpmd.mark_stage_end(block(params["block"], (x,)))
        return jnp.mean((x @ params["head"] - microbatch["y"]) ** 2)

    def step(params, state, batch):
        value, grads = mpmd.treduce(
            lambda microbatch: jax.value_and_grad(loss)(params, microbatch),
            batch,
            schedule=schedule,
            operation=mpmd.Mean,
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def batch_at(step: int, microbatches: int = 4, rows: int = 32):
    """Returns points of the plane, and a function's value at each point, which the model learns."""
    x = jax.random.uniform(jax.random.key(step), (microbatches, rows, 2), minval=-1.0, maxval=1.0)
    return {"x": x, "y": jnp.sin(3 * x[..., :1]) * x[..., 1:]}


def main(arguments=None) -> list[float]:
    parser = argparse.ArgumentParser(description="Trains a pipeline whose middle stage is written in PyTorch.")
    parser.add_argument("--steps", type=int, default=200, help="steps (default: %(default)s)")
    parser.add_argument(
        "--schedule",
        default="OneFOneB",
        help="a class of scheduler, for three stages in three groups (default: %(default)s)",
    )
    parser.add_argument("--check-against-jit", action="store_true", help="compare each loss with plain jax.jit")
    options = parser.parse_args(arguments)

    if importlib.util.find_spec("jax_cuda12_plugin") is None and jax.config.values["jax_num_cpu_devices"] < 3:
        jax.config.update("jax_num_cpu_devices", 3)
    devices = jax.devices()
    mesh = mpmd.MpmdMesh.from_groups([Mesh([devices[g % len(devices)]], ("data",)) for g in range(3)])
    params, block = make_model(jax.random.key(0))
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(params)
    schedule = getattr(scheduler, options.schedule)(3)
    step = mpmd.jit(make_step(block, optimizer, schedule), mpmd_mesh=mesh, donate_argnums=(0, 1))
    plain = jax.jit(make_step(block, optimizer, None))
    plain_params, plain_state = jax.tree.map(jnp.copy, (params, state))
    losses = []
    for i in range(options.steps):
        params, state, value = step(params, state, batch_at(i))
        losses.append(float(value))
        if i % 20 == 0 or i == options.steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.4f}")
        if options.check_against_jit:
            plain_params, plain_state, expected = plain(plain_params, plain_state, batch_at(i))
            assert math.isclose(losses[-1], float(expected), rel_tol=1e-4), (i, losses[-1], float(expected))
    if options.check_against_jit:
        print("the same as jax.jit")
    return losses


if __name__ == "__main__":
    main()
