"""Numbers, types and bars as text."""

import math
from collections.abc import Sequence
from typing import Any


def human(nbytes: float) -> str:
    """Bytes as a person reads them.

    Examples:
        >>> human(1536), human(7)
        ('1.5 KiB', '7 B')
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    power = min(int(math.log2(nbytes) // 10), 5)
    return f"{nbytes / 1024**power:.1f} {'_KMGTP'[power]}iB"


def counted(number: int, noun: str) -> str:
    """A number of things, in words.

    Examples:
        >>> counted(1, "array"), counted(2, "array")
        ('1 array', '2 arrays')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")


def type_text(shape: Sequence[int], dtype: Any) -> str:
    """A type as messages show it: `float32[2,3]`."""
    return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"


def a(kind: type) -> str:
    """`an int`, `a str`, for messages."""
    return f"a{'n' if kind.__name__[0] in 'aeiou' else ''} {kind.__name__}"


def first_of(lines: Sequence[object], indent: str = "  ") -> str:
    """The first eight lines of a list, each on its own and indented, and how many more there are."""
    more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
    return "\n".join(f"{indent}{line}" for line in [*lines[:8], *more])


def how_far(reports: Sequence[Any], doing: str) -> tuple[str, float]:
    """What `waiting` shows: the last report of a copy, and the share of its bytes that it has done."""
    if not reports:
        return doing, 0.0
    return str(reports[-1]), reports[-1].bytes_done / max(1, reports[-1].bytes_total)


def bar(done: int, total: int) -> str:
    """How far something is: a bar and a percentage."""
    part = done / total if total else 1.0
    return "█" * int(part * 30) + "·" * (30 - int(part * 30)) + f" {part:4.0%}"
