"""MpmdArray: what it knows everywhere, what it reads here, and what it refuses."""

import copy
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
import reshard
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding

AXIS_TYPES = {
    "explicit": (AxisType.Explicit,) * 2,
    "auto": (AxisType.Auto,) * 2,
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


@pytest.fixture(params=AXIS_TYPES.values(), ids=AXIS_TYPES.keys())
def mesh(request):
    return MpmdMesh(jax.make_mesh((4, 2), ("stage", "data"), axis_types=request.param), "stage")


def put(value, mesh, ids, spec=None, memory_kind=None):
    sharding = MpmdSharding(mesh, ids, spec, memory_kind)
    return MpmdArray([jax.device_put(value, sharding.group_sharding(g)) for g in sharding.groups], sharding)


def pointers(array):
    return [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]


def elsewhere(sharding, shape, dtype):
    """An array as a process without a shard sees it, whose metadata is all there is."""
    return MpmdArray._unchecked({}, sharding, shape, np.dtype(dtype))


VALUE = np.arange(8, dtype=np.float32).reshape(4, 2)


def test_an_array_knows_shape_dtype_and_place(mesh):
    x = put(VALUE, mesh, {1, 3}, P("data"))
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes, x.weak_type) == ((4, 2), np.float32, 2, 8, 32, False)
    assert x.mpmd_idxs == (1, 3)
    assert x.is_mpmd_replicated and x.is_partially_addressable and x.is_fully_addressable
    assert not x.is_fully_replicated
    assert x.spec == P("data")
    assert x.mpmd_sharding == MpmdSharding(mesh, {1, 3}, P("data"))
    assert x.sharding == NamedSharding(mesh.mpmd_submesh([1, 3]).jax_mesh, P("data"))
    assert x.sharding.device_set == x.devices()
    assert x.device == x.sharding
    assert x.aval == jax.typeof(x) == x.array_in(1).aval
    assert x.devices() == set(mesh.groups[1].devices.flat) | set(mesh.groups[3].devices.flat)
    assert repr(x) == "MpmdArray(float32[4,2], groups {1, 3} of 4, P('data',))"
    assert jax.tree.leaves({"w": x})[0] is x


def test_local_arrays_and_the_first_replica(mesh):
    x = put(VALUE, mesh, {1, 3}, P("data"))
    local = x.to_mpmd_local_array
    assert isinstance(local, list) and len(local) == 2
    assert local[0] is x.array_in(1) is x.first_mpmd_replica
    single = put(VALUE, mesh, 2)
    assert single.to_mpmd_local_array is single.array_in(2)
    with pytest.raises(RuntimeError) as error:
        single.array_in(1)
    assert str(error.value) == "MpmdArray(float32[4,2], group 2 of 4, P()) has no shard of group 1 in process 0."


@pytest.mark.parametrize("axis_names", [("stage", "data"), ("data", "stage")])
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")])
def test_shards_are_numbered_as_those_of_a_jax_array_on_all_these_devices(axis_names, spec):
    mesh = MpmdMesh(jax.make_mesh((4, 2) if axis_names[0] == "stage" else (2, 4), axis_names), "stage")
    x = put(VALUE, mesh, {1, 3}, spec)
    wanted = jax.device_put(VALUE, x.sharding)
    for ours, theirs in [
        (x.global_shards, wanted.global_shards),
        (x.addressable_shards, wanted.addressable_shards),
    ]:
        assert [(s.device, s.index, s.replica_id) for s in ours] == [(s.device, s.index, s.replica_id) for s in theirs]
        for s in ours:
            assert s.device in mesh.groups[s.group].devices
            np.testing.assert_array_equal(s.data, VALUE[s.index])
    np.testing.assert_array_equal(x.addressable_data(2), wanted.addressable_data(2))


