"""Arrays that are split over groups: each group has ranges of the rows and nothing else."""

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
from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding

VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)
UNEVEN = {0: ((0, 3), (5, 6)), 2: ((3, 5), (6, 8))}
AXIS_TYPES = {"explicit": (AxisType.Explicit,) * 2, "auto": (AxisType.Auto,) * 2}


@pytest.fixture(params=AXIS_TYPES.values(), ids=AXIS_TYPES.keys())
def mesh(request):
    return MpmdMesh(jax.make_mesh((4, 2), ("stage", "data"), axis_types=request.param), "stage")


def put(value, sharding):
    """An array made of its pieces, given in an order in which no group comes after a lower one."""
    parts = sorted(sharding.parts(value.shape), key=lambda part: -part.group)
    return MpmdArray([put_part(value, part, sharding) for part in parts], sharding, value.shape, value.dtype)


def put_part(value, part, sharding):
    index = tuple(slice(a, a + n) for a, n in zip(part.offset, part.shape, strict=True))
    return jax.device_put(value[index], sharding.group_sharding(part.group))


def elsewhere(x, *ranges):
    """The array as a process sees it that has these ranges alone."""
    return MpmdArray._unchecked({r: x.pieces[r] for r in ranges}, x.mpmd_sharding, x.shape, x.dtype)


def test_a_spec_that_names_the_mpmd_axis_puts_each_part_where_one_jax_array_would_have_it(mesh):
    sharding = MpmdSharding(mesh, range(4), P(("stage", "data")))
    x, whole = put(VALUE, sharding), jax.device_put(VALUE, NamedSharding(mesh.jax_mesh, P(("stage", "data"))))
    assert sharding.ranges(8) == ((0, 2, 0), (2, 4, 1), (4, 6, 2), (6, 8, 3))
    assert x.sharding == whole.sharding
    assert sharding.devices_indices_map((8, 4)) == whole.sharding.devices_indices_map((8, 4))
    assert sharding.shard_shape((8, 4)) == whole.sharding.shard_shape((8, 4)) == (1, 4)
    assert (x.shape, x.nbytes, x.spec, x.mpmd_idxs) == ((8, 4), 128, P("data"), (0, 1, 2, 3))
    assert x.is_fully_addressable and not x.is_mpmd_replicated and not x.is_fully_replicated
    back = reshard.mpmd_to_spmd_reshard(mesh, x, x.sharding, donate=False)
    assert back.sharding == whole.sharding and reshard.last_stats().bytes_moved == 0
    for mine, its in zip(x.global_shards, whole.global_shards, strict=True):
        assert (mine.device, mine.index, mine.replica_id) == (its.device, its.index, its.replica_id)
        np.testing.assert_array_equal(mine.data, its.data)


def test_each_group_has_its_ranges_and_nothing_else(mesh):
    x = put(VALUE, MpmdSharding(mesh, {0, 2}, P(None, "data"), split=UNEVEN))
    assert {r: piece.shape for r, piece in x.pieces.items()} == {
        (0, 3): (3, 4),
        (3, 5): (2, 4),
        (5, 6): (1, 4),
        (6, 8): (2, 4),
    }
    for (start, stop), piece in x.pieces.items():
        np.testing.assert_array_equal(piece, VALUE[start:stop])
        assert mesh.group_of(piece.sharding.mesh.devices.flat[0]) == (0 if start in (0, 5) else 2)
    assert len(x.to_mpmd_local_array) == 4 and x.first_mpmd_replica is None
    assert len(x.addressable_shards) == 8 and {s.replica_id for s in x.addressable_shards} == {0}
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data, VALUE[shard.index])
    with pytest.raises(RuntimeError, match=r"has 2 ranges in group 0; use .pieces, which has them all"):
        x.array_in(0)
    np.testing.assert_array_equal(put(VALUE, MpmdSharding(mesh, {1, 3}, P("stage"))).array_in(3), VALUE[4:])


