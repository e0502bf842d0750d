"""Without `mpmd.jit`, marks and microbatch loops are plain JAX: every program runs under `jax.jit` unchanged."""

import contextlib

import jax
import programs
import pytest
from jax.sharding import AxisType
from programs.pipelines import make_mesh
from programs.program import assert_same_history, pipelined, quickly_compiled


@pytest.mark.parametrize("program", programs.ALL, ids=str)
def test_a_program_with_marks_and_an_ordinary_loop_equals_its_plain_loop(program):
    if program.needs:
        pytest.importorskip(program.needs)
    mesh = make_mesh(1, AxisType.Auto, program.mesh_axes) if program.mesh_axes else None
    with quickly_compiled(), jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        step = jax.jit(program.build(pipelined(schedule=None, mesh=mesh)), **program.jit_options)
        history = program.run(step)
    assert_same_history(history, program.expected, program.rtol)


@pytest.mark.parametrize("program", [p for p in programs.ALL if p.mesh_axes], ids=str)
def test_a_program_that_names_mesh_axes_runs_on_explicit_ones(program):
    mesh = make_mesh(1, AxisType.Explicit, program.mesh_axes)
    with quickly_compiled(), jax.set_mesh(mesh):
        history = program.run(jax.jit(program.build(pipelined(schedule=None, mesh=mesh)), **program.jit_options))
    assert_same_history(history, program.expected, program.rtol)
