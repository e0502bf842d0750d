"""The operands in which an equation is linear: a table by primitive.

Passes move sums of gradients to other places, before or behind linear equations: sums over the devices of a group
(`partition/partial_sums.py`) and over stages (`partition/accumulators.py`). Both use this table. JAX has the same facts
in its transpose rules, but these name no operands, and take `x + 3` for linear in `x`:
`tests/graphs/test_linearity.py` compares the table with them.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpmd import _jax_compat as compat

_ALL = range(1 << 16)

# The operands in which the equation is jointly linear, as a sum is in its summands.
_TOGETHER: dict[str, Sequence[int]] = {
    "add": (0, 1), "add_any": (0, 1), "sub": (0, 1), "dynamic_update_slice": (0, 1), "scatter-add": (0, 2),
    "pad": (0, 1), "complex": (0, 1), "concatenate": _ALL, "stack": _ALL, "select_n": _ALL[1:],
}  # fmt: skip
# The operands in each of which the equation is linear while the others are fixed.
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
    """Returns the operands, including the one at `position`, in which an equation is jointly linear; none if it is not.

    If one of them is not part of a sum that is moved, it has to be zeros, or be added only once.
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
    """Returns whether a conversion of terms equals a conversion of their sum. A term may be infinite in a type of
    smaller range, and sums of integers wrap around.
    """
    values = eqn.invars[0], eqn.outvars[0]
    if not all(map(_is_inexact, values)):
        return False
    old, new = (jnp.finfo(v.aval.dtype).maxexp for v in values)
    return new >= old


def _fills_with_zeros(eqn: compat.JaxprEqn) -> bool:
    """Returns whether out-of-bounds indices of a `gather` yield 0, or NaN, which makes every sum NaN."""
    if eqn.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return True
    value, is_inexact = eqn.params["fill_value"], _is_inexact(eqn.outvars[0])
    return is_inexact if value is None else bool(value == 0 or (is_inexact and np.isnan(value)))


# When a primitive of the table is linear at all.
_CONDITIONS: dict[str, Callable[[compat.JaxprEqn], bool]] = {
    "div": lambda eqn: _is_inexact(eqn.outvars[0]),  # integer division rounds
    "convert_element_type": _keeps_range,
    "gather": _fills_with_zeros,
}


def is_linear_in(eqn: compat.JaxprEqn, v: compat.Var) -> bool:
    """Returns whether an equation is linear in a variable that it reads, once or several times."""
    at = [i for i, x in enumerate(eqn.invars) if x is v]
    return set(at).issubset(linear_in(eqn, at[0]))
