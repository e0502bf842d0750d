"""Code runs where it was written between the marks, or where fewer bytes cross: programs with more than a chain.

Each is cut and its printed partition compared with `tests/golden/places/NAME.txt`, as in `test_partition`, whose rules
for all programs hold here too. Then its numbers are compared with those of plain `jax.jit`.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_partition as partition
from test_partition import F32, Cut, D, M, R, V, array, dense, equal_batch, f32, mark, squared_error, training

import mpmd
import scheduler

GOLDEN = pathlib.Path(__file__).parent / "golden" / "places"
PROGRAMS = {}


def program(build):
    """Registers a function from a schedule to `(step, args)` under its name."""
    PROGRAMS[build.__name__] = build
    partition.program(functools.wraps(build)(lambda: build(scheduler.OneFOneB(4))))
    return build


def cut(name) -> Cut:
    return partition.cut(name)


# --- programs -------------------------------------------------------------------------------------


def layers(num):
    return [array(D, D) for _ in range(num)]


def tower(ws, x):
    for w in ws:
        x = x + dense(w, x)
    return x


@program
def two_towers(schedule):
    """A frozen reference in stages 0 and 1, then the policy in stages 2 and 3, which starts from the data (DPO)."""

    def loss(params, batch, reference):
        r = mark(tower(reference[:2], batch["x"]))
        r = mark(jax.lax.stop_gradient(tower(reference[2:], r)))
        h = mark(tower(params[:2], batch["x"]))
        return squared_error(tower(params[2:], h), r + batch["y"])

    def step(params, reference, batch):
        value, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss)(params, mb, reference), batch, schedule=schedule
        )
        return partition.sgd(params, grads), value

    return step, (layers(4), layers(4), equal_batch())


@program
def two_trained_towers(schedule):
    """Two encoders of two stages, compared at the end (retrieval); nothing of the first goes through the last mark."""
    batch = {"query": array(M, R, D), "item": array(M, R, D)}

    def loss(params, batch):
        q = tower(params["query"][2:], mark(tower(params["query"][:2], batch["query"])))
        item, q = mark((batch["item"], q))
        k = tower(params["item"][2:], mark(tower(params["item"][:2], item)))
        return -jnp.mean(jax.nn.log_softmax(q @ k.T))

    return training(loss, {"query": layers(4), "item": layers(4)}, batch, schedule=schedule)


@program
def actor_and_critic(schedule):
    """Both start from the data; the marks that end the actor's stages do not see the critic."""

    def loss(params, batch):
        a = mark(tower(params["actor"][:2], batch["x"]))
        a = mark(tower(params["actor"][2:], a))
        v = mark(tower(params["critic"][:2], batch["x"]))
        v = tower(params["critic"][2:], v) @ params["value"]
        advantage = jax.lax.stop_gradient(jnp.mean(batch["y"], axis=1) - v)
        policy = -jnp.mean(advantage * jax.nn.log_softmax(a)[:, 0])
        return policy + squared_error(v, jnp.mean(batch["y"], axis=1))

    params = {"actor": layers(4), "critic": layers(4), "value": array(D)}
    return training(loss, params, equal_batch(), schedule=schedule)


@program
def critic_on_a_shared_encoder(schedule):
    """Stages: encoder, actor, two of the critic. It reads the encoder's output, which no mark hands on to it."""

    def loss(params, batch):
        h = mark(tower(params["encoder"], batch["x"]))
        a = mark(tower(params["actor"], h))
        v = mark(tower(params["critic"][:2], h))
        v = tower(params["critic"][2:], v) @ params["value"]
        return squared_error(a, batch["y"]) + jnp.mean(v**2)

    params = {"encoder": layers(2), "actor": layers(2), "critic": layers(4), "value": array(D)}
    return training(loss, params, equal_batch(), schedule=schedule)


def modulated(p, x, c):
    shift, scale = jnp.split(jax.nn.silu(c) @ p["ada"], 2, -1)
    return x + jnp.tanh((x * (1 + scale) + shift) @ p["up"])


def _conditioning(schedule, block=modulated, first=0):
    params = {"time": array(6, D), "blocks": [{"ada": array(D, 2 * D), "up": array(D, D)} for _ in range(4)]}
    batch = equal_batch() | {"t": array(M, R, 6)}

    def loss(params, batch):
        c, x = jnp.maximum(batch["t"] @ params["time"], 0), batch["x"]
        for i, p in enumerate(params["blocks"]):
            x = x if i == 0 else mark(x)
            x = block(p, x, c) if i >= first else dense(p["up"], x)
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


