"""Data parallel inside a group, written plainly: sums over its devices are done once a step, on any axes."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from programs.parts import WIDTH, normal, squared_error
from programs.pipelines import make_mesh
from programs.program import assert_same, host
from samples import slow_first

import mpmd
import scheduler
from mpmd.costs.collectives import Collective, collectives_of
from mpmd.report.explain import collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS, VOCABULARY, LAYERS = 4, 16, 2


def _put(x, *spec):
    """`x` sharded inside of a group; as it is under plain `jax.jit`."""
    types = jax.sharding.get_abstract_mesh().axis_types
    if not types or not any(spec):
        return x
    return jax.reshard(x, P(*spec)) if EXPLICIT in types else jax.lax.with_sharding_constraint(x, P(*spec))


def _dense(key):
    return {"w": normal(key, WIDTH, WIDTH, scale=0.3), "b": normal(key, WIDTH)}


# --- models ---------------------------------------------------------------------------------------


def _norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    # Adding a number has a reshard in its backward.
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * (1 + p["scale"]) + p["shift"]


def _language_params(key):
    keys = iter(jax.random.split(key, 8))
    stage = {
        "qkv": [normal(next(keys), LAYERS, WIDTH, WIDTH, scale=0.3) for _ in range(3)],
        "scale": jnp.ones((LAYERS, WIDTH)),
        "shift": jnp.zeros((LAYERS, WIDTH)),
    }
    return {"embedding": normal(next(keys), VOCABULARY, WIDTH), "stages": [stage] * 2}


def _language_loss(params, m):
    """A tied embedding, scanned and rematerialized layers, a weight made of three, a mask, and a penalty on weights."""
    tokens, mask = _put(m["tokens"], "data", None), _put(m["mask"], "data", None)
    x = jnp.take(params["embedding"], tokens, axis=0) if not _is_explicit() else _lookup(params["embedding"], tokens)

    @jax.checkpoint
    def layer(x, p):
        h = _norm(p, x) @ jnp.concatenate(p["qkv"], axis=1)
        q, k, v = jnp.split(h, 3, axis=-1)
        scores = jax.nn.softmax(jnp.einsum("bqe,bke->bqk", q, k))
        return x + jnp.einsum("bqk,bke->bqe", scores, v), None

    for index, stage in enumerate(params["stages"]):
        x, _ = jax.lax.scan(layer, x if index == 0 else mpmd.mark_stage_end(x), stage)
    logits = x @ params["embedding"].T
    picked = jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(tokens, VOCABULARY), -1)
    penalty = sum(jnp.sum(s["shift"] ** 2) + jnp.sum(s["scale"] ** 2) for s in params["stages"])
    return -jnp.mean(picked * mask) + 1e-2 * penalty


def _is_explicit():
    return EXPLICIT in jax.sharding.get_abstract_mesh().axis_types


def _lookup(table, tokens):
    return table.at[tokens].get(out_sharding=P("data", None, None))


def _language_batch(key):
    tokens = jax.random.randint(key, (4, ROWS, 6), 0, VOCABULARY)
    return {"tokens": tokens, "mask": (tokens != 3).astype(jnp.float32)}


def _image_loss(params, m):
    """Convolutions, and a recurrence whose weights' gradients the scan carries."""
    x = _put(m, "data", None, None, None)
    for index, p in enumerate(params):
        x = x if index == 0 else mpmd.mark_stage_end(x)
        numbers = ("NHWC", "HWIO", "NHWC")
        x = x + jnp.tanh(jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=numbers))
        x, _ = jax.lax.scan(lambda h, _, x=x, p=p: (jnp.tanh(h @ p["w"] + x), None), x, None, length=3)
    return jnp.mean((x - 1) ** 2)


def _image_params(key):
    keys = jax.random.split(key)
    return [{"kernel": normal(k, 3, 3, 4, 4, scale=0.2), "w": normal(k, 4, 4, scale=0.3)} for k in keys]


def _dense_loss(params, m, rows=("data",)):
    x = _put(m["x"], *rows, *[None] * (m["x"].ndim - len(rows)))
    for index, p in enumerate(params):
        x = x if index == 0 else mpmd.mark_stage_end(x)
        x = x + jnp.tanh(x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype))
    return squared_error(x, _put(m["y"], *rows, *[None] * (m["y"].ndim - len(rows))))


