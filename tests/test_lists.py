"""Lists of microbatches of several shapes: the numbers of the plain loop, and nothing is traced for new orders."""

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from samples import slow_first

import mpmd
import scheduler
from mpmd.arrays.targets import Target
from mpmd.compile import executable
from mpmd.costs.machine import Machine
from mpmd.errors import StageError
from mpmd.planning.plan import plan_lowered, plan_step, tokens_of
from mpmd.report.roles import Roles
from scheduler.base.texts import in_bytes

WIDTH = 6
SHAPES = (2, 3, 4, 5)  # rows of a microbatch


def groups(num):
    return mpmd.MpmdMesh.from_groups(
        [jax.make_mesh((1,), ("data",), devices=[d], axis_types=(AxisType.Auto,)) for d in jax.devices()[:num]]
    )


def sharded(kind):
    mesh = jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4], axis_types=(kind,) * 2)
    return mpmd.MpmdMesh(mesh, "stage")


def microbatches(rows, seed=0):
    rng = np.random.default_rng([seed, *rows])
    return [
        {**{name: rng.normal(size=(4, n, WIDTH)).astype(np.float32) for name in "xy"}, "scale": np.float32(n)}
        for n in rows
    ]


class Step:
    """A step of some stages that counts how often its loop's function is traced.

    Losses are dot products: XLA fuses other sums with what stands around them, and then rounds in another order.
    """

    def __init__(self, num_stages, schedule, operation=mpmd.Add, weights=None, change=None, rate=0.01):
        self.count, self._rate = 0, rate
        self._stages, self._schedule, self._operation, self._weights = num_stages, schedule, operation, weights
        self._change = change

    def params(self):
        rng = np.random.default_rng(1)
        return [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(self._stages)]

    def _loss(self, params, x):
        self.count += 1
        h = x["x"]
        for stage, w in enumerate(params):
            h = jnp.tanh(h @ w)
            h = mpmd.mark_stage_end(h) if stage + 1 < self._stages else h
        loss = jnp.vdot(h, x["y"]) * x["scale"]
        return loss, {"loss": loss, "rows": x["x"].shape[1]}

    def __call__(self, params, xs):
        def one(x):
            return jax.grad(self._loss, has_aux=True)(params, x)

        grads, told = mpmd.treduce(one, xs, self._schedule, operation=self._operation, weights=self._weights)
        told = told if self._change is None else self._change(told, xs)
        if self._rate is None:
            return grads, told
        return [p - self._rate * g for p, g in zip(params, grads, strict=True)], told


