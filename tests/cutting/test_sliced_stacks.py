"""Stacked arrays whose rows a Python loop reads: each group holds the rows of its stage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from programs.parts import normal
from samples import slow_first

import mpmd
import scheduler

LAYERS, WIDTH = 7, 6
STAGES = ((0, 1), (2,), (3, 4))  # layers 5 and 6 are read by nobody


def loss(params, x):
    shifts, down = jnp.unstack(params["shift"]), params["down"].astype(jnp.bfloat16).astype(jnp.float32)
    for stage, layers in enumerate(STAGES):
        for i in layers:
            x = x + jnp.tanh(x @ params["up"][i] + shifts[i]) @ down[i]
        x = x + params["shared"][0]  # read by all stages
        x = mpmd.mark_stage_end(x) if stage < len(STAGES) - 1 else x
    return (x**2).mean()


def make_step(optimizer, schedule):
    def step(state, xs):
        params, moments = state
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=schedule, operation=mpmd.Mean
        )
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


@pytest.mark.parametrize("axis_type", slow_first(AxisType.Auto, AxisType.Explicit))
def test_rows_that_a_loop_slices_are_in_the_group_that_reads_them(axis_type):
    mesh = mpmd.MpmdMesh(jax.make_mesh((3,), ("stage",), (axis_type,), devices=jax.devices()[:3]), "stage")
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": normal(keys[0], LAYERS, WIDTH, WIDTH) * 0.3,
        "down": normal(keys[1], LAYERS, WIDTH, WIDTH) * 0.3,
        "shift": jnp.zeros((LAYERS, WIDTH)),
        "shared": jnp.zeros((2, WIDTH)),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    step = make_step(optimizer, scheduler.ZeroBubbleH1(3))
    plain, pipelined = jax.jit(step), mpmd.jit(step, mpmd_mesh=mesh)
    expected = state = (params, optimizer.init(params))
    for seed in range(2):
        xs = np.random.default_rng(seed).normal(size=(4, 2, WIDTH)).astype(np.float32)
        expected, expected_loss = plain(expected, xs)
        state, value = pipelined(state, xs)
    np.testing.assert_allclose(float(value), float(expected_loss), rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        mpmd.device_get(state),
        jax.device_get(expected),
    )
    moments = state[1][1][0]
    for tree in (state[0], moments.mu, moments.nu):
        for name in ("up", "down", "shift"):
            assert tree[name].mpmd_sharding.split == {0: ((0, 2),), 1: ((2, 3),), 2: ((3, LAYERS),)}, name
        assert not tree["shared"].mpmd_sharding.split


def derived(params):
    """Weights of all layers, each made of whole stacks."""
    scaled = params["up"] * params["scale"]
    shifted = (2 * params["up"] + 1).reshape(4, WIDTH * WIDTH).reshape(4, WIDTH, WIDTH)
    merged = params["down"] + params["scale"] * jnp.einsum("lir,lrj->lij", params["a"], params["b"])
    return scaled, shifted, jnp.swapaxes(merged, 1, 2)


def generated(params):
    up = (params["z"] @ params["make"]).reshape(4, WIDTH, WIDTH)
    return up, up, params["down"]


def generated_one_by_one(params):
    up = [(z @ params["make"]).reshape(WIDTH, WIDTH) for z in params["z"]]
    return up, up, params["down"]


def generated_of_unstacked(params):
    """As newer releases of JAX iterate over an array."""
    up = [(z @ params["make"]).reshape(WIDTH, WIDTH) for z in jnp.unstack(params["z"])]
    return up, up, params["down"]


def reordered(params):
    """Weights whose layers stand in another order: whole stacks are in each group, and gradients in parts."""
    down = jnp.concatenate([2 * params["down"][:1], params["down"][1:]])
    up = params["up"][::-1]
    return up, up + jnp.roll(params["up"], 1, 0), down[jnp.array([2, 0, 3, 1])]


# A row of generated weights goes to each stage and its gradient back; so may 3 numbers that make it, and a scalar.
ROWS_AND_BACK = 6 * 4 * (WIDTH * WIDTH + 4)
# Two new stacks go to the three other groups, and 30 rows of gradients come; but not in each microbatch.
STACKS_AND_ROWS = (2 * 3 * 4 + 30) * 4 * WIDTH * WIDTH + 64


def sends(compiled):
    """Bytes that cross once a step, and in each microbatch of four."""
    sent = [i.value for instructions in compiled.program.groups for i in instructions if isinstance(i, scheduler.Send)]
    nbytes = compiled.program.nbytes
    once = sum(nbytes[v.name] for v in sent if v.microbatch is None)
    return once, sum(nbytes[v.name] for v in sent if v.microbatch is not None) // 4


@pytest.mark.parametrize(
    ("make", "axis_type", "num_devices", "schedule", "most"),
    [
        pytest.param(derived, AxisType.Auto, 2, scheduler.OneFOneB(4), 128, marks=pytest.mark.exhaustive),
        pytest.param(derived, AxisType.Explicit, 1, scheduler.ZeroBubbleH1(4), 128, marks=pytest.mark.slow),
        *slow_first(
            (generated, AxisType.Auto, 2, scheduler.ZeroBubbleH1(4), ROWS_AND_BACK),
            (generated, AxisType.Explicit, 1, scheduler.OneFOneB(4), ROWS_AND_BACK),
        ),
        pytest.param(
            generated_one_by_one, AxisType.Explicit, 2, scheduler.OneFOneB(4), ROWS_AND_BACK, marks=pytest.mark.slow
        ),
        (generated_of_unstacked, AxisType.Auto, 1, scheduler.ZeroBubbleH1(4), ROWS_AND_BACK),
        *slow_first(
            (reordered, AxisType.Explicit, 2, scheduler.OneFOneB(4), STACKS_AND_ROWS),
            (reordered, AxisType.Auto, 2, scheduler.OneFOneB(4), STACKS_AND_ROWS),
            (reordered, AxisType.Explicit, 1, scheduler.ZeroBubbleH1(4), STACKS_AND_ROWS),
        ),
    ],
)
def test_rows_of_what_is_made_of_whole_stacks_are_made_where_they_are_read(
    make, axis_type, num_devices, schedule, most
):
    devices = jax.devices()[: 4 * num_devices]
    mesh = jax.make_mesh((4, num_devices), ("stage", "data"), (axis_type,) * 2, devices=devices)
    mesh = mpmd.MpmdMesh(mesh, "stage")
    shapes = {
        "up": (4, WIDTH, WIDTH), "down": (4, WIDTH, WIDTH), "a": (4, WIDTH, 2), "b": (4, 2, WIDTH),
        "z": (4, 3), "make": (3, WIDTH * WIDTH),
    }  # fmt: skip
    key = jax.random.key(0)
    params = {n: normal(jax.random.fold_in(key, i), *s) * 0.3 for i, (n, s) in enumerate(shapes.items())}
    params["scale"] = jnp.float32(0.7)

    def model(params, x):
        up, more, down = make(params)
        for i in range(4):
            x = jnp.tanh(x @ up[i] + x @ more[i]) @ down[i]
            x = mpmd.mark_stage_end(x) if i < 3 else x
        return (x**2).mean()

    def step(params, xs):
        grads = mpmd.treduce(lambda x: jax.grad(model)(params, x), xs, schedule=schedule)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    plain, pipelined = jax.jit(step), mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)
    xs = normal(key, 4, 2, WIDTH)
    expected, found = params, jax.tree.map(jnp.copy, params)
    once, each = sends(pipelined.lower(found, xs).compile())
    activations = 6 * 2 * WIDTH * 4
    assert once <= most and activations <= each <= activations + 64  # and scalars
    for _ in range(2):
        expected, found = plain(expected, xs), pipelined(found, xs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), mpmd.device_get(found), expected)


@pytest.mark.parametrize("schedule", [scheduler.OneFOneB(3), scheduler.ZeroBubbleV(2)], ids=str)
def test_a_momentum_is_with_its_parameter_whose_gradient_is_rows_that_the_next_stage_gives(schedule):
    """They are put among zeros, and the momentum is brought up to date, where the parameter is: only rows cross."""

    def loss(ws, x):
        for w in ws[:-1]:
            x = mpmd.mark_stage_end(x + w[:1])
        return jnp.mean((x + ws[-1][:1]) ** 2)

    def make_step(reduce):
        def step(state, xs):
            value, grads = reduce(lambda x: jax.value_and_grad(loss)(state["w"], x), xs)
            momentum = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
            return {"m": momentum, "w": [w - 0.1 * m for w, m in zip(state["w"], momentum, strict=True)]}, value

        return step

    mesh = mpmd.MpmdMesh(jax.make_mesh((schedule.num_groups,), ("stage",)), "stage")
    ws = [normal(jax.random.key(i), 32, 64) for i in range(schedule.num_stages)]
    state, xs = {"m": [jnp.ones_like(w) for w in ws], "w": ws}, normal(jax.random.key(9), 4, 1, 64)
    step = mpmd.jit(make_step(functools.partial(mpmd.treduce, schedule=schedule)), mpmd_mesh=mesh)
    where = step.lower(state, xs).compile().input_shardings[0][0]
    assert [x.groups for x in where["m"]] == [x.groups for x in where["w"]]
    plain = make_step(lambda fun, xs: jax.tree.map(lambda x: x.sum(0), jax.lax.map(fun, xs)))
    for a, b in zip(*map(jax.tree.leaves, (mpmd.device_get(step(state, xs)), jax.jit(plain)(state, xs))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_no_rows_of_a_stack_are_none():
    """As where the first n layers are frozen, and n is 0."""

    def step(w, xs):
        def loss(w, x):
            layer = lambda h, p: (mpmd.mark_layer_end(jnp.tanh(h @ p)), None)  # noqa: E731
            return jnp.mean(jax.lax.scan(layer, x, w)[0])

        grads = mpmd.treduce(lambda x: jax.grad(loss)(w, x), xs, schedule="1f1b")
        return w - grads, jnp.sum(grads[:0]), grads[2:2]

    w, xs = jnp.stack([jnp.eye(4)] * 4), jnp.ones((4, 4, 4))
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    got, want = mpmd.jit(step, mpmd_mesh=mesh)(w, xs), jax.jit(step)(w, xs)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    assert float(got[1]) == 0 and got[2].shape == (0, 4, 4)


def test_columns_of_a_matrix_that_two_stages_unstack_are_those_of_plain_jax():
    def value(w, x):
        a = jnp.unstack(w, axis=1)
        return ((mpmd.mark_stage_end(x * a[0] + a[1]) * a[2] + a[3]) ** 2).mean()

    def step(w, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(value)(w, x), xs, schedule="1f1b")

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    args = normal(jax.random.key(0), WIDTH, 4), normal(jax.random.key(1), 4, 2, WIDTH)
    got, want = mpmd.jit(step, mpmd_mesh=mesh)(*args), jax.jit(step)(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)
