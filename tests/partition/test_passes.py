"""The passes of the partition one by one, on a few lines each: a pass takes a value and returns another one."""

import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import pytest

import mpmd
import scheduler
from mpmd.graphs.body import Body, drop_unused, hoist
from mpmd.graphs.marks import Marks, check_marks_are_used, forget_marks
from mpmd.partition.accumulators import reduce_outputs
from mpmd.partition.flat_step import FlatStep
from mpmd.partition.floating import place_floating, sink_residuals
from mpmd.partition.levels import as_early_as_possible, as_late_as_possible
from mpmd.partition.loop import place_equations
from mpmd.partition.place_segments import hold_loop_arguments, pin_by_operands, place_by_demand
from mpmd.partition.split_backward import split_backward
from mpmd.tracing.inline import inline

VECTOR, MATRIX = jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((3, 3), "float32")
NUM_MICROBATCHES = 4


def loop(fun, *types):
    """The equation of a loop over `fun(index, *args)` in two stages."""

    def step(*args):
        return mpmd.treduce_i(lambda i: fun(i, *args), NUM_MICROBATCHES, schedule=scheduler.GPipe(2))

    (eqn,) = inline(jax.make_jaxpr(step)(*types).jaxpr).eqns
    return eqn


def placed(eqn):
    """A loop's body up to the pass that places floating equations."""
    body = hoist(check_marks_are_used(Body.of(eqn)))
    marks = Marks.of(body, eqn.params["info"])
    return forget_marks(place_equations(body, marks, NUM_MICROBATCHES))


def shown(body, text):
    """Compares a printed body."""
    assert str(body) == textwrap.dedent(text).strip()


def two_stages(i, w, x):
    return jnp.sum(mpmd.mark_stage_end(jnp.sin(w) * jnp.exp(x) * i) * x)


def test_hoisting_takes_what_no_microbatch_changes_out_of_the_loop():
    shown(
        hoist(Body.of(loop(two_stages, VECTOR, VECTOR))),
        """
        once v0 = sin arg0
        once v1 = exp arg1
        once v2 = mul v0 v1
        any  v3 = convert_element_type index
        any  v4 = mul v2 v3
        any  v5 = mark_stage_end v4
        any  v6 = mul v5 arg1
        any  v7 = reduce_sum v6
        return v7
        """,
    )


@pytest.mark.parametrize(("rows", "is_cheap"), [(64, True), (8192, False)])
def test_constants_that_cost_less_than_a_program_are_made_in_the_tasks(rows, is_cheap):
    def scatters(i, w):
        return jnp.sum(w * jnp.zeros((rows, 1)).at[:, 0].add(1 / rows) * i)

    body = hoist(Body.of(loop(scatters, jax.ShapeDtypeStruct((rows, 1), jnp.float32))))
    assert [n.clonable for n in body.nodes if n.eqn.primitive.name == "scatter-add"] == [is_cheap]


@pytest.mark.parametrize(
    ("rows", "is_cheap"), [(lambda x: x * jnp.ones(3), True), (lambda x: jax.lax.psum(x, "d"), False)]
)
def test_what_a_shard_map_makes_of_constants_is_made_in_the_tasks_unless_devices_exchange_it(rows, is_cheap):
    """Such as the empty buffers and the numbers of rows with which experts exchange rows."""
    P = jax.sharding.PartitionSpec
    with jax.set_mesh(jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])):
        mapped = jax.shard_map(rows, in_specs=P(), out_specs=P(), check_vma=False)
        body = hoist(Body.of(loop(lambda i, w: jnp.sum(w * mapped(jnp.ones(3)) * i), VECTOR)))
    assert [n.clonable for n in body.nodes if n.eqn.primitive.name == "shard_map"] == [is_cheap]


def test_marks_say_the_stage_of_what_they_stand_between_and_then_vanish():
    shown(
        placed(loop(two_stages, VECTOR, VECTOR)),
        """
        once v0 = sin arg0
        once v1 = exp arg1
        once v2 = mul v0 v1
        any  v3 = convert_element_type index
        F0   v4 = mul v2 v3
        F1   v5 = mul v4 arg1
        F1   v6 = reduce_sum v5
        return v6
        """,
    )


def test_a_pass_leaves_the_body_that_it_was_given():
    body = Body.of(loop(two_stages, VECTOR, VECTOR))
    before = str(body)
    assert str(hoist(body)) != before and str(body) == before


def mask_of_both_stages(i, x):
    mask, dots = i + jnp.arange(3) > 2, i * jnp.ones((3, 3)) @ jnp.ones(3)
    return jnp.sum(mpmd.mark_stage_end(jnp.where(mask, x, dots)) * mask)


def test_cheap_work_on_the_microbatch_floats_and_a_matrix_product_does_not():
    body = place_floating(placed(loop(mask_of_both_stages, VECTOR)), 2)
    places = {n.eqn.primitive.name: (str(n.place), n.clonable) for n in body.nodes if n.per_microbatch}
    assert places["gt"] == ("None", True) and places["dot_general"] == ("F0", False)