@program
def conditioning(schedule):
    """A vector that each block projects by weights of its own (DiT, FiLM)."""
    return _conditioning(schedule)


@program
def conditioning_of_later_blocks(schedule):
    """No block of the stage that makes the vector reads it."""
    return _conditioning(schedule, first=1)


@program
def conditioning_of_checkpointed_blocks(schedule):
    return _conditioning(schedule, jax.checkpoint(modulated))


@program
def conditioning_of_jitted_blocks(schedule):
    return _conditioning(schedule, jax.jit(modulated))


@program
def conditioning_of_blocks_with_a_derivative(schedule):
    """Blocks with a backward pass written by hand, which computes the block again."""
    block = jax.custom_vjp(modulated)
    block.defvjp(lambda *args: (modulated(*args), args), lambda args, g: jax.vjp(modulated, *args)[1](g))
    return _conditioning(schedule, block)


@program
def projections_made_at_the_top(schedule):
    """All blocks' projections of the vector, written before the first block."""
    params = {"time": array(6, D), "ada": [array(D, 2 * D) for _ in range(4)], "up": layers(4)}
    batch = equal_batch() | {"t": array(M, R, 6)}

    def loss(params, batch):
        c, x = jnp.tanh(batch["t"] @ params["time"]), batch["x"]
        projected = [jnp.split(jax.nn.silu(c) @ w, 2, -1) for w in params["ada"]]
        for i, (w, (shift, scale)) in enumerate(zip(params["up"], projected, strict=True)):
            x = x if i == 0 else mark(x)
            x = x + jnp.tanh((x * (1 + scale) + shift) @ w)
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


@program
def an_embedding_for_each_layer(schedule):
    """Each block looks up the class in a table of its own; one table for all blocks is looked up at the top."""
    params = {"shared": array(V, D), "tables": [array(V, D) for _ in range(4)], "w": layers(4)}
    batch = equal_batch() | {"label": array(M, R, dtype=jnp.int32)}

    def loss(params, batch):
        shared, x = params["shared"][batch["label"]], batch["x"]
        for i, (w, table) in enumerate(zip(params["w"], params["tables"], strict=True)):
            x = x if i == 0 else mark(x)
            x = dense(w, x + table[batch["label"]] + shared)
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


def attention(p, x, states, mask=None):
    q, k, v = x @ p["q"], states @ p["k"], states @ p["v"]
    logits = q @ k.T if mask is None else jnp.where(mask, q @ k.T, -1e9)
    return x + jax.nn.softmax(logits) @ v


def attention_weights():
    return {name: array(D, D) for name in "qkv"}


@program
def encoder_and_decoder(schedule):
    """The encoder in stages 0 and 1; the decoder, which starts from tokens of its own, in stages 2 and 3."""
    params = {
        "source": array(V, D), "target": array(V, D), "encoder": layers(2),
        "cross": [attention_weights() for _ in range(2)], "decoder": layers(2),
    }  # fmt: skip
    batch = {name: array(M, n, dtype=jnp.int32) for name, n in (("source", 5), ("target", R), ("padding", 5))}

    def loss(params, batch):
        states = mark(dense(params["encoder"][0], params["source"][batch["source"]]))
        states = mark(dense(params["encoder"][1], states))
        mask = batch["padding"][None] > 0
        y = params["target"][batch["target"]]
        for i, (cross, w) in enumerate(zip(params["cross"], params["decoder"], strict=True)):
            y = dense(w, attention(cross, y if i == 0 else mark(y), states, mask))
        return squared_error(y, 1.0)

    return training(loss, params, batch, schedule=schedule)


