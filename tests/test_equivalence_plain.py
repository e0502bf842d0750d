"""Without `mpmd.jit`, marks and microbatch loops are plain JAX: programs run under `jax.jit` unchanged.

Here are those in which a mark or a loop meets something new; every program runs as a pipeline in `test_equivalence`.
"""

import contextlib

import jax
import programs
import pytest
from jax.sharding import AxisType
from programs.pipelines import make_mesh
from programs.program import assert_same_history, pipelined

_QUICK = (
    "float0_gradients",
    "vmap_over_marks",
    "vjp_by_hand",
)
_MORE = ("untouched_values", "metrics", "none_leaves", "jit_around_marks")  # slow, all of them
_SLOW = (
    "shard_map_without_a_mesh",
    # What a mark holds, and where stages end.
    "several_arrays",
    "integers_cross_first",
    "keys_through_marks",
    "a_mark_after_every_stage",
    "hypernetwork",
    "one_stage",
    # What is around marks, or between them.
    "checkpointed",
    "scan_over_layers",
    "while_loop",
    "custom_vjp",
    "custom_jvp",
    "jvp_inside_a_stage",
    "one_jitted_block_with_its_mark",
    "value_and_grad_under_jit",
    "named_scopes",
    "flax",
    "equinox",
    # How the loop is called, what it reduces, and what is around it.
    "one_microbatch",
    "dropout_by_index",
    "dropout_keys_in_xs",
    "axis_one",
    "carried_state",
    "train_then_evaluate",
    "mixed_precision",
    "integer_leaves",
    "running_statistics",
    "forward_only",
    "sharpness_aware",
    "unused_gradients",
    "no_loop",
    "input_gradients",
    "gradient_statistics",
    "further_arguments",
    "summed_outside",
    "jit_around_the_step",
    "gradients_of_several_steps",
    "casts_in_the_loop",
    "normalised_weights",
    # What names an axis of the mesh.
    *(program.name for program in programs.ALL if program.mesh_axes and program.name not in _QUICK),
)


@pytest.mark.parametrize(
    "name",
    [
        *_QUICK,
        *(pytest.param(n, marks=pytest.mark.slow) for n in _MORE),
        *(pytest.param(n, marks=pytest.mark.exhaustive if k % 6 else pytest.mark.slow) for k, n in enumerate(_SLOW)),
    ],
)
def test_a_program_with_marks_and_an_ordinary_loop_equals_its_plain_loop(name):
    program = programs.BY_NAME[name]
    if program.needs:
        pytest.importorskip(program.needs)
    mesh = make_mesh(1, AxisType.Auto, program.mesh_axes) if program.mesh_axes else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        step = jax.jit(program.build(pipelined(schedule=None, mesh=mesh)), **program.jit_options)
        history = program.run(step)
    assert_same_history(history, program.expected, program.rtol)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(p, marks=pytest.mark.slow if p.name == "shard_map_with_the_mesh" else pytest.mark.exhaustive)
        for p in programs.ALL
        if p.mesh_axes
    ],
    ids=str,
)
def test_a_program_that_names_mesh_axes_runs_on_explicit_ones(program):
    mesh = make_mesh(1, AxisType.Explicit, program.mesh_axes)
    with jax.set_mesh(mesh):
        history = program.run(jax.jit(program.build(pipelined(schedule=None, mesh=mesh)), **program.jit_options))
    assert_same_history(history, program.expected, program.rtol)