def check(step, mesh, orders, **options):
    """Runs steps over lists as a pipeline and as a plain loop. How often the function was traced for each."""
    pipelined, plain = mpmd.jit(step, mpmd_mesh=mesh, **options), jax.jit(step)
    a = b = step.params()
    counts = []
    for seed, rows in enumerate(orders):
        xs, before = microbatches(rows, seed), step.count
        a, told = pipelined(a, xs)
        counts.append(step.count - before)
        b, expected = plain(b, xs)
        for got, want in zip(jax.tree.leaves((a, told)), jax.tree.leaves((b, expected)), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
    return counts


ORDERS = [(2, 3, 2, 4), (4, 2, 3, 3), (3, 2, 2, 2), (2, 2, 5, 4, 3), (5, 4, 3, 2, 2)]
ONCE_PER_SHAPE = [3, 0, 0, 1, 0]


@pytest.mark.slow
def test_each_shape_is_traced_and_compiled_once_whatever_the_order(monkeypatch):
    compiled = []
    compile_program = executable.Threads.compile
    monkeypatch.setattr(
        executable.Threads, "compile", lambda *args: compiled.append(args[-1].name) or compile_program(*args)
    )
    step = Step(2, "1f1b", mpmd.Mean)
    assert check(step, groups(2), ORDERS, donate_argnums=0) == ONCE_PER_SHAPE
    tasks = [name for name in compiled if "_stage" in name]
    kinds = 4  # F and B of two unlike stages
    assert len(tasks) == kinds * len(SHAPES)
    assert len(compiled) - len(tasks) <= 6  # zeros and updates, which have no shape of a microbatch


def test_what_was_compiled_to_be_asked_is_not_compiled_again_for_a_call():
    step, xs = Step(2, "1f1b", mpmd.Mean), microbatches((5, 2))
    jitted = mpmd.jit(step, mpmd_mesh=groups(2))
    asked = jitted.lower(step.params(), xs).compile()
    placed = jax.device_put(step.params(), jax.tree.map(lambda s: s.sharding, asked.input_shardings[0][0]))
    jitted(placed, xs)
    ((buckets,),) = jitted._bucketed.values()
    longest, shorter = (programs.compiler.num_programs for programs, _ in buckets._step._buckets)
    assert asked._programs.compiler.num_programs > 4
    assert (longest, shorter) == (0, 4)  # F and B of two unlike stages


@pytest.mark.parametrize(
    ("schedule", "num_groups"),
    slow_first(
        *((scheduler.InterleavedOneFOneB(4, 2), 2), (scheduler.DualPipeV(2), 2), (scheduler.ZeroBubbleH1(2), 2)),
        num_slow=2,
    ),
    ids=lambda x: type(x).__name__,
)
def test_schedules(schedule, num_groups):
    orders = [(2, 3, 2, 4), (4, 2, 3, 3), (2, 2, 5, 4, 3, 2), (5, 4, 3, 2, 2, 4)]
    assert check(Step(schedule.num_stages, schedule), groups(num_groups), orders) == [3, 0, 1, 0]


@pytest.mark.parametrize("kind", slow_first(AxisType.Explicit, AxisType.Auto), ids=str)
def test_groups_of_several_devices(kind):
    assert check(Step(2, "1f1b"), sharded(kind), ORDERS) == ONCE_PER_SHAPE


@pytest.mark.slow
def test_rows_are_sharded_as_the_user_says():
    def step(params, xs):
        def loss(x):
            return jnp.vdot(mpmd.mark_stage_end(jnp.tanh(x @ params[0])) @ params[1], x)

        return mpmd.treduce(loss, xs, "1f1b")

    params = Step(2, "1f1b").params()
    pipelined = mpmd.jit(step, mpmd_mesh=sharded(AxisType.Auto), in_shardings=(None, P("data")))
    for rows in ORDERS:
        xs = [x["x"] for x in microbatches(rows)]
        np.testing.assert_allclose(pipelined(params, xs), step(params, xs), rtol=1e-5)


def test_microbatches_may_be_in_the_groups_already_and_have_the_shape_of_a_parameter():
    """Their rows are sharded, which says nothing of parameters: gradients are summed over devices once a step."""

    def step(params, xs):
        def loss(params, x):
            return jnp.vdot(mpmd.mark_stage_end(jnp.tanh(x @ params[0].T)) @ params[1], x)

        return mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, "1f1b")

    mesh, rng = sharded(AxisType.Auto), np.random.default_rng(0)
    params = [rng.normal(size=(4, WIDTH)).astype(np.float32) for _ in range(2)]
    where, pipelined = mpmd.MpmdSharding(mesh, (0, 1), P("data")), mpmd.jit(step, mpmd_mesh=mesh)
    xs = [rng.normal(size=(rows, WIDTH)).astype(np.float32) for rows in (8, 4, 8)]
    placed = [mpmd.MpmdArray([jax.device_put(x, where.group_sharding(g)) for g in where.groups], where) for x in xs]
    for got, want in zip(pipelined(params, placed), step(params, xs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_means_by_weights():
    step = Step(2, "1f1b", mpmd.Mean, weights=lambda x: x["x"].shape[1])
    assert check(step, groups(2), ORDERS) == ONCE_PER_SHAPE
    xs = microbatches((2, 3))
    mean = mpmd.treduce(lambda x: x["x"].mean(), xs, None, operation=mpmd.Mean, weights=lambda x: x["x"].size)
    np.testing.assert_allclose(mean, np.concatenate([x["x"].ravel() for x in xs]).mean(), rtol=1e-5)


def test_weights_of_an_array_of_microbatches():
    xs, ws = jnp.arange(8.0).reshape(4, 2), jnp.array([1, 2, 3, 4])
    mean = mpmd.treduce(lambda x: x[0].sum(), (xs, ws), None, operation=mpmd.Mean, weights=lambda x: x[1])
    np.testing.assert_allclose(mean, (xs.sum(1) * ws).sum() / ws.sum())


@pytest.mark.slow
def test_stacked_results_are_traced_for_each_number_of_microbatches():
    operation = (mpmd.Add, {"loss": mpmd.Concat, "rows": mpmd.Max})
    counts = check(Step(2, "1f1b", operation), groups(2), [(2, 3, 2), (3, 2, 2), (3, 2), (2, 3)])
    assert counts[1::2] == [0, 0] and counts[2] == 2


@pytest.mark.slow
def test_a_list_that_the_step_reads_is_part_of_the_trace():
    step = Step(2, "1f1b", change=lambda told, xs: {**told, "mean": told["loss"] / len(xs), "first": xs[0]["x"][0, 0]})
    counts = check(step, groups(2), [(2, 3, 2), (2, 3, 2), (3, 2, 2)])
    assert counts[1:] == [0, 2]


def test_a_loop_without_a_schedule_in_a_pipelined_step():
    def step(w, xs):
        return mpmd.treduce(lambda x: (x["x"] @ w).sum(), xs, None)

    w, xs = np.eye(WIDTH, dtype=np.float32), microbatches((2, 3, 2))
    np.testing.assert_allclose(mpmd.jit(step, mpmd_mesh=groups(2))(w, xs), step(w, xs), rtol=1e-6)


@pytest.mark.slow
def test_stages_may_keep_other_values_for_other_shapes():
    def step(params, xs):
        def loss(params, x):
            h = jnp.tanh(x["x"] @ params[0])
            h = mpmd.mark_stage_end(h if h.shape[1] == 2 else jnp.sin(h) * jnp.cos(h))
            return jnp.vdot(h @ params[1], x["y"])

        return mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, "1f1b")

    params, pipelined, plain = Step(2, "1f1b").params(), mpmd.jit(step, mpmd_mesh=groups(2)), jax.jit(step)
    for rows in ORDERS[:3]:
        xs = microbatches(rows)
        for got, want in zip(pipelined(params, xs), plain(params, xs), strict=True):
            np.testing.assert_array_equal(got, want)
    ((buckets,),) = pipelined._bucketed.values()
    assert len(set(buckets._step._are_like_first)) == 2  # the last shape keeps less


@pytest.mark.slow
def test_two_lists():
    def step(params, first, second):
        def loss(x):
            return jnp.vdot(mpmd.mark_stage_end(jnp.tanh(x @ params[0])) @ params[1], x)

        return mpmd.treduce(loss, first["xs"], "gpipe"), mpmd.treduce(loss, second, "1f1b", operation=mpmd.Mean)

    params = Step(2, "1f1b").params()
    pipelined = mpmd.jit(step, mpmd_mesh=groups(2))
    for one, other in itertools.product([(2, 3, 2), (3, 4)], [(5, 3), (3, 5, 3)]):
        xs, ys = ([x["x"] for x in microbatches(rows)] for rows in (one, other))
        for got, want in zip(pipelined(params, {"xs": xs}, ys), step(params, {"xs": xs}, ys), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_one_list_for_two_arguments():
    def step(params, first, second, scale):
        loss = lambda x: jnp.vdot(mpmd.mark_stage_end(jnp.tanh(x @ params[0])) @ params[1], x)  # noqa: E731
        return mpmd.treduce(loss, first["xs"], "gpipe"), mpmd.treduce(lambda x: scale * loss(x), second, "1f1b")

    params = Step(2, "1f1b").params()
    xs = [x["x"] for x in microbatches((2, 3, 2))]
    jitted = mpmd.jit(step, mpmd_mesh=groups(2), static_argnames="scale")
    compiled = jitted.lower(params, {"xs": xs}, xs, 2.0).compile()
    for second in (xs, xs[::-1], xs):
        expected = step(params, {"xs": xs}, second, 2.0)
        for call in (compiled, functools.partial(jitted, scale=2.0)):
            for got, want in zip(call(params, {"xs": xs}, second), expected, strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_threads_that_call_one_step_get_what_belongs_to_their_lists(schedule):
    scaled = lambda x: mpmd.mark_stage_end(x * 2).sum()  # noqa: E731
    step = mpmd.jit(
        lambda xs: mpmd.treduce(scaled, xs, operation=mpmd.Concat(), schedule=schedule), mpmd_mesh=groups(2)
    )
    xs = [np.full(4, i, np.float32) for i in range(4)]
    calls = [mpmd.Reordered(xs, order) for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2))] + [xs[:3], xs[1:]]
    expected = [[8 * x[0] for x in given] for given in calls]
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        for _ in range(20):
            for got, want in zip(threads.map(lambda given: np.asarray(step(given)), calls), expected, strict=True):
                np.testing.assert_array_equal(got, want)


LISTS = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=9)


