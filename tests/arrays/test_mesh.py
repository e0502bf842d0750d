"""Groups of a mesh, and shardings over them, on Explicit, Auto and mixed axes alike."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding

AXIS_TYPES = {
    "explicit": (AxisType.Explicit,) * 2,
    "auto": (AxisType.Auto,) * 2,
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
axis_types = pytest.mark.parametrize("axis_types", AXIS_TYPES.values(), ids=AXIS_TYPES.keys())


def whole_mesh(axis_types=AXIS_TYPES["explicit"]):
    return jax.make_mesh((4, 2), ("stage", "data"), axis_types=axis_types)


@axis_types
def test_a_mesh_is_cut_along_one_axis_that_groups_keep_at_size_one(axis_types):
    whole = whole_mesh(axis_types)
    mesh = MpmdMesh(whole, "stage")
    assert mesh.num_groups == mesh.mpmd_dim == 4
    assert mesh.groups == mesh.unstack
    for group, part in enumerate(mesh.groups):
        assert part.axis_names == ("stage", "data")
        assert part.axis_types == axis_types
        assert part.devices.tolist() == whole.devices[group : group + 1].tolist()
        assert [mesh.group_of(d) for d in part.devices.flat] == [group] * 2
    assert mesh.local_groups == (0, 1, 2, 3)
    assert mesh.tracing_mesh() is whole
    assert mesh.lowering_mesh() is mesh.groups[0]
    assert not mesh.groups_share_devices


def test_the_mpmd_axis_may_be_any_axis():
    mesh = MpmdMesh(whole_mesh(), "data")
    assert [dict(group.shape) for group in mesh.groups] == [{"stage": 4, "data": 1}] * 2


@axis_types
def test_meshes_compare_by_value_and_are_dictionary_keys(axis_types):
    assert MpmdMesh(whole_mesh(axis_types), "stage") == MpmdMesh(whole_mesh(axis_types), "stage")
    assert MpmdMesh(whole_mesh(axis_types), "stage") != MpmdMesh(whole_mesh(axis_types), "data")
    assert len({MpmdMesh(whole_mesh(axis_types), "stage") for _ in range(3)}) == 1
    groups = MpmdMesh(whole_mesh(axis_types), "stage").groups
    assert MpmdMesh.from_groups(groups) == MpmdMesh.from_groups(list(groups))
    assert MpmdMesh.from_groups(groups) != MpmdMesh(whole_mesh(axis_types), "stage")


@axis_types
def test_a_submesh_has_some_groups_in_the_given_order(axis_types):
    mesh = MpmdMesh(whole_mesh(axis_types), "stage")
    assert mesh.mpmd_submesh([3, 1]).groups == (mesh.groups[3], mesh.groups[1])
    separate = MpmdMesh.from_groups(mesh.groups)
    assert separate.mpmd_submesh([3, 1]) == MpmdMesh.from_groups([mesh.groups[3], mesh.groups[1]])
    with pytest.raises(ValueError) as error:
        mesh.mpmd_submesh([0, 4])
    assert str(error.value) == "mpmd_submesh: ids=[0, 4] must be one or more different groups out of 0..3."


def test_separate_groups_may_differ_in_shape_names_and_size():
    devices = np.array(jax.devices())
    groups = [
        Mesh(devices[:4].reshape(2, 2), ("data", "model")),
        Mesh(devices[4:6], ("data",), axis_types=(AxisType.Explicit,)),
        Mesh(devices[6:7], ("x",)),
    ]
    mesh = MpmdMesh.from_groups(groups)
    assert (mesh.jax_mesh, mesh.mpmd_axis_name) == (None, None)
    assert mesh.groups == tuple(groups)
    assert mesh.tracing_mesh() is mesh.lowering_mesh() is groups[0]
    assert mesh.group_of(devices[5]) == 1
    assert not mesh.groups_share_devices
    assert repr(mesh) == "MpmdMesh(groups ('data': 2, 'model': 2), ('data': 2), ('x': 1))"
    with pytest.raises(ValueError, match="is in no group of"):
        mesh.group_of(devices[7])


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
def test_groups_may_have_their_axes_in_another_order(kind):
    """`P("data")` are other rows of each device there: values are not moved device by device."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    names = ("data", "model"), ("model", "data")
    mesh = MpmdMesh.from_groups([Mesh(d, n, axis_types=(kind,) * 2) for d, n in zip(devices, names, strict=True)])

    def loss(ws, x):
        return (mpmd.mark_stage_end(jnp.tanh(x @ ws[0])) @ ws[1] * x).sum()

    def step(ws, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, "1f1b")

    rng = np.random.default_rng(0)
    ws, xs = ([rng.normal(size=(4, 4)).astype(np.float32) for _ in range(2)], rng.normal(size=(2, 8, 4)))
    got = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(None, P(None, "data")))(ws, xs.astype(np.float32))
    for one, two in zip(jax.tree.leaves(mpmd.device_get(got)), jax.tree.leaves(jax.jit(step)(ws, xs)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_all_groups_may_share_one_device():
    one = Mesh(jax.devices()[:1], ("data",))
    mesh = MpmdMesh.from_groups([one] * 3)
    assert mesh.groups_share_devices
    assert mesh.local_groups == (0, 1, 2)
    assert mesh.group_of(jax.devices()[0]) == 0
    assert repr(mesh) == "MpmdMesh(3 groups of ('data': 1), on shared devices)"


def test_a_process_with_several_groups_has_no_group_of_its_own():
    mesh = MpmdMesh(whole_mesh(), "stage")
    with pytest.raises(ValueError) as error:
        _ = mesh.my_mpmd_axis_index
    assert str(error.value) == (
        "this process has 4 groups of MpmdMesh('stage': 4, 'data': 2; 4 groups along 'stage'), not exactly one.\n"
        "  Use .local_groups, which may have any number."
    )
    single = mesh.mpmd_submesh([2])
    assert single.my_mpmd_axis_index == 0
    assert single.my_mpmd_group_mesh == mesh.groups[2]


def test_wrong_meshes_are_refused_with_what_was_expected():
    with pytest.raises(ValueError) as error:
        MpmdMesh(whole_mesh(), "pipe")
    assert str(error.value) == "MpmdMesh: mpmd_axis_name='pipe' is not an axis of the mesh, which has 'stage', 'data'."
    with pytest.raises(ValueError, match=r"use MpmdMesh.from_groups"):
        MpmdMesh([whole_mesh()], "stage")
    with pytest.raises(ValueError, match="no groups given"):
        MpmdMesh.from_groups([])
    with pytest.raises(ValueError, match=r"groups\[0\] is a Device, not a jax.sharding.Mesh"):
        MpmdMesh.from_groups(jax.devices())
    with pytest.raises(ValueError, match=r"no whole one: `with mesh:` has nothing to enter.\n  Use `with mesh.groups"):
        MpmdMesh.from_groups([whole_mesh()]).__enter__()


def test_a_mesh_is_a_context_manager_as_the_whole_mesh_is():
    mesh = MpmdMesh(whole_mesh(AXIS_TYPES["auto"]), "stage")
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    step = mpmd.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, P(None, "data")), mpmd_mesh=mesh)
    with mesh as entered, mesh:
        assert entered is mesh
        inside = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data")))(x)
        np.testing.assert_array_equal(step(x), x * 2)
    assert inside.sharding.is_equivalent_to(NamedSharding(mesh.jax_mesh, P("data")), 2)
    np.testing.assert_array_equal(step(x), x * 2)


