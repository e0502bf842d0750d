"""Random steps, without a loop, before one and after it: the compiler ends, and each call gives what `jax.jit` gives.

A step is a list of small operations on the arguments and on what came before. Arguments are host arrays, arrays in one
or several groups, uncommitted ones, scalars and keys; results become arguments of the next call.
"""

import contextlib
import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpmd
import scheduler

GROUPS, D, MICROBATCHES = 3, 4, 2
SECONDS = 60  # for one example; one that hangs would never end

# An operation: its name, the kinds of its operands (m: matrix, v: vector, s: scalar, k: key) and of its result.
OPERATIONS = [
    ("product", "mm", "m"), ("apply", "mv", "v"), ("add", "mm", "m"), ("add", "vv", "v"), ("add", "ss", "s"),
    ("scale", "ms", "m"), ("scale", "vs", "v"), ("squash", "m", "m"), ("squash", "v", "v"), ("total", "m", "s"),
    ("total", "v", "s"), ("write", "mv", "m"), ("draw", "k", "m"), ("next", "k", "k"), ("choose", "smm", "m"),
    ("choose_both", "smmm", "m"), ("walk", "vm", "v"), ("repeat", "mms", "m"), ("outer", "vv", "m"),
    ("mark", "v", "v"), ("mark", "m", "m"), ("train", "mmmv", "m"), ("split", "kmm", "m"),
]  # fmt: skip


def _train(a, b, c, v, schedule):
    """A pipelined loop over three weights; the sum of the gradients, with the loss added."""

    def loss(ws, x):
        x = mpmd.mark_stage_end(jnp.tanh(ws[0] @ x))
        x = mpmd.mark_stage_end(jnp.tanh(ws[1] @ x))
        return jnp.sum((ws[2] @ x) ** 2)

    xs = jnp.stack([v, v + 1])
    value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)([a, b, c], x), xs, schedule=schedule)
    return sum(grads) / 8 + value / 16


def _pair(p, xs):
    return lax.cond(p > 0, lambda a, b, c: (jnp.tanh(a @ b), c), lambda a, b, c: (b, a - c), *xs)


def _run(name, xs, schedule, index):
    match name:
        case "product":
            return jnp.tanh(xs[0] @ xs[1])
        case "apply":
            return jnp.tanh(xs[0] @ xs[1])
        case "add":
            return (xs[0] + xs[1]) / 2
        case "scale":
            return xs[0] * jnp.tanh(xs[1])
        case "squash":
            return jnp.tanh(xs[0])
        case "total":
            return jnp.mean(xs[0])
        case "write":
            return lax.dynamic_update_index_in_dim(xs[0], xs[1], index % D, 0)
        case "draw":
            return jax.random.normal(xs[0], (D, D)) / 4
        case "next":
            return jax.random.fold_in(xs[0], index)
        case "choose":
            return lax.cond(xs[0] > 0, lambda a, b: a, lambda a, b: jnp.tanh(a + b), xs[1], xs[2])
        case "choose_both":
            first, second = _pair(xs[0], xs[1:])
            return (first + second) / 2
        case "walk":
            return lax.scan(lambda c, row: (jnp.tanh(c + row), None), xs[0], xs[1])[0]
        case "repeat":
            one, two = lax.fori_loop(0, 2, lambda _, ab: (jnp.tanh(ab[0] + xs[2]), ab[1] / 2), (xs[0], xs[1]))
            return one + two
        case "outer":
            return jnp.outer(xs[0], xs[1])
        case "mark":
            return mpmd.mark_stage_end(xs[0])
        case "split":
            return jnp.where(jax.random.bernoulli(xs[0], 0.5, (D, D)), xs[1], xs[2])
    return _train(*xs, schedule)


@dataclasses.dataclass(frozen=True)
class Random:
    """A random step, and how it is called."""

    kinds: str  # of the arguments
    places: tuple  # of the arguments: None for the host, groups, or groups with False: uncommitted there
    operations: tuple  # (name, positions of the operands)
    results: tuple  # positions; the first ones take the place of arguments
    axis_type: AxisType
    out_shardings: bool
    donate: bool

    def step(self, schedule):
        def fun(args):
            values = list(args)
            for index, (name, operands) in enumerate(self.operations):
                values.append(_run(name, [values[i] for i in operands], schedule, index))
            return [values[i] for i in self.results]

        return fun

    @property
    def num_carried(self):
        """How many results become arguments of the next call."""
        return len(self.kinds)


