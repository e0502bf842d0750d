"""Causal attention that never holds a square of the length: by a kernel, or a chunk of queries at a time.

cuDNN's kernel needs NVIDIA GPUs, bfloat16 or float16, and rows of one document each. `kernel_fault` says whether it is
available. Documents packed in a row can use JAX's kernel in Triton on request (`packed_fault`).
Everything else (capped scores, windows over packed documents, other devices) is done in chunks, whose scores are
(rows, heads, CHUNK, length) in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import mpmd

CHUNK = 512  # queries for which scores exist at a time
BLOCK = 128  # Triton's kernel takes rows of at most this length, or of a multiple of it
TENSOR_AXES = ("tensor", "model")  # the names of the mesh axis that divides heads


def kernel_fault(mesh: mpmd.MpmdMesh, kv_heads: int, head_dim: int, dtype: DTypeLike) -> str | None:
    """Returns why cuDNN's kernel cannot do attention on the devices of a mesh; None where it can.

    Asks JAX, which looks for cuDNN's library on this machine, whether or not the devices are here.
    """
    group = mesh.lowering_mesh()
    if group.devices.flat[0].platform != "gpu":
        return "the devices are no NVIDIA GPUs"
    if any(kind == AxisType.Explicit for kind in group.axis_types):
        return "JAX knows no sharding of its results on Explicit axes"
    if fault := _undivided(mesh, kv_heads):
        return fault
    x = jax.ShapeDtypeStruct((1, CHUNK, kv_heads, head_dim), dtype)
    try:
        jax.eval_shape(functools.partial(_by_kernel, window=0, scale=1.0), x, x, x)
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        install = " Install it: pip install nvidia-cudnn-cu12" if "cuDNN" in str(error) else ""
        return f"JAX says: {error}{install}"
    return None


def _undivided(mesh: mpmd.MpmdMesh, kv_heads: int) -> str | None:
    group = mesh.lowering_mesh()
    parts = [group.shape[name] for name in TENSOR_AXES if name in group.shape]
    if any(kv_heads % size for size in parts):
        return f"{kv_heads} heads of keys are not divided by {parts[0]} devices, as the heads of queries are"
    return None


def packed_fault(
    mesh: mpmd.MpmdMesh, kv_heads: int, head_dim: int, windows: tuple[int, ...], length: int
) -> str | None:
    """Returns why JAX's kernel in Triton cannot do attention over packed documents; None where it can."""
    if fault := _undivided(mesh, kv_heads):
        return fault
    if any(windows):
        return "JAX's kernel for packed documents has no windows"
    if length > BLOCK and length % BLOCK:
        return f"rows of {length} tokens are no multiple of {BLOCK}"
    if head_dim & (head_dim - 1):
        return f"heads of {head_dim} are no power of 2"
    return None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: jax.Array | int = 0,
    windows: tuple[int, ...] = (0,),
    segments: jax.Array | None = None,
    cap: float | None = None,
    kernel: bool = False,
    packed: str = "",
) -> jax.Array:
    """Computes causal attention. The result has the shape and dtype of q.

    Args:
      q: (rows, length, heads, size).
      k, v: (rows, length, kv_heads, size); several heads of queries share one of these.
      scale: the factor of the scores.
      window: how many positions a query sees, with its own; 0 for all. One of `windows`.
      windows: all windows of the model, ascending. A kernel is compiled for each.
      segments: the document of each position, (rows, length); documents do not see each other.
      cap: scores s become cap · tanh(s / cap).
      kernel: whether cuDNN's kernel may be used (`kernel_fault`). It does neither segments nor capped scores.
      packed: whether JAX's kernel in Triton does segments (`packed_fault`): "compiled" on NVIDIA GPUs,
        "interpreted" anywhere and slowly, "" for chunks.
    """
    if packed and segments is not None:
        return _by_packed_kernel(q, k, v, segments, scale, packed == "interpreted")
    if not kernel or segments is not None or cap:
        return _in_chunks(q, k, v, scale, window, segments, cap)
    kernels = [functools.partial(_by_kernel, window=size, scale=scale) for size in windows]
    if len(kernels) == 1:
        return kernels[0](q, k, v)
    return jax.lax.switch(jnp.searchsorted(jnp.array(windows), window), kernels, q, k, v)


def _by_kernel(q: jax.Array, k: jax.Array, v: jax.Array, window: int, scale: float) -> jax.Array:
    before = (window - 1, 0) if window else None
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, local_window_size=before, implementation="cudnn"
    )


def _by_packed_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, scale: float, interpret: bool
) -> jax.Array:
    """Runs the kernel on each device's rows and heads. It has no shared key heads: each query head gets its own."""
    from jax.experimental.pallas.ops.gpu import attention as triton  # experimental, and only this needs it

    def of_device(q, k, v, segments):
        k, v = (jnp.repeat(x.astype(q.dtype), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return triton.mha(q, k, v, segments, sm_scale=scale, causal=True, interpret=interpret)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return of_device(q, k, v, segments)
    rows = tuple(name for name in mesh.axis_names if name not in TENSOR_AXES)
    heads = P(rows, None, tuple(name for name in mesh.axis_names if name in TENSOR_AXES))
    specs = heads, heads, heads, P(rows)
    return jax.shard_map(of_device, in_specs=specs, out_specs=heads, check_vma=False)(q, k, v, segments)


def _in_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    window: jax.Array | int,
    segments: jax.Array | None,
    cap: float | None,
) -> jax.Array:
    """Computes `attend` chunk by chunk. The backward pass computes the scores of each chunk again."""
    rows, length, heads, size = q.shape
    keys = jnp.arange(length)

    def of_chunk(chunk):
        q, queries, documents = chunk
        scores = jnp.einsum("bqhgk,bthk->bhgqt", q, k.astype(q.dtype), preferred_element_type=jnp.float32) * scale
        if cap:
            scores = cap * jnp.tanh(scores / cap)
        seen = queries[:, None] >= keys
        seen &= (window == 0) | (queries[:, None] - keys < window)
        if segments is not None:
            seen = (seen & (documents[:, :, None] == segments[:, None, :]))[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(q.dtype)
        return jnp.einsum("bhgqt,bthk->bqhgk", weights, v.astype(q.dtype))

    q = q.reshape(rows, length, k.shape[2], -1, size)
    if length <= CHUNK:
        return of_chunk((q, keys, segments)).reshape(rows, length, heads, size)
    count = -(-length // CHUNK)

    def chunks(x, axis=1):
        """Splits an array into chunks along a new axis 0; the last one is padded."""
        filled = jnp.pad(x, [(0, (count * CHUNK - length) * (a == axis)) for a in range(x.ndim)])
        parts = filled.reshape(*x.shape[:axis], count, CHUNK, *x.shape[axis + 1 :])
        return jnp.moveaxis(parts, axis, 0)

    # The gradients of keys and values are sums over the chunks, which are added up in float32.
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    some = chunks(q), chunks(keys, 0), None if segments is None else chunks(segments)
    attended = jax.lax.map(jax.checkpoint(of_chunk, prevent_cse=False), some)
    return jnp.moveaxis(attended, 0, 1).reshape(rows, -1, heads, size)[:, :length]