class Random:
    """The gradients of one step in all examples: shapes are traced and compiled once in all of them."""

    def __init__(self, schedule, num_stages=2):
        self.step = Step(num_stages, schedule, mpmd.Mean, rate=None)
        self._jitted, self._plain = mpmd.jit(self.step, mpmd_mesh=groups(2)), jax.jit(self._update)
        self._seen: set[int] = set()

    def _update(self, params, sums, x):
        """Of the plain loop: the sums after one microbatch."""
        found = jax.grad(Step(self.step._stages, None)._loss, has_aux=True)(params, x)
        return found if sums is None else jax.tree.map(jnp.add, sums, found)

    def check(self, rows, seed):
        params, xs, new = self.step.params(), microbatches(rows, seed), set(rows) - self._seen
        before, compiled, compile_program = self.step.count, [], executable.Threads.compile
        with mock.patch.object(
            executable.Threads, "compile", lambda *args: compiled.append(args[-1].name) or compile_program(*args)
        ):
            got = self._jitted(params, xs)
        assert self.step.count - before == len(new)
        kinds = ("forward", "backward")
        assert len([n for n in compiled if "_stage" in n]) == len(kinds) * self.step._stages * len(new)
        assert not compiled or new
        self._seen |= new
        want = None
        for x in xs:
            want = self._plain(params, want, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b / len(xs))


@functools.cache
def random_step(schedule="1f1b", num_stages=2):
    return Random(schedule, num_stages)


@pytest.mark.slow
@given(LISTS, st.integers(0, 99))
@settings(max_examples=300)
def test_random_lists(rows, seed):
    random_step().check(rows, seed)


@pytest.mark.slow
@given(st.lists(st.sampled_from(SHAPES), min_size=4, max_size=17), st.integers(0, 9))
@settings(max_examples=60)
def test_random_lists_where_tasks_of_two_microbatches_are_one_program(rows, seed):
    xs, step = microbatches(rows, seed), random_step(scheduler.DualPipeV(2), 4)
    got, want = step._jitted(step.step.params(), xs), None
    for x in xs:
        want = step._plain(step.step.params(), want, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b / len(xs))


def test_shorter_lists_need_no_plan_and_free_as_much():
    random = Random("1f1b")
    for rows in ((2, 2, 2, 3, 3, 2), (2,), (3, 2, 2)):
        random.check(rows, 0)
        ((buckets,),) = random._jitted._bucketed.values()
        (executor,) = buckets._step._planned.values()
        of_microbatches = executor._bound_buckets.slots.of_microbatches
        freed = [
            {slot for b in bound.instructions for slot in b.frees} - of_microbatches
            for bound in (executor.bindings, executor._bound_buckets.of[0])
        ]
        assert freed[0] == freed[1] != set()
        program = executor._program_of_call
        assert scheduler.check(program).num_transfers == 2 * len(rows) + 1  # and how many microbatches there are


def test_a_schedule_says_which_numbers_it_is_not_for():
    step = Step(4, scheduler.InterleavedOneFOneB(4, 2))
    pipelined = mpmd.jit(step, mpmd_mesh=groups(2))
    pipelined(step.params(), microbatches((2, 3, 2, 3)))
    with pytest.raises(ValueError, match="num_microbatches is 5 and num_groups 2"):
        pipelined(step.params(), microbatches((2, 3, 2, 3, 2)))


def listed(function, operation=mpmd.Add):
    def step(w, xs):
        return mpmd.treduce(functools.partial(function, w), xs, schedule="1f1b", operation=operation)

    return step


def assert_alike(step, w, *lists):
    """Calls a pipelined step and a plain one over several lists, which run by the plan of the first."""
    pipelined, plain = mpmd.jit(step, mpmd_mesh=groups(2)), jax.jit(step)
    for xs in lists:
        got, want = pipelined(w, xs), plain(w, xs)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), got, want)


def rows_of(*numbers):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, WIDTH)).astype(np.float32) for n in numbers]


