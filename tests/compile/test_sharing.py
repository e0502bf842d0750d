"""A program that holds another one is cut into that one and what is around it."""

import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from programs import BY_NAME
from programs.parts import normal
from programs.pipelines import in_turns, make_mesh, pipeline
from programs.program import assert_same, host
from samples import slow_first

import mpmd
import scheduler
from mpmd import _jax_compat as compat
from mpmd._jax_compat import executables
from mpmd.compile.constants import WithConstants, with_constants
from mpmd.compile.repeats import LEAST, repeated_runs
from mpmd.compile.subprogram import Pattern, num_equations
from mpmd.compile.updates import apart, common_leaves
from mpmd.run.timing import made_last
from mpmd.tracing.inline import inline

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def layer(w, x):
    h = jnp.tanh(x @ w)
    return h, x + h


def _jaxpr(fun, *args):
    return jax.make_jaxpr(fun)(*args).jaxpr


def _cut(whole, inner):
    numbers: dict = {}
    return Pattern(whole, numbers).cut(Pattern(inner, numbers))


def _check(whole, inner):
    """Cuts, runs the pieces one after the other, the inner program as it is given, and compares with the whole."""
    cut = _cut(whole, inner)
    assert cut is not None
    rng = np.random.default_rng(0)
    args = [np.asarray(9 * rng.normal(size=v.aval.shape)).astype(v.aval.dtype) for v in whole.invars]
    expected = jax.core.eval_jaxpr(whole, [], *args)
    values = dict(zip(whole.invars, args, strict=True))
    for k, piece in enumerate(cut.pieces):
        closed = compat.make_jaxpr(piece.reads, piece.writes, piece.eqns, "piece")
        program = inner if k == cut.inner else closed.jaxpr
        results = jax.core.eval_jaxpr(program, [], *(values[v] for v in piece.reads))
        values.update(zip(piece.writes, results, strict=True))
    for v, value in zip(whole.outvars, expected, strict=True):
        np.testing.assert_array_equal(values[v], value)
    return cut


def _names(cut):
    return ["inner" if k == cut.inner else "other" for k in range(len(cut.pieces))]


def test_a_layer_behind_an_embedding():
    cut = _check(_jaxpr(lambda e, w, x: layer(w, jnp.sin(x) * e), X, X, X), _jaxpr(layer, X, X))
    assert _names(cut) == ["other", "inner"]


def test_a_layer_before_a_loss():
    def last(w, x, y):
        h, out = layer(w, x)
        return h, jnp.sum((out - jnp.cos(y)) ** 2)

    cut = _check(_jaxpr(last, X, X, X), _jaxpr(layer, X, X))
    assert _names(cut) == ["inner", "other"]


def test_a_layer_between_others():
    def all_of_it(w, x, y):
        h, out = layer(w, jnp.sin(x))
        return h, jnp.sum((out - y) ** 2)

    assert _names(_check(_jaxpr(all_of_it, X, X, X), _jaxpr(layer, X, X))) == ["other", "inner", "other"]


def test_one_of_two_layers_alike():
    def two(v, w, x):
        _, x = layer(v, x)
        return layer(w, x)

    assert len(_check(_jaxpr(two, X, X, X), _jaxpr(layer, X, X)).pieces) == 2


def test_a_layer_beside_something_else():
    assert len(_check(_jaxpr(lambda w, x, y: (*layer(w, x), jnp.sin(y)), X, X, X), _jaxpr(layer, X, X)).pieces) == 2


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(lambda w, x: (jnp.tanh(x @ w), jnp.sin(x + jnp.sin(x @ w))), id="another function"),
        pytest.param(lambda w, x: ((z := x @ w), (h := jnp.tanh(z)), x + h), id="a value from inside is read outside"),
        pytest.param(lambda w, x: (*layer(w, x), jnp.sin(x), x), id="an argument is handed on"),
        pytest.param(lambda w, x: (*layer(w, x), *[jnp.sin(x)] * 2), id="a result is given twice"),
        pytest.param(lambda w, x: layer(w.astype(jnp.bfloat16), jnp.sin(x).astype(jnp.bfloat16)), id="another type"),
    ],
)
def test_what_is_not_cut(whole):
    assert _cut(_jaxpr(whole, X, X), _jaxpr(layer, X, X)) is None


