"""Audits: no false alarm, the same bits, every kind of flipped bit found, and what they add to a plan."""

import concurrent.futures
import contextlib
import itertools
import re
from types import SimpleNamespace

import flips
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpmd
import scheduler
from mpmd.job import audits
from mpmd.run.audits import audited_options
from scheduler.programs.audits import MOST_DELAY, AuditPlanner
from scheduler.programs.fewer import with_fewer

NUM_STAGES = 4
NAMED = r"group 1 \(rank 0: \S+\) gets other bits than group \d( and group \d)? for"


@pytest.fixture(autouse=True)
def no_error_is_left():
    """An audit of a call may be compared when the test has found the error of an earlier one."""
    yield
    while True:
        try:
            return audits.settle()
        except mpmd.CorruptionError:
            pass


def loss_of(params, x):
    for w in params[:-1]:
        x = mpmd.mark_stage_end(jnp.tanh(x @ w))
    return jnp.mean((x @ params[-1]) ** 2)


def step_with(schedule):
    def step(params, xs):
        one = lambda x: jax.value_and_grad(loss_of)(params, x)  # noqa: E731
        loss, grads = mpmd.treduce(one, xs, schedule=schedule, operation=mpmd.Mean)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def params_of(num_stages=NUM_STAGES):
    random = np.random.default_rng(0)
    return [random.normal(size=(8, 8)).astype(np.float32) / 3 for _ in range(num_stages)]


def batch(i):
    return np.random.default_rng(i).normal(size=(6, 4, 8)).astype(np.float32)


def several(i):
    """Microbatches of several shapes."""
    random = np.random.default_rng(i)
    return [random.normal(size=(rows, 8)).astype(np.float32) for rows in random.choice((2, 4), size=2 + i % 3 * 2)]


def mesh_of(num_groups=NUM_STAGES, data=1, kind=AxisType.Auto):
    devices = jax.make_mesh((num_groups, data), ("stage", "data"), axis_types=(kind, kind))
    return mpmd.MpmdMesh(devices, "stage")


@pytest.fixture
def put_down(monkeypatch):
    """The audits that are made."""
    found, compare = [], audits.put_down
    monkeypatch.setattr(audits, "put_down", lambda audit: found.append(audit) or compare(audit))
    return found


def trained(step, steps, data=batch):
    params, losses = params_of(), []
    for i in range(steps):
        params, loss = step(params, data(i))
        losses.append(loss)
    audits.settle()
    return [np.asarray(mpmd.device_get(x)).tobytes() for x in (*params, *losses)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, num_devices, kind, data",
    [
        (scheduler.OneFOneB(4), 1, AxisType.Auto, batch),
        (scheduler.OneFOneB(4), 1, AxisType.Auto, several),
        (mpmd.Adaptive(scheduler.OneFOneB(4)), 1, AxisType.Auto, batch),
        (scheduler.InterleavedOneFOneB(4, 2), 2, AxisType.Auto, batch),
        (scheduler.ZeroBubbleV(2), 2, AxisType.Explicit, batch),
        (scheduler.ZeroBubbleV(2), 2, AxisType.Explicit, several),
    ],
    ids=["1f1b", "1f1b-list", "adaptive", "interleaved", "zb-v", "zb-v-list"],
)
def test_an_audited_step_computes_the_same_bits_and_raises_no_alarm(schedule, num_devices, kind, data, put_down):
    mesh, results = mesh_of(len({*schedule.placement}), num_devices, kind), []
    xs = mpmd.MpmdSharding(mesh, 0, P(*[None] * (data is batch), "data") if num_devices > 1 else P())
    for every in (0, 1):
        step = mpmd.jit(
            step_with(schedule), mpmd_mesh=mesh, donate_argnums=0, audit_every=every, in_shardings=(None, xs)
        )
        results.append(trained(step, 8, data))
    assert results[0] == results[1]
    assert len(put_down) >= 7


@pytest.mark.slow
def test_what_lies_in_the_memory_of_the_host_is_audited_too():
    """Where a program reads it: momenta that are fetched and put back in each step."""

    def step(state, xs):
        params, momenta = state
        on_device, on_host = (
            lambda x, to=to: jax.device_put(x, to) for to in (jax.memory.Space.Device, jax.memory.Space.Host)
        )
        grads = mpmd.treduce(lambda x: jax.grad(loss_of)(params, x), xs, schedule="1f1b", operation=mpmd.Mean)
        momenta = jax.tree.map(lambda m, g: on_host(on_device(m) * 0.9 + g), momenta, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * on_device(m), params, momenta), momenta

    results = []
    for every in (0, 1):
        audited = mpmd.jit(step, mpmd_mesh=mesh_of(), audit_every=every)
        state = params_of(), [np.zeros_like(w) for w in params_of()]
        for i in range(10):
            state = audited(state, batch(i)[:1])
        audits.settle()
        results.append([np.asarray(mpmd.device_get(x)).tobytes() for x in jax.tree.leaves(state)])
    assert results[0] == results[1]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state[1])} == {"pinned_host"}