def two_stages(w, x):
    return jnp.mean((mpmd.mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)


WEIGHTS = np.random.default_rng(1).normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 3


@pytest.mark.parametrize("operation", [mpmd.Add, pytest.param(mpmd.Mean, marks=pytest.mark.slow)])
def test_outputs_of_a_jitted_function_that_no_microbatch_changes_count_each_of_them(operation):
    """Seen from outside, all outputs of the jitted function depend on the microbatch."""

    @jax.jit
    def told(w, x):
        rows = x.shape[0]
        return two_stages(w, x), jnp.int32(1), 1e-3 * jnp.sum(w[2] ** 2), jnp.int32(rows), jnp.full((2,), rows)

    def gradients(w, x):
        """The third weight is regularized, and nothing else."""
        return jax.grad(jax.jit(lambda w: two_stages(w, x) + jnp.sum(w[2] ** 2)))(list(w))

    alike = rows_of(3, 3), rows_of(3, 3, 3, 3), rows_of(3)
    assert_alike(listed(gradients, operation), WEIGHTS, *alike)
    assert_alike(listed(told, operation), WEIGHTS, *alike, rows_of(3, 2), rows_of(2, 2, 1))


@pytest.mark.slow
def test_masks_of_stacked_parameters_are_applied_to_the_layers_that_they_belong_to():
    mask = np.random.default_rng(2).random(WEIGHTS.shape).astype(np.float32)

    def value(w, x):
        w = w * mask
        x = mpmd.mark_stage_end(jnp.tanh(x @ w[0]))
        return ((jnp.tanh(x @ w[0]) @ w[1]) ** 2).mean()  # the first layer is in both stages

    assert_alike(listed(lambda w, x: jax.value_and_grad(value)(w, x)), WEIGHTS, rows_of(2, 3, 2))


@pytest.mark.slow
def test_microbatches_are_not_cut_by_layers():
    def kept(w, x):
        """Stochastic depth: each microbatch says which layers it skips."""

        def layer(h, given):
            weights, keep = given
            return mpmd.mark_layer_end(h + jnp.tanh(h @ weights) * keep), None

        return (jax.lax.scan(layer, x["rows"], (w, x["keep"]))[0] ** 2).mean()

    def contracted(w, x):
        h = mpmd.mark_stage_end(x @ (2 * w[0]) + w[0][0])
        return ((h + w[0][1]) ** 2).mean()

    keep = np.float32([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]])
    xs = [{"rows": x, "keep": k} for x, k in zip(rows_of(2, 3, 2), keep, strict=True)]
    four = np.concatenate([WEIGHTS, WEIGHTS[:1]])
    assert_alike(listed(lambda w, x: jax.value_and_grad(kept)(w, x)), four, xs)
    assert_alike(listed(lambda w, x: jax.value_and_grad(contracted)(w, x)), WEIGHTS, rows_of(2, 3, 2))


@pytest.mark.slow
def test_a_table_of_positions_may_be_read_up_to_the_length_of_each_microbatch():
    """The gradient of the whole table, for the longest microbatch, is another sum than that of a part of it."""

    def once(table, x):
        own = table[: len(x)]
        return ((mpmd.mark_stage_end(x * own) + own) ** 2).sum()

    def rolled(table, x):
        own = jnp.roll(table[0], len(x))
        return ((mpmd.mark_stage_end(x * own) + own) ** 2).sum()

    table = np.random.default_rng(3).normal(size=(5, WIDTH)).astype(np.float32)
    step = listed(lambda w, x: jax.value_and_grad(once)(w, x))
    assert_alike(step, table, rows_of(2, 3), rows_of(5), rows_of(1, 5, 2), rows_of(3, 3))
    assert_alike(listed(lambda w, x: jax.value_and_grad(rolled)(w, x)), table, rows_of(2, 3))


def test_the_other_arguments_of_the_first_call_are_let_go():
    step = mpmd.jit(listed(two_stages), mpmd_mesh=groups(2))
    weights = [jax.device_put(w) for w in WEIGHTS]
    kept = [weakref.ref(w) for w in weights]
    first = step(weights, rows_of(2, 3))
    del weights
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    np.testing.assert_array_equal(step(list(WEIGHTS), rows_of(2, 3)), first)
    assert np.isfinite(step(list(WEIGHTS), rows_of(2, 4, 3)))  # a new shape


def test_an_order_that_does_not_fit_its_list_any_more_is_refused():
    xs = mpmd.Reordered(rows_of(2, 3, 2), [2, 1, 0])
    xs.append(rows_of(2)[0])
    with pytest.raises(ValueError, match=r"the list has 4 microbatches, but its order is \(2, 1, 0\)"):
        mpmd.jit(listed(two_stages), mpmd_mesh=groups(2))(WEIGHTS, xs)


def fault(function, xs, **options):
    def step(w, xs):
        return mpmd.treduce(lambda x: function(w, x), xs, "1f1b", **options)

    with pytest.raises(StageError) as error:
        mpmd.jit(step, mpmd_mesh=groups(2))(np.eye(WIDTH, dtype=np.float32), xs)
    return str(error.value)


def output(w, x):
    return mpmd.mark_stage_end(x["x"] @ w) @ w


def text_loss(params, tokens):
    """A loss with what follows from the length alone: positions, a mask that is a constant, the seed of the mean."""
    n = tokens.shape[1]
    h = params["embed"][tokens] + params["position"][jnp.arange(n)] @ params["first"]
    h = mpmd.mark_stage_end(jnp.tanh(h + jnp.cos(jnp.outer(jnp.arange(n), jnp.arange(WIDTH)) / WIDTH)))
    scores = jnp.where(np.tril(np.ones((n, n), bool)), jnp.einsum("btd,bsd->bts", h, h), -1e9)
    h = jax.nn.softmax(scores) @ h + params["position"][:n].astype(jnp.bfloat16).astype(jnp.float32)
    return -jax.nn.log_softmax(h @ params["embed"].T)[..., 0].mean()


def text_step(params, texts):
    gradient = jax.value_and_grad(text_loss)
    return mpmd.treduce(lambda x: gradient(params, x), texts, "1f1b", operation=mpmd.Mean, weights=lambda x: x.size)


