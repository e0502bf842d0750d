"""Parallelism inside of a stage: sharded parameters, sequences and experts, rings, and collectives by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import BY_NAME
from programs.parts import WIDTH, dense_params, momentum_state, normal, residual, squared_error, train
from programs.pipelines import in_turns, pipeline
from programs.program import Program, assert_same_history, host, pipelined
from samples import slow_first

import mpmd
import scheduler

ROWS = LENGTH = 4
RUNS = [("OneFOneB", "auto"), ("ZeroBubbleH1", "explicit")]


def check(program, schedule, where, **options):
    history = program.run(pipeline(program, schedule, where, **options), 2)
    assert_same_history(history, program.expected[:2], program.rtol)


def _rows(key):
    x, y = jax.random.split(key)
    return {"x": normal(x, 4, ROWS, WIDTH), "y": normal(y, 4, ROWS, WIDTH)}


def _sequences(key):
    x, y = jax.random.split(key)
    return {"x": normal(x, 4, 2, LENGTH, WIDTH), "y": normal(y, 4, 2, LENGTH, WIDTH)}


def _layers(key):
    return momentum_state([dense_params(k) for k in jax.random.split(key, 2)])


def _train_stages(tools, apply, spec):
    """Two stages of `apply(params, x)` on activations that are sharded by `spec`; it may return an extra loss."""

    def loss(params, microbatch):
        x, extra = tools.constrain(microbatch["x"], *spec), 0.0
        for stage, p in enumerate(params):
            x = apply(p, x if stage == 0 else tools.mark(x))
            if isinstance(x, tuple):
                x, more = x
                extra += more
        return squared_error(x, tools.constrain(microbatch["y"], *spec)) + extra

    return train(tools, loss)


# --- FSDP and sequences ---------------------------------------------------------------------------


def _fsdp(tools):
    """Parameters and momentum live in shards; a stage gathers a matrix to use it, and scatters its gradient."""

    def apply(p, x):
        return residual({name: tools.constrain(a, *(None,) * a.ndim) for name, a in p.items()}, x)

    return _train_stages(tools, apply, ("data", None))


_SHARDED_LAYER = {"w": P("data", None), "b": P("data")}
_FSDP_SPECS = (
    {"params": [_SHARDED_LAYER] * 2, "momentum": [_SHARDED_LAYER] * 2, "step": P()},
    {"x": P(None, "data", None), "y": P(None, "data", None)},
)


def _attention(q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5
    mask = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)


def _sequence(tools):
    """Norm and MLP work on shards of the sequence; attention gathers it."""

    def apply(p, x):
        whole = tools.constrain(x, None, None, None)
        x = x + tools.constrain(_attention(whole @ p["w"], whole, whole), None, "data", None)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x + jnp.tanh(x @ p["w"] + p["b"])

    return _train_stages(tools, apply, (None, "data", None))


def _ring(tools):
    """Ring attention: keys and values travel around the data axis, with a running softmax."""

    def ring(q, k, v):
        size, me = jax.lax.axis_size("data"), jax.lax.axis_index("data")
        steps = q.shape[1]

        def turn(carry, step):
            k, v, top, total, out = carry
            scores = jnp.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5
            mine = me * steps + jnp.arange(steps)[:, None]
            theirs = ((me - step) % size) * steps + jnp.arange(steps)
            scores = jnp.where(mine >= theirs, scores, -1e9)
            new = jnp.maximum(top, scores.max(-1))
            weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            total = total * scale + weights.sum(-1)
            out = out * scale[..., None] + jnp.einsum("bqk,bkd->bqd", weights, v)
            around = [(i, (i + 1) % size) for i in range(size)]
            k, v = jax.lax.ppermute((k, v), "data", around)
            return (k, v, new, total, out), None

        start = (k, v, jnp.full_like(q[..., 0], -1e30), jnp.zeros_like(q[..., 0]), jnp.zeros_like(q))
        (_, _, _, total, out), _ = jax.lax.scan(turn, start, jnp.arange(size))
        return out / total[..., None]

    spec = P(None, "data", None)
    attend = _attention if tools.mesh is None else jax.shard_map(ring, mesh=tools.mesh, in_specs=spec, out_specs=spec)
    return _train_stages(tools, lambda p, x: x + attend(x @ p["w"], x, jnp.tanh(x + p["b"])), (None, "data", None))


# --- experts --------------------------------------------------------------------------------------


def _experts_state(key):
    def one(key):
        r, w = jax.random.split(key)
        return {"router": normal(r, WIDTH, 2), "experts": normal(w, 2, WIDTH, WIDTH, scale=0.4)}

    return momentum_state([one(k) for k in jax.random.split(key, 2)])


def _routed(p, x):
    """Gate and chosen expert of each row, and the two averages of the balancing loss."""
    probabilities = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), 2)
    return chosen, jnp.sum(probabilities * chosen, -1), jnp.mean(chosen, 0), jnp.mean(probabilities, 0)


def _experts(tools):
    """Each device has one expert: rows travel to theirs and back by `all_to_all`; an auxiliary loss balances them."""

    def local(p, x):
        chosen, gate, load, importance = _routed(p, x)
        sent = jnp.einsum("re,rd->erd", chosen, x)  # a slot for every row: nothing is dropped
        there = jax.lax.all_to_all(sent, "data", split_axis=0, concat_axis=1, tiled=True)
        done = jnp.tanh(there @ p["experts"])
        back = jax.lax.all_to_all(done, "data", split_axis=1, concat_axis=0, tiled=True)
        y = jnp.einsum("erd,re,r->rd", back, chosen, gate)
        return x + y, jnp.sum(jax.lax.pmean(load, "data") * jax.lax.pmean(importance, "data"))

    def plain(p, x):
        chosen, gate, load, importance = _routed(p, x)
        y = jnp.einsum("re,r,erd->rd", chosen, gate, jnp.tanh(jnp.einsum("rd,edf->erf", x, p["experts"])))
        return x + y, jnp.sum(load * importance)

    if tools.mesh is None:
        return _train_stages(tools, plain, ())
    specs = {"router": P(), "experts": P("data")}
    split = jax.shard_map(local, mesh=tools.mesh, in_specs=(specs, P("data", None)), out_specs=(P("data", None), P()))

    def apply(p, x):
        p = {"router": p["router"], "experts": tools.constrain(p["experts"], "data", None, None)}
        return split(p, x)

    return _train_stages(tools, apply, ("data", None))


# --- collectives by hand --------------------------------------------------------------------------


def _averaged_by_hand(tools):
    """The loss is a `pmean` of each device's, inside `shard_map`; statistics of the batch are a `psum`."""

    def normalised(x, axis=None):
        total, count = jnp.sum(x, 0), x.shape[0]
        if axis is not None:
            total, count = jax.lax.psum(total, axis), count * jax.lax.axis_size(axis)
        return x - total / count

    def loss(params, microbatch):
        split = jax.shard_map if tools.mesh is not None else None

        def stage(p, x, axis=None):
            return normalised(residual(p, x), axis)

        def error(x, y, axis=None):
            value = squared_error(x, y)
            return value if axis is None else jax.lax.pmean(value, axis)

        x, y = (tools.constrain(microbatch[name], "data", None) for name in "xy")
        for number, p in enumerate(params):
            x = x if number == 0 else tools.mark(x)
            if split is None:
                x = stage(p, x)
            else:
                x = split(
                    functools.partial(stage, axis="data"), in_specs=(P(), P("data", None)), out_specs=P("data", None)
                )(p, x)
        if split is None:
            return error(x, y)
        rows = P("data", None)
        return split(functools.partial(error, axis="data"), in_specs=(rows, rows), out_specs=P())(x, y)

    return train(tools, loss)


