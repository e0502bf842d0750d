"""Values between groups and to every process: many at once, checked to the last bit in every process.

moving.py SEED        4 processes of 2 devices; prints, as JSON, how many checks passed
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import wires
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpmd
from mpmd.job import joining
from mpmd.job.wires import NUMBER_BITS
from mpmd.run.routes import ValueRoute

NUM_VALUES = 60
DTYPES = ("float32", "bfloat16", "int32", "bool", "int4", "uint8", "float8_e4m3fn", "key<fry>", "key<rbg>")


def host_value(random, shape, dtype: str):
    """A value as every process knows it: numpy, of a key its data."""
    if dtype.startswith("key"):
        data = random.integers(0, 2**32, (*shape, 2 if dtype == "key<fry>" else 4), dtype=np.uint32)
        return data
    return np.asarray(random.integers(0, 2 if dtype == "bool" else 7, shape)).astype(jnp.dtype(dtype))


def aval_of(value, dtype: str):
    if dtype.startswith("key"):
        impl = {"key<fry>": "threefry2x32", "key<rbg>": "rbg"}[dtype]
        key = jax.eval_shape(lambda: jax.random.wrap_key_data(jnp.zeros(value.shape, jnp.uint32), impl=impl))
        return jax.ShapeDtypeStruct(key.shape, key.dtype)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def plain(x):
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def placed(value, aval, sharding):
    """This process's part of a value, or None."""
    boxes = sharding.addressable_devices_indices_map(aval.shape)
    if not boxes:
        return None
    shards = [wrapped(jax.device_put(value[i].copy(), d), aval) for d, i in boxes.items()]
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, shards)


def wrapped(x, aval):
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return x
    return jax.random.wrap_key_data(x, impl=str(aval.dtype._impl.name))


def shardings(random, shape):
    """A sharding of an array of this shape on some devices, in some order."""
    devices = jax.devices()
    rows, columns = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (4, 2)][random.integers(6)]
    chosen = random.permutation(len(devices))[: rows * columns]
    mesh = Mesh(np.array([devices[i] for i in chosen]).reshape(rows, columns), ("a", "b"))
    free = ["a", "b", ("a", "b"), None, None]
    spec, used = [], set()
    for size in shape:
        entry = free[random.integers(len(free))]
        names = {entry} if isinstance(entry, str) else set(entry or ())
        if names & used or size % int(np.prod([mesh.shape[n] for n in names])):
            entry, names = None, set()
        used |= names
        spec.append(entry)
    return NamedSharding(mesh, PartitionSpec(*spec))


def check_shards(x, value) -> None:
    for shard in x.addressable_shards:
        got, wanted = plain(shard.data), value[shard.index]
        assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), shard.index


def move(random, job) -> int:
    """Random values from random shardings to random shardings, all under way at the same time."""
    base = job.new_number(range(job.num_ranks), "moving") << NUMBER_BITS
    count, arrived = 0, []
    for number in range(NUM_VALUES):
        shape = [(), (12,), (12, 4), (4, 12, 3), (0, 4), (1,)][random.integers(6)]
        dtype = DTYPES[random.integers(len(DTYPES))]
        value = host_value(random, shape, dtype)
        aval = aval_of(value, dtype)
        source, target = shardings(random, aval.shape), shardings(random, aval.shape)
        route = ValueRoute(job, source, target, aval, count, False, f"value {number}")
        count += route.share.num_pieces
        part = placed(value, aval, source)
        found = route.carry(part, base) if route.share.mine or route.share.targets else None
        if found is not None:
            arrived.append((found, value, (number, dtype, shape, source, target)))
    for x, value, what in arrived:
        assert x.sharding.device_set == what[-1].device_set, what
        check_shards(x, value)
    job.exchange("having moved all", "", range(job.num_ranks))
    return NUM_VALUES