def _dense_case(num_stages=2, *shape):
    keys = jax.random.split(jax.random.key(0), num_stages + 2)
    shape = shape or (4, ROWS, WIDTH)
    return [_dense(k) for k in keys[2:]], {"x": normal(keys[0], *shape), "y": normal(keys[1], *shape)}


# --- a step on groups of several devices ----------------------------------------------------------


def _step(loss, schedule, operation=mpmd.Mean, gradients=jax.value_and_grad):
    def step(params, batch):
        value, grads = mpmd.treduce(lambda m: gradients(loss)(params, m), batch, schedule=schedule, operation=operation)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads), value

    return step


def _compiled(step, params, batch, mesh, **kwargs):
    return mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"), **kwargs).lower(params, batch).compile()


def _check(loss, params, batch, schedule, mesh, rtol=2e-5, **kwargs):
    """Numbers as under plain `jax.jit`; returns the collectives of the tasks and those around the loop."""
    compiled = _compiled(_step(loss, schedule), params, batch, mesh, **kwargs)
    expected = jax.jit(_step(loss, None))(params, batch)
    assert_same(host(compiled(params, batch)), host(expected), rtol)
    return _split(compiled)


def _split(compiled):
    found = collectives(compiled._programs)
    tasks = {name: count for name, count in found.items() if not name.startswith("segment")}
    return tasks, {name: count for name, count in found.items() if name.startswith("segment")}


MODELS = {
    "language": (_language_loss, _language_params, _language_batch),
    "image": (_image_loss, _image_params, lambda key: normal(key, 4, ROWS, 5, 5, 4)),
}


