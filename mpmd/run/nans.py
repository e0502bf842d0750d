"""Makes `jax_debug_nans` and `jax_debug_infs` name the stage and the microbatch of a pipelined step.

JAX checks what a jitted function returns; here every task is one, so the first task that makes a NaN is named.
"""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from mpmd import _jax_compat as compat


def are_errors() -> bool:
    """Returns whether JAX is configured to raise where a NaN or an infinity arises."""
    return compat.setting("jax_debug_nans") or compat.setting("jax_debug_infs")


def checked(act: Callable, text: str, looks_at_results: bool) -> Callable:
    """Wraps an instruction to raise FloatingPointError, with its name, for the values that JAX is configured to find.

    Args:
      looks_at_results: whether to check the results, as for computations; else JAX's own checks are the only ones.
    """

    def run(*args):
        try:
            results = act(*args)
        except compat.InternalFloatingPointError as e:
            raise _error(str(e.args[-1]), text) from None
        if looks_at_results and args:  # programs without inputs start accumulators, perhaps at infinity
            _check(results, text)
        return results

    return run


def _check(arrays: Iterable[jax.Array], text: str) -> None:
    for x in arrays:
        if not jax.dtypes.issubdtype(x.dtype, np.inexact):
            continue
        for name, found in (("nan", jax.numpy.isnan), ("inf", jax.numpy.isinf)):
            if compat.setting(f"jax_debug_{name}s") and any(found(s.data).any() for s in x.addressable_shards):
                raise _error(name, text)


def _error(name: str, text: str) -> FloatingPointError:
    return FloatingPointError(
        f"invalid value ({name}) in what {text} returned.\n"
        "  2F0 is the forward of stage 2 for microbatch 0, B a backward; under jax.disable_jit() the step runs one"
        " operation at a time, and the first that makes it is named."
    )
