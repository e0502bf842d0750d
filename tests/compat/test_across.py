"""Values across groups: placed, summed and stacked by the user; groups and shardings that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from programs.parts import (
    WIDTH,
    chain,
    cross_entropy,
    dense_params,
    normal,
    regression_batch,
    residual,
    squared_error,
    stages_params,
    token_batch,
)
from programs.pipelines import make_mesh, shared_device
from programs.program import Tools, assert_same, host
from samples import slow_first

import mpmd
import scheduler

MARKS = Tools(mark=mpmd.mark_stage_end, reduce=None, reduce_i=None)


def _gradients(params, batch, schedule):
    def loss(params, microbatch):
        return squared_error(chain(MARKS, params, microbatch["x"]), microbatch["y"])

    return mpmd.treduce(lambda m: jax.value_and_grad(loss)(params, m), batch, schedule=schedule, operation=mpmd.Mean)


def _squares(grads):
    return [sum(jnp.vdot(g, g) for g in jax.tree.leaves(stage)) for stage in grads]


def _clipped(reduce, stack):
    """A step that clips by the global norm, and reports the norms of all stages."""

    def step(params, batch, schedule):
        value, grads = _gradients(params, batch, schedule)
        squares = _squares(grads)
        norm = jnp.sqrt(reduce(squares))
        scale = 0.1 / jnp.maximum(norm, 0.01)
        return jax.tree.map(lambda p, g: p - scale * g, params, grads), {"loss": value, "norms": stack(squares)}

    return step


def _check(step, mesh, *args, schedule=None, **options):
    """Two calls of `step(params, batch, schedule)` equal plain JAX, the second from the first one's parameters."""
    schedule = schedule or scheduler.OneFOneB(4)
    jitted = mpmd.jit(lambda p, b: step(p, b, schedule), mpmd_mesh=mesh, **options)
    plain = jax.jit(lambda p, b: step(p, b, None))
    params = expected = args[0]
    for batch in args[1:]:
        params, out = jitted(params, batch)
        expected, wanted = plain(expected, batch)
        assert_same(host((params, out)), host((expected, wanted)), 2e-5)
    return jitted, out


def _batches():
    return [regression_batch(jax.random.key(seed)) for seed in (1, 2)]


SCHEDULES = [scheduler.OneFOneB(4), scheduler.ZeroBubbleH1(4)]


WAYS = [
    pytest.param(AxisType.Auto, SCHEDULES[0], id="auto-OneFOneB", marks=pytest.mark.exhaustive),
    pytest.param(AxisType.Explicit, SCHEDULES[1], id="explicit-ZeroBubbleH1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axis_type", "schedule"), WAYS)
def test_norms_are_summed_and_stacked_over_the_groups(schedule, axis_type):
    mesh = mpmd.MpmdMesh(make_mesh(4, axis_type), "stage")
    params = stages_params(jax.random.key(0))
    step = _clipped(mpmd.cross_mpmd_all_reduce, mpmd.cross_mpmd_stack)
    jitted, out = _check(step, mesh, params, *_batches(), schedule=schedule)
    assert out["norms"].mpmd_idxs == (0, 1, 2, 3)
    # The same as said in plain JAX, which has the reduction in one group:
    by_hand = _clipped(lambda s: s[0] + s[1] + s[2] + s[3], jnp.stack)
    _check(by_hand, mesh, params, *_batches(), schedule=schedule)
    text = str(jitted.lower(params, _batches()[0]))
    sent = [line for line in text.splitlines() if line.startswith("  send")]
    # Each of the four squares to the three other groups; the loss, which all groups return, is packed with the last.
    assert [sum(f"({n} B)" in line for line in sent) for n in (4, 8)] == [3 * 3, 3] and len(sent) == 12, text


@pytest.mark.slow
def test_an_all_reduce_has_the_same_bits_in_every_group():
    mesh = mpmd.MpmdMesh(make_mesh(4, AxisType.Auto), "stage")

    def step(params, batch):
        _, grads = _gradients(params, batch, scheduler.OneFOneB(4))
        return mpmd.cross_mpmd_all_reduce([stage["w"] for stage in grads])

    total = mpmd.jit(step, mpmd_mesh=mesh)(stages_params(jax.random.key(0)), _batches()[0])
    arrays = [np.asarray(total._arrays[g]) for g in range(4)]
    assert all(a.tobytes() == arrays[0].tobytes() for a in arrays)


def test_large_parts_are_summed_in_one_group_and_sent_from_there():
    mesh = mpmd.MpmdMesh(make_mesh(2, AxisType.Auto), "stage")
    size = 40_000
    parts = [jnp.arange(size, dtype=jnp.float32), jnp.ones(size)]
    in_shardings = ([mpmd.MpmdSharding(mesh, g) for g in range(2)],)
    step = mpmd.jit(mpmd.cross_mpmd_all_reduce, mpmd_mesh=mesh, in_shardings=in_shardings)
    text = str(step.lower(parts))
    assert text.count("send") == 2, text
    total = step(parts)
    np.testing.assert_array_equal(total, parts[0] + parts[1])
    assert total.mpmd_idxs == (0, 1)


