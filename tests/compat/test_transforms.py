"""Other transformations and switches of JAX, in stages and around the step."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs.parts import (
    WIDTH,
    chain,
    dense,
    regression_batch,
    residual,
    squared_error,
    stages_params,
    stages_state,
    train,
)
from programs.pipelines import in_turns, make_mesh, make_schedule, pipeline, shared_device
from programs.program import Program, assert_same, assert_same_history, host, pipelined, plain_loop
from samples import slow_first

import mpmd
import scheduler

RUNS = [("OneFOneB", "auto"), ("ZeroBubbleH1", "shared")]


def _two_stages(key):
    return stages_state(key, 2)


def _stages(apply):
    """The builder of a training step whose stages are `apply(params, x, stage)`."""

    def build(tools):
        def loss(params, m):
            x = m["x"]
            for stage, p in enumerate(params):
                x = apply(p, x if stage == 0 else tools.mark(x), stage)
            return squared_error(x, m["y"])

        return train(tools, loss)

    return build


def _check(program, schedule, where):
    assert_same_history(program.run(pipeline(program, schedule, where), 2), program.expected[:2], program.rtol)


def _transposed(p, x, stage):
    """Each stage applies a linear map and, by `jax.linear_transpose`, its transpose."""

    def spread(x):
        return jnp.cumsum(x @ p["w"], axis=-1)

    (back,) = jax.linear_transpose(spread, x)(jnp.tanh(spread(x) + p["b"]))
    return x + 0.05 * back


def _twice_differentiated(p, x, stage):
    """A Hessian-vector product in each stage, forward over reverse, and a third derivative in the backward."""

    def energy(x):
        return jnp.sum(jnp.cos(dense(p, x)))

    return x + 0.1 * jax.jvp(jax.grad(energy), (x,), (jnp.ones_like(x),))[1]


@jax.custom_vjp
def _scaled(x, by):
    return x * by


_scaled.defvjp(lambda x, by: (x * by, (x, by)), lambda kept, g: (g * kept[1], jnp.sum(g * kept[0])))


def _custom_inside(p, x, stage):
    """A custom derivative inside a checkpoint inside a jitted function, in each stage."""
    block = jax.jit(jax.checkpoint(lambda p, x: _scaled(residual(p, x), 0.5) + x))
    return block(p, x)


def _weakly_typed(p, x, stage):
    """Python scalars, and scalars that are weakly typed, in float16 arithmetic."""
    half = jnp.asarray(1.0) * 0.5 if stage == 0 else 0.5
    return (residual(p, x).astype(jnp.float16) * 2.0).astype(jnp.float32) * half


PROGRAMS = [
    Program("linear_transpose", _two_stages, regression_batch, _stages(_transposed), num_stages=2),
    Program("gradients_of_gradients", _two_stages, regression_batch, _stages(_twice_differentiated), num_stages=2),
    Program("custom_vjp_in_checkpoint_in_jit", _two_stages, regression_batch, _stages(_custom_inside), num_stages=2),
    Program("weak_types", _two_stages, regression_batch, _stages(_weakly_typed), num_stages=2, rtol=2e-3),
]
_SLOW = ("linear_transpose", "gradients_of_gradients", "weak_types")


@pytest.mark.parametrize(("program", "schedule", "where"), in_turns(PROGRAMS, RUNS, slow=_SLOW))
def test_a_transformation_in_a_stage_equals_plain_jax(program, schedule, where):
    _check(program, schedule, where)


@jax.jit
def _jitted_stage(p, x):
    """Its marks share an id wherever it is called."""
    return mpmd.mark_stage_end(residual(p, x))


def _summed(params, x):
    for p in params:
        x = _jitted_stage(p, x)
    return jnp.sum(x)  # linear: the gradient reads nothing of the last mark


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_hessian_vector_products_through_the_stages_equal_plain_jax(schedule):
    def step(params, xs):
        def products(x):
            return jax.jvp(lambda p: jax.grad(_summed)(p, x), (params,), (params,))

        return mpmd.treduce(products, xs, schedule=schedule)

    params, xs = stages_params(jax.random.key(0), 3), regression_batch(jax.random.key(1))["x"]
    assert_same(host(mpmd.jit(step, mpmd_mesh=shared_device(3))(params, xs)), host(jax.jit(step)(params, xs)), 2e-5)


def _pipelined_step(apply, schedule="OneFOneB", mesh=None):
    step = _stages(apply)(pipelined(make_schedule(schedule, 2)))
    return mpmd.jit(step, mpmd_mesh=mesh or shared_device(2))


def _arguments(seed=1):
    return _two_stages(jax.random.key(0)), regression_batch(jax.random.key(seed))


# --- prints and callbacks -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", slow_first("ZeroBubbleH1", "OneFOneB"))
def test_a_debug_print_in_each_stage_prints_each_microbatch_once(schedule, capfd):
    def apply(p, x, stage):
        jax.debug.print("stage {s} sum {v:.6f}", s=stage, v=jnp.sum(x))
        return residual(p, x)

    state, batch = _arguments()
    _pipelined_step(apply, schedule)(state, batch)
    jax.effects_barrier()
    printed = sorted(capfd.readouterr().out.splitlines())
    jax.jit(_stages(apply)(plain_loop()))(state, batch)
    jax.effects_barrier()
    assert len(printed) == 2 * 4

    def numbers(lines):
        return np.array([[float(n) for n in re.findall(r"-?\d+\.?\d*", line)] for line in lines])

    np.testing.assert_allclose(numbers(printed), numbers(sorted(capfd.readouterr().out.splitlines())), rtol=1e-4)


@dataclasses.dataclass(eq=False)
class Scale:
    """A callback with a state, which may refer to itself and to shardings."""

    factor: float = 1.0
    sharding: object = None
    number: int = 0
    owner: object = None

    def __call__(self, x):
        self.number += 1
        return np.float32(self.factor)


def test_callbacks_that_are_alike_when_stages_are_compiled_are_those_of_their_stages():
    mesh = mpmd.MpmdMesh(jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4]), "stage")
    scales = [Scale(sharding=NamedSharding(mesh.jax_mesh, P())) for _ in range(4)]
    for scale in scales:
        scale.owner = scale

    def step(xs):
        def forward(x):
            for i, scale in enumerate(scales):
                x = x * jax.pure_callback(scale, jax.ShapeDtypeStruct((), np.float32), jnp.sum(x))
                x = mpmd.mark_stage_end(x) if i < 3 else x
            return jnp.sum(x)

        return mpmd.treduce(forward, xs, schedule="gpipe")

    pipelined = mpmd.jit(step, mpmd_mesh=mesh)
    assert pipelined(jnp.ones((2, 3))) == 6
    scales[2].factor = 5.0
    assert pipelined(jnp.ones((2, 3))) == 30
    assert [scale.number for scale in scales] == [4] * 4


@pytest.mark.parametrize("at_end", [True, False])
def test_ordered_callbacks_around_a_loop_run_on_their_side_of_it(at_end):
    seen = []

    def tell(name, *values):
        jax.debug.callback(lambda *_: seen.append(name), *values, ordered=True)

    def step(w, xs):
        def value(x):
            h = jnp.tanh(x @ w[0])
            tell("in")
            return jnp.mean((mpmd.mark_stage_end(h) @ w[1]) ** 2)

        if not at_end:
            tell("before", w[1].sum())  # which is in the other group
        found = mpmd.treduce(value, xs, schedule="1f1b")
        if at_end:
            tell("after")
        return found

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    jax.block_until_ready(mpmd.jit(step, mpmd_mesh=mesh)([jnp.eye(4)] * 2, jnp.ones((3, 2, 4))))
    jax.effects_barrier()
    assert seen == (["in"] * 3 + ["after"] if at_end else ["before"] + ["in"] * 3)


def test_a_gradient_may_be_printed_on_its_way_to_its_sum():
    def step(w, xs):
        def descent(x):
            grad = jax.grad(lambda w: jnp.sum(mpmd.mark_stage_end(jnp.tanh(x @ w)) @ w))(w)
            jax.debug.print("{}", grad)
            return -grad

        return mpmd.treduce(descent, xs, schedule="1f1b")

    w, xs = jax.random.normal(jax.random.key(0), (4, 4)), jnp.ones((3, 2, 4))
    assert_same(host(mpmd.jit(step, mpmd_mesh=shared_device(2))(w, xs)), host(jax.jit(step)(w, xs)), 1e-6)


@pytest.mark.parametrize("schedule", ["OneFOneB", pytest.param("ZeroBubbleH1", marks=pytest.mark.slow)])
def test_a_tagged_callback_sees_the_microbatches_of_its_stage_in_order(schedule):
    seen = []

    def apply(p, x, stage):
        jax.debug.callback(lambda v, stage: seen.append((stage, float(v))), x[0, 0], stage, ordered=True)
        return residual(p, x)

    state, batch = _arguments()
    _pipelined_step(apply, schedule)(state, batch)
    jax.effects_barrier()
    expected, seen = seen, []
    jax.jit(_stages(apply)(plain_loop()))(state, batch)
    jax.effects_barrier()
    for stage in (0, 1):
        got, wanted = ([v for s, v in run if s == stage] for run in (expected, seen))
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        assert len(got) == 4


@pytest.mark.parametrize(("schedule", "where"), slow_first(*RUNS[::-1]))
def test_a_pure_callback_in_a_stage_runs_on_the_host(schedule, where):
    def apply(p, x, stage):
        table = jax.pure_callback(
            lambda v: np.sign(v), jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x)
        )
        return residual(p, x) + 0.1 * table

    program = Program("pure_callback", _two_stages, regression_batch, _stages(apply), num_stages=2)
    _check(program, schedule, where)


@pytest.mark.parametrize("schedule", ["OneFOneB", pytest.param("ZeroBubbleH1", marks=pytest.mark.exhaustive)])
def test_named_scopes_are_in_the_programs_that_run(schedule):
    def apply(p, x, stage):
        with jax.named_scope(f"my_stage_{stage}"):
            return residual(p, x)

    compiled = _pipelined_step(apply, schedule).lower(*_arguments()).compile()
    tasks = {p: task.executable for p, task in compiled._programs.loops[0].tasks.items() if task.executable}
    assert len(tasks) >= 4
    for place, executable in tasks.items():
        text = executable.call.as_text()
        assert f"my_stage_{place.stage}" in text and f"my_stage_{1 - place.stage}" not in text


# --- switches -------------------------------------------------------------------------------------


def test_without_jit_the_step_runs_as_plain_python_with_values_to_look_at():
    sums = []

    def apply(p, x, stage):
        sums.append(float(jax.lax.stop_gradient(x).sum()))  # a value: not possible while tracing
        return residual(p, x)

    def evaluate(tools):
        def step(params, batch):
            return tools.reduce(
                lambda m: squared_error(apply(params[1], tools.mark(apply(params[0], m["x"], 0)), 1), m["y"]),
                batch, operation=mpmd.Mean,
            )  # fmt: skip

        return step

    state, batch = _arguments()
    step = mpmd.jit(evaluate(pipelined(scheduler.OneFOneB(2))), mpmd_mesh=shared_device(2))
    with jax.disable_jit():
        value = step(state["params"], batch)
        assert len(sums) == 2 * 4
        expected = evaluate(plain_loop())(state["params"], batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.slow
def test_without_jit_a_whole_training_step_and_its_own_results_are_taken():
    apply = lambda p, x, stage: residual(p, x)  # noqa: E731
    step, (state, batch) = _pipelined_step(apply), _arguments()
    state, _ = step(state, batch)
    expected = step(state, batch)
    with jax.disable_jit():
        actual = step(state, batch)
    assert_same(host(actual), host(expected), 2e-5)


def test_debug_nans_names_stage_and_microbatch():
    def apply(p, x, stage):
        return jnp.log(x) if stage == 1 else residual(p, x)

    state, batch = _arguments()
    batch["x"] = jnp.abs(batch["x"])
    state["params"][0] = jax.tree.map(jnp.zeros_like, state["params"][0])
    batch["x"] = batch["x"].at[2, 0, 0].set(-1.0)
    step = _pipelined_step(apply)
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError) as raised:
            jax.block_until_ready(step(state, batch)[1]["loss"]._arrays)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert str(raised.value) == (
        "invalid value (nan) in what 1F2 in group 1 returned.\n"
        "  2F0 is the forward of stage 2 for microbatch 0, B a backward; under jax.disable_jit() the step runs one"
        " operation at a time, and the first that makes it is named."
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["OneFOneB", pytest.param("ZeroBubbleH1", marks=pytest.mark.exhaustive)])
def test_x64_is_a_program_of_its_own(schedule):
    apply = lambda p, x, stage: residual(p, x)  # noqa: E731
    step = _pipelined_step(apply, schedule)
    single = step(*_arguments())
    with jax.enable_x64(True):
        state, batch = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, _arguments())
        double = step(state, batch)
        expected = jax.jit(_stages(apply)(plain_loop()))(state, batch)
        assert double[1]["loss"].dtype == jnp.float64
        assert_same(host(double), host(expected), 1e-12)
    assert single[1]["loss"].dtype == jnp.float32


# --- around the step ------------------------------------------------------------------------------


def _gradient(step):
    return jax.grad(lambda params, batch: step({"params": params}, batch)[1]["loss"])


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, _gradient])
def test_transforming_a_pipelined_step_is_refused(transform):
    def step(state, batch):
        loss = lambda p, m: squared_error(chain(pipelined(None), p, m["x"]), m["y"])  # noqa: E731
        total = mpmd.treduce(lambda m: loss(state["params"], m), batch, schedule=scheduler.GPipe(2))
        return state, {"loss": total}

    state, batch = _arguments()
    params = jax.tree.map(lambda x: jnp.stack([x] * 4), state["params"]) if transform is jax.vmap else state["params"]
    pipelined_step = mpmd.jit(step, mpmd_mesh=shared_device(2))
    for _ in range(2):  # before its first call and after it
        with pytest.raises(mpmd.StageError) as raised:
            transform(pipelined_step)(params if transform is _gradient else {"params": params}, batch)
        assert str(raised.value) == (
            "mpmd.jit: state['params'][0]['b'] is being traced, so the step was called inside jax.jit, jax.grad or"
            " jax.vmap.\n"
            "  A pipelined step is not a JAX function: call it at the top level, and differentiate inside treduce."
        )
        pipelined_step(state, batch)


def test_a_step_of_constants_in_a_traced_function_is_refused():
    step = mpmd.jit(lambda x: 2 * x, mpmd_mesh=shared_device(2))
    for _ in range(2):  # before its first call and after it
        with pytest.raises(mpmd.StageError, match=r"called inside jax.jit, .*\n  A pipelined step is not a JAX"):
            jax.jit(lambda: step(np.ones(3)))()
        step(np.ones(3))


@pytest.mark.parametrize("schedule", slow_first(scheduler.OneFOneB(2), scheduler.ZeroBubbleH1(2)), ids=str)
def test_static_arguments_and_keywords_are_those_of_jax_jit(schedule):
    def step(params, batch, scale, *, shift):
        def loss(p, m):
            return squared_error(scale * chain(pipelined(None), p, m["x"]) + shift, m["y"])

        return mpmd.treduce(lambda m: jax.grad(loss)(params, m), batch, schedule=schedule)

    state, batch = _arguments()
    jitted = mpmd.jit(step, mpmd_mesh=shared_device(2), static_argnums=(2,))
    for scale, shift in ((2, 0.5), (3, -0.5)):
        expected = jax.jit(step, static_argnums=(2,))(state["params"], batch, scale, shift=shift)
        assert_same(host(jitted(state["params"], batch, scale, shift=shift)), host(expected), 2e-5)


# --- the user's mesh ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis_type", "schedule"), slow_first((AxisType.Explicit, "ZeroBubbleH1"), (AxisType.Auto, "OneFOneB"))
)
def test_model_code_that_names_the_users_whole_mesh_means_the_groups_own(axis_type, schedule):
    mesh = make_mesh(2, axis_type, ("data",))
    constrain = jax.reshard if axis_type == AxisType.Explicit else jax.lax.with_sharding_constraint

    def apply(p, x, stage):
        y = constrain(residual(p, x), NamedSharding(mesh, P(None, "data")))
        total = jax.shard_map(lambda y: jax.lax.psum(y, "data"), mesh=mesh, in_specs=P(None, "data"), out_specs=P())(y)
        return x + jnp.concatenate([total, total], -1)

    def plain(p, x, stage):
        y = residual(p, x)
        total = y[:, : WIDTH // 2] + y[:, WIDTH // 2 :]
        return x + jnp.concatenate([total, total], -1)

    state, batch = _arguments()
    expected = jax.jit(_stages(plain)(plain_loop()))(state, batch)
    step = _pipelined_step(apply, schedule, mpmd.MpmdMesh(mesh, "stage"))
    assert_same(host(step(state, batch)), host(expected), 2e-5)


@pytest.mark.parametrize("is_mesh_set", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "axis_type, schedule",
    [(AxisType.Auto, "1f1b"), pytest.param(AxisType.Explicit, "zb-h1", marks=pytest.mark.slow)],
)
def test_inside_of_a_step_the_mpmd_axis_has_length_1_whatever_names_the_whole_mesh(axis_type, schedule, is_mesh_set):
    whole = make_mesh(2, axis_type, ("data",))
    constrain = jax.reshard if axis_type == AxisType.Explicit else jax.lax.with_sharding_constraint
    rows, kept = NamedSharding(whole, P("data")), jax.device_put(jnp.eye(4), NamedSharding(whole, P()))
    traced = jax.make_jaxpr(lambda x: jnp.tanh(x) + 1)
    with jax.set_mesh(whole):  # a jaxpr that names the whole mesh
        made = traced(jax.ShapeDtypeStruct((4, 4), np.float32, sharding=NamedSharding(whole, P())))

    def stage(x):
        with jax.sharding.use_abstract_mesh(whole.abstract_mesh):
            x = x @ kept + jnp.ones((4, 4))
        x = jax.sharding.auto_axes(lambda x: jnp.sort(x, 0), out_sharding=rows)(x)
        x = constrain(jax.device_put(x, rows), NamedSharding(whole, P()))
        return jax.core.eval_jaxpr(made.jaxpr, made.consts, x)[0]

    def plain(x):
        return jnp.tanh(jnp.sort(x + 1, 0)) + 1

    def spread(x):
        """As an optimizer does that works on all devices of a mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        assert dict(mesh.shape) == {"stage": 1, "data": 2}
        axes = tuple(name for name, size in mesh.shape.items() if size > 1)
        return constrain(constrain(x, P(axes)) * 2, P())

    def step(ws, xs, stage, spread, schedule):
        def loss(ws, x):
            return jnp.sum((mpmd.mark_stage_end(stage(x @ ws[0])) @ ws[1]) ** 2)

        total, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)
        return [w - 0.1 * spread(g) for w, g in zip(ws, grads, strict=True)], total

    args = [jnp.eye(4) / 2] * 2, jnp.linspace(-1, 1, 64).reshape(4, 4, 4)
    expected = jax.jit(lambda ws, xs: step(ws, xs, plain, lambda g: 2 * g, None))(*args)
    pipelined_step = mpmd.jit(
        lambda ws, xs: step(ws, xs, stage, spread, schedule), mpmd_mesh=mpmd.MpmdMesh(whole, "stage")
    )
    with jax.set_mesh(whole) if is_mesh_set else contextlib.nullcontext():
        assert_same(host(pipelined_step(*args)), host(expected), 2e-6)