def test_nothing_may_stand_between_the_results_of_the_inner_program_and_its_arguments():
    def around(x, y):
        a = jnp.sin(x)
        return a, jnp.cos(y)

    def whole(x):
        a = jnp.sin(x)
        return jnp.exp(a), jnp.cos(jnp.tanh(a))

    assert _cut(_jaxpr(whole, X), _jaxpr(around, X, X)) is None


def test_results_with_much_above_them_tell_small_ones_alike_apart():
    def counters(a, b, c):
        return a + 1, jnp.where(b > 3, b + 1, 0), c + 1

    n = jax.ShapeDtypeStruct((), jnp.int32)
    inner = _jaxpr(counters, n, n, n)
    cut = _check(_jaxpr(lambda x, a, b, c: (jnp.sin(x), *counters(a, b, c)), X, n, n, n), inner)
    assert cut.is_independent


def test_pieces_with_a_common_value_are_not_independent():
    def scaled(s, w, x):
        return layer(s * w, s * x)

    def more(s, w, x, y):
        return *scaled(s, w, x), s * y

    def apart(s, w, x, y):
        return *scaled(s, w, x), y * y

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    inner = _jaxpr(scaled, scalar, X, X)
    assert not _check(_jaxpr(more, scalar, X, X, X), inner).is_independent

    def fed(s, w, x):
        return scaled(jnp.sin(s), w, x)

    assert _check(_jaxpr(apart, scalar, X, X, X), inner).is_independent
    assert not _check(_jaxpr(fed, scalar, X, X), inner).is_independent


def test_what_has_nothing_to_add_runs_the_inner_program_with_minus_zero():
    def backward(received, w, x):
        g = jnp.tanh(x @ w)
        return compat.ad.add_jaxvals(received, g), g @ w

    def without(w, x, y):
        g = jnp.tanh(jnp.sin(x) @ w)
        return g, g @ w, jnp.cos(y)

    inner = _jaxpr(backward, X, X, X)
    cut = _check(_jaxpr(without, X, X, X), inner)
    assert any(e.primitive.name == "broadcast_in_dim" for e in cut.pieces[0].eqns)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4))
def test_repeated_runs_are_equal_and_apart(sequences):
    taken = set()
    for runs in repeated_runs(sequences, [[LEAST] * len(s) for s in sequences]):
        assert len(runs) > 1 and len({tuple(sequences[k][i : i + n]) for k, i, n in runs}) == 1
        places = [(k, j) for k, i, n in runs for j in range(i, i + n)]
        assert taken.isdisjoint(places) and len(set(places)) == len(places)
        taken.update(places)


def test_programs_with_effects_stay_whole():
    def printing(x):
        jax.debug.print("{}", x[0, 0])
        return jnp.sin(x)

    inner = _jaxpr(printing, X)
    assert _cut(_jaxpr(lambda x: jnp.cos(printing(x)), X), inner) is None


def test_equations_of_inner_functions_count():
    def three_times(x):
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(jnp.cos(c)), x)

    assert num_equations(_jaxpr(three_times, X)) > 3


_OPERATIONS = {
    "add": jnp.add,
    "multiply": jnp.multiply,
    "sin": lambda a, b: jnp.sin(a),
    "tanh": lambda a, b: jnp.tanh(b),
}


@st.composite
def _programs(draw):
    """Random programs of few kinds of equations, and a run of their equations as the inner one."""
    num_args, num_eqns = draw(st.integers(1, 3)), draw(st.integers(2, 14))
    operations = draw(st.lists(st.sampled_from(list(_OPERATIONS)), min_size=num_eqns, max_size=num_eqns))
    operands = [
        (draw(st.integers(0, num_args + i - 1)), draw(st.integers(0, num_args + i - 1))) for i in range(num_eqns)
    ]

    def fun(*args):
        values = list(args)
        for operation, (a, b) in zip(operations, operands, strict=True):
            values.append(_OPERATIONS[operation](values[a], values[b]))
        return values[num_args:]

    jaxpr = _jaxpr(fun, *[X] * num_args)
    used = draw(st.sets(st.sampled_from(jaxpr.outvars), min_size=1))
    whole = compat.make_jaxpr(jaxpr.invars, [v for v in jaxpr.outvars if v in used], jaxpr.eqns, "whole").jaxpr
    begin = draw(st.integers(0, num_eqns - 1))
    eqns = whole.eqns[begin : draw(st.integers(begin + 1, num_eqns))]
    made = [v for e in eqns for v in e.outvars]
    others = [v for e in whole.eqns if e not in eqns for v in e.invars]
    reads = dict.fromkeys(v for e in eqns for v in e.invars if v not in made)
    writes = [v for v in made if v in used or v in others]
    inner = compat.make_jaxpr(list(reads), writes, eqns, "inner")
    return whole, compat.with_new_vars(inner).jaxpr