def read(mesh) -> int:
    """`device_get` of trees with everything in them, twice; and what can be read without it."""

    def tree(number):
        key = jax.random.key(number)
        return {
            "key": key,
            "keys": jax.random.split(key, 3),
            "bf16": jnp.arange(6, dtype=jnp.bfloat16) + number,
            "int4": jnp.arange(4).astype(jnp.int4),
            "empty": jnp.zeros((0, 3)),
            "bool": jnp.array([True, False]),
            "scalar": jnp.float32(number) * 0.25,
            "tuple": (jnp.int32(number), jnp.ones((2, 2)) * number),
        }

    expected = jax.tree.map(plain, tree(5))
    groups = {name: g % mesh.num_groups for g, name in enumerate(jax.tree.map(lambda x: 0, tree(0)))}
    wish = {n: mpmd.MpmdSharding(mesh, groups[n], PartitionSpec()) for n in groups}
    made = mpmd.jit(tree, mpmd_mesh=mesh, out_shardings=wish)(np.int32(5))
    given = {
        **made,
        "none": None,
        "number": 7,
        "text": "x",
        "host": np.arange(3),
        "mine": jnp.arange(jax.process_index()),
    }
    for _ in range(2):
        got = mpmd.device_get(given)
        assert (got["none"], got["number"], got["text"]) == (None, 7, "x")
        assert got["host"].tolist() == [0, 1, 2]
        assert got["mine"].tolist() == list(range(jax.process_index()))
        for (path, x), y in zip(
            jax.tree.leaves_with_path({n: got[n] for n in expected}), jax.tree.leaves(expected), strict=True
        ):
            assert plain(x).dtype == y.dtype and plain(x).tobytes() == y.tobytes(), path
    rows = mpmd.MpmdSharding(mesh, 1, PartitionSpec("data"))
    spread = mpmd.jit(lambda: jnp.arange(8.0), mpmd_mesh=mesh, out_shardings=rows)()
    np.testing.assert_array_equal(mpmd.device_get(spread), np.arange(8.0))
    rows = mpmd.MpmdSharding(mesh, (0, 1), PartitionSpec(), split={0: ((0, 3),), 1: ((3, 8),)})
    twice = mpmd.jit(lambda rows: 2 * rows, mpmd_mesh=mesh, in_shardings=rows, out_shardings=rows)
    np.testing.assert_array_equal(mpmd.device_get(twice(spread)), 2 * np.arange(8.0))  # it is cut where it is
    if not spread.is_partially_addressable:
        try:
            np.asarray(spread)
        except RuntimeError as e:
            assert str(e) == (
                "MpmdArray(float32[8], group 1 of 4, P('data',), not in this process) cannot be read in process"
                f" {jax.process_index()}, which has no shard of it: it is in group 1, on process 1.\n"
                "  Call mpmd.device_get(x) in every process to get its values everywhere."
            ), str(e)
        else:
            raise AssertionError("it was read")
    return 2


def refuse(mesh) -> int:
    """An array that spans processes in another layout, or split elsewhere, is refused, with what moves it."""
    whole = Mesh(np.array(jax.devices()), ("all",))
    x = jax.make_array_from_callback((8,), NamedSharding(whole, PartitionSpec("all")), lambda i: np.arange(8.0)[i])
    step = mpmd.jit(lambda x: 2 * x, mpmd_mesh=mesh, in_shardings=mpmd.MpmdSharding(mesh, 0, PartitionSpec("data")))
    try:
        step(x)
    except ValueError as e:
        assert str(e) == (
            f"mpmd: float64[8] spans other processes in the layout {x.sharding}.\n"
            "  Bring it into the step's layout first:"
            " reshard.spmd_to_mpmd_reshard(mpmd_mesh, x, compiled.input_shardings[0])."
        ).replace("float64", str(x.dtype)), str(e)
    else:
        raise AssertionError("it was taken")
    made, read = (mpmd.MpmdSharding(mesh, (0, 1), PartitionSpec(), split={0: ((0, n),), 1: ((n, 8),)}) for n in (4, 6))
    rows = mpmd.jit(lambda: jnp.arange(8.0), mpmd_mesh=mesh, out_shardings=made)()
    try:
        mpmd.jit(lambda rows: 2 * rows, mpmd_mesh=mesh, in_shardings=read)(rows)
    except ValueError as e:
        assert str(e) == (
            f"mpmd: rows is {rows!r}, and the step reads its rows elsewhere:\n"
            f"  {read}\n"
            "  Give all loops over the same layers one cut: treduce(..., cuts=lowered.cuts), where `lowered` is the"
            " step that made it. To move it once: reshard.mpmd_to_mpmd_reshard(args, compiled.input_shardings[0])."
        ), str(e)
    else:
        raise AssertionError("it was taken")
    same = jax.make_array_from_callback((8,), NamedSharding(whole, PartitionSpec()), lambda i: np.arange(8.0)[i])
    np.testing.assert_array_equal(mpmd.device_get(step(same)), 2 * np.arange(8.0))  # all of it is everywhere
    return 2


def main() -> None:
    wires.choose()
    mpmd.initialize()
    job = joining.current()
    assert job is not None
    random = np.random.default_rng(int(sys.argv[1]))
    pairs = np.array(jax.devices()).reshape(-1, 2)
    mesh = mpmd.MpmdMesh.from_groups([Mesh(pair, ("data",)) for pair in pairs])
    print(json.dumps(move(random, job) + read(mesh) + refuse(mesh)))


if __name__ == "__main__":
    main()