@axis_types
def test_a_group_sharding_is_the_spec_on_the_groups_mesh_without_the_mpmd_axis(axis_types):
    mesh = MpmdMesh(whole_mesh(axis_types), "stage")
    with pytest.warns(UserWarning, match="names the mpmd axis"):
        assert MpmdSharding(mesh, 1, P(None, ("stage", "data"))) == MpmdSharding(mesh, 1, P(None, "data"))
    assert MpmdSharding(mesh, {1, 3}, P(None, ("stage", "data"))).spec == P(None, "data")
    sharding = MpmdSharding(mesh, {1, 3}, P(None, "data"))
    assert sharding.spec == P(None, "data")
    assert sharding.groups == (1, 3)
    assert sharding.group_sharding(3) == NamedSharding(mesh.groups[3], P(None, "data"))
    assert sharding.group_sharding(3) is sharding.group_sharding(3)
    assert sharding.shard_shape((4, 4)) == (4, 2)
    assert repr(sharding) == "MpmdSharding(groups {1, 3} of 4, P(None, 'data'))"


def test_shardings_are_values_and_coerce_their_arguments():
    mesh = MpmdMesh(whole_mesh(), "stage")
    assert MpmdSharding(mesh, 2, "data") == MpmdSharding(mesh, [2], P("data")) == MpmdSharding(mesh, {2}, ("data",))
    assert len({MpmdSharding(mesh, 2, None), MpmdSharding(mesh, {np.int64(2)}, P())}) == 1
    assert MpmdSharding(mesh, 2, "data") != MpmdSharding(mesh, 2, "data", memory_kind="pinned_host")
    assert MpmdSharding(mesh, (), "data").groups == (0,)
    assert MpmdSharding(mesh, 2, "data").replace(mesh_ids=1) == MpmdSharding(mesh, 1, "data")
    split = MpmdSharding(mesh, {0, 1}, "data", split={0: ((0, 3), (5, 8)), 1: ((3, 5),)}, split_axis=1)
    assert dataclasses.replace(split, memory_kind="pinned_host") == split.replace(memory_kind="pinned_host")
    assert dataclasses.replace(MpmdSharding(mesh, {0, 1}, P("stage")), mesh_ids={1, 2}).split_axis == 0
    with pytest.raises(AttributeError):
        MpmdSharding(mesh, 2).spec = P("data")


