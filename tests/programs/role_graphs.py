"""Random steps of roles: models that read each other in any graph, in groups of their own, against `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

WIDTH, ROWS, MICROBATCHES, STEPS = 6, 3, 5, 3


class RoleGraph:
    """A random step: roles, what each reads, its layers, and its groups.

    Args:
      seed: of everything.
      num_groups: of the mesh that it will run on.
    """

    def __init__(self, seed: int, num_groups: int):
        rng = self.rng = np.random.default_rng(seed)
        count = int(rng.integers(2, 6))
        self.names = [f"role{k}" for k in range(count)]
        if count > 2 and rng.integers(3) == 0:
            self.names[1] = self.names[0]  # one role, called twice
        self.reads = [rng.permutation(k)[: rng.integers(0, min(k, 2) + 1)].tolist() for k in range(count - 1)]
        self.reads.append(sorted({k for k in range(count - 1) if not any(k in r for r in self.reads)} | {count - 2}))
        self.is_scanned = rng.integers(2, size=count).tolist()
        self.is_frozen = [bool(rng.integers(4) == 0 and k < count - 1) for k in range(count)]
        self.weights_of = [int(rng.integers(k + 1)) if rng.integers(4) == 0 else k for k in range(count)]
        self.roles = {}
        for name, is_scanned in zip(self.names, self.is_scanned, strict=True):
            several = is_scanned and self.names.count(name) == 1 and rng.integers(2)
            self.roles[name] = tuple(rng.permutation(num_groups)[: 1 + bool(several)].tolist())
        self.schedule = ("1f1b", "gpipe", mpmd.Adaptive("1f1b"))[rng.integers(3)]
        self.operation = (mpmd.Add, mpmd.Mean)[rng.integers(2)]

    def init(self):
        """Parameters."""
        return [(self.rng.normal(size=(4, WIDTH, WIDTH)) / 3).astype(np.float32) for k in sorted(set(self.weights_of))]

    def batch(self):
        """Microbatches."""
        return self.rng.normal(size=(MICROBATCHES, ROWS, WIDTH)).astype(np.float32)

    def loss(self, params, x):
        """Of one microbatch."""
        found = []
        numbers = sorted(set(self.weights_of))
        for k, name in enumerate(self.names):
            w = params[numbers.index(self.weights_of[k])]
            h = sum((found[j] for j in self.reads[k]), jnp.zeros_like(x)) if self.reads[k] else x
            y = mpmd.role(name)(_scanned if self.is_scanned[k] else _unrolled)(w, h)
            found.append(jax.lax.stop_gradient(y) if self.is_frozen[k] else y)
        return jnp.mean((found[-1] - x) ** 2)

    def step(self, params, batch):
        """Trains; also returns the loss."""
        loss, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(self.loss)(params, x), batch, self.schedule, operation=self.operation
        )
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss

    def check(self, mesh):
        """Trains on the mesh and by plain JAX, and answers without a loop: the same numbers, roles in their groups."""
        step = mpmd.jit(self.step, mpmd_mesh=mesh, roles=self.roles, donate_argnums=0)
        answer = mpmd.jit(self.loss, mpmd_mesh=mesh, roles=self.roles)
        state = params = self.init()
        for _ in range(STEPS):
            batch = self.batch()
            expected = jax.jit(self.loss)(params, batch[0])
            np.testing.assert_allclose(mpmd.device_get(answer(state, batch[0])), expected, 1e-5)
            state, loss = step(state, batch)
            params, other = jax.jit(self.step)(params, batch)
            np.testing.assert_allclose(mpmd.device_get(loss), other, 1e-5)
            for a, b in zip(mpmd.device_get(state), params, strict=True):
                np.testing.assert_allclose(a, b, 1e-4, 1e-5)
        numbers = sorted(set(self.weights_of))
        for k, name in enumerate(self.names):
            if self.weights_of.count(self.weights_of[k]) > 1:
                continue  # weights that differently written roles share may be sent to some of them
            where = state[numbers.index(self.weights_of[k])].mpmd_idxs
            assert set(self.roles[name]) <= set(where), (name, self.roles, where)


def _scanned(w, x):
    def layer(x, w):
        return mpmd.mark_layer_end(jnp.tanh(x @ w)), None

    return jax.lax.scan(layer, x, w)[0]


def _unrolled(w, x):
    for k in range(2):
        x = jnp.tanh(x @ w[k])
    return x @ w[3]
