"""Steps whose groups run tasks out of turn: the bits of the fixed order and of plain jax.jit, whatever is late."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from samples import slow_first

import mpmd
import reshard.checkpoint
import scheduler
from mpmd.errors import StageError
from mpmd.run import adaptive_executor
from scheduler import DualPipeV, GPipe, InterleavedOneFOneB, OneFOneB, ZeroBubbleH1, ZeroBubbleV

WIDTH = 8
ALL = "FBIWR"


def groups(num):
    return mpmd.MpmdMesh.from_groups(
        [jax.make_mesh((1,), ("data",), devices=[d], axis_types=(AxisType.Auto,)) for d in jax.devices()[:num]]
    )


def params(num_stages):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(num_stages)]


def batch(num_microbatches, seed=2):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(num_microbatches, 4, WIDTH)).astype(np.float32) for _ in range(2))


def step_of(schedule, num_stages, dot=jnp.vdot):
    """A training step. Losses are dot products, which XLA sums in one order wherever they stand."""

    def loss(ws, x, y):
        for k, w in enumerate(ws):
            x = jnp.tanh(x @ w)
            x = mpmd.mark_stage_end(x) if k < num_stages - 1 else x
        return dot(x, y)

    def step(ws, xs):
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(ws, *x), xs, schedule)
        return [w - 0.01 * g for w, g in zip(ws, grads, strict=True)], value

    return step


def run(step, num_stages, xs, steps=3):
    state, values = params(num_stages), []
    for _ in range(steps):
        state, value = step(state, xs)
        values.append(np.asarray(value))
    return [np.asarray(x) for x in state], values


@pytest.fixture
def late(monkeypatch):
    """Values from other groups seem to be late at random, so that groups have to choose; the orders that were done."""
    rng, orders = random.Random(0), []
    go_along = adaptive_executor.AdaptiveExecutor._go_along

    def with_delays(self, progress, order, *others):
        choose = progress.next

        def choose_later(group, has_arrived, num_in_flight):
            withheld = []

            def seems_to_have_arrived(number):
                if has_arrived(number) and rng.random() < 0.5:
                    withheld.append(number)
                return number not in withheld and has_arrived(number)

            number = choose(group, seems_to_have_arrived, num_in_flight)
            return choose_later(group, has_arrived, num_in_flight) if number is None and withheld else number

        progress.next = choose_later
        orders.append(order)
        go_along(self, progress, order, *others)

    monkeypatch.setattr(adaptive_executor.AdaptiveExecutor, "_go_along", with_delays)
    return orders


@pytest.mark.parametrize(
    "schedule",
    [
        ZeroBubbleV(4),
        *slow_first(InterleavedOneFOneB(8, 4), DualPipeV(4), OneFOneB(4), GPipe(4), ZeroBubbleH1(4), num_slow=2),
    ],
    ids=str,
)
def test_tasks_out_of_turn_give_the_bits_of_the_plan_and_of_plain_jit(schedule, late):
    num, xs = schedule.num_stages, batch(8)
    plain = run(jax.jit(step_of(schedule, num)), num, xs)
    for its in (schedule, scheduler.Adaptive(schedule, ALL)):
        step = mpmd.jit(step_of(its, num), mpmd_mesh=groups(4), donate_argnums=0)
        found = run(step, num, xs)
        jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert len(late) == 3
    assert any(order != sorted(order) for order in late) and all(sorted(o) == list(range(len(o))) for o in late)


@pytest.mark.parametrize("kind", slow_first(AxisType.Auto, AxisType.Explicit), ids=str)
def test_groups_of_several_devices_with_sums_once_a_step(kind, late):
    mesh = mpmd.MpmdMesh(
        jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4], axis_types=(kind,) * 2), "stage"
    )
    found = []
    for its in (ZeroBubbleH1(2), scheduler.Adaptive(ZeroBubbleH1(2), ALL)):
        rows = mpmd.MpmdSharding(mesh, {0, 1}, P(None, "data"))
        step = mpmd.jit(step_of(its, 2, lambda x, y: jnp.sum(x * y)), mpmd_mesh=mesh, in_shardings=(None, rows))
        found.append(run(step, 2, batch(6)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert any(order != sorted(order) for order in late)


def test_an_array_that_is_split_over_the_groups(late):
    def step_with(schedule):
        def step(w, xs):
            def loss(w, x, y):
                x = mpmd.mark_stage_end(jnp.tanh(x @ w[0]))
                return jnp.vdot(x @ w[1], y)

            value, grad = mpmd.treduce(lambda x: jax.value_and_grad(loss)(w, *x), xs, schedule)
            return w - 0.01 * grad, value

        return step

    found = []
    for its in (GPipe(2), scheduler.Adaptive(GPipe(2), ALL)):
        mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
        split = mpmd.MpmdSharding(mesh, {0, 1}, P("stage"))
        step = mpmd.jit(step_with(its), mpmd_mesh=mesh, in_shardings=(split, None), donate_argnums=0)
        w, values = np.stack(params(2)), []
        for _ in range(2):
            w, value = step(w, batch(6))
            values.append(float(value))
        found.append((np.asarray(w), values))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert any(order != sorted(order) for order in late)


@pytest.mark.slow
def test_a_list_of_microbatches_runs_in_the_planned_order():
    xs = [tuple(a[k, :rows] for a in batch(4)) for k, rows in enumerate((2, 4, 2, 3))]
    found = []
    for its in (GPipe(2), scheduler.Adaptive(GPipe(2), ALL)):
        found.append(run(mpmd.jit(step_of(its, 2), mpmd_mesh=groups(2)), 2, xs))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_training_goes_on_from_a_checkpoint(late, tmp_path):
    xs, steps = batch(6), {}
    for name, its in (("fixed", GPipe(2)), ("adaptive", scheduler.Adaptive(GPipe(2), ALL))):
        steps[name] = mpmd.jit(step_of(its, 2), mpmd_mesh=groups(2))
    state = params(2)
    for _ in range(2):
        state, _ = steps["adaptive"](state, xs)
    reshard.checkpoint.save(tmp_path / "one", state)
    like = [jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * 2
    shardings = [x.mpmd_sharding for x in state]
    state, _ = steps["adaptive"](reshard.checkpoint.restore(tmp_path / "one", like, shardings), xs)
    expected, _ = run(steps["fixed"], 2, xs)
    jax.tree.map(np.testing.assert_array_equal, [np.asarray(x) for x in state], expected)


def test_a_name_gets_its_stages_from_the_marks():
    step = mpmd.jit(step_of(mpmd.Adaptive("gpipe"), 4), mpmd_mesh=groups(4))
    lowered = step.lower(params(4), batch(16))
    assert "Adaptive(GPipe(num_stages=4)), 16 microbatches" in repr(lowered)
    told = lowered.compile().explain()
    assert "adaptive: a group whose next task is not ready may run a later one of its plan (kinds B, F, I, W)" in told
    with pytest.raises(StageError, match=r"schedule is 'interleaved-1f1b', and interleaved-1f1b deals out its stages"):
        mpmd.jit(step_of(mpmd.Adaptive("interleaved-1f1b"), 3), mpmd_mesh=groups(4)).lower(params(3), batch(8))


def test_a_plan_that_gains_nothing_is_kept_and_explained():
    told = mpmd.jit(step_of(mpmd.Adaptive("1f1b"), 4), mpmd_mesh=groups(4)).lower(params(4), batch(16)).compile()
    assert (
        "adaptive: each group keeps its planned order, because running ahead does not make such a pipeline faster"
        " within the memory of its plan"
    ) in told.explain()
    same = mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])] * 2)
    step = mpmd.jit(step_of(mpmd.Adaptive(GPipe(2)), 2), mpmd_mesh=same)
    assert "because groups share devices" in step.lower(params(2), batch(8)).compile().explain()


def test_the_timeline_and_the_flight_record_tell_the_order_in_which_tasks_ran(late):
    step = mpmd.jit(step_of(scheduler.Adaptive(GPipe(2), ALL), 2), mpmd_mesh=groups(2))
    compiled = step.lower(params(2), batch(8)).compile()
    compiled.timing = True
    planned, tasks = [list(own) for own in GPipe(2).orders(8)], None
    for _ in range(100):  # whether a group has a choice is a matter of time: in some calls none has
        compiled(params(2), batch(8))
        done = [compiled._executor.bindings.instructions[k] for k in late[-1]]
        tasks = [[t for b in done if b.group == group for t in b.tasks] for group in range(2)]
        assert [list(order) for order in compiled.last_timeline().orders] == tasks
        assert compiled._executor.recorded()["steps"][-1]["numbers"] == late[-1]
        if tasks != planned:
            break
    assert tasks != planned


def test_a_task_that_fails_is_told(late):
    def loss(w, x):
        def fail(x):
            raise RuntimeError("a bad microbatch")

        x = mpmd.mark_stage_end(jnp.tanh(x @ w[0]))
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), x.dtype), jnp.vdot(x, x @ w[1]))

    def step(w, xs):
        return mpmd.treduce(lambda x: loss(w, x), xs, scheduler.Adaptive(GPipe(2), ALL))

    with pytest.raises(Exception, match="a bad microbatch"):
        jax.block_until_ready(mpmd.jit(step, mpmd_mesh=groups(2))(params(2), batch(4)[0]).to_mpmd_local_array)


def test_a_late_value_does_not_stop_its_group():
    """The last group gets its first microbatches late, and meanwhile the others do not run past their memory."""

    def loss(ws, x):
        def wait(x):
            time.sleep(0.01)
            return x

        for k, w in enumerate(ws):
            x = jnp.tanh(x @ w)
            if k == 0:
                x = x.at[0, 0].set(jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x[0, 0]))
            x = mpmd.mark_stage_end(x) if k < 1 else x
        return jnp.vdot(x, x)

    def step(ws, xs):
        return mpmd.treduce(lambda x: loss(ws, x), xs, scheduler.Adaptive(GPipe(2), ALL))

    found = mpmd.jit(step, mpmd_mesh=groups(2))(params(2), batch(4)[0])
    np.testing.assert_array_equal(np.asarray(found), np.asarray(jax.jit(step)(params(2), batch(4)[0])))
