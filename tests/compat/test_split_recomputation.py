"""Recomputed blocks under schedules that split the backward: divided equations beside every other feature."""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from programs.parts import WIDTH, momentum_state, normal, squared_error, train
from programs.pipelines import in_turns, pipeline
from programs.program import Program, Tools, assert_same_history
from samples import slow_first

import mpmd
from mpmd.costs.work import work_of_equation
from mpmd.report.explain import collectives
from mpmd.tuning.tune import _Search

ROWS = 4


def _weights(key, *stack):
    keys = jax.random.split(key, 3)
    weights = {n: normal(k, *stack, WIDTH, WIDTH, scale=0.3) for n, k in zip(("in", "out"), keys[:2], strict=True)}
    return weights | {"b": normal(keys[2], *stack, WIDTH, scale=0.1)}


def _batch(key):
    x, y, seeds = jax.random.split(key, 3)
    return {"x": normal(x, 4, ROWS, WIDTH), "y": normal(y, 4, ROWS, WIDTH), "seed": jax.random.bits(seeds, (4,))}


def _block(p, x):
    return x + jnp.tanh(x @ p["in"] + p["b"]) @ p["out"]


def _rows(tools, batch, rows=("data", None)):
    spec = rows if tools.mesh is not None and "data" in tools.mesh.axis_names else ()
    return (tools.constrain(batch[name], *spec) for name in "xy")


def _stages(tools, block, policy=None, rows=("data", None)):
    """Stages of `block(params, x, seed)`, recomputed; it may give a further loss."""

    def loss(params, batch):
        (x, y), extra = _rows(tools, batch, rows), 0.0
        recomputed = jax.checkpoint(block, policy=policy)
        for stage, p in enumerate(params):
            x = recomputed(p, x if stage == 0 else tools.mark(x), batch["seed"] + jnp.uint32(stage))
            if isinstance(x, tuple):
                x, more = x
                extra += more
        return squared_error(x, y) + extra

    return train(tools, loss)


# --- blocks ---------------------------------------------------------------------------------------


def _plain(tools):
    return _stages(tools, lambda p, x, seed: _block(p, x))


def _saves_products(tools):
    return _stages(tools, lambda p, x, seed: _block(p, x), jax.checkpoint_policies.dots_saveable)


def _saves_names(tools):
    def block(p, x, seed):
        return x + checkpoint_name(jnp.tanh(x @ p["in"] + p["b"]), "hidden") @ p["out"]

    return _stages(tools, block, jax.checkpoint_policies.save_only_these_names("hidden"))


def _stacked(tools):
    mark = mpmd.mark_layer_end if tools.mark is mpmd.mark_stage_end else tools.mark

    def loss(params, batch):
        x, y = _rows(tools, batch)
        x, _ = jax.lax.scan(lambda x, p: (mark(jax.checkpoint(_block)(p, x)), None), x, params)
        return squared_error(x, y)

    return train(tools, loss)


def _scan_in_block(tools):
    """A recomputed scan over the layers of a stage, whose layers are recomputed too; a weight of all layers."""

    def block(p, x, seed):
        def layer(x, row):
            return jax.checkpoint(lambda x: x + jnp.tanh(x @ p["in"] + row) @ p["out"])(x), jnp.sum(x)

        x, sums = jax.lax.scan(layer, x, jnp.stack([p["b"], 2 * p["b"], -p["b"]]))
        return x, 1e-3 * jnp.sum(sums**2)

    return _stages(tools, block)


def _branches(tools):
    def block(p, x, seed):
        def one(x):
            return jnp.sin(x) @ p["in"]

        return x + jax.lax.cond(seed % 2 == 0, lambda x: jnp.tanh(x @ p["in"] + p["b"]) @ p["out"], one, x)

    return _stages(tools, block)


def _summed(tools):
    """A block in a `shard_map`: it subtracts the mean of all rows, and scales by a scalar sum."""

    def local(p, x, axis=None):
        def total(a):
            return a if axis is None else jax.lax.psum(a, axis)

        h = jnp.tanh(x @ p["in"] + p["b"])
        h = h - total(jnp.sum(h, 0)) / ROWS
        return x + h @ p["out"] / (1 + total(jnp.sum(h**2)))

    block = local
    if tools.mesh is not None:
        rows = P("data", None)
        block = jax.shard_map(
            functools.partial(local, axis="data"), mesh=tools.mesh, in_specs=(P(), rows), out_specs=rows
        )
    return _stages(tools, lambda p, x, seed: block(p, x))


