"""Code runs where it was written between the marks, or where fewer bytes cross: programs with more than a chain.

Each is cut and its printed partition compared with `tests/golden/places/NAME.txt`, as in `test_partition`, whose rules
for all programs hold here too. Then its numbers are compared with those of plain `jax.jit`.
"""

import functools
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_partition as partition
from hypothesis import strategies as st
from places_programs import NAMES, PROGRAMS
from samples import slow_first
from test_partition import F32, Cut, D, M, R, V, array, dense, equal_batch, f32, mark, training

import mpmd
import scheduler

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "places"


def cut(name) -> Cut:
    return partition.cut(name)


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


def test_a_cond_that_is_given_all_parameters_reads_only_those_of_its_stage():
    """Haiku's `hk.cond` gives them all to its branches."""
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")
    params, xs = {"first": jnp.eye(4), "last": 2 * jnp.eye(4)}, jnp.ones((2, 3, 4))

    def loss(params, x):
        x = mark(jnp.tanh(x @ params["first"]))
        branches = [lambda p, x: x @ p["last"], lambda p, x: -x @ p["last"]]
        return jnp.mean((jax.lax.cond(x[0, 0] > 0, *branches, params, x) - 1) ** 2)

    def step(params, xs):
        grads = mpmd.treduce(lambda x: jax.grad(loss)(params, x), xs, schedule="1f1b")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    found = mpmd.jit(step, mpmd_mesh=mesh)(params, xs)
    assert {name: x.mpmd_idxs for name, x in found.items()} == {"first": (0,), "last": (1,)}
    jax.tree.map(np.testing.assert_array_equal, mpmd.device_get(found), jax.jit(step)(params, xs))


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


QUICK = ("two_towers",)
SPLIT = ("actor_and_critic", "conditioning", "rotary_tables_and_masks", "losses_of_routers", "exits_written_at_the_end")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES if n not in SPLIT]
)
def test_a_program_of_several_parts_computes_what_plain_jit_computes(name):
    check_numbers(name, scheduler.OneFOneB(4))


@pytest.mark.parametrize("name", slow_first(*SPLIT, *QUICK, num_slow=len(SPLIT)))
def test_so_it_does_in_a_split_backward(name):
    check_numbers(name, scheduler.ZeroBubbleH1(4))


# --- any program ----------------------------------------------------------------------------------

KINDS = {
    "dense": lambda p, x, y, ids: x + dense(p["w"], x),
    "narrow": lambda p, x, y, ids: y + jnp.tanh(x @ p["in"]) @ p["out"],
    "add": lambda p, x, y, ids: x + 0.5 * y,
    "scale": lambda p, x, y, ids: jax.nn.relu(x) * 0.3,
    "centre": lambda p, x, y, ids: (x - jnp.mean(x, axis=-1, keepdims=True)) * y,
    "look up": lambda p, x, y, ids: x + p["table"][ids],
    "loss": lambda p, x, y, ids: jnp.mean((x @ p["in"]) ** 2),
}


@st.composite
def texts(draw):
    """Lines of a program, each with the values that it reads, and the lines before which a stage ends."""
    line = st.tuples(st.sampled_from(list(KINDS)), st.integers(0, 99), st.integers(0, 99), st.integers(0, 3))
    lines = draw(st.lists(line, min_size=6, max_size=16))
    return lines, draw(st.sets(st.integers(1, len(lines) - 1), min_size=3, max_size=3))


def run_text(text, params, batch):
    """Reads the data, what was made last or anything made before, with one of four sets of weights."""
    lines, ends = text
    made, total = [batch["x"], batch["y"]], 0.0
    for i, (kind, a, b, k) in enumerate(lines):
        if i in ends:
            made[-1] = mark(made[-1])
        x, y, p = made[-1 if a % 2 else a % len(made)], made[b % len(made)], params[k]
        result = KINDS[kind](p, x, y, batch["ids"])
        if kind == "loss":
            total += result
        else:
            made.append(result)
    return total + sum(jnp.mean(x**2) for x in made)


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(texts())
def test_any_program_keeps_the_rules_of_all_programs(text):
    weights = {"w": array(D, D), "in": array(D, 4), "out": array(4, D), "table": array(V, D)}
    batch = equal_batch() | {"ids": array(M, R, dtype=jnp.int32)}
    built = training(functools.partial(run_text, text), [weights] * 4, batch)
    partition.PROGRAMS["any"] = partition.Program(lambda: built, 4)
    partition.cut.cache_clear()
    for rule in RULES:
        rule("any")