def test_outside_of_mpmd_jit_they_are_plain_jax():
    parts = [{"a": jnp.ones(2), "n": jnp.int32(1)}, {"a": jnp.arange(2.0), "n": jnp.int32(3)}]
    for wrap in (lambda f: f, jax.jit):
        total = wrap(mpmd.cross_mpmd_all_reduce)(parts)
        assert total["a"].tolist() == [1, 2] and int(total["n"]) == 4
        assert int(wrap(lambda: mpmd.cross_mpmd_all_reduce(jnp.int32(1), 2))()) == 3
        assert wrap(mpmd.cross_mpmd_stack)({"x": 1.0, "y": 2.0}).tolist() == [1, 2]
        assert wrap(mpmd.cross_mpmd_all_reduce)([jnp.array(True), jnp.array(False)]).tolist() is True
        assert wrap(lambda x: mpmd.place(x, 3))(jnp.ones(2)).tolist() == [1, 1]
        assert wrap(mpmd.cross_mpmd_all_reduce)(jnp.ones(2)).tolist() == [1, 1]

    def fun(x):
        return jnp.sum(mpmd.cross_mpmd_stack([x, x * x])) + mpmd.place(mpmd.cross_mpmd_all_reduce(x, x), 0)

    assert float(jax.grad(fun)(3.0)) == 1 + 6 + 2
    assert jax.vmap(mpmd.cross_mpmd_all_reduce, (0, None))(jnp.arange(3.0), 1.0).tolist() == [1, 2, 3]


# --- place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(SCHEDULES[0], marks=pytest.mark.exhaustive), pytest.param(SCHEDULES[1], marks=pytest.mark.slow)],
    ids=str,
)
def test_values_are_placed_where_the_user_says(schedule):
    mesh = mpmd.MpmdMesh(make_mesh(4, AxisType.Auto, ("data",)), "stage")

    def step(params, batch, schedule):
        value, grads = _gradients(params, batch, schedule)
        shift = mpmd.place(grads[3]["w"], 1)
        out = {
            "loss": mpmd.place(value, 2),
            "both": mpmd.place({"w": grads[0]["w"]}, {1, 3}),
            "shift": shift @ shift,
        }
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), out

    jitted, out = _check(step, mesh, stages_params(jax.random.key(0)), *_batches(), schedule=schedule)
    assert out["loss"].mpmd_idxs == (2,)
    assert out["both"]["w"].mpmd_idxs == (1, 3)
    assert out["shift"].mpmd_idxs == (1,)
    text = str(jitted.lower(stages_params(jax.random.key(0)), _batches()[0]))
    assert text.count("(256 B) from group 3 to 1") == 1 and text.count("(256 B) from group 0 to") == 2, text


def test_an_argument_is_put_directly_where_it_is_placed():
    mesh = shared_device(3)
    step = mpmd.jit(lambda x: jnp.sin(mpmd.place(x, 2)), mpmd_mesh=mesh)
    compiled = step.lower(jnp.ones(3)).compile()
    assert compiled.input_shardings[0][0].mesh_ids == {2}
    assert "send" not in compiled.as_text()


def test_state_that_is_placed_elsewhere_comes_back_to_its_group():
    mesh = mpmd.MpmdMesh(make_mesh(4, AxisType.Auto), "stage")

    def step(params, batch, schedule):
        value, grads = _gradients(params, batch, schedule)
        new = jax.tree.map(lambda p, g: p - 0.1 * mpmd.place(g, 0), params, grads)
        return new, value

    jitted, _ = _check(step, mesh, stages_params(jax.random.key(0)), *_batches())
    compiled = jitted.lower(stages_params(jax.random.key(0)), _batches()[0]).compile()
    groups = [p["w"].mesh_ids for p in compiled.output_shardings[0]]
    assert groups == [{0}, {1}, {2}, {3}]


def test_place_in_a_loop_without_a_schedule_is_the_identity():
    step = mpmd.jit(
        lambda xs: mpmd.treduce(lambda x: mpmd.place(x, 0) + 1, xs, schedule=None), mpmd_mesh=shared_device(2)
    )
    assert float(step(jnp.arange(3.0))) == 6


def _refused(step, *args, num_groups=2):
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.jit(step, mpmd_mesh=shared_device(num_groups)).lower(*args)
    return "\n".join(line.split(", at ")[0] for line in str(raised.value).splitlines())


def test_a_group_that_is_not_there_is_refused():
    message = _refused(lambda x: mpmd.place(x, 5), jnp.ones(2))
    assert message.startswith("place at ") and message.endswith(": group 5 is not there; the mesh has groups 0..1.")


def test_a_group_that_is_no_group_is_refused():
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.place(jnp.ones(2), "stage")
    assert str(raised.value) == ("place: group is 'stage'. Pass the index of a group, or several: place(x, {0, 3}).")