def _mean_loss(params, xs):
    def one(m):
        return squared_error(chain(pipelined(None), params, m["x"]), m["y"])

    return mpmd.treduce(one, xs, schedule=None, operation=mpmd.Mean)


_AROUND_A_PLAIN_LOOP = {
    "scan": lambda p, xs: jax.lax.scan(lambda total, _: (total + _mean_loss(p, xs), total), 0.0, None, length=2),
    "cond": lambda p, xs: jax.lax.cond(xs["x"][0, 0, 0] > 0, lambda: _mean_loss(p, xs), lambda: 0.0),
    "grad": lambda p, xs: jax.grad(_mean_loss)(p, xs),
    "checkpoint": lambda p, xs: jax.grad(jax.checkpoint(_mean_loss))(p, xs),
    "vmap": lambda p, xs: jax.vmap(lambda scale: _mean_loss(p, jax.tree.map(lambda a: a * scale, xs)))(jnp.arange(3.0)),
}


@pytest.mark.parametrize(
    "around",
    [pytest.param(k, marks=[pytest.mark.slow] * (k in ("grad", "checkpoint"))) for k in _AROUND_A_PLAIN_LOOP],
)
def test_a_loop_without_a_schedule_stands_wherever_a_scan_may(around):
    """Its marks mark nothing."""
    step = _AROUND_A_PLAIN_LOOP[around]
    args = stages_params(jax.random.key(0), 2), regression_batch(jax.random.key(1))
    assert_same(host(mpmd.jit(step, mpmd_mesh=shared_device(2))(*args)), host(jax.jit(step)(*args)), 2e-5)


