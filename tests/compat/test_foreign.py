"""Foreign programs as stages: exported functions and StableHLO, on their own and sharded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs.parts import WIDTH, normal, residual, squared_error, stages_params
from programs.pipelines import in_turns
from programs.program import assert_same, host

import mpmd
import scheduler

ROWS = 4
SCHEDULES = [scheduler.OneFOneB(3), scheduler.ZeroBubbleH1(3)]
_in_turns = functools.partial(in_turns, slow=[str(SCHEDULES[1])])


def _mesh(devices_a_group: int, axis_type=AxisType.Auto) -> mpmd.MpmdMesh:
    shape = (3, devices_a_group)
    devices = jax.devices()[: 3 * devices_a_group]
    return mpmd.MpmdMesh(jax.make_mesh(shape, ("stage", "data"), (axis_type,) * 2, devices=devices), "stage")


def _group_mesh(axis_type=AxisType.Auto) -> Mesh:
    """A mesh like one group of `_mesh(2)`."""
    return jax.make_mesh((1, 2), ("stage", "data"), (axis_type,) * 2, devices=jax.devices()[:2])


def _shapes(sharding=None):
    whole = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=sharding)
    return jax.eval_shape(lambda: stages_params(jax.random.key(0), 1)[0]), whole


def _batch(seed=1):
    x, y = (normal(k, 4, ROWS, WIDTH) for k in jax.random.split(jax.random.key(seed)))
    return {"x": x, "y": y}


def _train(loss, schedule):
    def step(params, batch):
        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, m), batch, schedule=schedule, operation=mpmd.Mean
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def _check_steps(step, reference, num_stages):
    """Two calls of a step equal those of the reference."""
    params = expected = stages_params(jax.random.key(0), num_stages)
    for seed in (1, 2):
        params, value = step(params, _batch(seed))
        expected, wanted = reference(expected, _batch(seed))
        assert_same(host((params, value)), host((expected, wanted)), 2e-5)


def _step(middle, schedule):
    """A training step of three stages; `middle(params, x)` is the second."""

    def loss(params, microbatch):
        x = mpmd.mark_stage_end(residual(params[0], microbatch["x"]))
        x = mpmd.mark_stage_end(middle(params[1], x))
        return squared_error(residual(params[2], x), microbatch["y"])

    return _train(loss, schedule)


def _check(middle, mesh, schedule=SCHEDULES[0], plain=residual):
    """Two calls as a pipeline equal plain JAX."""
    _check_steps(mpmd.jit(_step(middle, schedule), mpmd_mesh=mesh), jax.jit(_step(plain, None)), 3)


@pytest.mark.parametrize("schedule", _in_turns(SCHEDULES))
def test_an_exported_stage_is_trained_like_the_function_that_it_was(schedule):
    exported = jax.export.export(jax.jit(residual))(*_shapes())
    _check(mpmd.from_exported(exported), _mesh(1), schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("axis_type", "schedule"), _in_turns([AxisType.Auto, AxisType.Explicit], SCHEDULES))
def test_a_stage_exported_for_one_device_runs_in_groups_of_two(axis_type, schedule):
    exported = jax.export.export(jax.jit(residual))(*_shapes())
    _check(mpmd.from_exported(exported), _mesh(2, axis_type), schedule)


@pytest.mark.parametrize(("axis_type", "schedule"), _in_turns([AxisType.Auto, AxisType.Explicit], SCHEDULES))
def test_a_stage_exported_with_shardings_keeps_them_in_groups_of_as_many_devices(axis_type, schedule):
    mesh = _group_mesh(axis_type)
    rows = NamedSharding(mesh, P("data", None))
    params, x = _shapes(rows)
    with jax.set_mesh(mesh):
        exported = jax.export.export(jax.jit(residual))(params, x)
    stage = mpmd.from_exported(exported)

    def middle(p, x):
        if axis_type == AxisType.Explicit:
            return jax.reshard(stage(p, jax.reshard(x, P("data", None))), P())
        return stage(p, x)

    _check(middle, _mesh(2, axis_type), schedule)


def test_a_stage_exported_for_another_number_of_devices_is_refused_with_both():
    rows = NamedSharding(_group_mesh(), P("data", None))
    exported = jax.export.export(jax.jit(residual))(*_shapes(rows))
    with pytest.raises(mpmd.StageError, match="exported for 2 devices and is called in a context with 1"):
        _check(mpmd.from_exported(exported), _mesh(1))


def test_an_exported_stage_without_a_derivative_is_refused_where_it_is_needed():
    exported = jax.export.export(jax.jit(residual))(*_shapes())
    stage = mpmd.from_exported(dataclasses.replace(exported, _get_vjp=None))
    with pytest.raises(mpmd.StageError) as raised:
        _check(stage, _mesh(1))
    assert str(raised.value) == (
        "from_exported(residual) is differentiated, but has no derivative.\n"
        "  Serialize it with a higher order, exported.serialize(vjp_order=...), or put jax.lax.stop_gradient around"
        " what residual returns."
    )
    np.testing.assert_allclose(
        stage(stages_params(jax.random.key(0))[0], jnp.ones((ROWS, WIDTH))),
        residual(stages_params(jax.random.key(0))[0], jnp.ones((ROWS, WIDTH))),
        rtol=1e-6,
    )


@pytest.mark.slow
def test_a_serialized_stage_is_differentiable_to_its_vjp_order():
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(jax.jit(residual))(*_shapes())
    _check(mpmd.from_exported(jax.export.deserialize(exported.serialize(vjp_order=1))), _mesh(1))
    stage = mpmd.from_exported(jax.export.deserialize(exported.serialize(vjp_order=0)))
    with pytest.raises(mpmd.StageError, match="is differentiated, but has no derivative"):
        _check(stage, _mesh(1))


def test_integers_go_into_an_exported_stage_and_its_gradients_have_gradients():
    def look_up(table, i):
        return jnp.tanh(table[i])

    exported = jax.export.export(jax.jit(look_up))(
        jax.ShapeDtypeStruct((5, 3), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    )
    stage = mpmd.from_exported(exported)
    table, i = jnp.arange(15.0).reshape(5, 3) / 15, jnp.array([1, 4])

    def slope_of_the_slope(take):
        slope = jax.grad(lambda t: jnp.sum(take(t, i) ** 2))
        return jax.jit(jax.grad(lambda t: jnp.sum(slope(t) ** 2)))(table)

    np.testing.assert_allclose(slope_of_the_slope(stage), slope_of_the_slope(look_up), rtol=1e-5)


def test_an_exported_stage_works_under_vmap_and_as_a_scan_body():
    exported = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((3,), jnp.float32))
    stage, x = mpmd.from_exported(exported), jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.vmap(stage)(x), jnp.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.lax.scan(lambda c, r: (c, stage(r)), 0, x)[1], jnp.sin(x), rtol=1e-6)


def test_other_arguments_than_those_exported_are_refused():
    exported = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((3,), jnp.float32))
    stage = mpmd.from_exported(exported)
    with pytest.raises(mpmd.StageError, match=r"from_exported\(sin\): called with other arguments"):
        stage(jnp.ones(3), jnp.ones(3))
    with pytest.raises(mpmd.StageError, match=r"from_exported\(sin\): Shape mismatch for args\[0\].shape\[0\]"):
        stage(jnp.ones(4))


# --- StableHLO ------------------------------------------------------------------------------------


def _encoder(x):
    return jnp.tanh(2 * x) + x


def _forward_only(encoder, schedule):
    """A training step behind a frozen encoder."""

    def loss(params, microbatch):
        x = mpmd.mark_stage_end(encoder(microbatch["x"]))
        x = mpmd.mark_stage_end(residual(params[0], x))
        return squared_error(residual(params[1], x), microbatch["y"])

    return _train(loss, schedule)


def _check_encoder(program, mesh, schedule=SCHEDULES[0]):
    step = mpmd.jit(_forward_only(mpmd.from_stablehlo(program), schedule), mpmd_mesh=mesh)
    _check_steps(step, jax.jit(_forward_only(_encoder, None)), 2)
    return step


def _text(shardy=True, sharded=False) -> str:
    sharding = NamedSharding(jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2]), P("rows"))
    before = jax.config.values["jax_use_shardy_partitioner"]
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=sharding if sharded else None)
        return jax.jit(_encoder).lower(x).as_text()
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.parametrize("schedule", _in_turns(SCHEDULES))
def test_a_stablehlo_program_is_a_frozen_stage(schedule):
    _check_encoder(_text(), _mesh(1), schedule)


@pytest.mark.parametrize(
    ("shardy", "axis_type", "schedule"), _in_turns([True, False], [AxisType.Auto, AxisType.Explicit], SCHEDULES)
)
def test_a_sharded_stablehlo_program_keeps_its_shardings(shardy, axis_type, schedule):
    if not shardy and jax.__version_info__ >= (0, 11):
        pytest.skip("exported programs of newer releases have Shardy's annotations alone")
    text = _text(shardy, sharded=True)
    assert ("sdy.sharding" if shardy else "mhlo.sharding") in text
    step = _check_encoder(text, _mesh(2, axis_type), schedule)
    (compiled,) = [c for found in step._cache.values() for c in found]
    (task,) = [t for p, t in compiled._programs.loops[0].tasks.items() if str(p) == "F0"]
    hlo = task.executable.call.as_text()
    assert [line for line in hlo.splitlines() if " tanh(" in line and "f32[2,8]" in line], hlo
    assert not [line for line in hlo.splitlines() if " tanh(" in line and "f32[4,8]" in line], hlo


def test_a_stablehlo_program_may_be_bytes_and_its_entry_need_not_be_main():
    text = _text()
    module = jax.jit(_encoder).lower(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)).compiler_ir()
    bytecode = __import__("io").BytesIO()
    module.operation.write_bytecode(bytecode)
    exported = jax.export.export(jax.jit(_encoder))(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    x = _batch()["x"][0]
    for program in (text, text.encode(), bytecode.getvalue(), text.replace("@main", "@encode")):
        np.testing.assert_allclose(mpmd.from_stablehlo(program)(x), _encoder(x), rtol=1e-6)
    np.testing.assert_allclose(mpmd.from_stablehlo(exported.mlir_module_serialized)(x), _encoder(x), rtol=1e-6)


def test_a_stablehlo_program_with_several_results_gives_a_tuple():
    program = mpmd.from_stablehlo(jax.jit(lambda x, n: (x + 1, n * 2)).lower(jnp.ones(2), jnp.int32(3)).as_text())
    x, n = program(jnp.ones(2), 3)
    assert x.tolist() == [2, 2] and int(n) == 6


def test_a_differentiated_stablehlo_program_is_refused():
    params = stages_params(jax.random.key(0), 3)
    program = mpmd.from_stablehlo(_text())
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.jit(_step(lambda p, x: program(x), SCHEDULES[0]), mpmd_mesh=_mesh(1)).lower(params, _batch())
    assert str(raised.value) == (
        "from_stablehlo(main) is differentiated, but has no derivative.\n"
        "  StableHLO holds no derivative. Put jax.lax.stop_gradient around what it returns, or export the program with"
        " jax.export and use mpmd.from_exported."
    )


_MAIN = "func.func @main(%x: tensor<{}>) -> tensor<{}> {{ return %x : tensor<{}> }}"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("this is not MLIR", "it cannot be parsed: "),
        (b"\x00\x01", "it cannot be parsed: "),
        ("", "it has 0 public functions and none that is called main; one entry is needed."),
        (_MAIN.format(*["?x3xf32"] * 3), "argument 0 is tensor<?x3xf32>, whose shape is not fixed."),
        (_MAIN.format(*["3xi17"] * 3), "argument 0 has elements of type i17, which JAX has not."),
        (
            "func.func @main(%x: tuple<tensor<f32>>) -> tuple<tensor<f32>> { return %x : tuple<tensor<f32>> }",
            "argument 0 is tuple<tensor<f32>>, not an array.",
        ),
    ],
)
def test_what_is_no_stablehlo_program_is_refused(program, message):
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.from_stablehlo(program)
    assert str(raised.value).startswith(
        f"from_stablehlo: this is no StableHLO program that a stage can call: {message}"
    )


def test_what_is_neither_exported_nor_stablehlo_is_refused():
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.from_exported(b"bytes")
    assert str(raised.value) == (
        "from_exported: got a bytes, not a jax.export.Exported.\n"
        "  Serialized bytes become one by jax.export.deserialize; StableHLO goes to mpmd.from_stablehlo."
    )
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.from_stablehlo(3)
    assert str(raised.value) == ("from_stablehlo: got a int. Pass the text of a StableHLO module, or its bytes.")
    with pytest.raises(mpmd.StageError, match=r"from_stablehlo\(main\): called with 2 arrays, but it takes 1."):
        mpmd.from_stablehlo(_text())(jnp.ones((ROWS, WIDTH)), 1)
