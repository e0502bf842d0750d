"""Every program as a pipeline gives what `jax.jit` of its hand-written loop gives, for several steps."""

import functools

import programs
import pytest
from programs.pipelines import AVAILABLE, SPLIT_BACKWARD, WHOLE_BACKWARD, in_turns, pipeline
from programs.program import assert_same_history


def _check(program, schedule, where, **options):
    if program.needs:
        pytest.importorskip(program.needs)
    assert_same_history(program.run(pipeline(program, schedule, where, **options)), program.expected, program.rtol)


# Each program in one way; every other pair of them is a slow test.
_IN_ONE_WAY = in_turns(programs.ALL, [("OneFOneB", "auto"), ("ZeroBubbleH1", "explicit")])
_LATER = {program.name for number, program in enumerate(programs.ALL) if number // 2 % 2}


@pytest.mark.parametrize(
    ("program", "schedule", "where"),
    [
        pytest.param(*p.values, id=p.id, marks=pytest.mark.slow if p.values[0].name in _LATER else p.marks)
        for p in _IN_ONE_WAY
    ],
)
def test_a_program_equals_its_plain_loop(program, schedule, where):
    """On Explicit axes with its state donated."""
    if where == "auto":
        _check(program, schedule, where)
    else:
        _check(program, schedule, where, donate_argnums=(0,))


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


# One program under all schedules; the others are slow tests.
_COMBINATIONS = [
    pytest.param(name, schedule, marks=() if number < 1 else pytest.mark.slow)
    for number, name in enumerate(_UNDER_ALL_SCHEDULES)
    for schedule in AVAILABLE
]


@functools.cache
def _history(program, schedule):
    return program.run(pipeline(program, schedule, "shared"))


@pytest.mark.parametrize(("name", "schedule"), _COMBINATIONS)
def test_a_program_gives_the_same_under_every_schedule_with_all_groups_on_one_device(name, schedule):
    program = programs.BY_NAME[name]
    history = _history(program, schedule)
    assert_same_history(history, program.expected, program.rtol)
    for alike in (WHOLE_BACKWARD, SPLIT_BACKWARD):
        if schedule in alike:
            # XLA fuses a join of all gradients with what else its group does, which depends on the schedule.
            rtol = 1e-6 if name == "gradient_statistics" else 0
            assert_same_history(history, _history(program, alike[0]), rtol)


@pytest.mark.parametrize(
    ("name", "where"), in_turns(["tensor_parallel", "shard_map_with_the_mesh", "sharded_state"], ["auto", "explicit"])
)
def test_a_sharded_program_gives_the_same_under_an_interleaved_schedule(name, where):
    _check(programs.BY_NAME[name], "InterleavedOneFOneB", where, donate_argnums=(0,))
