"""Programs that name an axis of the mesh besides the pipeline's: data and tensor parallelism inside stages."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import mpmd
from programs.parts import (
    WIDTH,
    momentum_state,
    momentum_update,
    normal,
    regression_batch,
    residual,
    squared_error,
    stages_state,
    train,
    train_stages,
)
from programs.program import Program

ROWS = 4  # of one microbatch: a multiple of the axis' size


def _even_batch(key):
    x, y = jax.random.split(key)
    return {"x": normal(x, 4, ROWS, WIDTH), "y": normal(y, 4, ROWS, WIDTH)}


def _data_parallel(tools):
    """Activations are sharded over rows; parameters are whole everywhere."""

    def loss(params, microbatch):
        x = tools.constrain(microbatch["x"], "data", None)
        y = tools.constrain(microbatch["y"], "data", None)
        for stage, p in enumerate(params):
            x = tools.constrain(residual(p, x if stage == 0 else tools.mark(x)), "data", None)
        return squared_error(x, y)

    return train(tools, loss)


def _two_matrices(key):
    def one(key):
        up, down = jax.random.split(key)
        return {"up": normal(up, WIDTH, 2 * WIDTH, scale=0.4), "down": normal(down, 2 * WIDTH, WIDTH, scale=0.3)}

    return momentum_state([one(k) for k in jax.random.split(key, 4)])


def _tensor_parallel(tools):
    """Column- then row-sharded weights, said by constraints inside each stage."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            up = tools.constrain(p["up"], None, "data")
            h = tools.constrain(jnp.tanh(x @ up), None, "data")
            x = x + tools.constrain(h, None, None) @ tools.constrain(p["down"], None, None)
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


def _sharded_state(tools):
    """The state itself comes in sharded, and goes out so; no constraint is in the model."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            h = tools.constrain(jnp.tanh(x @ p["up"]), None, None)
            x = x + h @ tools.constrain(p["down"], None, None)
        return squared_error(x, microbatch["y"])

    return train(tools, loss)


_TWO_MATRICES_SPECS = {
    "params": {"up": P(None, "data"), "down": P("data", None)},
    "momentum": {"up": P(None, "data"), "down": P("data", None)},
    "step": P(),
}


def _sharded_specs():
    stages = {name: [_TWO_MATRICES_SPECS[name]] * 4 for name in ("params", "momentum")}
    return {**stages, "step": P()}, {"x": P(), "y": P()}


def _split_mlp(tools, shard_map):
    """Each device has half of the hidden units; `psum` adds the halves."""

    def local(up, down, x):
        return jax.lax.psum(jnp.tanh(x @ up) @ down, "data")

    if tools.mesh is None:
        return lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"]
    split = shard_map(local, in_specs=(P(None, "data"), P("data", None), P()), out_specs=P())

    def apply(p, x):
        up, down = tools.constrain(p["up"], None, "data"), tools.constrain(p["down"], "data", None)
        return x + split(up, down, x)

    return apply


def _shard_map_with_the_mesh(tools):
    """`shard_map` over the whole mesh that the user has."""
    return train_stages(tools, _split_mlp(tools, functools.partial(jax.shard_map, mesh=tools.mesh)))


def _shard_map_without_a_mesh(tools):
    """`shard_map` that takes the mesh from its context."""
    return train_stages(tools, _split_mlp(tools, jax.shard_map))


def _shard_map_over_one_axis(tools):
    """`shard_map` that is manual over the data axis alone."""
    return train_stages(tools, _split_mlp(tools, functools.partial(jax.shard_map, axis_names={"data"})))


def _shard_map_unchecked(tools):
    """`shard_map` without the check of what varies over which axis, as older code has it."""
    return train_stages(
        tools, _split_mlp(tools, functools.partial(jax.shard_map, axis_names={"data"}, check_vma=False))
    )


def _shard_map_unchecked_over_all_axes(tools):
    """The same over every axis of the user's mesh, as most code has it."""
    return train_stages(tools, _split_mlp(tools, functools.partial(jax.shard_map, mesh=tools.mesh, check_vma=False)))