@pytest.mark.slow
def test_what_follows_from_the_length_alone_is_computed_for_each_shape():
    shapes = {"embed": (160, WIDTH), "position": (16, WIDTH), "first": (WIDTH, WIDTH)}
    rng = np.random.default_rng(3)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    pipelined, plain = mpmd.jit(text_step, mpmd_mesh=groups(2)), jax.jit(text_step)
    for lengths in [(4,), (16, 4, 4, 8, 4, 16), (8, 16)]:
        texts = [rng.integers(0, 160, (2, n)).astype(np.int32) for n in lengths]
        got, want = mpmd.device_get(pipelined(params, texts)), plain(params, texts)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, want)

    # What each costs, by the roofline; and what another order would save.
    lowered = pipelined.lower(params, [np.zeros((2, n), np.int32) for n in (16, 4, 16, 4, 16, 8, 4, 4)])
    costs = lowered.costs()
    assert costs == lowered.costs() and len(costs.of_microbatches(8)) == 8
    long, short, *_, middle, _, again = costs.of_microbatches(8)
    assert short == again and short.forward < middle.forward < long.forward == costs.forward
    assert short.activation_bytes < long.activation_bytes
    order = scheduler.order_microbatches(scheduler.OneFOneB(2), costs)
    compiled = lowered.compile()
    assert "its 8 microbatches have 3 shapes" in compiled.explain()
    fewer = scheduler.simulate(scheduler.OneFOneB(2), 8, costs.in_order(order)).makespan
    assert fewer < scheduler.simulate(scheduler.OneFOneB(2), 8, costs).makespan

    # A plan counts each by its shape: all of its tokens, and less time than if all were as long as the longest.
    machine = Machine(Target.named("h100"))
    of_each = plan_lowered(lowered, machine)
    of_longest = plan_step(compiled._programs, compiled.program, machine)
    assert of_each.loops[0].seconds < of_longest.loops[0].seconds
    assert sum(tokens_of(Roles(one._outline)) for one in lowered._of_microbatches()) == 2 * (3 * 16 + 8 + 4 * 4)


@pytest.mark.slow
def test_figures_of_a_step_count_each_microbatch_by_its_shape():
    step, machine = Step(2, "1f1b", mpmd.Mean), Machine(Target.named("h100"))
    jitted = mpmd.jit(step, mpmd_mesh=groups(2))

    def figures(xs):
        lowered = jitted.lower(step.params(), xs)
        plan, compiled = plan_lowered(lowered, machine), lowered.compile()
        sent = [plan.groups[g].sent[1 - g][1] for g in range(2)]
        moved = sum(c.nbytes for c in compiled._executor.bindings.crossings)
        return lowered, plan, compiled, sent, moved

    little, short, of_short, sent_short, _ = figures(microbatches((2, 2, 2, 2)))
    much, long, of_long, sent_long, moved_long = figures(microbatches((5, 5, 5, 5)))
    lowered, mixed, compiled, sent, _ = figures(microbatches((5, 2, 5, 2)))
    total = [dataclasses.astuple(plan.total) for plan in (short, long, mixed)]
    for a, b, both in zip(*total, strict=True):
        assert both == pytest.approx((a + b) / 2)
    assert short.total.products < mixed.total.products < long.total.products
    assert sent == [(a + b) // 2 for a, b in zip(sent_short, sent_long, strict=True)]
    assert sum(sent_long) == moved_long and f"9 transfers ({in_bytes(sum(sent))}) a step" in compiled.explain()
    for of in ("flops", "bytes accessed"):
        mean = (of_short.cost_analysis()[of] + of_long.cost_analysis()[of]) / 2
        assert compiled.cost_analysis()[of] == pytest.approx(mean, rel=0.05)
    assert mixed.unpipelined.peak == pytest.approx((short.unpipelined.peak + long.unpipelined.peak) / 2, abs=1)
    assert mixed.unpipelined.rows == 16 and mixed.loops[0].num_shapes == 2
    assert "4 microbatches of 2 shapes (tasks and memory above: of the largest)" in str(mixed)
    # Over slow links a step takes as long as its transfers.
    slow = dataclasses.replace(machine.target, link_bandwidth=1e3, network_bandwidth=1e3)
    least, between, most = (plan_lowered(one, Machine(slow)).step.seconds for one in (little, lowered, much))
    assert least < 0.8 * between and between < 0.9 * most

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *microbatches((5, 5, 5, 5)))
    _, plain, *_ = figures(stacked)
    assert plain.total.products == long.total.products and plain.unpipelined.rows == 16


def test_mistakes_are_told():
    xs = microbatches((2, 3))
    assert fault(output, []) == "treduce: xs is an empty list. At least one microbatch is needed."
    assert "microbatch 1 of xs has another structure than microbatch 0" in fault(output, [xs[0], xs[1]["x"]])
    assert "fun returns float32[4,3,6] for one microbatch of the list and float32[4,2,6] for another" in fault(
        output, xs, operation=mpmd.Concat
    )
    assert "axis is 1, and xs is a list, whose entries are whole microbatches" in fault(output, xs, axis=1)
    assert "weights is a list" in fault(output, xs, weights=[1, 2])
    for weight, told in (
        (lambda x: x["x"], "float32[4,3,6]"), (lambda x: None, "None"), (lambda x: "one", "'one'"),
        (lambda x: 1j, "1j"), (lambda x: x["x"].size > 2, "True"), (lambda x: jax.random.key(0), "key<fry>[]"),
    ):  # fmt: skip
        assert fault(output, xs, operation=mpmd.Mean, weights=weight) == (
            f"treduce: weights returns {told} for a microbatch. It must return a scalar, an integer or a float."
        )
    assert fault(lambda w, x: jnp.vdot(output(w, x), x["y"]), xs, weights=lambda x: x["x"].size) == (
        "treduce: weights are for means, and operation is <class 'mpmd.ops.reductions.Add'>. Pass operation=mpmd.Mean,"
        " or multiply by the weight inside of fun."
    )

    def made(w, xs):
        return mpmd.treduce(lambda x: output(w, x).sum(), list(xs), "1f1b")

    with pytest.raises(StageError, match="xs is a list that the step has made"):
        mpmd.jit(made, mpmd_mesh=groups(2))(np.eye(WIDTH, dtype=np.float32), xs)


