"""Roles on submeshes of one mesh, which may share groups: random calls and moves, against `jax.jit`.

roles.py SEED NUM_CALLS
"""

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
import reshard

mpmd.initialize()
warnings.simplefilter("error")  # a process outside of a role has nothing to say
seed, num_calls = map(int, sys.argv[1:])
rng = np.random.default_rng(seed)
mesh = mpmd.MpmdMesh(jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4]), "stage")
NAMES = ("first", "last")


def answer(params, x):
    h = mpmd.mark_stage_end(jnp.tanh(x @ params["first"]))
    return h @ params["last"]


def train(params, xs):
    def one(x):
        return jax.value_and_grad(lambda params: jnp.mean((answer(params, x) - x) ** 2))(params)

    loss, grads = mpmd.treduce(one, xs, schedule="1f1b", operation=mpmd.Mean)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def sample(params, xs):
    return params, mpmd.treduce(lambda x: answer(params, x), xs, schedule="gpipe", operation=mpmd.Concat)


class Role:
    """A step on two groups, its parameters, and the same on one device."""

    def __init__(self, step, groups):
        self.mesh, self.groups = mesh.mpmd_submesh(groups), groups
        self.step, self.plain = mpmd.jit(step, mpmd_mesh=self.mesh), jax.jit(step)
        self.where = {name: mpmd.MpmdSharding(self.mesh, i) for i, name in enumerate(NAMES)}
        self.expected = {name: rng.normal(size=(8, 8)).astype(np.float32) for name in NAMES}
        self.params = self.expected


roles = [Role(step, rng.permutation(4)[:2].tolist()) for step in (train, sample, train, sample)]
told, want = [], []
for _ in range(num_calls):
    role, other = (roles[i] for i in rng.permutation(len(roles))[:2])
    if rng.integers(3) or role.params is role.expected:
        xs = rng.normal(size=(3, 4, 8)).astype(np.float32)
        role.params, y = role.step(role.params, xs)
        role.expected, z = role.plain(role.expected, xs)
        told.append(y)
        want.append(z)
    else:
        other.params = reshard.mpmd_to_mpmd_reshard(role.params, other.where, donate=False)
        other.expected = role.expected
found = mpmd.device_get([told, [r.params for r in roles]])
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), found, [want, [r.expected for r in roles]])
print(json.dumps("same"))
