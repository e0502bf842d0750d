"""`jax_debug_nans` and `jax_debug_infs` for pipelined steps: an error that names the stage and the microbatch.

JAX checks what a jitted function returns; here every task is one, so the first task that makes a NaN is named.
"""

from collections.abc import Iterable

import jax
import numpy as np

from mpmd import _jax_compat as compat


def are_errors() -> bool:
    """Whether JAX is configured to raise where a NaN or an infinity arises."""
    return jax.config.values["jax_debug_nans"] or jax.config.values["jax_debug_infs"]


def check(arrays: Iterable[jax.Array], what: str) -> None:
    """Raises FloatingPointError if one of the arrays that `what` returned has what JAX is configured to find."""
    for x in arrays:
        if not jax.dtypes.issubdtype(x.dtype, np.inexact):
            continue
        for name, found in (("nan", jax.numpy.isnan), ("inf", jax.numpy.isinf)):
            if jax.config.values[f"jax_debug_{name}s"] and any(found(s.data).any() for s in x.addressable_shards):
                raise error(name, what)


def error(name: str, what: str) -> FloatingPointError:
    """The error for a value (nan, inf) that `what` returned."""
    return FloatingPointError(
        f"invalid value ({name}) in what {what} returned.\n"
        "  2F0 is the forward of stage 2 for microbatch 0, B a backward; under jax.disable_jit() the step runs one"
        " operation at a time, and the first that makes it is named."
    )


def translated(e: Exception, what: str) -> Exception:
    """JAX's internal error for such values as the one for users; another error as it is."""
    return error(str(e.args[-1]), what) if isinstance(e, compat.InternalFloatingPointError) else e
