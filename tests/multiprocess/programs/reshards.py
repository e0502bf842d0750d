"""Random reshards there and back, alike on all ranks: data, bytes and working memory against the plan.

reshards.py SEED TRIALS
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import wires
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpmd
import reshard
from mpmd.errors import ReshardError
from mpmd.job import joining

wires.choose()
mpmd.initialize()
job = joining.current()
assert job is not None
rng = np.random.default_rng(int(sys.argv[1]))
devices = np.array(sorted(jax.devices(), key=lambda d: d.id))
ranks = range(job.num_ranks)


def meshes() -> tuple[Mesh, mpmd.MpmdMesh]:
    """A plain mesh in some device order, and groups in another."""
    sizes = [n for n in (1, 2, 4, 8) if len(devices) % n == 0]
    a, b = (int(rng.choice(sizes)) for _ in range(2))
    plain = Mesh(rng.permutation(devices).reshape(a, -1), ("x", "y"))
    grouped = mpmd.MpmdMesh(Mesh(rng.permutation(devices).reshape(b, -1), ("stage", "data")), "stage")
    return plain, grouped


def spec(mesh: Mesh, shape, names) -> PartitionSpec:
    """Some of the axes over some of the mesh axes."""
    entries, free = [], list(names)
    for size in shape:
        fitting = [None, *(n for n in free if size % mesh.shape[n] == 0)]
        entries.append(fitting[rng.integers(len(fitting))])
        free = [n for n in free if n != entries[-1]]
    return PartitionSpec(*entries)


def grouped_sharding(grouped: mpmd.MpmdMesh, shape) -> mpmd.MpmdSharding:
    """One or two groups with all of an array, or all groups with ranges of it, in any order."""
    inner = spec(grouped.groups[0], shape, ("data",))
    if shape and shape[0] >= 2 * grouped.num_groups and rng.integers(3):
        inner = PartitionSpec(None, *inner[1:])
        ends = sorted(rng.choice(np.arange(1, shape[0]), 2 * grouped.num_groups - 1, replace=False).tolist())
        ranges = list(zip([0, *ends], [*ends, shape[0]], strict=True))
        owners = rng.permutation([*range(grouped.num_groups)] * 2)
        split = {
            g: [r for r, owner in zip(ranges, owners, strict=True) if owner == g] for g in range(grouped.num_groups)
        }
        return mpmd.MpmdSharding(grouped, range(grouped.num_groups), inner, split=split)
    ids = {int(i) for i in rng.integers(0, grouped.num_groups, 2)}
    return mpmd.MpmdSharding(grouped, ids, inner)


def total(value: int) -> int:
    """Summed over the ranks."""
    return sum(map(int, job.exchange("a test's sum", str(value), ranks).values()))


def check_moved(plan: reshard.ReshardPlan, threshold: int) -> None:
    """What was counted is what was planned, and as little as can be."""
    stats = reshard.last_stats()
    assert total(stats.bytes_moved) == plan.bytes_moved == plan.bytes_lower_bound, (stats, plan)
    assert stats.peak_working_bytes <= threshold, (stats, threshold)


for _ in range(int(sys.argv[2])):
    plain, grouped = meshes()
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 8, 16], rng.integers(0, 4)))
    dtype = jnp.dtype(rng.choice(["float32", "bfloat16", "int8", "bool", "complex64"]))
    x = np.asarray(rng.integers(0, 100, shape)).astype(dtype)
    source = NamedSharding(plain, spec(plain, shape, ("x", "y")))
    target, other = grouped_sharding(grouped, shape), grouped_sharding(grouped, shape)
    threshold = int(rng.choice([16, 100, 10_000]))
    a = jax.make_array_from_callback(shape, source, lambda index, x=x: x[index])
    donate = bool(rng.integers(2))

    planned = reshard.plan([a], [source], [target], threshold)
    (b,) = reshard.spmd_to_mpmd_reshard(grouped, [a], [target], threshold=threshold, donate=donate)
    check_moved(planned, threshold)
    assert np.array_equal(mpmd.device_get(b), x)
    assert a.is_deleted() == donate
    if not donate:
        assert np.array_equal(mpmd.device_get(a), x)

    planned = reshard.plan([b], [target], [source], threshold)
    (c,) = reshard.mpmd_to_spmd_reshard(grouped, [b], [source], threshold=threshold)
    check_moved(planned, threshold)
    assert c.sharding == source
    assert np.array_equal(mpmd.device_get(c), x)

    h = reshard.spmd_to_mpmd_reshard(grouped, x, target)
    planned = reshard.plan([h], None, [other], threshold)
    d = reshard.mpmd_to_mpmd_reshard(h, other, threshold=threshold)
    check_moved(planned, threshold)
    assert d.mpmd_sharding == other
    assert np.array_equal(mpmd.device_get(d), x)

key = reshard.spmd_to_mpmd_reshard(grouped, jax.random.key(3), mpmd.MpmdSharding(grouped, grouped.num_groups - 1))
key = reshard.mpmd_to_mpmd_reshard(key, mpmd.MpmdSharding(grouped, 0))
assert np.array_equal(jax.random.key_data(mpmd.device_get(key)), jax.random.key_data(jax.random.key(3)))
on_host = reshard.mpmd_to_spmd_reshard(grouped, key, reshard.HostMemory(1))
assert on_host is None if job.rank != 1 else np.array_equal(jax.random.key_data(on_host), [0, 3])

different = np.zeros(4 if job.rank else 8, np.float32)
try:
    reshard.spmd_to_mpmd_reshard(grouped, {"w": different}, mpmd.MpmdSharding(grouped, 0))
    message = "no error"
except ReshardError as e:
    message = str(e)
again = reshard.spmd_to_mpmd_reshard(grouped, np.arange(4.0), mpmd.MpmdSharding(grouped, 0))
print(json.dumps({"message": message, "again": mpmd.device_get(again).tolist()}))