@settings(deadline=None, max_examples=150)
@given(_programs())
def test_random_programs_run_in_pieces_as_they_run_whole(programs):
    whole, inner = programs
    if _cut(whole, inner) is not None:
        _check(whole, inner)


# --- in a step ---


def _compiled_names(caplog, schedule, where):
    program = BY_NAME["deep"]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        pipeline(program, schedule, where).lower(program.state(), next(iter(program.batches()))).compile()
    texts = [record.getMessage() for record in caplog.records]
    return [m[1] for text in texts if (m := re.search(r"MLIR module conversion jit\((\w+)\)", text))]


@pytest.mark.parametrize("where", slow_first("auto", "explicit"))
def test_the_stages_of_a_deep_model_share_their_middle(caplog, where):
    names = [n for n in _compiled_names(caplog, "OneFOneB", where) if "_stage" in n]
    assert sorted(names) == [
        "step_stage0_B_after", "step_stage0_F_before", "step_stage1_F", "step_stage2_B",
        "step_stage3_B_before", "step_stage3_F_after",
    ]  # fmt: skip


@pytest.mark.slow
def test_fused_pairs_share_it_too(caplog, monkeypatch):
    """As on GPUs, where one program for two tasks is worth compiling."""
    monkeypatch.setattr("mpmd.compile.step.hides_communication", lambda mesh: True)
    names = _compiled_names(caplog, "DualPipeV", "auto")
    assert [n for n in names if re.fullmatch(r"step_stage\d_F(_before|_after)?", n)] == [
        "step_stage1_F", "step_stage3_F_after", "step_stage0_F_before",
    ]  # fmt: skip
    assert any(re.search(r"stage\d_[FB]_stage\d_[FB]", n) for n in names)
    assert not any(re.search(r"stage\d_[FB]_stage\d_[FB]_(before|after)", n) for n in names)


@pytest.mark.parametrize("where", slow_first("explicit", "auto"))
def test_a_schedule_of_halves_and_of_whole_backwards_compiles_the_halves_alone(caplog, where):
    names = _compiled_names(caplog, "DualPipeV", where)
    assert not any(re.search(r"stage\d_(B|[FBIW]_stage)", n) for n in names), names
    assert any("_I" in n for n in names) and any("_W" in n for n in names)


@pytest.mark.slow
def test_what_a_program_in_parts_tells_of_itself():
    program = BY_NAME["deep"]
    compiled = pipeline(program, "OneFOneB", "auto").lower(program.state(), next(iter(program.batches()))).compile()
    assert all(compiled.cost_analysis()[key] > 0 for key in ("flops", "bytes accessed"))
    assert all(m["temporaries"] > 0 and m["peak"] > m["arguments"] for m in compiled.memory_analysis().values())
    assert "executables" in str(compiled.explain())
    executor = compiled._executor
    divided = [b for b in executor.bindings.instructions if b.executable and b.executable.compiled.parts]
    made_in = [[b.executable.compiled.made_in(i) for i in range(len(b.writes))] for b in divided]
    assert any(made[0] < max(made) for made in made_in)
    for b, made in zip(divided, made_in, strict=True):  # a profile waits for what is made last
        assert made[made_last(b, executor._recorder._donated)] == max(made)