@pytest.mark.slow
def test_microbatches_may_hold_typed_keys():
    """Nothing stands in for the keys of a microbatch where the step's own arguments are placed."""

    def loss(w, x):
        h = x["x"] * jax.random.bernoulli(x["key"], 0.7, x["x"].shape)
        return jnp.vdot(jnp.tanh(mpmd.mark_stage_end(h @ w)) @ w, x["y"])

    def step(w, xs):
        return mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, "1f1b")

    xs = [{**x, "key": jax.random.key(i)} for i, x in enumerate(microbatches((2, 3, 2)))]
    w = np.eye(WIDTH, dtype=np.float32)
    np.testing.assert_allclose(mpmd.jit(step, mpmd_mesh=groups(2))(w, xs), jax.jit(step)(w, xs), rtol=1e-4, atol=1e-5)


def test_a_list_is_not_donated(recwarn):
    step = Step(2, "1f1b")
    xs = jax.tree.map(jnp.asarray, microbatches((2, 3)))
    mpmd.jit(step, mpmd_mesh=groups(2), donate_argnums=(0, 1))(step.params(), xs)
    assert not any(x.is_deleted() for x in jax.tree.leaves(xs))
    assert not [str(w.message) for w in recwarn if "donated" in str(w.message)]


def test_a_compiled_step_is_told_of_microbatches_of_another_structure():
    step, xs = Step(2, "1f1b"), microbatches((2, 3))
    compiled = mpmd.jit(step, mpmd_mesh=groups(2)).lower(step.params(), xs).compile()
    with pytest.raises(TypeError, match="microbatches of another structure"):
        compiled(step.params(), [{**x, "more": np.ones(2)} for x in xs])


def test_a_compiled_step_is_told_of_other_dtypes_than_it_was_compiled_for():
    step, xs = Step(2, "1f1b"), microbatches((2, 3))
    params = step.params()
    compiled = mpmd.jit(step, mpmd_mesh=groups(2)).lower(params, xs).compile()
    compiled(params, microbatches((5, 2)))  # other shapes of microbatches may come
    told = "the compiled step was called with other shapes or dtypes; call the jitted step to compile again.\n"
    name = sorted(xs[0])[0]
    with pytest.raises(TypeError) as raised:
        compiled(params, [xs[0], {**xs[1], name: xs[1][name].astype(jnp.bfloat16)}])
    shape, was = ",".join(map(str, xs[1][name].shape)), xs[1][name].dtype
    assert str(raised.value).startswith(f"mpmd: {told}  "), raised.value
    assert str(raised.value).endswith(f"[1][{name!r}]: got bfloat16[{shape}], expected {was}"), raised.value
    with pytest.raises(TypeError, match=r"got bfloat16\[.*\], expected float32\["):
        compiled(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), xs)
    with pytest.raises(TypeError, match="called with another structure of arguments"):
        compiled([params], xs)


def test_a_list_has_one_entry_in_shardings():
    step, xs = Step(2, "1f1b"), microbatches((2, 3))
    with pytest.raises(ValueError, match=r"(?s)tree_map tree\[1\].*has one entry, for all arrays in it"):
        mpmd.jit(step, mpmd_mesh=groups(2), in_shardings=(None, [P(), P()])).lower(step.params(), xs)


def test_a_list_of_arrays_with_a_microbatch_axis_is_told():
    with pytest.raises(TypeError) as error:
        mpmd.treduce(lambda xy: (lambda x, y: x @ y)(*xy), [jnp.ones((4, 2, 3)), jnp.ones((4, 3))], None)
    assert any("xs is a list, and fun sees one entry of it" in note for note in error.value.__notes__)


def test_functions_that_each_trace_defines_anew_are_the_same_around_the_loop():
    seen = []

    def change(told, xs):
        add = 1.0

        def halved(v):
            return halved(-v) if v < 0 else np.float32(v / 2 + add)  # a function that holds itself, and a number

        loss = jax.lax.reduce(jnp.stack([told["loss"]] * 2), np.float32(0), lambda a, b: a * 2 + b, (0,))
        loss = jax.pure_callback(functools.partial(halved), jax.ShapeDtypeStruct((), "float32"), loss)
        jax.debug.callback(lambda v: seen.append(float(v)), loss)
        return {**told, "loss": loss}

    check(Step(2, "1f1b", change=change), groups(2), [(2, 3), (4, 2, 3)])
    jax.effects_barrier()
    assert len(seen) == 4 and seen[0::2] == seen[1::2]  # of each call, the pipeline's and the plain loop's


def test_a_function_around_the_loop_that_holds_the_shape_of_a_microbatch_is_told():
    shapes = []

    def step(w, xs):
        loss = mpmd.treduce(lambda x: shapes.append(x["x"].shape) or output(w, x).sum(), xs, "gpipe")
        latest = shapes[-1]
        jax.debug.callback(lambda v: print(latest, v), loss)  # the line that is named
        return loss

    with pytest.raises(StageError, match=r"has other work around its loops .*, first at .*test_lists.py:\d+"):
        mpmd.jit(step, mpmd_mesh=groups(2))(np.eye(WIDTH, dtype=np.float32), microbatches((2, 3)))


def test_a_step_whose_tasks_depend_on_the_shape_is_told():
    def other(w, x):
        h = x["x"] @ w
        if x["x"].shape[1] == 2:
            return jnp.vdot(mpmd.mark_stage_end(h), x["y"])
        h, more = mpmd.mark_stage_end((h, jnp.tanh(h) @ w))
        return jnp.vdot(h + more, x["y"])

    assert "the step has other instructions for microbatches of some shapes" in fault(other, microbatches((2, 3)))