@pytest.mark.parametrize("axis", [0, 1])
def test_it_reads_as_the_whole_array(mesh, axis):
    value = VALUE if axis == 0 else VALUE.T.copy()
    sharding = MpmdSharding(mesh, {0, 2}, P(), split=UNEVEN, split_axis=axis)
    x, y = put(value, sharding), put(value, MpmdSharding(mesh, range(4), P(*[None] * axis, "stage")))
    np.testing.assert_array_equal(x, value)
    np.testing.assert_array_equal([x[0], x[-1]], [value[0], value[-1]])
    np.testing.assert_array_equal(x[:, 2], value[:, 2])
    np.testing.assert_array_equal(list(x), value)
    np.testing.assert_array_equal(x[value.shape[0] // 2 :], value[value.shape[0] // 2 :])
    np.testing.assert_array_equal(x + y, value * 2)
    np.testing.assert_array_equal(y * 2 - x, value)
    assert float(jnp.sum(x)) == value.sum() == x.sum()
    assert (x.copy_to_host_async(), x.is_ready(), len(x)) == (None, True, len(value))
    np.testing.assert_array_equal(jax.device_get({"x": x})["x"], value)
    assert str(x) == str(value) and x.block_until_ready() is x
    with pytest.raises(IndexError):
        x[8 if axis == 0 else (0, 8)]


def test_an_operand_in_one_group_is_met_there(mesh):
    x = put(VALUE, MpmdSharding(mesh, range(4), P("stage")))
    there = MpmdSharding(mesh, 2, P())
    for other in (put(VALUE, there), jax.device_put(VALUE, there.group_sharding(2))):
        assert (x - other).devices() == set(mesh.groups[2].devices.flat)
        np.testing.assert_array_equal(x - other, VALUE * 0)
    np.testing.assert_array_equal(put(VALUE, there) - x, VALUE * 0)


def test_a_row_is_read_where_it_is_and_the_rest_by_device_get(mesh):
    x = elsewhere(put(VALUE, MpmdSharding(mesh, range(4), P("stage"))), (2, 4))
    np.testing.assert_array_equal(x[3], VALUE[3])
    assert x.is_partially_addressable and not x.is_fully_addressable and len(x.addressable_shards) == 2
    with pytest.raises(RuntimeError, match=r"no shard of row 7: it is in group 3, on process 0.\n.*mpmd.device_get"):
        x[-1]
    for read in (np.asarray, lambda x: x + 1, list, lambda x: x[2:4]):
        with pytest.raises(RuntimeError, match=r"has just a part of it.\n|no shard of row 0: it is in group 0"):
            read(x)
    nothing = elsewhere(x)
    with pytest.raises(RuntimeError, match=r"has no shard of it: it is in groups \{0, 1, 2, 3\}, on process 0"):
        np.asarray(nothing)
    assert repr(nothing).endswith("axis 0 split evenly, P(None,), not in this process)")


def test_copying_and_deleting_concern_every_piece(mesh):
    x = put(VALUE, MpmdSharding(mesh, {0, 2}, P(), split=UNEVEN))
    pieces, y = list(x.pieces.values()), x.copy()
    assert repr(x) == "MpmdArray(float32[8,4], groups {0, 2} of 4, axis 0 split {0: 0:3 5:6, 2: 3:5 6:8}, P())"
    x.delete()
    assert x.is_deleted() and all(piece.is_deleted() for piece in pieces)
    np.testing.assert_array_equal(y, VALUE)
    with pytest.raises(RuntimeError, match="has been deleted"):
        x.pieces  # noqa: B018
    with pytest.raises(RuntimeError, match="has been deleted"):
        x[0]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(y)


def test_shardings_are_values():
    mesh = MpmdMesh(reshard.describe_mesh({"stage": 4, "data": 2}), "stage")
    even, given = MpmdSharding(mesh, range(4), P("stage")), MpmdSharding(mesh, {0, 2}, split=UNEVEN)
    for sharding in (even, given, MpmdSharding(mesh, {0, 2}, P(None, "data"), split=UNEVEN, split_axis=2)):
        again = pickle.loads(pickle.dumps(sharding))
        assert (again, hash(again), repr(again)) == (sharding, hash(sharding), repr(sharding))
        assert sharding.replace() == sharding != sharding.replace(split_axis=1)
    assert given.replace(split=None, split_axis=None) == MpmdSharding(mesh, {0, 2})
    assert given.replace(spec=P(None, "stage"), split=None) == MpmdSharding(mesh, {0, 2}, P(None, "stage"))
    assert (given.split, given.split_axis, even.split, even.split_axis) == (UNEVEN, 0, None, 0)
    with pytest.warns(UserWarning, match=r"names the mpmd axis 'stage', but the array is in one group, 1, which"):
        assert MpmdSharding(mesh, 1, P("stage", "data")) == MpmdSharding(mesh, 1, P(None, "data"))
    written_out = MpmdSharding(mesh, range(4), split={g: ((2 * g, 2 * g + 2),) for g in range(4)})
    assert written_out.is_equivalent_to(even, 2) and even.is_equivalent_to(written_out, 2)
    assert written_out.sharding.is_equivalent_to(even.sharding, 2)
    for other in (given, MpmdSharding(mesh, range(4)), MpmdSharding(mesh, range(4), P(None, "stage"))):
        assert not even.is_equivalent_to(other, 2) and not other.is_equivalent_to(even, 2)
    jax.ShapeDtypeStruct((8, 4), np.float32, sharding=given)
    with pytest.raises(ValueError, match="splits axis 0, but the array has 0 axes"):
        jax.ShapeDtypeStruct((), np.float32, sharding=even)


def test_groups_that_share_devices_or_differ_in_shape_can_be_split_too():
    one = Mesh(np.array(jax.devices()[:1]), ("x",))
    shared = MpmdSharding(MpmdMesh.from_groups([one, one]), {0, 1}, split={1: ((0, 2), (5, 8)), 0: ((2, 5),)})
    np.testing.assert_array_equal(
        MpmdArray({p.key: put_part(VALUE, p, shared) for p in shared.parts((8, 4))}, shared), VALUE
    )
    two = Mesh(np.array(jax.devices()[1:3]), ("x",))
    differ = MpmdSharding(MpmdMesh.from_groups([one, two]), {0, 1}, P(None, "x"), split_axis=0)
    np.testing.assert_array_equal(put(VALUE, differ), VALUE)
    alike = MpmdMesh.from_groups([one, Mesh(np.array(jax.devices()[1:2]), ("x",))])
    x = put(VALUE, MpmdSharding(alike, {0, 1}, P(), split_axis=1))
    np.testing.assert_array_equal(jax.device_put(VALUE, x.sharding).addressable_shards[1].data, VALUE[:, 2:])
    for sharding, fault in ((shared, "no one sharding says this"), (differ, "differ in shape or axes")):
        with pytest.raises(ValueError, match=fault):
            sharding.sharding  # noqa: B018


@pytest.mark.parametrize(
    "dtype",
    [bool, ml_dtypes.bfloat16, pytest.param(ml_dtypes.int4, marks=pytest.mark.slow), np.int8, np.complex64],
)
def test_every_dtype_can_be_split(mesh, dtype):
    value = VALUE.astype(dtype)
    x = put(value, MpmdSharding(mesh, {0, 1}, P("data"), split={1: ((0, 6),), 0: ((6, 8),)}))
    np.testing.assert_array_equal(np.asarray(x), value)
    assert x.dtype == (x + x if dtype is not bool else x | x).dtype == dtype


def test_a_result_is_split_as_is_wished_whatever_the_split_of_the_argument_in_whose_place_it_comes(mesh):
    x, wished = put(VALUE, MpmdSharding(mesh, range(4), P("stage"))), MpmdSharding(mesh, (0, 2), P(), split=UNEVEN)
    for function in (lambda x: x, lambda x: 2 * x):
        y = mpmd.jit(function, mpmd_mesh=mesh, out_shardings=wished)(x)
        assert y.mpmd_sharding.ranges(8) == wished.ranges(8)
        np.testing.assert_array_equal(y, function(VALUE))
    unasked = mpmd.jit(lambda x: 2 * x, mpmd_mesh=mesh)(x)
    assert unasked.mpmd_sharding.ranges(8) == x.mpmd_sharding.ranges(8)


def test_typed_keys_can_be_split(mesh):
    split = jax.random.split(jax.random.key(7), 8)
    x = put(split, MpmdSharding(mesh, {0, 2}, split=UNEVEN))
    data = keys.to_data(x)
    np.testing.assert_array_equal(data, jax.random.key_data(split))
    again = keys.from_data(data, split.dtype, x.mpmd_sharding)
    np.testing.assert_array_equal(jax.random.uniform(again[5]), jax.random.uniform(split[5]))
    np.testing.assert_array_equal(jax.random.key_data(jnp.stack([again, again])[1]), jax.random.key_data(split))


def message(error):
    """What the error says after the sharding or the split that it is about."""
    return str(error.value).split(":\n  ", 1)[-1]


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ({0: ((0, 4),), 3: ((4, 8),)}, "group 3 is not in mesh_ids {0, 1}\n  group 1 of mesh_ids has no range"),
        ({0: ((0, 4),)}, "group 1 of mesh_ids has no range"),
        ({0: ((0, 4),), 1: ()}, "group 1 of mesh_ids has no range"),
        ({0: ((0, 4),), 1: ((5, 8),)}, "no group has the rows 4:5"),
        ({0: ((1, 4),), 1: ((4, 8),)}, "no group has the rows 0:1"),
        ({0: ((0, 8), (2, 3)), 1: ((7, 9),)},
         "0:8 of group 0 and 2:3 of group 0 overlap\n  0:8 of group 0 and 7:9 of group 1 overlap"),
        ({0: ((0, 4), (4, 4)), 1: ((4, 8),)}, "group 0: the range 4:4 is empty"),
        ({0: ((0, 4),), 1: (4, 8)}, "group 1: (4, 8) is not a sequence of pairs of integers, ((start, stop), ...)"),
        ({0: ((0, 4.5),), 1: ((4, 8),)},
         "group 0: ((0, 4.5),) is not a sequence of pairs of integers, ((start, stop), ...)"),
        ({}, "it has no range"),
    ],
)  # fmt: skip
def test_ranges_that_make_up_no_array_are_refused(split, said):
    with pytest.raises(ValueError) as error:
        MpmdSharding(MpmdMesh(jax.make_mesh((4, 2), ("stage", "data")), "stage"), {0, 1}, P("stage"), split=split)
    assert message(error) == said


