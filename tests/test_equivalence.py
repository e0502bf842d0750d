"""Every program as a pipeline gives what `jax.jit` of its hand-written loop gives, for several steps."""

import functools

import programs
import pytest
from programs.pipelines import AVAILABLE, WHOLE_BACKWARD, pipeline
from programs.program import assert_same_history, quickly_compiled


def _check(program, schedule, where, **options):
    if program.needs:
        pytest.importorskip(program.needs)
    assert_same_history(program.run(pipeline(program, schedule, where, **options)), program.expected, program.rtol)


@pytest.mark.parametrize("program", programs.ALL, ids=str)
def test_a_program_under_1f1b_on_auto_axes_equals_its_plain_loop(program):
    _check(program, "OneFOneB", "auto")


@pytest.mark.parametrize("program", programs.ALL, ids=str)
def test_a_program_under_gpipe_on_explicit_axes_with_its_state_donated_equals_its_plain_loop(program):
    with quickly_compiled():
        _check(program, "GPipe", "explicit", donate_argnums=(0,))


# Between them: skips, tied and shared weights, an early exit, dropout, metrics and two loops.
_UNDER_ALL_SCHEDULES = (
    "skip_connection",
    "one_weight_in_every_stage",
    "early_exit",
    "frozen_and_unused",
    "dropout_by_index",
    "metrics",
    "train_then_evaluate",
    "tied_embedding",
)


@functools.cache
def _gpipe_history(program):
    return program.run(pipeline(program, "GPipe", "shared"))


@pytest.mark.parametrize("schedule", AVAILABLE)
@pytest.mark.parametrize("name", _UNDER_ALL_SCHEDULES)
def test_a_program_gives_the_same_under_every_schedule_with_all_groups_on_one_device(name, schedule):
    program = programs.BY_NAME[name]
    history = _gpipe_history(program) if schedule == "GPipe" else program.run(pipeline(program, schedule, "shared"))
    assert_same_history(history, program.expected, program.rtol)
    if schedule in WHOLE_BACKWARD:
        assert_same_history(history, _gpipe_history(program), rtol=0)


@pytest.mark.parametrize("where", ["auto", "explicit"])
@pytest.mark.parametrize("name", ["tensor_parallel", "shard_map_with_the_mesh", "sharded_state"])
def test_a_sharded_program_gives_the_same_under_an_interleaved_schedule(name, where):
    _check(programs.BY_NAME[name], "InterleavedOneFOneB", where, donate_argnums=(0,))