def test_shards_of_groups_that_differ_or_share_devices_are_numbered_without_gaps():
    devices = jax.devices()
    wide, narrow = Mesh(np.array(devices[:2]), ("data",)), Mesh(np.array(devices[2:3]), ("data",))
    uneven = put(VALUE, MpmdMesh.from_groups([wide, narrow, wide]), {0, 1, 2}, P("data"))
    halves, whole = [slice(0, 2), slice(2, 4)], slice(None)
    assert [(s.group, s.index[0], s.replica_id) for s in uneven.global_shards] == [
        (0, halves[0], 0), (0, halves[1], 0), (1, whole, 0), (2, halves[0], 1), (2, halves[1], 1)
    ]  # fmt: skip
    assert uneven.devices() == set(devices[:3])
    with pytest.raises(ValueError) as error:
        _ = uneven.sharding
    assert str(error.value) == (
        "groups {0, 1, 2} of MpmdMesh(groups ('data': 2), ('data': 1), ('data': 2), on shared devices) differ in shape "
        "or axes, so that no one sharding covers them.\n  Use mpmd_sharding.group_sharding(group), for each group."
    )
    one = put(VALUE, MpmdMesh.from_groups([narrow] * 3), {0, 2})
    assert [(s.group, s.replica_id) for s in one.global_shards] == [(0, 0), (2, 1)]
    assert one.sharding == NamedSharding(narrow, P()) and one.device == devices[2]


def test_it_is_accepted_where_jnp_and_numpy_take_an_array(mesh):
    x = put(VALUE, mesh, 1)
    for got in (np.asarray(x), jnp.asarray(x), jax.device_get(x), np.array(x, copy=True), jax.jit(lambda a: a)(x)):
        np.testing.assert_array_equal(got, VALUE)
    np.testing.assert_allclose(jnp.sin(x), np.sin(VALUE), rtol=1e-6)
    np.testing.assert_allclose(np.sin(x), np.sin(VALUE), rtol=1e-6)
    np.testing.assert_array_equal(jnp.stack([x, x])[1], VALUE)
    np.testing.assert_array_equal(jnp.where(x > 3, x, 0), np.where(VALUE > 3, VALUE, 0))
    assert np.asarray(x, dtype=np.int32).dtype == np.int32
    assert jax.block_until_ready({"x": x})["x"] is x
    assert jax.eval_shape(lambda a: a @ a.T, x).shape == (4, 4)
    assert jnp.sum(x) == 28
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(x, dtype=np.int32, copy=False)


def test_a_jitted_function_traces_once_for_new_values(mesh):
    traces = []

    @jax.jit
    def double(a):
        traces.append(a.shape)
        return a * 2

    for i in range(3):
        np.testing.assert_array_equal(double(put(VALUE + i, mesh, 1)), (VALUE + i) * 2)
    assert traces == [(4, 2)]


@pytest.mark.parametrize("symbol", ["+", "-", "*", "/", "//", "%", "**", "<", "<=", ">", ">=", "==", "!="])
def test_operators_act_as_on_arrays_from_both_sides(mesh, symbol):
    value = VALUE + 1
    x = put(value, mesh, 1)
    beside = [(x, value), (2, x)]
    if symbol in ("-", "<"):  # what stands beside the array does not depend on the operator
        beside += [(x, x), (value, x), (x, 2), (x, np.float32(3))]
    for left, right in beside:

        def plain(v):
            return value if v is x else v

        got = eval(f"left {symbol} right", {"left": left, "right": right})
        want = eval(f"left {symbol} right", {"left": plain(left), "right": plain(right)})
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
        assert isinstance(got, jax.Array)