@pytest.mark.slow
def test_threads_may_call_an_audited_step():
    params, step = params_of(2), step_with(scheduler.OneFOneB(2))
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    audited = mpmd.jit(step, mpmd_mesh=mesh, audit_every=2)
    expected = [float(audited(params, batch(i))[1]) for i in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            assert [*threads.map(lambda i: float(audited(params, batch(i))[1]), range(4))] == expected


@pytest.mark.exhaustive
def test_ten_thousand_audits_without_a_fault_raise_no_alarm():
    step = mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=mesh_of(), donate_argnums=0, audit_every=1)
    params = params_of()
    for i in range(10_001):
        params, _ = step(params, batch(i))
    audits.settle()


def test_a_step_that_is_audited_seldom_is_the_plain_one_between():
    step = mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=mesh_of(), donate_argnums=0, audit_every=5)
    compiled = step.lower(params_of(), batch(0)).compile()
    assert re.search(r"audits: one call in 5 has one of \d\d programs run again by other groups", compiled.explain())
    params, lengths = params_of(), []
    for i in range(7):
        params, _ = step(params, batch(i))
        lengths.append(len(compiled._executor.flight.times))
    assert len({*lengths}) == 1  # after audited calls too


@pytest.mark.parametrize(
    "words, data",
    [
        ("_F$", several),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("_F$", batch), *itertools.product(("_B$", "after_loop"), (batch, several))]
        ),
    ],
)
def test_a_device_that_computes_wrong_for_ever_is_named(words, data):
    names = set()
    with flips.flipping(jax.devices()[1], lambda name: names.add(name) or bool(re.search(words, name))):
        step = mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=mesh_of(), audit_every=1)
        params = params_of()
        with pytest.raises(mpmd.CorruptionError, match=NAMED):
            for i in range(200):
                params, _ = step(params, data(i))
            audits.settle()
    assert any(re.search(words, name) for name in names), names


@pytest.mark.slow
@pytest.mark.parametrize("data", [batch, lambda i: several(3 * i + 2)], ids=["array", "list"])
def test_a_bit_that_is_flipped_once_is_found_at_the_rate_of_the_sample(data):
    """One program of a device in each call, always another one: one in as many as there are programs is found."""
    count, wrong = [0], [-1]

    def is_now(name):
        count[0] += 1
        return count[0] == wrong[0]

    with flips.flipping(jax.devices()[1], is_now):
        step = mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=mesh_of(), audit_every=1)
        step(params_of(), data(0))
        found = 0
        for i in range(100):
            count[0], wrong[0] = 0, 1 + i % 12
            try:
                step(params_of(), data(i))
                audits.settle()
            except mpmd.CorruptionError as error:
                assert re.search(NAMED, str(error))
                found += 1
    assert 1 <= found <= 8, found


@pytest.mark.slow
def test_a_bit_that_changes_in_memory_is_found():
    mesh, params, now = mesh_of(), None, itertools.count()

    def is_now(name):
        if params is not None and next(now) == 3:
            for x in jax.live_arrays():  # what has begun reads the right bits
                with contextlib.suppress(RuntimeError):  # it is donated
                    x.block_until_ready()
            flips.flip_in_memory(params[2]._arrays[2])
        return False

    with flips.flipping(jax.devices()[2], is_now), pytest.raises(mpmd.CorruptionError, match=r"changed in its memory"):
        step = mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=mesh, audit_every=1)
        params, _ = step(params_of(), batch(0))
        for i in range(200):
            now = itertools.count()
            params, _ = step(params, batch(i))
            audits.settle()


