"""`mark_layer_end` and `treduce(cuts=...)`: where stages end, what is computed, and which cuts are refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs.parts import regression_batch, residual, squared_error, stages_params
from programs.pipelines import shared_device

import mpmd
import scheduler

NUM_LAYERS = 6


def step_of(layer, *, cuts=None, schedule=None, mark=mpmd.mark_layer_end, tail=True):
    """A training step of a model whose layers end in marks; with `tail=False` the last one has none."""

    def loss(params, microbatch):
        x = microbatch["x"]
        for i, p in enumerate(params):
            x = layer(p, x)
            x = mark(x, name=f"layer{i}") if tail or i < len(params) - 1 else x
        return squared_error(x, microbatch["y"])

    def step(params, xs):
        def one(x):
            return jax.value_and_grad(loss)(params, x)

        return mpmd.treduce(one, xs, schedule=schedule or scheduler.OneFOneB(3), cuts=cuts)

    return step


@pytest.fixture(scope="module")
def arguments():
    return stages_params(jax.random.key(0), NUM_LAYERS), regression_batch(jax.random.key(1))


def lowered(step, arguments, num_groups=3):
    return mpmd.jit(step, mpmd_mesh=shared_device(num_groups)).lower(*arguments)


def layers_of_stages(lowered):
    """Which layers' weights the forward of each stage reads."""
    outline = lowered._outline
    names = dict(zip(outline.trace.jaxpr.invars, outline.trace.in_names, strict=True))
    (loop,) = outline.loops
    return [
        sorted({int(n) for v in t.operands for n in re.findall(r"\[(\d+)\]\['w'\]", names.get(v, ""))})
        for t in loop.partition.tasks
        if t.place.kind == "F"
    ]


@pytest.mark.parametrize(
    ("cuts", "tail", "layers"),
    [
        ((1, 2, 3), True, [[0], [1, 2], [3, 4, 5]]),
        ((2, 4, 0), True, [[0, 1], [2, 3, 4, 5], []]),  # the loss alone is the last stage
        ((3, 2, 1), False, [[0, 1, 2], [3, 4], [5]]),  # the last layer has no mark
        ((3, 1, 1), False, [[0, 1, 2], [3], [4, 5]]),  # so says the number of marks as well
    ],
)
def test_cuts_say_how_many_layers_each_stage_gets(cuts, tail, layers, arguments):
    assert layers_of_stages(lowered(step_of(residual, cuts=cuts, tail=tail), arguments)) == layers


@pytest.mark.parametrize(
    "layer",
    [residual, *(pytest.param(f(residual), marks=pytest.mark.slow) for f in (jax.jit, jax.checkpoint))],
    ids=["plain", "jit", "remat"],
)
def test_a_cut_step_computes_what_plain_jax_computes(layer, arguments):
    step = step_of(layer, cuts=(1, 4, 1), schedule=scheduler.ZeroBubbleH1(3))
    found = mpmd.jit(step, mpmd_mesh=shared_device(3))(*arguments)
    jax.tree.map(np.testing.assert_array_equal, mpmd.device_get(found), jax.jit(step)(*arguments))


def test_marks_of_one_cached_layer_are_told_apart(arguments):
    layer = jax.jit(lambda p, x: mpmd.mark_layer_end(residual(p, x)))
    step = step_of(layer, cuts=(1, 4, 1), mark=lambda x, name: x)
    assert layers_of_stages(lowered(step, arguments)) == [[0], [1, 2, 3, 4], [5]]
    found = mpmd.jit(step, mpmd_mesh=shared_device(3))(*arguments)
    jax.tree.map(np.testing.assert_array_equal, mpmd.device_get(found), jax.jit(step)(*arguments))


def test_a_name_goes_to_the_stage_that_ends_there(arguments):
    (loop,) = lowered(step_of(residual, cuts=(1, 2, 3)), arguments)._outline.loops
    assert loop.partition.labels == ("layer0", "layer2", None)


def test_lowered_says_the_cuts(arguments):
    assert lowered(step_of(residual, cuts=[1, 2, 3]), arguments).cuts == (1, 2, 3)
    assert lowered(step_of(residual, mark=lambda x, name: x, schedule=scheduler.GPipe(1)), arguments, 1).cuts is None