def test_unary_bitwise_and_matrix_operators(mesh):
    x = put(VALUE, mesh, 1)
    i = put(np.arange(4), mesh, 1)
    np.testing.assert_array_equal(-x, -VALUE)
    np.testing.assert_array_equal(abs(-x), VALUE)
    np.testing.assert_array_equal(~i, ~np.arange(4))
    np.testing.assert_array_equal((i << 1) | 1, (np.arange(4) << 1) | 1)
    np.testing.assert_array_equal(x @ x.T, VALUE @ VALUE.T)
    np.testing.assert_array_equal(VALUE.T @ x, VALUE.T @ VALUE)
    np.testing.assert_array_equal(divmod(i, 3)[0], np.arange(4) // 3)


def test_methods_and_indexing_are_those_of_the_local_array(mesh):
    x = put(VALUE, mesh, 1)
    np.testing.assert_array_equal(x[1], VALUE[1])
    np.testing.assert_array_equal(x[:, 1], VALUE[:, 1])
    np.testing.assert_array_equal(x.T, VALUE.T)
    np.testing.assert_array_equal(x.reshape(2, 4), VALUE.reshape(2, 4))
    assert x.astype(jnp.int32).dtype == np.int32
    assert x.sum() == 28 and x.max().item() == 7
    assert len(x) == 4
    np.testing.assert_array_equal([*x], VALUE)
    assert x.tolist() == VALUE.tolist()
    assert 7.0 in put(VALUE[3], mesh, 1)
    assert not hasattr(x, "no_such_method")


def test_scalars_convert_and_print_as_numbers(mesh):
    x = put(np.float32(2.5), mesh, 3)
    assert float(x) == 2.5 and int(x) == 2 and bool(x) and complex(x) == 2.5 and x.item() == 2.5
    assert f"{x:.2f} {x}" == "2.50 2.5"
    assert round(x) == 2
    assert [10, 20, 30][put(1, mesh, 0)] == 20
    with pytest.raises(TypeError, match="unsized"):
        len(x)
    with pytest.raises(TypeError, match="0-d"):
        iter(x)
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


def test_operands_of_two_groups_are_read_where_both_are_or_refused(mesh):
    assert put(1.0, mesh, {0, 2}) + put(2.0, mesh, {1, 2}) == 3
    with pytest.raises(ValueError) as error:
        _ = put(1.0, mesh, 0) + put(2.0, mesh, 1)
    assert str(error.value) == (
        "operands are in different groups: MpmdArray(1.0, float32[], group 0 of 4, P()) and "
        "MpmdArray(2.0, float32[], group 1 of 4, P()).\n"
        "  Compute with them in a step (mpmd.jit), or read them first: mpmd.device_get(x), float(x)."
    )


def test_reading_where_there_is_no_shard_says_which_groups_have_it(mesh):
    x = elsewhere(MpmdSharding(mesh, {1, 3}, P("data")), (4, 2), np.float32)
    assert (x.shape, x.dtype, x.is_partially_addressable, x.to_mpmd_local_array) == ((4, 2), np.float32, False, None)
    assert x.first_mpmd_replica is None and x.addressable_shards == [] and not x.is_deleted()
    assert repr(x) == str(x) == "MpmdArray(float32[4,2], groups {1, 3} of 4, P('data',), not in this process)"
    assert jax.eval_shape(lambda a: a + 1, x).shape == (4, 2)
    message = (
        f"{x!r} cannot be read in process 0, which has no shard of it: it is in groups {{1, 3}}, on process 0.\n"
        "  Call mpmd.device_get(x) in every process to get its values everywhere."
    )
    for read in (np.asarray, jnp.sin, float, lambda a: a + 1, lambda a: a.T, lambda a: a[0]):
        with pytest.raises(RuntimeError) as error:
            read(x)
        assert str(error.value) == message


def test_a_replicated_array_need_not_be_in_the_lowest_group_here(mesh):
    sharding = MpmdSharding(mesh, {1, 3}, P())
    x = MpmdArray._unchecked(
        {3: jax.device_put(VALUE, sharding.group_sharding(3))}, sharding, VALUE.shape, np.dtype(np.float32)
    )
    assert x.first_mpmd_replica is None
    assert not x.is_fully_addressable
    np.testing.assert_array_equal(x, VALUE)
    assert [s.replica_id for s in x.addressable_shards] == [2, 3]


def test_deleting_frees_every_group_and_reading_says_so(mesh):
    x = put(VALUE, mesh, {1, 3})
    parts = [x.array_in(1), x.array_in(3)]
    x.delete()
    x.delete()
    assert x.is_deleted() and all(part.is_deleted() for part in parts)
    with pytest.raises(RuntimeError) as error:
        x.sum()
    assert str(error.value) == "MpmdArray(float32[4,2], groups {1, 3} of 4, P(), deleted) has been deleted."
    y = put(VALUE, mesh, 1)
    y.array_in(1).delete()
    assert y.is_deleted()


def test_a_consumed_array_keeps_its_buffers_alive_for_the_step_that_took_them(mesh):
    x = put(VALUE, mesh, {1, 3})
    part = x.array_in(1)
    x._consume()
    assert x.is_deleted() and not part.is_deleted()
    assert (x.shape, x.dtype, x.mpmd_idxs, x.is_partially_addressable) == ((4, 2), np.float32, (1, 3), True)
    with pytest.raises(RuntimeError) as error:
        np.asarray(x)
    assert str(error.value) == (
        "MpmdArray(float32[4,2], groups {1, 3} of 4, P(), donated) was donated to a step, which reused its memory; "
        "use the step's output."
    )
    x.delete()
    assert not part.is_deleted()


def test_groups_on_one_device_may_share_a_buffer():
    mesh = MpmdMesh.from_groups([Mesh(jax.devices()[:1], ("data",))] * 3)
    sharding = MpmdSharding(mesh, {0, 1, 2}, P("data"))
    array = jax.device_put(VALUE, sharding.group_sharding(0))
    x = MpmdArray([array] * 3, sharding)
    y = x.copy()
    assert y.array_in(0) is y.array_in(2)
    assert set(pointers(y)).isdisjoint(pointers(x))
    x.delete()
    np.testing.assert_array_equal(y + y, VALUE * 2)


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, MpmdArray.copy])
@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
def test_a_copy_has_buffers_of_its_own_in_the_same_place(mesh, make_copy, memory_kind):
    x = put(VALUE, mesh, {1, 3}, P("data"), memory_kind)
    y = make_copy(x)
    assert y.mpmd_sharding == x.mpmd_sharding
    assert y.array_in(3).sharding == x.array_in(3).sharding
    assert set(pointers(y)).isdisjoint(pointers(x))
    x.delete()
    np.testing.assert_array_equal(y, VALUE)


