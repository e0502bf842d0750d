"""What `mpmd.jit` chooses where `mark_layer_end` leaves it open: costs of each unit, cuts, memory, and what it says."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs.pipelines import shared_device
from samples import slow_first

import mpmd
import scheduler
from mpmd.arrays.targets import Target
from mpmd.costs.machine import Machine
from mpmd.cutting.candidates import Candidates
from mpmd.cutting.choose import choose
from mpmd.cutting.costs import unit_costs
from scheduler.optimize.units import CutProblem

NUM_LAYERS, WIDTH, ROWS, WORDS = 8, 32, 16, 1024
LAYER_NBYTES = 2 * WIDTH * WIDTH * 4


def block(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def training(kind, words=WORDS, schedule=None, cuts=None):
    """A step of AdamW on blocks (a Python loop, a scan, or one of rematerialised blocks), an embedding and a head."""
    layer = jax.checkpoint(block) if "remat" in kind else block

    def loss(params, tokens):
        x = params["embed"][tokens]
        if "scan" in kind:
            x, _ = jax.lax.scan(lambda x, p: (mpmd.mark_layer_end(layer(p, x)), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = mpmd.mark_layer_end(layer(p, x))
        return -jnp.mean(jax.nn.log_softmax(x @ params["head"])[:, 0])

    optimizer = optax.adamw(1e-3)

    def step(state, batch):
        params, moments = state
        one = lambda tokens: jax.value_and_grad(loss)(params, tokens)  # noqa: E731
        value, grads = mpmd.treduce(one, batch, schedule=schedule or scheduler.OneFOneB(4), cuts=cuts)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    def state():
        layers = {"up": jnp.ones((NUM_LAYERS, WIDTH, WIDTH)) / 32, "down": jnp.ones((NUM_LAYERS, WIDTH, WIDTH)) / 32}
        if "scan" not in kind:
            layers = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(NUM_LAYERS)]
        params = {"embed": jnp.ones((words, WIDTH)), "layers": layers, "head": jnp.ones((WIDTH, words)) / 32}
        return params, optimizer.init(params)

    return step, state, jnp.zeros((8, ROWS), jnp.int32)


def loop_of(kind, words=WORDS):
    step, state, batch = training(kind, words)
    trace = mpmd.jit(step, mpmd_mesh=shared_device(4)).trace(jax.eval_shape(state), batch)._trace
    (eqn,) = [e for e in trace.jaxpr.eqns if e.primitive.name == "treduce"]
    return trace, eqn, Candidates.of(eqn.params["jaxpr"].jaxpr)


MACHINE = Machine(Target("test", "test", "cpu", 1 << 40, 1e15, 1e9, 1e9, 1e12, 1e12), matrix_efficiency=1.0, launch_s=0)


@pytest.mark.parametrize("kind", ["loop", "scan", "remat loop", "remat scan"])
def test_units_cost_what_their_products_do(kind):
    trace, eqn, candidates = loop_of(kind)
    units = unit_costs(trace, eqn, candidates, shared_device(4), MACHINE, {})
    layer, head = 4 * ROWS * WIDTH * WIDTH / 1e9, 2 * ROWS * WIDTH * WORDS / 1e9
    backward = [sum(pair) for pair in zip(units.input_grad, units.weight_grad, strict=True)]
    np.testing.assert_allclose(units.forward, [layer] * NUM_LAYERS + [head], rtol=1e-4)
    again = layer if "remat" in kind else 0.0
    # The second product need not be computed again.
    np.testing.assert_allclose(backward[1:-1], [2 * layer + again] * (NUM_LAYERS - 1), rtol=0.2)
    np.testing.assert_allclose(backward[-1], 2 * head, rtol=1e-6)


@pytest.mark.parametrize("kind", ["loop", "scan", "remat loop", "remat scan"])
def test_units_hold_parameters_gradients_and_optimizer_state(kind):
    trace, eqn, candidates = loop_of(kind)
    units = unit_costs(trace, eqn, candidates, shared_device(4), MACHINE, {})
    table = WIDTH * WORDS * 4
    # A parameter, its gradient and two moments.
    expected = [4 * (LAYER_NBYTES + table)] + [4 * LAYER_NBYTES] * (NUM_LAYERS - 1) + [4 * table]
    np.testing.assert_allclose(units.held, expected, rtol=1e-3)
    carried = ROWS * WIDTH * 4
    if "remat" in kind:
        np.testing.assert_allclose(units.activations[1:-2], [carried] * (NUM_LAYERS - 2))
    else:
        assert min(units.activations[1:-2]) >= 2 * carried
    link = [1e-9 * round(1e9 * (s - MACHINE.latency_s) * MACHINE.bandwidth(True)) for s in units.transfer_s[:-1]]
    np.testing.assert_allclose(link, [carried] * NUM_LAYERS, rtol=1e-3)


def test_a_heavy_head_gets_fewer_layers_whether_they_are_scanned_or_not():
    cuts = {}
    for kind in ("loop", "scan"):
        step, state, batch = training(kind)
        lowered = mpmd.jit(step, mpmd_mesh=shared_device(4)).lower(jax.eval_shape(state), batch)
        cuts[kind] = lowered.cuts
        assert sum(lowered.cuts) == NUM_LAYERS and lowered.cuts[-1] == 0
    assert cuts["loop"] == cuts["scan"]


@pytest.mark.slow
def test_a_chosen_cut_computes_what_plain_jax_computes():
    step, state, batch = training("loop", words=64)
    found = mpmd.jit(step, mpmd_mesh=shared_device(4))(state(), batch)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(same, mpmd.device_get(found), jax.jit(step)(state(), batch))


@pytest.fixture(scope="module")
def two_loops():
    """A forward loop over parameters (or their moving average), then one that trains them towards its results."""

    def model(p, x):
        x = x @ p["embed"]
        for w in p["layers"]:
            x = mpmd.mark_layer_end(x + jnp.tanh(x @ w))
        return x @ p["head"]

    def step(state, xs, schedule, cuts, copied):
        p, slow = state
        y = mpmd.treduce(
            lambda x: model(slow if copied else p, x), xs, schedule=schedule, operation=mpmd.Concat, cuts=cuts
        )
        grads = mpmd.treduce(
            lambda b: jax.grad(lambda p: ((model(p, b[0]) - b[1] + 1) ** 2).mean())(p), (xs, y), schedule=schedule
        )
        p = jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)
        return (p, jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, slow, p))

    def normal(*shape):
        return jax.random.normal(jax.random.key(len(shape)), shape) / 8

    def lowered(embed, schedule, cuts=None, copied=False):
        p = {"embed": normal(embed, WIDTH), "layers": [normal(WIDTH, WIDTH)] * 10, "head": normal(WIDTH, 8)}
        fun = lambda state, xs: step(state, xs, schedule, cuts, copied)  # noqa: E731
        state = p, jax.tree.map(lambda x: x + 0.5, p)
        xs = normal(8, 4, embed)
        return mpmd.jit(fun, mpmd_mesh=shared_device(4)).lower(state, xs), fun, (state, xs)

    return lowered


@pytest.mark.parametrize(
    ("copied", "schedule"),
    slow_first(
        *((False, "zb-v"), (True, "interleaved-1f1b")),
        *((False, "1f1b"), (True, "1f1b"), (False, "interleaved-1f1b"), (True, "zb-v")),
        num_slow=2,
    ),
)
def test_loops_over_the_same_layers_have_one_cut_and_no_parameter_crosses(two_loops, schedule, copied):
    for embed in (8, 256):
        lowered, *_ = two_loops(embed, schedule, copied=copied)
        one, other = lowered.cuts
        assert one == other and sum(one) == 10
        moved = [i.var.aval for i in lowered._outline.items if hasattr(i, "target")]
        assert all(v.size <= 8 * 4 * 8 for v in moved)  # the targets at most


@pytest.mark.slow
def test_one_cut_for_two_loops_is_no_slower_than_the_even_one_and_the_users_is_taken(two_loops):
    lowered, fun, arguments = two_loops(8, "1f1b", cuts=(1, 4, 4, 1))
    assert lowered.cuts == ((1, 4, 4, 1),) * 2
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    found = mpmd.jit(fun, mpmd_mesh=shared_device(4))(*arguments)
    jax.tree.map(same, mpmd.device_get(found), jax.jit(fun)(*arguments))
    for embed in (8, 256):
        lowered, *_ = two_loops(embed, "interleaved-1f1b")
        choices = [loop.partition.info.choice for loop in lowered._outline.loops]
        assert sum(c.makespan for c in choices) <= 1.006 * sum(c.even_makespan for c in choices)
        assert all(c.layers == choices[0].layers and c.makespan >= c.bound for c in choices)


def test_stages_fit_the_memory_of_the_devices_if_any_cut_does(monkeypatch):
    trace, eqn, candidates = loop_of("loop", words=256)
    schedule, mesh = scheduler.OneFOneB(4), shared_device(4)
    free = choose(trace, eqn, candidates, schedule, mesh, {})
    units = unit_costs(trace, eqn, candidates, mesh, MACHINE, {})
    problem = CutProblem(units, schedule, 8)
    assert free.layers[-1] == 0 and not free.excess  # the head computes most
    ends = itertools.combinations(range(1, NUM_LAYERS + 1), 3)
    cuts = [(a, b - a, c - b, NUM_LAYERS - c) for a, b, c in ends]
    need = min(max(problem.memory(cut)) for cut in cuts)
    limit = need + max(units.activations)
    assert need < max(problem.memory(free.layers))
    monkeypatch.setattr("mpmd.cutting.choose.memory_limit", lambda mesh, machine: limit)
    small = choose(trace, eqn, candidates, schedule, mesh, {})
    assert not small.excess and max(problem.memory(small.layers)) <= need and small.makespan >= free.makespan
    monkeypatch.setattr("mpmd.cutting.choose.memory_limit", lambda mesh, machine: limit / 4)
    assert choose(trace, eqn, candidates, schedule, mesh, {}).excess > 0


@pytest.mark.slow
def test_explain_says_what_was_chosen_and_what_others_cost():
    step, state, batch = training("loop")
    mesh = shared_device(4)
    compiled = mpmd.jit(step, mpmd_mesh=mesh).lower(jax.eval_shape(state), batch).compile()
    (line,) = [line for line in compiled.explain().splitlines() if "layers of each stage" in line]
    pattern = (
        r"  layers of each stage: \(\d, \d, \d, 0\), chosen: \S+ .s by the operations and bytes of each layer;"
        r" even \(2, 2, 2, 2\) \+\S+%, with one layer moved \(\d, \d, \d, \d\) \+\S+%; no cut is faster"
    )
    assert re.fullmatch(pattern, line), line
    step, state, batch = training("loop", cuts=(2, 2, 2, 2))
    compiled = mpmd.jit(step, mpmd_mesh=mesh).lower(jax.eval_shape(state), batch).compile()
    assert "  layers of each stage: (2, 2, 2, 2), as given by cuts=" in compiled.explain().splitlines()
