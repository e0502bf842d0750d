"""Models and optimizers from the libraries that people use, trained as two stages, equal plain JAX."""

import functools
import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import pallas as pl
from programs.parts import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    chain,
    cross_entropy,
    normal,
    regression_batch,
    squared_error,
    stages_params,
    token_batch,
    train,
)
from programs.pipelines import in_turns, pipeline
from programs.program import Program, assert_same_history
from samples import slow_first

import mpmd

RUNS = [("OneFOneB", "auto"), ("ZeroBubbleH1", "shared")]


def check(program, schedule, where):
    if program.needs:
        pytest.importorskip(program.needs)
    assert_same_history(program.run(pipeline(program, schedule, where), 2), program.expected[:2], program.rtol)


def _adam_step(tools, optimizer, loss):
    """Mean gradients of `loss(params, microbatch)` through an optimizer of optax."""

    def step(state, batch):
        value, grads = tools.reduce(lambda m: jax.value_and_grad(loss)(state["params"], m), batch, operation=mpmd.Mean)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return step


# --- Flax NNX -------------------------------------------------------------------------------------


def _nnx_model(mark):
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False, use_bias=False)
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + nnx.gelu(self.linear(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.count = nnx.BatchStat(jnp.float32(0))

        def __call__(self, tokens):
            x = mark(self.blocks[0](self.embed(tokens)))
            self.count[...] = self.count[...] + 1
            return self.embed.attend(self.blocks[1](x))

    return Model(nnx.Rngs(0))


def _nnx(tools):
    """A transformer of NNX modules with a tied embedding and a variable that each microbatch changes."""
    from flax import nnx

    model = _nnx_model(tools.mark)
    graph, _, _ = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-2, eps=1e-3)

    def step(state, batch):
        def loss(params, microbatch):
            model = nnx.merge(graph, params, state["rest"], copy=True)
            value = cross_entropy(model(microbatch["tokens"]), microbatch["targets"])
            return value, nnx.state(model, nnx.BatchStat)

        (value, rest), grads = tools.reduce(
            lambda m: jax.value_and_grad(loss, has_aux=True)(state["params"], m), batch, operation=mpmd.Mean
        )
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "rest": rest, "opt": opt}, {"loss": value}

    return step


def _nnx_state(key):
    from flax import nnx

    _, params, rest = nnx.split(_nnx_model(lambda x: x), nnx.Param, ...)
    return {"params": params, "rest": rest, "opt": optax.adam(1e-2, eps=1e-3).init(params)}


# --- Flax Linen -----------------------------------------------------------------------------------


def _linen_model(mark):
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, train=True):
            embed = nn.Embed(VOCABULARY, WIDTH)
            x = embed(tokens)
            for stage in range(2):
                x = x if stage == 0 else mark(x)
                h = nn.SelfAttention(2, use_bias=False)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(
                    x + nn.Dropout(0.2)(h, deterministic=False)
                )
            return embed.attend(x)

    return Model()


def _linen(tools):
    """A causal transformer of Linen modules with batch statistics, dropout and a tied embedding."""
    model = _linen_model(tools.mark)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(7), state["step"])
        num = batch["tokens"].shape[0]

        def loss(params, i):
            logits, mutated = model.apply(
                {"params": params, "batch_stats": state["stats"]}, batch["tokens"][i], mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(key, i)},
            )  # fmt: skip
            return cross_entropy(logits, batch["targets"][i]), mutated["batch_stats"]

        (value, stats), grads = tools.reduce_i(
            lambda i: jax.value_and_grad(loss, has_aux=True)(state["params"], i), num, operation=mpmd.Mean
        )
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "opt": opt, "step": state["step"] + 1}, {"loss": value}

    return step


def _linen_state(key):
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    made = _linen_model(lambda x: x).init({"params": key, "dropout": key}, tokens)
    opt = optax.sgd(0.1, momentum=0.9).init(made["params"])
    return {"params": made["params"], "stats": made["batch_stats"], "opt": opt, "step": jnp.int32(0)}


# --- Equinox --------------------------------------------------------------------------------------