def test_pickling_is_refused_with_what_to_do_instead(mesh):
    with pytest.raises(TypeError) as error:
        pickle.dumps({"w": put(VALUE, mesh, 1)})
    assert str(error.value) == (
        "MpmdArray(float32[4,2], group 1 of 4, P()) cannot be pickled: each process has just its own shards.\n"
        "  For its values, which can be, use numpy.asarray(x), or mpmd.device_get(tree) for a whole tree."
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn, np.bool_, np.int8])
def test_any_dtype_is_content(mesh, dtype):
    value = np.array([[0, 1], [1, 0]]).astype(dtype)
    x = put(value, mesh, {0, 1}, P("data"))
    assert x.dtype == dtype
    np.testing.assert_array_equal(np.asarray(x), value)


def test_typed_keys_are_content(mesh):
    keys = jax.random.split(jax.random.key(7), 4)
    x = put(keys, mesh, {0, 2}, P("data"))
    assert x.dtype == keys.dtype and x.shape == (4,)
    assert repr(x) == "MpmdArray(key<fry>[4], groups {0, 2} of 4, P('data',))"
    np.testing.assert_array_equal(jax.random.key_data(x.first_mpmd_replica), jax.random.key_data(keys))
    np.testing.assert_array_equal(jax.random.key_data(copy.copy(x).array_in(2)), jax.random.key_data(keys))


def test_arrays_are_given_in_any_order_or_by_group(mesh):
    sharding = MpmdSharding(mesh, {3, 1}, P("data"))
    parts = {g: jax.device_put(VALUE, sharding.group_sharding(g)) for g in (3, 1)}
    elsewhere = jax.device_put(VALUE, sharding.group_sharding(2))
    for arrays in (parts, [parts[1], parts[3]], [parts[3], parts[1]]):
        x = MpmdArray(arrays, sharding)
        assert x.array_in(1) is parts[1] and x.array_in(3) is parts[3]
    with pytest.raises(ValueError, match=r"group 1: sharding .* expected one equivalent to"):
        MpmdArray([parts[3], elsewhere], sharding)
    with pytest.raises(ValueError) as error:
        MpmdArray({1: parts[1]}, sharding)
    assert str(error.value) == (
        "MpmdArray: arrays has group 1, but of MpmdSharding(groups {1, 3} of 4, P('data',)) "
        "this process holds groups {1, 3}."
    )
    with pytest.raises(ValueError, match="arrays has 1 entry, but of"):
        MpmdArray([parts[1]], sharding)
    with pytest.raises(ValueError, match="arrays is one array"):
        MpmdArray(parts[1], sharding)


