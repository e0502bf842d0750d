"""Every operation of `jax.numpy` and `jax.lax` that takes arrays: as `jax.jit` has it, on both kinds of axes.

All of them stand in one step, so that there is one program to compile; what an operation gets are arguments of the
step as they came, values that were computed there, or some of each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from programs.operations import ALL, VALUES, Operation
from programs.pipelines import make_mesh
from samples import slow_first

import mpmd
import scheduler

_SOME = ALL[::32]
_AXES = {"one_device": (), "two_devices": ("data",)}
_KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def _computed(x):
    """The same value, as the result of an operation."""
    return lax.select(x == x, x, x)


def _applied(operation: Operation, *arrays):
    try:
        return operation.fun(*arrays)
    except Exception as e:
        e.add_note(f"in {operation}")
        raise


def _ways(operation: Operation, given, computed):
    """Its arguments: those of the step, and these beside values that were computed."""
    yield [given[v] for v in operation.values]
    if len(operation.values) > 1:
        first, *rest = operation.values
        yield [computed[first], *(given[v] for v in rest)]
        yield [given[first], *(computed[v] for v in rest)]


def _one_way(operations, given, computed):
    """What each operation gives in one of the ways, in turn."""
    results = {}
    for i, op in enumerate(operations):
        ways = list(_ways(op, given, computed))
        results[op.name] = _applied(op, *ways[i % len(ways)])
    return results


def _step(operations):
    def step(values):
        return _one_way(operations, values, jax.tree.map(_computed, values))

    return step


def _every_way(values):
    for op in ALL:
        for arrays in _ways(op, values, jax.tree.map(_computed, values)):
            _applied(op, *arrays)


def _in_second_stage(operations, schedule):
    """The operations on what the first of two stages hands on."""

    def step(values):
        def body(i):
            return _one_way(operations, values, mpmd.mark_stage_end(jax.tree.map(_computed, values)))

        return mpmd.treduce_i(body, 2, schedule=schedule, operation=mpmd.Concat)

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


@pytest.mark.parametrize(("axes", "kind"), slow_first(("two_devices", "explicit"), ("one_device", "auto")))
def test_all_operations_take_arguments_beside_computed_values(axes, kind):
    mesh = _mesh(axes, kind)
    mpmd.jit(_every_way, mpmd_mesh=mesh).trace(VALUES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "kind", "start", "every"), [("one_device", "explicit", 1, 2), ("two_devices", "auto", 0, 4)], ids=str
)
def test_all_operations_give_what_jit_gives(axes, kind, start, every):
    """Each operation here or in the next test: XLA takes minutes for all of them."""
    _check(lambda _: _step(ALL[start::every]), axes, kind)


@pytest.mark.slow
def test_operations_give_the_same_in_a_stage():
    _check(lambda schedule: _in_second_stage(ALL[2::4], schedule), "two_devices", "explicit")


# --- what jax.jit refuses ---

_REFUSED = {
    "shapes": lambda x, i: x + x[:3, :3],
    "dtypes": lambda x, i: lax.add(x, i),
    "dtypes of an update": lambda x, i: lax.dynamic_update_slice(x, i[None], (0, 0)),
    "ranks of an update": lambda x, i: lax.dynamic_update_slice(x, x[0], (0, 0)),
    "contraction": lambda x, i: x @ x[:3],
    "reshape": lambda x, i: x.reshape(3, 5),
    "concatenation": lambda x, i: jnp.concatenate([x, x[:, :2]], 0),
    "branches": lambda x, i: lax.cond(i[0] > 0, lambda: x, lambda: x[0]),
    "carry": lambda x, i: lax.scan(lambda c, y: (c[:2], y), x, x),
    "carry of a while": lambda x, i: lax.while_loop(lambda c: c.sum() > 0, lambda c: c.astype(jnp.int32), x),
    "size that is not known": lambda x, i: jnp.nonzero(x),
    "mask as an index": lambda x, i: x[x > 0],
    "value": lambda x, i: x if x.sum() > 0 else -x,
    "index of a list": lambda x, i: [1, 2, 3, 4][i[0]],
    "range": lambda x, i: sum(range(i[0])),
    "numpy": lambda x, i: np.sin(x),
    "permutation": lambda x, i: jnp.transpose(x, (0, 0)),
    "gradient of a matrix": lambda x, i: jax.grad(lambda y: y * 2)(x),
    "gradient of integers": lambda x, i: jax.grad(lambda y: (y * 2).sum())(i),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", _REFUSED)
def test_what_jit_refuses_is_refused(name, kind):
    args = VALUES["matrix"], VALUES["indices"]
    with pytest.raises((TypeError, ValueError, IndexError)):
        jax.jit(_REFUSED[name]).trace(*args)
    with pytest.raises((TypeError, ValueError, IndexError)):
        mpmd.jit(_REFUSED[name], mpmd_mesh=_mesh("two_devices", kind)).trace(*args)
