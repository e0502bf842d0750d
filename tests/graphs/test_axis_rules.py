"""Each primitive, done on pieces of its operands, gives the pieces of what it gives as a whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpmd.cutting.pieces import Rows, cut
from mpmd.graphs import axis_rules
from mpmd.graphs.axis_rules import factors, piece_params

X = np.linspace(-2.0, 2.0, 4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)
S = np.stack([a @ a.T + np.eye(3, dtype=np.float32) for a in X])  # positive definite
N = np.arange(60, dtype=np.uint32).reshape(4, 3, 5)
ORDER = np.argsort(-X, 1)
KEYS = jax.random.split(jax.random.key(0), 4)

CASES = {
    "add": (lax.add, X, X),
    "add with a scalar": (lambda x: lax.add_p.bind(x, np.float32(2)), X),
    "clamp": (lambda x: lax.clamp(-1.0, x, 1.0), X),
    "select_n": (lambda x, y: lax.select_n(x > 0, x, y), X, -X),
    "convert_element_type": (lambda x: lax.convert_element_type(x, jnp.bfloat16), X),
    "integer_pow": (lambda x: x**3, X),
    "erf_inv": (lambda x: lax.erf_inv(x / 3), X),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 4, 3, 6, 5), (1, 2, 4)), X),
    "broadcast of a size of 1": (lambda x: lax.broadcast_in_dim(x[:1], (4, 3, 5), (0, 1, 2)), X),
    "reshape": (lambda x: lax.reshape(x, (4, 15)), X),
    "reshape in front": (lambda x: lax.reshape(x, (2, 2, 3, 5)), X),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), X),
    "squeeze": (lambda x: lax.squeeze(x[:, :1], (1,)), X),
    "reduce_sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(0, 2), out_sharding=None), X),
    "reduce_max": (lambda x: lax.reduce_max_p.bind(x, axes=(1,), out_sharding=None), X),
    "reduce_min": (lambda x: jnp.min(x, 0), X),
    "reduce_prod": (lambda x: jnp.prod(x, 0), X),
    "reduce_and": (lambda x: lax.reduce_and(x > -1, (0, 1)), X),
    "reduce_or": (lambda x: lax.reduce_or(x > 1, (0, 1)), X),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), X),
    "cumsum": (lambda x: lax.cumsum(x, 1), X),
    "cummax": (lambda x: lax.cummax(x, 2, reverse=True), X),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), X, -X),
    "rev": (lambda x: lax.rev(x, (1,)), X),
    "top_k": (lambda x: lax.top_k(x, 2), X),
    "top_k in front": (lambda x: lax.top_k(x, 2, axis=0), X),
    "concatenate": (lambda x, y: lax.concatenate((x, y), 1), X, -X),
    "split": (lambda x: lax.split(x, (1, 4), axis=2), X),
    "stack": (lambda x, y: jnp.stack((x, y), 1), X, -X),
    "unstack": (lambda x: jnp.unstack(x, axis=1), X),
    "derivative of tanh": (lambda x: jax.vjp(jnp.tanh, x)[1](x), X),
    "pad": (lambda x: lax.pad(x, np.float32(7), ((0, 0, 0), (1, 2, 0), (0, 0, 1))), X),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (4, 3, 5)), X),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 1, 2), (4, 2, 2)), X),
    "dynamic_update_slice": (lambda x, y: lax.dynamic_update_slice(x, y, (0, 1, 0)), X, -X[:, :2]),
    "dot_general": (lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,)))), X, -X),
    "dot_general of two matrices": (lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))), X[0], X[1].T),
    "conv_general_dilated": (lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME"), X, X[:2]),
    "convolution of groups": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=3),
        X,
        X[:3, :1],
    ),
    "gather": (lambda x: jnp.take(x, np.array([2, 0]), axis=1), X),
    "gather of a batch": (jax.vmap(lambda x, i: x[i]), X, ORDER[:, :, 0]),
    "gather by indices": (lambda i: jnp.take(X[0, 0], i), np.array([[0, 3], [4, 1], [2, 2]])),
    "iota": (lambda: lax.broadcasted_iota(np.int32, (4, 3), 1),),
    "random_bits": (lambda k: jax.vmap(lambda k: jax.random.bits(k, (3,)))(k), KEYS),
    "random_split": (lambda k: jax.vmap(lambda k: jax.random.split(k, 2))(k), KEYS),
    "random_fold_in": (lambda k: jax.vmap(lambda k: jax.random.fold_in(k, 3))(k), KEYS),
    "random_wrap": (lambda x: jax.random.wrap_key_data(x, impl="threefry2x32"), np.asarray(jax.random.key_data(KEYS))),
    "random_unwrap": (jax.random.key_data, KEYS),
    "cholesky": (lambda a: lax.linalg.cholesky(a, symmetrize_input=False), S),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), S, X),
    "eigh": (lambda a: jnp.abs(lax.linalg.eigh(a)[0]), S),
    "qr": (lambda a: lax.linalg.qr(a, full_matrices=False), S),
    "population_count": (lax.population_count, N),
}


def equations_of(fun, operands):
    """The equations of a function with their operands' and results' values, calls of `jit` inlined."""
    found = []

    def run(jaxpr, consts, args):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda v: v.val if hasattr(v, "val") else values[v]  # noqa: E731
        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if "jaxpr" in eqn.params:
                outs = run(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, ins)
            else:
                outs = eqn.primitive.bind(*ins, **eqn.params)
                outs = outs if eqn.primitive.multiple_results else [outs]
                found.append((eqn, ins, outs))
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    @jax.jit  # one program of all equations
    def values(consts, operands):
        run(closed.jaxpr, consts, operands)
        return [(ins, outs) for _, ins, outs in found]

    closed = jax.make_jaxpr(fun)(*operands)
    return [(eqn, *known) for known, (eqn, *_) in zip(values(closed.consts, operands), found, strict=True)]


def _assert_alike(x, y):
    x, y = (jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in (x, y))
    np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-5, atol=1e-6)


def _rows(eqn, operands, wanted, factor):
    """The two pieces that a factor's axes are cut into; None where they cannot be cut."""
    sizes = [
        x.shape[a] for x, a in zip((*operands, *wanted), (*factor.ins, *factor.outs), strict=True) if a is not None
    ]
    assert len(set(sizes)) == 1, (eqn.primitive.name, factor, sizes)
    return Rows(0, (0, 1, sizes[0])) if sizes[0] > 1 else None


