"""One job publishes and logs the checksum of each tensor of each version; another subscribes and compares.

logged_versions.py send PORT FOLDER RUN    publishes without an end; a line of FOLDER/RUN for each version
logged_versions.py receive PORT FOLDER RUN prints `receiving`, then `got RUN VERSION` or `lost BYTES: WHY`, for ever

A version tells itself which one it is (`id`). The log is made of numpy values beside those on devices.
"""

import json
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import reshard

mpmd.initialize()
address, folder = f"127.0.0.1:{sys.argv[2]}", Path(sys.argv[3])
devices = np.array(sorted(jax.devices(), key=lambda d: d.id))
like = {
    "a": jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16), "b": jax.ShapeDtypeStruct((16384, 1024), np.float32),
    "c": jax.ShapeDtypeStruct((64,), np.float32), "id": jax.ShapeDtypeStruct((2,), np.int32),
}  # fmt: skip


def sums(tree) -> dict[str, int]:
    return {name: zlib.crc32(np.asarray(x).astype(like[name].dtype).tobytes()) for name, x in tree.items()}


if sys.argv[1] == "send":
    run = int(sys.argv[4])
    groups = mpmd.MpmdMesh(Mesh(devices.reshape(2, -1), ("stage", "data")), "stage")
    places = {
        "a": mpmd.MpmdSharding(groups, {0}, P("data")), "b": mpmd.MpmdSharding(groups, {1}, P(None, "data")),
        "c": mpmd.MpmdSharding(groups, {0, 1}), "id": mpmd.MpmdSharding(groups, {1}),
    }  # fmt: skip
    random = np.random.default_rng(run)
    values = {name: random.random(like[name].shape, np.float32) for name in "abc"} | {"id": np.array([run, 0], "int32")}
    state = reshard.spmd_to_mpmd_reshard(groups, values, places)

    @mpmd.jit(mpmd_mesh=groups, donate_argnums=0)
    def step(state):
        return {name: x + (jnp.array([0, 1]) if name == "id" else 1) for name, x in state.items()}

    for version in range(1 << 20):
        if jax.process_index() == 0:
            with (folder / str(run)).open("a") as log:
                log.write(json.dumps(sums(values)) + "\n")
        reshard.publish("policy", state, version, address=address, token="secret")
        state = step(state)
        for name, value in values.items():
            value += [0, 1] if name == "id" else 1
        time.sleep(0.05)

mesh = Mesh(devices, ("x",))
places = {name: NamedSharding(mesh, P("x" if name == "b" else None)) for name in like}
policy = reshard.subscribe(address, like, places, token="secret")
while True:
    before = policy.bytes_received
    print("receiving", flush=True)
    try:
        tree, version = policy.receive()
    except reshard.ReshardError as error:
        print(f"lost {policy.bytes_received - before}: {error}", flush=True)
        time.sleep(0.05)
        continue
    run, logged = map(int, tree["id"])
    wanted = json.loads((folder / str(run)).read_text().splitlines()[version])
    assert logged == version and sums(tree) == wanted, (run, version, logged, sums(tree), wanted)
    print(f"got {run} {version}", flush=True)