def test_what_does_not_fit_a_split_is_refused(mesh):
    even, uneven = MpmdSharding(mesh, range(4), P("stage")), MpmdSharding(mesh, {0, 2}, P("data"), split=UNEVEN)
    for act, said in (
        (lambda: even.ranges(30), r"axis 0 has 30 rows, which cannot be split evenly over 4 groups; give split="),
        (lambda: even.ranges(0), r"axis 0 has 0 rows"),
        (lambda: uneven.shards((30, 4)), r"axis 0 has 30 rows, but split covers 8"),
        (lambda: even.shard_shape(()), r"splits axis 0, but the array has 0 axes"),
        (lambda: uneven.sharding, r"no one sharding says this"),
        (lambda: uneven.shard_shape((8, 4)), r"the shards of shape \(8, 4\) differ, as the ranges differ in length"),
        (lambda: MpmdSharding(mesh, {0, 2}, split=UNEVEN).devices_indices_map((8, 4)), r"a device has several parts"),
        (lambda: MpmdSharding(mesh, {0, 2}).ranges(8), r"does not split an array: each group has all of it"),
        (lambda: MpmdSharding(mesh, {0, 1}, P("stage", "stage")), r"names 'stage' at the array axes 0, 1"),
        (lambda: MpmdSharding(mesh, {0, 1}, P("stage"), split_axis=1), r"the spec names the mpmd axis at array axis 0"),
        (lambda: MpmdSharding(mesh, {0, 1}, split_axis=-1), r"split_axis=-1, but it counts from 0"),
        (lambda: MpmdSharding(mesh, {0, 1}, split=((0, 4), (4, 8))), r"split is a tuple; give a mapping"),
        (lambda: MpmdArray([VALUE] * 3, even, (8, 4)), r"has 3 entries, but .* holds the rows 0:2, 2:4, 4:6, 6:8; one"),
        (lambda: MpmdArray({(0, 8): VALUE}, even, (8, 4)), r"has the rows 0:8, but of .* holds the rows 0:2, 2:4"),
        (lambda: MpmdArray([jnp.ones((2, 4))] * 4, even, (8, 4)), r"group 0, rows 0:2: sharding .*, expected one"),
        (lambda: MpmdArray([jnp.ones(2)] * 4, even, (8, 4)), r"group 0, rows 0:2: shape \(2,\), expected \(2, 4\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            act()