def check_close(got, expected):
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def summed_tables(table_of):
    """A step of two stages whose losses are scaled by `table_of(rows)`; its parameters and lists of three lengths."""

    def loss(params, x):
        h = mpmd.mark_stage_end(jnp.tanh(x @ params[0]))
        return jnp.vdot((h @ params[1]) ** 2, jnp.broadcast_to(table_of(x.shape[0]), (x.shape[0], WIDTH)))

    def step(params, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule="1f1b")

    rng = np.random.default_rng(3)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(2)]
    xs = [rng.normal(size=(rows, WIDTH)).astype(np.float32) for rows in (2, 5, 3, 2)]
    return step, params, ([xs[0]], xs[:3], xs, [xs[2]])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["of its rows", "one for all", "keys", "two in another order"])
def test_arrays_that_a_loop_captures_may_depend_on_the_shape_of_a_microbatch(shape):
    tables = {rows: jnp.full((rows, 1) if shape == "of its rows" else (WIDTH,), 1.0 * rows) for rows in (2, 3, 5)}
    keys = {rows: jax.random.key(rows) for rows in (2, 3, 5)}

    def table_of(rows):
        if shape == "keys":
            return jax.random.normal(keys[rows], (WIDTH,))
        if shape == "two in another order":
            one, two = (tables[2], tables[3])[:: 1 if rows == 5 else -1]
            return one - jnp.sin(two)
        return tables[rows]

    step, params, calls = summed_tables(table_of)
    plain, pipelined = jax.jit(step), mpmd.jit(step, mpmd_mesh=groups(2))
    for xs in calls:
        check_close(pipelined(params, xs), plain(params, xs))


@pytest.mark.slow
def test_arrays_that_are_the_same_for_all_shapes_are_captured_once():
    table = jnp.arange(WIDTH, dtype=jnp.float32)
    step, params, calls = summed_tables(lambda rows: jnp.array(table) if rows == 3 else table)  # the bits count
    pipelined = mpmd.jit(step, mpmd_mesh=groups(2))
    for xs in calls:
        check_close(pipelined(params, xs), jax.jit(step)(params, xs))
    assert len(pipelined.trace(params, calls[1])._trace.consts) == 1


@pytest.mark.parametrize("change", [lambda xs: xs.sort(key=lambda x: x.shape[0]), lambda xs: xs.__iadd__([xs[0]])])
def test_a_list_that_the_step_changes_is_refused(change):
    step, params, calls = summed_tables(lambda rows: jnp.float32(1))

    def changing(params, xs):
        change(xs)
        return step(params, xs)

    with pytest.raises(StageError, match="the step has changed the list xs, or a microbatch in it, before the loop"):
        mpmd.jit(changing, mpmd_mesh=groups(2))(params, calls[1])


@pytest.mark.slow
def test_a_microbatch_that_the_step_changes_is_refused_and_lists_are_compared_and_joined_as_lists():
    step, params, calls = summed_tables(lambda rows: jnp.float32(1))

    def changing(params, xs):
        for x in xs:
            x["x"] = x["x"] / 10
        return mpmd.treduce(lambda x: step(params, [x["x"]])[0], xs, schedule="1f1b")

    with pytest.raises(StageError, match="the step has changed the list xs, or a microbatch in it, before the loop"):
        mpmd.jit(changing, mpmd_mesh=groups(2))(params, [{"x": x} for x in calls[1]])

    def reading(params, xs):
        more = sum(x.sum() for x in [params[0]] + xs)  # noqa: RUF005 (the sum of lists is what is tried)
        return step(params, xs), more * (2 if xs != [] and not xs < [] and xs > [] else 1)

    check_close(mpmd.jit(reading, mpmd_mesh=groups(2))(params, calls[1]), jax.jit(reading)(params, calls[1]))


@pytest.mark.slow
def test_microbatches_may_lie_in_any_groups_each_in_others():
    mesh = groups(2)

    def step(ws, xs):
        def loss(x):
            return jnp.vdot(mpmd.mark_stage_end(jnp.tanh(x["x"] @ ws[0])) @ ws[1], x["y"])

        return mpmd.treduce(loss, xs, "1f1b")

    def placed(x, group):
        return mpmd.jit(lambda x: x, mpmd_mesh=mesh, out_shardings=mpmd.MpmdSharding(mesh, group))(x)

    ws = [np.eye(WIDTH, dtype=np.float32)] * 2
    xs = [{name: np.full((rows, WIDTH), rows, np.float32) for name in "xy"} for rows in (2, 3, 3)]
    pipelined, expected = mpmd.jit(step, mpmd_mesh=mesh), jax.jit(step)(ws, xs)
    for some in ([placed(x, 0) for x in xs], xs, [placed(xs[0], 1), xs[1], placed(xs[2], 0)]):
        check_close(pipelined(ws, some), expected)
    one_group = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=(None, mpmd.MpmdSharding(mesh, 0)))
    check_close(one_group(ws, xs), expected)


def test_a_state_may_look_like_a_microbatch_of_one_shape():
    def step(xs, stats):
        loss = mpmd.treduce(lambda x: mpmd.mark_stage_end(x[0] * 2).sum() * x[1].sum(), xs, "1f1b")
        return loss, (stats[0] + 1, stats[1] * 0.5)

    stats = np.zeros(3, np.float32), np.ones(3, np.float32)
    pipelined = mpmd.jit(step, mpmd_mesh=groups(2))
    for rows in (2, 5), (3, 2):
        xs = [(np.ones(n, np.float32), np.ones(n, np.float32)) for n in rows]
        check_close(pipelined(xs, stats), jax.jit(step)(xs, stats))