@pytest.mark.parametrize(
    ("model", "axis_type", "schedule"),
    [
        pytest.param("language", AUTO, scheduler.OneFOneB(2), marks=pytest.mark.exhaustive),
        pytest.param("language", EXPLICIT, scheduler.ZeroBubbleH1(2), marks=pytest.mark.slow),
        pytest.param("language", AUTO, scheduler.ZeroBubbleH1(2), marks=pytest.mark.exhaustive),
        pytest.param("language", EXPLICIT, scheduler.OneFOneB(2), marks=pytest.mark.exhaustive),
        pytest.param("image", AUTO, scheduler.GPipe(2), marks=pytest.mark.slow),
        pytest.param("image", EXPLICIT, scheduler.GPipe(2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_no_task_sums_over_devices(model, axis_type, schedule):
    loss, params, batch = MODELS[model]
    key = jax.random.key(1)
    tasks, around = _check(loss, params(key), batch(key), schedule, make_mesh(2, axis_type, ("data",)))
    assert not tasks, tasks
    assert len(around) == 2 and all(set(count) == {"all-reduce"} for count in around.values()), around


@pytest.mark.parametrize(
    ("schedule", "axis_type"),
    slow_first(
        (scheduler.InterleavedOneFOneB(4, 2), AUTO),
        (scheduler.ZeroBubbleV(2), EXPLICIT),
        (scheduler.InterleavedOneFOneB(4, 2), EXPLICIT),
        (scheduler.ZeroBubbleV(2), AUTO),
        num_slow=2,
    ),
    ids=str,
)
def test_no_task_sums_over_devices_with_several_stages_a_group(schedule, axis_type):
    tasks, _ = _check(_dense_loss, *_dense_case(4), schedule, make_mesh(2, axis_type, ("data",)))
    assert not tasks, tasks


@pytest.mark.slow
def test_rows_that_only_an_argument_says_are_found():
    batch_spec = {"x": P(None, "data"), "y": P(None, "data")}
    loss = lambda params, m: _dense_loss(params, m, ())  # noqa: E731
    tasks, _ = _check(
        loss, *_dense_case(), scheduler.OneFOneB(2), make_mesh(2, AUTO, ("data",)), in_shardings=(P(), batch_spec)
    )
    assert not tasks, tasks


@pytest.mark.parametrize("axis_type", slow_first(EXPLICIT, AUTO))
def test_rows_over_two_axes_are_summed_once(axis_type):
    """A batch over "data" and its sequence over "seq"."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "data", "seq"), axis_types=(axis_type,) * 3)
    loss = lambda params, m: _dense_loss(params, m, ("data", "seq"))  # noqa: E731
    tasks, around = _check(loss, *_dense_case(2, 4, ROWS, 6, WIDTH), scheduler.OneFOneB(2), mesh)
    assert not tasks and len(around) == 2, (tasks, around)


@pytest.mark.slow
def test_gradients_of_rows_that_a_scanned_layer_takes_apart_are_summed_once():
    def loss(params, m):
        x = _put(m["x"], "data", None)
        for index, p in enumerate(params):
            x = x if index == 0 else mpmd.mark_stage_end(x)
            x, _ = jax.lax.scan(lambda x, ws: (sum((jnp.tanh(x @ w) for w in jnp.unstack(ws)), x), None), x, p)
        return squared_error(x, _put(m["y"], "data", None))

    keys = jax.random.split(jax.random.key(2), 2)
    params, batch = [normal(k, 3, 2, WIDTH, WIDTH, scale=0.3) for k in keys], _dense_case()[1]
    tasks, _ = _check(loss, params, batch, scheduler.OneFOneB(2), make_mesh(2, EXPLICIT, ("data",)))
    assert not tasks, tasks


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_once():
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _dense_case())
    tasks, _ = _check(_dense_loss, params, batch, scheduler.OneFOneB(2), make_mesh(2, AUTO, ("data",)), rtol=2e-2)
    assert not tasks, tasks


@pytest.mark.slow
def test_a_gradient_that_is_clipped_for_each_microbatch_is_summed_for_each():
    def clipped(loss):
        def gradients(params, m):
            value, grads = jax.value_and_grad(loss)(params, m)
            return value, jax.tree.map(lambda g: g / jnp.maximum(1, 10 * jnp.linalg.norm(g)), grads)

        return gradients

    params, batch = _dense_case()
    steps = [_step(_dense_loss, s, gradients=clipped) for s in (scheduler.OneFOneB(2), None)]
    compiled = _compiled(steps[0], params, batch, make_mesh(2, AUTO, ("data",)))
    assert_same(host(compiled(params, batch)), host(jax.jit(steps[1])(params, batch)), 2e-5)
    tasks, _ = _split(compiled)
    assert set(tasks) == {"B0", "B1"}, tasks


@pytest.mark.slow
def test_the_gradient_of_a_sharded_parameter_stays_sharded():
    """Parts of it would take more memory on each device."""
    params, batch = _dense_case()
    specs = ([{"w": P("data"), "b": P()}] * 2, P(None, "data"))
    compiled = _compiled(
        _step(_dense_loss, scheduler.OneFOneB(2)), params, batch, make_mesh(2, AUTO, ("data",)), in_shardings=specs
    )
    accumulators = compiled._programs.outline.loops[0].partition.accumulators
    shapes = sorted(a.result.aval.shape for a in accumulators)
    assert shapes == [(2,), (2, WIDTH), (2, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)]
    expected = jax.jit(_step(_dense_loss, None))(params, batch)
    assert_same(host(compiled(params, batch)), host(expected), 2e-5)


@pytest.mark.parametrize(
    ("axis_type", "schedule"),
    slow_first((EXPLICIT, scheduler.OneFOneB(2)), (AUTO, scheduler.ZeroBubbleH1(2)), (AUTO, scheduler.OneFOneB(2))),
    ids=str,
)
def test_sharded_parameters_may_be_gathered_once_a_step(axis_type, schedule):
    """And their gradients be scattered once, by a line on either side of the loop."""
    params, batch = _dense_case()
    reshard = jax.reshard if axis_type == EXPLICIT else jax.lax.with_sharding_constraint

    def step(params, batch, schedule=schedule):
        def lie(tree, spec):
            return jax.tree.map(lambda x: reshard(x, spec) if schedule else x, tree)

        whole = lie(params, P())
        gradients = lambda m: jax.value_and_grad(_dense_loss)(whole, m)  # noqa: E731
        value, grads = mpmd.treduce(gradients, batch, schedule=schedule, operation=mpmd.Mean)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, lie(grads, P("data"))), value

    compiled = _compiled(
        step, params, batch, make_mesh(2, axis_type, ("data",)), in_shardings=(P("data"), P(None, "data"))
    )
    assert_same(host(compiled(params, batch)), host(jax.jit(lambda *args: step(*args, None))(params, batch)), 2e-5)
    tasks, around = _split(compiled)
    assert not tasks, tasks
    assert [set(count) for _, count in sorted(around.items())] == [{"all-gather"}] * 2 + [{"all-reduce"}] * 2, around
    assert all(leaf.sharding.spec == P("data") for leaf in jax.tree.leaves(compiled(params, batch)[0]))


def test_a_switch_sums_as_written_and_explain_shows_both():
    mesh, (params, batch) = make_mesh(2, AUTO, ("data",)), _dense_case()
    texts = {}
    for once in (True, False):
        compiled = _compiled(_step(_dense_loss, scheduler.OneFOneB(2), mpmd.Mean(once=once)), params, batch, mesh)
        texts[once] = compiled.explain()
        assert bool(_split(compiled)[0]) is not once
    assert "collectives a microbatch, in tasks: 3 all-reduce (F1 1" in texts[False], texts[False]
    assert "collectives a microbatch" not in texts[True] and "collectives a step, around" in texts[True], texts[True]


@pytest.mark.slow
def test_equal_stages_share_their_programs_as_before():
    mesh, (params, batch) = make_mesh(4, AUTO, ("data",)), _dense_case(4)
    lowered = [
        mpmd.jit(
            _step(_dense_loss, scheduler.OneFOneB(4), mpmd.Mean(once=once)), mpmd_mesh=mpmd.MpmdMesh(mesh, "stage")
        )
        .lower(params, batch)
        .compile()
        ._programs.compiler.num_compiled
        for once in (True, False)
    ]
    assert lowered[0] <= lowered[1] + 1, lowered


def test_an_operation_says_so():
    assert repr(mpmd.Add()) == "Add" and repr(mpmd.Mean(once=False)) == "Mean(once=False)"
    assert mpmd.Add(once=True) == mpmd.Add() != mpmd.Add(once=False)
    with pytest.raises(mpmd.StageError, match=r"^Add: once is 1\. Pass True or False\.$"):
        mpmd.Add(once=1)  # pyright: ignore[reportArgumentType]


_LENGTH_1 = (
    "replica", "data", ("replica", "data"), ("data", "replica"), ("one", "data"), ("data", "one"),
    ("replica", "data", "one"), ("data", "replica", "one"), ("replica", "one"),
)  # fmt: skip
_TYPES = ((AUTO,) * 4, (EXPLICIT,) * 4, (EXPLICIT, EXPLICIT, AUTO, EXPLICIT), (AUTO, AUTO, EXPLICIT, AUTO))
_SCHEDULES = (scheduler.OneFOneB(2), scheduler.GPipe(2), scheduler.ZeroBubbleH1(2))


def _specs_with_axes_of_length_1():
    """Rows, another axis of the batch, weights, axis types, where it is said, schedule: 240 cases, of which one is
    quick. Each pair of axis types and schedule has 20.
    """
    specs = itertools.product(_LENGTH_1, (None, "one", "replica"), (P(), P("one"), P(None, "one"), P("replica")))
    different = []
    for rows, other, weights in specs:
        named = [other, *([rows] if isinstance(rows, str) else rows), *(weights.partitions or ())]
        if not any(n is not None and named.count(n) > 1 for n in named):  # JAX refuses a product of such types
            different.append((rows, other, weights))
    cases = itertools.product(different, _TYPES, ("outside", "inside"))
    for number, ((rows, other, weights), types, where) in enumerate(cases):
        case = rows, other, weights, types, where, _SCHEDULES[number % 3]
        is_slow = number % 74 == 3
        mark = () if number == 81 else pytest.mark.slow if is_slow else pytest.mark.exhaustive
        yield pytest.param(*case, id=f"{rows}-{other}-{weights}-{number // 2 % 4}-{where}", marks=mark)


@pytest.fixture(scope="module")
def dense_without_a_pipeline():
    params, batch = _dense_case(2, 4, ROWS, 6, WIDTH)
    return params, batch, host(jax.jit(_step(lambda p, m: _dense_loss(p, m, ()), None))(params, batch))


def _said(x, spec):
    """`x` on the Explicit axes of a spec and on its Auto ones: JAX has a function for each."""
    types = dict(zip((mesh := jax.sharding.get_abstract_mesh()).axis_names, mesh.axis_types, strict=True))
    for axis_type, say in ((EXPLICIT, jax.reshard), (AUTO, jax.lax.with_sharding_constraint)):
        entries = [(e,) if isinstance(e, str) else e or () for e in spec]
        entries = [tuple(n for n in e if types[n] == axis_type) or None for e in entries]
        x = say(x, P(*entries)) if any(entries) else x
    return x


@pytest.mark.parametrize(
    ("rows", "other", "weights", "types", "where", "schedule"), list(_specs_with_axes_of_length_1())
)
def test_axes_of_length_1_in_specs_change_no_number(
    rows, other, weights, types, where, schedule, dense_without_a_pipeline
):
    params, batch, expected = dense_without_a_pipeline
    devices = np.array(jax.devices()[:4]).reshape(2, 1, 2, 1)
    mesh = Mesh(devices, ("stage", "replica", "data", "one"), axis_types=types)
    specs = [{"w": weights, "b": P()}] * 2, P(None, rows, other)

    def loss(params, m):
        assert jax.sharding.get_abstract_mesh().shape["stage"] == 1
        if where == "inside":
            params = [{"w": _said(p["w"], weights), "b": p["b"]} for p in params]
            m = jax.tree.map(lambda x: _said(x, P(rows, other)), m)
        return _dense_loss(params, m, ())

    said = {"in_shardings": specs} if where == "outside" else {}
    compiled = _compiled(_step(loss, schedule), params, batch, mesh, **said)
    assert_same(host(compiled(params, batch)), expected, 2e-5)
    if weights == P() and other is None:
        assert not _split(compiled)[0]


@pytest.mark.slow
def test_rows_on_auto_axes_and_columns_on_explicit_ones_are_summed_right():
    keys = jax.random.split(jax.random.key(3), 5)
    params = [
        {"up": normal(k, WIDTH, WIDTH), "down": normal(j, WIDTH, WIDTH)}
        for k, j in zip(keys[:2], keys[2:4], strict=True)
    ]
    batch = normal(keys[4], 4, ROWS, 6, WIDTH)

    def loss(params, x):
        for index, p in enumerate(params):
            x = x if index == 0 else mpmd.mark_stage_end(x)
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return jnp.mean(x**2)

    types = EXPLICIT, AUTO, EXPLICIT
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "data", "model"), axis_types=types)
    specs = [{"up": P(None, "model"), "down": P()}] * 2, P(None, "data")
    compiled = _compiled(_step(loss, scheduler.OneFOneB(2)), params, batch, mesh, in_shardings=specs)
    assert_same(host(compiled(params, batch)), host(jax.jit(_step(loss, None))(params, batch)), 2e-5)


REGIONS: dict[str, Callable] = {
    "sort": lambda h: h[jnp.argsort(h[:, 0])],
    "tanh": jnp.tanh,
    "batch norm": lambda h: (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 0.1),  # its gradient adds up sums over the rows
    "product over the rows": lambda h: h @ (h.T @ h) / 100,
}


@pytest.mark.parametrize("work", [pytest.param(w, marks=() if w == "tanh" else pytest.mark.slow) for w in REGIONS])
def test_sums_are_once_a_step_behind_a_region_of_auto_axes(work):
    inner = REGIONS[work]
    params, batch = _dense_case()

    def loss(p, m, region):
        h = mpmd.mark_stage_end(region(jnp.tanh(m["x"] @ p[0]["w"] + p[0]["b"])))
        return squared_error(region(h @ p[1]["w"] + p[1]["b"]), m["y"])

    region = jax.sharding.auto_axes(inner, out_sharding=P("data", None))
    step = _step(lambda p, m: loss(p, m, region), scheduler.OneFOneB(2))
    compiled = _compiled(step, params, batch, make_mesh(2, EXPLICIT, ("data",)), in_shardings=(P(), P(None, "data")))
    plain = jax.jit(_step(lambda p, m: loss(p, m, inner), None))
    assert_same(host(compiled(params, batch)), host(plain(params, batch)), 2e-5)


@pytest.mark.slow
def test_scalars_of_regions_of_auto_axes_cross_beside_those_of_explicit_axes():
    """A norm, and the same norm inside of a region, as an optimizer that clips computes it."""
    params, batch = _dense_case()
    norm = lambda tree: sum((x**2).sum() for x in jax.tree.leaves(tree))  # noqa: E731

    def step(params, batch, schedule, region):
        one = lambda m: jax.grad(lambda p: _dense_loss(p, m))(params)  # noqa: E731
        grads = mpmd.treduce(one, batch, schedule=schedule, operation=mpmd.Mean)
        return norm(grads), region(grads) * 2

    region = jax.sharding.auto_axes(norm, out_sharding=P())
    mesh = make_mesh(2, EXPLICIT, ("data",))
    pipelined = lambda p, b: step(p, b, scheduler.OneFOneB(2), region)  # noqa: E731
    compiled = _compiled(pipelined, params, batch, mesh, in_shardings=(P(), P(None, "data")))
    assert_same(host(compiled(params, batch)), host(jax.jit(lambda p, b: step(p, b, None, norm))(params, batch)), 2e-5)


# --- beside tensor parallelism ----------------------------------------------------------------------

HEADS, LENGTH = 4, 8
PARALLEL_SPECS = {
    "scale": P(), "q": P(None, "model", None), "k": P(None, "model", None), "v": P(None, "model", None),
    "o": P("model", None, None), "up": P(None, "model"), "bias": P("model"), "down": P("model", None),
}  # fmt: skip


def _parallel_case(scanned):
    """Two stages of a layer, or of two in a scan: attention, and a branch of two matrices, behind a tied embedding."""
    keys = iter(jax.random.split(jax.random.key(5), 40))
    size = WIDTH // HEADS

    def layer():
        heads = {n: normal(next(keys), WIDTH, HEADS, size, scale=0.2) for n in "qkv"}
        o, down = normal(next(keys), HEADS, size, WIDTH, scale=0.2), normal(next(keys), 3 * WIDTH, WIDTH, scale=0.2)
        up, ones, zeros = normal(next(keys), WIDTH, 3 * WIDTH, scale=0.2), jnp.ones(WIDTH), jnp.zeros(3 * WIDTH)
        return {**heads, "o": o, "down": down, "up": up, "scale": ones, "bias": zeros}

    stages = [[layer() for _ in range(1 + scanned)] for _ in range(2)]
    specs = [[PARALLEL_SPECS]] * 2
    if scanned:
        stages = [jax.tree.map(lambda *xs: jnp.stack(xs), *layers) for layers in stages]
        specs = [{name: P(None, *spec) for name, spec in PARALLEL_SPECS.items()}] * 2
    params = {"table": normal(next(keys), 2 * VOCABULARY, WIDTH), "stages": stages}
    batch = jax.random.randint(next(keys), (4, ROWS, LENGTH), 0, 2 * VOCABULARY)
    return params, batch, ({"table": P("model", None), "stages": specs}, P(None, "data"))


def _parallel_loss(params, tokens, sequence, scanned):
    """As Megatron shards it; `sequence` is the mesh axis of the sequence between the blocks."""

    def between(x):
        return _put(x, "data", sequence, None)

    def normed(p, x):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"]
        return _put(h, "data", None, None) if sequence else h

    def layer(x, p):
        h = normed(p, x)
        q, k, v = (_put(jnp.einsum("btd,dhk->bthk", h, p[n]), "data", None, "model", None) for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
        h = _put(jnp.einsum("bhqt,bthk->bqhk", weights, v), "data", None, "model", None)
        x = x + between(jnp.einsum("bthk,hkd->btd", h, p["o"]))
        h = _put(jax.nn.gelu(normed(p, x) @ p["up"] + p["bias"]), "data", None, "model")
        return x + between(h @ p["down"]), None

    x = between(jnp.take(params["table"], _put(tokens, "data", None), axis=0))
    for index, stage in enumerate(params["stages"]):
        x = x if index == 0 else mpmd.mark_stage_end(x)
        if scanned:
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, stage)
        else:
            for p in stage:
                x, _ = layer(x, p)
    logits = _put(_put(x, "data", None, None) @ params["table"].T, "data", None, "model")
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(tokens, 2 * VOCABULARY), -1))


def _across_rows(compiled) -> dict[str, list[Collective]]:
    """The collectives of the tasks among devices that have other rows: neighbours in a group of four have the same."""
    (loop,) = compiled._programs.loops
    found = {place: collectives_of(e.call.as_text(), 4, [0, 0, 1, 1]) for place, e in loop.executables.items()}
    return {str(place): far for place, all_ in found.items() if (far := [c for c in all_ if c.num_hosts > 1])}


@pytest.mark.parametrize(
    ("sequence", "scanned", "schedule"),
    [
        pytest.param("model", False, scheduler.OneFOneB(2), marks=pytest.mark.exhaustive),
        pytest.param("model", True, scheduler.OneFOneB(2), marks=pytest.mark.slow),
        pytest.param("model", True, scheduler.ZeroBubbleH1(2), marks=pytest.mark.exhaustive),
        pytest.param(None, False, scheduler.GPipe(2), marks=pytest.mark.exhaustive),
        pytest.param(None, True, scheduler.ZeroBubbleH1(2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_no_task_sums_over_rows_beside_tensor_parallelism(sequence, scanned, schedule):
    params, batch, specs = _parallel_case(scanned)
    loss = lambda params, m: _parallel_loss(params, m, sequence, scanned)  # noqa: E731
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "data", "model"))
    compiled = _compiled(_step(loss, schedule), params, batch, mesh, in_shardings=specs)
    assert_same(host(compiled(params, batch)), host(jax.jit(_step(loss, None))(params, batch)), 5e-5)
    assert not _across_rows(compiled), _across_rows(compiled)
    if not scanned and not sequence:
        written = _compiled(_step(loss, schedule, mpmd.Mean(once=False)), params, batch, mesh, in_shardings=specs)
        assert _across_rows(written)


@pytest.mark.parametrize(
    "kind, operation",
    [
        (AUTO, mpmd.Max),
        (EXPLICIT, mpmd.Concat),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((AUTO, mpmd.Concat), (EXPLICIT, mpmd.Max))),
    ],
    ids=str,
)
def test_a_value_that_is_a_term_of_a_sum_and_reduced_otherwise_is_whole(kind, operation):
    """An auxiliary loss that is logged too: its parts would do for the sum alone."""

    def loss(w, x):
        aux = jnp.mean((_put(x, "data", None) @ w) ** 2)
        return aux + jnp.mean(jnp.tanh(x @ w)), aux

    def step(w, xs):
        return mpmd.treduce(lambda x: loss(w, x), xs, schedule="1f1b", operation=(mpmd.Add, operation))

    mesh = mpmd.MpmdMesh(jax.make_mesh((1, 2), ("stage", "data"), axis_types=(kind,) * 2), "stage")
    w, xs = normal(jax.random.key(0), WIDTH, WIDTH), normal(jax.random.key(1), 3, ROWS, WIDTH)
    got = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(None, P(None, "data")))(w, xs)
    for a, b in zip(got, jax.jit(step)(w, xs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_products_of_booleans_are_whole():
    def step(w, xs):
        def fun(x):
            fires = mpmd.mark_stage_end(x @ w) @ w > 0
            return jnp.sum(x), fires.T @ fires

        return mpmd.treduce(fun, xs, schedule="1f1b")

    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AUTO,) * 2), "stage")
    w, xs = normal(jax.random.key(0), WIDTH, WIDTH), normal(jax.random.key(1), 3, ROWS, WIDTH)
    got = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(None, P(None, "data")))(w, xs)
    np.testing.assert_array_equal(got[1], jax.jit(step)(w, xs)[1])


@pytest.mark.parametrize(
    "narrow",
    [
        lambda h: (1000 * h).sum(0).astype(jnp.float16),
        pytest.param(lambda h: h.astype(jnp.uint8).sum(0, dtype=jnp.uint8).astype(jnp.float32), marks=pytest.mark.slow),
        pytest.param(lambda h: h.astype(jnp.int8).sum(0, dtype=jnp.int8), marks=pytest.mark.slow),
    ],
)
def test_sums_over_rows_that_are_cast_to_a_smaller_range_are_whole_before(narrow):
    def step(w, xs):
        def fun(x):
            h = mpmd.mark_stage_end(x @ w)
            return (h**2).mean(), narrow(h)

        return mpmd.treduce(fun, xs, schedule="1f1b", operation=(mpmd.Add, mpmd.Mean))

    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AUTO,) * 2), "stage")
    xs = jnp.concatenate([jnp.full((3, 4, WIDTH), 60.0), jnp.full((3, 4, WIDTH), -59.0)], 1)
    got = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(None, P(None, "data")))(jnp.eye(WIDTH), xs)
    np.testing.assert_array_equal(got[1], jax.jit(step)(jnp.eye(WIDTH), xs)[1])
