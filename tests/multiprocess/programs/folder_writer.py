"""A trainer of several processes that writes versions with the program of docs/streams.md, without an end.

folder_writer.py PLACE FIRST    tensor K of version V is full of 8 V + K; the first V is FIRST
"""

import re
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpmd
import reshard
from reshard.checkpoint import TensorFormat

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "streams.md"
(program,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def write_version" in b]
names = {}
exec(program, names)

mpmd.initialize()
devices = np.array(sorted(jax.devices(), key=lambda d: d.id)).reshape(2, -1)
groups = mpmd.MpmdMesh(Mesh(devices, ("stage", "data")), "stage")
places = {f"w{k}": mpmd.MpmdSharding(groups, {k % 2}, P("data")) for k in range(6)}
first = int(sys.argv[2])
zeros = {name: np.full((1024, 512), 8 * first + k, np.float32) for k, name in enumerate(places)}
state = reshard.spmd_to_mpmd_reshard(groups, zeros, places)


@mpmd.jit(mpmd_mesh=groups, donate_argnums=0)
def step(state):
    return jax.tree.map(lambda x: x + 8, state)


while True:
    number = names["write_version"](Path(sys.argv[1]), state, TensorFormat(file_size="5MiB"))
    print(f"wrote {number}", flush=True)
    state = step(state)
