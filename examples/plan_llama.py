"""Llama-shaped training steps to plan before a cluster is booked: `llama3_8b` and `llama3_70b`.

    python -m mpmd plan examples/plan_llama.py:llama3_70b --target h100 --groups 16 --devices-per-group 64
    python -m mpmd plan examples/plan_llama.py:llama3_8b_32k --target h100 --groups 8

A decoder in plain JAX: grouped-query attention, rotary positions, gated MLP, RMS norms, untied head, bfloat16
parameters and float32 moments of Adam. Inside a group, the types of the arguments divide parameters by their first axis
(FSDP) and batches by rows. Layers are recomputed in the backward pass. Parameters are gathered in each task, or once a
step: `llama3_8b_gathered_once` plans the latter. Attention is cuDNN's where it can be had.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from llama.attention import CHUNK as QUERIES
from llama.attention import attend, kernel_fault

import mpmd

CHUNK = 512  # positions for which logits exist at a time


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's sizes, and the choices for a step."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128256
    length: int = 8192
    rows_per_device: int = 1  # of a microbatch
    gathered_once: bool = False  # parameters, once a step
    kernel: bool = True  # cuDNN's for attention, where it can be had


def norm(scale, x):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotated(x):
    """Applies rotary positions to [rows, length, heads, size]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    return jnp.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def layer(shape, kernel, p, x):
    size = shape.width // shape.heads
    h = norm(p["attention_norm"], x)
    q = rotated((h @ p["q"]).reshape(*x.shape[:2], shape.heads, size))
    k = rotated((h @ p["k"]).reshape(*x.shape[:2], shape.kv_heads, size))
    v = (h @ p["v"]).reshape(*x.shape[:2], shape.kv_heads, size)
    x += attend(q, k, v, scale=size**-0.5, kernel=kernel).reshape(x.shape) @ p["o"]
    h = norm(p["mlp_norm"], x)
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def in_chunks(x):
    """Splits [rows, length, ...] into chunks of CHUNK positions along a new first axis."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, min(CHUNK, x.shape[1]), *x.shape[2:]), 1, 0)


def build(shape: Shape, mesh: mpmd.MpmdMesh, schedule: str, num_microbatches: int):
    """Builds the step and its abstract arguments, for `python -m mpmd plan`."""
    width = shape.width
    axis = next(name for name in mesh.lowering_mesh().axis_names if name != mesh.mpmd_axis_name)
    fault = "as asked"
    if shape.kernel:
        fault = kernel_fault(mesh, shape.kv_heads, width // shape.heads, jnp.bfloat16)
    if fault:
        print(f"attention in chunks of {QUERIES} queries, without a kernel: {fault}", file=sys.stderr)
    apply = jax.checkpoint(functools.partial(layer, shape, fault is None))

    def lie(tree, spec):
        """Puts each array in this layout. Gradients get their parameters' layout: a device adds up its own part."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh.tracing_mesh(), spec))

    def loss(params, tokens):
        x = params["embedding"].at[tokens[:, :-1]].get()
        for p in params["layers"]:
            x = mpmd.mark_layer_end(apply(p, x))
        chunks = jax.tree.map(in_chunks, (norm(params["norm"], x), tokens[:, 1:]))
        head = lie(params["head"], P())  # once, and not for each chunk

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def of_chunk(total, chunk):
            x, targets = chunk
            logits = (x @ head).astype(jnp.float32)
            picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
            return total + jnp.sum(jax.nn.logsumexp(logits, -1) - picked), None

        return jax.lax.scan(of_chunk, jnp.zeros(()), chunks)[0] / tokens[:, 1:].size

    def step(state, tokens):
        params, first, second = state
        whole = lie(params, P()) if shape.gathered_once else params

        def gradients(t):
            value, grads = jax.value_and_grad(loss)(whole, t)
            return value, grads if shape.gathered_once else lie(grads, P(axis))

        value, grads = mpmd.treduce(gradients, tokens, schedule=schedule, operation=mpmd.Mean)
        grads = lie(grads, P(axis))
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(m.dtype), first, grads)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g.astype(v.dtype) ** 2, second, grads)
        params = jax.tree.map(
            lambda p, m, v: p - (3e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype), params, first, second
        )
        return (params, first, second), value

    def array(*sizes, dtype=jnp.bfloat16, spec=None):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh.tracing_mesh(), spec or P(axis)))

    kv = width // shape.heads * shape.kv_heads
    one = {
        "attention_norm": array(width), "q": array(width, width), "k": array(width, kv), "v": array(width, kv),
        "o": array(width, width), "mlp_norm": array(width), "gate": array(width, shape.hidden),
        "up": array(width, shape.hidden), "down": array(shape.hidden, width),
    }  # fmt: skip
    params = {
        "embedding": array(shape.vocabulary, width), "layers": [one] * shape.layers, "norm": array(width),
        "head": array(width, shape.vocabulary),
    }  # fmt: skip
    moments = jax.tree.map(lambda p: array(*p.shape, dtype=jnp.float32), params)
    rows = shape.rows_per_device * mesh.lowering_mesh().size
    tokens = array(num_microbatches, rows, shape.length + 1, dtype=jnp.int32, spec=P(None, axis))
    return mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0), ((params, moments, moments), tokens)


LLAMA3_8B = Shape(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336)


def llama3_8b(mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = 32, gathered_once: bool = False):
    """8 billion parameters, 32 layers."""
    return build(dataclasses.replace(LLAMA3_8B, gathered_once=gathered_once), mesh, schedule, num_microbatches)


def llama3_8b_gathered_once(mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = 32):
    """The same, with parameters gathered once a step: a device holds those of its stage, and their gradients."""
    return llama3_8b(mesh, schedule, num_microbatches, gathered_once=True)


def llama3_8b_32k(mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = 32):
    """The same on rows of 32,768 tokens."""
    return build(dataclasses.replace(LLAMA3_8B, length=32768), mesh, schedule, num_microbatches)


def llama3_70b(mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = 32):
    """70 billion parameters, 80 layers."""
    return build(Shape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672), mesh, schedule, num_microbatches)


def tiny(mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = 4):
    """A few thousand parameters, to try the command."""
    return build(Shape(8, 64, 4, 2, 128, vocabulary=256, length=32), mesh, schedule, num_microbatches)