def _gathered_rows(tools):
    """`all_gather`, `psum_scatter`, `axis_index` and `ppermute` over the data axis inside stages."""

    def local(p, x):
        everything = jax.lax.all_gather(x, "data", tiled=True)
        h = jnp.tanh(everything @ p["up"] @ p["down"]) / 2
        mine = jax.lax.psum_scatter(h, "data", tiled=True)
        turned = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return mine + 0.1 * turned + x * (1.0 + 0.1 * jax.lax.axis_index("data"))

    def plain(p, x):
        h = jnp.tanh(x @ p["up"] @ p["down"])
        place = jnp.repeat(jnp.arange(2), ROWS // 2)[:, None]
        return h + 0.1 * jnp.roll(x, ROWS // 2, axis=0) + x * (1.0 + 0.1 * place)

    if tools.mesh is None:
        return train_stages(tools, plain)
    rows = P("data", None)
    split = jax.shard_map(local, mesh=tools.mesh, in_specs=({"up": P(), "down": P()}, rows), out_specs=rows)

    def loss(params, microbatch):
        x = tools.constrain(microbatch["x"], "data", None)
        for stage, p in enumerate(params):
            x = split(p, x if stage == 0 else tools.mark(x))
        return squared_error(x, tools.constrain(microbatch["y"], "data", None))

    return train(tools, loss)


def _sharded_optimizer(tools):
    """Momentum is kept in shards over the data axis (after the loop), parameters are whole."""

    def loss(params, microbatch):
        x = tools.constrain(microbatch["x"], "data", None)
        for stage, p in enumerate(params):
            x = residual(p, x if stage == 0 else tools.mark(x))
        return squared_error(x, tools.constrain(microbatch["y"], "data", None))

    def shard(tree, name):
        return jax.tree.map(lambda a: tools.constrain(a, name, *(None,) * (a.ndim - 1)), tree)

    def step(state, batch):
        loss_value, grads = tools.reduce(
            lambda microbatch: jax.value_and_grad(loss)(state["params"], microbatch), batch, operation=mpmd.Mean
        )
        state = {**state, "momentum": shard(state["momentum"], "data"), "params": shard(state["params"], "data")}
        new = momentum_update(state, shard(grads, "data"))
        return {**new, "momentum": shard(new["momentum"], None), "params": shard(new["params"], None)}, {
            "loss": loss_value
        }

    return step


def _plain(tools):
    """Nothing in the program is sharded; the mesh has a second axis all the same."""
    return train_stages(tools, residual)


def _mesh_program(name, make_state, build, make_batch=_even_batch, **kwargs):
    return Program(name, make_state, make_batch, build, mesh_axes=("data",), **kwargs)


PROGRAMS = (
    _mesh_program("data_parallel", stages_state, _data_parallel),
    _mesh_program("tensor_parallel", _two_matrices, _tensor_parallel),
    _mesh_program("sharded_state", _two_matrices, _sharded_state, specs=_sharded_specs()),
    _mesh_program("shard_map_with_the_mesh", _two_matrices, _shard_map_with_the_mesh),
    _mesh_program("shard_map_without_a_mesh", _two_matrices, _shard_map_without_a_mesh),
    _mesh_program("shard_map_over_one_axis", _two_matrices, _shard_map_over_one_axis),
    _mesh_program("shard_map_unchecked", _two_matrices, _shard_map_unchecked),
    _mesh_program("shard_map_unchecked_over_all_axes", _two_matrices, _shard_map_unchecked_over_all_axes),
    _mesh_program("gathered_rows", _two_matrices, _gathered_rows),
    _mesh_program("sharded_optimizer", stages_state, _sharded_optimizer),
    _mesh_program("ignores_the_mesh", stages_state, _plain, make_batch=regression_batch),
)
