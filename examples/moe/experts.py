"""Experts on the devices of a group: rows of tokens travel to the experts that they chose, and back.

The devices of the mesh axis `expert` share the experts of a layer; each has rows of its own. Three ways for a row:

- `capacity`: `all_to_all` of buffers that have the same room for each expert. What finds no room is dropped. The
  fewest bytes and the most regular work; how much is dropped is a number that one must watch.
- `ragged`: `ragged_all_to_all` of just the rows there are. Nothing is dropped. The receiver must have room for the
  worst case, that all rows go to one device. XLA has no such collective for CPUs.
- `gather`: each device gets the rows of all others by `all_gather`, computes those that chose its experts, and the
  parts are added by `psum_scatter`. Nothing is dropped, and it runs anywhere. A row is sent to all n devices of the
  axis, and not to the k it chose: more bytes than `ragged` where n > k + 1.

Inside of `shard_map` the code below sees one device: its tokens and its experts. Parameters that are divided along the
axis `data` as well (FSDP) are gathered here, so that their gradients are scattered where they are summed.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

EXCHANGES = ("capacity", "ragged", "gather")
ROWS = P(("data", "expert"))
"""How the rows of a microbatch lie in a group: every device has its own."""
STORED = {"gate": P("expert", "data"), "up": P("expert", "data"), "down": P("expert", None, "data")}
"""How the experts (experts, width, hidden) and (experts, hidden, width) of a layer lie in a group."""
SAVED = ("to_experts", "from_experts")
"""Names of what the exchanges give. A policy that saves them does not exchange again in the backward pass."""


def is_explicit() -> bool:
    """Whether the axes of the mesh are Explicit: then JAX follows shardings, and is told those that do not follow."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def sharded(x: jax.Array, spec: P) -> jax.Array:
    """x so divided in a group, said as the axes of the mesh want it."""
    return jax.reshard(x, spec) if is_explicit() else jax.lax.with_sharding_constraint(x, spec)


def run_experts(
    experts: dict[str, jax.Array], x: jax.Array, weights: jax.Array, chosen: jax.Array, exchange: str, capacity: float
) -> tuple[jax.Array, jax.Array]:
    """What the chosen experts make of x (rows, length, width), and how many of their rows were dropped (an int32).

    Args:
      experts: gate and up (experts, width, hidden), down (experts, hidden, width).
      x: in the dtype that is computed with.
      weights: (rows, length, k).
      chosen: (rows, length, k).
      exchange: one of `EXCHANGES`.
      capacity: the room of an expert, over what it would get if all got the same.
    """
    num_experts = len(experts["gate"])

    def on_device(experts, x, weights, chosen):
        experts = {
            name: jax.lax.all_gather(w, "data", axis=STORED[name].index("data"), tiled=True)
            for name, w in experts.items()
        }
        tokens, k = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
        weights, chosen = weights.reshape(-1, k).astype(x.dtype), chosen.reshape(-1, k)
        if exchange == "capacity":
            room = max(1, math.ceil(capacity * chosen.size / num_experts))
            y, dropped = _by_capacity(experts, tokens, weights, chosen, room)
        else:
            y = {"ragged": _by_ragged, "gather": _by_gather}[exchange](experts, tokens, weights, chosen)
            dropped = jnp.zeros((), jnp.int32)
        return y.reshape(x.shape), dropped[None]

    axis = jax.sharding.get_abstract_mesh().shape["expert"]
    pad = -num_experts % axis  # where they do not divide, the last devices have fewer
    experts = {name: jnp.pad(w, [(0, pad), (0, 0), (0, 0)]) if pad else w for name, w in experts.items()}
    experts = {name: sharded(w, STORED[name]) for name, w in experts.items()}
    run = jax.shard_map(on_device, in_specs=(STORED, ROWS, ROWS, ROWS), out_specs=(ROWS, ROWS), check_vma=False)
    y, dropped = run(experts, x, weights, chosen)
    return y, dropped.sum()


