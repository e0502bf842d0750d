"""One call that a rank makes together with others, as it is noted for the comparison."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from mpmd.arrays import keys
from mpmd.arrays.array import MpmdArray
from scheduler.base.texts import type_text

Values = Sequence[tuple[int, jax.Array | np.ndarray | None]]  # by position in the call

_UNCOMPARED, _UNREAD = -1, -2  # the numbers of a value that is not compared, and of one that could not be read
# Not every version of numpy tells type checkers that its arrays are buffers.
_crc32: Callable[[Any, int], int] = zlib.crc32


@dataclasses.dataclass(slots=True)
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
        them any more. None stands for a value that is not compared. They are let go of when they are read.
      makers: of each argument, a number of the call's result that it is, 0 for what no call returned.
      numbers: of the values that have been read, a position and a number each.
    """

    did: str
    program: int = 0
    step: int = 0
    names: Sequence[str] = ()
    types: Sequence[ShapedArray | str] = ()
    values: Values = ()
    makers: Sequence[int] = ()
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    structure: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Sequence[int] = ()

    def nbytes(self) -> int:
        """Of all values."""
        nbytes = 0
        for _, x in self.values:
            if x is not None:
                nbytes += x.nbytes
        return nbytes

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

    def read(self) -> None:
        """Reads the values and lets go of them. Two threads may do so at once: they find the same."""
        numbers: list[int] = []
        for i, x in () if self.numbers else self.values:
            try:
                number = _crc32(x, 0) if type(x) is np.ndarray else _number(x)
            except ValueError:  # it is not in one piece, or of a dtype that numpy gives no buffer of
                number = _number(x)
            numbers += i, number
        self.numbers = self.numbers or numbers
        self.values = ()

    @property
    def digest(self) -> int:
        """Of all that the ranks must have alike."""
        self.read()
        # Python hashes numbers, and tuples of these, alike in every process.
        return hash((zlib.crc32(self.did.encode()), self.program, *self.makers, *self.numbers))

    def to_json(self) -> list[object]:
        """Plain data, for the key-value store: what `disagreement` takes."""
        types = dict(zip(self.names, map(_type_text, self.types), strict=False))
        self.read()
        pieces: dict[str, list[int]] = {}
        for i, number in zip(self.numbers[::2], self.numbers[1::2], strict=True):
            if number != _UNCOMPARED:
                pieces.setdefault(self.names[i], []).append(number)
        values = {name: None if _UNREAD in read else " ".join(map(str, read)) for name, read in pieces.items()}
        makers = {name: str(maker) for name, maker in zip(self.names, self.makers, strict=False) if maker}
        return [self.did, self.program, self.step, makers, values, {**types, **self.fixed}, dict(self.structure)]


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
    return Note(did, zlib.crc32(repr(made).encode()), step, [*types], [*types.values()], fixed=fixed)


def placed_text(x: Any) -> str:
    """The type of a leaf; of an array in groups, also where it lies."""
    if not hasattr(x, "dtype"):
        return type(x).__name__
    where = f" in {x.mpmd_sharding}" if isinstance(x, MpmdArray) else ""
    return f"{type_text(x.shape, x.dtype)}{where}"


def _type_text(aval: ShapedArray | str) -> str:
    if isinstance(aval, str):
        return f"as {aval}"
    return "as " + aval.str_short() + " (weak type)" * getattr(aval, "weak_type", False)


def _number(x: jax.Array | np.ndarray | None) -> int:
    """Of an array of this process."""
    if x is None:
        return _UNCOMPARED
    try:
        data = np.asarray(keys.to_data(x) if isinstance(x, jax.Array) else x)
    except RuntimeError:
        return _UNREAD
    return _crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8), 0)