def squared(i, w, x):
    return jax.grad(lambda w: jnp.sum(mpmd.mark_stage_end(jnp.sin(w * x) * i) ** 2))(w)


def test_a_residual_sinks_into_the_backward_that_alone_reads_it():
    body = place_floating(placed(loop(squared, VECTOR, VECTOR)), 2)
    moved = {
        (before.eqn.primitive.name, str(before.place), str(after.place))
        for before, after in zip(body.nodes, sink_residuals(body).nodes, strict=True)
        if before.place != after.place
    }
    assert moved == {("mul", "F1", "B1")}


def gradients(i, w, x):
    return jax.grad(lambda ws: jnp.sum((mpmd.mark_stage_end(x @ ws[0] * i) @ ws[1]) ** 2))((w, w))


def test_only_what_an_earlier_stage_waits_for_is_in_the_first_half_of_a_backward():
    eqn = loop(gradients, MATRIX, VECTOR)
    body = sink_residuals(place_floating(placed(eqn), 2))
    body, accumulators, _ = reduce_outputs(body, eqn, eqn.params["info"], split=True)
    assert [str(a.place) for a in accumulators] == ["B0", "B1"]
    halves, accumulators = split_backward(drop_unused(body, [a.value for a in accumulators]), accumulators, True)
    assert [str(a.place) for a in accumulators] == ["W0", "W1"]
    products = [str(n.place) for n in halves.nodes if n.eqn.primitive.name == "dot_general" and n.backward]
    assert sorted(products) == ["I1", "W0", "W1"]


@pytest.fixture
def step():
    """Values of two matrices that are in different groups, and their sum in a third."""
    mesh = mpmd.MpmdMesh(jax.make_mesh((3,), ("stage",), devices=jax.devices()[:3]), "stage")

    def fun(a, b):
        return mpmd.place(jnp.sum(jnp.sin(a) + jnp.cos(b)), 2)

    trace = mpmd.jit(fun, mpmd_mesh=mesh).trace(MATRIX, MATRIX)._trace
    return FlatStep.of(trace, mesh, [frozenset([0]), frozenset([1])], [None])


def test_equations_run_where_their_operands_are_and_results_go_where_they_are_wanted(step):
    result = place_by_demand(pin_by_operands(hold_loop_arguments(step)))
    names = ["sin", "cos", "add", "reduce_sum", "place"]
    assert [eqn.primitive.name for eqn in result.step.items] == names
    assert [sorted(groups) for groups in result.runs] == [[0], [1], [1], [1], [2]]
    assert [sorted(groups) for groups in result.outputs] == [[2]]


def test_what_waits_for_a_transfer_is_one_level_later(step):
    result = place_by_demand(pin_by_operands(step))
    early = as_early_as_possible(result)
    assert str(early).splitlines() == [
        "level 0: 0 in group 0, 1 in group 1",
        "level 1: 2 in group 1, 3 in group 1",
        "level 2: 4 in group 2",
    ]
    assert str(as_late_as_possible(result, early)).splitlines() == [
        "level 0: 0 in group 0",
        "level 1: 1 in group 1, 2 in group 1, 3 in group 1",
        "level 2: 4 in group 2",
    ]


def test_a_schedule_computes_its_orders_once_for_a_step_and_its_report():
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Counted(scheduler.GPipe):
        def orders(self, num_microbatches):
            calls.append(num_microbatches)
            return super().orders(num_microbatches)

    def step(w, xs):
        return mpmd.treduce(lambda x: jnp.sum(mpmd.mark_stage_end(x @ w) @ w), xs, schedule=Counted(2))

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    compiled = mpmd.jit(step, mpmd_mesh=mesh).lower(jnp.eye(3), jnp.ones((4, 2, 3))).compile()
    assert "Counted" in compiled.explain() and calls == [4]
    assert float(compiled(jnp.eye(3), jnp.ones((4, 2, 3)))) == 24 and calls == [4]


def test_a_result_of_a_loop_that_the_step_does_not_use_is_neither_computed_nor_sent():
    """Such as the whole loss, where a step reports its parts."""
    mesh = mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("d",), devices=[d]) for d in jax.devices()[:2]])

    def step(w, xs):
        def parts(x):
            a = (x * w).sum()
            return a + (mpmd.mark_stage_end(x * w) ** 2).sum(), a

        (_, a) = mpmd.treduce(parts, xs, schedule="gpipe", operation=mpmd.Mean)
        return a

    xs = jax.ShapeDtypeStruct((NUM_MICROBATCHES, 3), jnp.float32)
    shown = mpmd.jit(step, mpmd_mesh=mesh).lower(VECTOR, xs).as_text()
    assert "F1: empty" in shown and "writes" not in shown and shown.count("accumulates") == 1
