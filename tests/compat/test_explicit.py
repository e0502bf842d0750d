"""Explicit axes, which `jax.make_mesh` gives by default: types of arguments, and code that says shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs.layers import LAYERS, WIDTH, Where
from programs.pipelines import make_mesh, make_schedule
from samples import slow_first

import mpmd
import scheduler

_QUICK = ("embedding", "auto_region", "explicit_region", "unchecked_region_of_a_group")


def _training_step(names, where, schedule):
    """A step that trains two layers of each name, one on each side of the mark."""

    def losses(params, x):
        x = jax.reshard(x, where.rows)
        first = {name: LAYERS[name](where, params[name][0], x) for name in names}
        first = mpmd.mark_stage_end(first)
        return {name: (LAYERS[name](where, params[name][1], h) ** 2).mean() for name, h in first.items()}

    def gradients(params, x):
        def total(params):
            found = losses(params, x)
            return sum(found.values()), found

        return jax.grad(total, has_aux=True)(params)

    def step(params, xs):
        grads, found = mpmd.treduce(lambda x: gradients(params, x), xs, schedule=schedule)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), found

    return step


def _arguments(names):
    matrix = jnp.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH) / WIDTH + jnp.eye(WIDTH) / 2
    return dict.fromkeys(names, (matrix, 0.9 * matrix)), jnp.linspace(-1, 1, 4 * 8 * WIDTH).reshape(4, 8, WIDTH)


_RUNS = [("OneFOneB", ()), ("ZeroBubbleH1", ("data",))]  # groups of one device and of two


def _check_layers(names, schedule, axes):
    mesh = make_mesh(2, AxisType.Explicit, axes)
    mpmd_mesh = mpmd.MpmdMesh(mesh, "stage")
    args = _arguments(names)
    with jax.set_mesh(mesh):
        plain = jax.jit(_training_step(names, Where(mesh, mesh), None))
        on_mesh = jax.device_put(args, NamedSharding(mesh, P()))
        first = plain(*on_mesh)
        second = plain(first[0], on_mesh[1])
    where = Where(mesh, mpmd_mesh.groups[1])
    step = mpmd.jit(_training_step(names, where, make_schedule(schedule, 2)), mpmd_mesh=mpmd_mesh)
    trained, losses = step(*args)
    _assert_close((trained, losses), first)
    _assert_close(step(trained, on_mesh[1]), second)


def _assert_close(found, expected):
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, 2e-5, 1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("schedule", "axes"), slow_first(*_RUNS))
def test_layers_that_say_shardings_train_as_under_jit(schedule, axes):
    _check_layers(_QUICK, schedule, axes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("schedule", "axes"), _RUNS)
def test_all_layers_that_say_shardings_train_as_under_jit(schedule, axes):
    _check_layers(tuple(LAYERS), schedule, axes)


@pytest.mark.parametrize("axes", [(), ("data",)], ids=["one_device", "two_devices"])
def test_arguments_have_the_types_of_computed_values(axes):
    mesh = make_mesh(2, AxisType.Explicit, axes)
    mpmd_mesh = mpmd.MpmdMesh(mesh, "stage")
    seen = []

    def look(*values):
        seen.append({jax.typeof(v).sharding for v in values})
        return values[0]

    def step(x, i):
        look(x, 2 * x, x.sum(), i, jnp.zeros(3))
        return x, mpmd.treduce_i(lambda k: look(k, k + 1), 2, schedule=None)

    jitted = mpmd.jit(step, mpmd_mesh=mpmd_mesh)
    placed, _ = jitted(np.ones((4, 4), np.float32), 1)
    for x in (jnp.ones((2, 4)), jax.ShapeDtypeStruct((3, 4), np.float32), placed):
        jitted.lower(x, np.int32(1))
    assert {s.mesh for types in seen for s in types} == {mpmd_mesh.groups[0].abstract_mesh}
    assert {axes for types in seen for s in types for axes in s.spec.partitions} == {None}


@pytest.mark.slow
def test_a_function_that_both_jax_and_a_step_have_traced_is_right_in_both():
    mesh = make_mesh(2, AxisType.Explicit, ("data",))
    rows = P("data", None)
    split = jax.jit(
        jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), rows), out_specs=rows, check_vma=False)
    )
    w, x = jnp.eye(4) / 2, jnp.linspace(-1, 1, 16).reshape(4, 4)

    def step(w, x):
        return jax.grad(lambda w: (split(w, jax.reshard(x, rows)) ** 2).sum())(w)

    expected = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
    for _ in range(2):
        with jax.set_mesh(mesh):
            plain = jax.jit(step)(*jax.device_put((w, x), NamedSharding(mesh, P())))
        found = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))(w, x)
        np.testing.assert_allclose(plain, expected, 2e-6)
        np.testing.assert_allclose(np.asarray(found), expected, 2e-6)


@pytest.mark.parametrize("axes", [(), ("data",)], ids=["one_device", "two_devices"])
def test_a_step_closes_over_arrays_of_a_group_and_of_the_whole_mesh(axes):
    mesh = make_mesh(2, AxisType.Explicit, axes)
    mpmd_mesh = mpmd.MpmdMesh(mesh, "stage")
    values = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    placed = mpmd.jit(lambda x: x, mpmd_mesh=mpmd_mesh)(values)
    spec = P(*axes)
    arrays = [placed, *(jax.device_put(values, NamedSharding(m, spec)) for m in (*mpmd_mesh.groups, mesh))]

    def step(x):
        def stages(x):
            for w in arrays:
                x = jnp.tanh(x @ jax.reshard(w, P()))
            return mpmd.mark_stage_end(x) @ jax.reshard(arrays[1], P())

        return mpmd.treduce(stages, x, schedule=scheduler.GPipe(2), operation=mpmd.Concat), x[0] @ placed

    expected = values[None]
    for _ in arrays:
        expected = np.tanh(expected @ values)
    found, outside = mpmd.jit(step, mpmd_mesh=mpmd_mesh)(np.stack([values, values]))
    np.testing.assert_allclose(np.asarray(found), np.concatenate([expected @ values] * 2), 2e-5, 1e-6)
    np.testing.assert_allclose(np.asarray(outside), values @ values, 2e-5, 1e-6)


# --- Flax applies the names of partitioned variables where a mesh is set --------------------------


def _flax_step(names, schedule):
    nn = pytest.importorskip("flax.linen")
    features = (4, 4) if len(names) == 3 else WIDTH

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for stage in range(2):
                x = mpmd.mark_stage_end(x) if stage else x
                init = nn.with_partitioning(nn.initializers.xavier_uniform(), names)
                x = jnp.tanh(nn.DenseGeneral(features, kernel_init=init)(x)).reshape(x.shape)
                x = nn.with_logical_constraint(x, ("batch", "width"))
            return x

    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((2, WIDTH)))

    def step(params, xs):
        def loss(params, x):
            with nn.logical_axis_rules([("batch", "data"), ("width", None)]):
                return (model.apply(params, x) ** 2).mean()

        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=schedule)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step, params, jnp.linspace(-1, 1, 4 * 2 * WIDTH).reshape(4, 2, WIDTH)


@pytest.mark.parametrize(
    ("names", "schedule", "axes", "kind"),
    [
        # Flax constrains the kernel before it gives it that rank.
        pytest.param(("data", None, None), "ZeroBubbleH1", ("data",), AxisType.Auto, marks=pytest.mark.slow),
        pytest.param((None, "data"), "OneFOneB", (), AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param((None, "data"), "OneFOneB", ("data",), AxisType.Explicit, marks=pytest.mark.exhaustive),
    ],
)
def test_flax_partitioning_is_no_constraint_where_no_mesh_is_set(names, schedule, axes, kind):
    mesh = mpmd.MpmdMesh(make_mesh(2, kind, axes), "stage")
    step, params, xs = _flax_step(names, None)
    pipelined, _, _ = _flax_step(names, make_schedule(schedule, 2))
    expected = jax.jit(step)(params, xs)
    _assert_close(mpmd.jit(pipelined, mpmd_mesh=mesh)(params, xs), expected)


def test_flax_partitioning_is_a_constraint_where_the_user_has_set_the_mesh():
    mesh = make_mesh(2, AxisType.Auto, ("data",))
    step, params, xs = _flax_step((None, "data"), scheduler.OneFOneB(2))
    jitted = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))
    assert "sharding_constraint" not in str(jitted.trace(params, xs))
    with jax.set_mesh(mesh):
        assert "sharding_constraint" in str(jitted.trace(params, xs))
    general, params, xs = _flax_step(("data", None, None), scheduler.OneFOneB(2))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="only valid for values of rank at least 3"):
        mpmd.jit(general, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage")).trace(params, xs)


@pytest.mark.parametrize(
    "kind", [pytest.param(AxisType.Auto, marks=pytest.mark.exhaustive), AxisType.Explicit], ids=str
)
def test_what_is_computed_while_a_step_is_traced_is_as_under_jit(kind):
    mesh = make_mesh(2, kind, ("data",))
    table = jax.device_put(np.ones(3, np.float32), NamedSharding(mesh, P()))

    def loss(ws, x):
        with jax.ensure_compile_time_eval():
            count = jnp.asarray(3) + 1
            is_deep = bool(count > 2)
            line = jnp.linspace(0, 1, WIDTH) * table[0]
            x = jnp.tanh(x) * line  # a traced value in between
        x = mpmd.mark_stage_end(x @ ws[0] * count)
        return ((x @ ws[1] + line) ** 2).sum() if is_deep else x.sum()

    def step(ws, xs, schedule):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)

    args = [np.eye(WIDTH, dtype=np.float32)] * 2, np.linspace(0, 1, 8 * WIDTH, dtype=np.float32).reshape(2, 4, WIDTH)
    with jax.set_mesh(mesh):
        plain = jax.jit(lambda ws, xs: step(ws, xs, None))(*args)
    found = mpmd.jit(lambda ws, xs: step(ws, xs, "1f1b"), mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))(*args)
    jax.tree.map(np.testing.assert_array_equal, found, plain)


@pytest.mark.slow
def test_rows_on_an_axis_of_length_1_meet_masks_in_groups_of_one_device():
    """XLA names no axes for a program of one device; the type of what it gives to the backward does."""

    def loss(ws, x):
        h = mpmd.mark_stage_end(jax.nn.relu(x @ ws[0]))
        return jnp.mean(jnp.where(h @ ws[1] > 0.1, jnp.abs(h), jnp.clip(h, -0.5, 0.5)))

    def step(ws, xs, schedule):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule=schedule)

    (ws, xs), mesh = _arguments(["w"]), jax.make_mesh((2, 1), ("stage", "data"), devices=jax.devices()[:2])
    args = list(ws["w"]), xs
    on_mesh = mpmd.MpmdMesh(mesh, "stage")
    jitted = mpmd.jit(
        lambda ws, xs: step(ws, xs, scheduler.OneFOneB(2)), mpmd_mesh=on_mesh, in_shardings=(None, P(None, "data"))
    )
    expected = jax.jit(lambda ws, xs: step(ws, xs, None))(*args)
    for found, plain in zip(jax.tree.leaves(jitted(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(plain), rtol=1e-6, atol=1e-7)
