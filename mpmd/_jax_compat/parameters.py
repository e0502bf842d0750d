"""The only walk over the parameters of equations: finds and replaces jaxprs, types and meshes, wherever they are."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpmd._jax_compat.jaxprs import PLAIN, ClosedJaxpr, Jaxpr, JaxprEqn

_OURS = ("mpmd", "scheduler")  # this project's objects in equations hold no jaxpr, and may be long


def opened(x: Any) -> Sequence[Any] | None:
    """Returns the contents of a tuple, list, named tuple, mapping or dataclass; None for any other object.

    `custom_linear_solve` keeps its jaxprs in a named tuple, Pallas the jaxprs of its index maps in dataclasses. An
    object that can be called is never opened: it may be the user's (a callback), and have a state of its own.
    """
    kind = _kind(type(x))
    if kind is None:
        return None
    if kind is Mapping:
        return list(x.values())
    return x if kind is tuple else [getattr(x, name) for name in kind if hasattr(x, name)]


def leaves(x: object) -> Iterator[object]:
    """Yields everything in a parameter that holds nothing else, except plain values."""
    if type(x) in PLAIN:
        return
    parts = opened(x)
    if parts is None:
        yield x
    else:
        for part in parts:
            if type(part) not in PLAIN:
                yield from leaves(part)


def mapped(x: object, change: Callable[[object], object]) -> object:
    """Returns a parameter with `change(y)` for each of its leaves `y`; the same object if nothing changes."""
    if type(x) in PLAIN:
        return x
    parts = opened(x)
    if parts is None:
        return change(x)
    new = [mapped(part, change) for part in parts]
    return x if all(a is b for a, b in zip(parts, new, strict=True)) else _with_parts(x, new)


def jaxprs_in(params: Mapping[str, object]) -> Iterator[Jaxpr]:
    """Returns the jaxprs among an equation's parameters."""
    for value in params.values():
        for x in () if type(value) in PLAIN else leaves(value):
            if isinstance(x, ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, Jaxpr):
                yield x


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr, each followed by the equations inside it, however deep."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from equations_inside(eqn)


def equations_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields the equations inside another one, however deep."""
    for jaxpr in jaxprs_in(eqn.params):
        yield from all_equations(jaxpr)


def kernel_grid(params: Mapping[str, Any]) -> tuple[int, tuple[float, float] | None]:
    """Returns the steps of a Pallas kernel's grid, as far as they are known, and the operations and bytes of the whole
    kernel if its author has stated them (`pl.CostEstimate`).
    """
    grid = getattr(params.get("grid_mapping"), "grid", ())
    stated = params.get("cost_estimate")
    steps = math.prod(n for n in grid if isinstance(n, int))
    return steps, None if stated is None else (stated.flops, stated.bytes_accessed)


@functools.cache
def _kind(kind: type) -> Any:
    """Returns `tuple` (for lists too), `Mapping`, the names of a dataclass's fields, or None (not to be opened)."""
    if any("__call__" in vars(base) for base in kind.__mro__):
        return None
    if issubclass(kind, (tuple, list)):
        return tuple
    if issubclass(kind, Mapping):
        return Mapping
    if dataclasses.is_dataclass(kind) and kind.__module__.partition(".")[0] not in _OURS:
        return tuple(f.name for f in dataclasses.fields(kind))
    return None


def _with_parts(x: Any, parts: Sequence[Any]) -> Any:
    kind = type(x)
    if _kind(kind) is tuple:
        return kind(*parts) if hasattr(x, "_fields") else kind(parts)
    if _kind(kind) is Mapping:
        return kind(zip(x, parts, strict=True))
    # Made without its `__init__`, which may take other arguments, or check facts that do not hold on another mesh.
    new = copy.copy(x)
    for name, value in zip((n for n in _kind(kind) if hasattr(x, n)), parts, strict=True):
        object.__setattr__(new, name, value)
    return new
