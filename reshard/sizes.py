"""Reads numbers of bytes as people write them."""

import operator
import re
from typing import overload

from mpmd.errors import ReshardError

_UNITS = {"": 1, "B": 1} | {
    f"{unit}{ending}": base**power
    for power, unit in enumerate("KMGTP", start=1)
    for ending, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def nbytes_of(text: str | int) -> int:
    """Converts a number of bytes as people write it.

    Examples:
        >>> nbytes_of("64MiB"), nbytes_of("1.5kB"), nbytes_of(7)
        (67108864, 1500, 7)

    Raises:
        ValueError: the text is not a number with a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = (match[2][:1].upper() + match[2][1:]) if match else None
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is no number of bytes; write it like 64MiB.")
    nbytes = float(match[1]) * _UNITS[unit]
    if nbytes >= 2**63:
        raise ValueError(f"{text!r} is more than any memory has.")
    return int(nbytes)


@overload
def threshold_nbytes(threshold: int | str) -> int: ...
@overload
def threshold_nbytes(threshold: int | str | None) -> int | None: ...
def threshold_nbytes(threshold: int | str | None) -> int | None:
    """Converts a `threshold` argument to bytes: a number, or text such as `"64MiB"`; None and 0 stay as they are.
    Raises a ReshardError for what is no amount of memory.
    """
    if threshold is None:
        return None
    try:
        if isinstance(threshold, bool):
            raise TypeError
        nbytes = nbytes_of(threshold) if isinstance(threshold, str) else operator.index(threshold)
    except (ValueError, TypeError):
        raise ReshardError(f"{threshold=} is no number of bytes; pass an int, or text such as '64MiB'.") from None
    if nbytes < 0:
        raise ReshardError(f"{threshold=} is no amount of memory; at least one element must fit.")
    return nbytes
