"""A plugin of pytest: tests that were written for eight CPU devices run their groups of one device on the first GPU.

    python -m pytest -p tests.gpu.one_gpu -m 'not slow' tests/test_equivalence.py

All groups share the GPU, and plain `jax.jit` runs there too. Products of matrices are as exact there as on a CPU
(`jax_default_matmul_precision`). Groups of several devices, and what a test asks of whole meshes, stay on CPU devices.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # workers of pytest-xdist share the GPU

import functools

import jax
import numpy as np
from jax.sharding import Mesh

from mpmd import MpmdMesh

jax.config.update("jax_default_matmul_precision", "highest")
GPU = jax.devices()[0]
CPUS = jax.devices("cpu")
_devices, _make_mesh, _init = jax.devices, jax.make_mesh, MpmdMesh.__init__


def devices(backend=None):
    return CPUS if backend is None else _devices(backend)


@functools.wraps(_make_mesh)
def make_mesh(shape, *args, devices=None, **kwargs):
    return _make_mesh(shape, *args, devices=CPUS[: int(np.prod(shape))] if devices is None else devices, **kwargs)


@functools.wraps(_init)
def init(self, jax_mesh, mpmd_axis_name):
    _init(self, jax_mesh, mpmd_axis_name)
    if all(group.size == 1 for group in self.groups):
        grid = np.array([GPU]).reshape((1,) * jax_mesh.devices.ndim)
        group = Mesh(grid, jax_mesh.axis_names, axis_types=jax_mesh.axis_types)
        self.groups = (group,) * self.num_groups
        self._key, self._hash = self.groups, hash(self.groups)


jax.devices = jax.local_devices = devices
jax.make_mesh = make_mesh
MpmdMesh.__init__ = init