@program
def rotary_tables_and_masks(schedule):
    """Made once at the top, from the documents' positions and segments, and read in every stage."""
    params = [attention_weights() for _ in range(4)]
    batch = equal_batch() | {"position": array(M, R, dtype=jnp.int32), "segment": array(M, R, dtype=jnp.int32)}

    def loss(params, batch):
        angles = batch["position"][:, None] * 1e4 ** (-jnp.arange(D // 2) / (D // 2))
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        mask = (batch["segment"][:, None] == batch["segment"][None]) & jnp.tri(R, dtype=bool)
        x = batch["x"]
        for i, p in enumerate(params):
            x = x if i == 0 else mark(x)
            a, b = jnp.split(x, 2, -1)
            x = attention(p, jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1), x, mask)
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


@program
def skips_with_a_time_embedding(schedule):
    """A U-Net: two stages down, two up, each up block reads the output of its down block."""
    params = {"time": array(6, D), "projections": layers(4), "w": layers(4)}
    batch = equal_batch() | {"t": array(M, R, 6)}

    def loss(params, batch):
        c = jax.nn.silu(batch["t"] @ params["time"])
        x, skips = batch["x"], []
        for i, (w, projection) in enumerate(zip(params["w"], params["projections"], strict=True)):
            x = x if i == 0 else mark(x)
            x = dense(w, (x if i < 2 else x + skips.pop()) + c @ projection)
            skips += [x] if i < 2 else []
        return squared_error(x, batch["y"])

    return training(loss, params, batch, schedule=schedule)


@program
def losses_of_routers(schedule):
    """In each stage a router, whose loss is part of the sum, and how often it chose each expert, which is a metric."""
    params = {"w": layers(4), "router": [array(D, 5) for _ in range(4)]}

    def loss(params, batch):
        x, balance, chosen = batch["x"], 0.0, []
        for i, (w, router) in enumerate(zip(params["w"], params["router"], strict=True)):
            x = x if i == 0 else mark(x)
            gates = jax.nn.softmax(x @ router)
            chosen.append(jnp.sum(gates > 0.2, axis=0))
            balance += jnp.sum(jnp.mean(gates, axis=0) * jax.lax.stop_gradient(chosen[-1]))
            x = dense(w, x) * gates.max(axis=-1, keepdims=True)
        return squared_error(x, batch["y"]) + 0.01 * balance, jnp.stack(chosen)

    return training(loss, params, equal_batch(), schedule=schedule, has_aux=True)


@program
def exits_written_at_the_end(schedule):
    """A head for the output of each stage, all written after the last mark."""
    params = {"w": layers(4), "exits": [array(D, V) for _ in range(4)]}
    batch = {"x": array(M, R, D), "y": array(M, R, dtype=jnp.int32)}

    def loss(params, batch):
        x, hidden = batch["x"], []
        for i, w in enumerate(params["w"]):
            x = dense(w, x if i == 0 else mark(x))
            hidden.append(x)
        logits = [jax.nn.log_softmax(h @ w) for h, w in zip(hidden, params["exits"], strict=True)]
        return -sum(jnp.mean(jnp.take_along_axis(p, batch["y"][:, None], 1)) for p in logits)

    return training(loss, params, batch, schedule=schedule)


@program
def two_gradients_in_one_body(schedule):
    """Two losses, each differentiated by itself: the critic's in stages 0 and 1, the actor's in stages 2 and 3."""
    params = {"critic": layers(2), "actor": layers(2)}

    def step(params, batch):
        def critic_loss(ws, mb):
            return squared_error(mark(dense(ws[1], mark(dense(ws[0], mb["x"])))), mb["y"])

        def actor_loss(ws, mb):
            return squared_error(dense(ws[1], mark(dense(ws[0], mb["x"]))), mb["y"])

        def one(mb):
            critic = jax.value_and_grad(critic_loss)(params["critic"], mb)
            actor = jax.value_and_grad(actor_loss)(params["actor"], mb)
            return critic[0] + actor[0], {"critic": critic[1], "actor": actor[1]}

        value, grads = mpmd.treduce(one, batch, schedule=schedule)
        return partition.sgd(params, grads), value

    return step, (params, equal_batch())


NAMES = list(PROGRAMS)


# --- all programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_printed_partition_is_the_golden_one(name):
    partition.check_golden(name, GOLDEN)


def test_every_golden_file_has_its_program():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(NAMES)


RULES = [
    partition.test_nothing_heavy_is_computed_twice_or_lost,
    partition.test_a_backward_task_reads_forward_values_that_its_group_has_anyway,
    partition.test_forward_values_flow_down_and_gradients_flow_up,
    partition.test_state_comes_back_where_it_came_from,
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_program_of_several_parts_keeps_the_rules_of_all_programs(rule, name):
    rule(name)


@pytest.mark.parametrize("name", NAMES)
def test_no_parameter_or_gradient_crosses_between_groups(name):
    c = cut(name)
    assert c.moved() == []
    assert not [t for t in c.loop.partition.tasks if t.is_empty and t.place.kind == "F"]
    names = [n for n in c.outline.trace.in_names if n.startswith(("params", "reference"))]
    assert all(len(c.where(n)) == 1 for n in names)


# --- each program ---------------------------------------------------------------------------------

STATE = f32(R, D)


def homes(name, *prefixes):
    """The groups that hold the arguments whose names begin so, in order."""
    c = cut(name)
    return [sorted(c.where(n)) for p in prefixes for n in c.outline.trace.in_names if n.startswith(p)]


def test_a_second_model_that_starts_from_the_data_is_where_it_was_written():
    c = cut("two_towers")
    assert c.matmuls() == {"F0": 2, "F1": 2, "F2": 2, "F3": 2, "B3": 4, "B2": 3}
    assert c.bytes_crossing() == {"F0→F1": STATE, "F1→F3": STATE, "F2→F3": STATE, "B3→B2": STATE}
    assert homes("two_towers", "reference", "params") == [[0], [0], [1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize(
    ("name", "parts"), [("two_trained_towers", ("query", "item")), ("actor_and_critic", ("actor", "critic"))]
)
def test_the_backward_of_a_tower_is_in_the_stages_of_the_tower(name, parts):
    c = cut(name)
    assert {p: n for p, n in c.count("tanh").items() if p[0] == "F"} == {f"F{s}": 2 for s in range(4)}
    assert homes(name, *(f"params['{p}']" for p in parts)) == [[0], [0], [1], [1], [2], [2], [3], [3]]
    forward = {"F0→F1": STATE, "F1→F3": STATE, "F2→F3": STATE}
    assert c.bytes_crossing() == forward | {"B3→B2": STATE, "B3→B1": STATE, "B1→B0": STATE}
    assert [len([t for t in c.accumulated(f"B{s}") if t == "f32[8,8]"]) for s in range(4)] == [2] * 4


def test_a_model_that_a_stage_consists_of_stays_though_fewer_bytes_would_cross_without():
    c = cut("critic_on_a_shared_encoder")
    assert homes("critic_on_a_shared_encoder", "params['critic']") == [[2], [2], [3], [3]]
    assert c.bytes_crossing()["F0→F2"] == STATE  # the encoder's output, beside the actor's way
    assert {p: n for p, n in c.count("tanh").items() if p[0] == "F"} == {f"F{s}": 2 for s in range(4)}


CONDITIONINGS = [
    "conditioning",
    "conditioning_of_checkpointed_blocks",
    "conditioning_of_jitted_blocks",
    "conditioning_of_blocks_with_a_derivative",
]


@pytest.mark.parametrize("name", CONDITIONINGS)
def test_a_blocks_projection_of_a_condition_is_in_the_blocks_stage(name):
    c = cut(name)
    assert homes(name, "params['blocks']") == [[s] for s in range(4) for _ in range(2)]
    assert c.where("params['time']") == {0}
    assert c.bytes_crossing() == {
        "F0→F1": 2 * STATE, "F1→F2": STATE, "F2→F3": STATE, "F0→F2": STATE, "F0→F3": STATE,
        "B3→B2": 2 * STATE, "B2→B1": 2 * STATE, "B1→B0": 2 * STATE,
    }  # fmt: skip
    assert c.accumulated("B0") == ["f32[6,8]", "f32[8,16]", "f32[8,8]"]


def test_a_condition_is_made_in_the_first_stage_that_reads_it():
    name = "conditioning_of_later_blocks"
    c = cut(name)
    assert c.where("params['time']") == c.where("batch['t']") == {1}
    assert c.accumulated("B1") == ["f32[6,8]", "f32[8,16]", "f32[8,8]"]
    assert c.bytes_crossing() == {
        "F0→F1": STATE, "F1→F2": 2 * STATE, "F2→F3": STATE, "F1→F3": STATE,
        "B3→B2": 2 * STATE, "B2→B1": 2 * STATE, "B1→B0": STATE,
    }  # fmt: skip


def test_projections_written_at_the_top_are_where_they_are_read():
    name = "projections_made_at_the_top"
    c = cut(name)
    assert homes(name, "params['ada']") == homes(name, "params['up']") == [[0], [1], [2], [3]]
    assert sum(c.bytes_crossing().values()) == sum(cut("conditioning").bytes_crossing().values())
    assert [c.accumulated(f"B{s}") for s in (1, 2, 3)] == [["f32[8,16]", "f32[8,8]"]] * 3


def test_a_table_of_a_layer_is_in_the_layers_stage():
    name = "an_embedding_for_each_layer"
    c = cut(name)
    assert homes(name, "params['tables']") == [[0], [1], [2], [3]]
    assert c.count("scatter-add") == {"B0": 2, "B1": 1, "B2": 1, "B3": 1}
    assert c.where("batch['label']") == {0, 1, 2, 3}


def test_cross_attention_projects_the_encoders_states_in_the_decoders_stages():
    name = "encoder_and_decoder"
    c = cut(name)
    states = f32(5, D)
    assert homes(name, "params['cross']", "params['decoder']", "params['target']") == [[2]] * 3 + [[3]] * 3 + [
        [2],
        [3],
        [2],
    ]
    assert c.bytes_crossing() == {
        "F0→F1": states, "F1→F2": states, "F1→F3": states, "F2→F3": STATE,
        "B3→B2": STATE + states, "B2→B1": states, "B1→B0": states,
    }  # fmt: skip
    assert c.where("batch['padding']") == {2, 3}


def test_rotary_tables_and_masks_are_made_again_in_each_stage():
    c = cut("rotary_tables_and_masks")
    assert c.bytes_crossing() == partition.crossings(*(STATE,) * 3)
    assert c.where("batch['position']") == c.where("batch['segment']") == {0, 1, 2, 3}


def test_a_skip_and_a_time_embedding_cross_once_to_each_reader():
    name = "skips_with_a_time_embedding"
    c = cut(name)
    assert homes(name, "params['projections']", "params['time']") == [[0], [1], [2], [3], [0]]
    assert c.bytes_crossing() == {
        "F0→F1": 2 * STATE, "F1→F2": STATE, "F2→F3": STATE, "F0→F2": STATE, "F0→F3": 2 * STATE,
        "B3→B2": 2 * STATE, "B2→B1": 2 * STATE, "B1→B0": 2 * STATE, "B3→B0": STATE,
    }  # fmt: skip


def test_a_routers_loss_and_its_counts_are_made_in_its_stage():
    c = cut("losses_of_routers")
    assert c.count("exp") == {f"F{s}": 1 for s in range(4)}
    scalar, counts = F32, 5 * F32
    assert c.bytes_crossing() == {
        "F0→F1": STATE + scalar, "F1→F2": STATE + scalar, "F2→F3": STATE + scalar + counts,
        "F0→F3": counts, "F1→F3": counts, "B3→B2": STATE, "B2→B1": STATE, "B1→B0": STATE,
    }  # fmt: skip


def test_an_exit_written_at_the_end_is_where_its_input_is():
    name = "exits_written_at_the_end"
    c = cut(name)
    assert homes(name, "params['exits']") == [[0], [1], [3], [3]]  # the input of the third crosses to stage 3 anyhow
    assert c.bytes_crossing() == {
        "F0→F1": STATE, "F1→F2": STATE, "F2→F3": STATE, "F0→F3": F32, "F1→F3": F32,
        "B3→B2": 2 * STATE, "B2→B1": STATE, "B1→B0": STATE,
    }  # fmt: skip


def test_each_of_two_losses_in_one_body_has_its_stages():
    c = cut("two_gradients_in_one_body")
    assert homes("two_gradients_in_one_body", "params['critic']", "params['actor']") == [[0], [1], [2], [3]]
    assert [c.accumulated(f"B{s}") for s in range(4)] == [["f32[8,8]"]] * 4


# --- numbers --------------------------------------------------------------------------------------


def values(args):
    """Arrays of the types of `args`: small numbers, and indices into the smallest table."""

    def value(path, x):
        seed = np.random.default_rng(len(jax.tree_util.keystr(path)) + x.size)
        is_index = jnp.issubdtype(x.dtype, jnp.integer)
        return jnp.asarray(seed.integers(0, V, x.shape) if is_index else seed.normal(0, 0.5, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(value, args)


def check_numbers(name, schedule):
    step, args = PROGRAMS[name](schedule)
    args = values(args)
    mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
    expected = jax.jit(step)(*args)
    found = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage"))(*args)
    found = jax.tree.map(np.asarray, found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


QUICK = ("two_towers", "projections_made_at_the_top", "encoder_and_decoder")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_a_program_of_several_parts_computes_what_plain_jit_computes(name):
    check_numbers(name, scheduler.OneFOneB(4))


SPLIT = (
    *QUICK,
    "actor_and_critic",
    "conditioning",
    "rotary_tables_and_masks",
    "losses_of_routers",
    "exits_written_at_the_end",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_so_it_does_in_a_split_backward(name):
    check_numbers(name, scheduler.ZeroBubbleH1(4))