def _gradients_inside(tools):
    """A stage whose own forward is a gradient that is taken inside of `shard_map`."""

    def local(p, x):
        def energy(x):
            return jax.lax.psum(jnp.sum(jax.nn.softplus(x @ p["w"] + p["b"])), "data")

        return x - 0.2 * jax.grad(energy)(x)

    def plain(p, x):
        return x - 0.2 * jax.grad(lambda x: jnp.sum(jax.nn.softplus(x @ p["w"] + p["b"])))(x)

    if tools.mesh is None:
        return _train_stages(tools, plain, ())
    rows = P("data", None)
    apply = jax.shard_map(local, mesh=tools.mesh, in_specs=(P(), rows), out_specs=rows)
    return _train_stages(tools, apply, rows)


def _two_axes(tools):
    """Rows over "data" by the compiler, hidden units over "model" by hand: `shard_map` over one of two axes."""

    def local(w, b, x):
        return jax.lax.psum(jnp.tanh(x @ w + b) @ w.T, "model")

    if tools.mesh is None:
        return _train_stages(tools, lambda p, x: x + jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T, ())
    split = jax.shard_map(local, axis_names={"model"}, in_specs=(P(None, "model"), P("model"), P()), out_specs=P())

    def apply(p, x):
        return x + split(tools.constrain(p["w"], None, "model"), tools.constrain(p["b"], "model"), x)

    return _train_stages(tools, apply, ("data", None))