def _by_capacity(p, x, weights, chosen, room):
    """Buffers (expert, room, width): a row takes the next place of its expert; first choices before second ones."""
    devices, (mine, width, _) = jax.lax.axis_size("expert"), p["gate"].shape
    flat = chosen.T.reshape(-1)
    at = jnp.cumsum(flat[:, None] == jnp.arange(devices * mine), axis=0)[jnp.arange(len(flat)), flat] - 1
    slot = jnp.where(at < room, flat * room + at, devices * mine * room)  # one past the end: there is no such place
    rows = jnp.tile(x, (chosen.shape[1], 1))
    sent = jnp.zeros((devices * mine * room, width), x.dtype).at[slot].set(rows, mode="drop", unique_indices=True)
    got = jax.lax.all_to_all(sent.reshape(devices, -1, width), "expert", 0, 0)
    got = checkpoint_name(got.reshape(devices, mine, room, width), "to_experts")
    h = jax.nn.silu(jnp.einsum("aecd,edf->aecf", got, p["gate"])) * jnp.einsum("aecd,edf->aecf", got, p["up"])
    done = jnp.einsum("aecf,efd->aecd", h, p["down"]).reshape(devices, -1, width)
    back = checkpoint_name(jax.lax.all_to_all(done, "expert", 0, 0), "from_experts").reshape(-1, width)
    y = back.at[slot].get(mode="fill", fill_value=0) * weights.T.reshape(-1, 1)
    return y.reshape(-1, *x.shape).sum(0), (at >= room).sum(dtype=jnp.int32)


def _by_gather(p, x, weights, chosen):
    """Every device sees all rows; what chose none of its experts stands behind the last of them."""
    mine, k = len(p["gate"]), chosen.shape[1]
    x, weights, chosen = (jax.lax.all_gather(a, "expert", tiled=True) for a in (x, weights, chosen))
    x = checkpoint_name(x, "to_experts")
    expert = chosen.reshape(-1) - jax.lax.axis_index("expert") * mine
    expert = jnp.where((expert >= 0) & (expert < mine), expert, mine)
    order = jnp.argsort(expert)
    y = _ragged_mlp(p, x[order // k], jnp.bincount(expert, length=mine))
    y = jnp.where(expert[order, None] < mine, y * weights.reshape(-1)[order, None], 0)
    y = jnp.zeros_like(x).at[order // k].add(y)
    return checkpoint_name(jax.lax.psum_scatter(y, "expert", tiled=True), "from_experts")


def _by_ragged(p, x, weights, chosen):
    """Rows sorted by expert go to the device of that expert, which sorts what comes from all devices once more."""
    devices, mine, k = jax.lax.axis_size("expert"), len(p["gate"]), chosen.shape[1]
    me, order = jax.lax.axis_index("expert"), jnp.argsort(chosen.reshape(-1))
    rows = x[order // k]
    counts = jnp.bincount(chosen.reshape(-1), length=devices * mine).reshape(devices, mine)
    counts = jax.lax.all_gather(counts, "expert").astype(jnp.int32)  # (from, to, expert there)
    sizes = counts.sum(-1)  # (from, to)
    starts = jnp.cumsum(sizes, axis=1) - sizes  # where the rows for a device begin in its sender
    places = jnp.cumsum(sizes, axis=0) - sizes  # where those of a sender begin in its receiver
    got = jax.lax.ragged_all_to_all(
        rows, jnp.zeros((devices * len(rows), x.shape[1]), x.dtype),
        starts[me], sizes[me], places[me], sizes[:, me], axis_name="expert",
    )  # fmt: skip
    got = checkpoint_name(got, "to_experts")
    ends = jnp.cumsum(counts[:, me].reshape(-1))  # of the rows of the first expert of the first sender, ...
    run = jnp.searchsorted(ends, jnp.arange(len(got)), side="right")
    expert = jnp.where(run < len(ends), run % mine, mine)
    sorting = jnp.argsort(expert)
    done = _ragged_mlp(p, got[sorting], counts[:, me].sum(0))[jnp.argsort(sorting)]
    done = jnp.where(expert[:, None] < mine, done, 0)
    back = jax.lax.ragged_all_to_all(
        done, jnp.zeros_like(rows), places[:, me], sizes[:, me], starts[:, me], sizes[me], axis_name="expert"
    )
    back = checkpoint_name(back, "from_experts")
    return jnp.zeros_like(x).at[order // k].add(back * weights.reshape(-1)[order, None])


def _ragged_mlp(p: dict[str, Any], rows, sizes):
    """Rows sorted by expert through the MLP of each; rows behind the last expert's are undefined."""
    sizes = sizes.astype(jnp.int32)
    h = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    return jax.lax.ragged_dot(h, p["down"], sizes)
