"""Steps without a loop: where their equations run, and what crosses. Nothing here is compiled."""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from programs.pipelines import in_turns

import mpmd
from mpmd.partition import place_segments
from mpmd.partition.pins import with_fewest_bytes

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


DERIVED = {
    "scaled by a scalar": lambda p: [w / (1 - p["s"]) for w in p["w"]],
    "mean of two": lambda p: [p["s"] * w + (1 - p["s"]) * v for w, v in zip(p["w"], p["v"], strict=True)],
    "cast": lambda p: [(w * p["s"]).astype(jnp.bfloat16) for w in p["w"]],
    "noise": lambda p: [w + jax.random.normal(jax.random.fold_in(p["key"], i), w.shape) for i, w in enumerate(p["w"])],
    "spectral norm": lambda p: [w / jnp.linalg.norm(w) for w in p["w"]],
    "norm of all": lambda p: [w / jnp.sqrt(sum((w**2).sum() for w in p["w"])) for w in p["w"]],
    "product": lambda p: [w + p["s"] * (v[:, :2] @ v[:2]) for w, v in zip(p["w"], p["v"], strict=True)],
    "some": lambda p: [w * p["s"] if i % 2 else w for i, w in enumerate(p["w"])],
}


@pytest.mark.parametrize("rows", [2, 100])  # smaller than a weight, and larger
@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_derived_parameters_are_made_in_the_stage_that_reads_them(mesh, derive, rows):
    layers, W = range(2 * GROUPS), 16
    params = {n: [in_group(mesh, [i // 2], W, W) for i in layers] for n in "wv"}
    params |= {"s": in_group(mesh, None), "key": jax.eval_shape(lambda: jax.random.key(0))}

    def predict(params, x):
        for i, w in enumerate(derive(params)):
            x = jnp.tanh(x @ w)
            x = mpmd.mark_stage_end(x) if i in (1, 3, 5) else x
        return x.sum(-1)

    sent, outline = crossing(mesh, predict, params, jax.ShapeDtypeStruct((rows, W), jnp.float32))
    assert [s for s in sent if s[1] > 64] == [("", 4 * rows * W, g, g + 1) for g in range(3)]
    assert outline.outputs[0][1] == {3}


GATHERS = {
    "take": lambda c, i: jnp.take(c, i, axis=0),
    "take_along_axis": lambda c, i: jnp.take_along_axis(c, i[:, None, None], axis=0),
    "product": lambda c, i: jnp.einsum("ab,blw->alw", jax.nn.one_hot(i, ROWS), c),
}


@pytest.mark.parametrize("gather", GATHERS.values(), ids=GATHERS)
@pytest.mark.parametrize("placed", [True, False])
def test_caches_are_reordered_where_they_are_by_indices_of_the_last_stage(mesh, gather, placed):
    def decode(weights, caches, x, at):
        new = []
        for i, (w, c) in enumerate(zip(weights, caches, strict=True)):
            c = jax.lax.dynamic_update_slice_in_dim(c, (x @ w)[:, None], at, axis=1)
            x = jnp.einsum("rl,rlw->rw", jax.nn.softmax(jnp.einsum("rw,rlw->rl", x, c)), c)
            new.append(c)
            x = mpmd.mark_stage_end(x) if i < 3 else x
        return [gather(c, jnp.argsort(x[:, 0])) for c in new], x.sum(-1)

    weights = [in_group(mesh, [g], D, D) for g in range(GROUPS)]
    cache = jax.ShapeDtypeStruct((ROWS, 9, D), jnp.float32)
    caches = [in_group(mesh, [g], *cache.shape) if placed else cache for g in range(GROUPS)]
    sent, outline = crossing(mesh, decode, weights, caches, jax.ShapeDtypeStruct((ROWS, D), jnp.float32), 0)
    large = [s for s in sent if s[1] > 8 * ROWS]
    assert large == chain(3)
    assert [groups for _, groups in outline.outputs] == [{g} for g in (0, 1, 2, 3, 3)]


@pytest.mark.parametrize("width", [4, 16, 40])
def test_the_optimizer_of_the_first_layer_is_where_the_layer_is(mesh, width):
    def train(params, x):
        def loss(params):
            h = x
            for i, w in enumerate(params):
                h = jnp.tanh((mpmd.mark_stage_end(h) if i else h) @ w)
            return (h**2).mean() + 1e-4 * sum((w**2).sum() for w in params)

        gradients = jax.grad(loss)([p["w"] for p in params])
        moments = [0.9 * p["m"] + 0.1 * g for p, g in zip(params, gradients, strict=True)]
        return [{"w": p["w"] - 0.1 * m, "m": m} for p, m in zip(params, moments, strict=True)]

    shapes = [(width, 16), *[(16, 16)] * 3]
    params = [{n: in_group(mesh, [g], *s) for n in "wm"} for g, s in enumerate(shapes)]
    sent, outline = crossing(mesh, train, params, jax.ShapeDtypeStruct((ROWS, width), jnp.float32))
    assert sorted(s for s in sent if s[1] > 8) == sorted(
        ("", 4 * ROWS * 16, a, b) for g in range(3) for a, b in ((g, g + 1), (g + 1, g))
    )
    assert [groups for _, groups in outline.outputs] == [{g} for g in range(GROUPS) for _ in "wm"]


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

    def derived(weights):
        half = weights[0].astype(jnp.bfloat16)
        return jnp.tanh(weights[0] @ half).mean() + (half @ weights[1]).mean()

    text = mpmd.jit(derived, mpmd_mesh=mesh).lower(weights).compile().explain()
    sent = "what is made of the argument weights[0] (512 B) is sent from group 0 to 1 in every call"
    assert f"warning: {sent}: dot_general reads it, at {__file__}:{derived.__code__.co_firstlineno + 2}" in text
    assert "  Make it of the arrays of one group, or inside of the layer that reads it." in text
    text = mpmd.jit(both, mpmd_mesh=mesh).lower(weights).compile().explain()
    line = both.__code__.co_firstlineno + 1
    warning = next(part for part in text.split("warning: ")[1:])
    assert warning.startswith(
        "the argument weights[1] (1.02 KB) is sent from group 1 to 0 in every call: concatenate reads it, at "
    )
    assert f"{__file__}:{line}" in warning
    assert "Keep it in group 0 too (in_shardings), or let that line read the arrays of one group." in warning


@pytest.mark.slow
def test_reordered_caches_and_derived_weights_are_those_of_plain_jit_in_groups_of_two_devices():
    devices = jax.make_mesh((2, 2), ("stage", "data"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    mesh = mpmd.MpmdMesh(devices, "stage")

    def decode(weights, scale, caches, x, at):
        new = []
        for i, (w, c) in enumerate(zip([w / scale for w in weights], caches, strict=True)):
            c = jax.lax.dynamic_update_slice_in_dim(c, (x @ w)[:, None], at, axis=1)
            x = jnp.einsum("rl,rlw->rw", jax.nn.softmax(jnp.einsum("rw,rlw->rl", x, c)), c)
            new.append(c)
            x = mpmd.mark_stage_end(x) if i == 0 else x
        return [jnp.take(c, jnp.argsort(x[:, 0]), axis=0) for c in new], x.sum(-1)

    keys = jax.random.split(jax.random.key(0), 3)
    weights, x = [jax.random.normal(k, (D, D)) for k in keys[:2]], jax.random.normal(keys[2], (ROWS, D))
    place = mpmd.jit(lambda ws: ws, mpmd_mesh=mesh, out_shardings=[mpmd.MpmdSharding(mesh, g) for g in range(2)])
    step, plain = mpmd.jit(decode, mpmd_mesh=mesh, donate_argnums=2), jax.jit(decode)
    here, there = [jnp.zeros((ROWS, 9, D))] * 2, [jnp.zeros((ROWS, 9, D)) for _ in range(2)]
    placed = place(weights)
    for at in range(2):
        here, y = plain(weights, jnp.float32(2), here, x, at)
        there, z = step(placed, jnp.float32(2), there, x, at)
        assert [c.mpmd_idxs for c in there] == [(0,), (1,)]
        for a, b in zip([*here, y], [*there, z], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_a_deeper_model_is_as_much_more_work_to_place_as_it_has_more_layers(monkeypatch):
    mesh = mpmd.MpmdMesh(jax.make_mesh((GROUPS,), ("stage",), devices=jax.devices()[:GROUPS]), "stage")

    def loss(params, x):
        for p in params:
            x = block(p, x)
        return (x**2).mean()

    def clipped(params, x):
        grads = jax.grad(loss)(params, x)
        scale = 1 / jnp.maximum(1.0, jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads))))
        return jax.tree.map(lambda p, g: p - scale * g, params, grads)

    calls = 0

    def counted(fun, *args):
        def observe(_frame, event, _arg):
            nonlocal calls
            calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(observe)
        try:
            return fun(*args)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(place_segments, "with_fewest_bytes", functools.partial(counted, with_fewest_bytes))
    work = []
    for layers in (8, 32):
        calls = 0
        params = [block_in(mesh, layer * GROUPS // layers) for layer in range(layers)]
        crossing(mesh, clipped, params, jax.ShapeDtypeStruct((ROWS, D), jnp.float32))
        work.append(calls)
    assert 0 < work[1] < 4.4 * work[0]


@pytest.mark.parametrize(
    ("way", "mark"),
    in_turns(
        ["gradients", "updates", "map", "differentiated map", "fori", "beside a loop"],
        [mpmd.mark_stage_end, mpmd.mark_layer_end],
        slow=["updates", "map"],
    ),
)
def test_a_loop_of_ones_own_over_the_data_runs_in_one_group_and_is_warned_of(mesh, mark, way):
    weights = [np.random.default_rng(i).normal(size=(D, D)).astype(np.float32) for i in range(GROUPS)]
    xs = np.random.default_rng(9).normal(size=(3, ROWS, D)).astype(np.float32)

    def loss(ws, x):
        for w in ws[:-1]:
            x = mark(jnp.tanh(x @ w))
        return ((x @ ws[-1]) ** 2).mean()

    def mapped(ws, xs):
        return jax.lax.map(jax.checkpoint(lambda x: loss(ws, x)), xs).mean()

    def summed(ws, xs):
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, ws)
        return jax.lax.scan(lambda c, x: (jax.tree.map(jnp.add, c, jax.value_and_grad(loss)(ws, x)), None), zeros, xs)[
            0
        ]

    def updated(ws, xs):
        return jax.lax.scan(lambda c, x: ([w - g for w, g in zip(c, jax.grad(loss)(c, x), strict=True)], None), ws, xs)[
            0
        ]

    step = {
        "gradients": summed,
        "updates": updated,
        "map": mapped,
        "differentiated map": jax.value_and_grad(mapped),
        "fori": lambda ws, xs: jax.lax.fori_loop(0, 3, lambda i, c: c + loss(ws, xs[i]), 0.0),
        "beside a loop": lambda ws, xs: (
            mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule="1f1b"), mapped(ws, xs)
        ),
    }[way]  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = mpmd.jit(step, mpmd_mesh=mesh)(weights, xs)
    said = [str(w.message) for w in told if "over data, such as a loop over microbatches" in str(w.message)]
    assert len(said) == (way != "beside a loop")
    assert all(f"at {__file__}:" in text for text in said)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(weights, xs)), strict=True):
        np.testing.assert_allclose(np.asarray(ours), plain, rtol=1e-5, atol=1e-6)
