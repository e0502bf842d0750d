"""Without `mpmd.jit`, marks and microbatch loops are plain JAX: every program runs under `jax.jit` unchanged."""

import contextlib

import jax
import programs
import pytest
from jax.sharding import AxisType
from programs.pipelines import make_mesh
from programs.program import assert_same_history, pipelined

# Those in which marks and loops meet something that other programs do not have.
_QUICK = (
    "untouched_values",
    "float0_gradients",
    "none_leaves",
    "vmap_over_marks",
    "jit_around_marks",
    "vjp_by_hand",
    "dropout_keys_in_xs",
    "metrics",
    "axis_one",
    "carried_state",
    "train_then_evaluate",
    "mixed_precision",
    "shard_map_without_a_mesh",
)


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=() if p.name in _QUICK else pytest.mark.slow) for p in programs.ALL],
    ids=str,
)
def test_a_program_with_marks_and_an_ordinary_loop_equals_its_plain_loop(program):
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
        pytest.param(p, marks=() if p.name in ("tensor_parallel", "shard_map_with_the_mesh") else pytest.mark.slow)
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
