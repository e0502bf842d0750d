"""Integers that follow from literals alone, such as the counter of a stream of keys, become literals themselves."""

import operator
from typing import Any

import jax
import numpy as np

from mpmd import _jax_compat as compat

# How to compute one result from Python numbers. Results that do not fit the type wrap around.
_FOLDS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "max": max,
    "min": min,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "convert_element_type": int,
    "squeeze": int,
    "select_n": lambda which, *cases: cases[which],  # with the two above, JAX's code for indexing with a scalar
}


def folded(eqn: compat.JaxprEqn) -> compat.Literal | None:
    """Returns the result of an equation on integer (or boolean) scalars that are literals, else None."""
    if (fold := _FOLDS.get(eqn.primitive.name)) is None:
        return None
    operands = [integer_of(v) for v in eqn.invars]
    aval = eqn.outvars[0].aval
    if any(x is None for x in operands) or not _is_integer(aval):
        return None
    value: Any = fold(*operands)
    if aval.dtype != np.bool_:
        bits = 8 * aval.dtype.itemsize
        value %= 1 << bits
        if jax.numpy.issubdtype(aval.dtype, np.signedinteger) and value >> (bits - 1):
            value -= 1 << bits
    return compat.Literal(aval.dtype.type(value), aval)


def integer_of(v: compat.Var | compat.Literal) -> int | None:
    """Returns the value of a literal that is an integer (or boolean) scalar, else None."""
    return int(v.val) if isinstance(v, compat.Literal) and _is_integer(v.aval) else None


def _is_integer(aval: compat.Aval) -> bool:
    """Returns whether a type has whole bytes: results of smaller types are not computed."""
    dtype = aval.dtype
    return aval.shape == () and (dtype == np.bool_ or (isinstance(dtype, np.dtype) and dtype.kind in "iu"))
