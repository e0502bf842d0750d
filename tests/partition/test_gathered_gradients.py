"""Work in a loop that needs the gradients of all stages: its warning, and the two loops that the page advises."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs.parts import normal

import mpmd

W, MICROBATCHES, EXAMPLES = 12, 4, 2


def model(ws, x):
    x = mpmd.mark_stage_end(jnp.tanh(x @ ws[0]))
    return ((x @ ws[1]) ** 2).mean()


def norm(grads):
    return jnp.sqrt(sum((g**2).sum() for g in grads))


def clipped(ws, x):
    grads = jax.grad(model)(ws, x)
    return [g / jnp.maximum(norm(grads), 1.0) for g in grads]


def per_example(ws, x):
    grads = jax.vmap(lambda x: jax.grad(model)(ws, x[None]))(x)
    scale = 1 / jnp.maximum(jax.vmap(norm)(grads), 1.0)
    return [jnp.tensordot(scale, g, 1) for g in grads]


def finite(ws, x):
    grads = jax.grad(model)(ws, x)
    return [jnp.where(jnp.isfinite(norm(grads)), g, 0) for g in grads]


def projected(ws, x):
    """Of two losses, the sum of their gradients without what one takes back of the other."""

    def losses(ws):
        y = mpmd.mark_stage_end(jnp.tanh(x @ ws[0])) @ ws[1]
        return jnp.stack([(y**2).mean(), jnp.abs(y).mean()])

    _, back = jax.vjp(losses, ws)
    (a,), (b,) = back(jnp.array([1.0, 0.0])), back(jnp.array([0.0, 1.0]))
    overlap = sum(jnp.vdot(p, q) for p, q in zip(a, b, strict=True)) / norm(a) ** 2
    return [p + q - jnp.minimum(overlap, 0.0) * p for p, q in zip(a, b, strict=True)]


def per_stage(ws, x):
    return [g / jnp.maximum(norm([g]), 1.0) for g in jax.grad(model)(ws, x)]


def one_loop(fun, schedule):
    def step(ws, xs):
        return mpmd.treduce(lambda x: fun(ws, x), xs, schedule=schedule)

    return step


def two_loops(ws, xs):
    norms = mpmd.treduce(
        lambda x: norm(jax.grad(model)(ws, x))[None], xs, schedule="1f1b", operation=mpmd.Concat
    ).reshape(-1)
    batch = (xs, 1 / jnp.maximum(norms, 1.0))
    return mpmd.treduce(lambda b: jax.grad(lambda ws: b[1] * model(ws, b[0]))(ws), batch, schedule="1f1b")


@pytest.fixture(scope="module")
def arguments():
    ws = list(2 * normal(jax.random.key(0), 2, W, W))
    return ws, normal(jax.random.key(1), MICROBATCHES, EXAMPLES, W)


def compiled(step, arguments):
    """The step, and the warnings of its compilation, which `explain()` repeats."""
    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # what the collector says of other tests
        warnings.simplefilter("always", UserWarning)
        found = mpmd.jit(step, mpmd_mesh=mesh).lower(*arguments).compile()
    said = [str(w.message).removeprefix("step: ") for w in caught if w.filename == __file__]
    assert all(f"warning: {text}" in found.explain() for text in said)
    assert found.explain().count("whole gradients") == len(said) == len(caught)
    return found, said


@pytest.mark.parametrize(
    ("fun", "schedule", "nbytes", "line"),
    [
        (clipped, "1f1b", "576 B", "div reads it"),
        (clipped, "zb-h1", "576 B", "div reads it"),
        (finite, "1f1b", "576 B", "select_n reads it"),
        pytest.param(per_example, "1f1b", "1.15 KB", "dot_general reads it", marks=pytest.mark.slow),
        pytest.param(projected, "1f1b", "576 B", "mul reads it", marks=pytest.mark.slow),
    ],
)
def test_whole_gradients_that_go_to_one_stage_in_each_microbatch_are_warned_of(arguments, fun, schedule, nbytes, line):
    _, (warning,) = compiled(one_loop(fun, schedule), arguments)
    first, *_ = warning.splitlines()
    start = f"in each microbatch {nbytes} of whole gradients go to stage 0: {line} at {__file__}:"
    assert first.startswith(start) and fun.__name__ in first


@pytest.mark.slow
def test_gradients_of_the_shape_of_activations_are_told_from_them(arguments):
    ws, _ = arguments
    square = ws, jnp.ones((MICROBATCHES, W, W))
    assert len(compiled(one_loop(clipped, "1f1b"), square)[1]) == 1
    assert not compiled(one_loop(per_stage, "1f1b"), square)[1]


@pytest.mark.slow
def test_two_loops_clip_each_microbatch_alike_and_send_no_whole_gradient(arguments):
    step, warnings = compiled(two_loops, arguments)
    assert not warnings
    assert not compiled(one_loop(per_stage, "1f1b"), arguments)[1]
    ws, xs = arguments
    expected = [sum(g) for g in zip(*(clipped(ws, x) for x in xs), strict=True)]
    for found, want in zip(step(ws, xs), expected, strict=True):
        np.testing.assert_allclose(jax.device_get(found), want, rtol=2e-5, atol=1e-6)
