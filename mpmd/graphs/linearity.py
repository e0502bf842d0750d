"""In which operands an equation is linear: a table by primitive.

Gradients are summed in other places than where they were written, before linear equations or behind them: over the
devices of a group (`partition/partial_sums.py`), over stages (`partition/accumulators.py`). Both ask this table. JAX
knows the same from its rules of transposing, but names no operands there, and takes `x + 3` for linear in `x`:
`tests/graphs/test_linearity.py` holds the table against them.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpmd import _jax_compat as compat

_ALL = range(1 << 16)

# The operands in all of which together the equation is linear, as a sum is in its summands.
_TOGETHER: dict[str, Sequence[int]] = {
    "add": (0, 1), "add_any": (0, 1), "sub": (0, 1), "dynamic_update_slice": (0, 1), "scatter-add": (0, 2),
    "pad": (0, 1), "complex": (0, 1), "concatenate": _ALL, "stack": _ALL, "select_n": _ALL[1:],
}  # fmt: skip
# The operands in each of which it is linear while the others stay as they are.
_EACH: dict[str, Sequence[int]] = {
    **dict.fromkeys(
        (
            "neg", "reshape", "transpose", "squeeze", "broadcast_in_dim", "reduce_sum", "slice", "dynamic_slice",
            "gather", "copy", "copy_p", "rev", "cumsum", "split", "unstack", "sharding_constraint", "reshard", "div",
            "convert_element_type", "real", "imag", "conj",
        ),
        (0,),
    ),
    **dict.fromkeys(("mul", "dot_general"), (0, 1)),
}  # fmt: skip


def linear_in(eqn: compat.JaxprEqn, position: int) -> list[int]:
    """The operands, that at `position` among them, in all of which together an equation is linear; none if it is not.

    Where one of them is no part of a sum that is moved, it has to be zeros, or be added once.
    """
    name = eqn.primitive.name
    if position in (together := _TOGETHER.get(name, ())):
        found = [i for i in together if i < len(eqn.invars)]
    elif position in _EACH.get(name, ()):
        is_linear = _CONDITIONS.get(name, lambda eqn: True)
        found = [position] if is_linear(eqn) else []
    else:
        return []
    return found if eqn.invars[position].aval.dtype != np.bool_ else []


def _is_inexact(v: compat.Var) -> bool:
    return jax.dtypes.issubdtype(v.aval.dtype, np.inexact)


def _keeps_range(eqn: compat.JaxprEqn) -> bool:
    """Whether a conversion takes terms as it takes their sum: a term may be infinite in a type of smaller range, and
    sums of integers wrap around.
    """
    values = eqn.invars[0], eqn.outvars[0]
    if not all(map(_is_inexact, values)):
        return False
    old, new = (jnp.finfo(v.aval.dtype).maxexp for v in values)
    return new >= old


def _fills_with_zeros(eqn: compat.JaxprEqn) -> bool:
    """Whether what a `gather` gives for indices out of bounds is as good as nothing: 0, or NaN, which all sums are."""
    if eqn.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return True
    value, is_inexact = eqn.params["fill_value"], _is_inexact(eqn.outvars[0])
    return is_inexact if value is None else bool(value == 0 or (is_inexact and np.isnan(value)))


# Of primitives in the table, when they are linear at all.
_CONDITIONS: dict[str, Callable[[compat.JaxprEqn], bool]] = {
    "div": lambda eqn: _is_inexact(eqn.outvars[0]),  # of integers it rounds
    "convert_element_type": _keeps_range,
    "gather": _fills_with_zeros,
}


def is_linear_in(eqn: compat.JaxprEqn, v: compat.Var) -> bool:
    """Whether an equation is linear in a variable that it reads, once or several times."""
    at = [i for i, x in enumerate(eqn.invars) if x is v]
    return set(at).issubset(linear_in(eqn, at[0]))
