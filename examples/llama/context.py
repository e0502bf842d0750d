"""Attention over rows that the devices of a group divide among them: keys and values go around in a ring.

Each device of the axis "context" holds two chunks of a row, one of its beginning and one of its end (`zigzag`). So all
have equal work, although attention is causal. The scores between two chunks are a square. A device computes three
squares with its own keys, two of them half masked, and then two in each turn of the ring, with the keys of another
device. Squares that are masked as a whole are skipped, unless the mask is a window's or that of documents.

No device holds the keys of a whole row: the backward pass sends them around again, together with their gradients.

Arrays have an axis of devices after the axis of rows, and only sending is a `shard_map`: JAX takes each constant out of
a `shard_map`, indices and masks too, and keeps it from the forward to the backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

AXIS = "context"
CHUNK = 256  # queries of a device for which scores exist at a time


def num_parts(mesh: Any = None) -> int:
    """Returns into how many parts a mesh divides a row; by default the mesh of the traced code."""
    return (mesh or jax.sharding.get_abstract_mesh()).shape.get(AXIS, 1)


def zigzag(length: int, parts: int) -> np.ndarray:
    """Returns a row's positions in the order of storage: device i has the chunks i and 2·parts - 1 - i."""
    if parts == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([chunks[[i, -1 - i]].reshape(-1) for i in range(parts)])


class Queries(NamedTuple):
    """A chunk of queries on each device: the early or the late one, of c positions, or some of these positions."""

    q: jax.Array  # (rows, devices, c, kv_heads, heads that share these, size)
    places: jax.Array  # in the row, (1, devices, c)
    segments: jax.Array | None  # (rows, devices, c)
    of_output: tuple[jax.Array, ...] = ()  # for the backward pass, each (rows, devices, c, kv_heads, heads, …)


class Keys(NamedTuple):
    """A chunk of keys and values on each device, as in `Queries`."""

    k: jax.Array  # (rows, devices, c, kv_heads, size)
    v: jax.Array
    places: jax.Array
    segments: jax.Array | None