def test_an_array_of_a_group_of_this_process_may_be_left_out_and_no_step_takes_it(mesh, tmp_path):
    sharding = MpmdSharding(mesh, {1, 3}, P("data"))
    x = MpmdArray([], sharding, VALUE.shape, VALUE.dtype)
    assert x.shape == VALUE.shape and x.dtype == VALUE.dtype and x.mpmd_sharding == sharding
    assert not x.is_partially_addressable and not x.is_fully_addressable
    assert x.to_mpmd_local_array is x.first_mpmd_replica is None and x.addressable_shards == []
    with pytest.raises(ValueError, match="so shape and dtype must be given"):
        MpmdArray([], sharding, VALUE.shape)
    with pytest.raises(RuntimeError, match="which has no shard of it"):
        np.asarray(x)
    with pytest.raises(
        ValueError, match=r"^x: MpmdArray\(.* was made without the arrays of all groups of this process"
    ):
        mpmd.jit(lambda x: x + 1, mpmd_mesh=mesh, donate_argnums=0)(x)
    with pytest.raises(reshard.ReshardError, match=r"x: float32\[.*\] was made without the arrays of this process"):
        reshard.save(tmp_path / "saved", {"x": x})
    assert not x.is_deleted()


def test_arrays_of_groups_on_one_device_are_taken_in_the_order_of_the_groups():
    mesh = MpmdMesh.from_groups([Mesh(np.array(jax.devices()[:1]), ("data",))] * 3)
    sharding = MpmdSharding(mesh, {0, 2})
    parts = [jax.device_put(VALUE + i, sharding.group_sharding(0)) for i in range(2)]
    x = MpmdArray(parts, sharding)
    assert x.array_in(0) is parts[0] and x.array_in(2) is parts[1]


def test_an_array_without_a_group_lies_in_group_zero(mesh):
    x = put(VALUE, mesh, ())
    assert x.mpmd_idxs == () and x.array_in(0) is x.first_mpmd_replica
    np.testing.assert_array_equal(x, VALUE)


def test_everything_that_does_not_fit_is_named_at_once(mesh):
    sharding = MpmdSharding(mesh, {0, 1}, P("data"))
    with pytest.raises(ValueError) as error:
        MpmdArray([jnp.ones(4), np.ones(2)], sharding, (2,), np.int32)
    assert str(error.value) == (
        "MpmdArray: the arrays do not fit MpmdSharding(groups {0, 1} of 4, P('data',)):\n"
        "  group 0: shape (4,), expected (2,)\n"
        "  group 0: dtype float32, expected int32\n"
        "  group 1: a ndarray, not a concrete jax.Array"
    )
    with pytest.raises(ValueError, match="should evenly divide"):
        MpmdArray([jnp.ones(3)] * 2, sharding)
    with pytest.raises(ValueError, match="has 1 entry, but the array has 0 axes"):
        MpmdArray([jnp.ones(())] * 2, sharding)
    with pytest.raises(ValueError, match="not an MpmdSharding"):
        MpmdArray([jnp.ones(4)], sharding.group_sharding(0))


def test_a_weakly_typed_array_stays_so(mesh):
    x = put(jnp.asarray(2.0), mesh, 0)
    assert x.weak_type == x.array_in(0).weak_type
    weak = mpmd.jit(lambda: jnp.full((2,), 1.5), mpmd_mesh=mesh, out_shardings=mpmd.MpmdSharding(mesh, 0))()
    half = jnp.full((2,), 1 / 3, jnp.bfloat16)
    assert weak.weak_type and (weak * half).dtype == jnp.bfloat16 and (half - weak).dtype == jnp.bfloat16
    assert (weak * 1.01).weak_type and (-weak)[0].weak_type
    assert MpmdArray._unchecked({}, x.mpmd_sharding, (), np.dtype(np.float32), True).weak_type