@pytest.mark.parametrize(("axis_type", "num_devices"), slow_first((AxisType.Explicit, 2), (AxisType.Auto, 1)))
def test_stages_of_two_and_of_three_layers_share_one(caplog, axis_type, num_devices):
    """A bias is common to all layers, which drop by keys of their own; the last layer gets no gradient of it to add."""

    def layer(w, x, bias, key):
        for i in range(25):
            x = jnp.sin(x * w[i % 4] + bias * x)
        return x + _dropped(key, x @ w)

    def step(params, batch):
        def loss(params, x, key):
            x = jnp.cos(x)
            for i, w in enumerate(params["layers"]):
                x = layer(w, x, params["bias"], jax.random.fold_in(key, i))
                x = mpmd.mark_stage_end(x) if i == 2 else x
            return jnp.mean(x * x)

        def gradients(microbatch):
            return jax.value_and_grad(loss)(params, *microbatch)

        value, grads = mpmd.treduce(gradients, batch, schedule=scheduler.OneFOneB(2))
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    params = {"layers": [0.1 * normal(jax.random.key(i), 8, 8) for i in range(5)], "bias": jnp.ones(8)}
    batch = normal(jax.random.key(5), 3, 4, 8), jax.random.split(jax.random.key(6), 3)
    expected = jax.jit(step)(jax.jit(step)(params, batch)[0], batch)
    mesh = jax.make_mesh((2, num_devices), ("stage", "data"), (axis_type, axis_type))
    jitted = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"), donate_argnums=0)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = jitted(jitted(jax.tree.map(jnp.copy, params), batch)[0], batch)
    assert_same(host(found), host(expected), rtol=1e-5)
    texts = [record.getMessage() for record in caplog.records]
    names = {m[1] for text in texts if (m := re.search(r"conversion jit\((step_stage\w+)\)", text))}
    for kind in "FB" if axis_type is AxisType.Auto else ():
        assert len([n for n in names if n.endswith(f"{kind}_block")]) == 1, names
        assert not any(n.endswith(kind) for n in names), names


# --- layers that differ in constants alone ---


def _dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def _layer_with_dropout(w, x, key):
    return x + _dropped(key, jnp.tanh(x @ w))


def _counter(mark, ws, x, key):
    """As the streams of Flax NNX: each key is made of a number, which is one more than the one before."""
    count = jnp.uint32(0)
    x = _dropped(jax.random.fold_in(key, count), jnp.sin(x))
    for w in ws:
        count += 1
        x = mark(_layer_with_dropout(w, x, jax.random.fold_in(key, count)))
    return x


def _rows(mark, ws, x, key):
    """Each layer has its row of the keys, and computes it in its checkpoint."""
    for i, w in enumerate(ws):
        layer = jax.checkpoint(lambda w, x, key, i=i: _layer_with_dropout(w, x, jax.random.split(key, 4)[i]))
        x = mark(layer(w, x, key)) if i < 3 else layer(w, x, key)
    return x


def _scanned(mark, ws, x, key):
    def body(x, layer):
        w, i = layer
        return mark(_layer_with_dropout(w, x, jax.random.fold_in(key, i))), None

    return jax.lax.scan(body, x, (jnp.stack(ws), jnp.arange(4)))[0]


def _rates(mark, ws, x, key):
    """Layers are divided by their number, and have a rate each (stochastic depth)."""

    def body(x, layer):
        w, i, rate = layer
        return mark(x + rate * jax.random.normal(key, x.shape) + jnp.tanh(x @ w) / (3.0 + i)), None

    return jax.lax.scan(body, x, (jnp.stack(ws), jnp.arange(4), jnp.linspace(0.0, 0.3, 4)))[0]


@pytest.mark.parametrize(
    ("model", "axis_type"),
    in_turns(
        [_scanned, _counter, _rates, _rows],
        [AxisType.Auto, AxisType.Explicit],
        slow=["_scanned", "_counter", "_rates", "_rows"],
    ),
)
def test_layers_that_differ_in_constants_alone_are_one_program(caplog, monkeypatch, model, axis_type):
    ws = [0.1 * normal(jax.random.key(i), 8, 8) for i in range(4)]
    batch = normal(jax.random.key(5), 3, 4, 8), jax.random.split(jax.random.key(6), 3)

    def step(ws, batch):
        def loss(ws, microbatch):
            x = model(mpmd.mark_layer_end, ws, *microbatch)
            return jnp.mean(x * x)

        return mpmd.treduce(lambda m: jax.value_and_grad(loss)(ws, m), batch, schedule=scheduler.OneFOneB(4))

    mesh = mpmd.MpmdMesh(make_mesh(4, axis_type), "stage")
    jitted = mpmd.jit(step, mpmd_mesh=mesh)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = jitted(ws, batch)
    names = [
        m[1] for r in caplog.records if (m := re.search(r"conversion jit\((step_stage\w+_F\w*)\)", r.getMessage()))
    ]
    assert len([n for n in names if not n.endswith(("_before", "_after"))]) == 1, names
    assert_same(host(found), host(jax.jit(step)(ws, batch)), rtol=1e-6)
    if model is _rates:  # floats are made of its constants
        monkeypatch.setattr("mpmd.compile.step.with_constants", lambda ps: [WithConstants(p, ()) for p in ps])
        assert_same(host(found), host(mpmd.jit(step, mpmd_mesh=mesh)(ws, batch)), rtol=0)