def attend_in_ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: jax.Array | int = 0,
    segments: jax.Array | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Computes `attention.attend` on a mesh with the axis "context", for rows in the order of `zigzag`.

    Sends the keys and values of a device to each other device: once in the forward pass, and once in the backward
    pass, there with their gradients in float32.
    """
    length = q.shape[1]

    def chunks(q, k, v, segments, window, *of_output):
        """Makes the arguments of `_forward` and `_backward`."""
        places = jnp.asarray(zigzag(length, num_parts()), jnp.int32)[None]
        # Without it, JAX would make the masks, which no layer changes, before the scan over layers, and keep them all.
        q, k, v, segments, window, places = jax.lax.optimization_barrier((q, k, v, segments, window, places))
        queries = Queries(q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]), places, segments, of_output)
        return _divided(queries), _divided(Keys(k, v, places, segments)), About(window, scale, cap)

    def saving(*operands):
        out, sums = _joined(_forward(*chunks(*operands)))
        out = out.astype(q.dtype)
        return out.reshape(q.shape), (operands, out, sums)

    def gradients(saved, grad):
        operands, out, sums = saved
        grad = grad.reshape(out.shape)
        delta = jnp.sum(out.astype(jnp.float32) * grad, axis=-1)
        of_queries, of_keys = _backward(*chunks(*operands, grad, sums, delta))
        found = _joined(of_queries), *_joined(of_keys)
        return *(x.reshape(y.shape).astype(y.dtype) for x, y in zip(found, operands, strict=False)), None, None

    attended = jax.custom_vjp(lambda *operands: saving(*operands)[0])
    attended.defvjp(saving, gradients)
    return attended(q, k, v, segments, jnp.asarray(window, jnp.int32))


class About(NamedTuple):
    """Further inputs of scores."""

    window: jax.Array
    scale: float
    cap: float | None


Seen = tuple[jax.Array, jax.Array]
"""The output of attention for queries, in float32, and the logsumexp of their scores."""


def _forward(queries: tuple[Queries, Queries], keys: tuple[Keys, Keys], about: About) -> tuple[Seen, Seen]:
    """Computes attention for the early and the late queries of each device."""
    (early, late), (early_keys, late_keys) = queries, keys
    arriving = _sent(keys)  # while the keys of this device are used
    of_early = _seen(early, early_keys, about)
    of_late = _both(_seen(late, late_keys, about), _seen(late, early_keys, about))

    def turn(keys, seen):
        is_before = _is_before(keys, queries)
        of_early, of_late = seen
        of_late = _both(of_late, _seen(late, keys[0], about))
        more = _both(
            _pick(is_before, of_early, of_late), _seen(_pick(is_before, *queries), _pick(is_before, *keys), about)
        )
        return _pick(is_before, more, of_early), _pick(is_before, of_late, more)

    return _around(turn, arriving, (of_early, of_late))


def _backward(queries: tuple[Queries, Queries], keys: tuple[Keys, Keys], about: About) -> tuple[Any, Any]:
    """Returns the gradients of q for the early and the late chunks, and the pairs of gradients of k and v."""
    (early, late), (early_keys, late_keys) = queries, keys
    arriving = _sent(keys)
    of_early, of_early_keys = _gradients(early, early_keys, about)
    of_late, of_late_keys = _gradients(late, late_keys, about)
    more, more_of_keys = _gradients(late, early_keys, about)
    grads = (of_early, of_late + more), (_plus(of_early_keys, more_of_keys), of_late_keys)

    def turn(keys, grads):
        is_before = _is_before(keys, queries)
        (of_early, of_late), of_keys = grads
        of_early_keys, of_late_keys = _sent(of_keys)
        late_and_early = _gradients(late, keys[0], about)
        more = _gradients(_pick(is_before, *queries), _pick(is_before, *keys), about)
        none = jax.tree.map(jnp.zeros_like, more)
        of_early, of_early_keys = _plus((of_early, of_early_keys), _pick(is_before, more, none))
        of_late, of_late_keys = _plus((of_late, of_late_keys), _pick(is_before, none, more))
        of_late, of_early_keys = _plus((of_late, of_early_keys), late_and_early)
        return (of_early, of_late), (of_early_keys, of_late_keys)

    of_queries, of_keys = _around(turn, arriving, grads)
    return of_queries, _sent(of_keys)  # home


def _around(turn: Callable[[Any, Any], Any], arriving: Any, state: Any) -> Any:
    """Returns the state after all turns, with the keys of each other device."""

    def send_and_turn(_, keys_and_state):
        keys, state = keys_and_state
        return _sent(keys), turn(keys, state)

    return turn(*jax.lax.fori_loop(0, num_parts() - 2, send_and_turn, (arriving, state)))


def _sent(x: Any) -> Any:
    """Sends x to the next device of the ring."""
    ring = [(i, (i + 1) % num_parts()) for i in range(num_parts())]
    send = functools.partial(jax.lax.ppermute, axis_name=AXIS, perm=ring)
    return jax.shard_map(send, in_specs=P(None, AXIS), out_specs=P(None, AXIS), axis_names={AXIS})(x)


def _is_before(keys: tuple[Keys, Keys], queries: tuple[Queries, Queries]) -> jax.Array:
    """Returns on which devices the received keys come from an earlier device: (devices,).

    An earlier device's early chunk is before the early one here, and its late chunk after both chunks here. A later
    device's late chunk is before the late one here, and its early chunk after the early one here. Each early chunk is
    before each late one.
    """
    return keys[0].places[0, :, 0] < queries[0].places[0, :, 0]


def _pick(chosen: jax.Array, x: Any, y: Any) -> Any:
    """Picks x on the chosen devices and y on the others."""
    return jax.tree.map(lambda a, b: jnp.where(chosen.reshape(-1, *[1] * (a.ndim - 2)), a, b), x, y)


def _plus(x: Any, y: Any) -> Any:
    return jax.tree.map(jnp.add, x, y)


def _divided(x: Any) -> tuple[Any, Any]:
    """Divides arrays (rows, length, …) into early and late chunks, each (rows, devices, c, …)."""

    def devices(leaf):
        leaf = leaf.reshape(len(leaf), num_parts(), 2, -1, *leaf.shape[2:])
        free = P.UNCONSTRAINED
        return jax.lax.with_sharding_constraint(leaf, P(free, AXIS, *[free] * (leaf.ndim - 2)))

    x = jax.tree.map(devices, x)
    return jax.tree.map(lambda leaf: leaf[:, :, 0], x), jax.tree.map(lambda leaf: leaf[:, :, 1], x)


def _joined(early_and_late: tuple[Any, Any]) -> Any:
    """Joins early and late chunks to arrays (rows, length, …)."""
    return jax.tree.map(lambda *x: jnp.stack(x, axis=2).reshape(len(x[0]), -1, *x[0].shape[3:]), *early_and_late)


def _scores(q: jax.Array, k: jax.Array, queries: Queries, keys: Keys, about: About) -> jax.Array:
    """Returns (rows, devices, kv_heads, heads, queries, keys) in float32; very small where a key is masked."""
    window, scale, cap = about
    scores = jnp.einsum("bpqhgk,bpthk->bphgqt", q, k, preferred_element_type=jnp.float32) * scale
    if cap:
        scores = cap * jnp.tanh(scores / cap)
    distance = queries.places[..., None] - keys.places[:, :, None]
    hidden = (distance < 0) | ((window != 0) & (distance >= window))
    if queries.segments is not None and keys.segments is not None:
        hidden |= queries.segments[..., None] != keys.segments[:, :, None]
    return scores - 1e30 * hidden[:, :, None, None]


def _seen(queries: Queries, keys: Keys, about: About) -> Seen:
    """Computes attention of queries to some keys."""

    def of_chunk(_, queries):
        scores = _scores(queries.q, keys.k, queries, keys, about)
        sums = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - sums).astype(queries.q.dtype)
        out = jnp.einsum("bphgqt,bpthk->bpqhgk", weights, keys.v, preferred_element_type=jnp.float32)
        return None, (out, jnp.moveaxis(sums[..., 0], -1, 2))

    return _by_chunks(of_chunk, None, queries)[1]


def _both(x: Seen, y: Seen) -> Seen:
    """Combines the attention to two sets of keys."""
    sums = jnp.logaddexp(x[1], y[1])
    first, second = (out * jnp.exp(part - sums)[..., None] for out, part in (x, y))
    return first + second, sums


def _gradients(queries: Queries, keys: Keys, about: About) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the gradients of q, and of k and v. Computes the scores again. Source: arXiv:2307.08691, section 3.1."""

    def of_chunk(of_keys, queries):
        grad, sums, delta = queries.of_output
        make = lambda q, k: _scores(q, k, queries, keys, about)  # noqa: E731
        scores, back = jax.vjp(make, queries.q, keys.k)
        weights = jnp.exp(scores - _like_scores(sums))
        of_weights = jnp.einsum("bpqhgk,bpthk->bphgqt", grad, keys.v, preferred_element_type=jnp.float32)
        of_q, of_k = back(weights * (of_weights - _like_scores(delta)))
        of_v = jnp.einsum("bphgqt,bpqhgk->bpthk", weights.astype(grad.dtype), grad, preferred_element_type=jnp.float32)
        return _plus(of_keys, (of_k, of_v)), of_q

    none = jnp.zeros_like(keys.k, jnp.float32), jnp.zeros_like(keys.v, jnp.float32)
    of_keys, of_q = _by_chunks(of_chunk, none, queries)
    return of_q.astype(jnp.float32), of_keys


def _like_scores(sums: jax.Array) -> jax.Array:
    """Moves axes: (rows, devices, queries, kv_heads, heads) to (rows, devices, kv_heads, heads, queries, 1)."""
    return jnp.moveaxis(sums, 2, -1)[..., None]


def _by_chunks(function: Callable[[Any, Queries], Any], carry: Any, queries: Queries) -> Any:
    """Calls `function(carry, queries)` for some queries at a time."""
    length = queries.q.shape[2]
    if length <= CHUNK:
        return function(carry, queries)

    def cut(x):
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:]), 2, 0)

    carry, found = jax.lax.scan(function, carry, jax.tree.map(cut, queries))
    return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], length, *x.shape[4:]), found)
