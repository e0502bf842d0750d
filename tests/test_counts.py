"""What must not happen twice: traces, compiles and moves; and what must: donation."""

import concurrent.futures
import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import BY_NAME
from programs.parts import (
    WIDTH,
    chain,
    momentum_state,
    normal,
    regression_batch,
    residual,
    squared_error,
    stages_params,
    token_batch,
    train,
)
from programs.pipelines import make_mesh, make_schedule, pipeline, shared_device
from programs.program import Tools, assert_same, host, pipelined, plain_loop
from samples import slow_first

import mpmd
import scheduler
from mpmd import _jax_compat as compat

MARK_ONLY = Tools(mark=mpmd.mark_stage_end, reduce=None, reduce_i=None)


class Counted:
    """A training step of residual stages that counts how often Python runs it, and its loss."""

    def __init__(self, num_stages=4, schedule="OneFOneB"):
        self.steps = self.losses = 0
        self.num_stages = num_stages
        self.schedule = make_schedule(schedule, num_stages)
        self.build_and_count = self._build(pipelined(self.schedule))

    def _build(self, tools):
        def loss(params, microbatch):
            self.losses += 1
            return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

        inner = train(tools, loss)

        def step(state, batch):
            self.steps += 1
            return inner(state, batch)

        return step

    def jit(self, **options):
        options.setdefault("mpmd_mesh", shared_device(self.schedule.num_groups))
        return mpmd.jit(self.build_and_count, **options)

    def state(self):
        return momentum_state(stages_params(jax.random.key(0), self.num_stages))


def _batch(seed, num_microbatches=4, rows=3):
    x, y = jax.random.split(jax.random.key(seed))
    return {"x": normal(x, num_microbatches, rows, WIDTH), "y": normal(y, num_microbatches, rows, WIDTH)}