@pytest.mark.parametrize("axis_type", slow_first(AxisType.Auto, AxisType.Explicit))
def test_without_a_loop_too_equal_layers_are_one_program(axis_type):
    def init(key):
        keys = [jax.random.fold_in(key, i) for i in range(3)]
        layers = [{n: jax.random.uniform(jax.random.fold_in(k, j), (8, 8)) for j, n in enumerate("abc")} for k in keys]
        return [*layers[:-1], layers[-1] | {"head": jax.random.uniform(keys[0], (8, 2))}]

    def noisy(layers, key):
        return jax.tree.map(jnp.add, layers, init(key))

    mesh, key = mpmd.MpmdMesh(make_mesh(3, axis_type), "stage"), jax.random.key(0)
    layout = [mpmd.MpmdSharding(mesh, i, jax.P()) for i in range(3)]
    initialise = mpmd.jit(init, mpmd_mesh=mesh, out_shardings=layout).lower(key).compile()
    assert re.search(r": (\d+) compiled", initialise.explain())[1] == "2"  # a layer, and the head around it
    found, expected = initialise(key), jax.jit(init)(key)
    assert_same(host(found), host(expected), rtol=0)
    step = mpmd.jit(noisy, mpmd_mesh=mesh, donate_argnums=0)
    for _ in range(2):
        found, expected = step(found, key), jax.jit(noisy)(expected, key)
    assert_same(host(found), host(expected), rtol=0)


def test_a_constant_of_which_floats_are_made_stays():
    def scaled(i, x):
        return jnp.sin(x) / (1.0 + jax.lax.convert_element_type(jnp.int32(i), jnp.float32)) + jnp.cos(x)

    def row(i, x):
        return jnp.sin(x) + jax.lax.slice(x, (i, 0), (i + 1, 4))

    def with_key(i, key, x):
        return jax.random.fold_in(key, i), jnp.sin(x)

    def pair(fun, *args):
        jaxprs = [_jaxpr(functools.partial(fun, i), *args) for i in (1, 2)]
        return with_constants([compat.ClosedJaxpr(inline(j), ()) for j in jaxprs])

    for fun in (scaled, row):
        assert [found.constants for found in pair(fun, X)] == [(), ()]
    found = pair(with_key, jax.eval_shape(lambda: jax.random.key(0)), X)
    assert [f.constants for f in found] == [(1,), (2,)]
    assert compat.jaxpr_key(found[0].closed) == compat.jaxpr_key(found[1].closed)


# --- updates by leaves ---


def _update(scale, rates, grads, state):
    """Leaves are clipped and get a momentum each, in more equations than a call is worth."""
    factor = jnp.minimum(1.0, 1.0 / jnp.sqrt(scale)) * jnp.take(rates, 1)
    new = []
    for g, m in zip(grads, state, strict=True):
        m = 0.9 * m + factor * g
        for _ in range(LEAST):
            m = m + 0.1 * jnp.sin(m)
        new.append(m)
    return new


def _apart(num_leaves, *args, free=()):
    jaxpr = inline(_jaxpr(_update, jnp.float32(1), jnp.ones(3), *args))
    found = apart(jaxpr, lambda v: None, [jaxpr.invars[i] for i in free])
    assert found is not None and len(found.leaves) == num_leaves
    return jaxpr, found


def test_an_update_is_numbers_and_leaves():
    big = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    jaxpr, found = _apart(3, [big, X, big], [big, X, big], free=(5, 6, 7))
    assert not found.last.eqns and all(v.aval.shape == () for v in found.numbers.writes)
    assert [[found.leaves[i].piece.reads[k].aval.shape for k in found.leaves[i].donate] for i in range(3)] == [
        [(64, 64)], [(4, 4)], [(64, 64)],
    ]  # fmt: skip
    assert found.leaves[0].kind == found.leaves[2].kind != found.leaves[1].kind
    assert sum(len(p.eqns) for p in (found.numbers, *(leaf.piece for leaf in found.leaves))) == len(jaxpr.eqns)


