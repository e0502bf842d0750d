"""The note of one call that a rank makes together with others, for the comparison."""

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

_UNCOMPARED, _UNREAD = -1, -2  # stand for a value that is not compared, and for a value that could not be read
# Not every version of numpy declares its arrays as buffers for type checkers.
_crc32: Callable[[Any, int], int] = zlib.crc32


@dataclasses.dataclass(slots=True)
class Note:
    """A rank's note of one call. The main thread makes the note; another thread reads the values.

    Attributes:
      fixed: everything else that defines the call, in words by name, such as static arguments `{"mode": "as 'train'"}`.
      structure: the structure of all arguments, in words by name; reported where nothing else differs.
      values: by position, the rank's values from its host; several pieces of one argument in order. Nobody changes
        them any more. None stands for a value that is not compared. `read` releases them.
    """

    did: str  # the action of the rank in words: `called train`
    program: int = 0  # a number of the called program, the same in all ranks
    step: int = 0  # the number of the step on this rank, as the watchdog counts
    names: Sequence[str] = ()  # of all arguments
    types: Sequence[ShapedArray | str] = ()
    values: Values = ()
    makers: Sequence[int] = ()  # for each argument, the number of the call result that it is; 0 if no call returned it
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    structure: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Sequence[int] = ()  # for each value that was read, its position and its number

    def nbytes(self) -> int:
        """Returns the bytes of all values."""
        nbytes = 0
        for _, x in self.values:
            if x is not None:
                nbytes += x.nbytes
        return nbytes

    @property
    def is_ready(self) -> bool:
        """Whether the values can be read without a wait. A key may depend on steps that wait for other ranks."""
        for _, x in self.values:
            if type(x) is not np.ndarray:  # `isinstance` with `jax.Array` takes ten times as long
                break
        else:
            return True
        self.values = [
            (i, keys.to_data(x) if isinstance(x, jax.Array) and not x.is_deleted() else x) for i, x in self.values
        ]
        arrays: list[Any] = [x for _, x in self.values if isinstance(x, jax.Array)]
        return all(x.is_deleted() or x.is_ready() for x in arrays)

    def read(self) -> None:
        """Reads the values and releases them. Two threads may do so at once: their results are equal."""
        numbers: list[int] = []
        for i, x in () if self.numbers else self.values:
            try:
                number = _crc32(x, 0) if type(x) is np.ndarray else _number(x)
            except ValueError:  # it is not contiguous, or numpy has no buffer for its dtype
                number = _number(x)
            numbers += i, number
        self.numbers = self.numbers or numbers
        self.values = ()

    @property
    def digest(self) -> int:
        """A hash of everything that must be equal in all ranks."""
        self.read()
        # Python's hash of a number, or of a tuple of numbers, is the same in every process.
        return hash((zlib.crc32(self.did.encode()), self.program, *self.makers, *self.numbers))

    def to_json(self) -> list[object]:
        """Returns plain data for the key-value store and `disagreement`."""
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
    """Returns the note of a call that every rank makes with arrays of the same names, types and groups.

    Args:
      types: the type of each array in words (from `placed_text`), by its name in messages.
      fixed: everything else that defines the call, in words by name.
      identity: a number that is compared instead of `fixed`.
    """
    made = [sorted(types.items()), sorted(fixed.items()) if identity is None else identity]
    return Note(did, zlib.crc32(repr(made).encode()), step, [*types], [*types.values()], fixed=fixed)


def placed_text(x: Any) -> str:
    """Returns the type of a leaf; for an array in groups, also its sharding."""
    if not hasattr(x, "dtype"):
        return type(x).__name__
    where = f" in {x.mpmd_sharding}" if isinstance(x, MpmdArray) else ""
    return f"{type_text(x.shape, x.dtype)}{where}"


def _type_text(aval: ShapedArray | str) -> str:
    if isinstance(aval, str):
        return f"as {aval}"
    return "as " + aval.str_short() + " (weak type)" * getattr(aval, "weak_type", False)


def _number(x: jax.Array | np.ndarray | None) -> int:
    """Returns the checksum of an array of this process."""
    if x is None:
        return _UNCOMPARED
    try:
        data = np.asarray(keys.to_data(x) if isinstance(x, jax.Array) else x)
    except RuntimeError:
        return _UNREAD
    return _crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8), 0)
