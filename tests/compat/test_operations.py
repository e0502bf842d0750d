"""Every operation of `jax.numpy` and `jax.lax` that takes arrays: as `jax.jit` has it, on both kinds of axes.

All of them stand in one step, so that there is one program to compile; what an operation gets are arguments of the
step as they came, values that were computed there, or some of each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from programs.operations import ALL, VALUES, Operation
from programs.pipelines import make_mesh

import mpmd
import scheduler

_SOME = ALL[::16]
_AXES = {"one_device": (), "two_devices": ("data",)}
_KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def _computed(x):
    """The same value, as the result of an operation."""
    return jax.lax.select(x == x, x, x)


def _applied(operation: Operation, *arrays):
    try:
        return operation.fun(*arrays)
    except Exception as e:
        e.add_note(f"in {operation}")
        raise


def _all_ways(operations, given, computed):
    """What each operation gives for arguments of the step, and for these beside values that were computed."""
    results = {}
    for op in operations:
        results[op.name] = _applied(op, *(given[v] for v in op.values))
        if len(op.values) > 1:
            first, *rest = op.values
            results[f"{op.name}, computed first"] = _applied(op, computed[first], *(given[v] for v in rest))
            results[f"{op.name}, computed rest"] = _applied(op, given[first], *(computed[v] for v in rest))
    return results


def _step(operations):
    def step(values):
        return _all_ways(operations, values, jax.tree.map(_computed, values))

    return step


def _in_second_stage(operations, schedule):
    """The operations on what the first of two stages hands on."""

    def body(values, i):
        marked = mpmd.mark_stage_end(jax.tree.map(_computed, values))
        return _all_ways(operations, values, marked)

    def step(values):
        return mpmd.treduce_i(lambda i: body(values, i), 2, schedule=schedule, operation=mpmd.Concat)

    return step


def _mesh(axes: str, kind: str) -> mpmd.MpmdMesh:
    return mpmd.MpmdMesh(make_mesh(2, _KINDS[kind], _AXES[axes]), "stage")


def _assert_same_results(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type), name
        np.testing.assert_allclose(
            np.asarray(x, _comparable(x)), np.asarray(y, _comparable(y)), 2e-5, 1e-6, err_msg=name
        )


def _comparable(x):
    return np.float32 if x.dtype == jnp.bfloat16 else x.dtype


def _check(make_step, axes, kind):
    mesh = _mesh(axes, kind)
    expected = jax.jit(make_step(None))(VALUES)
    step = mpmd.jit(make_step(scheduler.GPipe(2)), mpmd_mesh=mesh)
    there = mpmd.jit(lambda values: values, mpmd_mesh=mesh)(VALUES)
    for values in (VALUES, jax.tree.map(jnp.asarray, VALUES), there):
        _assert_same_results(step(values), expected)


def test_some_operations_give_what_jit_gives():
    _check(lambda _: _step(_SOME), "two_devices", "explicit")


@pytest.mark.slow
@pytest.mark.parametrize("axes", _AXES)
@pytest.mark.parametrize("kind", _KINDS)
def test_all_operations_give_what_jit_gives(axes, kind):
    _check(lambda _: _step(ALL), axes, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_all_operations_give_the_same_in_a_stage(kind):
    _check(lambda schedule: _in_second_stage(ALL, schedule), "two_devices", kind)
