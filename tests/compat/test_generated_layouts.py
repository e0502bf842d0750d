"""Generated models on generated layouts inside of groups: rows and tensor parallelism, wherever constraints stand."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs.program import assert_same, host

import mpmd
import scheduler

WIDTH, HIDDEN, VOCABULARY, LENGTH, ROWS, HEADS = 16, 32, 24, 8, 4, 4
HIDDEN_OF_ROWS, IN_HEADS = (ROWS, LENGTH, HIDDEN), (ROWS, LENGTH, HEADS, WIDTH // HEADS)


def _mlp(p, x, put):
    h = put(jax.nn.gelu(x @ p["up"] + p.get("bias", 0)), HIDDEN_OF_ROWS)
    return x + put(h @ p["down"], x.shape)


def _normed(p, x, put):
    return x + _mlp(p, x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"], put)


def _scanned(p, x, put):
    return jax.lax.scan(lambda x, p: (_mlp(p, x, put), None), x, p)[0]


def _attention(p, x, put):
    q, k, v = (put(jnp.einsum("btd,dhk->bthk", x, p[n]), IN_HEADS) for n in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
    attended = put(jnp.einsum("bhqt,bthk->bqhk", weights, v), IN_HEADS)
    return x + put(jnp.einsum("bthk,hkd->btd", attended, p["o"]), x.shape)


def _turned(p, x, put):
    return x + put(jnp.take(x + p["bias"], jnp.arange(LENGTH)[::-1], axis=1), x.shape)


_UP, _DOWN, _HEADED = (WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, HEADS, WIDTH // HEADS)
_LAYERS = (
    (_mlp, {"up": _UP, "down": _DOWN, "bias": (HIDDEN,)}),
    (_normed, {"up": _UP, "down": _DOWN, "scale": (WIDTH,)}),
    (_scanned, {"up": (2, *_UP), "down": (2, *_DOWN)}),
    (_attention, {"q": _HEADED, "k": _HEADED, "v": _HEADED, "o": (*_HEADED[1:], WIDTH)}),
    (_turned, {"bias": (WIDTH,)}),
)


def _spec(rng, shape, axes):
    """Each mesh axis divides at most one axis of the array."""
    axes = [axis for axis in axes if rng.random() < 0.6]
    places = rng.sample([i for i, size in enumerate(shape) if size % 2 == 0 and size > 2], k=len(axes))
    return P(*(dict(zip(places, axes, strict=True)).get(i) for i in range(len(shape))))


def _step(rng):
    """A step, and its parameters with their specs."""
    layers = [rng.choice(_LAYERS) for _ in range(rng.randint(2, 4))]
    checkpointed = [rng.random() < 0.4 for _ in layers]
    tied, cut = rng.random() < 0.6, rng.randrange(1, len(layers))
    shapes = {"table": (VOCABULARY, WIDTH), "layers": [shapes for _, shapes in layers]}
    if not tied:
        shapes["head"] = (VOCABULARY, WIDTH)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    values = np.random.default_rng(rng.randrange(1 << 30))
    params = jax.tree.map(lambda s: jnp.asarray(0.3 * values.normal(size=s), jnp.float32), shapes, is_leaf=is_shape)
    axes = ("model",) if rng.random() < 0.7 else ("data", "model")
    specs = jax.tree.map(
        lambda shape: _spec(rng, shape, axes if len(shape) > 1 else axes[-1:]), shapes, is_leaf=is_shape
    )
    constraints: dict[tuple, list] = {}

    def put(x, shape):
        """A constraint that was drawn when the line was first traced, or none: rows, and one other axis."""
        if "data" not in jax.sharding.get_abstract_mesh().axis_names:
            return x
        if shape not in constraints:
            other = _spec(rng, (1, *shape[1:]), ("model",))
            constraints[shape] = P("data" if rng.random() < 0.8 else None, *other[1:])
        return jax.lax.with_sharding_constraint(x, constraints[shape])

    def loss(params, tokens):
        x = put(jnp.take(params["table"], tokens, axis=0), (ROWS, LENGTH, WIDTH))
        for index, ((layer, _), p) in enumerate(zip(layers, params["layers"], strict=True)):
            x = mpmd.mark_stage_end(x) if index == cut else x
            run = lambda p, x, layer=layer: layer(p, x, put)  # noqa: E731
            x = (jax.checkpoint(run) if checkpointed[index] else run)(p, x)
        logits = put(x @ params["table" if tied else "head"].T, (ROWS, LENGTH, VOCABULARY))
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(tokens, VOCABULARY), -1))

    def step(params, batch, schedule=None):
        gradients = lambda tokens: jax.value_and_grad(loss)(params, tokens)  # noqa: E731
        return mpmd.treduce(gradients, batch, schedule=schedule, operation=mpmd.Mean)

    return step, params, specs


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.slow if s < 1 else pytest.mark.exhaustive) for s in range(64)]
)
def test_a_generated_model_gives_the_numbers_of_plain_jax(seed):
    rng = random.Random(seed)
    step, params, specs = _step(rng)
    batch = np.random.default_rng(seed).integers(0, VOCABULARY, (3, ROWS, LENGTH))
    expected = host(jax.jit(step)(params, batch))
    schedule = rng.choice([scheduler.OneFOneB(2), scheduler.GPipe(2), scheduler.ZeroBubbleH1(2)])
    mesh = mpmd.MpmdMesh(Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "data", "model")), "stage")
    rows = P(None, "data") if rng.random() < 0.7 else P()
    pipelined = mpmd.jit(lambda p, b: step(p, b, schedule), mpmd_mesh=mesh, in_shardings=(specs, rows))
    assert_same(host(pipelined(params, batch)), expected, 2e-5)
