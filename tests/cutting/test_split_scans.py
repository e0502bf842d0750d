"""A scan over layers becomes a chain of shorter ones between ordinary marks, and computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs.parts import normal

import mpmd
from mpmd import _jax_compat as compat
from mpmd.cutting.scan_residuals import keep_less
from mpmd.cutting.split_scans import split_scans

LAYERS = 6


def _loss(w, bias, x, keys, *, checkpointed, reverse):
    def layer(carry, w, key):
        h, penalty = carry
        noise = jax.random.normal(key, bias.shape)
        carry = jnp.tanh(h @ w + bias + noise), penalty + jnp.sum(h * w[0])
        return mpmd.mark_stage_end(carry)

    layer = jax.checkpoint(layer) if checkpointed else layer

    def body(carry, scanned):
        carry = layer(carry, *scanned)
        return carry, jnp.sum(carry[0])

    (h, penalty), sums = lax.scan(body, (x, 0.0), (w, keys), reverse=reverse, unroll=4)
    return jnp.sum(h**2) + jnp.sum(sums) + penalty


def _arguments():
    keys = jax.random.split(jax.random.key(3), LAYERS)
    return normal(jax.random.key(0), LAYERS, 3, 3), jnp.arange(3.0) / 3, jnp.ones((2, 3)), keys


def _flow(closed):
    """The scans and marks of a jaxpr: lengths of scans, `>` for a forward mark, `<` for a backward one."""
    found = []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "scan":
            assert "mark_stage_end" not in str(eqn.params["jaxpr"])
            found.append(str(eqn.params["length"]))
        elif eqn.primitive.name == "mark_stage_end":
            found.append({"forward": ">", "backward": "<"}[eqn.params["kind"]])
    return " ".join(found)


@pytest.mark.parametrize(
    ("lengths", "flow", "checkpointed", "reverse"),
    [
        pytest.param((6,), "6 6", False, False, marks=pytest.mark.slow),
        pytest.param((1, 2, 3), "1 > 2 > 3 3 < 2 < 1", True, False, marks=pytest.mark.slow),
        pytest.param((1, 2, 3), "1 > 2 > 3 3 < 2 < 1", False, True, marks=pytest.mark.slow),
        pytest.param((3, 3, 0), "3 > 3 > < 3 < 3", False, True, marks=pytest.mark.slow),
    ],
)
def test_a_scan_becomes_shorter_ones_with_marks_between_them(lengths, flow, checkpointed, reverse):
    def step(*args):
        loss = lambda *args: _loss(*args, checkpointed=checkpointed, reverse=reverse)  # noqa: E731
        return jax.value_and_grad(loss, (0, 1, 2))(*args)

    whole = jax.make_jaxpr(step)(*_arguments())
    pieces = split_scans(whole, [lengths])
    assert _flow(pieces) == flow
    args = jax.tree.leaves(_arguments())
    wanted, got = jax.jit(compat.jaxpr_as_fun(whole))(*args), jax.jit(compat.jaxpr_as_fun(pieces))(*args)
    for x, y in zip(wanted, got, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_shared_constant_crosses_no_mark():
    whole = jax.make_jaxpr(jax.grad(lambda *a: _loss(*a, checkpointed=False, reverse=False), 1))(*_arguments())
    marks = [e for e in split_scans(whole, [(2, 2, 2)]).jaxpr.eqns if e.primitive.name == "mark_stage_end"]
    crossing = [[v.aval.shape for v in e.invars] for e in marks if e.params["kind"] == "backward"]
    assert crossing == [[(2, 3), ()], [(2, 3), ()]] or crossing == [[(2, 3)], [(2, 3)]]  # not the bias's (3,)


def test_forward_and_backward_marks_are_tied_and_two_scans_of_one_body_pair_last_to_first():
    w, *_ = _arguments()

    @jax.jit
    def layers(w, h):
        return lax.scan(lambda h, w: (mpmd.mark_stage_end(jnp.tanh(h @ w)), None), h, w)[0]

    def loss(w, v, h):
        return jnp.sum(layers(v, layers(w, h)))

    whole = jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, 2 * w, jnp.ones((2, 3)))
    jaxpr = _inlined(whole)
    pieces = split_scans(jaxpr, [(2, 4), (5, 1)])
    assert _flow(pieces) == "2 > 4 5 > 1 1 < 5 4 < 2"
    ids = [e.params["id"] for e in pieces.jaxpr.eqns if e.primitive.name == "mark_stage_end"]
    assert ids[0] is ids[3] and ids[1] is ids[2] and ids[0] is not ids[1]


def _inlined(closed):
    """Calls of `jit` replaced by what they call."""
    jaxpr = jax.make_jaxpr(lambda *args: _evaluated(closed.jaxpr, closed.consts, args))(*closed.in_avals)
    return jaxpr


def _evaluated(jaxpr, consts, args):
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda v: v.val if isinstance(v, compat.Literal) else values[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            outs = _evaluated(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, operands)
        else:
            outs = eqn.primitive.bind(*operands, **eqn.params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


@pytest.mark.slow
def test_a_scan_keeps_no_value_that_its_backward_can_make_of_others():
    def loss(w, x, key):
        def layer(h, wk):
            y = jnp.tanh(h @ jnp.sin(wk[0]))
            y = jnp.where(jax.random.bernoulli(wk[1], 0.9, y.shape), y * y, 0.0)
            return mpmd.mark_layer_end(h / jnp.sqrt(1 + jnp.mean(h**2, -1, keepdims=True)) + y), None

        return jnp.sum(lax.scan(layer, x, (w, jax.random.split(key, LAYERS)))[0] ** 2)

    args = normal(jax.random.key(0), LAYERS, 64, 64), jnp.ones((8, 64)), jax.random.key(1)
    whole = jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    less = keep_less(whole)

    def kept(closed):
        forward = next(e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
        stacks = forward.outvars[compat.scan_sizes(forward)[1] :]
        return sum(v.aval.size * v.aval.dtype.itemsize for v in stacks) / (LAYERS * 8 * 64)

    # Of each element: the layer's input, what `tanh` gives, and whether it is dropped; and little for each row.
    assert kept(less) < 4 + 4 + 1 + 0.5 < 16 < kept(whole)
    for x, y in zip(*(jax.jit(compat.jaxpr_as_fun(c))(*args) for c in (whole, less)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)


def _scanned(w, x):
    x, _ = lax.scan(lambda x, w: (mpmd.mark_layer_end(jnp.tanh(x @ w)), None), x, w)
    return (x**2).mean()


@pytest.mark.slow
def test_what_is_done_to_a_cut_stack_in_another_order_of_its_elements_or_keys_is_as_written():
    """Reshapes in Fortran's order; random numbers of a batch of keys, which of some kinds depend on the whole batch."""

    def step(w, xs):
        g = mpmd.treduce(lambda x: jax.grad(_scanned)(w, x), xs, schedule="1f1b")
        noise = {
            impl: g
            + jax.vmap(lambda k: jax.random.normal(k, (8, 8)))(jax.random.split(jax.random.key(0, impl=impl), 4))
            for impl in ("threefry2x32", "rbg", "unsafe_rbg")
        }
        return g.reshape(4, 64, order="F"), g.ravel(order="F"), g.reshape(4, 64), noise

    mesh = mpmd.MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    args = normal(jax.random.key(0), 4, 8, 8), normal(jax.random.key(1), 4, 2, 8)
    got, want = mpmd.jit(step, mpmd_mesh=mesh)(*args), jax.jit(step)(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), got, want)