def _many_collectives(tools):
    """Collectives that the other programs do not have: untiled gathers, exchanges, maxima over two axes."""
    both = ("data", "model")

    def local(w, x):
        h = jnp.tanh(x @ w)
        everything = jax.lax.all_gather(h, "data")  # an axis of devices in front
        swapped = jax.lax.pswapaxes(jnp.stack([h, 2 * h]), "data", 0)
        everywhere = jax.lax.pcast(jax.lax.stop_gradient(h), "model", to="varying")
        top = jax.lax.pmax(jnp.abs(everywhere), both).max()
        low = jax.lax.pmin(everywhere, both).min()
        total = jax.lax.psum(jnp.sum(h**2), "data")
        size = jax.lax.axis_size("data") * jax.lax.axis_size("model")
        mine = jax.lax.pcast(jnp.float32(1.0), "data", to="varying") * (1.0 + jax.lax.axis_index("data"))
        return x + mine * (h + everything.mean(0) + swapped.sum(0)) / (1.0 + top - low) + total / (100.0 * size)

    def plain(w, x):
        h = jnp.tanh(x @ w)
        a, b = h[: ROWS // 2], h[ROWS // 2 :]
        top, low = jax.lax.stop_gradient((jnp.abs(h).max(), h.min()))
        first = a + (a + b) / 2 + (a + b)
        second = b + (a + b) / 2 + 2 * (a + b)
        mixed = jnp.concatenate([first, 2.0 * second])
        return x + mixed / (1.0 + top - low) + jnp.sum(h**2) / 400.0

    if tools.mesh is None:
        return _train_stages(tools, lambda p, x: plain(p["w"], x), ())
    rows = P("data", None)
    split = jax.shard_map(local, mesh=tools.mesh, in_specs=(P(), rows), out_specs=rows)
    return _train_stages(tools, lambda p, x: split(p["w"], x), rows)


_program = functools.partial(Program, num_stages=2, mesh_axes=("data",))
PROGRAMS = [
    _program("fsdp", _layers, _rows, _fsdp, specs=_FSDP_SPECS),
    _program("sequence_parallel", _layers, _sequences, _sequence),
    _program("ring_attention", _layers, _sequences, _ring),
    _program("experts", _experts_state, _rows, _experts),
    _program("psum_and_pmean", _layers, _rows, _averaged_by_hand),
    _program("gradients_inside_shard_map", _layers, _rows, _gradients_inside),
    Program("many_collectives", _layers, _rows, _many_collectives, num_stages=2, mesh_axes=("data", "model")),
    Program("partial_manual_of_two_axes", _layers, _rows, _two_axes, num_stages=2, mesh_axes=("data", "model")),
]


# The slower of two that are alike: experts of a model are in `tests/models`, and a ring is a sequence in parts.
_SLOW = (
    "sequence_parallel", "experts", "ring_attention", "partial_manual_of_two_axes", "many_collectives",
    "gradients_inside_shard_map",
)  # fmt: skip


@pytest.mark.parametrize(("program", "schedule", "where"), in_turns(PROGRAMS, RUNS, slow=_SLOW))
def test_a_sharded_stage_equals_plain_jax(program, schedule, where):
    check(program, schedule, where)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [scheduler.OneFOneB(4), pytest.param(scheduler.ZeroBubbleH1(4), marks=pytest.mark.exhaustive)], ids=str
)
def test_a_step_may_be_called_with_the_whole_mesh_set(schedule):
    program = BY_NAME["shard_map_without_a_mesh"]
    mesh = jax.make_mesh((4, 2), ("stage", "data"), (AxisType.Auto,) * 2)
    step = mpmd.jit(program.build(pipelined(schedule, mesh)), mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))
    with jax.set_mesh(mesh):
        assert_same_history(program.run(step, 2), program.expected[:2], program.rtol)