def test_leaves_alike_are_called_with_what_they_have_in_common_once():
    big = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    updates = [_apart(n + 2, [big] * n + [X] * 2, [big] * n + [X] * 2)[1] for n in (1, 3)]
    left, (first, second) = common_leaves(updates, True)
    assert [[i.number for i in instances] for instances in (first, second)] == [[0, 1], [1, 1]]
    assert [len(instances[0].leaves) for instances in (first, second)] == [3, 1] and left == [[], []]
    for instance in (*first, *second):
        for leaf, takes in zip(instance.leaves, instance.takes, strict=True):
            assert [instance.piece.reads[i] for i in takes] == list(leaf.piece.reads)
        assert len(set(instance.piece.reads)) == len(instance.piece.reads)


def test_an_update_that_another_one_holds_is_no_call_more():
    """The other one is a call more: what they share is worth it, though it would not be worth two."""
    updates = []
    for n in (1, 2):
        leaves = [jax.ShapeDtypeStruct((size, size), jnp.float32) for size in range(64, 64 + n)]
        updates.append(_apart(n, leaves, leaves)[1])
    size = num_equations(updates[0].leaves[0].closed.jaxpr)
    assert size > LEAST
    for needed, is_shared in ((size - 1, True), (size, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mpmd.compile.updates.LEAST", needed)
            left, found = common_leaves(updates, True)
        assert [len(alone) for alone in left] == ([0, 1] if is_shared else [1, 2]) and len(found) == is_shared


@pytest.mark.slow
def test_an_update_of_leaves_alone_is_the_program_that_others_run(caplog):
    def moved(w, g):
        for _ in range(LEAST):
            w = w - 0.1 * jnp.sin(g)
        return w

    def step(ws, xs):
        def loss(ws, x):
            x = mpmd.mark_stage_end(jnp.tanh(x @ ws[0]))
            return jnp.mean((jnp.tanh(x @ ws[1]) @ ws[2]) ** 2)

        grads = mpmd.treduce(lambda x: jax.grad(loss)(ws, x), xs, schedule=scheduler.OneFOneB(2))
        return jax.tree.map(moved, ws, grads)

    ws, xs = [0.3 * jnp.ones((8, 8)), 0.3 * jnp.ones((8, 8)), jnp.ones((8, 3))], jnp.ones((3, 4, 8))
    jitted = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(make_mesh(2, AxisType.Auto), "stage"))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = jitted(ws, xs)
    assert_same(host(found), host(jax.jit(step)(ws, xs)), rtol=1e-6)
    names = {m[1] for r in caplog.records if (m := re.search(r"conversion jit\((step_after\w+)\)", r.getMessage()))}
    assert len(names) == 2 and "step_after_loop_group1_after" in names, names


@pytest.mark.parametrize("known", [True, False])
def test_zeros_are_compiled_without_kernels_of_mlir(monkeypatch, known):
    if not known:  # by another XLA
        monkeypatch.setattr(executables, "_QUICK_OPTIONS", {"xla_cpu_has_no_such_option": False})

    def step(ws, xs):
        return mpmd.treduce(
            lambda x: jax.grad(lambda ws: jnp.mean((x @ ws) ** 2))(ws), xs, schedule=scheduler.OneFOneB(1)
        )

    mesh = mpmd.MpmdMesh(make_mesh(1, AxisType.Auto), "stage")
    ws, xs = jnp.ones((8, 8)), jnp.ones((3, 4, 8))
    compiled = mpmd.jit(step, mpmd_mesh=mesh).lower(ws, xs).compile()
    texts = [zeros.call.as_text() for loop in compiled._programs.loops for zeros in loop.zeros.values()]
    try:
        jax.jit(lambda: 0).lower().compile(executables._QUICK_OPTIONS)
    except jax.errors.JaxRuntimeError:  # the XLA of newer releases: zeros are compiled as any program is
        known = False
    assert ["fusion(" in text for text in texts] == [not known]
    assert_same(host(compiled(ws, xs)), host(jax.jit(step)(ws, xs)), rtol=1e-6)


def test_leaves_that_need_a_number_of_all_of_them_are_no_parts():
    def clipped(grads):
        norm = sum(jnp.sum(g * g) for g in grads)
        return [g / norm for g in grads], norm

    def measured(grads):
        return [jnp.sin(g) for g in grads], sum(jnp.sum(g * g) for g in grads)

    big = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    assert apart(inline(_jaxpr(clipped, big)), lambda v: None, []) is None
    found = apart(inline(_jaxpr(measured, big)), lambda v: None, [])
    assert found is not None and [v.aval.shape for v in found.last.writes] == [()]


@pytest.mark.parametrize("axis_type", slow_first(AxisType.Explicit, AxisType.Auto))
def test_groups_with_more_leaves_run_the_update_of_the_others(caplog, axis_type):
    """In its second call the state is what the first one gave, whose memory it takes over."""

    def loss(params, x):
        x = x @ params["first"]
        for w in params["layers"]:
            x = mpmd.mark_stage_end(jnp.tanh(x @ w))
        return jnp.mean((x @ params["last"]) ** 2)

    def step(state, xs):
        params, moments = state
        grads = mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, schedule=scheduler.OneFOneB(4))
        scale = sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))
        flat, tree = jax.tree.flatten(grads)
        moments = jax.tree.unflatten(tree, _update(scale, jnp.full(3, 0.1), flat, jax.tree.leaves(moments)))
        return (jax.tree.map(jnp.subtract, params, moments), moments), scale

    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "first": normal(keys[0], 5, 8),
        "layers": [0.3 * normal(k, 8, 8) for k in keys[1:4]],
        "last": normal(keys[4], 8, 3),
    }
    state, xs = (params, jax.tree.map(jnp.zeros_like, params)), normal(keys[0], 3, 4, 5)
    expected = jax.jit(step)(jax.jit(step)(state, xs)[0], xs)
    mesh = mpmd.MpmdMesh(make_mesh(4, axis_type), "stage")
    jitted = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = jitted(jitted(jax.tree.map(jnp.copy, state), xs)[0], xs)
    assert_same(host(found), host(expected), rtol=1e-5)
    names = {m[1] for r in caplog.records if (m := re.search(r"conversion jit\((step_after\w+)\)", r.getMessage()))}
    assert len([n for n in names if n.endswith("_leaves")]) == 1, names