def test_a_schedule_by_name_has_as_many_stages_as_the_cuts(arguments):
    found = lowered(step_of(residual, cuts=(1, 1, 2, 1, 1, 0), schedule="interleaved-1f1b"), arguments, 2)
    assert found._outline.loops[0].schedule == scheduler.InterleavedOneFOneB(6, 2)


def test_layer_ends_are_identities_under_vmap_and_grad():
    def f(x):
        return jnp.sum(mpmd.mark_layer_end({"a": x**2})["a"])

    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(jax.grad(f))(x), 2 * x)


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ((), "treduce: cuts is (). Pass how many layers each stage gets, as in cuts=(3, 4, 4, 1), or None."),
        (4, "treduce: cuts is 4. Pass how many layers each stage gets, as in cuts=(3, 4, 4, 1), or None."),
        (
            (3, -1, 4),
            "treduce: cuts is (3, -1, 4), and -1 is no number of layers. Pass whole numbers of at least 0.",
        ),
        (
            (3, 0, 3),
            (
                "treduce: cuts is (3, 0, 3): stage 1 gets no layer. Only the last entry may be 0: then the last stage"
                " has what follows the last mark alone, the head for instance."
            ),
        ),
        (
            (3, 3),
            "treduce: cuts is (3, 3), 2 entries, and OneFOneB(num_stages=3) has 3 stages. Pass one number for each.",
        ),
    ],
)
def test_cuts_that_are_none_are_refused_where_they_are_written(cuts, message, arguments):
    with pytest.raises(mpmd.StageError) as raised:
        lowered(step_of(residual, cuts=cuts), arguments)
    assert str(raised.value) == message


def refusal(step, arguments, num_groups=3):
    with pytest.raises(mpmd.StageError) as raised:
        lowered(step, arguments, num_groups)
    return re.sub(r"\S+\.py:[\d:.-]+( \(\S+\))?", "HERE", str(raised.value))


def test_cuts_that_do_not_add_up_are_refused(arguments):
    assert "cuts is (1,), 1 layer together, and the loop has 6 layer ends:" in refusal(
        step_of(residual, cuts=(1,), schedule=scheduler.GPipe(1)), arguments, 1
    )
    assert refusal(step_of(residual, cuts=(1, 2, 1)), arguments) == (
        "treduce at HERE: cuts is (1, 2, 1), 4 layers together, and the loop has 6 layer ends:"
        + "\n    HERE" * 6
        + "\n"
        "  The numbers must add up to 6, or to 7 if the last layer has no mark."
    )


def test_too_few_layers_are_refused(arguments):
    assert refusal(step_of(residual, schedule=scheduler.GPipe(8)), arguments, 8) == (
        "treduce at HERE: GPipe(num_stages=8) has 8 stages, and a stage may end at 6 places only:"
        + "\n    HERE" * 6
        + "\n  Call mark_layer_end at the end of each layer, or use a schedule with fewer stages."
    )


def test_both_kinds_of_marks_in_one_loop_are_refused(arguments):
    def mark(x, name):
        return (mpmd.mark_stage_end if name == "layer1" else mpmd.mark_layer_end)(x)

    assert refusal(step_of(residual, mark=mark), arguments) == (
        "mark_stage_end at HERE and mark_layer_end at HERE are in one loop: the first says where a stage ends, the"
        " second leaves it open.\n"
        "  Use mark_layer_end for all of them, and treduce(..., cuts=(...)) to say where stages end."
    )


def test_cuts_without_layer_ends_are_refused(arguments):
    def mark(x, name):
        return mpmd.mark_stage_end(x) if name in ("layer1", "layer3") else x

    assert refusal(step_of(residual, mark=mark, cuts=(2, 2, 2)), arguments) == (
        "treduce at HERE: cuts is (2, 2, 2), and its body has no mark_layer_end.\n"
        "  Call mark_layer_end at the end of each layer, or leave cuts out: mark_stage_end says where stages end."
    )


def test_layer_ends_outside_of_a_loop_deal_layers_out_evenly(arguments):
    def forward(params, x):
        for p in params:
            x = mpmd.mark_layer_end(residual(p, x))
        return x

    params, xs = arguments
    compiled = mpmd.jit(forward, mpmd_mesh=shared_device(3)).lower(params, xs["x"][0]).compile()
    groups = [min(s["w"].mesh_ids) for s in compiled.input_shardings[0][0]]
    assert groups == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(compiled(params, xs["x"][0]), forward(params, xs["x"][0]), rtol=1e-6)
