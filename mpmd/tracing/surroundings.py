"""The outside variables that a function reads. An earlier trace is used again only if these are the same.

A step is traced once for all devices of one shape, however often it is given to `mpmd.jit`. If a step reads an outside
variable (a schedule, a flag, a size) and the variable has changed since, it counts as another step.
"""

import dis
import types
import weakref
from collections.abc import Callable, Hashable, Iterator


class _Same:
    """A key of an object by identity, valid while the object lives: it may hold the function, so it is held weakly."""

    def __init__(self, x: object):
        self._id = id(x)
        try:
            self._get: Callable[[], object] = weakref.ref(x)
        except TypeError:
            self._get = lambda: x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (x := self._get()) is not None and other._get() is x

    def __hash__(self) -> int:
        return self._id


def surroundings(fun: Callable) -> tuple:
    """Returns the outside variables that `fun` reads, and functions that it reads in this way, with their values.

    Numbers, strings and the like are compared by value, everything else by identity. A variable that the function
    itself assigns (a counter) does not count.
    """
    return tuple(_values(fun, set()))


def _values(fun: object, seen: set[int]) -> Iterator[Hashable]:
    if id(fun) in seen:
        return
    seen.add(id(fun))
    fun = getattr(fun, "__func__", fun)
    if not isinstance(fun, types.FunctionType):
        inner = getattr(fun, "__wrapped__", getattr(fun, "func", None))  # of jax.jit, functools.partial and the like
        if callable(inner):
            yield from _values(inner, seen)
        return
    written = set(_names(fun.__code__, "STORE_DEREF", "STORE_GLOBAL"))
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    read = [(name, cell.cell_contents) for name, cell in cells if name not in written and _is_bound(cell)]
    read_names = dict.fromkeys(_names(fun.__code__, "LOAD_GLOBAL"))
    read += [(name, fun.__globals__[name]) for name in read_names if name in fun.__globals__]
    for name, x in [*read, *enumerate(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).items()]:
        if name in written:
            continue
        yield name, x if isinstance(x, (bool, int, float, complex, str, bytes, type(None))) else _Same(x), type(x)
        if callable(x) and getattr(x, "__module__", None) == fun.__module__:
            yield from _values(x, seen)


def _is_bound(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _names(code: types.CodeType, *operations: str) -> Iterator[str]:
    """Yields the names that some operations access in a function and in the functions that it defines."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in operations)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant, *operations)
