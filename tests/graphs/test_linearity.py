"""The table of linear operands agrees with what primitives compute, and leaves out none that JAX transposes unseen."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad
from test_axis_rules import CASES, X, equations_of

from mpmd.graphs import linearity
from mpmd.graphs.linearity import linear_in

MORE = {
    "sub": (lax.sub, X, -X),
    "mul": (lax.mul, X, X + 1),
    "div": (lax.div, X, X + 3),
    "neg": (lax.neg, X),
    "copy": (jnp.copy, X),
    "complex": (lambda x, y: lax.real(lax.conj(lax.complex(x, y))), X, -X),
    "imag": (lambda x: lax.imag(lax.complex(x, 2 * x)), X),
    "select_n of three": (
        lambda i, *xs: lax.select_n(i, *xs),
        np.arange(60, dtype=np.int32).reshape(4, 3, 5) % 3,
        X,
        X,
        X,
    ),
    "gather that fills with 1": (lambda x: jnp.take(x, np.array([0, 9]), axis=0, mode="fill", fill_value=1), X),
    "gather that fills with 0": (lambda x: jnp.take(x, np.array([0, 9]), axis=0, mode="fill", fill_value=0), X),
    "scatter-add": (lambda x, y: x.at[np.array([2, 0])].add(y), X, X[:2]),
    "scatter of updates": (lambda x, y: x.at[np.array([2, 0])].set(y), X, X[:2]),
    "pad with a value": (lambda x, y: lax.pad(x, y, ((1, 0, 0), (0, 0, 1), (0, 2, 0))), X, np.float32(2)),
    "a copy of a gradient": (lambda x: lax.copy_p.bind(x), X),
    "sum of gradients": (lambda x, y: ad.add_jaxvals_p.bind(x, y), X, -X),
}
# Linear, and not in the table: few gradients go through them, and parts of a convolution are no batch to XLA.
UNLISTED = {"conv_general_dilated", "triangular_solve"}


def is_additive(eqn, operands, positions):
    """Whether the equation adds up in these operands, the others as they are."""
    rng = np.random.default_rng(0)

    def results(values):
        ins = [values.get(i, x) for i, x in enumerate(operands)]
        return jax.tree.leaves(eqn.primitive.bind(*map(jnp.asarray, ins), **eqn.params))

    a, b = ({i: rng.normal(size=np.shape(operands[i])).astype(operands[i].dtype) for i in positions} for _ in range(2))
    sums = zip(results(a), results(b), results({i: a[i] + b[i] for i in positions}), strict=True)
    return all(np.allclose(np.asarray(x + y, z.dtype), z, atol=1e-4) for x, y, z in sums)


def _mark(name):
    is_listed = name in MORE or name.split()[0] in {*linearity._TOGETHER, *linearity._EACH}
    return name if is_listed else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", map(_mark, [*CASES, *MORE]))
def test_an_equation_is_linear_in_what_the_table_says_and_in_nothing_else(name):
    fun, *operands = (CASES | MORE)[name]
    for eqn, values, _ in equations_of(fun, operands):
        for position, x in enumerate(values):
            if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact) or eqn.primitive.name in UNLISTED:
                continue
            together = linear_in(eqn, position)
            rounds = eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16
            assert rounds or is_additive(eqn, values, together or [position]) == bool(together), eqn


def test_integers_and_masks_are_no_sums_where_a_result_rounds():
    (half, *_), (whole, *_), (mask, *_) = (
        equations_of(fun, [x])[-1]
        for fun, x in [
            (lambda x: lax.div(x, np.int32(2)), np.arange(4, dtype=np.int32)),
            (lambda x: lax.convert_element_type(x, np.int32), X),
            (lambda x: lax.convert_element_type(x, np.float32), X > 0),
        ]
    )
    assert not linear_in(half, 0) and not linear_in(whole, 0) and not linear_in(mask, 0)


# What JAX transposes, and no gradient goes through on its way to a sum: collectives, calls, references, callbacks; or
# what is linear once its inner jaxpr, its stride or its group is looked at.
LEFT = """
all_gather all_gather_invariant all_gather_reduced all_to_all box_get box_set composite custom_lin custom_linear_solve
dce_sink debug_callback debug_print device_put ffi_call fft from_edtype io_callback layout_constraint linear_call
log_extend log_read new_box new_log optimization_barrier pbroadcast pbroadcast_dynamic polynomial
ppermute preduced psum psum_invariant pure_callback pvary ragged_all_to_all ragged_dot_general reduce_precision
reduce_scatter reduce_window_sum reduced_vary_cast reduced_vary_cast_p remat_opt scatter scatter-mul scatter-sub
select_and_gather_add select_and_scatter_add shard_map stage tie tile to_edtype tridiagonal_solve unreduced_psum
unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p while with_memory_space_constraint
""".split()


def test_what_jax_transposes_is_in_the_table_or_left_out_on_purpose():
    program = "import jax; from jax.interpreters import ad; print(*(p.name for p in ad.primitive_transposes))"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"add", "mul"} <= set(names) <= {*linearity._TOGETHER, *linearity._EACH, *UNLISTED, *LEFT}


@pytest.mark.parametrize(
    "old, new, is_linear",
    [
        (jnp.float32, jnp.bfloat16, True), (jnp.bfloat16, jnp.float32, True), (jnp.float16, jnp.complex64, True),
        (jnp.float32, jnp.float16, False), (jnp.bfloat16, jnp.float8_e5m2, False), (jnp.int8, jnp.float32, False),
        (jnp.float32, jnp.int32, False), (jnp.int8, jnp.int32, False),
    ],
)  # fmt: skip
def test_a_conversion_is_linear_where_no_term_is_larger_than_the_type(old, new, is_linear):
    (eqn,) = jax.make_jaxpr(lambda x: lax.convert_element_type(x, new))(jnp.zeros(3, old)).eqns
    assert linear_in(eqn, 0) == ([0] if is_linear else [])