def test_a_step_whose_arguments_are_in_place_runs_where_implicit_transfers_are_refused():
    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4]), "stage")

    def loss(ws, x):
        return ((mpmd.mark_stage_end(jnp.tanh(x @ ws[0])) @ ws[1]) ** 2).mean()

    @mpmd.jit(mpmd_mesh=mesh)
    def step(ws, xs):
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule="1f1b")
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    args = [jnp.eye(4)] * 2, jnp.ones((4, 2, 4))
    expected = step(*args)
    with jax.transfer_guard("disallow"):
        found = step(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", [jnp.float4_e2m1fn, pytest.param(jnp.int4, marks=pytest.mark.slow)])
def test_arguments_of_4_bits_are_taken_as_by_jit(dtype):
    def loss(ws, x):
        return (mpmd.mark_stage_end(jnp.tanh(x @ ws[0].astype(x.dtype))) @ ws[1].astype(x.dtype)).sum()

    def step(ws, xs, schedule):
        return mpmd.treduce(lambda x: loss(ws, x), xs, schedule=schedule)

    mesh = mpmd.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4]), "stage")
    ws, xs = [np.eye(8).astype(dtype)] * 2, np.linspace(0, 1, 64, dtype=np.float32).reshape(2, 4, 8)
    pipelined_step = mpmd.jit(lambda ws, xs: step(ws, xs, "1f1b"), mpmd_mesh=mesh)
    plain = jax.jit(lambda ws, xs: step(ws, xs, None))(ws, xs)
    assert float(pipelined_step(ws, xs)) == float(pipelined_step(list(map(jnp.asarray, ws)), xs)) == float(plain)