def _on_pieces(eqn, operands, factor, rows):
    """The results that come of the results on pieces."""
    pieces = [
        [x] * 2 if a is None else cut(jnp.asarray(x), rows.on(a)) for x, a in zip(operands, factor.ins, strict=True)
    ]
    made = []
    for k, (start, stop) in enumerate(rows.ranges):
        outs = eqn.primitive.bind(*[p[k] for p in pieces], **piece_params(eqn, factor, stop - start))
        made.append(outs if eqn.primitive.multiple_results else [outs])
    joined = []
    for axis, *parts in zip(factor.outs, *made, strict=True):
        assert axis is not None or factor.combine is not None
        joined.append(functools.reduce(factor.combine, parts) if axis is None else lax.concatenate(parts, axis))
    return joined


@pytest.mark.parametrize("name", CASES)
def test_an_equation_on_pieces_gives_the_pieces_of_its_result(name):
    fun, *operands = CASES[name]
    equations = equations_of(fun, operands)
    cuts = [(i, f, _rows(*equations[i], f)) for i, (eqn, *_) in enumerate(equations) for f in factors(eqn)]
    assert cuts
    cuts = [cut for cut in cuts if cut[2] is not None]

    @jax.jit  # one program of all cuts of all equations
    def on_pieces(operands):
        return [_on_pieces(equations[i][0], operands[i], factor, rows) for i, factor, rows in cuts]

    for (i, *_), found in zip(cuts, on_pieces([ins for _, ins, _ in equations]), strict=True):
        for x, wanted in zip(found, equations[i][2], strict=True):
            _assert_alike(x, wanted)


@pytest.mark.slow
def test_every_rule_is_of_a_primitive_that_a_case_has_or_that_is_elementwise():
    seen = {eqn.primitive.name for fun, *operands in CASES.values() for eqn, _, _ in equations_of(fun, operands)}
    alike = {"cumprod", "cummin", "cumlogsumexp", "reduce_xor", "argmin", "lu", "svd", "schur", "eig", "geqrf"}
    alike |= {"householder_product", *axis_rules._ELEMENTWISE}
    # Of cuDNN, which tests/planning/test_cudnn_attention.py needs.
    alike |= {f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd")}
    assert set(axis_rules._RULES) - seen <= alike


@pytest.mark.parametrize(
    ("fun", "operand"),
    [(lambda x: jnp.cumsum(x, 0), X[:, 0, 0]), (jnp.ravel, X[:, 0].T[:1]), (lambda x: x[::-1], X[:, 0, 0])],
)
def test_an_axis_along_which_rows_depend_on_each_other_has_no_factor(fun, operand):
    eqn = equations_of(fun, [operand])[-1][0]
    assert not any(0 in f.ins and operand.shape[0] > 1 for f in factors(eqn))
