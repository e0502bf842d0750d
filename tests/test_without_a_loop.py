"""Steps without a loop: where their equations run, and what crosses. Nothing here is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import mpmd

GROUPS, D, ROWS = 4, 8, 16
ACTIVATION = 4 * ROWS * D


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return mpmd.MpmdMesh(
        jax.make_mesh((GROUPS,), ("stage",), (request.param,), devices=jax.devices()[:GROUPS]), "stage"
    )


def in_group(mesh, group, *shape, dtype=jnp.float32):
    groups = range(GROUPS) if group is None else group
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mpmd.MpmdSharding(mesh, groups))


def block_in(mesh, group):
    """Parameters of a block, abstract, in a group."""
    return {
        "scale": in_group(mesh, group, D),
        "up": in_group(mesh, group, D, 2 * D),
        "bias": in_group(mesh, group, 2 * D),
        "down": in_group(mesh, group, 2 * D, D),
    }


def block(p, x):
    h = x - x.mean(-1, keepdims=True)
    h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]
    return x + jax.nn.gelu(h @ p["up"] + p["bias"]) @ p["down"]


def crossing(mesh, fun, *args):
    """What a step sends: (name or none, bytes, source, target), and its outline."""
    outline = mpmd.jit(fun, mpmd_mesh=mesh).lower(*args)._outline
    arguments = set(outline.trace.jaxpr.invars)
    moves = [i for i in outline.items if hasattr(i, "target")]
    named = [
        (outline.names[t.var] if t.var in arguments else "", int(4 * t.var.aval.size), t.source, t.target)
        for t in moves
    ]
    return named, outline


def chain(num, source=0):
    return [("", ACTIVATION, g, g + 1) for g in range(source, source + num)]


@pytest.mark.parametrize("marked", [False, True])
def test_activations_alone_cross_between_blocks(mesh, marked):
    params = [block_in(mesh, layer // 2) for layer in range(8)]

    def predict(params, x):
        for i, p in enumerate(params):
            x = block(p, x)
            x = mpmd.mark_stage_end(x) if marked and i % 2 else x
        return x.sum(-1)

    sent, outline = crossing(mesh, predict, params, jax.ShapeDtypeStruct((ROWS, D), jnp.float32))
    assert sent == chain(3)
    assert outline.outputs[0][1] == {3}


def test_marks_place_weights_that_are_nowhere_yet(mesh):
    def predict(params, x):
        for p in params:
            x = mpmd.mark_stage_end(block(p, x))
        return x.sum(-1)

    host = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), block_in(mesh, 0)) for _ in range(8)]
    sent, outline = crossing(mesh, predict, host, jax.ShapeDtypeStruct((ROWS, D), jnp.float32))
    assert sent == chain(3)
    layers = [outline.inputs[len(outline.trace.consts) + 4 * i] for i in range(8)]
    assert layers == [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}]
    assert not any(outline.committed)


def test_tokens_go_to_the_embedding_of_the_first_stage_though_the_last_one_has_a_copy(mesh):
    params = {"table": in_group(mesh, (0, 3), 32, D), "blocks": [block_in(mesh, g) for g in range(4)]}

    def predict(params, tokens):
        x = params["table"][tokens]
        for p in params["blocks"]:
            x = block(p, x) if p is params["blocks"][0] else block(p, mpmd.mark_stage_end(x))
        return jnp.argmax(x @ params["table"].T, -1)

    sent, outline = crossing(mesh, predict, params, in_group(mesh, 3, ROWS, dtype=jnp.int32))
    assert sorted(sent) == sorted([*chain(3), ("", 4 * ROWS, 3, 0)])  # the indices
    assert outline.outputs[0][1] == {3}


@pytest.mark.parametrize("committed", [True, False])
def test_a_cache_that_nothing_placed_goes_to_the_weights_that_read_it(mesh, committed):
    def decode(weights, caches, x):
        new = []
        for w, c in zip(weights, caches, strict=True):
            c = jax.lax.dynamic_update_index_in_dim(c, x @ w, 0, 0)
            x = jnp.tanh(c.mean(0))
            new.append(c)
        return new

    weights = [in_group(mesh, g, D, D) for g in range(4)]
    sharding = mpmd.MpmdSharding(mesh, 0)
    zeros = jax.device_put(np.zeros((ROWS, D), np.float32), sharding.group_sharding(0))
    cache = mpmd.MpmdArray._unchecked({0: zeros}, sharding, zeros.shape, zeros.dtype, committed=committed)
    _, outline = crossing(mesh, decode, weights, [cache] * 4, jax.ShapeDtypeStruct((D,), jnp.float32))
    caches = list(outline.inputs[len(outline.trace.consts) + 4 :][:4])
    assert caches == ([{0}] * 4 if committed else [{0}, {1}, {2}, {3}])


def test_a_parameter_that_crosses_is_warned_of_with_its_line():
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:2]), "stage")
    place = mpmd.jit(lambda ws: ws, mpmd_mesh=mesh, out_shardings=[mpmd.MpmdSharding(mesh, g) for g in range(2)])
    weights = place([np.eye(16, dtype=np.float32)] * 2)

    def both(weights):
        return jnp.concatenate(weights).mean(0)  # here

    text = mpmd.jit(both, mpmd_mesh=mesh).lower(weights).compile().explain()
    line = both.__code__.co_firstlineno + 1
    warning = next(part for part in text.split("warning: ")[1:])
    assert warning.startswith(
        "the argument weights[1] (1.02 KB) is sent from group 1 to 0 in every call: concatenate reads it, at "
    )
    assert f"{__file__}:{line}" in warning
    assert "Keep it in group 0 too (in_shardings), or let that line read the arrays of one group." in warning
