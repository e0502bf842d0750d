"""Streams between processes.

streams.py layouts SEED TRIALS        random layouts, data and bytes against the plan
streams.py flow SENDERS VERSIONS      the first ranks train and send, the others receive slowly
streams.py forever SENDERS            the same without an end
streams.py mistakes SENDERS           prints the errors as JSON
"""

import json
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import reshard
from mpmd.errors import ReshardError
from mpmd.job import joining

mpmd.initialize()
job = joining.current()
assert job is not None
devices = sorted(jax.devices(), key=lambda d: d.id)


def grouped(devices, num_groups: int) -> mpmd.MpmdMesh:
    mesh = Mesh(np.array(devices).reshape(num_groups, -1), ("stage", "data"))
    return mpmd.MpmdMesh(mesh, "stage")


def array(sharding, value: np.ndarray):
    """An array whose shards each process makes from the same value."""
    if isinstance(sharding, mpmd.MpmdSharding):
        return reshard.spmd_to_mpmd_reshard(sharding.mpmd_mesh, value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def shards(x) -> list[tuple[tuple[slice, ...], np.ndarray]]:
    """What this process has of an array."""
    if isinstance(x, mpmd.MpmdArray):
        parts = {part.key: part for part in x.mpmd_sharding.local_parts(x.shape)}
        found = []
        for key, part in parts.items():
            inner = np.zeros(part.shape, x.dtype)
            for shard in x._arrays[key].addressable_shards:
                inner[shard.index] = np.asarray(shard.data)
                index = tuple(
                    slice(o + s.indices(n)[0], o + s.indices(n)[1])
                    for s, o, n in zip(shard.index, part.offset or (0,) * x.ndim, part.shape, strict=True)
                )
                found.append((index, np.asarray(shard.data)))
        return found
    return [(shard.index, np.asarray(shard.data)) for shard in x.addressable_shards]


def total(value: int) -> int:
    return sum(map(int, job.exchange("a test's sum", str(value), range(job.num_ranks)).values()))


def layouts(seed: int, trials: int) -> None:
    rng = np.random.default_rng(seed)

    def sharding(shape):
        some = rng.permutation(len(devices))[: int(rng.choice([n for n in (1, 2, 4, 8) if n <= len(devices)]))]
        mesh = [devices[i] for i in some]
        num_groups = int(rng.choice([n for n in (1, 2, 4) if len(mesh) % n == 0]))
        groups = grouped(mesh, num_groups)
        fits = [axis for axis, n in enumerate(shape) if n % (len(mesh) // num_groups) == 0]
        entries = [None] * len(shape)
        if fits and rng.integers(3):
            entries[rng.choice(fits)] = "data"
        if rng.integers(2):
            return NamedSharding(groups.groups[int(rng.integers(num_groups))], P(*entries))
        if shape and shape[0] >= num_groups > 1 and entries[0] is None and rng.integers(2):
            ends = sorted(rng.choice(np.arange(1, shape[0]), num_groups - 1, replace=False).tolist())
            ranges = list(zip([0, *ends], [*ends, shape[0]], strict=True))
            owners = rng.permutation(num_groups)
            split = {int(owner): (one,) for owner, one in zip(owners, ranges, strict=True)}
            return mpmd.MpmdSharding(groups, range(num_groups), P(*entries), split=split)
        ids = {int(i) for i in rng.integers(0, num_groups, 2)}
        return mpmd.MpmdSharding(groups, ids, P(*entries))

    for _ in range(trials):
        shape = tuple(
            int(n) for n in rng.choice([0, 1, 2, 3, 8, 16], rng.integers(0, 4), p=[0.05, 0.15, 0.2, 0.2, 0.2, 0.2])
        )
        dtype = jnp.dtype(rng.choice(["float32", "bfloat16", "int8", "bool", "complex64"]))
        wanted = jnp.dtype("bfloat16") if dtype == np.float32 and rng.integers(2) else dtype
        value = np.asarray(rng.integers(0, 100, shape)).astype(dtype)
        source, target = sharding(shape), sharding(shape)
        threshold = int(rng.choice([8, 100, 10_000]))
        x = array(source, value) if isinstance(source, mpmd.MpmdSharding) or _is_here(source) else None
        stream = reshard.stream(source, [jax.ShapeDtypeStruct(shape, wanted, sharding=target)], threshold=threshold)
        for version in (1, 2):
            if stream.sends:
                stream.send([x], version=version)
            if stream.receives:
                (y,), got = stream.receive()
                assert got <= version and y.dtype == wanted
                for index, data in shards(y):
                    assert np.array_equal(data, value.astype(wanted)[index]), (source, target)
            job.exchange("a test's version", "", range(job.num_ranks))
        planned = reshard.plan([jax.ShapeDtypeStruct(shape, wanted)], [source], [target]).traffic
        between = planned.within_host + planned.between_hosts
        sent, received = total(stream.bytes_sent), total(stream.bytes_received)
        assert sent == received == 2 * between, (sent, received, between, source, target)
        stream.close()
    print(json.dumps("same"))


def _is_here(sharding) -> bool:
    return any(d.process_index == job.rank for d in sharding.device_set)


def trees(senders: int):
    """The shardings of a trainer's stages and of a sampler, and the values of a version."""
    train = grouped([d for d in devices if d.process_index < senders], 2)
    sample = Mesh(np.array([d for d in devices if d.process_index >= senders]), ("x",))
    sources = {
        "first": mpmd.MpmdSharding(train, {0}, P("data")), "last": mpmd.MpmdSharding(train, {1}, P("data")),
        "tied": mpmd.MpmdSharding(train, {0, 1}), "rows": mpmd.MpmdSharding(train, {0, 1}, P("stage")),
    }  # fmt: skip
    targets = {
        name: jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=NamedSharding(sample, spec))
        for name, spec in {"first": P("x"), "last": P(None, "x"), "tied": P(), "rows": P("x")}.items()
    }
    return sources, targets


def check(tree, version: int) -> None:
    for k, name in enumerate(sorted(tree)):
        for index, data in shards(tree[name]):
            assert np.array_equal(data, np.full((64, 32), 8 * version + k, jnp.bfloat16)[index]), (name, version, data)


def flow(senders: int, versions: int | None) -> None:
    sources, targets = trees(senders)
    state = {}
    for k, name in enumerate(sorted(sources)):  # made by all: these are calls of the whole job
        state[name] = array(sources[name], np.full((64, 32), k, np.float32))
    stream = reshard.stream(sources, targets)
    got = []
    if stream.sends:

        @mpmd.jit(mpmd_mesh=sources["first"].mpmd_mesh, donate_argnums=0)
        def step(state):
            return jax.tree.map(lambda x: x + 8, state)

        for version in range(versions or 10**9):
            stream.send(state, version=version)
            state = step(state)
            if versions is None:
                time.sleep(0.02)
            if version == 3:
                print("flows", flush=True)
    else:
        while not got or got[-1] != (versions or 0) - 1:
            tree, version = stream.receive()
            check(tree, version)
            assert not got or version > got[-1]
            got.append(version)
            if len(got) == 3:
                print("flows", flush=True)
            time.sleep(0.05)
    print(json.dumps({"got": got, "sent": stream.bytes_sent, "received": stream.bytes_received}))


def mistakes(senders: int) -> None:
    sources, targets = trees(senders)
    stream = reshard.stream(sources, targets)
    said = []

    def tell(function) -> None:
        try:
            function()
            said.append("no error")
        except ReshardError as error:
            said.append(re.sub(r"stream \d+", "stream N", str(error)))

    state = {name: array(sources[name], np.zeros((64, 32 if name != "tied" else 16), np.float32)) for name in sources}
    if stream.sends:
        tell(stream.receive)
        stream.send(state, version=3)
        tell(lambda: stream.send(state, version=3))
    else:
        tell(lambda: stream.send(state, version=0))
        tell(stream.receive)
    other = NamedSharding(Mesh(np.array(devices), ("x",)), P("x" if job.rank else None))
    tell(lambda: reshard.stream(other, other))
    print(json.dumps(said))


arguments = [int(a) for a in sys.argv[2:]]
if sys.argv[1] == "forever":
    flow(arguments[0], None)
else:
    {"layouts": layouts, "flow": flow, "mistakes": mistakes}[sys.argv[1]](*arguments)
