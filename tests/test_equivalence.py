"""Every program as a pipeline gives what `jax.jit` of its hand-written loop gives, for several steps."""

import functools

import programs
import pytest
from programs.pipelines import AVAILABLE, SPLIT_BACKWARD, WHOLE_BACKWARD, in_turns, pipeline
from programs.program import assert_same_history


def _check(program, schedule, where, **options):
    if program.needs:
        pytest.importorskip(program.needs)
    try:
        assert_same_history(program.run(pipeline(program, schedule, where, **options)), program.expected, program.rtol)
    except Exception as error:
        error.add_note(f"under {schedule}, {where}, {options}")
        raise


# With its backward whole, and split on Explicit axes with the state donated.
_WHOLE, _SPLIT = ("OneFOneB", "auto"), ("ZeroBubbleH1", "explicit")
_DONATES = {_WHOLE: {}, _SPLIT: {"donate_argnums": (0,)}}

# Every program runs in one way, in turns: some in a quick test, the others in a slow one. An exhaustive test runs the
# other way, and those that are like another one.
_QUICK = "named_scopes unused_gradients".split()
_LIKE_ANOTHER_ONE = """
    uneven_stages shared_inputs one_weight_in_every_stage only_shared_weights integer_leaves label_embedding
    scalar_parameters checkpointed_dots fori_loop gradient_inside_a_stage one_jitted_block linear_algebra
    normalised_matmuls key_chain_over_stages gradient_statistics two_optimizers mixed_precision
    encoder_decoder two_towers trust_ratio frozen_and_unused deep gpt convolutions several_arrays tied_and_scaled
""".split()


def _in_turns():
    for n, program in enumerate(programs.ALL):
        is_alike = program.name in _LIKE_ANOTHER_ONE
        own = pytest.mark.exhaustive if is_alike else () if program.name in _QUICK else pytest.mark.slow
        for way, mark in (n % 2, own), (1 - n % 2, pytest.mark.exhaustive):
            schedule, where = (_WHOLE, _SPLIT)[way]
            yield pytest.param(program.name, schedule, where, id=f"{program.name}-{schedule}", marks=mark)


@pytest.mark.parametrize(("name", "schedule", "where"), list(_in_turns()))
def test_a_program_equals_its_plain_loop(name, schedule, where):
    _check(programs.BY_NAME[name], schedule, where, **_DONATES[schedule, where])


# Between them: skips, tied and shared weights, an early exit, frozen ones, dropout, metrics (of all gradients too), two
# loops, and stages that are compiled in parts.
_UNDER_ALL_SCHEDULES = (
    "one_weight_in_every_stage",
    "metrics",
    "skip_connection",
    "early_exit",
    "frozen_and_unused",
    "dropout_by_index",
    "train_then_evaluate",
    "tied_embedding",
    "deep",
    "gradient_norms",
    "gradient_statistics",
)


# One program under all schedules; the others under one kind of schedule, by turns, and in an exhaustive test under one
# of each kind.
_KINDS = (
    ("GPipe",),
    ("InterleavedOneFOneB", "InterleavedGPipe"),
    ("ZeroBubbleH1",),
    ("InterleavedZeroBubble", "KimiK2"),
    ("ZeroBubbleV", "VHalf", "VMin"),
    ("DualPipeV",),
)


def _one_of_each_kind(turn: int) -> list[str]:
    return [kind[turn % len(kind)] for kind in _KINDS]


def _of_one_kind(turn: int) -> list[str]:
    return [_one_of_each_kind(turn)[turn % len(_KINDS)]]


@functools.cache
def _history(program, schedule):
    return program.run(pipeline(program, schedule, "shared"))


def _check_on_one_device(name, schedule):
    program = programs.BY_NAME[name]
    history = _history(program, schedule)
    assert_same_history(history, program.expected, program.rtol)
    for alike in (WHOLE_BACKWARD, SPLIT_BACKWARD):
        if schedule in alike:
            # XLA fuses a join of all gradients with what else its group does, which depends on the schedule.
            rtol = 1e-6 if name == "gradient_statistics" else 0
            assert_same_history(history, _history(program, alike[0]), rtol)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", AVAILABLE)
def test_a_program_gives_the_same_under_every_schedule_with_all_groups_on_one_device(schedule):
    _check_on_one_device(_UNDER_ALL_SCHEDULES[0], schedule)


@pytest.mark.parametrize(("turn", "name"), list(enumerate(_UNDER_ALL_SCHEDULES[1:])))
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(_of_one_kind, marks=pytest.mark.slow, id="one"),
        pytest.param(_one_of_each_kind, marks=pytest.mark.exhaustive, id="each"),
    ],
)
def test_other_programs_give_the_same_under_schedules_of_every_kind(chosen, turn, name):
    for schedule in chosen(turn):
        try:
            _check_on_one_device(name, schedule)
        except Exception as error:
            error.add_note(f"under {schedule}")
            raise


@pytest.mark.parametrize(
    ("name", "where"),
    in_turns(
        ["tensor_parallel", "shard_map_with_the_mesh", "sharded_state"],
        ["auto", "explicit"],
        slow=["tensor_parallel", "sharded_state"],
    ),
)
def test_a_sharded_program_gives_the_same_under_an_interleaved_schedule(name, where):
    _check(programs.BY_NAME[name], "InterleavedOneFOneB", where, donate_argnums=(0,))
