"""Devices of a group that compute the same: a warning at compile time, and a line of `explain()`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpmd

WIDTH = 64
WEIGHTS = [np.ones((WIDTH, WIDTH), np.float32)] * 2
MICROBATCHES, ROWS = np.ones((4, WIDTH, WIDTH), np.float32), np.ones((512, WIDTH), np.float32)
WITH_LABELS = (MICROBATCHES, MICROBATCHES)
TWO, THREE = {"stage": 2, "data": 2}, {"stage": 2, "data": 2, "model": 2}
ONE_DEVICE = {"stage": 2, "data": 1}
ROWS_DIVIDED, COLUMNS_DIVIDED = (None, P(None, "data")), ([P(None, "data")] * 2, None)


def plain(w, x):
    return x @ w


def constrained(w, x):
    return jax.lax.with_sharding_constraint(x @ w, P("data"))


def resharded(w, x):
    return jax.reshard(x, P("data")) @ w


def manual(w, x):
    return jax.shard_map(plain, in_specs=(P(), P("data")), out_specs=P("data"))(w, x)


def by_auto_axes(w, x):
    return jax.sharding.auto_axes(plain, out_sharding=P("data", None))(w, x)


def said(axes, kind, in_shardings=None, product=plain, batch=MICROBATCHES):
    """The warnings of a step of two layers while it is compiled, and the lines of `explain()` on the same."""
    mesh = mpmd.MpmdMesh(jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes)), "stage")

    def loss(ws, m):
        x, label = m if isinstance(m, tuple) else (m, 0)
        x = mpmd.mark_stage_end(jnp.tanh(product(ws[0], x)))
        predicted = jnp.tanh(product(ws[1], x))
        return jnp.mean((predicted - label) ** 2), predicted

    def step(ws, xs):
        if not isinstance(xs, tuple) and xs.ndim == 2:
            return loss(ws, xs)
        grad = jax.value_and_grad(loss, has_aux=True)
        reduced = (mpmd.Add, mpmd.Concat), mpmd.Add
        return mpmd.treduce(lambda m: grad(ws, m), xs, schedule="1f1b", operation=reduced)

    lowered = mpmd.jit(step, mpmd_mesh=mesh, in_shardings=in_shardings).lower(WEIGHTS, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = lowered.compile()
    assert all(w.filename == __file__ for w in caught)
    lines = [line for line in compiled.explain().splitlines() if " compute the same" in line]
    return [str(w.message) for w in caught], lines


WRITE = (
    "mpmd.jit(..., in_shardings=(None, {})), or the parameters; else leave the devices out (docs/inside-a-group.md)."
)


@pytest.mark.parametrize(
    ("kind", "axes", "in_shardings", "batch", "who", "axis", "spec"),
    [
        (  # divided along the microbatches, of which each device takes the whole one after the other
            AxisType.Auto, TWO, (None, P("data")), WITH_LABELS,
            "the 2 devices of each group", "axis 'data'", "P(None, 'data')",
        ),
        (AxisType.Auto, TWO, None, MICROBATCHES, "the 2 devices of each group", "axis 'data'", "P(None, 'data')"),
        (AxisType.Explicit, TWO, None, ROWS, "the 2 devices of each group", "axis 'data'", "P('data')"),
        (
            AxisType.Explicit, THREE, None, MICROBATCHES,
            "the 4 devices of each group", "axes 'data' and 'model'", "P(None, ('data', 'model'))",
        ),
        (
            AxisType.Auto, THREE, ROWS_DIVIDED, MICROBATCHES,
            "of the 4 devices of each group, always 2", "axis 'model'", "P(None, 'model')",
        ),
    ],
)  # fmt: skip
def test_devices_that_compute_the_same_are_told_once_and_in_explain(kind, axes, in_shardings, batch, who, axis, spec):
    text = (
        f"{who} compute the same: most matrix products are not divided along mesh {axis}. Divide the rows of the batch,"
        f" {WRITE.format(spec)}"
    )
    assert said(axes, kind, in_shardings, batch=batch) == ([f"step: {text}"], [f"warning: {text}"])


_slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "axes", "in_shardings", "product", "batch"),
    [
        (AxisType.Auto, TWO, ROWS_DIVIDED, plain, MICROBATCHES),
        _slow(AxisType.Auto, TWO, ROWS_DIVIDED, plain, WITH_LABELS),
        _slow(AxisType.Auto, TWO, ([P("data")] * 2, P(None, "data")), plain, MICROBATCHES),  # FSDP
        (AxisType.Auto, TWO, COLUMNS_DIVIDED, plain, ROWS),
        (AxisType.Auto, TWO, None, constrained, ROWS),
        (AxisType.Auto, TWO, None, manual, ROWS),
        (AxisType.Auto, ONE_DEVICE, None, plain, ROWS),
        (AxisType.Auto, TWO, None, plain, ROWS[:8]),  # too little to be worth a word
        _slow(AxisType.Explicit, TWO, ROWS_DIVIDED, plain, MICROBATCHES),
        (AxisType.Explicit, TWO, None, resharded, ROWS),
        (AxisType.Explicit, TWO, None, by_auto_axes, ROWS),
    ],
)
def test_nothing_is_said_where_the_devices_of_a_group_divide_the_work(kind, axes, in_shardings, product, batch):
    assert said(axes, kind, in_shardings, product, batch) == ([], [])