def test_equivalent_shardings_place_an_array_alike():
    mesh = MpmdMesh(whole_mesh(), "stage")
    assert MpmdSharding(mesh, 1, P("data")).is_equivalent_to(MpmdSharding(mesh, 1, P("data", None)), 2)
    assert not MpmdSharding(mesh, 1, P("data")).is_equivalent_to(MpmdSharding(mesh, 2, P("data")), 2)
    assert not MpmdSharding(mesh, 1, P("data")).is_equivalent_to(MpmdSharding(mesh, 1, P(None, "data")), 2)
    assert MpmdSharding(mesh, (), P()).is_equivalent_to(MpmdSharding(mesh, 0, P()), 1)


def test_memory_kinds_reach_the_groups():
    mesh = MpmdMesh(whole_mesh(), "stage")
    sharding = MpmdSharding(mesh, 1, P("data"), memory_kind="pinned_host")
    assert sharding.group_sharding(1).memory_kind == "pinned_host"
    with pytest.raises(ValueError, match="group 1: Could not find memory addressable by device"):
        MpmdSharding(mesh, 1, P("data"), memory_kind="attic")


def test_specs_that_a_group_cannot_follow_are_refused_for_all_groups_at_once():
    mesh = MpmdMesh(whole_mesh(), "stage")
    with pytest.raises(ValueError) as error:
        MpmdSharding(mesh, {0, 1}, P("model"))
    assert str(error.value) == (
        "MpmdSharding: spec=P('model',) does not fit:\n"
        "  group 0 has axes 'stage', 'data', but no 'model'\n"
        "  group 1 has axes 'stage', 'data', but no 'model'"
    )
    with pytest.raises(ValueError, match="has duplicate entries for `data`"):
        MpmdSharding(mesh, 0, P("data", "data"))
    with pytest.raises(ValueError, match="must be said in full"):
        MpmdSharding(mesh, 0, P(P.UNCONSTRAINED))
    with pytest.raises(ValueError, match="spec=3 is a int, not a"):
        MpmdSharding(mesh, 0, 3)
    with pytest.raises(ValueError) as error:
        MpmdSharding(mesh, {1, 7})
    assert str(error.value) == (
        "MpmdSharding: mesh_ids has 7, but MpmdMesh('stage': 4, 'data': 2; 4 groups along 'stage') has groups 0..3."
    )


def test_a_spec_is_checked_against_the_groups_that_hold_the_array_alone():
    devices = np.array(jax.devices())
    mesh = MpmdMesh.from_groups([Mesh(devices[:2], ("data",)), Mesh(devices[2:4], ("model",))])
    assert MpmdSharding(mesh, 1, P("model")).group_sharding(1).spec == P("model")
    with pytest.raises(ValueError, match="group 0 has axes 'data', but no 'model'"):
        MpmdSharding(mesh, {0, 1}, P("model"))


def test_a_copy_of_a_configuration_has_the_same_mesh_and_step():
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    configuration = {"mesh": mesh, "step": mpmd.jit(lambda x: x + 1, mpmd_mesh=mesh), "lists": [1]}
    found = copy.deepcopy(configuration)
    assert found["mesh"] is mesh and found["step"] is configuration["step"] and found["step"].mpmd_mesh is mesh
    assert found["lists"] is not configuration["lists"]
