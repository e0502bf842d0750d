"""The layout of an array in a group: its spec and memory kind, fitted to the group's mesh and the array's shape."""

import functools
import itertools
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from mpmd.arrays.specs import names_of, trimmed

Layout = tuple[PartitionSpec, str | None]  # spec and memory kind
REPLICATED: Layout = (PartitionSpec(), None)


@functools.lru_cache(maxsize=4096)
def mpmd_sharding(mesh: MpmdMesh, groups: frozenset[int], layout: Layout) -> MpmdSharding:
    """Returns one object for equal shardings, so that returned state is recognised quickly."""
    spec, kind = layout
    return MpmdSharding(mesh, groups, spec, kind)


def memory_kind(sharding: jax.sharding.Sharding) -> str | None:
    """Returns the memory kind of a sharding, if it is not the default one of its devices."""
    kind = sharding.memory_kind
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    device = next(iter(sharding.device_set))
    return None if kind == compat.default_memory_kind(device) else kind


def fit(layout: Layout, mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Returns `layout` on a group's mesh, without axes that the mesh lacks or that do not divide the shape."""
    spec, kind = layout
    if all(n in mesh.shape for n in names_of(spec)):
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        if _divides(sharding, shape):
            return sharding
    entries = []
    for size, entry in itertools.zip_longest(shape, spec.partitions[: len(shape)], fillvalue=None):
        names = tuple(n for n in (entry if isinstance(entry, tuple) else (entry,)) if n in mesh.shape)
        total = functools.reduce(lambda a, n: a * mesh.shape[n], names, 1)
        entries.append(names if names and size % total == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*entries), memory_kind=kind)


def shortest(spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec without trailing Nones."""
    return PartitionSpec(*trimmed(spec.partitions), unreduced=spec.unreduced, reduced=spec.reduced)


def _divides(sharding: NamedSharding, shape: Sequence[int]) -> bool:
    try:
        sharding.shard_shape(tuple(shape))
    except ValueError:
        return False
    return True
