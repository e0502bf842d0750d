"""Predictions, evaluations and texts over parameters in several groups are plain JAX's, made where the weights are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from programs.program import assert_same, host
from samples import slow_first

import mpmd
import scheduler
from mpmd import StageError
from scheduler import Send

STAGES, WIDTH, VOCABULARY, ROWS, WINDOW = 3, 16, 24, 2, 8
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
LEAST = 4 * WIDTH * WIDTH  # bytes of the smallest weight; a cache is larger


def make_mesh(axes="explicit"):
    return mpmd.MpmdMesh(jax.make_mesh((STAGES,), ("stage",), axis_types=(AXES[axes],)), "stage")


# --- a model with a cache a layer -----------------------------------------------------------------


def init(key):
    embed, *layers = jax.random.split(key, 1 + STAGES)

    def normal(key, *shape):
        return jax.random.normal(key, shape) / np.sqrt(shape[-1])

    def layer(key):
        return {name: normal(k, WIDTH, WIDTH) for name, k in zip("qkvo", jax.random.split(key, 4), strict=True)}

    return {"embed": normal(embed, VOCABULARY, WIDTH), "layers": [layer(key) for key in layers]}


def layout(mesh):
    """Where training leaves the parameters: the embedding is read by the first stage and the last."""
    layers = [dict.fromkeys("qkvo", mpmd.MpmdSharding(mesh, stage)) for stage in range(STAGES)]
    return {"embed": mpmd.MpmdSharding(mesh, [0, STAGES - 1]), "layers": layers}


def trained(mesh):
    def place(x, sharding):
        return mpmd.MpmdArray([jax.device_put(x, sharding.group_sharding(g)) for g in sharding.groups], sharding)

    return jax.tree.map(place, first_params(), layout(mesh))


@functools.cache
def first_params():
    return host(jax.jit(init)(jax.random.key(0)))


def attend(layer, x, cache, start):
    """One layer, whose cache has the keys and values of the positions before `start`."""
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(c, (x @ layer[name]).astype(c.dtype), start, axis=1)
        for c, name in zip(cache, "kv", strict=True)
    )
    scores = jnp.einsum("rqw,rkw->rqk", x @ layer["q"], keys.astype(x.dtype))
    seen = jnp.arange(WINDOW) <= (start + jnp.arange(x.shape[1]))[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return x + jnp.einsum("rqk,rkw->rqw", weights, values.astype(x.dtype)) @ layer["o"], (keys, values)


def make_advance(mark=mpmd.mark_stage_end):
    """Reads `tokens` (rows, length), draws the next one of each row; caches go in and come back."""

    def advance(params, caches, tokens, start, key):
        x, new = params["embed"][tokens], []
        for stage, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
            x, cache = attend(layer, x, cache, start)
            new.append(cache)
            if stage < STAGES - 1:
                x = mark(x)
        logits = x[:, -1] @ params["embed"].T
        return new, jax.random.categorical(jax.random.fold_in(key, start), logits)[:, None]

    return advance


def unmarked(x):
    return x


def no_caches(dtype=np.float32):
    return [(np.zeros((ROWS, WINDOW, WIDTH), dtype), np.zeros((ROWS, WINDOW, WIDTH), dtype)) for _ in range(STAGES)]


CACHES = {
    "host": lambda dtype, mesh: no_caches(dtype),
    "device": lambda dtype, mesh: jax.tree.map(jnp.asarray, no_caches(dtype)),
    "mpmd.jit": lambda dtype, mesh: mpmd.jit(lambda: jax.tree.map(jnp.zeros_like, no_caches(dtype)), mpmd_mesh=mesh)(),
}
PROMPT = np.array([[3], [5]], np.int32)


def generate(advance, params, caches, length=4, seen=lambda caches: None):
    """The tokens and the last caches, as host values; `seen` looks at the caches after each call."""
    tokens, written = PROMPT, []
    for position in range(length):
        caches, tokens = advance(params, caches, tokens, np.int32(position), jax.random.key(7))
        written.append(tokens)
        seen(caches)
    return host((written, caches))


@functools.cache
def expected_text(dtype=np.float32):
    return generate(jax.jit(make_advance(unmarked)), first_params(), no_caches(dtype))


def programs(jitted):
    """What a jitted function has compiled so far."""
    return [compiled for found in jitted._cache.values() for compiled in found]


def crossing(compiled):
    """(from, to, bytes) of each transfer between groups."""
    return [
        (group, i.to_group, compiled.program.nbytes[i.value.name])
        for group, instructions in enumerate(compiled.program.groups)
        for i in instructions
        if isinstance(i, Send)
    ]


def assert_explained(jitted, read, caches):
    """Caches are told from what is only read; both are sizes in group 1."""
    (line,) = [line for line in programs(jitted)[0].explain().splitlines() if line.startswith("group 1 ")]
    assert f"parameters and data {read}, " in line
    assert f"caches and other state {caches}; per device: " in line
    assert ", results " in line


def assert_nothing_large_crosses(jitted):
    for compiled in programs(jitted):
        assert all(nbytes < LEAST for *_, nbytes in crossing(compiled)), crossing(compiled)


def groups_of(caches):
    return [{leaf.mpmd_idxs for leaf in jax.tree.leaves(cache)} for cache in caches]


ONE_A_STAGE = [{(stage,)} for stage in range(STAGES)]

# --- without a loop -------------------------------------------------------------------------------

_WAYS = [
    ("explicit", "host", np.float32, True), ("auto", "mpmd.jit", jnp.bfloat16, False),
    ("auto", "host", np.float32, False), ("explicit", "device", np.float32, False),
    ("auto", "device", np.float32, True), ("explicit", "mpmd.jit", np.float32, True),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "made", "dtype", "marked"), slow_first(*_WAYS, num_slow=2))
def test_a_text_is_plain_jaxs_and_each_cache_is_in_its_layers_group_from_the_first_call_on(axes, made, dtype, marked):
    mesh = make_mesh(axes)
    jitted = mpmd.jit(make_advance(mpmd.mark_stage_end if marked else unmarked), mpmd_mesh=mesh, donate_argnums=1)
    before, num_programs, addresses = [], [], []

    def look(caches):
        assert groups_of(caches) == ONE_A_STAGE
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before[-1:]))
        before.append(caches)
        num_programs.append(len(programs(jitted)))
        addresses.append([leaf.to_mpmd_local_array.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches)])

    text, caches = generate(jitted, trained(mesh), CACHES[made](dtype, mesh), seen=look)
    expected_tokens, expected_caches = expected_text(dtype)
    assert_same(text, expected_tokens, 0)
    assert_same(caches, expected_caches, 1e-6 if dtype == np.float32 else 1e-2)
    assert_nothing_large_crosses(jitted)
    assert_explained(jitted, "4.1 KB", "2.05 KB" if dtype == np.float32 else "1.02 KB")
    assert num_programs == [1, 2, 2, 2]  # the tokens come from the host at first, then from the last group
    assert addresses[1:] == addresses[:1] * 3  # donated: each call writes into the same memory


@pytest.mark.parametrize("axes", slow_first("explicit", "auto"))
def test_marks_tell_the_groups_of_parameters_and_caches_that_come_from_the_host(axes):
    mesh = make_mesh(axes)
    jitted = mpmd.jit(make_advance(), mpmd_mesh=mesh)
    params = jax.jit(init)(jax.random.key(0))
    assert_same(
        generate(jitted, host(params), no_caches(), 2), generate(jax.jit(make_advance()), params, no_caches(), 2), 1e-6
    )
    for compiled in programs(jitted):
        params, caches, *_ = compiled.input_shardings[0]
        assert [{s.groups for s in layer.values()} for layer in params["layers"]] == ONE_A_STAGE
        assert [{s.groups for s in cache} for cache in caches] == ONE_A_STAGE
        assert params["embed"].groups == (0, STAGES - 1)
    assert_nothing_large_crosses(jitted)


@pytest.mark.parametrize("axes", slow_first("auto", "explicit"))
def test_weights_that_read_a_memory_stand_in_the_stages_whose_text_reads_it(axes):
    """An encoder's result is read in two later stages: alike in training and prediction, and in a decoder alone."""
    mesh, width = make_mesh(axes), 32
    params = {k: np.full((width, width), 0.01, np.float32) for k in ("encode", "first", "cross", "last", "cross_last")}

    def decode(p, memory):
        y = mpmd.mark_stage_end(jnp.tanh(memory @ p["cross"]) @ p["first"])
        return jnp.sum((y @ p["last"] + memory @ p["cross_last"]) ** 2)

    def model(p, x):
        return decode(p, mpmd.mark_stage_end(jnp.tanh(x @ p["encode"])))

    def gradients(p, xs):
        return mpmd.treduce(lambda x: jax.grad(model)(p, x), xs, schedule="1f1b")

    mesh = mesh.mpmd_submesh([0, 1, 2])
    predicting = mpmd.jit(model, mpmd_mesh=mesh).lower(params, np.ones((4, width), np.float32)).compile()
    training = mpmd.jit(gradients, mpmd_mesh=mesh).lower(params, np.ones((3, 4, width), np.float32)).compile()
    groups = {k: s.groups for k, s in predicting.input_shardings[0][0].items()}
    assert groups == {"encode": (0,), "first": (1,), "cross": (1,), "last": (2,), "cross_last": (2,)}
    assert groups == {k: s.groups for k, s in training.input_shardings[0][0].items()}

    placed = mpmd.jit(lambda: params, mpmd_mesh=mesh, out_shardings=training.input_shardings[0][0])()
    where = mpmd.MpmdSharding(mesh, 0, jax.sharding.PartitionSpec())
    memory = mpmd.jit(lambda: jnp.ones((40, width)), mpmd_mesh=mesh, out_shardings=where)()  # larger than a weight
    text = mpmd.jit(decode, mpmd_mesh=mesh).lower(placed, memory).compile().explain()
    assert "the argument memory (5.12 KB) is sent from group 0 to 1" in text and "p['" not in text


