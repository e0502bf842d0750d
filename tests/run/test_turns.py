"""Lists whose microbatches run in another order than they are summed."""

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from test_lists import SHAPES, Step, groups, microbatches, sharded

import mpmd
import scheduler
from mpmd.errors import StageError


def check(step, mesh, calls, **options):
    """Trains on lists in some orders, and in plain JAX on the lists as they stand: the same bits."""
    pipelined, plain = mpmd.jit(step, mpmd_mesh=mesh, **options), jax.jit(step)
    a = b = step.params()
    counts = []
    for seed, (rows, order) in enumerate(calls):
        xs, before = microbatches(rows, seed), step.count
        a, told = pipelined(a, mpmd.Reordered(xs, order))
        counts.append(step.count - before)
        b, expected = plain(b, mpmd.Reordered(xs, order))
        for got, want in zip(jax.tree.leaves((a, told)), jax.tree.leaves((b, expected)), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
    return counts


CALLS = [
    ((2, 3, 2, 3), (3, 1, 0, 2)),
    ((2, 3, 2, 3), (0, 1, 2, 3)),
    ((3, 2, 3, 3), (2, 3, 0, 1)),
    ((2, 2, 3, 3, 2), (4, 1, 3, 0, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [scheduler.OneFOneB(2), scheduler.ZeroBubbleH1(2), scheduler.DualPipeV(2)],
    ids=lambda s: type(s).__name__,
)
def test_another_order_of_the_tasks_gives_the_bits_of_the_list(schedule):
    step = Step(schedule.num_stages, schedule, (mpmd.Mean, {"loss": mpmd.Concat(), "rows": mpmd.Max}))
    counts = check(step, groups(2), CALLS, donate_argnums=0)
    assert counts[1:3] == [0, 0]  # nothing is traced for a new order; for another number it is, because of Concat


@pytest.mark.slow
def test_pairs_of_tasks_sum_in_turn_too(monkeypatch):
    """As for a GPU, where two tasks are one program: each of them may come before its turn."""
    monkeypatch.setattr("mpmd.compile.step.hides_communication", lambda mesh: True)
    step = Step(4, scheduler.DualPipeV(2), (mpmd.Mean, {"loss": mpmd.Concat(), "rows": mpmd.Max}))
    jitted, params = mpmd.jit(step, mpmd_mesh=groups(2)), step.params()
    for seed, (rows, order) in enumerate(CALLS):
        xs = microbatches(rows, seed)
        got, want = jitted(params, mpmd.Reordered(xs, order)), jax.jit(step)(params, xs)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sums_once_a_step_are_summed_in_turn_too(kind):
    step, mesh = Step(2, "zb-h1", (mpmd.Add, {"loss": mpmd.Concat(), "rows": mpmd.Min})), sharded(kind)
    xs, params = microbatches((2, 3, 3, 2)), step.params()
    given, expected = (mpmd.jit(step, mpmd_mesh=mesh)(params, some) for some in (mpmd.Reordered(xs, (2, 0, 3, 1)), xs))
    for got, want in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@settings(max_examples=15)
@given(data=st.data(), rows=st.lists(st.sampled_from(SHAPES), min_size=4, max_size=8))
def test_any_order_gives_the_bits_of_the_list(data, rows):
    order = data.draw(st.permutations(range(len(rows))))
    xs, (step, jitted, plain) = microbatches(rows), _steps()
    got, want = jitted(step.params(), mpmd.Reordered(xs, order)), plain(step.params(), xs)
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    # XLA fuses the product that is a loss with the sum, where it is summed at once
    np.testing.assert_allclose(got[1]["loss"], want[1]["loss"], rtol=1e-5, atol=1e-5)


@functools.cache
def _steps():
    step = Step(4, scheduler.DualPipeV(2))
    return step, mpmd.jit(step, mpmd_mesh=groups(2)), jax.jit(step)


@pytest.mark.slow
def test_an_audited_step_leaves_out_what_has_accumulators_of_its_own():
    step, mesh = Step(2, "1f1b", rate=None), groups(2)
    jitted = mpmd.jit(step, mpmd_mesh=mesh, audit_every=1)
    for order in itertools.islice(itertools.permutations(range(3)), 4):
        xs = microbatches((2, 2, 2))
        grads, _ = jitted(step.params(), mpmd.Reordered(xs, order))
        for got, want in zip(grads, jax.jit(step)(step.params(), xs)[0], strict=True):
            np.testing.assert_array_equal(got, want)
    mpmd.resilient(lambda i, x: x, jax.numpy.zeros(()), 1)  # waits for the audits


def test_an_order_that_is_none_and_an_operation_without_parts_are_refused():
    for order, told in (([0, 0], r"\(0, 0\)"), ([0, "a"], r"\[0, 'a'\]"), (3, "3")):
        with pytest.raises(
            ValueError, match=rf"Reordered: order is {told}; it must have the number of each microbatch"
        ):
            mpmd.Reordered([1, 2], order)  # pyright: ignore[reportArgumentType]

    class Last(mpmd.Operation):
        def update(self, acc, x, index):
            return x

    class Pairs(mpmd.Operation):
        has_parts = True

        def init(self, aval, num_microbatches):
            return self.full(aval, 0, shape=(2, *aval.shape))

        def update(self, acc, x, index):
            return acc + x

    for operation, told in ((Last, "cannot be kept for Last"), (Pairs, r"Pairs\.init gives float32\[2,2\] for an acc")):
        step = Step(2, "1f1b", (mpmd.Add, {"loss": operation, "rows": mpmd.Add}))
        with pytest.raises(StageError, match=told):
            mpmd.jit(step, mpmd_mesh=groups(2))(step.params(), mpmd.Reordered(microbatches((2, 2)), (1, 0)))
