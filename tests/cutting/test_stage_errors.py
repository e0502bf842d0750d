"""Steps that cannot be cut into stages are refused: what is wrong, on which line of the user's code, what to do."""

import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs.parts import chain, dense_params, regression_batch, residual, squared_error, stages_params
from programs.pipelines import make_mesh, shared_device
from programs.program import Tools, assert_same, host, pipelined, plain_loop

import mpmd
import scheduler
from mpmd.ops.microbatches import doubt_of

MARK_ONLY = Tools(mark=mpmd.mark_stage_end, reduce=None, reduce_i=None)


def _here(function):
    """`file:line` of the line of `function` that ends in the comment `# here`."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"{__file__}:{first + offset}"


def _refusal(loss, *, params=None, num_stages=4, mpmd_mesh=None, schedule=None, xs=None):
    """The message of the StageError that a training step of `loss(params, microbatch)` gets."""
    schedule = schedule or scheduler.OneFOneB(num_stages)
    params = stages_params(jax.random.key(0), num_stages) if params is None else params
    xs = regression_batch(jax.random.key(1)) if xs is None else xs

    def step(params, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=schedule)

    return _refusal_of(step, params, xs, mpmd_mesh=mpmd_mesh or shared_device(schedule.num_groups))


def _refusal_of(step, *args, mpmd_mesh):
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.jit(step, mpmd_mesh=mpmd_mesh).lower(*args)
    message = str(raised.value)
    assert len(message.splitlines()) <= 12, message
    return message


def _without_columns(message):
    """`file:12:34-56` as `file:12`."""
    return re.sub(r"(\.py:\d+):\d+(-\d+)?", r"\1", message)


# --- marks against the schedule ---


def test_too_few_marks_are_refused_with_their_lines():
    def loss(params, microbatch):
        x = residual(params[0], microbatch["x"])
        x = residual(params[1], mpmd.mark_stage_end(x))  # here
        return squared_error(residual(params[3], residual(params[2], x)), microbatch["y"])

    message = _without_columns(_refusal(loss))
    assert "OneFOneB(num_stages=4) has 4 stages" in message
    assert "3 or 4 marks" in message and "found 1:" in message
    assert _here(loss) in message
    assert "Call mark_stage_end at the end of each stage" in message


def test_too_many_marks_are_refused_with_their_lines():
    def loss(params, microbatch):
        x = microbatch["x"]
        for p in params:
            x = mpmd.mark_stage_end(residual(p, x))  # here
        return squared_error(mpmd.mark_stage_end(x), microbatch["y"])

    message = _without_columns(_refusal(loss))
    assert "3 or 4 marks" in message and "found 5:" in message
    assert message.count(_here(loss)) == 4


def test_no_marks_are_refused_where_the_schedule_has_several_stages():
    message = _refusal(lambda params, x: squared_error(residual(params[0], x["x"]), x["y"]))
    assert "3 or 4 marks" in message and "found 0." in message


def test_a_forward_only_loop_needs_its_marks_too():
    def step(params, xs):
        return mpmd.treduce(lambda x: jnp.sum(residual(params[0], x["x"])), xs, schedule=scheduler.GPipe(2))

    args = stages_params(jax.random.key(0)), regression_batch(jax.random.key(1))
    message = _refusal_of(step, *args, mpmd_mesh=shared_device(2))
    assert "1 or 2 marks" in message and "found 0." in message


def _last_mark_unused(params, microbatch):
    x = mpmd.mark_stage_end(residual(params[0], microbatch["x"]))
    y = residual(params[1], x)
    mpmd.mark_stage_end(y)  # here
    return squared_error(y, microbatch["y"])


def test_a_mark_whose_result_nobody_uses_is_refused_with_its_line():
    message = _without_columns(_refusal(_last_mark_unused, num_stages=3))
    assert "mark_stage_end" in message
    assert _here(_last_mark_unused) in message
    assert "use" in message


def test_a_last_mark_whose_result_nobody_uses_is_refused_even_where_the_number_would_fit_without_it():
    assert _here(_last_mark_unused) in _without_columns(_refusal(_last_mark_unused, num_stages=2))


def test_a_mark_on_gradients_of_earlier_marks_would_flow_backwards():
    def loss(params, microbatch):
        def inner(x):
            return jnp.sum(residual(params[1], mpmd.mark_stage_end(residual(params[0], x))))

        x = microbatch["x"] - 0.1 * jax.grad(inner)(microbatch["x"])
        x = mpmd.mark_stage_end(residual(params[2], x))  # here
        return squared_error(residual(params[3], x), microbatch["y"])

    message = _without_columns(_refusal(loss, num_stages=3, params=stages_params(jax.random.key(0), 4)))
    assert _here(loss) in message
    assert "earlier stage" in message and "(MAML) marks in the last call only" in message


@pytest.mark.parametrize("mark", [mpmd.mark_stage_end, mpmd.mark_layer_end])
def test_a_gradient_of_a_gradient_through_the_stages_is_refused_with_what_to_do(mark):
    def score(params, x):
        x = mark(residual(params[0], x))  # here
        return jnp.sum(residual(params[1], x))

    def loss(params, microbatch):
        return jnp.sum(jax.grad(score, 1)(params, microbatch["x"]) ** 2)

    message = _without_columns(_refusal(loss, num_stages=2))
    assert re.sub(r" \(test_.*score\)", "", message) == (
        f"{mark.__name__} at {_here(score)}: a gradient of a gradient goes through the stages forward and backward"
        " twice, and a schedule has tasks for once.\n"
        "  Differentiate twice inside of a stage, or in two loops: the first one gives the inner gradients out"
        " (operation=mpmd.Concat), and the second one takes jax.jvp of jax.grad along them."
    )


# --- marks where no cut is possible ---


def _mark_in_scan(params, microbatch):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)

    def layer(x, p):
        return mpmd.mark_stage_end(residual(p, x)), None  # here

    return jnp.sum(jax.lax.scan(layer, microbatch["x"], stacked)[0])


def _mark_in_cond(params, microbatch):
    x = microbatch["x"]

    def marked(x):
        return mpmd.mark_stage_end(residual(params[0], x))  # here

    return jnp.sum(jax.lax.cond(jnp.sum(x) > 0, marked, lambda x: x, x))


def _mark_in_while(params, microbatch):
    def body(carried):
        i, x = carried
        return i + 1, mpmd.mark_stage_end(residual(params[0], x))  # here

    return jnp.sum(jax.lax.while_loop(lambda carried: carried[0] < 3, body, (0, microbatch["x"]))[1])


def _mark_in_checkpoint(params, microbatch):
    @jax.checkpoint
    def model(params, x):
        for p in params:
            x = mpmd.mark_stage_end(residual(p, x))  # here
        return x

    return jnp.sum(model(params, microbatch["x"]))


@jax.custom_vjp
def _identity_with_a_mark(x):
    return mpmd.mark_stage_end(x)


def _identity_forward(x):
    return mpmd.mark_stage_end(x), None  # here


_identity_with_a_mark.defvjp(_identity_forward, lambda _, cotangent: (cotangent,))


def _mark_in_custom_vjp(params, microbatch):
    x = microbatch["x"]
    for p in params:
        x = _identity_with_a_mark(residual(p, x))
    return jnp.sum(x)


def _mark_in_shard_map(params, microbatch):
    def local(x):
        return mpmd.mark_stage_end(jnp.tanh(x))  # here

    split = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"))
    x = jax.lax.with_sharding_constraint(microbatch["x"][:2], P("data"))
    return jnp.sum(split(x) * params[0]["b"])


@pytest.mark.parametrize(
    ("loss", "inside", "remedy"),
    [
        (_mark_in_cond, "cond", "Mark the stage end after the cond, so that both branches belong to one stage."),
        (_mark_in_checkpoint, "checkpoint", "Put one jax.checkpoint around what is before the mark"),
        (_mark_in_shard_map, "shard_map", "Call shard_map once per stage, and mark the stage end outside of it."),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mark_where_no_cut_is_possible_is_refused_with_its_line_and_a_remedy(loss, inside, remedy):
    mesh = make_mesh(4, AxisType.Auto, ("data",)) if loss is _mark_in_shard_map else None
    message = _without_columns(_refusal(loss, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage") if mesh else None))
    where = _here(loss)
    assert message.startswith(f"mark_stage_end inside {inside}, at {where}"), message
    assert remedy in message


def test_more_stage_ends_in_a_scan_than_stages_are_refused():
    def step(params, xs):
        return mpmd.treduce(lambda x: _mark_in_scan(params, x), xs, schedule=scheduler.GPipe(2))

    params, xs = stages_params(jax.random.key(0), 4), regression_batch(jax.random.key(1))
    with pytest.raises(mpmd.StageError) as error:
        mpmd.jit(step, mpmd_mesh=shared_device(2)).lower(params, xs)
    assert _without_columns(str(error.value)) == (
        "mark_stage_end inside scan: GPipe(num_stages=2) has 2 stages, and a stage would end 4 times in a microbatch:\n"
        f"    {_here(_mark_in_scan)} (_mark_in_scan.<locals>.layer) (4 iterations)\n"
        "  Use mark_layer_end there: the library chooses, or cuts= says, behind which layers stages end."
    )


def test_a_mark_in_a_while_loop_is_refused():
    def step(params, xs):
        return mpmd.treduce(lambda x: _mark_in_while(params, x), xs, schedule=scheduler.GPipe(4))

    args = stages_params(jax.random.key(0)), regression_batch(jax.random.key(1))
    message = _without_columns(_refusal_of(step, *args, mpmd_mesh=shared_device(4)))
    assert message.startswith(f"mark_stage_end inside while, at {_here(_mark_in_while)}"), message
    assert "Write the stages as a Python loop" in message


def test_a_mark_in_custom_vjp_is_refused_with_its_line():
    message = _without_columns(_refusal(_mark_in_custom_vjp))
    assert "custom_vjp" in message
    assert _here(_identity_forward) in message

    def gradient(params, xs):  # nobody uses the result of the mark, since custom_vjp hides that of the gradient
        return mpmd.treduce(lambda x: jax.grad(_mark_in_custom_vjp)(params, x), xs, schedule=scheduler.OneFOneB(1))

    args = stages_params(jax.random.key(0), 1), regression_batch(jax.random.key(1))
    assert "inside custom_vjp" in _refusal_of(gradient, *args, mpmd_mesh=shared_device(1))


def test_differentiating_through_the_loop_is_refused_and_said_to_belong_inside():
    def step(params, xs):
        def total(params):
            def one(x):
                return squared_error(chain(MARK_ONLY, params, x["x"]), x["y"])

            return mpmd.treduce(one, xs, schedule=scheduler.OneFOneB(4))  # here

        return jax.grad(total)(params)

    args = stages_params(jax.random.key(0)), regression_batch(jax.random.key(1))
    message = _refusal_of(step, *args, mpmd_mesh=shared_device(4))
    assert "treduce" in message
    assert "value_and_grad" in message or "grad inside" in message


def test_a_loop_inside_a_loop_is_refused_with_its_line():
    def step(params, xs):
        def one(x):
            return squared_error(chain(MARK_ONLY, params, x["x"]), x["y"])

        def outer(several):
            return mpmd.treduce(one, several, schedule=scheduler.OneFOneB(4))  # here

        return mpmd.treduce(outer, jax.tree.map(lambda a: a[None], xs), schedule=scheduler.OneFOneB(4))

    args = stages_params(jax.random.key(0)), regression_batch(jax.random.key(1))
    message = _without_columns(_refusal_of(step, *args, mpmd_mesh=shared_device(4)))
    assert message.startswith(f"treduce inside treduce, at {_here(step)} "), message


def test_leaves_without_a_microbatch_axis_are_listed_but_not_by_the_hundred():
    with pytest.raises(mpmd.StageError, match=r"xs\[7\] has shape \(\)\n  … and 92 more\n"):
        mpmd.treduce(sum, (1.0,) * 100, schedule=None)


def test_a_loop_inside_a_scan_is_refused_with_its_line():
    def step(params, xs):
        def body(total, _):
            def one(x):
                return squared_error(chain(MARK_ONLY, params, x["x"]), x["y"])

            return total + mpmd.treduce(one, xs, schedule=scheduler.OneFOneB(4)), None  # here

        return jax.lax.scan(body, 0.0, None, length=2)[0]

    args = stages_params(jax.random.key(0)), regression_batch(jax.random.key(1))
    message = _without_columns(_refusal_of(step, *args, mpmd_mesh=shared_device(4)))
    assert message.startswith("treduce inside scan, at "), message
    assert _here(step) in message


# --- the pipeline's own axis ---


def _axis_refusal(apply, axis_type=AxisType.Auto):
    """The message about a step whose stages go through `apply`; it has the line and the remedy."""
    mesh = make_mesh(4, axis_type, ("data",))

    def loss(params, microbatch):
        x = microbatch["x"]
        for stage, p in enumerate(params):
            x = apply(mesh, residual(p, x if stage == 0 else mpmd.mark_stage_end(x)))
        return squared_error(x, microbatch["y"])

    message = _without_columns(_refusal(loss, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage")))
    assert _here(apply) in message, message
    assert "Leave 'stage' out of specs and collectives inside the step" in message
    return message


def test_a_constraint_that_names_the_pipelines_axis_is_refused():
    def apply(mesh, x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "stage")))  # here

    assert _axis_refusal(apply).startswith("sharding_constraint names the mpmd axis 'stage'")


@pytest.mark.parametrize("axes", [("data", "stage"), ("stage", "data")])  # the latter are all axes of the mesh
def test_a_constraint_that_names_the_pipelines_axis_with_another_is_refused(axes):
    def apply(mesh, x):
        return jax.lax.with_sharding_constraint(x, P(None, axes))  # here

    assert _axis_refusal(apply).startswith("sharding_constraint names the mpmd axis 'stage'")


def test_a_reshard_that_names_the_pipelines_axis_is_refused():
    def apply(mesh, x):
        return jax.reshard(jax.reshard(x, P(None, "stage")), P())  # here

    assert _axis_refusal(apply, AxisType.Explicit).startswith("reshard names the mpmd axis 'stage'")


def test_a_psum_over_the_pipelines_axis_is_refused():
    def apply(mesh, x):
        def local(x):
            return jax.lax.psum(x, "stage") / 4  # here

        return jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())(x)

    assert _axis_refusal(apply).startswith("psum names the mpmd axis 'stage'")


def test_an_axis_index_of_the_pipelines_axis_is_refused():
    def local(x):
        return x * jax.lax.axis_index("stage")  # here

    mesh = make_mesh(4, AxisType.Auto, ("data",))
    split = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    def step(params, xs):
        return mpmd.treduce(lambda x: jnp.sum(split(chain(MARK_ONLY, params, x))), xs, schedule=scheduler.GPipe(4))

    args = stages_params(jax.random.key(0)), regression_batch(jax.random.key(1))["x"]
    message = _without_columns(_refusal_of(step, *args, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage")))
    assert message.startswith(f"axis_index names the mpmd axis 'stage', at {_here(local)}"), message


def test_a_shard_map_whose_specs_name_the_pipelines_axis_is_refused():
    def apply(mesh, x):
        whole = jax.shard_map(lambda x: x * 2.0, mesh=mesh, in_specs=P(None, "stage"), out_specs=P(None, "stage"))
        return whole(x)  # here

    assert _axis_refusal(apply).startswith("shard_map names the mpmd axis 'stage'")


# --- the loop's arguments ---


@pytest.mark.parametrize("schedule", [None, scheduler.OneFOneB(2)], ids=["plain", "pipelined"])
def test_on_explicit_axes_a_sharded_microbatch_axis_is_refused_with_the_spec_to_write(schedule):
    mesh = make_mesh(2, AxisType.Explicit, ("data",))

    def step(xs):
        xs = {"x": jax.reshard(xs["x"], P(None, None, "data")), "y": jax.reshard(xs["y"], P("data"))}
        return mpmd.treduce(lambda m: m["x"].sum() + m["y"].sum(), xs, schedule=schedule)

    xs = {"x": jnp.ones((4, 3, 2)), "y": jnp.ones((4, 3, 2))}
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage")).lower(xs)
    assert str(raised.value) == (
        "treduce: xs['y'] is f32[4@data,3,2], sharded over 'data' on axis 0, its microbatch axis.\n"
        "  Every device needs its rows of each microbatch: jax.reshard(x, P(None, None, 'data')) before treduce, or"
        " in_shardings=P(None, None, 'data') where it is an argument of the step."
    )


@pytest.mark.parametrize("schedule", [None, scheduler.OneFOneB(4)], ids=["plain", "pipelined"])
def test_uneven_numbers_of_microbatches_are_refused(schedule):
    xs = {"targets": jnp.zeros((32, 2)), "tokens": jnp.zeros((30, 2))}
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.treduce(lambda x: x["tokens"], xs, schedule=schedule)
    assert str(raised.value) == (
        "treduce: xs['targets'] has 32 rows on axis 0 but xs['tokens'] has 30.\n"
        "  All leaves of xs need the same number of microbatches on axis 0."
    )


def test_a_tuple_of_microbatches_is_told_of_lists():
    with pytest.raises(mpmd.StageError, match="If each entry of xs is a microbatch, pass a list of them"):
        mpmd.treduce(lambda x: x, (jnp.zeros((3, 2)), jnp.zeros((5, 2))), schedule=None)


def test_uneven_numbers_of_microbatches_on_another_axis_are_refused():
    xs = (jnp.zeros((2, 3)), jnp.zeros((2, 4)))
    with pytest.raises(mpmd.StageError) as raised:
        mpmd.treduce(lambda x: x[0], xs, schedule=None, axis=1)
    assert str(raised.value) == (
        "treduce: xs[0] has 3 rows on axis 1 but xs[1] has 4.\n"
        "  All leaves of xs need the same number of microbatches on axis 1."
    )


def test_an_error_of_shapes_says_what_a_function_sees_of_a_batch_without_microbatches():
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    w, xs = jnp.ones((8, 4)), {"x": jnp.ones((64, 8)), "y": jnp.ones(64)}

    def loss(x):
        rows, _ = x["x"].shape  # one row, where a batch was not divided
        return jnp.mean((mpmd.mark_stage_end(x["x"] @ w) * rows) ** 2)

    note = (
        "treduce: axis 0 of xs is the microbatch axis, which fun does not see.\n"
        "  xs['x'] has shape (64, 8): fun sees (8,)\n"
        "  xs['y'] has shape (64,): fun sees ()"
    )
    step = functools.partial(mpmd.treduce, loss, schedule="gpipe")
    for call in (jax.jit(step), mpmd.jit(step, mpmd_mesh=mesh)):
        with pytest.raises(ValueError, match="not enough values to unpack") as error:
            call(xs)
        assert error.value.__notes__.count(note) == 1
    with pytest.raises(KeyError) as error:
        mpmd.treduce(lambda x: x["z"], xs, schedule=None)
    assert not any("microbatch" in text for text in getattr(error.value, "__notes__", []))


def test_a_leaf_without_a_microbatch_axis_is_refused():
    with pytest.raises(mpmd.StageError, match=r"xs\['scale'\] has shape \(\)"):
        mpmd.treduce(lambda x: x["x"], {"x": jnp.zeros((4, 2)), "scale": jnp.float32(1)}, schedule=None)


def test_an_empty_batch_is_refused():
    with pytest.raises(mpmd.StageError, match="At least one microbatch is needed"):
        mpmd.treduce(lambda x: x, jnp.zeros((0, 2)), schedule=None)


def test_xs_without_arrays_are_refused_with_the_name_of_what_to_use():
    with pytest.raises(mpmd.StageError, match=r"treduce_i\(fun, n"):
        mpmd.treduce(lambda x: jnp.zeros(()), None, schedule=None)


def test_an_operation_that_does_not_fit_the_outputs_is_refused():
    with pytest.raises(mpmd.StageError, match="is not a prefix of what fun returns"):
        mpmd.treduce(lambda x: {"a": x, "b": x}, jnp.zeros((4, 2)), schedule=None, operation={"a": mpmd.Add})


def test_an_operation_that_is_none_of_the_five_is_refused():
    with pytest.raises(mpmd.StageError, match=r"Pass mpmd\.Add, Mean, Max, Min or Concat"):
        mpmd.treduce(lambda x: x, jnp.zeros((4, 2)), schedule=None, operation=jnp.add)


def test_a_sum_of_booleans_is_said_to_be_no_count():
    def step(tools):
        return lambda xs: tools.reduce(lambda x: (jnp.sum(mpmd.mark_stage_end(x)), jnp.any(x > 2)), xs)

    xs = np.arange(4, dtype=np.float32).reshape(2, 2)
    expected = jax.jit(step(plain_loop()))(xs)
    jitted = mpmd.jit(step(pipelined(scheduler.GPipe(2))), mpmd_mesh=shared_device(2))
    with pytest.warns(UserWarning, match="Add of booleans says whether one of the microbatches has True") as warned:
        assert_same(host(jitted(xs)), host(expected), 0)
    assert [w.filename for w in warned] == [__file__]


def test_a_key_cannot_be_reduced():
    with pytest.raises(mpmd.StageError, match="key_data"):
        mpmd.treduce(lambda x: x, jax.random.split(jax.random.key(0), 4), schedule=None)


def test_a_schedule_class_is_refused_with_how_to_make_one():
    with pytest.raises(mpmd.StageError, match=r"such as scheduler\.OneFOneB\(num_stages\)"):
        mpmd.treduce(lambda x: x, jnp.zeros((4, 2)), schedule=scheduler.OneFOneB)


def test_a_mark_of_nothing_is_refused():
    with pytest.raises(TypeError, match=r"mark_stage_end: something of type object is among .* Pass arrays"):
        mpmd.mark_stage_end((jnp.zeros(2), object()))
    with pytest.raises(TypeError, match="holds no array"):
        mpmd.mark_stage_end(None)


# --- the schedule against the mesh ---


@pytest.mark.parametrize("num_groups", [2, 8])
def test_a_schedule_for_another_number_of_groups_than_the_mesh_has_is_refused(num_groups):
    def loss(params, microbatch):
        return squared_error(chain(MARK_ONLY, params, microbatch["x"]), microbatch["y"])

    message = _refusal(loss, mpmd_mesh=shared_device(num_groups))
    assert "OneFOneB(num_stages=4)" in message
    assert "4" in message and f"{num_groups} groups" in message


def test_a_number_of_microbatches_that_the_schedule_cannot_take_is_refused():
    def loss(params, microbatch):
        return squared_error(chain(MARK_ONLY, params, microbatch["x"]), microbatch["y"])

    xs = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), regression_batch(jax.random.key(1)))
    params = stages_params(jax.random.key(0))

    def step(params, xs):
        schedule = scheduler.InterleavedOneFOneB(4, 2)
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=schedule)

    with pytest.raises(ValueError, match="microbatches"):
        mpmd.jit(step, mpmd_mesh=shared_device(2)).lower(params, xs)


# --- what mpmd.jit is given ---


def test_a_plain_mesh_is_refused_with_how_to_make_groups_of_it():
    mesh = make_mesh(2, AxisType.Auto)
    with pytest.raises((TypeError, ValueError), match="MpmdMesh"):
        mpmd.jit(lambda x: x, mpmd_mesh=mesh)(jnp.zeros(3))


def test_wrong_marks_are_refused_before_anything_runs():
    calls = []

    def loss(params, microbatch):
        calls.append(1)
        return squared_error(residual(params, microbatch["x"]), microbatch["y"])

    def step(params, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=scheduler.OneFOneB(3))

    params = dense_params(jax.random.key(0))
    with pytest.raises(mpmd.StageError):
        mpmd.jit(step, mpmd_mesh=shared_device(3), donate_argnums=(0,))(params, regression_batch(jax.random.key(1)))
    assert len(calls) == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


# --- arguments of the functions ---


def test_what_is_no_function_is_refused():
    xs = jnp.ones((2, 3))
    for loop, told in (
        (
            lambda: mpmd.treduce(xs, xs, None),
            "treduce: fun is a ArrayImpl. Pass a function of a microbatch first: treduce(fun, ...).",
        ),
        (
            lambda: mpmd.treduce_i(2, 2, None),
            "treduce_i: fun is a int. Pass a function of its index first: treduce_i(fun, ...).",
        ),
    ):
        with pytest.raises(mpmd.StageError) as raised:
            loop()
        assert str(raised.value) == told
    with pytest.raises(TypeError, match=r"role 'critic': fun is a int\. Pass a function of arrays."):
        mpmd.role("critic")(3)


def test_what_cannot_be_donated_or_static_is_refused():
    jit = functools.partial(mpmd.jit, lambda x, n: x, mpmd_mesh=shared_device(2))
    told = r"donate_argnums has 'x'\. Pass positions, as in donate_argnums=\(0,\); names go into donate_argnames\."
    with pytest.raises(TypeError, match=told):
        jit(donate_argnums="x")
    with pytest.raises(TypeError, match=r"donate_argnums has True\. Pass positions, as in donate_argnums=\(0,\);"):
        jit(donate_argnums=True)
    with pytest.raises(TypeError, match=r"static_argnums has False\. Pass positions"):
        jit(static_argnums=(1, False))
    with pytest.raises(ValueError, match=r"argument 'n' is static and donated\. A static argument is part of"):
        jit(static_argnames="n", donate_argnums=1)
    with pytest.raises(ValueError, match=r"donate_argnums has -3, but the step takes 2 positional arguments"):
        jit(donate_argnums=-3)


def test_a_loop_whose_function_returns_a_string_is_refused():
    for operation in (mpmd.Add, mpmd.Mean):
        for xs in (jnp.ones((2, 3)), [jnp.ones(3)]):
            with pytest.raises(mpmd.StageError) as raised:
                mpmd.treduce(lambda x: {"loss": x.sum(), "note": "done"}, xs, None, operation=operation)
            assert str(raised.value) == (
                "treduce: fun returns result['note'], a str, 'done', which is no array.\n"
                "  Return arrays, numbers and None in dicts, lists, tuples or registered dataclasses."
            )


def test_a_loop_inside_a_checkpoint_is_refused():
    def step(w, xs):
        return jax.checkpoint(lambda w: mpmd.treduce(lambda x: mpmd.mark_stage_end(x * w) * w, xs, "1f1b"))(w)

    message = _refusal_of(step, jnp.ones(3), jnp.ones((2, 3)), mpmd_mesh=shared_device(2))
    assert message.startswith("treduce inside checkpoint, at ")


def test_a_loop_that_is_batched_as_a_whole_is_refused_with_the_function_to_batch():
    def step(w, xs):
        def loss(w, x):
            return jnp.sum(mpmd.mark_stage_end(x * w) * w)

        return jax.vmap(lambda w: mpmd.treduce(lambda x: loss(w, x), xs, schedule="1f1b"))(w)

    message = _refusal_of(step, jnp.ones((2, 3)), jnp.ones((2, 3)), mpmd_mesh=shared_device(2))
    assert "treduce is batched by vmap as a whole" in message
    assert message.endswith("  Batch inside of fun: treduce(lambda x: jax.vmap(loss, (0, None))(params, x), xs, ...).")


# --- results and values ---


def _returns_a_string(params, xs):
    return {"loss": jnp.sum(xs["x"]), "note": "done"}


def test_a_step_that_returns_a_string_is_refused_with_its_line():
    args = stages_params(jax.random.key(0), 2), regression_batch(jax.random.key(1))
    line = inspect.getsourcelines(_returns_a_string)[1]
    assert _refusal_of(_returns_a_string, *args, mpmd_mesh=shared_device(2)) == (
        f"mpmd.jit: the step _returns_a_string, defined at {__file__}:{line}, returns result['note'], a str, 'done',"
        " which is no array.\n"
        "  Return arrays, numbers and None in dicts, lists, tuples or registered dataclasses."
    )


def test_an_if_on_a_traced_value_is_refused_with_its_line():
    def loss(params, microbatch):
        x = mpmd.mark_stage_end(residual(params[0], microbatch["x"]))
        if jnp.sum(x) > 0:  # here
            x = -x
        return squared_error(residual(params[1], x), microbatch["y"])

    message = _refusal(loss, num_stages=2)
    assert message == (
        f"mpmd.jit: the step needs the value of an array while it is traced, at {_here(loss)} (loss).\n"
        "  Attempted boolean conversion of traced array with shape bool[].\n"
        "  To read it (float(), .item(), print), return the array and do that outside of the step; to choose by it, use"
        " jnp.where or jax.lax.cond; what is part of the program is named in static_argnums."
    )


def test_a_value_that_has_left_its_microbatch_is_refused_with_its_line():
    kept = []

    def loss(params, microbatch):
        x = mpmd.mark_stage_end(residual(params[0], microbatch["x"]))
        kept.append(x)
        return squared_error(residual(params[1], x), microbatch["y"])

    def step(params, xs):
        value = mpmd.treduce(lambda m: loss(params, m), xs, schedule=scheduler.OneFOneB(2))
        return value, jnp.sum(kept[0])  # here

    args = stages_params(jax.random.key(0), 2), regression_batch(jax.random.key(1))
    assert _without_columns(_refusal_of(step, *args, mpmd_mesh=shared_device(2))) == (
        "mpmd.jit: a f32[3,8] of one microbatch (or of another traced function) is used outside of it, at"
        f" {_here(step)} (test_a_value_that_has_left_its_microbatch_is_refused_with_its_line.<locals>.step):"
        " it was kept in a list, an attribute or a global variable.\n"
        "  Return it from the function, with an operation such as mpmd.Concat."
    )


def test_explain_says_that_without_a_loop_stages_wait_for_each_other():
    def step(params, xs):
        return squared_error(chain(MARK_ONLY, params, xs["x"]), xs["y"])

    args = stages_params(jax.random.key(0), 2), regression_batch(jax.random.key(1))
    text = mpmd.jit(step, mpmd_mesh=shared_device(2)).lower(*args).compile().explain()
    assert "no pipelined loop: one batch passes 1 stage end one after the other" in text


def test_a_leaf_that_is_no_array_is_refused_by_its_path():
    step = mpmd.jit(lambda params, xs: params, mpmd_mesh=shared_device(2))
    with pytest.raises(TypeError, match=r"mpmd.jit: params\['name'\] is of type str, 'mlp', not an array") as caught:
        step({"w": jnp.ones(2), "name": "mlp"}, jnp.ones(2))
    assert "static_argnames" in str(caught.value)


INT, FLOAT, NO = np.int32, np.float32, ()


@pytest.mark.parametrize(
    ("microbatch", "is_row"),
    [
        ({"x": ((16,), FLOAT), "y": (NO, INT)}, True),
        ({"x": ((16,), FLOAT), "y": (NO, FLOAT)}, True),
        ({"x": ((16,), FLOAT), "z": ((3,), FLOAT), "y": (NO, FLOAT)}, True),
        ({"image": ((8, 8, 3), FLOAT), "label": (NO, INT)}, True),
        ({"tokens": ((16,), INT), "mask": ((16,), FLOAT), "label": (NO, INT)}, True),
        ({"x": ((16,), FLOAT)}, False),
        ({"step": (NO, INT)}, False),
        ({"x": ((16,), FLOAT), "y": ((3,), FLOAT)}, False),
        ({"tokens": ((8, 16), INT), "scale": (NO, FLOAT)}, False),
        ({"tokens": ((8, 1), INT), "cache": ((8, 16, 4), FLOAT), "length": (NO, INT)}, False),
        ({"x": ((8,), FLOAT), "y": ((8,), FLOAT), "weight": (NO, FLOAT)}, False),
        ({"x": ((8,), FLOAT), "raw_key": ((2,), np.uint32), "key": (NO, jax.random.key(0).dtype)}, False),
    ],
)
def test_a_scalar_beside_arrays_is_a_label_unless_it_may_be_the_weight_or_key_of_a_microbatch(microbatch, is_row):
    assert (doubt_of(list(microbatch), list(microbatch.values())) is not None) == is_row


@pytest.mark.parametrize(("rows", "numbers", "is_told"), [(32, np, True), (32, jnp, False), (4, np, False)])
def test_rows_that_are_taken_for_microbatches_are_told_at_the_users_line(rows, numbers, is_told):
    """Not where a pipeline needs as many, or where the step numbers them."""

    def step(w, batch):
        def loss(row):
            return jnp.sum((mpmd.mark_stage_end(row["x"] @ w) - row["y"]) ** 2)

        return mpmd.treduce(loss, {"x": batch, "y": numbers.arange(rows)}, schedule="gpipe")  # here

    batch = jnp.ones((rows, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered = mpmd.jit(step, mpmd_mesh=shared_device(2)).lower(jnp.ones((8, 4)), batch)
    lowered.compile()
    text = (
        f"treduce at {_here(step)} ({step.__qualname__}): each of the 32 microbatches is xs['x'] float32[8], xs['y']"
        " int32[], without an axis of rows that they share. So each row of the batch may have become a microbatch:"
        " reshape the batch to (microbatches, rows, ...)."
    )
    assert [_without_columns(str(w.message)) for w in caught] == [text] * is_told
    assert all(w.filename == __file__ for w in caught)
