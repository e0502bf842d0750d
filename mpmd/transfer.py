"""Moves values between groups.

In one process a value is put on the consumer's devices by `jax.device_put`, which takes any sharding to any
sharding and does not wait for the value to be computed.
"""

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from mpmd import _jax_compat as compat


def mover(source: NamedSharding, target: NamedSharding, dtype) -> Callable[[jax.Array], jax.Array]:
    """What moves an array from one group's sharding to another's."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and (copy := compat.put(source, target)) is not None:
        return copy
    return functools.partial(jax.device_put, device=target_of(target))


def target_of(sharding: NamedSharding):
    """What to hand to `jax.device_put`: a bare device where that means the same, at half the cost."""
    if sharding.mesh.size == 1 and memory_kind(sharding) is None:
        return compat.devices(sharding).flat[0]
    return sharding


def is_alias(source: NamedSharding, target: NamedSharding, ndim: int) -> bool:
    """Whether a value that lies as `source` already lies as `target` (groups that share devices)."""
    return compat.devices(source).tolist() == compat.devices(target).tolist() and source.is_equivalent_to(target, ndim)


def put(x, sharding: NamedSharding) -> jax.Array:
    """A host array or an array of this process on the devices of one group."""
    placed = jax.device_put(x, sharding)
    if isinstance(placed.sharding, SingleDeviceSharding):
        placed = jax.device_put(placed, sharding)
    return placed


def memory_kind(sharding) -> str | None:
    """The memory kind of a sharding where it is not the default one of its devices."""
    kind = sharding.memory_kind
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    device = next(iter(sharding.device_set))
    return None if kind == device.default_memory().kind else kind
