"""A random step of roles, each in groups of its own, against `jax.jit`: role_graphs.py TESTS SEED"""

import json
import sys

import jax

import mpmd

sys.path.insert(0, sys.argv[1])
from programs.role_graphs import RoleGraph

mpmd.initialize()
mesh = mpmd.MpmdMesh(jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4]), "stage")
RoleGraph(int(sys.argv[2]), 4).check(mesh)
print(json.dumps("same"))