@pytest.mark.slow
def test_one_cache_for_all_layers_is_in_every_group_and_is_right():
    """Stacked, as for a scan over layers: one array, of which each group reads a part. It crosses at each call."""

    def advance(params, cache, tokens, start, key):
        caches, tokens = make_advance(unmarked)(params, list(zip(*cache, strict=True)), tokens, start, key)
        return jax.tree.map(lambda *layers: jnp.stack(layers), *caches), tokens

    mesh = make_mesh()
    stacked = tuple(np.zeros((STAGES, ROWS, WINDOW, WIDTH), np.float32) for _ in range(2))
    written, caches = generate(mpmd.jit(advance, mpmd_mesh=mesh, donate_argnums=1), trained(mesh), stacked)
    expected, layers = expected_text()
    assert_same((written, caches), (expected, tuple(map(np.stack, zip(*layers, strict=True)))), 1e-6)


# --- several requests in flight -------------------------------------------------------------------


def advance_all(schedule, params, caches, requests):
    """One byte for each request; every leaf of `caches` and `requests` has the requests on axis 0."""
    advance = make_advance()
    return mpmd.treduce(
        lambda one: advance(params, one[0], *one[1]), (caches, requests), schedule=schedule, operation=mpmd.Concat
    )


def generate_all(step, params, caches, starts, length=3, seen=lambda caches: None):
    keys = jax.random.split(jax.random.key(7), len(starts))
    tokens, written = np.stack([PROMPT + i for i in range(len(starts))]), []
    for position in range(length):
        caches, tokens = step(params, caches, (tokens, starts + position, keys))
        written.append(tokens)
        seen(caches)
    return host((written, caches))