@functools.cache
def _equinox_class():
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP
        scale: float = eqx.field(static=True)

        def __init__(self, key):
            a, m = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=a)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, depth=1, key=m)
            self.scale = 0.5

        def __call__(self, x):
            h = jax.vmap(self.norm)(x)
            x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
            return x + self.scale * jax.vmap(self.mlp)(x)

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key):
            e, h, *bs = jax.random.split(key, 4)
            self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=e)
            self.blocks = [Block(b) for b in bs]
            self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=h)

    return Model


def _equinox_model(key):
    return _equinox_class()(key)


def _equinox(tools):
    """An `eqx.Module` transformer for one sequence, vmapped, through `filter_value_and_grad`."""
    import equinox as eqx

    _, static = eqx.partition(_equinox_model(jax.random.key(0)), eqx.is_array)
    optimizer = optax.adamw(1e-2, eps=1e-3)

    def step(state, batch):
        model = eqx.combine(state["params"], static)

        @eqx.filter_value_and_grad
        def loss(model, microbatch):
            x = jax.vmap(jax.vmap(model.embed))(microbatch["tokens"])
            x = tools.mark(jax.vmap(model.blocks[0])(x))
            x = jax.vmap(model.blocks[1])(x)
            return cross_entropy(jax.vmap(jax.vmap(model.head))(x), microbatch["targets"])

        value, grads = tools.reduce(lambda m: loss(model, m), batch, operation=mpmd.Mean)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        new = eqx.apply_updates(model, updates)
        return {"params": eqx.filter(new, eqx.is_array), "opt": opt}, {"loss": value}

    return step


def _equinox_state(key):
    import equinox as eqx

    params = eqx.filter(_equinox_model(key), eqx.is_array)
    return {"params": params, "opt": optax.adamw(1e-2, eps=1e-3).init(params)}


# --- closures over named parameters, as Haiku has them ----------------------------------------------

_scope = threading.local()


def _parameter(name, shape, init):
    """Looks a parameter up in the current scope, or makes it there."""
    if _scope.making is not None:
        _scope.making, key = jax.random.split(_scope.making)
        _scope.params[name] = init(key, shape)
    return _scope.params[name]


def _in_scope(params, key, fun, *args):
    _scope.params, _scope.making = dict(params), key
    return fun(*args), _scope.params


def _haiku_forward(mark, x):
    for stage in range(2):
        x = x if stage == 0 else mark(x)
        w = _parameter(f"layer{stage}/w", (WIDTH, WIDTH), lambda k, s: normal(k, *s, scale=0.3))
        x = x + jnp.tanh(x @ w + _parameter(f"layer{stage}/b", (WIDTH,), lambda k, s: jnp.zeros(s)))
    return x


def _haiku(tools):
    def loss(params, m):
        prediction, _ = _in_scope(params, None, functools.partial(_haiku_forward, tools.mark), m["x"])
        return squared_error(prediction, m["y"])

    return _adam_step(tools, optax.adam(1e-2, eps=1e-3), loss)


def _haiku_state(key):
    _, params = _in_scope({}, key, functools.partial(_haiku_forward, lambda x: x), jnp.zeros((1, WIDTH)))
    return {"params": params, "opt": optax.adam(1e-2, eps=1e-3).init(params)}


# --- attention and Pallas -------------------------------------------------------------------------


def _attention(tools):
    """`jax.nn.dot_product_attention`, causal, with fewer key heads than query heads."""

    def loss(params, m):
        x = m["x"][:, None].repeat(4, 1) * jnp.arange(1, 5)[:, None] / 4
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            q = (x @ p["w"]).reshape(*x.shape[:2], 4, 2)
            k = (x @ p["w"].T)[..., :4].reshape(*x.shape[:2], 2, 2)
            y = jax.nn.dot_product_attention(q, k, k * p["b"][:2], is_causal=True)
            x = x + y.reshape(x.shape)
        return squared_error(x[:, -1], m["y"])

    return train(tools, loss)


@jax.custom_vjp
def _pallas_matmul(x, w):
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(x, w)