@pytest.mark.slow
def test_a_context_that_changes_the_numbers_makes_another_program():
    def loss(ws, x, key):
        for stage, w in enumerate(ws):
            with jax.threefry_partitionable(stage == 2):
                x = (x @ w) * jax.random.uniform(jax.random.fold_in(key, jnp.sum(x).astype(jnp.int32)), (4, 4))
            x = mpmd.mark_stage_end(x) if stage < 3 else x
        return jnp.sum(x)

    def step(ws, xs, key):
        return mpmd.treduce(lambda x: loss(ws, x, key), xs, schedule="1f1b")

    args = [jnp.eye(4) + 0.1] * 4, jnp.ones((4, 4, 4)), jax.random.key(1)
    mesh = mpmd.MpmdMesh(jax.make_mesh((4,), ("stage",)), "stage")
    np.testing.assert_allclose(mpmd.jit(step, mpmd_mesh=mesh)(*args), jax.jit(step)(*args), rtol=1e-6)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_key_that_a_function_within_has_from_outside_is_a_constant(implementation):
    key = jax.random.key(7, impl=implementation)
    noisy = jax.jit(lambda h: h + jax.random.normal(key, (4, 4)))

    def step(ws, xs):
        def loss(ws, x):
            return jnp.sum(noisy(mpmd.mark_stage_end(noisy(x @ ws[0])) @ ws[1]))

        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule="1f1b")

    ws, xs = [jnp.eye(4)] * 2, jnp.ones((4, 4, 4))
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    for got, want in zip(
        jax.tree.leaves(mpmd.jit(step, mpmd_mesh=mesh)(ws, xs)), jax.tree.leaves(jax.jit(step)(ws, xs)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_a_step_has_around_it_is_not_kept_when_the_step_is_gone():
    class Trainer:
        def __init__(self):
            self.rate = 2.0
            self.step = mpmd.jit(lambda xs: mpmd.mark_stage_end(xs * self.rate) + 1, mpmd_mesh=mesh)

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    trainer = Trainer()
    np.testing.assert_array_equal(trainer.step(jnp.ones(2)), [3, 3])
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
