"""A small step for the tests of ``python -m mpmd plan``."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd

WIDTH = 128


def build(mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = 4):
    """As many products as groups, one in each."""

    def loss(weights, x):
        for w in weights[:-1]:
            x = mpmd.mark_stage_end(jax.nn.relu(x @ w))
        return jnp.mean((x @ weights[-1]).astype(jnp.float32) ** 2)

    def step(weights, xs):
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule=schedule)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * mesh.num_groups
    rows = NamedSharding(mesh.tracing_mesh(), P(None, "data"))
    xs = jax.ShapeDtypeStruct((num_microbatches, 32, WIDTH), jnp.bfloat16, sharding=rows)
    return mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0), (weights, xs)