def test_place_inside_a_loop_is_refused():
    def step(w, xs):
        return mpmd.treduce(
            lambda x: jnp.sum(mpmd.place(mpmd.mark_stage_end(x * w), 1)), xs, schedule=scheduler.GPipe(2)
        )

    assert _refused(step, jnp.ones(3), jnp.ones((4, 3))) == (
        "place or a cross_mpmd function inside treduce\n  Use it outside of treduce, on values that go in or come out."
    )


def test_an_all_reduce_inside_a_scan_is_refused():
    def step(xs):
        return jax.lax.scan(lambda c, x: (c + mpmd.cross_mpmd_all_reduce([x, x]), None), 0.0, xs)[0]

    assert _refused(step, jnp.ones(3)) == (
        "place or a cross_mpmd function inside scan\n  Use it outside of scan, on values that go in or come out."
    )


def test_parts_that_differ_are_refused():
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.cross_mpmd_all_reduce([{"w": jnp.ones(2)}, {"w": jnp.ones(3)}])
    assert str(raised.value) == (
        "cross_mpmd_all_reduce: part 1 is {w: f32[3]}, but part 0 is {w: f32[2]}.\n"
        "  All parts need the same structure, shapes and dtypes."
    )
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.cross_mpmd_stack([])
    assert str(raised.value) == (
        "cross_mpmd_stack: no parts were given. Pass a list of values, one of each group that has one."
    )


def test_an_mpmd_array_outside_of_a_step_is_refused():
    x = mpmd.jit(lambda x: x + 1, mpmd_mesh=shared_device(2))(jnp.ones(2))
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.place(x, 1)
    assert str(raised.value) == (
        "place: got an MpmdArray, so it was called outside of the step.\n"
        "  Call it inside the function that mpmd.jit compiles; to move an array between groups use"
        " reshard.mpmd_to_mpmd_reshard."
    )


# --- groups that differ ---------------------------------------------------------------------------


def _groups(*shapes, axis_type=AxisType.Auto):
    """One mesh per group, on devices of its own, with a "data" and a "model" axis."""
    meshes, first = [], 0
    for shape in shapes:
        count = int(np.prod(shape))
        devices = np.array(jax.devices()[first : first + count]).reshape(shape)
        meshes.append(Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2))
        first += count
    return mpmd.MpmdMesh.from_groups(meshes)


@pytest.mark.parametrize("schedule", slow_first(scheduler.ZeroBubbleH1(3), scheduler.OneFOneB(3)), ids=str)
def test_a_larger_group_for_the_embedding(schedule):
    """The tied table is sharded over four devices in the first group, and over two in the last."""
    mesh = _groups((1, 4), (1, 2), (1, 2))

    def loss(params, batch):
        x = mpmd.mark_stage_end(params["table"][batch["tokens"]])
        x = mpmd.mark_stage_end(residual(params["layer"], x))
        return cross_entropy(x @ params["table"].T, batch["targets"])

    def step(params, batch, schedule):
        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, m), batch, schedule=schedule, operation=mpmd.Mean
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}

    key = jax.random.key(0)
    params = {"table": normal(key, 16, WIDTH), "layer": dense_params(key)}
    batches = [jax.tree.map(lambda t: t % 11, token_batch(jax.random.key(seed))) for seed in (1, 2)]
    specs = {"table": P(None, "model"), "layer": P()}
    jitted, _ = _check(step, mesh, params, *batches, schedule=schedule, in_shardings=(specs, P()))
    compiled = jitted.lower(params, batches[0]).compile()
    table = compiled.input_shardings[0][0]["table"]
    assert table.mesh_ids == {0, 2}
    assert [table.group_sharding(g).shard_shape((16, WIDTH)) for g in (0, 2)] == [(16, 2), (16, 4)]


@pytest.mark.parametrize(("axis_type", "schedule"), WAYS)
def test_a_stage_receives_another_sharding_than_was_sent(axis_type, schedule):
    """Stages shard rows and columns in turn."""
    mesh = mpmd.MpmdMesh(make_mesh(4, axis_type, ("data",)), "stage")
    constrain = jax.reshard if axis_type == AxisType.Explicit else jax.lax.with_sharding_constraint

    def step(params, batch, schedule):
        def put(x, *spec):
            return constrain(x, P(*spec)) if schedule else x

        def loss(params, microbatch):
            x = put(microbatch["x"], "data", None)
            for stage, p in enumerate(params):
                x = x if stage == 0 else put(mpmd.mark_stage_end(x), *(("data", None), (None, "data"))[stage % 2])
                x = put(residual(p, put(x, None, None)), *((None, "data"), ("data", None))[stage % 2])
            return squared_error(put(x, None, None), microbatch["y"])

        value, grads = mpmd.treduce(
            lambda m: jax.value_and_grad(loss)(params, m), batch, schedule=schedule, operation=mpmd.Mean
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}

    batches = [
        {name: normal(jax.random.fold_in(jax.random.key(seed), i), 4, 4, WIDTH) for i, name in enumerate("xy")}
        for seed in (1, 2)
    ]
    _check(step, mesh, stages_params(jax.random.key(0)), *batches, schedule=schedule)
