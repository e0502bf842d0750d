"""Reductions beyond the built-in classes, and schedules by name: the same numbers as plain JAX, and clear errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
import scheduler

NUM_GROUPS = 2
XS = np.linspace(0.5, 1.5, 4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3)


class Product(mpmd.Operation):
    """The product over microbatches."""

    def init(self, aval, num_microbatches):
        return self.full(aval, 1)

    def update(self, acc, x, index):
        return acc * x


class Weighted(mpmd.Operation):
    """The sum of every second microbatch, times a factor."""

    def __init__(self, factor):
        self.factor = factor

    def update(self, acc, x, index):
        return acc + jnp.where(index % 2 == 0, x, 0)

    def finish(self, acc, num_microbatches):
        return acc * self.factor


class Halving(mpmd.Add):
    """A sum that forgets: not what `Add` does, although it is one."""

    def update(self, acc, x, index):
        return acc / 2 + x


class Last(mpmd.Max):
    """The maximum over the microbatches after the first one, as a share of their number; not what `Max` reads."""

    def update(self, acc, x, index):
        return jnp.where(index == 0, acc, jnp.maximum(acc, x))

    def finish(self, acc, num_microbatches):
        return acc / num_microbatches


def loss(ws, x, num_marks=NUM_GROUPS - 1):
    """Every stage uses ws[0], too, so that its gradient arises in all of them."""
    for w in ws[:num_marks]:
        x = mpmd.mark_stage_end(jnp.tanh(x @ w @ ws[0]))
    return jnp.mean((x @ ws[-1] @ ws[0]) ** 2), x


def step_of(schedule, operation, num_marks=NUM_GROUPS - 1):
    def step(ws, xs):
        def one(x):
            (value, out), grads = jax.value_and_grad(loss, has_aux=True)(ws, x, num_marks)
            return {"loss": value, "out": out, "grads": grads}

        return mpmd.treduce(one, xs, schedule=schedule, operation=operation)

    return step


def weights(num):
    return [np.eye(3, dtype=np.float32) + 0.1 * i for i in range(num)]


def mesh_of(num_groups=NUM_GROUPS, axis_type=jax.sharding.AxisType.Explicit):
    mesh = jax.make_mesh((num_groups, 2), ("stage", "data"), axis_types=(axis_type,) * 2)
    return mpmd.MpmdMesh(mesh, "stage")


def check(schedule, operation, mesh=None):
    ws = weights(NUM_GROUPS)
    step = mpmd.jit(step_of(schedule, operation), mpmd_mesh=mesh or mesh_of())
    found, wanted = step(ws, XS), jax.jit(step_of(None, operation))(ws, XS)
    for (path, got), want in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), path
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, err_msg=str(path))
    return wanted


@pytest.mark.parametrize(
    "schedule", [pytest.param(scheduler.OneFOneB(2), marks=pytest.mark.slow), scheduler.ZeroBubbleH1(2)], ids=str
)
def test_reductions_of_ones_own_equal_plain_jax(schedule):
    wanted = check(schedule, {"loss": Product, "out": Weighted(3.0), "grads": Halving})
    values = [float(loss(weights(2), x)[0]) for x in XS]
    np.testing.assert_allclose(wanted["loss"], np.prod(values), rtol=1e-5)


@pytest.mark.slow
def test_what_a_reduction_says_of_its_methods_does_not_hold_for_those_of_a_subclass():
    """Lists of several lengths share a trace only if the methods do not read the number."""
    tracings = []

    class Known(Product):
        reads_index = reads_number = False

    def step_of(operation):
        def step(ws, xs):
            def one(x):
                tracings.append(x)
                return (loss(ws, x)[0],) * 2

            return mpmd.treduce(one, xs, schedule=scheduler.OneFOneB(2), operation=(mpmd.Add, operation))

        return step

    for operation, num_tracings in ((Last, 2), (Known, 1)):
        step, found = mpmd.jit(step_of(operation), mpmd_mesh=mesh_of()), []
        for xs in (XS[:3], XS):
            tracings.clear()
            values = np.array([loss(weights(2), x)[0] for x in xs])
            wanted = values[1:].max() / len(xs) if operation is Last else values.prod()
            np.testing.assert_allclose(step(weights(2), list(xs)), (values.sum(), wanted), rtol=1e-5)
            found.append(bool(tracings))
        assert sum(found) == num_tracings, operation


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_outputs_are_stacked_along_any_axis(axis_type):
    operation = {"loss": mpmd.Concat(-1), "out": mpmd.Concat(axis=1), "grads": mpmd.Concat(axis=-1)}
    wanted = check(scheduler.ZeroBubbleH1(2), operation, mesh_of(axis_type=axis_type))
    assert wanted["loss"].shape == (4,) and wanted["out"].shape == (2, 4, 3) and wanted["grads"][0].shape == (3, 3, 4)
    np.testing.assert_allclose(wanted["out"][:, 2], loss(weights(2), XS[2])[1], rtol=1e-5)


def test_operations_are_values():
    assert mpmd.Concat(1) == mpmd.Concat(axis=1) != mpmd.Concat() and mpmd.Add() != mpmd.Mean()
    assert len({mpmd.Concat(1), mpmd.Concat(1), mpmd.Concat(), mpmd.Add(), mpmd.Add()}) == 3
    assert str((mpmd.Add(), mpmd.Concat(1), Weighted(2.0))) == "(Add, Concat(axis=1), Weighted(factor=2.0))"


class Unfinished(mpmd.Add):
    def finish(self, acc, num_microbatches):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


class Growing(mpmd.Operation):
    def update(self, acc, x, index):
        return jnp.stack([acc, x])


@dataclasses.dataclass
class Changing(mpmd.Operation):
    factor: float = 2.0

    def update(self, acc, x, index):
        return acc + self.factor * x


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (
            Changing(),
            (
                "treduce: Changing(factor=2.0) has no hash: unhashable type: 'Changing'. Of a dataclass, write"
                " @dataclasses.dataclass(frozen=True)."
            ),
        ),
        (mpmd.Concat(axis=3), "treduce: Concat(axis=3) stacks an output with 2 axes. Pass an int from -3 to 2."),
        (Unfinished, "treduce: Unfinished.finish returns 0 arrays; it must return one."),
        (
            Growing,
            (
                "treduce: Growing.update makes float32[2,2,3] of the accumulator float32[2,3].\n"
                "  It must return one array of the accumulator's shape and dtype, which init chooses."
            ),
        ),
        (
            "sum",
            "treduce: operation holds 'sum'. Pass mpmd.Add, Mean, Max, Min or Concat, or a subclass of mpmd.Operation.",
        ),
    ],
    ids=["no hash", "axis", "nothing", "growing", "text"],
)
def test_what_is_no_reduction_is_refused(operation, message, schedule):
    with pytest.raises(mpmd.StageError) as error:
        jax.jit(lambda xs: mpmd.treduce(lambda x: x, xs, schedule=schedule, operation=operation))(XS)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "num_marks", "made"),
    [
        ("1f1b", 1, scheduler.OneFOneB(2)),
        ("dualpipe_v", 3, scheduler.DualPipeV(2)),
        ("Interleaved-1F1B", 3, scheduler.InterleavedOneFOneB(4, 2)),
        ("interleaved-gpipe", 4, scheduler.InterleavedGPipe(4, 2)),
    ],
)
def test_a_schedule_goes_by_its_name(name, num_marks, made):
    step = mpmd.jit(step_of(name, mpmd.Mean, num_marks), mpmd_mesh=mesh_of())
    assert f"{made}, 4 microbatches" in repr(step.lower(weights(num_marks + 1), XS))


@pytest.mark.slow
def test_a_step_with_a_named_schedule_equals_plain_jax():
    check("1f1b", mpmd.Mean)
    ws = weights(2)
    named, plain = (jax.jit(step_of(schedule, mpmd.Add))(ws, XS) for schedule in ("1f1b", None))
    np.testing.assert_array_equal(named["loss"], plain["loss"])


@pytest.mark.parametrize(
    ("name", "num_marks", "message"),
    [
        (
            "2f2b",
            1,
            (
                "treduce: unknown schedule '2f2b'; expected one of gpipe, 1f1b, eager-1f1b, zb-h1, zb-h2,"
                " interleaved-gpipe, interleaved-1f1b, kimi-k2, interleaved-zb, zb-v, v-half, v-min, dualpipe-v."
            ),
        ),
        (
            "interleaved-1f1b",
            4,
            (
                "schedule is 'interleaved-1f1b', and interleaved-1f1b deals out its stages evenly to 3 groups;"
                " 4 stage ends make 5 stages or 4.\n"
                "  Call mark_stage_end at the end of each stage, or take another schedule."
            ),
        ),
        (
            "1f1b",
            4,
            "mark_stage_end: OneFOneB(num_stages=3) has 3 stages, which takes 2 or 3 marks in a microbatch; found 4:",
        ),
    ],
)
def test_a_name_that_does_not_fit_is_refused(name, num_marks, message):
    step = mpmd.jit(step_of(name, mpmd.Mean, num_marks), mpmd_mesh=mesh_of(3))
    with pytest.raises(mpmd.StageError) as error:
        step.lower(weights(num_marks + 1), XS)
    text = str(error.value)
    assert text.startswith(message) or text.endswith(message)


def test_a_custom_schedule_is_named_in_a_few_words():
    found = scheduler.CustomSchedule.from_schedule(scheduler.OneFOneB(2), 4)
    assert str(found) == "CustomSchedule(2 stages on 2 groups, 4 microbatches)"
    traced = mpmd.jit(step_of(found, mpmd.Mean), mpmd_mesh=mesh_of()).trace(weights(2), XS)
    lowered = traced.lower()
    for text in (repr(traced), str(traced), repr(lowered), lowered.as_text()):
        assert "Task(" not in text and str(found) in text
    with pytest.raises(mpmd.StageError) as error:
        mpmd.jit(step_of(found, mpmd.Mean, 3), mpmd_mesh=mesh_of()).lower(weights(4), XS)
    assert str(error.value).startswith(
        "mark_stage_end: CustomSchedule(2 stages on 2 groups, 4 microbatches) has 2 stages, which takes 1 or 2 marks"
    )


@pytest.mark.parametrize("factors", [(2, 2.0), (0.0, -0.0), (1, True)], ids=str)
def test_operations_whose_attributes_are_equal_but_differ_are_two(factors):
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    for factor in factors:

        def step(xs, factor=factor):
            fun = lambda x: mpmd.mark_stage_end(x).sum().astype(jnp.int32)  # noqa: E731
            return mpmd.treduce(fun, xs, schedule="1f1b", operation=Weighted(factor))

        got, want = mpmd.jit(step, mpmd_mesh=mesh)(XS), jax.jit(step)(XS)
        assert (got.dtype, str(got)) == (want.dtype, str(want))


@pytest.mark.parametrize("weights", [None, lambda x: 1])
def test_a_mean_of_small_integers_is_summed_in_larger_ones(weights):
    xs = jnp.full((3, 2), 100, jnp.int8)
    mean = mpmd.treduce(lambda x: x, xs, schedule=None, operation=mpmd.Mean, weights=weights)
    np.testing.assert_array_equal(mean, [100, 100])


def test_operations_are_told_apart_by_numbers_in_their_tuples_too():
    class Clipped(mpmd.Operation):
        def __init__(self, ends):
            self.ends = ends

    assert Clipped((0.0, 1)) == Clipped((0.0, 1)) and hash(Clipped((0.0, 1))) == hash(Clipped((0.0, 1)))
    for other in ((-0.0, 1), (0.0, True), (0.0, 1.0), [0.0, 1]):
        assert Clipped((0.0, 1)) != Clipped(other)
