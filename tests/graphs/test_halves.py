"""Equations that hold others, divided into what is urgent and the rest: the same numbers, no matrix product twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from programs.parts import normal

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.halves import Halves, KeptBytes, halves, recomputation
from mpmd.tracing.inline import inline

WIDTH = 8


def _layer(w, x):
    return x + jnp.tanh(x @ w["in"]) @ w["out"]


def _weights(*stack):
    keys = jax.random.split(jax.random.key(0), 2)
    return {n: normal(k, *stack, WIDTH, WIDTH) for n, k in zip(("in", "out"), keys, strict=True)}


def _scanned(layer):
    return lambda w, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def _shared(w, x):  # the gradient of the constant is a sum that the backward carries
    return jax.lax.scan(lambda x, _: (_layer(w, x), None), x, None, length=3)[0]


def _branch(w, x):
    return jax.lax.cond(x[0, 0] > 0, _layer, lambda w, x: 2 * x, w, x)


def _both(w, x):  # of the branches, each keeps something else
    def other(w, x):
        return jnp.sin(x) @ w["in"]

    return jax.lax.cond(x[0, 0] > 0, _layer, other, w, x)


def _mapped(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = PartitionSpec("data")
    return jax.shard_map(_layer, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows)(w, x)


def _placed(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(_layer, out_shardings=rows)(w, x)


_saving = jax.checkpoint(_layer, policy=jax.checkpoint_policies.dots_saveable)
_CASES = {
    "checkpoint": (jax.checkpoint(_layer), ()),
    "checkpoint that saves products": (_saving, ()),
    "scan": (_scanned(_layer), (3,)),
    "scan of checkpoints": (_scanned(jax.checkpoint(_layer)), (3,)),
    "checkpoint of a scan": (jax.checkpoint(_scanned(_layer)), (3,)),
    "scan of scans": (_scanned(_scanned(jax.checkpoint(_layer))), (2, 3)),
    "weights in a carried sum": (_shared, ()),
    "cond": (_branch, ()),
    "cond in a checkpoint": (jax.checkpoint(_both), ()),
    "scan of conds": (_scanned(_both), (3,)),
    "shard_map": (_mapped, ()),
    "scan of shard_maps": (_scanned(jax.checkpoint(_mapped)), (3,)),
    "jit with shardings": (_placed, ()),
}
_SLOW = ("scan", "scan of scans", "scan of checkpoints", "scan of conds", "scan of shard_maps")


def _products(eqns, times=1):
    """How many matrix products run; of branches, all count."""
    found = 0
    for e in eqns:
        inner = times * e.params["length"] if e.primitive.name == "scan" else times
        found += times * (e.primitive.name == "dot_general")
        found += sum(_products(j.eqns, inner) for j in compat.jaxprs_in(e.params))
    return found


def _backward(fun, *args):
    """The flat backward of a sum of `fun`, whose results are the gradients."""
    closed = jax.make_jaxpr(jax.grad(lambda *xs: jnp.sum(jnp.sin(fun(*xs))), argnums=(0, 1)))(*args)
    return compat.ClosedJaxpr(inline(closed.jaxpr), closed.consts)


def _divide(closed):
    """As a split backward does, with the gradient of `x` alone urgent; the equations of both halves."""
    needed, first, rest, pairs = {closed.jaxpr.outvars[-1]}, [], [], []
    for eqn in reversed(closed.jaxpr.eqns):
        soon = [v for v in eqn.outvars if v in needed]
        pair = halves(eqn, soon, KeptBytes({})) if soon and compat.is_transposed(eqn) else None
        pairs += [pair] if pair else []
        (first if soon else rest).append(pair.first if pair else eqn)
        rest += [pair.rest] if pair else []
        needed.update(equations.variables(first[-1].invars) if soon else ())
    return first[::-1], rest[::-1], pairs


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _CASES])
def test_both_halves_of_a_backward_give_what_it_gives_and_do_no_matrix_product_twice(name):
    fun, stack = _CASES[name]
    args = _weights(*stack), normal(jax.random.key(1), 4, WIDTH)
    closed = _backward(fun, *args)
    first, rest, pairs = _divide(closed)
    assert pairs and all(isinstance(p, Halves) for p in pairs)
    assert _products([*first, *rest]) == _products(closed.jaxpr.eqns)
    assert _products(rest) == _products(closed.jaxpr.eqns) - _products(first) > 0
    divided = compat.new_jaxpr(closed.jaxpr, eqns=[*first, *rest])
    jax.tree.map(
        np.testing.assert_array_equal, _run(compat.ClosedJaxpr(divided, closed.consts), args), _run(closed, args)
    )


def _run(closed, args):
    """Its results, by XLA without the optimisations that round otherwise where other operations are fused."""
    return jax.jit(compat.jaxpr_as_fun(closed), compiler_options={"xla_backend_optimization_level": 0})(
        *jax.tree.leaves(args)
    )


_AGAIN = ("checkpoint", "scan of checkpoints", "checkpoint of a scan", "scan of scans", "scan of shard_maps")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _AGAIN])
def test_what_is_computed_again_needs_no_gradient_and_is_divided_with_the_same_numbers(name):
    fun, stack = _CASES[name]
    args = _weights(*stack), normal(jax.random.key(1), 4, WIDTH)
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda ct, *xs: jax.vjp(fun, *jax.tree.unflatten(tree, xs))[1](ct))(args[1], *leaves)
    closed = compat.ClosedJaxpr(inline(closed.jaxpr), closed.consts)
    late, first, rest = {closed.jaxpr.invars[0]}, [], []
    for eqn in closed.jaxpr.eqns:
        reads = late.intersection(equations.variables(eqn.invars))
        if pair := recomputation(eqn, reads, KeptBytes({})) if reads else None:
            first.append(pair.first)
        (rest if reads else first).append(pair.rest if pair else eqn)
        late.update(rest[-1].outvars if reads else ())
    assert not late.intersection(equations.free_variables(first))
    assert 0 < _products(rest) == _products(closed.jaxpr.eqns) - _products(first)
    again = [e for e in first if compat.is_transposed(e) or e.primitive.name == compat.CHECKPOINT]
    assert _products(again) > 0
    divided = compat.ClosedJaxpr(compat.new_jaxpr(closed.jaxpr, eqns=[*first, *rest]), closed.consts)
    with jax.disable_jit():  # operation by operation: XLA rounds otherwise where it fuses other operations
        found, wanted = (compat.jaxpr_as_fun(c)(args[1], *leaves) for c in (divided, closed))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