@pytest.mark.parametrize("data, length", [(batch, "next"), (several, "next"), (batch, "last")])
def test_a_bit_that_changes_between_calls_is_found(data, length):
    """By the next call, also one that is not audited, and by what settles; a result that is gone is not looked at."""
    step = mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=mesh_of(), donate_argnums=0, audit_every=3)
    params = params_of()
    for _ in range(6):
        params, _ = step(params, data(0))
    audits.settle()
    changed = jax.block_until_ready(params[2])._arrays[2]
    flips.flip_in_memory(changed)
    if length == "next":
        step(params, data(0))
    text = r"group 2 \(rank 0: \S+\): a result of call 6 of step has changed in memory"
    with pytest.raises(mpmd.CorruptionError, match=text):
        audits.settle()
    assert changed.is_deleted() == (length == "next")


@pytest.mark.slow
def test_two_groups_cannot_say_which_is_right():
    with flips.flipping(jax.devices()[0], lambda name: True):
        step = mpmd.jit(step_with(scheduler.OneFOneB(2)), mpmd_mesh=mesh_of(2), audit_every=1)
        text = r"groups \d and \d \(rank 0: \S+, rank 0: \S+\) get different bits .*no third one says which is right"
        with pytest.raises(mpmd.CorruptionError, match=text):
            for i in range(20):
                step(params_of(2), batch(i))
            audits.settle()


@pytest.mark.parametrize(
    "schedule, num_microbatches",
    [
        (scheduler.OneFOneB(4), 16),
        (scheduler.InterleavedOneFOneB(8, 4), 16),
        (scheduler.ZeroBubbleV(4), 16),
        pytest.param(scheduler.OneFOneB(8), 32, marks=pytest.mark.slow),
        pytest.param(scheduler.InterleavedOneFOneB(16, 8), 32, marks=pytest.mark.slow),
        pytest.param(scheduler.ZeroBubbleV(8), 32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_audits_fit_into_bubbles(schedule, num_microbatches):
    """Of nine tasks in ten; only these are chosen. The whole plans are proved here, also without later microbatches."""
    program = scheduler.lower(scheduler.TaskGraph.chain(schedule.num_stages), schedule, num_microbatches)
    fewer = {0: num_microbatches - 5}
    planner, planner_of_fewer = AuditPlanner(program), AuditPlanner(program, fewer)
    assert planner_of_fewer.makespan < planner.makespan
    found = []
    for g, k in [(g, k) for g, own in enumerate(planner.work) for k in range(len(own))][::7]:
        run = planner.work[g][k].instruction
        found.append(planner.plan(g, k, run.reads, run.writes))
        scheduler.check(found[-1].program)
        if planner_of_fewer.work[g][k].stays:
            scheduler.check(with_fewer(planner_of_fewer.plan(g, k, run.reads, run.writes).program, fewer))
    free = [plan for plan in found if plan.delay <= MOST_DELAY * planner.makespan]
    assert len(free) >= 0.9 * len(found)
    assert sum(len(plan.auditors) == 2 for plan in free) >= 0.9 * len(free)


@pytest.mark.slow
@pytest.mark.parametrize("data", [batch, several])
def test_a_group_is_audited_by_groups_of_its_shape(data):
    devices = jax.devices()
    groups = [devices[:2], devices[2:3], devices[3:4], devices[4:5]]
    mesh = mpmd.MpmdMesh.from_groups([jax.make_mesh((len(g),), ("data",), devices=g) for g in groups])
    results = []
    for every in (0, 1):
        step = mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=mesh, donate_argnums=0, audit_every=every)
        results.append(trained(step, 5, data))
    assert results[0] == results[1]
    text = step.lower(params_of(), data(0)).compile().explain()
    assert "those of group 0 never, for no other group has its shape" in text


def test_on_gpus_all_groups_are_to_have_the_same_bits_unless_the_user_says_otherwise(monkeypatch):
    """What that takes there is tried on a GPU: tests/gpu."""
    mesh, flag = mesh_of(), "xla_gpu_deterministic_ops"
    assert audited_options({"a": 1}, mesh) == {"a": 1}
    gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    monkeypatch.setattr(mpmd.MpmdMesh, "lowering_mesh", lambda _: gpu)
    assert audited_options(None, mesh) == {flag: True}
    assert audited_options({flag: False, 2: {"b": 1}}, mesh) == {flag: False, 2: {"b": 1}}


def test_wrong_uses_say_what_to_do():
    mesh = mesh_of()
    with pytest.raises(ValueError, match="audit_every is -1; expected a number of calls"):
        mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=mesh, audit_every=-1)
    one = mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])] * 4)
    with pytest.raises(ValueError, match=r"no two groups of .* have the same shape and devices of their own"):
        mpmd.jit(step_with(scheduler.OneFOneB(4)), mpmd_mesh=one, audit_every=10)