@st.composite
def steps(draw, loops: bool):
    kinds = "mmmvsk" + "".join(draw(st.lists(st.sampled_from("mmmvs"), max_size=4)))
    groups = st.sets(st.integers(0, GROUPS - 1), min_size=1, max_size=GROUPS).map(lambda g: tuple(sorted(g)))
    place = st.one_of(st.none(), groups, groups.map(lambda g: (*g, False)))
    known = list(kinds)
    operations = []
    allowed = [o for o in OPERATIONS if loops or o[0] != "train"]
    for _ in range(draw(st.integers(1, 12))):
        name, ins, out = draw(st.sampled_from(allowed))
        if name == "train" and any(o == "train" for o, _ in operations):
            continue
        operations.append((name, tuple(draw(st.sampled_from(_of_kind(known, kind))) for kind in ins)))
        known.append(out)
    carried = [draw(st.sampled_from(_of_kind(known, kind))) for kind in kinds]
    more = draw(st.lists(st.integers(0, len(known) - 1), max_size=3))
    return Random(
        kinds,
        tuple(draw(place) for _ in kinds),
        tuple(operations),
        tuple(carried + more),
        draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def _of_kind(known, kind):
    return [i for i, k in enumerate(known) if k == kind]


def _value(kind, i):
    key = jax.random.key(i)
    if kind == "k":
        return key
    return np.asarray(jax.random.normal(key, {"m": (D, D), "v": (D,), "s": ()}[kind]) / 4)


def _arguments(case: Random, mesh):
    found = []
    for i, (kind, place) in enumerate(zip(case.kinds, case.places, strict=True)):
        x = _value(kind, i)
        if place is not None:
            groups = [g for g in place if g is not False]
            sharding = mpmd.MpmdSharding(mesh, groups, P())
            arrays = {g: jax.device_put(x, sharding.group_sharding(g)) for g in groups}
            x = mpmd.MpmdArray._unchecked(arrays, sharding, x.shape, x.dtype, committed=False not in place)
        found.append(x)
    return found


def _jitted(case: Random):
    mesh = mpmd.MpmdMesh(
        jax.make_mesh((GROUPS,), ("stage",), (case.axis_type,), devices=jax.devices()[:GROUPS]), "stage"
    )
    outs = None
    if case.out_shardings:
        outs = [mpmd.MpmdSharding(mesh, j % GROUPS, P()) if j % 2 else None for j in range(len(case.results))]
    step = case.step(scheduler.OneFOneB(GROUPS))
    return mesh, mpmd.jit(step, mpmd_mesh=mesh, out_shardings=outs, donate_argnums=0 if case.donate else ())


@contextlib.contextmanager
def within(seconds):
    """Raises in the middle of whatever takes longer."""

    def late(*_):
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _lower(case: Random):
    mesh, step = _jitted(case)
    with within(SECONDS):
        outline = step.lower(_arguments(case, mesh))._outline
    assert all(groups for _, groups in outline.outputs)


def _check(case: Random):
    mesh, step = _jitted(case)
    plain = jax.jit(case.step(None))
    args = _arguments(case, mesh)
    expected = [_value(kind, i) for i, kind in enumerate(case.kinds)]
    for _ in range(3):
        with within(SECONDS):
            found = step(args)
            expected = plain(expected)
            for a, b in zip(found, expected, strict=True):
                if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                    a, b = jax.random.key_data(mpmd.device_get(a)), jax.random.key_data(b)
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)
        args, expected = found[: case.num_carried], expected[: case.num_carried]


UNTIMED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.slow
@settings(max_examples=30, derandomize=True, **UNTIMED)
@given(steps(loops=False))
def test_any_step_without_a_loop_is_placed(case):
    _lower(case)


@settings(max_examples=20, derandomize=True, **UNTIMED)
@given(steps(loops=True))
def test_any_step_around_a_loop_is_placed(case):
    _lower(case)


@pytest.mark.parametrize("loops", [False, True], ids=["without a loop", "around a loop"])
@pytest.mark.parametrize(
    "num_steps", [pytest.param(5, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.exhaustive)]
)
def test_any_step_computes_what_jit_computes(num_steps, loops):
    settings(max_examples=num_steps, **UNTIMED)(given(steps(loops=loops))(_check))()