@jax.tree_util.register_pytree_node_class
class Box:
    """A class whose children have no names."""

    def __init__(self, documents):
        self.documents = documents

    def tree_flatten(self):
        return (self.documents,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_list_may_be_in_an_object_of_any_class_but_not_in_another_list_of_microbatches():
    def scaled(xs):
        return mpmd.treduce(lambda x: mpmd.mark_stage_end(x * 2).sum(), xs, "1f1b")

    xs = [np.ones(n, np.float32) for n in (2, 3)]
    assert mpmd.jit(lambda box: scaled(box.documents), mpmd_mesh=groups(2))(Box(xs)) == 10
    both = mpmd.jit(
        lambda bs: mpmd.treduce(lambda x: mpmd.mark_stage_end(x[0] * 2).sum(), bs, "1f1b") + scaled(bs[0]),
        mpmd_mesh=groups(2),
    )
    with pytest.raises(StageError, match="which is part of another list of microbatches"):
        both([xs, xs])


def test_an_argument_that_is_read_for_some_shapes_alone_is_named():
    _, params, calls = summed_tables(lambda rows: jnp.float32(1))

    def choosing(params, tables, xs):
        return mpmd.treduce(
            lambda x: mpmd.mark_stage_end(x @ params[0]).sum() * tables[str(x.shape[0])].sum(), xs, schedule="1f1b"
        )

    tables = {str(rows): np.ones(3, np.float32) for rows in (2, 3, 5)}
    with pytest.raises(StageError, match=r"than for others: it does not read .*tables\['5'\] for all of them"):
        mpmd.jit(choosing, mpmd_mesh=groups(2))(params, tables, calls[1])


def test_the_largest_of_floats_without_infinity():
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float32"):
        xs = jnp.array([[-3, 1], [-2, -1]], dtype)
        for operation, expected in ((mpmd.Max, [-2, 1]), (mpmd.Min, [-3, -1])):
            found = mpmd.treduce(lambda x: x, xs, None, operation=operation)
            np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize(("weight", "output"), [("int8", "float32"), ("uint16", "float16"), ("float16", "bfloat16")])
def test_weights_and_outputs_of_few_bits_do_not_overflow_their_sums(weight, output):
    xs = [jnp.full((3,), i, output) for i in (1, 2)] * 3

    def mean(xs):
        many = np.array(100 if weight == "int8" else 40_000, weight)
        return mpmd.treduce(lambda x: x, xs, None, operation=mpmd.Mean, weights=lambda x: many)

    for found in (mean(xs), jax.jit(mean)(xs)):  # a sum in bfloat16 rounds
        assert found.dtype == output
        np.testing.assert_allclose(found.astype(np.float32), 1.5, rtol=1e-2)


@pytest.mark.slow
def test_shapes_go_in_one_order_over_a_graph_of_stages_whatever_their_costs():
    """Of two roles in a group, which has more work depends on the rows of a microbatch."""

    def loss(params, x):
        rows = mpmd.role("rows")(lambda w, x: jnp.tanh(x @ w))(params["rows"], x)
        weights = mpmd.role("weights")(lambda w: jnp.tanh(w @ w)[0])(params["weights"])
        return mpmd.role("both")(lambda a, b: jnp.vdot(a * b, a))(rows, weights)

    def step(params, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, "1f1b")

    params = {"rows": np.eye(32, dtype=np.float32), "weights": np.full((32, 32), 0.1, np.float32)}
    xs = [np.full((n, 32), 0.01 * n, np.float32) for n in (2, 512, 2, 512)]
    pipelined = mpmd.jit(step, mpmd_mesh=groups(2), roles={"rows": 0, "weights": 0, "both": 1})
    jax.tree.map(np.testing.assert_array_equal, pipelined(params, xs), jax.jit(step)(params, xs))


@pytest.mark.slow
def test_constants_that_pass_a_mark_or_a_role_count_by_the_shape_of_each_microbatch():
    """The number of rows is a constant of each shape."""

    def marked(w, x):
        h, rows = mpmd.mark_stage_end((jnp.tanh(x @ w[0]), x.shape[0]))
        return jnp.vdot(h @ w[1], h), rows

    def of_role(w, x):
        h = mpmd.mark_stage_end(jnp.tanh(x @ w[0]))
        return mpmd.role("last")(lambda w, h: (jnp.vdot(h @ w, h), jnp.int32(h.shape[0])))(w[1], h)

    for function in (marked, of_role):
        assert_alike(listed(function), WEIGHTS, rows_of(2, 3), rows_of(3), rows_of(5, 2, 2))


@pytest.mark.slow
def test_devices_need_not_divide_the_rows_of_each_microbatch(recwarn):
    def loss(w, x):
        x = jax.lax.with_sharding_constraint(x["x"], P("data"))
        return jnp.var(mpmd.mark_stage_end(jnp.tanh(x @ w[0] + w[2, 0])) @ w[1])

    def step(w, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(w, x), xs, schedule="1f1b")

    def microbatches_of(*numbers):  # `row` is not read, and may have the shape of a gradient
        return [{"x": x, "row": np.arange(len(x))} for x in rows_of(*numbers)]

    mesh = sharded(AxisType.Auto)
    pipelined, plain = mpmd.jit(step, mpmd_mesh=mesh), jax.jit(step)
    with jax.set_mesh(mesh.groups[0]):
        expected = [plain(WEIGHTS, microbatches_of(*n)) for n in ((WIDTH, 2), (8, 7), (1,))]
    for numbers, want in zip(((WIDTH, 2), (8, 7), (1,)), expected, strict=True):
        got = pipelined(WEIGHTS, microbatches_of(*numbers))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), got, want)
    (told,) = {str(w.message) for w in recwarn if "the devices of a group divide the rows of some" in str(w.message)}
    assert "for each microbatch in place of once a step" in told
