"""Marks at the beginning and at the end of functions under `jax.checkpoint`: as if they stood outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from programs.parts import WIDTH, normal
from programs.pipelines import make_mesh, shared_device
from programs.program import Tools, assert_same, host, pipelined, plain_loop
from samples import slow_first

import mpmd
import scheduler

_NAMED = jax.checkpoint_policies.save_only_these_names("hidden")


def _block(p, x):
    return x + checkpoint_name(jnp.tanh(x @ p["up"]), "hidden") @ p["down"]


def _layers(mark):
    """Functions of one layer, each with a mark in the first or last line of what is checkpointed."""

    def with_a_norm(p, x):
        y = _block(p, x)
        return mark(y), jnp.sum(y**2)

    def behind_a_skip(p, x):
        return (x + mark(jnp.tanh(x @ p["up"]) @ p["down"])).astype(x.dtype)

    return {
        "end": jax.checkpoint(lambda p, x: mark(_block(p, x))),
        "begin": jax.checkpoint(lambda p, x: _block(p, mark(x))),
        "policy": jax.checkpoint(lambda p, x: mark(_block(p, x)), policy=_NAMED),
        "nested": jax.checkpoint(lambda p, x: jax.checkpoint(lambda p, x: mark(_block(p, x)))(p, x)),
        "jitted": jax.checkpoint(jax.jit(lambda p, x: mark(_block(p, x))), prevent_cse=False),
        "norm": lambda p, x: jax.checkpoint(with_a_norm)(p, x),
        "skip": jax.checkpoint(behind_a_skip),
    }


def _loss(kinds, mark):
    layers = _layers(mark)

    def loss(params, x):
        penalty = 0.0
        for kind, p in zip(kinds, params, strict=False):
            x = layers[kind](p, x)
            if kind == "norm":
                x, penalty = x[0], penalty + 1e-3 * x[1]
        return jnp.mean(_block(params[-1], x) ** 2) + penalty

    return loss


def _step(kinds, tools: Tools):
    def step(params, xs):
        return tools.reduce(lambda x: jax.value_and_grad(_loss(kinds, tools.mark))(params, x), xs)

    return step


def _arguments(num_layers):
    keys = iter(jax.random.split(jax.random.key(0), 2 * num_layers + 1))
    params = [{n: normal(next(keys), WIDTH, WIDTH) / 3 for n in ("up", "down")} for _ in range(num_layers)]
    return params, normal(next(keys), 4, 4, WIDTH)


def _sent(lowered):
    compiled = lowered.compile()
    return sorted(compiled.program.nbytes.values()), [str(lines) for lines in compiled.program.groups]


_WAYS = {
    "auto": (mpmd.mark_stage_end, scheduler.OneFOneB, AxisType.Auto),
    "explicit": (mpmd.mark_layer_end, scheduler.ZeroBubbleH1, AxisType.Explicit),
}


@pytest.mark.parametrize(
    ("kinds", "way"),
    slow_first(
        (("policy", "nested", "norm"), "auto"),
        (("end", "jitted", "skip"), "explicit"),
        (("policy", "nested", "norm"), "explicit"),
        (("end", "jitted", "skip"), "auto"),
        num_slow=2,
    ),
)
def test_a_mark_at_an_end_of_a_checkpointed_layer_is_one_outside_of_it(kinds, way):
    mark, schedule, axes = _WAYS[way]
    tools = pipelined(schedule(4))
    tools = Tools(mark, tools.reduce, tools.reduce_i)
    jitted = mpmd.jit(_step(kinds, tools), mpmd_mesh=mpmd.MpmdMesh(make_mesh(4, axes), "stage"))
    arguments = _arguments(4)
    expected = jax.jit(_step(kinds, plain_loop()))(*arguments)
    assert_same(host(jitted(*arguments)), host(expected), 2e-6)
    assert_same(host(mpmd.jit(_loss(kinds, mark), mpmd_mesh=shared_device(4))(arguments[0], arguments[1][0])),
                host(_loss(kinds, lambda x: x)(arguments[0], arguments[1][0])), 2e-6)  # fmt: skip


@pytest.mark.slow
def test_such_a_mark_sends_what_one_outside_sends():
    arguments = _arguments(3)
    marks = {
        "outside": (lambda p, x: jax.checkpoint(_block)(p, mpmd.mark_stage_end(x)), 1),
        "begin": (_layers(mpmd.mark_stage_end)["begin"], 1),
        "end": (_layers(mpmd.mark_stage_end)["end"], 0),
    }
    sent = {}
    for where, (layer, first) in marks.items():

        def loss(params, x, layer=layer, first=first):
            for i, p in enumerate(params):
                x = layer(p, x) if 0 <= i - first < 2 else jax.checkpoint(_block)(p, x)
            return jnp.mean(x**2)

        def step(params, xs, loss=loss):
            grad = jax.value_and_grad(loss)
            return mpmd.treduce(lambda x: grad(params, x), xs, schedule=scheduler.OneFOneB(3))

        sent[where] = _sent(mpmd.jit(step, mpmd_mesh=shared_device(3)).lower(*arguments))
    assert sent["begin"] == sent["end"] == sent["outside"]


def test_a_mark_in_the_middle_of_a_checkpointed_layer_is_refused_with_what_to_write():
    def layer(p, x):
        return mpmd.mark_stage_end(jnp.tanh(x @ p["up"])) @ p["down"]

    def loss(params, x):
        return jnp.mean(jax.checkpoint(layer)(params[0], x) ** 2)

    params, xs = _arguments(1)
    step = mpmd.jit(
        lambda params, xs: mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, schedule="1f1b"),
        mpmd_mesh=shared_device(2),
    )
    with pytest.raises(mpmd.StageError) as error:
        step.lower(params, xs)
    first, remedy = str(error.value).split("\n", 1)
    assert first.startswith("mark_stage_end inside checkpoint, at ") and first.endswith(": a stage cannot end there.")
    assert remedy == (
        "  Put one jax.checkpoint around what is before the mark and another one around what is behind it."
        " A mark at the beginning or at the end of a checkpointed function may stay in it."
    )

    def remedied(params, x):  # what the message says
        x = jax.checkpoint(lambda p, x: mpmd.mark_stage_end(jnp.tanh(x @ p["up"])))(params[0], x)
        return jnp.mean(jax.checkpoint(lambda p, x: x @ p["down"])(params[0], x) ** 2)

    step = mpmd.jit(
        lambda params, xs: mpmd.treduce(lambda x: jax.grad(remedied)(params, x), xs, schedule="1f1b"),
        mpmd_mesh=shared_device(2),
    )
    expected = jax.tree.map(lambda *g: sum(g), *(jax.grad(remedied)(params, x) for x in xs))
    assert_same(host(step(params, xs)), host(expected), 2e-6)


def _linen(last, width):
    import flax.linen as nn

    class Block(nn.Module):
        last: bool

        @nn.compact
        def __call__(self, x):
            x = x + nn.tanh(nn.Dense(width)(x))
            return x if self.last else mpmd.mark_stage_end(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(last + 1):
                x = nn.remat(Block)(i == last)(x)
            return x

    model = Model()
    return model.init(jax.random.key(0), np.zeros((1, width))), model.apply


def _nnx(last, width):
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, number):
            self.dense, self.number = nnx.Linear(width, width, rngs=nnx.Rngs(number)), number

        def __call__(self, x):
            x = x + jnp.tanh(self.dense(x))
            return x if self.number == last else mpmd.mark_stage_end(x)

    graph, state = nnx.split(nnx.Sequential(*map(Block, range(last + 1))))

    def apply(state, x):
        for block in nnx.merge(graph, state).layers:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x

    return state, apply


def _equinox(last, width):
    import equinox as eqx

    class Block(eqx.Module):
        dense: eqx.nn.Linear
        is_last: bool = eqx.field(static=True)

        def __call__(self, x):
            x = x + jnp.tanh(jax.vmap(self.dense)(x))
            return x if self.is_last else mpmd.mark_stage_end(x)

    def apply(blocks, x):
        for block in blocks:
            x = eqx.filter_checkpoint(block)(x)
        return x

    return [Block(eqx.nn.Linear(width, width, key=jax.random.key(i)), i == last) for i in range(last + 1)], apply


@pytest.mark.slow
@pytest.mark.parametrize(("library", "model"), [("flax", _linen), ("flax", _nnx), ("equinox", _equinox)])
def test_the_rematerialised_layers_of_libraries_end_in_marks(library, model):
    pytest.importorskip(library)
    params, apply = model(2, WIDTH)

    def step(tools):
        def loss(params, x):
            return jnp.mean(apply(params, x) ** 2)

        return lambda params, xs: tools.reduce(lambda x: jax.value_and_grad(loss)(params, x), xs)

    xs = normal(jax.random.key(1), 4, 4, WIDTH)
    jitted = mpmd.jit(step(pipelined(scheduler.OneFOneB(3))), mpmd_mesh=shared_device(3))
    assert_same(host(jitted(params, xs)), host(jax.jit(step(plain_loop()))(params, xs)), 2e-6)
