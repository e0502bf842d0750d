"""Casts values; losing one is an error."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from mpmd.errors import ReshardError


@functools.lru_cache(maxsize=64)
def _largest(dtype: np.dtype) -> float | None:
    """Returns from where on values are cut to the largest one of a dtype without infinity; None for other dtypes."""
    if not jnp.issubdtype(dtype, np.floating) or not np.isfinite(np.array(np.inf).astype(dtype)):
        return None
    about = jnp.finfo(dtype)
    most, eps = float(about.max), float(about.eps)
    return most + most / (2 - eps) * eps / 2  # it rounds to the next power of two, which does not exist


def copy_cast(data: np.ndarray, view: np.ndarray, name: str | Callable[[], str]) -> None:
    """Copies values into a view, cast to its dtype. Raises a ReshardError, with `name`, if finite values do not fit."""
    if data.dtype == view.dtype:
        view[...] = data
        return
    with np.errstate(over="ignore"):
        np.copyto(view, data, casting="unsafe")
        is_lost = np.isfinite(data) & ~(
            np.isfinite(view) if (most := _largest(view.dtype)) is None else (-most < data) & (data < most)
        )
    if lost := np.count_nonzero(is_lost):
        name = name if isinstance(name, str) else name()
        raise ReshardError(f"{name}: {lost} values of {data.dtype} are too large for {view.dtype}.")