@pytest.mark.parametrize(
    ("schedule", "axes"),
    [
        pytest.param(scheduler.GPipe(STAGES), "explicit", marks=pytest.mark.slow),
        pytest.param(scheduler.OneFOneB(STAGES), "auto", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_requests_in_flight_get_the_plain_loops_texts_bit_by_bit_and_their_caches_stay(schedule, axes):
    mesh = make_mesh(axes)
    starts = np.array([0, 0, 2, 1, 0], np.int32)  # each request is as far as it is
    caches = jax.tree.map(lambda c: np.stack([c] * len(starts)), no_caches())
    plain = jax.jit(functools.partial(advance_all, None))
    expected = generate_all(plain, first_params(), caches, starts)

    step = mpmd.jit(functools.partial(advance_all, schedule), mpmd_mesh=mesh, donate_argnums=1)
    compiled = []

    def look(caches):
        assert groups_of(caches) == ONE_A_STAGE
        compiled.append(len(programs(step)))

    assert_same(generate_all(step, trained(mesh), caches, starts, seen=look), expected, 0)
    assert_nothing_large_crosses(step)
    assert_explained(step, "4.12 KB", "10.2 KB")
    assert compiled[1:] == compiled[1:2] * 2 and compiled[-1] <= 2


@pytest.mark.slow
def test_a_request_in_flight_gets_the_text_that_it_gets_alone():
    mesh = make_mesh()
    params = trained(mesh)
    step = mpmd.jit(functools.partial(advance_all, scheduler.GPipe(STAGES)), mpmd_mesh=mesh, donate_argnums=1)
    caches = jax.tree.map(lambda c: np.stack([c] * 3), no_caches())
    keys = jnp.stack([jax.random.key(7)] * 3)
    tokens, written = np.stack([PROMPT] * 3), []
    for position in range(4):
        caches, tokens = step(params, caches, (tokens, np.full(3, position, np.int32), keys))
        written.append(tokens)
    assert_same(host(written), [np.stack([text] * 3) for text in expected_text()[0]], 0)


# --- prediction and evaluation --------------------------------------------------------------------


def loss(params, tokens):
    """The function that is trained, with its marks."""
    x = params["embed"][tokens[:, :-1]]
    room = jnp.zeros((len(tokens), WINDOW, WIDTH))
    for stage, layer in enumerate(params["layers"]):
        x, _ = attend(layer, x, (room, room), 0)
        x = mpmd.mark_stage_end(x) if stage < STAGES - 1 else x
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, tokens[:, 1:]).mean()


def _train_step(params, batches):
    value, grads = mpmd.treduce(
        lambda tokens: jax.value_and_grad(loss)(params, tokens), batches, schedule=scheduler.OneFOneB(STAGES)
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _texts(*shape):
    return np.random.default_rng(len(shape)).integers(0, VOCABULARY, shape).astype(np.int32)


@pytest.mark.parametrize("axes", slow_first("explicit", "auto"))
def test_a_state_is_made_trained_and_evaluated_with_no_thought_about_places(axes):
    mesh = make_mesh(axes)
    params, expected = mpmd.jit(init, mpmd_mesh=mesh)(jax.random.key(0)), first_params()
    step, plain_step = mpmd.jit(_train_step, mpmd_mesh=mesh, donate_argnums=0), jax.jit(_train_step)
    for _ in range(2):
        params, _ = step(params, _texts(4, 1, WINDOW + 1))
        expected, _ = plain_step(expected, _texts(4, 1, WINDOW + 1))
    assert jax.tree.map(lambda p: p.mpmd_idxs, params) == jax.tree.map(lambda s: s.groups, layout(mesh))

    evaluate = mpmd.jit(loss, mpmd_mesh=mesh)
    held_out = _texts(2, WINDOW + 1)
    np.testing.assert_allclose(float(evaluate(params, held_out)), jax.jit(loss)(expected, held_out), rtol=1e-5)
    sizes = {nbytes for compiled in programs(evaluate) for *_, nbytes in crossing(compiled)}
    assert sizes == {4, 4 * 2 * WINDOW * WIDTH}  # the loss, and what a layer hands to the next


# --- loops over tokens ----------------------------------------------------------------------------


def _until(mark, params, caches):
    def body(state):
        position, caches, tokens = state
        caches, tokens = make_advance(mark)(params, caches, tokens, position, jax.random.key(7))
        return position + 1, caches, tokens

    return jax.lax.while_loop(lambda state: state[0] < 4, body, (jnp.int32(0), caches, jnp.asarray(PROMPT)))


def test_a_while_loop_over_tokens_around_marks_is_refused_with_the_loop_to_write():
    mesh = make_mesh()
    with pytest.raises(StageError) as error:
        mpmd.jit(functools.partial(_until, mpmd.mark_stage_end), mpmd_mesh=mesh)(trained(mesh), no_caches())
    line = make_advance.__code__.co_firstlineno + 9
    where = f"{__file__}:{line}:20 (make_advance.<locals>.advance)"
    assert str(error.value) == (
        f"mark_stage_end inside while, at {where}: a stage cannot end there.\n"
        "  Write the stages as a Python loop; loops inside a stage are fine.\n"
        "  Where the loop is over tokens or steps, call the jitted function once for each, from Python."
    )


@pytest.mark.slow
def test_a_while_loop_over_tokens_without_marks_is_right_in_one_group():
    mesh = make_mesh()
    jitted = mpmd.jit(functools.partial(_until, unmarked), mpmd_mesh=mesh)
    _, caches, tokens = jitted(trained(mesh), no_caches())
    written, expected = expected_text()
    assert_same(host((caches, tokens)), (expected, written[-1]), 1e-6)
    assert len({leaf.mpmd_idxs for leaf in jax.tree.leaves(caches)}) == 1
    (compiled,) = programs(jitted)
    assert "warning: the argument params['layers'][1]['k'] (1.02 KB) is sent" in compiled.explain()