_pallas_matmul.defvjp(
    lambda x, w: (_pallas_matmul(x, w), (x, w)),
    lambda kept, g: (_pallas_matmul(g, kept[1].T), _pallas_matmul(kept[0].T, g)),
)


def _pallas(tools):
    """Matmuls as Pallas kernels (in interpret mode), forward and backward."""

    def loss(params, m):
        x = m["x"]
        for stage, p in enumerate(params):
            x = x if stage == 0 else tools.mark(x)
            x = x + jnp.tanh(_pallas_matmul(x, p["w"]) + p["b"])
        return squared_error(x, m["y"])

    return train(tools, loss)


def _two_stages(key):
    params = stages_params(key, 2)
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0)}


# --- Optax ----------------------------------------------------------------------------------------


def _optax_program(name, make):
    def build(tools):
        def loss(params, m):
            return squared_error(chain(tools, params, m["x"]), m["y"])

        return _adam_step(tools, make(), loss)

    def state(key):
        params = stages_params(key, 2)
        return {"params": params, "opt": make().init(params)}

    return Program(name, state, regression_batch, build, num_stages=2)


def _multi_steps():
    return optax.MultiSteps(optax.adam(1e-2, eps=1e-3), every_k_schedule=2).gradient_transformation()


def _masked():
    return optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.sgd(0.05),
    )


def _hyperparams():
    return optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 5), eps=1e-3)


def _multi_steps_of_finite():
    """A condition in a condition, on what all stages compute in the outer one."""
    return optax.MultiSteps(optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), 3), 2)


def _averaged():
    return optax.chain(optax.ema(0.9), optax.clip_by_global_norm(1.0), optax.sgd(0.1))


PROGRAMS = [
    Program("nnx", _nnx_state, token_batch, _nnx, num_stages=2, needs="flax"),
    Program("linen", _linen_state, token_batch, _linen, num_stages=2, needs="flax"),
    Program("equinox", _equinox_state, token_batch, _equinox, num_stages=2, needs="equinox"),
    Program("haiku_style_closures", _haiku_state, regression_batch, _haiku, num_stages=2),
    Program("dot_product_attention", _two_stages, regression_batch, _attention, num_stages=2),
    Program("pallas_interpreted", _two_stages, regression_batch, _pallas, num_stages=2),
    _optax_program("multi_steps", _multi_steps),
    _optax_program("multi_steps_of_finite", _multi_steps_of_finite),
    _optax_program("masked", _masked),
    _optax_program("apply_if_finite", lambda: optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), 3)),
    _optax_program("inject_hyperparams", _hyperparams),
    _optax_program("ema", _averaged),
]


# Whole models (`test_equivalence` has smaller ones of these libraries), and optimizers whose like is quick.
_SLOW = (
    "nnx", "linen", "equinox", "apply_if_finite", "inject_hyperparams", "ema", "dot_product_attention", "multi_steps",
    "haiku_style_closures", "multi_steps_of_finite",
)  # fmt: skip


@pytest.mark.parametrize(("program", "schedule", "where"), in_turns(PROGRAMS, RUNS, slow=_SLOW))
def test_a_model_or_an_optimizer_of_a_library_is_trained_as_under_plain_jax(program, schedule, where):
    check(program, schedule, where)


@pytest.mark.parametrize(("schedule", "where"), slow_first(*RUNS[::-1]))
def test_an_update_that_is_not_finite_is_skipped_in_all_stages_alike(schedule, where):
    program = next(p for p in PROGRAMS if p.name == "apply_if_finite")
    step, plain = pipeline(program, schedule, where), jax.jit(program.build(_plain_tools()))
    state = program.state()
    bad = jax.tree.map(lambda x: x.at[1, 0].set(jnp.inf), regression_batch(jax.random.key(3)))
    for run in (step, plain):
        new, _ = run(state, bad)
        for before, after in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(new["params"]), strict=True):
            assert (jnp.asarray(before) == jnp.asarray(after)).all()


def _plain_tools():
    from programs.program import plain_loop

    return plain_loop()
