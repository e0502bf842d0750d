"""The functions that move trees: what they take, what they free, what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from reshard.moving import execute, in_place, local
from reshard.moving.remote import first_difference

VALUE = np.arange(128, dtype=np.float32).reshape(16, 8)


@pytest.fixture
def whole():
    return jax.make_mesh((4, 2), ("stage", "data"))


@pytest.fixture
def mesh(whole):
    return MpmdMesh(whole, "stage")


def put(value, mesh, ids, spec=P()):  # noqa: B008
    sharding = MpmdSharding(mesh, ids, spec)
    arrays = [jax.device_put(value, sharding.group_sharding(g), may_alias=False) for g in sharding.groups]
    return MpmdArray(arrays, sharding)


def pointers(array):
    return {s.device: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


def test_a_state_goes_into_stages_and_back(whole, mesh):
    state = {
        "layers": [jax.device_put(VALUE + i, NamedSharding(whole, P("data"))) for i in range(4)],
        "tied": jax.device_put(VALUE, NamedSharding(whole, P(("stage", "data")))),
        "step": jnp.int32(3),
        "host": VALUE.copy(),
        "nothing": None,
    }
    shardings = {
        "layers": [MpmdSharding(mesh, i, P("data")) for i in range(4)],
        "tied": MpmdSharding(mesh, {0, 3}, P(None, "data")),
        "step": MpmdSharding(mesh, range(4)),
        "host": MpmdSharding(mesh, ()),
        "nothing": None,
    }
    stages = reshard.spmd_to_mpmd_reshard(mesh, state, shardings)
    assert [x.mpmd_idxs for x in stages["layers"]] == [(0,), (1,), (2,), (3,)]
    assert stages["host"].mpmd_idxs == (0,) and stages["nothing"] is None
    assert int(stages["step"]) == 3
    for group in (0, 3):
        np.testing.assert_array_equal(stages["tied"].array_in(group), VALUE)
    back = reshard.mpmd_to_spmd_reshard(mesh, stages, NamedSharding(whole, P()))
    for i in range(4):
        np.testing.assert_array_equal(back["layers"][i], VALUE + i)
    np.testing.assert_array_equal(back["host"], VALUE)
    assert back["tied"].sharding == NamedSharding(whole, P())
    assert all(x.is_deleted() for x in jax.tree.leaves(stages))


def test_what_is_in_place_stays_in_its_memory_and_survives_its_source(whole, mesh):
    big = np.ones((1024, 2048), np.float32)
    source = jax.device_put(big, NamedSharding(whole, P("data")), may_alias=False)
    # A program's result is memory that XLA owns, as a state's is.
    source = jax.jit(lambda x: x + 1)(source)
    before = pointers(source)
    moved = reshard.spmd_to_mpmd_reshard(mesh, source, MpmdSharding(mesh, {1, 2}, P("data")))
    stats = reshard.last_stats()
    assert (stats.bytes_moved, stats.bytes_copied_on_device) == (0, 0)
    after = pointers(moved)
    assert after == {device: before[device] for device in after}
    assert source.is_deleted()
    source.delete()
    np.testing.assert_array_equal(moved, big + 1)


def test_kept_shards_of_many_arrays_go_through_one_program_for_each_set_of_devices(whole, mesh):
    arrays = [jax.device_put(np.ones((512, 1024), np.float32) * i, NamedSharding(whole, P("data"))) for i in range(8)]
    in_place._identity.cache_clear()
    moved = reshard.spmd_to_mpmd_reshard(mesh, arrays, [MpmdSharding(mesh, i % 4, P("data")) for i in range(8)])
    assert in_place._identity.cache_info().currsize == 1
    assert in_place._identity(2)._cache_size() == 4
    for i, x in enumerate(moved):
        assert np.asarray(x)[0, 0] == i


def test_without_donation_nothing_is_shared(whole, mesh):
    source = jax.device_put(VALUE, NamedSharding(whole, P("data")))
    moved = reshard.spmd_to_mpmd_reshard(mesh, source, MpmdSharding(mesh, 1, P("data")), donate=False)
    assert not set(pointers(moved).values()) & set(pointers(source).values())
    moved.delete()
    np.testing.assert_array_equal(source, VALUE)


def test_an_array_that_is_moved_twice_is_freed_once_at_the_end(whole, mesh):
    source = jax.device_put(VALUE, NamedSharding(whole, P("data")))
    keys = jax.device_put(jax.random.split(jax.random.key(1), 4), NamedSharding(whole, P("data")))
    targets = [MpmdSharding(mesh, 0, P("data")), MpmdSharding(mesh, 3, P())]
    moved = reshard.spmd_to_mpmd_reshard(mesh, [source, source], targets)
    expected = np.asarray(jax.random.key_data(keys))
    moved_keys = reshard.spmd_to_mpmd_reshard(mesh, [keys, keys], targets)
    for x in moved:
        np.testing.assert_array_equal(x, VALUE)
    for x in moved_keys:
        np.testing.assert_array_equal(jax.random.key_data(x.first_mpmd_replica), expected)
        assert x.dtype == keys.dtype
    assert source.is_deleted() and keys.is_deleted()


@pytest.mark.parametrize("size", [1 << 10, 1 << 19])  # what stays in place is copied, or taken over
@pytest.mark.parametrize("groups", [(0, 0), (0, 3), (2, 3)])
def test_two_arrays_of_one_memory_both_arrive(whole, mesh, size, groups):
    params = jax.device_put(np.arange(size, dtype=np.float32), NamedSharding(whole, P(None)))
    average = jax.device_put(params, NamedSharding(whole, P()))
    assert average is not params and pointers(average) == pointers(params)
    targets = [MpmdSharding(mesh, group, P()) for group in groups]
    for x in reshard.spmd_to_mpmd_reshard(mesh, [params, average], targets):
        np.testing.assert_array_equal(x, np.arange(size, dtype=np.float32))
    assert params.is_deleted() and average.is_deleted()


def test_source_shards_are_freed_as_they_leave(whole, mesh, monkeypatch):
    source = jax.device_put(VALUE, NamedSharding(whole, P(("stage", "data"))), may_alias=False)
    shards = [s.data for s in source.addressable_shards]
    alive = []
    wait = local.LocalCarrier.wait

    def counting_wait(self):
        wait(self)
        alive.append(sum(not s.is_deleted() for s in shards))

    monkeypatch.setattr(local.LocalCarrier, "wait", counting_wait)
    reshard.spmd_to_mpmd_reshard(mesh, source, MpmdSharding(mesh, 0, P()), threshold=64)
    assert alive[0] == 8
    assert alive == sorted(alive, reverse=True)
    assert len(set(alive)) > 4
    assert all(s.is_deleted() for s in shards)


def test_a_group_may_have_another_shape_than_its_neighbour():
    devices = np.array(jax.devices())
    groups = MpmdMesh.from_groups([Mesh(devices[:4].reshape(2, 2), ("a", "b")), Mesh(devices[4:5], ("a",))])
    laptop = MpmdMesh.from_groups([Mesh(devices[5:6], ("a",))] * 2)
    x = put(VALUE, groups, 0, P("a", "b"))
    y = reshard.mpmd_to_mpmd_reshard(x, MpmdSharding(groups, {0, 1}, P("a")))
    np.testing.assert_array_equal(y.array_in(0), VALUE)
    np.testing.assert_array_equal(y.array_in(1), VALUE)
    z = reshard.mpmd_to_mpmd_reshard(y, MpmdSharding(laptop, {0, 1}, P("a")))
    assert reshard.last_stats().bytes_moved == VALUE.nbytes
    np.testing.assert_array_equal(z.array_in(1), VALUE)
    z.delete()


def test_arrays_come_from_numpy_and_go_to_numpy(mesh):
    stages = reshard.spmd_to_mpmd_reshard(mesh, {"w": VALUE}, MpmdSharding(mesh, 2, P("data")))
    back = reshard.mpmd_to_spmd_reshard(mesh, stages, reshard.HostMemory(), donate=False)
    assert isinstance(back["w"], np.ndarray)
    np.testing.assert_array_equal(back["w"], VALUE)
    np.testing.assert_array_equal(stages["w"], VALUE)


def test_host_values_get_the_dtypes_that_jax_gives_them(mesh):
    tree = {"a": np.arange(4), "b": np.float64(1.5), "c": 2, "d": True, "e": np.arange(4, dtype=">f8")}
    stages = reshard.spmd_to_mpmd_reshard(mesh, tree, MpmdSharding(mesh, 1))
    assert reshard.plan(tree, None, MpmdSharding(mesh, 1)).bytes_moved == reshard.last_stats().bytes_moved
    for name, value in tree.items():
        native = value.astype(value.dtype.newbyteorder("=")) if isinstance(value, np.ndarray) else value
        assert stages[name].dtype == stages[name].array_in(1).dtype == jnp.asarray(native).dtype
        np.testing.assert_array_equal(stages[name], value)
    with pytest.raises(reshard.ReshardError, match=rf"the int {1 << 40} is too large for int32\."):
        reshard.spmd_to_mpmd_reshard(mesh, {"a": 1 << 40}, MpmdSharding(mesh, 1))
    with pytest.raises(reshard.ReshardError, match=r"\['a'\]: is a str, not an array"):
        reshard.plan({"a": "text"}, None, MpmdSharding(mesh, 1))


def test_the_result_is_donated_to_a_program_like_any_other(mesh):
    stages = reshard.spmd_to_mpmd_reshard(mesh, VALUE, MpmdSharding(mesh, 2, P("data")))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(step(stages.array_in(2)))
    np.testing.assert_array_equal(x, VALUE + 2)


def test_progress_is_reported_up_to_the_end(mesh, whole, capsys):
    seen = []
    source = [jax.device_put(VALUE, NamedSharding(whole, P(("stage", "data")))) for _ in range(3)]
    targets = MpmdSharding(mesh, 1, P())
    reshard.spmd_to_mpmd_reshard(mesh, source, targets, threshold=128, progress=seen.append)
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert (seen[-1].arrays_done, seen[-1].arrays_total) == (3, 3)
    assert seen[-1].bytes_done == seen[-1].bytes_total == 3 * 2 * VALUE.nbytes
    reshard.spmd_to_mpmd_reshard(mesh, VALUE, targets, progress=True)
    assert "100%  1/1 arrays" in capsys.readouterr().err


def test_every_bad_array_is_named_before_anything_moves(mesh, whole):
    other = MpmdMesh(whole, "data")
    deleted = jax.device_put(VALUE, NamedSharding(whole, P()))
    deleted.delete()
    good = jax.device_put(VALUE, NamedSharding(whole, P()))
    tree = {"a": deleted, "b": good, "c": good, "d": "text", "e": put(VALUE, mesh, 0), "f": good}
    ok = MpmdSharding(mesh, 1)
    shardings = {"a": ok, "b": MpmdSharding(other, 1), "c": NamedSharding(whole, P()), "d": ok, "e": ok, "f": P()}
    with pytest.raises(reshard.ReshardError) as error:
        reshard.spmd_to_mpmd_reshard(mesh, tree, {k: shardings[k] for k in "abcde"} | {"f": ok})
    assert str(error.value) == (
        "these arrays cannot be moved as asked; nothing was moved:\n"
        "  ['a']: has been deleted\n"
        "  ['b']: goes to another mesh, MpmdMesh('stage': 4, 'data': 2; 2 groups along 'data')\n"
        "  ['c']: goes to a NamedSharding, not an MpmdSharding\n"
        "  ['d']: is a str, not an array\n"
        "  ['e']: is an MpmdArray already; use mpmd_to_mpmd_reshard"
    )
    assert not good.is_deleted()


def test_specs_thresholds_and_structures_that_do_not_fit_are_refused(mesh, whole):
    array = jax.device_put(np.ones((7, 8), np.float32), NamedSharding(whole, P()))
    with pytest.raises(reshard.ReshardError, match=r"\['w'\]: to: .*evenly divide"):
        reshard.spmd_to_mpmd_reshard(mesh, {"w": array}, MpmdSharding(mesh, 1, P("data")))
    with pytest.raises(reshard.ReshardError, match=r"one element has 4 bytes, more than threshold=2"):
        reshard.spmd_to_mpmd_reshard(mesh, {"w": array}, MpmdSharding(mesh, 1, P(None, "data")), threshold=2)
    with pytest.raises(reshard.ReshardError, match=r"threshold=-1 is no amount of memory"):
        reshard.spmd_to_mpmd_reshard(mesh, {"w": array}, MpmdSharding(mesh, 1), threshold=-1)
    with pytest.raises(reshard.ReshardError, match="mpmd_shardings: its structure is not that of the arrays"):
        reshard.spmd_to_mpmd_reshard(mesh, {"w": array}, {"v": MpmdSharding(mesh, 1)})
    with pytest.raises(reshard.ReshardError, match="is a ArrayImpl, not an MpmdArray"):
        reshard.mpmd_to_spmd_reshard(mesh, array, NamedSharding(whole, P()))
    described = MpmdMesh(reshard.describe_mesh({"stage": 2, "data": 2}), "stage")
    with pytest.raises(reshard.ReshardError, match="goes to 2 devices of other processes"):
        reshard.spmd_to_mpmd_reshard(described, array, MpmdSharding(described, 1))
    assert not array.is_deleted()


def test_a_failure_on_the_way_says_which_sources_are_still_valid(mesh, whole, monkeypatch):
    arrays = {
        name: jax.device_put(np.ones((size, 8), np.float32), NamedSharding(whole, P(("stage", "data"))))
        for name, size in (("large", 32), ("small", 8))
    }
    open_sink = execute.open_sink

    def fails(device, shape, dtype, memory_kind):
        if shape[0] == 8:
            raise MemoryError("no room")
        return open_sink(device, shape, dtype, memory_kind)

    monkeypatch.setattr(execute, "open_sink", fails)
    with pytest.raises(RuntimeError) as error:
        reshard.spmd_to_mpmd_reshard(mesh, arrays, MpmdSharding(mesh, 2), threshold=512)
    assert str(error.value) == (
        "the reshard failed on the way; see the error above.\n"
        "  consumed, whole or in part: ['large']\n"
        "  still valid: ['small']"
    )
    assert isinstance(error.value.__cause__, MemoryError)
    np.testing.assert_array_equal(arrays["small"], np.ones((8, 8)))


def test_the_default_threshold_is_a_third_of_the_free_memory_of_a_device(monkeypatch):
    monkeypatch.setattr("reshard.api._free_host_memory", lambda: 2400)
    assert reshard.api.default_threshold() == 100


def test_stacking_groups_moves_nothing(mesh, whole):
    x = put(VALUE, mesh, range(4), P("data"))
    stacked = reshard.logically_stacked(x, whole, "stage")
    assert stacked.shape == (4, 16, 8)
    assert stacked.sharding == NamedSharding(whole, P("stage", "data", None))
    np.testing.assert_array_equal(stacked, np.stack([VALUE] * 4))
    last = reshard.logically_stacked(x.to_mpmd_local_array, whole, "stage", array_axis=2, strict=True)
    np.testing.assert_array_equal(last, np.stack([VALUE] * 4, axis=2))
    with pytest.raises(reshard.ReshardError, match="give the array of every local group"):
        reshard.logically_stacked(x.array_in(1), whole, "stage")
    with pytest.raises(reshard.ReshardError, match="'pipe' is not an axis"):
        reshard.logically_stacked(x, whole, "pipe")


def test_a_stack_takes_its_axis_from_the_end_too(mesh, whole):
    x = put(VALUE, mesh, range(4), P("data"))
    np.testing.assert_array_equal(
        reshard.logically_stacked(x, whole, "stage", array_axis=-1), np.stack([VALUE] * 4, axis=-1)
    )
    with pytest.raises(reshard.ReshardError) as raised:
        reshard.logically_stacked(x, whole, "stage", array_axis=3)
    assert str(raised.value) == (
        "logically_stacked: array_axis is 3; the stack of arrays with 2 axes has 3, so expected -3 to 2."
    )


@pytest.mark.parametrize(
    ("spec", "order"), [(P("y", "x"), slice(None)), (P("x", "y"), slice(None, None, -1))], ids=["spec", "devices"]
)
def test_arrays_that_lie_otherwise_than_their_stack_are_refused(spec, order):
    value = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    stack = jax.make_mesh((2, 2, 2), ("stage", "x", "y"))
    first, second = Mesh(stack.devices[0], ("x", "y")), Mesh(stack.devices[1][order], ("x", "y"))
    arrays = [
        jax.device_put(value, NamedSharding(first, P("x", "y"))),
        jax.device_put(value, NamedSharding(second, spec)),
    ]
    with pytest.raises(reshard.ReshardError, match=r"has Box\[.*\] of its array, but has Box\[.*\] by P\('stage', 'x'"):
        reshard.logically_stacked(arrays, stack, "stage")


def test_host_arrays_of_what_no_device_holds_are_refused(mesh):
    names = {"names": np.array(["a", "b"]), "w": VALUE}
    with pytest.raises(reshard.ReshardError) as raised:
        reshard.spmd_to_mpmd_reshard(mesh, names, MpmdSharding(mesh, 0))
    assert str(raised.value) == (
        "these arrays cannot be moved as asked; nothing was moved:\n"
        "  ['names']: has the dtype <U1, which JAX has no arrays of"
    )


@pytest.mark.parametrize(("one", "other", "at"), [([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([4, 5], [4], 1)])
def test_two_lists_of_arrays_differ_where_one_of_them_ends(one, other, at):
    assert first_difference(one, other) == at


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
def test_a_mesh_that_the_caller_has_set_changes_nothing(mesh, whole, donate):
    """Shards of more than 1 MiB go through a program, which JAX would refuse on other devices than the mesh's."""
    big, small = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024), np.arange(32, dtype=np.float32).reshape(4, 8)
    target = MpmdSharding(mesh, 1, P("data"))
    with jax.set_mesh(whole):
        tree = jax.device_put([big, small], NamedSharding(whole, P("data")))
        for threshold in (None, 0, 1 << 16):
            moved = reshard.spmd_to_mpmd_reshard(mesh, tree, target, threshold=threshold, donate=donate)
            tree = reshard.mpmd_to_spmd_reshard(mesh, moved, NamedSharding(whole, P("data")), threshold, donate)
            for found, expected in zip(tree, (big, small), strict=True):
                np.testing.assert_array_equal(found, expected)
        assert jax.sharding.get_abstract_mesh() == whole.abstract_mesh


def test_a_program_that_fails_takes_no_source_with_it(mesh, whole, monkeypatch):
    def fails(*args):
        raise ValueError("no program")

    monkeypatch.setattr(in_place, "_identity", fails)
    tree = jax.device_put([np.ones((1024, 1024), np.float32), np.ones((4, 8), np.float32)], NamedSharding(whole, P()))
    with pytest.raises(RuntimeError) as error:
        reshard.spmd_to_mpmd_reshard(mesh, tree, MpmdSharding(mesh, range(4)))
    assert str(error.value) == ("the reshard failed on the way; see the error above.\n  still valid: [0], [1]")
    assert float(tree[0].sum()) == 1 << 20 and float(tree[1].sum()) == 32
