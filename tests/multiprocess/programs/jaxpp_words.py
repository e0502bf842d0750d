"""A step and a program of tasks in JaxPP's words, in processes of one group each: initialised whole, moved, run.

jaxpp_words.py        2 processes of 2 devices; each compares with plain JAX, and prints "equal"
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import mpmd.jaxpp as jaxpp
from mpmd.jaxpp.experimental import mpmd as explicit


def initial():
    random = np.random.default_rng(0)
    params = [random.normal(size=(8, 8)).astype(np.float32) / 3 for _ in range(2)]
    return params, random.normal(size=(4, 4, 8)).astype(np.float32)


def train_step(params, xs):
    def loss(params, x):
        for w in params:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    losses, grads = jaxpp.treduce(functools.partial(jax.value_and_grad(loss), params), xs, schedule=jaxpp.Std1F1B(2))
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), losses


def main():
    mpmd.initialize()
    whole = jax.make_mesh((2, 2), ("stage", "data"), (jax.sharding.AxisType.Auto,) * 2)
    mesh = jaxpp.MpmdMesh(whole, "stage")
    assert mesh.lowering_mesh() == mesh.my_mpmd_group_mesh == mesh.groups[jax.process_index()]
    params, xs = initial()
    spread = NamedSharding(whole, P(("stage", "data")))
    state = jax.jit(lambda: [jnp.asarray(w) for w in params], out_shardings=spread)()
    step = jaxpp.mpmd_jit_with_loop(train_step, mesh, in_specs=(P("data"), None), donate_argnums=0)
    compiled = step.compile(state, xs)
    state = jaxpp.spmd_to_mpmd_reshard(mesh, state, compiled.in_shardings[0][0])
    assert [x.is_partially_addressable for x in state] == [group == jax.process_index() for group in range(2)]
    for _ in range(3):
        state, losses = compiled(state, xs)
        params, wanted = jax.jit(train_step)(params, xs)
        np.testing.assert_allclose(mpmd.device_get(losses), wanted, rtol=2e-5)
    back = jaxpp.mpmd_to_spmd_reshard(mesh, state, [spread] * 2)
    assert all(x.sharding == spread for x in back)

    here, there = (NamedSharding(group, P("data")) for group in mesh.unstack)

    @explicit.mpmd(mesh, in_shardings=(here, there))
    def program(x, y):
        moved = explicit.transfer(explicit.task(jnp.tanh, out_shardings=here)(x), out_shardings=there).done()
        return explicit.task(jnp.add, out_shardings=there)(moved, y)

    def placed(sharding, value):
        mine = sharding.is_fully_addressable
        shards = [jax.device_put(value, sharding)] if mine else []
        data = [shard.data for array in shards for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, data, dtype=value.dtype)

    x = np.arange(4, dtype=np.float32)
    found = program.lower(x, x)(placed(here, x), placed(there, x))
    assert found.sharding == there and found.is_fully_addressable == (jax.process_index() == 1)
    if found.is_fully_addressable:
        np.testing.assert_allclose(found, np.tanh(x) + x, rtol=1e-6)
    print(json.dumps("equal"))


if __name__ == "__main__":
    main()
