"""One job publishes, another subscribes.

publishing.py send PORT ROWS       publishes versions without an end, of tensors of so many rows
publishing.py receive PORT ROWS    subscribes without an end: prints `got V`, and `lost: WHY`
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import reshard

mpmd.initialize()
address, rows = f"127.0.0.1:{sys.argv[2]}", int(sys.argv[3])
devices = np.array(sorted(jax.devices(), key=lambda d: d.id))
shapes = {"a": (rows, 64), "b": (rows, 64), "c": (64,)}

if sys.argv[1] == "send":
    groups = mpmd.MpmdMesh(Mesh(devices.reshape(2, -1), ("stage", "data")), "stage")
    places = {
        "a": mpmd.MpmdSharding(groups, {0}, P("data")), "b": mpmd.MpmdSharding(groups, {1}, P(None, "data")),
        "c": mpmd.MpmdSharding(groups, {0, 1}),
    }  # fmt: skip
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    state = reshard.spmd_to_mpmd_reshard(groups, zeros, places)

    @mpmd.jit(mpmd_mesh=groups, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    version = 0
    while True:
        reshard.publish("policy", state, version, address=address, token="secret")
        state = step(state)
        version += 1
        if version == 2:
            print("sends", flush=True)
        time.sleep(0.02)

mesh = Mesh(devices, ("x",))
like = {
    name: jax.ShapeDtypeStruct(shape, jnp.bfloat16 if name == "a" else np.float32) for name, shape in shapes.items()
}
places = {"a": NamedSharding(mesh, P()), "b": NamedSharding(mesh, P("x")), "c": NamedSharding(mesh, P())}
policy = reshard.subscribe(address, like, places, token="secret")
tree, is_lost = {}, False
while True:
    try:
        tree, version = policy.receive()
        is_lost = False
    except reshard.ReshardError as error:
        if not is_lost:
            print(f"lost: {error}", flush=True)
        is_lost = True
        time.sleep(0.05)
    for name, x in tree.items():  # the last version is as good as it was
        wanted = np.asarray(version).astype(x.dtype)
        assert all((np.asarray(shard.data) == wanted).all() for shard in x.addressable_shards), (name, version)
    if tree and not is_lost:
        print(f"got {version}", flush=True)