def test_gradients_of_integers_go_out_of_a_step_and_into_the_next():
    def gradients(params):
        return jax.grad(lambda p: jnp.sum(mpmd.mark_stage_end(p["w"] ** 2)) * p["n"], allow_int=True)(params)

    def updated(params, grads):
        found = jax.tree.map(lambda p, g: p if g.dtype == jax.dtypes.float0 else p - g, params, grads)
        return found, grads

    mesh = shared_device(2)
    params = {"w": np.arange(3, dtype=np.float32), "n": np.arange(2)[1]}
    grads = mpmd.jit(gradients, mpmd_mesh=mesh)(params)
    step, plain = mpmd.jit(updated, mpmd_mesh=mesh), jax.jit(updated)
    for given in (grads, step(params, grads)[1], jax.jit(gradients)(params)):
        found, found_grads = step(params, given)
        assert found_grads["n"].dtype == jax.dtypes.float0 and found_grads["n"].shape == ()
        jax.tree.map(np.testing.assert_array_equal, host(found), plain(params, jax.jit(gradients)(params))[0])

    def in_a_loop(params):
        return mpmd.treduce_i(lambda i: gradients(params), 2, "1f1b")

    assert mpmd.jit(in_a_loop, mpmd_mesh=mesh)(params)["n"].dtype == jax.dtypes.float0