@contextlib.contextmanager
def _compiles():
    """Counts the programs that XLA compiles inside the block."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# --- traces ---


@pytest.mark.slow
def test_a_training_run_traces_the_step_once():
    counted = Counted()
    step, state = counted.jit(), counted.state()
    for seed in range(5):
        state, _ = step(state, _batch(seed))
    assert (counted.steps, counted.losses) == (1, 1)


def test_a_training_run_compiles_nothing_after_its_first_step():
    counted = Counted()
    step = counted.jit(donate_argnums=(0,))
    state, _ = step(counted.state(), _batch(0))
    batches = [_batch(seed) for seed in range(1, 4)]
    with _compiles() as compiles:
        for batch in batches:
            state, _ = step(state, batch)
    assert not compiles


@pytest.mark.slow
def test_what_is_lowered_and_compiled_by_hand_is_what_calls_run():
    counted = Counted()
    step = counted.jit(donate_argnums=(0,))
    state, batch = counted.state(), _batch(0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
    lowered = step.lower(*shapes)
    compiled = lowered.compile()
    make = mpmd.jit(lambda tree: tree, mpmd_mesh=lowered._mesh, out_shardings=compiled.input_shardings[0][0])
    placed = make(state)
    with _compiles() as compiles:
        placed, _ = step(placed, batch)  # in the layout that was found
        placed, _ = compiled(placed, _batch(1))
        assert step.lower(*shapes) is lowered and step.lower(placed, batch) is lowered
        assert step.lower(placed, batch).compile().program is compiled.program
    compiled.timing = True  # of this object, not of the step's calls
    placed, _ = step(placed, _batch(2))
    assert (len(compiles), counted.steps, counted.losses, compiled._timed) == (0, 1, 1, None)
    reference, expected = jax.jit(counted._build(plain_loop())), state
    for seed in range(3):
        expected, _ = reference(expected, _batch(seed))
    assert_same(host(placed), host(expected), 2e-5)
    # Of other layouts, settings and options, and of what was forgotten, there are others.
    elsewhere = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mpmd.MpmdSharding(lowered._mesh, 3, P())), shapes[0]
    )
    assert step.lower(elsewhere, shapes[1]) is not lowered
    with jax.default_matmul_precision("float32"):
        assert step.lower(*shapes) is not lowered
    assert lowered.compile({"xla_cpu_enable_fast_math": False}).program is not compiled.program
    step.clear_cache()
    assert step.lower(*shapes) is not lowered


def test_static_arguments_and_the_arguments_devices_choose_what_was_compiled_by_hand():
    @mpmd.jit(mpmd_mesh=shared_device(2), static_argnums=1)
    def step(xs, power):
        def total(x):
            return jnp.sum(mpmd.mark_stage_end(x) ** power)

        return mpmd.treduce(total, xs, schedule=scheduler.GPipe(2), operation=mpmd.Mean)

    xs = np.full((2, 3), 2, np.float32)
    lowered = {power: step.lower(xs, power) for power in (2, 3)}
    for power in (2, 3):
        assert float(lowered[power].compile()(xs)) == float(step(xs, power)) == 3 * 2**power
        assert step.lower(xs, power) is lowered[power]


def test_host_arrays_device_arrays_and_its_own_results_are_the_same_to_the_step():
    counted = Counted()
    step = counted.jit()
    state = counted.state()
    new, _ = step(host(state), host(_batch(0)))
    step(state, _batch(1))
    step(new, host(_batch(2)))
    step(jax.tree.map(np.asarray, new), _batch(3))
    assert counted.steps == 1


def test_python_scalars_do_not_retrace():
    traces = []

    def step(params, xs, rate):
        traces.append(rate)
        value = mpmd.treduce(
            lambda x: jnp.sum(chain(MARK_ONLY, params, x)), xs, schedule=scheduler.GPipe(2), operation=mpmd.Mean
        )
        return value * rate

    step = mpmd.jit(step, mpmd_mesh=shared_device(2))
    params, xs = stages_params(jax.random.key(0), 2), jnp.ones((4, 2, WIDTH))
    one, two = step(params, xs, 1.0), step(params, xs, 2.0)
    assert len(traces) == 1
    np.testing.assert_allclose(2 * float(one), float(two), rtol=1e-6)


@pytest.mark.slow
def test_other_shapes_retrace_and_known_ones_do_not():
    counted = Counted()
    step = counted.jit()
    reference = jax.jit(counted._build(plain_loop()))
    state = counted.state()
    for batch in (_batch(0), _batch(1, rows=5), _batch(2), _batch(4, rows=5)):
        assert_same(host(step(state, batch)), host(reference(state, batch)), 2e-5)
    counted.steps = 0
    for batch in (_batch(0), _batch(1, rows=5)):
        step(state, batch)
    assert counted.steps == 0


@pytest.mark.slow
def test_another_dtype_retraces():
    counted = Counted()
    step = counted.jit()
    state, batch = counted.state(), _batch(0)
    step(state, batch)
    _, metrics = step(state, jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch))
    assert counted.steps == 2
    assert metrics["loss"].dtype == jnp.float32


def test_another_static_argument_retraces_and_the_same_does_not():
    traces = []

    def step(params, xs, depth):
        traces.append(depth)

        def one(x):
            x = mpmd.mark_stage_end(x @ params[0])
            for _ in range(depth):
                x = jnp.tanh(x @ params[1])
            return jnp.sum(x)

        return mpmd.treduce(one, xs, schedule=scheduler.GPipe(2))

    step = mpmd.jit(step, mpmd_mesh=shared_device(2), static_argnums=(2,))
    params, xs = (jnp.eye(3), 2 * jnp.eye(3)), jnp.ones((4, 2, 3))
    values = [float(step(params, xs, depth)) for depth in (1, 2, 1, 2)]
    assert traces == [1, 2]
    assert values[:2] == values[2:] and values[0] != values[1]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_static_and_donated_arguments_go_by_name_too(by_keyword):
    traces = []

    def step(params, xs, *, depth, scale=1.0):
        traces.append(depth)

        def one(x):
            x = mpmd.mark_stage_end(x @ params[0])
            for _ in range(depth):
                x = jnp.tanh(x @ params[1])
            return jnp.sum(x) * scale

        return mpmd.treduce(one, xs, schedule=scheduler.GPipe(2)), jax.tree.map(lambda p: p + 1, params)

    step = mpmd.jit(step, mpmd_mesh=shared_device(2), static_argnames="depth", donate_argnames=["params"])
    values = []
    for depth in (1, 2, 1):
        params, xs = (jnp.eye(3), 2 * jnp.eye(3)), jnp.ones((4, 2, 3))
        loss, _ = step(params=params, xs=xs, depth=depth) if by_keyword else step(params, xs, depth=depth, scale=1.0)
        values.append(float(loss))
        assert all(p.is_deleted() for p in params) and not xs.is_deleted()
    assert traces == [1, 2]
    assert values[0] == values[2] != values[1]


def test_a_name_that_the_step_does_not_have_is_refused():
    def step(params, xs):
        return params, xs

    with pytest.raises(ValueError, match=r"static_argnames has 'deep', but the step's arguments are params, xs"):
        mpmd.jit(step, mpmd_mesh=shared_device(2), static_argnames="deep")


def test_eval_shape_compiles_nothing_and_gives_the_shapes_of_the_result():
    counted = Counted()
    state, batch = counted.state(), _batch(0)
    with _compiles() as compiles:
        new, metrics = counted.jit().eval_shape(state, batch)
    assert not compiles
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32
    assert all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(*map(jax.tree.leaves, (new, state)), strict=True)
    )


# --- executables ---


def _num_compiles(num_stages, num_microbatches, mpmd_mesh=None, schedule="OneFOneB"):
    counted = Counted(num_stages, schedule)
    state, batch = counted.state(), _batch(0, num_microbatches)
    options = {} if mpmd_mesh is None else {"mpmd_mesh": mpmd_mesh}
    with _compiles() as compiles:
        jax.block_until_ready(jax.tree.leaves(counted.jit(**options)(state, batch)))
    return len(compiles)


@pytest.mark.slow
def test_the_number_of_compiled_programs_does_not_depend_on_the_microbatches():
    assert _num_compiles(4, 4) == _num_compiles(4, 16)


@pytest.mark.slow
def test_equal_stages_are_compiled_once():
    assert _num_compiles(4, 4) == _num_compiles(7, 4)


@pytest.mark.parametrize("axis_type", slow_first(AxisType.Explicit, AxisType.Auto))
def test_equal_stages_on_different_devices_are_compiled_once(axis_type):
    meshes = [mpmd.MpmdMesh(make_mesh(n, axis_type), "stage") for n in (4, 7)]
    assert _num_compiles(4, 4, meshes[0]) == _num_compiles(7, 4, meshes[1])


@pytest.mark.slow
def test_where_a_program_cannot_be_loaded_each_group_compiles_its_own(monkeypatch):
    program = BY_NAME["residual_mlp"]
    arguments = program.state(), next(iter(program.batches()))

    def run():
        compiled = pipeline(program, "OneFOneB", "auto").lower(*arguments).compile()
        results = host(compiled(*arguments))
        num_compiled, num_loaded = re.findall(r"(\d+) compiled, (\d+) copies", str(compiled.explain()))[0]
        assert f" {int(num_compiled) + int(num_loaded)} programs on devices of this process: " in compiled.explain()
        return int(num_compiled), int(num_loaded), results

    num_compiled, num_loaded, results = run()
    assert num_loaded > 0
    monkeypatch.setattr(compat.LoadedProgram, "load_on", lambda *_: None)
    more_compiled, none_loaded, same = run()
    assert (more_compiled, none_loaded) == (num_compiled + num_loaded, 0)
    assert_same(same, results, 0)


@pytest.mark.slow
def test_explain_says_how_many_executables_there_are():
    texts = []
    for num_microbatches in (4, 8):
        counted = Counted()
        texts.append(counted.jit().lower(counted.state(), _batch(0, num_microbatches)).compile().explain())
    counts = [re.findall(r"\d+ executables?", str(text)) for text in texts]
    assert counts[0] and counts[0] == counts[1], texts[0]


# --- placement ---


def _placement(tree):
    return [
        (jax.tree_util.keystr(path), tuple(leaf.mpmd_idxs), leaf.spec) for path, leaf in jax.tree.leaves_with_path(tree)
    ]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("residual_mlp", "auto"),
        pytest.param("tied_embedding", "explicit", marks=pytest.mark.slow),
        pytest.param("clipped_adamw_with_a_schedule", "explicit", marks=pytest.mark.exhaustive),
        pytest.param("tensor_parallel", "explicit", marks=pytest.mark.slow),
        pytest.param("tensor_parallel", "auto", marks=pytest.mark.exhaustive),
    ],
)
def test_a_state_comes_back_where_it_was(name, where):
    program = BY_NAME[name]
    step = pipeline(program, "OneFOneB", where)
    state, (batch, *_) = program.state(), program.batches()
    compiled = step.lower(state, batch).compile()
    in_state, out_state = compiled.input_shardings[0][0], compiled.output_shardings[0]
    assert jax.tree.structure(in_state) == jax.tree.structure(out_state)
    for path, i in jax.tree.leaves_with_path(in_state):
        o = dict(jax.tree.leaves_with_path(out_state))[path]
        ndim = dict(jax.tree.leaves_with_path(state))[path].ndim
        assert o.is_equivalent_to(i, ndim), (jax.tree_util.keystr(path), i, o)
    first, _ = compiled(state, batch)
    second, _ = compiled(first, batch)
    assert _placement(first) == _placement(second)


def test_a_stages_parameters_live_in_its_group_alone():
    counted = Counted()
    state, _ = counted.jit()(counted.state(), _batch(0))
    for stage in range(4):
        for part in ("params", "momentum"):
            for leaf in jax.tree.leaves(state[part][stage]):
                assert tuple(leaf.mpmd_idxs) == (stage,)


@pytest.mark.slow
def test_tied_weights_live_in_both_their_groups_and_stay_equal():
    program = BY_NAME["tied_embedding"]
    step, state = pipeline(program, "OneFOneB", "auto"), program.state()
    for seed in range(2):
        state, _ = step(state, token_batch(jax.random.key(seed)))
    embedding = state["params"]["embedding"]
    assert tuple(embedding.mpmd_idxs) == (0, 3)
    copies = [np.asarray(a) for a in embedding.to_mpmd_local_array]
    np.testing.assert_array_equal(copies[0], copies[1])


def test_scalars_that_the_step_returns_are_readable_in_every_group():
    counted = Counted()
    _, metrics = counted.jit()(counted.state(), _batch(0))
    assert tuple(metrics["loss"].mpmd_idxs) == (0, 1, 2, 3)
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.slow
def test_sharded_parameters_stay_sharded_as_they_came():
    program = BY_NAME["sharded_state"]
    step, state = pipeline(program, "OneFOneB", "auto"), program.state()
    for batch in program.batches():
        state, _ = step(state, batch)
    for stage, p in enumerate(state["params"]):
        assert tuple(p["up"].mpmd_idxs) == (stage,)
        for name, spec in (("up", P(None, "data")), ("down", P("data", None))):
            expected = mpmd.MpmdSharding(p[name].mpmd_sharding.mpmd_mesh, {stage}, spec)
            assert p[name].mpmd_sharding.is_equivalent_to(expected, 2)
        assert {shard.data.shape for shard in p["up"].addressable_shards} == {(WIDTH, WIDTH)}


# --- donation ---


@pytest.mark.parametrize("where", slow_first("shared", "explicit", "auto"))
def test_a_donated_state_is_deleted_and_another_is_not(where):
    program = BY_NAME["residual_mlp"]
    batches = list(program.batches())
    donating = pipeline(program, "OneFOneB", where, donate_argnums=(0,))
    keeping = pipeline(program, "OneFOneB", where)
    state, _ = keeping(program.state(), batches[0])
    kept = host(state)
    once, _ = keeping(state, batches[1])
    twice, _ = keeping(state, batches[1])
    assert_same(host(once), host(twice), 0)
    assert_same(host(state), kept, 0)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    given, _ = donating(state, batches[1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert_same(host(given), host(once), 0)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batches))


@pytest.mark.parametrize("where", slow_first("auto", "shared"))
def test_each_leaf_of_a_donated_state_is_updated_where_it_lies(where):
    """Not one in the place of another of its shape, before which XLA would copy what it still reads."""
    program = BY_NAME["clipped_adamw_with_a_schedule"]
    step = pipeline(program, "OneFOneB", where, donate_argnums=(0,))
    batches = list(program.batches())
    state, _ = step(program.state(), batches[0])

    def places(state):
        return [
            x.first_mpmd_replica.unsafe_buffer_pointer()
            for x in jax.tree.leaves(state)
            if len(x.mpmd_idxs) == 1 and x.ndim  # scalars are not worth it
        ]

    before = places(state)
    state, _ = step(state, batches[1])
    assert len(before) > 12 and places(state) == before


def test_a_donated_state_cannot_be_used_again_and_says_so():
    counted = Counted()
    step = counted.jit(donate_argnums=(0,))
    state, _ = step(counted.state(), _batch(0))
    step(state, _batch(1))
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        step(state, _batch(2))


def test_donated_device_arrays_are_deleted_as_under_jax_jit():
    counted = Counted()
    state = counted.state()
    counted.jit(donate_argnums=(0,))(state, _batch(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("where", ["auto", "shared"])
def test_a_donated_array_that_no_result_can_use_is_kept_with_jaxs_warning(where):
    mesh = shared_device(2) if where == "shared" else mpmd.MpmdMesh(make_mesh(2, AxisType.Auto), "stage")

    def step(w, unread, x):
        def one(x):
            return jnp.mean(mpmd.mark_stage_end(x * w) * 2)

        return w + mpmd.treduce(one, x, schedule=scheduler.OneFOneB(2))

    w, unread, x = jnp.ones(3), jnp.ones(3), jnp.ones((8, 4, 3))
    warned = r"Some donated buffers were not usable: float32\[8,4,3\] \(x\)\.\nNo result has their type\. See an expl"
    with pytest.warns(UserWarning, match=warned) as caught:
        mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=(0, 1, 2))(w, unread, x)
    assert [warning.filename for warning in caught] == [__file__]
    assert [a.is_deleted() for a in (w, unread, x)] == [True, False, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donating_the_batch_leaves_results_right():
    counted = Counted()
    reference = jax.jit(counted._build(plain_loop()))
    step = counted.jit(donate_argnums=(0, 1))
    state = expected = counted.state()
    for seed in range(3):
        expected, _ = reference(expected, _batch(seed))
    state = counted.state()
    for seed in range(3):
        state, _ = step(state, _batch(seed))
    assert_same(host(state), host(expected), 2e-5)


@pytest.mark.parametrize("where", slow_first("shared", "auto"))
def test_a_value_returned_twice_outlives_the_donation_of_one_of_them(where):
    """The loss is a metric and a part of the state; an unchanged leaf is returned in two places."""
    num_stages = 2
    mesh = shared_device(2) if where == "shared" else mpmd.MpmdMesh(make_mesh(2, AxisType.Auto), "stage")
    tools = pipelined(scheduler.GPipe(num_stages))

    def step(state, batch):
        def loss(params, microbatch):
            return squared_error(chain(tools, params, microbatch["x"]), microbatch["y"])

        inner, metrics = train(tools, loss)(state["inner"], batch)
        new = {"inner": inner, "last": metrics["loss"], "start": state["start"]}
        return new, {"loss": metrics["loss"], "start": state["start"], "bias": inner["params"][0]["b"]}

    jitted = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=(0,))
    inner = momentum_state(stages_params(jax.random.key(0), num_stages))
    state = {"inner": inner, "last": jnp.float32(0), "start": jnp.arange(3.0)}
    kept = []
    for seed in range(3):
        state, metrics = jitted(state, _batch(seed))
        kept.append((metrics, host(state["last"]), host(state["inner"]["params"][0]["b"])))
    for metrics, last, bias in kept:
        np.testing.assert_array_equal(np.asarray(metrics["loss"]), last)
        np.testing.assert_array_equal(np.asarray(metrics["bias"]), bias)
        np.testing.assert_array_equal(np.asarray(metrics["start"]), np.arange(3.0))


def test_one_array_in_two_places_of_the_state_is_two_in_the_next():
    """A moving average that begins as the parameters themselves."""
    counted = Counted(2)
    inner = counted._build(pipelined(counted.schedule))

    def step(state, batch):
        new, metrics = inner(state["inner"], batch)
        ema = jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p, state["ema"], new["params"])
        return {"inner": new, "ema": ema}, metrics

    jitted, state = mpmd.jit(step, mpmd_mesh=shared_device(2)), counted.state()
    state = {"inner": state, "ema": state["params"]}
    first, _ = jitted(state, _batch(0))
    expected = jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p, host(state["ema"]), host(first["inner"]["params"]))
    assert_same(host(first["ema"]), expected, 1e-6)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize("passed_on", [0, 1])
def test_a_donated_array_in_two_places_is_copied(passed_on):
    """`jax.jit` refuses to donate it twice; the place that the step returns as it came must keep its values."""
    counted = Counted(2)
    train_one = counted._build(pipelined(counted.schedule))

    def step(states, batch):
        new, _ = train_one(states[1 - passed_on], batch)
        return (new, states[1]) if passed_on else (states[0], new)

    jitted = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(make_mesh(2, AxisType.Auto), "stage"), donate_argnums=0)
    state = counted.state()
    for seed in range(3):  # first arrays of JAX, then those of the step before
        before = host(state)
        expected, _ = jax.jit(counted._build(plain_loop()))(before, _batch(seed))
        states = jitted((state, state), _batch(seed))
        assert_same(host(states[passed_on]), before, 0)
        assert_same(host(states[1 - passed_on]), host(expected), 2e-5)
        state = states[1 - passed_on]


def test_a_donated_argument_that_is_given_again_is_named():
    mesh = mpmd.MpmdMesh(make_mesh(2, AxisType.Auto), "stage")
    step = mpmd.jit(lambda state: {"w": state["w"] + 1}, mpmd_mesh=mesh, donate_argnums=0)
    first = {"w": jnp.ones(8)}
    second = step(first)
    step(second)
    with pytest.raises(RuntimeError, match=r"^state\['w'\]: this f32\[8\] was deleted, or donated to a step"):
        step(first)
    with pytest.raises(RuntimeError, match=r"^state\['w'\]: MpmdArray\(.*\) was donated to a step"):
        step(second)


# --- effects ---


@pytest.mark.slow
def test_a_debug_callback_in_a_stage_runs_once_for_each_microbatch():
    seen = []

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = residual(p, x if stage == 0 else mpmd.mark_stage_end(x))
            jax.debug.callback(lambda mean, stage=stage: seen.append((stage, round(float(mean), 4))), jnp.mean(x))
        return squared_error(x, microbatch["y"])

    def step(params, batch):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), batch, schedule=scheduler.OneFOneB(3))

    params, batch = stages_params(jax.random.key(0), 3), _batch(0)
    jitted = mpmd.jit(step, mpmd_mesh=shared_device(3))
    for _ in range(2):
        seen.clear()
        jax.block_until_ready(jax.tree.leaves(jitted(params, batch)))
        jax.effects_barrier()
        means = []
        for x in batch["x"]:
            for stage, p in enumerate(params):
                x = residual(p, x)
                means.append((stage, round(float(jnp.mean(x)), 4)))
        assert sorted(seen) == sorted(means)


# --- what goes in and comes out of `compile` ---


def test_shardings_have_the_structure_of_arguments_and_results():
    counted = Counted()
    state, batch = counted.state(), regression_batch(jax.random.key(0))
    compiled = counted.jit().lower(state, batch).compile()
    args, kwargs = compiled.input_shardings
    assert jax.tree.structure(args) == jax.tree.structure((state, batch)) and kwargs == {}
    new, metrics = compiled(state, batch)
    assert jax.tree.structure(compiled.output_shardings) == jax.tree.structure((new, metrics))
    for sharding, array in zip(*map(jax.tree.leaves, (compiled.output_shardings, (new, metrics))), strict=True):
        assert isinstance(sharding, mpmd.MpmdSharding)
        assert tuple(array.mpmd_idxs) == tuple(sorted(sharding.mesh_ids))


@pytest.mark.slow
def test_in_shardings_are_accepted_in_every_form():
    program = BY_NAME["sharded_state"]
    mesh = make_mesh(4, AxisType.Auto, ("data",))
    mpmd_mesh = mpmd.MpmdMesh(mesh, "stage")
    step = program.build(pipelined(scheduler.OneFOneB(4), mesh))

    def as_mpmd(path, spec):
        stage = next((key.idx for key in path if hasattr(key, "idx")), None)
        return mpmd.MpmdSharding(mpmd_mesh, range(4) if stage is None else {stage}, spec)

    def is_spec(x):
        return isinstance(x, P)

    state_specs, _ = program.specs
    forms = {
        "PartitionSpec": program.specs,
        "NamedSharding": jax.tree.map(lambda s: NamedSharding(mesh, s), program.specs, is_leaf=is_spec),
        "MpmdSharding": (jax.tree_util.tree_map_with_path(as_mpmd, state_specs, is_leaf=is_spec), None),
        "prefix": (state_specs, P()),
    }
    batch = next(iter(program.batches()))
    for form, in_shardings in forms.items():
        new, _ = mpmd.jit(step, mpmd_mesh=mpmd_mesh, in_shardings=in_shardings)(program.state(), batch)
        assert new["params"][2]["up"].spec == P(None, "data"), form
        assert_same(host(new), program.expected[0][0], program.rtol)


def test_the_program_and_its_texts_are_there_before_anything_runs():
    counted = Counted()
    state, batch = counted.state(), _batch(0)
    compiled = counted.jit().lower(state, batch).compile()
    assert isinstance(compiled.program, scheduler.Program)
    assert scheduler.check(compiled.program) is None or scheduler.check(compiled.program)
    assert len(compiled.program.groups) == 4
    assert "0F0" in str(compiled.program)
    assert compiled.as_text()
    assert str(compiled.explain())


def test_threads_that_call_a_step_for_the_first_time_compile_it_once():
    step = mpmd.jit(lambda x: mpmd.mark_stage_end(x * 2) + 1, mpmd_mesh=shared_device(2))
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for got in threads.map(lambda _: step(np.ones(3, np.float32)), range(6)):
            np.testing.assert_array_equal(got, [3, 3, 3])
    assert [len(steps) for steps in step._cache.values()] == [1]