@pytest.mark.parametrize("schedule", slow_first(scheduler.ZeroBubbleH1(2), scheduler.OneFOneB(2)), ids=str)
def test_a_mesh_with_auto_and_explicit_axes(schedule):
    """The pipeline's axis and "model" are Auto, "data" is Explicit."""
    types = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "model"), types)

    def step_with(tools):
        def apply(p, x):
            if tools.mesh is None:
                return residual(p, x)
            h = jax.lax.with_sharding_constraint(p["w"], P(None, "model"))
            return x + jnp.tanh(x @ h + p["b"])

        def loss(params, m):
            x = m["x"] if tools.mesh is None else jax.reshard(m["x"], P("data", None))
            y = m["y"] if tools.mesh is None else jax.reshard(m["y"], P("data", None))
            x = apply(params[0], x)
            assert tools.mesh is None or jax.typeof(x).sharding.spec[0] == "data"
            return squared_error(apply(params[1], tools.mark(x)), y)

        return train(tools, loss)

    program = Program("mixed", _layers, _rows, step_with, num_stages=2)
    step = mpmd.jit(step_with(pipelined(schedule, mesh)), mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))
    assert_same_history(program.run(step, 2), program.expected[:2], program.rtol)


def test_state_in_shards_stays_in_shards_through_fsdp():
    program = PROGRAMS[0]
    step = pipeline(program, "OneFOneB", "auto")
    state, _ = step(program.state(), next(program.batches(1)))
    for layer, group in zip(state["params"], (0, 1), strict=True):
        assert layer["w"].mpmd_idxs == (group,)
        assert layer["w"].spec == P("data")
        assert [s.data.shape for s in layer["w"].addressable_shards] == [(WIDTH // 2, WIDTH)] * 2
    assert np.isfinite(host(state)["params"][0]["w"]).all()
    assert isinstance(state["params"][0]["w"].to_mpmd_local_array.sharding, NamedSharding)


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_outputs_are_stacked_on_a_mesh_with_auto_and_explicit_axes(spec):
    types = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2, 2), ("stage", "data", "model"), types), "stage")

    @mpmd.jit(mpmd_mesh=mesh)
    def step(p, xs):
        def one(x):
            return mpmd.mark_stage_end(jax.reshard(x, spec) * p) + 1

        return mpmd.treduce(one, xs, schedule=scheduler.OneFOneB(2), operation=mpmd.Concat)

    for seed in range(2):
        xs = normal(jax.random.key(seed), 4, 4, WIDTH)
        assert_same_history([host(step(jnp.ones(WIDTH), xs))], [host(xs + 1)], 2e-5)


@pytest.mark.slow
def test_a_state_that_comes_from_the_host_into_given_shardings_compiles_once():
    types = (AxisType.Explicit,) * 2
    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), types), "stage")

    def step(params, xs):
        def loss(params, x):
            x = mpmd.mark_stage_end(jnp.tanh(x @ jax.reshard(params[0], P())))
            return jnp.mean((x @ jax.reshard(params[1], P())) ** 2)

        grads = mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, schedule=scheduler.OneFOneB(2))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    jitted = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(P("data"), None))
    params = [np.eye(WIDTH, dtype=np.float32)] * 2
    for seed in range(3):
        params = jitted(params, normal(jax.random.key(seed), 2, ROWS, WIDTH))
    assert len(jitted._cache) == 1
    assert all(p.mpmd_sharding.spec == P("data") for p in params)