def _branches_of_shards(tools):
    """A branch inside of a `shard_map`, on columns of the weights: its number is a scalar of each device."""

    def local(w, out, x, b):
        def first(x):
            return jnp.tanh(x @ w) @ out

        def other(x):
            return jnp.exp(-((x @ w) ** 2))[:, :2] @ out[:2]

        return jax.lax.cond(b[0] > 0, first, other, x)[None]

    def block(p, x, seed):
        halves = [slice(0, WIDTH // 2), slice(WIDTH // 2, None)]
        if tools.mesh is None:
            parts = jnp.concatenate([local(p["in"][:, h], p["out"][h], x, p["b"]) for h in halves])
        else:
            columns, rows = P(None, "data"), P("data", None)
            split = jax.shard_map(
                local, mesh=tools.mesh, in_specs=(columns, rows, P(), P()), out_specs=P("data"), check_vma=False
            )
            parts = split(tools.constrain(p["in"], *columns), tools.constrain(p["out"], *rows), x, p["b"])
        return tools.constrain(x + jnp.sum(parts, 0), None, None)

    return _stages(tools, block, rows=())


@jax.custom_vjp
def _clipped(h):
    return jnp.tanh(h)


_clipped.defvjp(lambda h: (jnp.tanh(h), h), lambda h, g: (jnp.clip(g, -0.01, 0.01) * (1 - jnp.tanh(h) ** 2),))


@jax.custom_vjp
def _product(w, x):
    return x @ w


def _product_backward(saved, g):
    w, x = saved
    return jax.linear_transpose(lambda w: x @ w, w)(g) + jax.linear_transpose(lambda x: x @ w, x)(0.9 * g)


_product.defvjp(lambda w, x: (x @ w, (w, x)), _product_backward)


def _custom(tools):
    def block(p, x, seed):
        return x + _product(p["out"], _clipped(_product(p["in"], x) + p["b"]))

    return _stages(tools, block)


def _dropout(tools):
    def block(p, x, seed):
        keys = jax.random.split(jax.random.key(seed))
        h = jnp.tanh(x @ p["in"] + p["b"])
        h = jnp.where(jax.random.bernoulli(keys[0], 0.7, h.shape), h / 0.7, 0)
        y = h @ p["out"]
        return x + jnp.where(jax.random.bernoulli(keys[1], 0.7, y.shape), y / 0.7, 0)

    return _stages(tools, block)


def _callbacks(tools):
    """In a loop over layers that nothing urgent of the first stage reads: the effects alone are urgent."""

    def block(p, x, seed):
        def layer(x, scale):
            jax.debug.callback(lambda value: None, scale)
            return x + jnp.tanh(x @ p["in"] + scale * p["b"]) @ p["out"], None

        return jax.lax.scan(layer, x, jnp.arange(3.0))[0]

    return _stages(tools, block)


def _carried(tools):
    """A loop carries weights: of the gradients that its backward carries, each is made of others."""

    def block(p, x, seed):
        def layer(carry, _):
            x, w = carry
            return (x + jnp.tanh(x @ w), w @ p["out"]), jnp.sum(x)

        (x, w), sums = jax.lax.scan(layer, (x, p["in"]), None, length=3)
        return x @ w, 1e-3 * jnp.sum(sums)

    return _stages(tools, block)


def _half_precision(tools):
    def block(p, x, seed):
        h = jnp.tanh(x.astype(jnp.bfloat16) @ p["in"] + p["b"])
        return x + (h @ p["out"]).astype(jnp.float32)

    return _stages(tools, block)


def _tied(tools):
    """The first weights are read by the last block too, in the other direction."""

    def loss(params, batch):
        x, y = _rows(tools, batch)
        for stage, p in enumerate(params):
            x = jax.checkpoint(_block)(p, x if stage == 0 else tools.mark(x))
        return squared_error(jax.checkpoint(lambda w, x: jnp.sin(x @ w.T) @ w)(params[0]["in"], x), y)

    return train(tools, loss)


def _routed(tools):
    def block(p, x, seed):
        gates = jax.nn.softmax(x @ p["b"][:, None] * jnp.array([1.0, -1.0]))
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 2)
        y = jnp.einsum("re,erd->rd", gates * chosen, jnp.stack([jnp.tanh(x @ p["in"]), jnp.tanh(x @ p["out"])]))
        return x + y, 0.1 * jnp.sum(jnp.mean(chosen, 0) * jnp.mean(gates, 0))

    return _stages(tools, block)


def _exits(tools):
    """Each stage has a head of its own beside the path."""

    def loss(params, batch):
        (x, y), extra = _rows(tools, batch), 0.0
        for stage, p in enumerate(params):
            x = jax.checkpoint(_block)(p, x if stage == 0 else tools.mark(x))
            extra += 0.1 * jax.checkpoint(lambda p, x, y: squared_error(jnp.tanh(x @ p["out"]) @ p["in"], y))(p, x, y)
        return squared_error(x, y) + extra

    return train(tools, loss)


def _momentum(make):
    return lambda num: lambda key: momentum_state(make(key, num))


_in_stages = _momentum(lambda key, num: [_weights(k) for k in jax.random.split(key, num)])
_in_stack = _momentum(lambda key, num: _weights(key, 2 * num))
_in_bfloat16 = _momentum(lambda key, num: jax.tree.map(jnp.bfloat16, [_weights(k) for k in jax.random.split(key, num)]))


@dataclasses.dataclass(frozen=True)
class _Case:
    """A step, how its state is made for a number of stages, and how exact it is."""

    build: Callable[[Tools], Callable[..., Any]]
    state: Callable[[int], Callable[[jax.Array], Any]] = _in_stages
    rtol: float = 2e-5

    @property
    def __name__(self):
        return self.build.__name__.strip("_")


CASES = [
    _Case(_callbacks), _Case(_carried), _Case(_plain), _Case(_saves_products), _Case(_saves_names),
    _Case(_stacked, _in_stack), _Case(_scan_in_block), _Case(_summed), _Case(_branches), _Case(_custom),
    _Case(_dropout), _Case(_half_precision, _in_bfloat16, rtol=2e-2), _Case(_tied), _Case(_routed), _Case(_exits),
    _Case(_branches_of_shards),
]  # fmt: skip
SCHEDULES = ("ZeroBubbleH1", "ZeroBubbleV", "DualPipeV", "KimiK2")


@functools.cache
def _program(case, axes, num_stages):
    name = case.build.__name__
    return Program(
        name, case.state(num_stages), _batch, case.build, num_stages=num_stages, mesh_axes=axes, rtol=case.rtol
    )


def _combinations() -> list:
    """All. One of the two that once had no variable for a result is quick; the other, and one of each step, are slow.

    They donate by turns.
    """
    found = []
    turns = in_turns(CASES, SCHEDULES, ("auto", "explicit"), [((),), (("data",),)], (False, True))
    for parameters in turns:
        case, schedule, where, axes, donate = parameters.values
        if case.build in (_summed, _branches_of_shards) and not axes:
            continue
        number = {_callbacks: (), _carried: ("data",)}.get(case.build)
        had_none = (schedule, where, axes, donate) == ("ZeroBubbleH1", "auto", number, True)
        in_turn = donate == bool(CASES.index(case) // len(SCHEDULES) % 2)
        others = not had_none and ("exhaustive" in [mark.name for mark in parameters.marks] or not in_turn)
        is_quick = had_none and case.build is _callbacks
        marks = () if is_quick else pytest.mark.exhaustive if others else pytest.mark.slow
        found.append(pytest.param(*parameters.values, id=parameters.id, marks=marks))
    return found


def _products(lowered):
    """Operations of matrix products of each stage, in all of its tasks for one microbatch; those of its `W`."""
    stages, later = collections.Counter(), collections.Counter()
    for task in lowered._outline.loops[0].partition.tasks:
        found = sum(work_of_equation(e).products for e in task.eqns)
        stages[task.place.stage] += found
        later[task.place.stage] += found * (task.place.kind == "W")
    return stages, later


def _tasks_with_collectives(step, *args):
    found = collectives(step.lower(*args).compile()._programs)
    counts = collections.Counter()
    for name, kinds in found.items():
        if name[0] in "FRIW" or (name[0] == "B" and "I" + name[1:] not in found):
            counts.update({(name[1:], kind): n for kind, n in kinds.items()})
    return counts


@pytest.mark.parametrize(("case", "schedule", "where", "axes", "donate"), _combinations())
def test_recomputed_blocks_under_split_backwards_equal_plain_jax_and_do_no_product_twice(
    case, schedule, where, axes, donate
):
    program = _program(case, axes, 2 if schedule == "ZeroBubbleH1" else 4)
    step = pipeline(program, schedule, where, donate_argnums=(0,) if donate else ())
    args = program.state(), next(program.batches(1))
    lowered = step.lower(*args)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*weight half.*")
        compiled = lowered.compile()
    assert "is empty" not in compiled.explain() and compiled.memory_analysis() and lowered.estimate()
    whole = pipeline(program, "OneFOneB", where)
    stages, later = _products(lowered)
    assert stages == _products(whole.lower(*args))[0] and all(later[s] for s in stages)
    assert_same_history(program.run(step), program.expected, program.rtol)
    if axes and schedule != "ZeroBubbleH1":  # as many sums in tasks as with a whole backward
        assert _tasks_with_collectives(step, *args) == _tasks_with_collectives(whole, *args)


@pytest.mark.parametrize("schedule", slow_first("ZeroBubbleV", "ZeroBubbleH1", "DualPipeV"))
def test_what_is_computed_again_runs_ahead_of_its_gradient_where_the_memory_allows(schedule, monkeypatch):
    program = _program(next(case for case in CASES if case.build is _plain), (), 4)
    args = program.state(), next(program.batches(1))

    def orders(lowered):
        return [task for order in lowered._outline.loops[0].orders for task in order]

    ahead = pipeline(program, schedule, "explicit")
    lowered = ahead.lower(*args)
    found = orders(lowered)
    assert {task.stage for task in found if task.kind == "R"} == {
        1,
        2,
    }  # the last one need not wait, the first has no I
    for task, *after in zip(found, found[1:], found[2:], strict=False):
        backwards = [task._replace(kind=kind) for kind in "IB"]
        assert task.kind != "R" or any(one in backwards for one in after)
    peak = max(of_group["peak"] for of_group in lowered.estimate().values())
    for limit, kinds in ((peak + 1.0, {"F", "I", "W", "R", "B"}), (peak - 1.0, {"F", "I", "W", "B"})):
        search = _Search(lambda *_: (pipeline(program, schedule, "explicit"), args), limit, None)  # as `tune`
        search.add(schedule, 4, {})
        assert {task.kind for task in orders(search.found[0].lowered)} | {"B"} == kinds
    monkeypatch.setattr("mpmd.stages.memory_limit", lambda *_: peak - 1.0)
    late = pipeline(program, schedule, "explicit")
    assert not any(task.kind == "R" for task in orders(late.lower(*args)))
    assert_same_history(program.run(ahead), program.run(late), 0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ZeroBubbleH1", "DualPipeV"])
def test_a_stage_without_an_early_part_runs_the_programs_of_those_that_have_it(schedule):
    def deep(tools):
        def block(p, x):
            for _ in range(12):
                x = x + 0.1 * jnp.tanh(x @ p["in"] + p["b"]) @ p["out"]
            return x

        def loss(params, batch):
            x, y = _rows(tools, batch)
            x = x * jnp.tanh(params["scale"])  # as an embedding: its gradient needs that of the first block's input
            for stage, p in enumerate(params["blocks"]):
                x = jax.checkpoint(block)(p, x if stage == 0 else tools.mark(x))
            return squared_error(x, y)

        return train(tools, loss)

    def state(num):
        make = _in_stages(num)
        return lambda key: momentum_state({"scale": normal(key, WIDTH), "blocks": make(key)["params"]})

    program = _program(_Case(deep, state), (), 4)
    step = pipeline(program, schedule, "auto")
    compiled = step.lower(program.state(), next(program.batches(1))).compile()
    programs = [d for d in compiled._programs.compiler._distinct.values() if d.parts is None]
    busy = [d.family for d in programs if any(work_of_equation(e).products for e in d.jaxpr.eqns)]
    assert sorted(busy) == ["F", "IWR", "IWR", "IWR"]
    assert_same_history(program.run(step), program.expected, program.rtol)
