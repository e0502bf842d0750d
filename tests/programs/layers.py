"""Layers as code on Explicit axes has them: each says something of shardings, and maps rows to rows.

A layer is `fun(where, w, x)` on `x` of shape (rows, WIDTH), whose rows are sharded over the data axis if there is one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH = 16


@dataclasses.dataclass(frozen=True)
class Where:
    """What a layer knows of its surroundings.

    Attributes:
        mesh: the mesh of all devices.
        group: the mesh of one group; under plain `jax.jit` the same as `mesh`.
    """

    mesh: Mesh
    group: Mesh

    @property
    def data(self) -> str | None:
        return "data" if "data" in self.mesh.axis_names else None

    @property
    def rows(self) -> P:
        return P(self.data, None)


LAYERS: dict[str, Callable[[Where, Any, Any], Any]] = {}


def _layer(fun):
    LAYERS[fun.__name__] = fun
    return fun


# --- shardings that are said ---


@_layer
def einsum(where, w, x):
    return jnp.tanh(jnp.einsum("bd,df->bf", x, w, out_sharding=where.rows))


@_layer
def contraction(where, w, x):
    """Both factors are sharded over the axis that is summed over."""
    h = jnp.tanh(jax.reshard(x, P()) @ jax.reshard(w, P(None, where.data)))
    return jax.reshard(jnp.einsum("bf,df->bd", h, jax.reshard(w, P(None, where.data)), out_sharding=P()), where.rows)


@_layer
def embedding(where, w, x):
    ids = (jnp.abs(lax.stop_gradient(x[:, 0])) * 8).astype(jnp.int32)
    return w.at[ids].get(out_sharding=where.rows) + x


@_layer
def reshard_on_the_whole_mesh(where, w, x):
    return jax.reshard(jnp.tanh(x @ w), NamedSharding(where.mesh, where.rows))


@_layer
def reshard_on_a_groups_mesh(where, w, x):
    return jnp.einsum("bd,df->bf", x, w, out_sharding=NamedSharding(where.group, where.rows))


@_layer
def constraints(where, w, x):
    h = lax.with_sharding_constraint(x @ w, where.rows)
    h = lax.with_sharding_constraint(h, NamedSharding(where.mesh, where.rows))
    return lax.with_sharding_constraint(jnp.tanh(h), NamedSharding(where.group, where.rows))


@_layer
def made_here(where, w, x):
    noise = jax.random.normal(jax.random.key(3), x.shape, out_sharding=where.rows)
    mask = jax.random.bernoulli(jax.random.key(4), 0.5, x.shape)
    return (
        jnp.tanh(x @ w) * jax.reshard(mask, where.rows) + 0.1 * noise + jnp.full(x.shape, 0.1, out_sharding=where.rows)
    )


@_layer
def inspected(where, w, x):
    sharding = jax.typeof(x).sharding
    assert sharding.mesh.axis_names == where.mesh.axis_names and sharding.spec == where.rows, sharding
    assert jax.typeof(w).sharding == jax.typeof(w * 2).sharding
    return jnp.tanh(jax.reshard(x @ w, sharding))


@_layer
def jit_with_shardings(where, w, x):
    return jax.jit(lambda w, x: jnp.tanh(x @ w), out_shardings=where.rows)(w, x)


# --- loops and transformations ---


@_layer
def scan_over_layers(where, w, x):
    def body(carry, w):
        return jnp.tanh(carry @ w), (carry * carry).sum()

    h, sums = lax.scan(body, x, jnp.stack([w, 0.9 * w]))
    return h + 1e-3 * sums.sum()


@_layer
def carries_of_zeros(where, w, x):
    ws = jnp.stack([w, 0.9 * w])
    rows = lax.scan(lambda c, w: (c + jnp.tanh(x @ w), None), jnp.zeros_like(x), ws)[0]
    number = lax.scan(lambda c, w: (c + w.sum(), None), jnp.zeros(()), ws)[0]
    matrix = lax.scan(lambda c, w: (c + w, None), np.zeros((WIDTH, WIDTH), np.float32), ws)[0]
    return rows @ matrix + 1e-3 * number


@_layer
def buffer(where, w, x):
    filled = lax.fori_loop(0, 3, lambda i, b: b.at[i].set(w), jnp.zeros((3, WIDTH, WIDTH)))
    return x @ lax.dynamic_update_slice(filled, w[None] * 0.5, (1, 0, 0)).sum(0)


@_layer
def remat(where, w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x)


@_layer
def vmap_over_rows(where, w, x):
    h = jax.vmap(lambda row: jnp.tanh(row @ w))(x)
    return jax.vmap(lambda row: jnp.tanh(row @ w), spmd_axis_name=where.data)(h) if where.data else h


@_layer
def vmap_over_heads(where, w, x):
    return jax.vmap(lambda scale: jnp.tanh(x @ (w * scale)), out_axes=1)(jnp.arange(3.0)).sum(1)


@_layer
def branches(where, w, x):
    return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: x)


@_layer
def attention(where, w, x):
    q = (x @ w).reshape(x.shape[0], 4, 2, 2)
    return jax.nn.dot_product_attention(q, q, q, is_causal=True).reshape(x.shape)


# --- regions of other axes ---


@_layer
def auto_region(where, w, x):
    @jax.sharding.auto_axes(out_sharding=where.rows)
    def region(w, x):
        x = lax.with_sharding_constraint(x, where.rows)
        mixed = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x[::-1], jnp.stack([w, w]))[0]
        return jnp.where(x > 0, jax.nn.softmax(mixed, -1), -1.0)

    return region(w, x)


@_layer
def auto_region_of_one_axis(where, w, x):
    axes = where.data or where.mesh.axis_names
    return jax.sharding.auto_axes(
        lambda w, x: jnp.tanh(x @ w), axes=axes, out_sharding=NamedSharding(where.mesh, where.rows)
    )(w, x)


@_layer
def explicit_region(where, w, x):
    explicit = jax.sharding.explicit_axes(lambda w, x: jnp.tanh(x @ w), in_sharding=(P(), where.rows))
    return explicit(w, jax.sharding.auto_axes(explicit, out_sharding=where.rows)(w, x))


def _split(where, local, mesh=None, **options):
    return jax.shard_map(local, mesh=mesh or where.mesh, in_specs=(P(), where.rows), out_specs=where.rows, **options)


@_layer
def manual_region(where, w, x):
    def local(w, x):
        return lax.scan(lambda c, k: (jnp.tanh(c @ w) * k, None), x, jnp.arange(1.0, 3.0))[0]

    return _split(where, local)(w, x)


@_layer
def manual_region_of_a_group(where, w, x):
    return _split(where, lambda w, x: jnp.tanh(x @ w), mesh=where.group)(w, x)


def _unchecked(wrapped=lambda fun: fun, in_a_group=False):
    def layer(where, w, x):
        def local(w, x):
            assert jax.sharding.get_abstract_mesh().are_all_axes_manual
            sizes = jnp.array([x.shape[0] // 2, x.shape[0] - x.shape[0] // 2], jnp.int32)
            return jnp.tanh(lax.ragged_dot(jnp.tanh(x @ w), jnp.stack([w, 0.5 * w]), sizes))

        mesh = where.group if in_a_group else where.mesh
        return wrapped(_split(where, local, mesh=mesh, check_vma=False))(w, x)

    return layer


LAYERS["unchecked_region"] = _unchecked()
LAYERS["unchecked_region_of_a_group"] = _unchecked(in_a_group=True)
LAYERS["unchecked_region_in_jit"] = _unchecked(jax.jit)
LAYERS["unchecked_region_in_remat"] = _unchecked(jax.checkpoint)


@_layer
def unchecked_sums(where, w, x):
    """Each device has some rows of the weight, and sums are formed over the data axis."""
    if where.data is None:
        return jnp.tanh(x @ w)

    def local(w, x):
        mine = lax.dynamic_slice_in_dim(x, lax.axis_index("data") * w.shape[0], w.shape[0], 1)
        return lax.psum(jax.checkpoint(jnp.matmul)(mine, w), "data")

    split = jax.shard_map(local, mesh=where.mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False)
    return jax.reshard(split(jax.reshard(w, P("data", None)), jax.reshard(x, P())), where.rows)


@_layer
def unchecked_gradient(where, w, x):
    def local(w, x):
        return jax.grad(lambda x: (jnp.tanh(x @ w) ** 2).sum())(x)

    return jax.vmap(_split(where, local, check_vma=False), in_axes=(0, None))(jnp.stack([w, 0.5 * w]), x).sum(0)
