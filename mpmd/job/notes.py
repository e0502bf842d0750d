"""One call that a rank makes together with others, as it is noted for the comparison."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from scheduler.base.texts import type_text

# Not every version of numpy tells type checkers that its arrays are buffers.
_crc32: Callable[[Any, int], int] = zlib.crc32


@dataclasses.dataclass
class Note:
    """One call, as a rank notes it that makes it. The main thread makes it; another reads the values.

    Attributes:
      did: what the rank did, in words: `called train`.
      program: a number of what was called, the same in all ranks.
      step: the number of the step on this rank, as the watchdog counts.
      names, types: of all arguments; a type is that of an array, or a text.
      fixed: what else makes the call, in words by name: of static arguments, `{"mode": "as 'train'"}`.
      structure: of all arguments, in words by name; it is told where nothing else differs.
      values: by position, what the rank gave from its host; several pieces of one argument in order. Nobody changes
        them any more. None stands for a value that is not compared.
    """

    did: str
    program: int = 0
    step: int = 0
    names: Sequence[str] = ()
    types: Sequence[Any] = ()
    values: Sequence[tuple[int, Any]] = ()
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    structure: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def nbytes(self) -> int:
        """Of all values."""
        return sum(x.nbytes for _, x in self.values if x is not None)

    @property
    def is_ready(self) -> bool:
        """Whether the values can be read at once: a key may be computed after steps that wait for other ranks."""
        for _, x in self.values:
            if type(x) is not np.ndarray:  # `isinstance` of a `jax.Array` takes ten times as long
                break
        else:
            return True
        self.values = [
            (i, keys.to_data(x) if isinstance(x, jax.Array) and not x.is_deleted() else x) for i, x in self.values
        ]
        arrays: list[Any] = [x for _, x in self.values if isinstance(x, jax.Array)]
        return all(x.is_deleted() or x.is_ready() for x in arrays)

    @functools.cached_property
    def digests(self) -> dict[int, int | None]:
        """By position, a number for the value; None if it cannot be read. The values are let go of."""
        found: dict[int, int | None] = {}
        for i, x in self.values:
            before = found.get(i) or 0
            try:
                found[i] = _crc32(x, before) if type(x) is np.ndarray else _digest(x, before)
            except ValueError:  # it is not in one piece, or of a dtype that numpy gives no buffer of
                found[i] = _digest(x, before)
        self.values = ()
        return found

    @functools.cached_property
    def digest(self) -> int:
        """Of all that the ranks must have alike."""
        return zlib.crc32(repr((self.did, self.program, self.digests)).encode())

    def to_json(self) -> list[Any]:
        """Plain data, for the key-value store: what `disagreement` takes."""
        types = dict(zip(self.names, map(_type_text, self.types), strict=False))
        values = {self.names[i]: d for i, d in self.digests.items()}
        return [self.did, self.program, self.step, values, {**types, **self.fixed}, dict(self.structure)]


def note_of_tree(
    did: str, step: int, types: Mapping[str, str], fixed: Mapping[str, str], identity: int | None = None
) -> Note:
    """A call that every rank makes with arrays of the same names, types and groups.

    Args:
      types: by the name that messages give an array, its type in words, as `placed_text` gives it.
      fixed: what else makes the call, in words by name.
      identity: what is compared in the place of `fixed`.
    """
    made = [sorted(types.items()), sorted(fixed.items()) if identity is None else identity]
    return Note(did, zlib.crc32(repr(made).encode()), step, [*types], [*types.values()], (), fixed)


def placed_text(x: Any) -> str:
    """The type of a leaf; of an array in groups, also where it lies."""
    if not hasattr(x, "dtype"):
        return type(x).__name__
    where = f" in {x.mpmd_sharding}" if isinstance(x, MpmdArray) else ""
    return f"{type_text(x.shape, x.dtype)}{where}"


def _type_text(aval: Any) -> str:
    if isinstance(aval, str):
        return f"as {aval}"
    return "as " + aval.str_short() + " (weak type)" * getattr(aval, "weak_type", False)


def _digest(x: Any, before: int) -> int | None:
    """Of an array of this process, after what came before it; None if it was deleted meanwhile, or is not compared."""
    if x is None:
        return None
    try:
        data = np.asarray(keys.to_data(x) if isinstance(x, jax.Array) else x)
    except RuntimeError:
        return None
    return _crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8), before)
