"""What docs/reshard.md prints runs: its examples, on a small state."""

import re
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard
from mpmd import MpmdMesh, MpmdSharding

PAGE = Path(__file__).parent.parent.parent / "docs" / "reshard.md"


def test_the_programs_of_the_page_run_and_lose_nothing(capsys):
    moves, plan = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = MpmdMesh(Mesh(devices, ("stage", "data")), "stage")
    state = {"w": np.arange(32.0, dtype=np.float32).reshape(8, 4)}
    names = {"mpmd_mesh": mesh, "state": state}
    names["mpmd_shardings"], names["other_mpmd_shardings"] = MpmdSharding(mesh, 1, P("data")), MpmdSharding(mesh, 0)
    names["spmd_shardings"] = NamedSharding(Mesh(devices, ("a", "b")), P("a"))
    exec(moves, names)
    assert isinstance(names["host"]["w"], np.ndarray) and np.array_equal(names["host"]["w"], state["w"])
    assert names["stages"]["w"].mpmd_sharding == MpmdSharding(mesh, 0)
    assert names["state"]["w"].sharding == names["spmd_shardings"]
    avals = {"w": jax.ShapeDtypeStruct((2048, 128), np.float32)}
    exec(plan, {"reshard": reshard, "MpmdMesh": MpmdMesh, "MpmdSharding": MpmdSharding, "P": P, "avals": avals,
                "NamedSharding": NamedSharding})  # fmt: skip
    assert "w" in capsys.readouterr().out
