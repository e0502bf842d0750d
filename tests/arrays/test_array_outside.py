"""MpmdArrays outside of steps: in JAX's own functions, in libraries, printed, and where they cannot be used."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpmd
import reshard
from mpmd.arrays import reading
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding

VALUE = np.arange(4, dtype=np.float32)


@pytest.fixture
def mesh():
    return MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage")


def put(value, mesh, ids, spec=None):
    sharding = MpmdSharding(mesh, ids, spec)
    return MpmdArray([jax.device_put(value, sharding.group_sharding(g)) for g in sharding.groups], sharding)


def test_a_key_of_a_state_is_a_key():
    mesh = MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    key = jax.random.key(3)
    x = mpmd.jit(lambda key: key, mpmd_mesh=mesh)(put(key, mesh, {0, 1}))
    for use in (
        jax.random.split,
        jax.random.key_data,
        jax.random.clone,
        lambda k: jax.random.fold_in(k, 1),
        lambda k: jax.random.normal(k, (2,)),
        lambda k: jax.jit(jax.random.split)(k),
        lambda k: jax.vmap(jax.random.bits)(jax.random.split(k)),
    ):
        got, wanted = use(x), use(key)
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
        np.testing.assert_array_equal(got, wanted)
    assert jax.random.key_impl(x) == jax.random.key_impl(key)
    assert repr(x) == "MpmdArray(key<fry>[], groups {0, 1} of 2, P())"


def test_a_tree_of_metrics_prints_values(mesh):
    metrics = {
        "loss": put(np.float32(2.5), mesh, 3),
        "norms": put(VALUE, mesh, {0, 1}),
        "ok": put(np.bool_(True), mesh, 0),
        "w": put(np.ones((2, 2), np.float32), mesh, 0),
    }
    assert str(metrics) == (
        "{'loss': MpmdArray(2.5, float32[], group 3 of 4, P()),"
        " 'norms': MpmdArray([0., 1., 2., 3.], float32[4], groups {0, 1} of 4, P()),"
        " 'ok': MpmdArray(True, bool[], group 0 of 4, P()),"
        " 'w': MpmdArray(float32[2,2], group 0 of 4, P())}"
    )
    assert f"{metrics['loss']:.3f} {metrics['loss']}" == "2.500 2.5"
    metrics["loss"].delete()
    assert str(metrics["loss"]) == "MpmdArray(float32[], group 3 of 4, P(), deleted)"


def test_a_weakly_typed_result_is_read_under_any_mesh_and_where_it_lies(mesh):
    x = mpmd.jit(lambda x: jnp.asarray(2.0) + 0 * len(x), mpmd_mesh=mesh)(VALUE)
    assert x.weak_type
    with jax.set_mesh(mesh.jax_mesh):
        assert x.item() == x.tolist() == float(x[...]) == float(jnp.asarray(x)) == 2
        x.copy_to_host_async()
        assert jax.device_get(x) == 2 and x.is_ready()
    assert weakref.ref(x)() is x


def test_an_array_with_its_axes_in_another_order_in_memory_is_taken_as_by_jit(mesh):
    where = mpmd.MpmdSharding(mesh, 0).group_sharding(0)
    x = jax.device_put(np.arange(6.0, dtype=np.float32).reshape(2, 3), Format(Layout((1, 0)), where))
    step = mpmd.jit(lambda x: x @ x.T, mpmd_mesh=mesh)
    np.testing.assert_array_equal(mpmd.device_get(step(x)), jax.jit(lambda x: x @ x.T)(x))


def test_a_jitted_function_takes_arrays_of_the_same_group_from_several(mesh):
    x, y = put(VALUE, mesh, {1, 2}, P("data")), put(VALUE, mesh, {1}, P("data"))
    add = jax.jit(lambda tree, z: tree["x"] + tree["y"] * z)
    for _ in range(2):
        found = add({"x": x, "y": y}, 2.0)
        assert found.sharding.device_set == set(mesh.groups[1].devices.flat)
        np.testing.assert_array_equal(found, VALUE * 3)


MISMATCH = (
    "jax.jit: the arguments are on different devices: group 0 and group 1.\n"
    "  A function of JAX runs on the devices of one group. Make it a step, mpmd.jit(fun, mpmd_mesh=...), which runs"
    " where its arguments are; or bring all values to the host first, mpmd.device_get(tree)."
)


@pytest.mark.parametrize(
    "fun",
    [
        jax.jit(lambda x, y: x + y),
        lambda x, y: jnp.where(True, x, y),
        jnp.dot,
        lambda x, y: jnp.stack([x, y]),
        lambda x, y: jnp.sum(x) + jnp.sum(y),
        lambda x, y: jax.grad(lambda s: sum(jnp.sum(x**2) for x in s))([x, y]),
        lambda x, y: optax.global_norm([x, y]),
    ],
    ids=["jit", "where", "dot", "stack", "sums", "grad", "global norm"],
)
def test_arrays_of_different_groups_in_a_function_of_jax_are_refused_by_name(mesh, fun):
    with pytest.raises(ValueError) as error:
        fun(put(VALUE, mesh, 0), put(VALUE, mesh, 1))
    assert str(error.value) == MISMATCH


def test_what_is_on_different_devices_and_in_no_groups_keeps_jaxs_error(mesh, monkeypatch):
    monkeypatch.setattr(reading, "meshes_in_use", lambda: [mesh])
    one, other = jax.device_put(np.ones(2), jax.devices()[0]), jax.device_put(np.ones(2), jax.devices()[1])
    with pytest.raises(ValueError, match="Received incompatible devices"):
        _ = one + other  # both in group 0
    np.testing.assert_allclose(optax.global_norm([put(VALUE, mesh, 0)]), np.linalg.norm(VALUE), rtol=1e-6)


def test_operators_meet_in_a_group_that_has_both_or_say_where_they_are(mesh):
    x, there = put(VALUE, mesh, {0, 1}), jax.device_put(VALUE, MpmdSharding(mesh, 1).group_sharding(1))
    assert (x + there).sharding.device_set == set(mesh.groups[1].devices.flat)
    w = put(np.ones((4, 4), np.float32), mesh, 0)
    with pytest.raises(ValueError) as error:
        _ = w * there
    assert str(error.value) == (
        "operands are in different groups: MpmdArray(float32[4,4], group 0 of 4, P()) and an array in group 1.\n"
        "  Compute with them in a step (mpmd.jit), or read them first: mpmd.device_get(x), float(x)."
    )


def test_one_jax_array_cannot_be_put_into_groups_and_the_error_says_what_to_call(mesh):
    sharding = MpmdSharding(mesh, {1, 3}, P("data"))
    for make in (
        lambda: jax.device_put(VALUE, sharding),
        lambda: jax.jit(lambda x: x, out_shardings=sharding)(VALUE),
        lambda: jax.jit(lambda x: x, in_shardings=sharding)(VALUE),
        lambda: jnp.zeros(4, device=sharding),
    ):
        with pytest.raises(ValueError) as error:
            make()
        assert str(error.value) == (
            "MpmdSharding(groups {1, 3} of 4, P('data',)) is where an MpmdArray lies, as one array in each group;"
            " jax.device_put and jax.jit make a jax.Array.\n"
            "  Bring an array there by reshard.spmd_to_mpmd_reshard(mpmd_mesh, x, sharding), or compute it there by"
            " mpmd.jit(fun, mpmd_mesh=mpmd_mesh, out_shardings=sharding).\n"
            "  JAX takes sharding.sharding, the NamedSharding over all devices of these groups."
        )
    np.testing.assert_array_equal(jax.device_put(VALUE, sharding.sharding), VALUE)


def test_a_description_of_an_array_may_have_an_mpmd_sharding(mesh):
    sharding = MpmdSharding(mesh, 2, P("data"))
    x = jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding)
    assert jax.eval_shape(lambda x: x, x).shape == (4,)
    compiled = mpmd.jit(lambda x: x * 2, mpmd_mesh=mesh).lower(x).compile()
    assert compiled.input_shardings == ((sharding,), {})
    np.testing.assert_array_equal(compiled(put(VALUE, mesh, 2, P("data"))), VALUE * 2)


def test_separate_groups_of_one_shape_have_a_sharding_with_an_axis_of_groups():
    devices = np.array(jax.devices())
    mesh = MpmdMesh.from_groups([Mesh(devices[4 * i : 4 * i + 4].reshape(2, 2), ("a", "mpmd")) for i in range(2)])
    x = put(VALUE, mesh, {0, 1}, P("a"))
    assert x.sharding.mesh.shape == {"mpmd_": 2, "a": 2, "mpmd": 2} and x.sharding.spec == P("a")
    wanted = jax.device_put(VALUE, x.sharding)
    shards = [[(s.device, s.index, s.replica_id) for s in y.global_shards] for y in (x, wanted)]
    assert shards[0] == shards[1]


def test_control_flow_and_transforms_of_jax_take_arrays_of_a_step(mesh):
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    split = MpmdSharding(mesh, {0, 2}, split={0: ((0, 3),), 2: ((3, 4),)})
    for sharding in (MpmdSharding(mesh, 1), split):
        x = mpmd.jit(lambda x: x, mpmd_mesh=mesh, out_shardings=sharding)(rows)
        for function in (
            lambda x: jax.lax.scan(lambda total, row: (total + row, total * row), jnp.zeros(x.shape[1:]), x),
            lambda x: jax.lax.map(lambda row: row.sum(), x),
            lambda x: jax.jvp(jnp.sin, (x,), (x,)),
            lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * i, x),
        ):
            jax.tree.map(np.testing.assert_array_equal, function(x), function(jnp.asarray(rows)))


def test_what_a_function_of_jax_returns_as_it_got_it_is_an_array(mesh):
    x = jnp.asarray(VALUE)

    def found(x):
        return (
            jax.lax.scan(lambda c, row: (c, row), x, x),
            jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (x[0], x)),
            jax.lax.map(lambda row: row, x),
            jax.lax.cond(x[1] > 0, lambda x: x, lambda x: x, x),
            jax.lax.switch(0, [lambda x: x, lambda x: x], x),
            jax.jvp(lambda x: x, (x,), (x,)),
            jax.vjp(lambda y: (2 * y, x), x, has_aux=True)[2],
        )

    for got, wanted in zip(jax.tree.leaves(found(put(x, mesh, 1))), jax.tree.leaves(found(x)), strict=True):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, wanted)
    assert type(round(put(np.float32(2.52), mesh, 1))) is type(round(jnp.float32(2.52)))
    assert round(put(np.float32(2.52), mesh, 1)).dtype == jnp.int32
    deleted = put(x, mesh, 1)
    deleted.delete()
    assert jax.eval_shape(lambda x: x + 1, deleted).shape == x.shape


def test_a_call_names_arguments_that_are_no_arrays_of_jax(mesh):
    step = mpmd.jit(lambda state, rate: state["x"] * rate, mpmd_mesh=mesh)
    with pytest.raises(OverflowError, match=r"^mpmd\.jit: rate: Python int 1099511627776 too large"):
        step({"x": VALUE}, 2**40)
    with pytest.raises(TypeError, match=r"^mpmd: state\['x'\] is ShapeDtypeStruct\(.*\), which says what an arr"):
        step({"x": jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype)}, 2.0)


def test_flax_and_equinox_take_states_of_several_groups(tmp_path, mesh):
    equinox = pytest.importorskip("equinox")
    serialization = pytest.importorskip("flax.serialization")
    checkpoints = pytest.importorskip("flax.training.checkpoints")
    state = {
        "w": put(VALUE, mesh, 0),
        "b": put(VALUE.astype(jnp.bfloat16), mesh, {1, 2}, P("data")),
        "step": put(np.int32(3), mesh, {0, 3}),
    }

    def check(found):
        assert jax.tree.structure(found) == jax.tree.structure(state)
        for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))

    check(serialization.from_bytes(state, serialization.to_bytes(state)))
    checkpoints.save_checkpoint_multiprocess(tmp_path / "flax", state, 1)
    check(checkpoints.restore_checkpoint(tmp_path / "flax", state))
    equinox.tree_serialise_leaves(tmp_path / "equinox", state)
    check(equinox.tree_deserialise_leaves(tmp_path / "equinox", jax.tree.map(jnp.asarray, mpmd.device_get(state))))
    arrays, rest = equinox.partition(state, equinox.is_array)
    assert jax.tree.leaves(rest) == [] and jax.tree.leaves(arrays)[1] is state["step"]
    assert float(optax.tree.norm(mpmd.device_get(state["w"]))) == pytest.approx(np.linalg.norm(VALUE))


@pytest.mark.parametrize("dtype", ["object", "str", "datetime64[s]", "f4,f4", ">f4", "longdouble"])
def test_numpy_arrays_of_what_jax_has_no_arrays_of_are_refused_by_name(mesh, dtype):
    value = np.zeros(2, dtype)
    step = mpmd.jit(lambda state: state, mpmd_mesh=mesh)
    compiled = step.lower({"x": jax.ShapeDtypeStruct((2,), np.float32)}).compile()
    for call in (step, step.lower, compiled):
        with pytest.raises(TypeError) as error:
            call({"x": value})
        assert str(error.value) == (
            f"mpmd.jit: state['x'] is a numpy array of dtype {value.dtype}, which JAX has no arrays of.\n"
            "  Make it an array of numbers or booleans, or leave it out."
        )


def test_a_masked_array_is_refused_as_by_jit(mesh):
    with pytest.raises(TypeError, match=r"^mpmd.jit: x is a masked array, .* Pass x\.filled\(value\)\."):
        mpmd.jit(lambda x: x + 1, mpmd_mesh=mesh)(np.ma.array([1.0, 2.0], mask=[0, 1]))


def test_a_state_of_another_mesh_is_refused_with_what_brings_it_here(mesh):
    others = [
        MpmdMesh(jax.make_mesh((2, 4), ("stage", "data")), "stage"),
        MpmdMesh(jax.make_mesh((4, 2), ("stage", "data"), devices=jax.devices()[::-1]), "stage"),
    ]
    said = [f"on {others[0]}, not {mesh}", f"on other devices in {mesh}"]
    step = mpmd.jit(lambda state: {"x": state["x"] * 2}, mpmd_mesh=mesh)
    for other, where in zip(others, said, strict=True):
        state = {"x": put(VALUE, other, 1, P("data"))}
        with pytest.raises(ValueError) as error:
            step(state)
        assert str(error.value) == (
            f"mpmd.jit: state['x'] is of another mesh than the step's: {where}.\n"
            "  Bring a state to the step's groups first: reshard.mpmd_to_mpmd_reshard(state, shardings). Shardings are"
            " in the .input_shardings of the step, compiled for jax.ShapeDtypeStruct(shape, dtype)."
        )
        compiled = step.lower({"x": jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype)}).compile()
        moved = reshard.mpmd_to_mpmd_reshard(state, compiled.input_shardings[0][0], threshold="64MiB")
        np.testing.assert_array_equal(step(moved)["x"], VALUE * 2)


@pytest.mark.parametrize(
    ("threshold", "fault"),
    [
        ("64 pieces", "is no number of bytes; pass an int, or text such as '64MiB'."),
        (1.5, "is no number of bytes; pass an int, or text such as '64MiB'."),
        (True, "is no number of bytes; pass an int, or text such as '64MiB'."),
        (-1, "is no amount of memory; at least one element must fit."),
    ],
)
def test_a_threshold_that_is_no_memory_is_refused(mesh, threshold, fault):
    target = MpmdSharding(mesh, 1)
    for call in (
        lambda: reshard.spmd_to_mpmd_reshard(mesh, VALUE, target, threshold=threshold),
        lambda: reshard.plan(VALUE, None, target, threshold=threshold),
        lambda: reshard.restore("/nowhere", {"x": VALUE}, threshold=threshold),
    ):
        with pytest.raises(mpmd.ReshardError) as error:
            call()
        assert str(error.value) == f"threshold={threshold!r} {fault}"


def test_a_threshold_may_be_text(mesh):
    x = jax.device_put(np.ones((64, 64), np.float32), jax.devices()[0])
    sharding = MpmdSharding(mesh, 3)
    plans = [reshard.plan({"x": x}, None, sharding, threshold=t) for t in ("2KiB", 2048, "0KiB", 0)]
    assert str(plans[2]) == str(plans[3])  # one array at a time
    assert str(plans[0]) == str(plans[1]) and plans[0].peak_working_bytes <= 2048
    moved = reshard.spmd_to_mpmd_reshard(mesh, x, sharding, threshold="2KiB", donate=False)
    assert reshard.last_stats().peak_working_bytes <= 2048
    np.testing.assert_array_equal(moved, x)
