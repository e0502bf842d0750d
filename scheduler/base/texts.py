"""Numbers, types, bars and tables as text."""

import math
import re
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Returns the lines of a table with aligned columns.

    Args:
        align: For each column ``<`` or ``>``.

    Examples:
        >>> table([("w", "7"), ("bias", "12")], "<>")
        ['w      7', 'bias  12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]


def in_bytes(n: float) -> str:
    """Returns bytes in decimal units.

    Examples:
      >>> in_bytes(7), in_bytes(131072), in_bytes(2.5e12)
      ('7 B', '131 KB', '2,500 GB')
    """
    return f"{n:.0f} B" if abs(n) < 999.5 else _in(n / 1000, "KB", "MB", "GB")


def in_flops(n: float) -> str:
    """Returns floating-point operations in decimal units.

    Examples:
      >>> in_flops(131072), in_flops(2.15e9), in_flops(2.5e16)
      ('0.131 MFLOP', '2.15 GFLOP', '25,000 TFLOP')
    """
    return _in(n / 1e6, "MFLOP", "GFLOP", "TFLOP")


def _in(n: float, *units: str) -> str:
    """Returns a number in the first unit that suits it; each unit is a thousand times the one before."""
    for unit in units[:-1]:
        if abs(n) < 999.5:  # rounds to three digits
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} {units[-1]}" if abs(n) < 999.5 else f"{n:,.0f} {units[-1]}"


def in_seconds(s: float) -> str:
    """Returns seconds in the unit that suits them.

    Examples:
      >>> in_seconds(2.5), in_seconds(0.0125), in_seconds(15e-6), in_seconds(0.9996), in_seconds(1500)
      ('2.5 s', '12.5 ms', '15 µs', '1 s', '1,500 s')
    """
    return _in(s * 1e6, "µs", "ms", "s")


def human(nbytes: float) -> str:
    """Returns bytes as a person reads them.

    Examples:
        >>> human(1536), human(7)
        ('1.5 KiB', '7 B')
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    power = min(int(math.log2(nbytes) // 10), 5)
    return f"{nbytes / 1024**power:.1f} {'_KMGTP'[power]}iB"


def counted(number: int, noun: str) -> str:
    """Returns a number of things, in words.

    Examples:
        >>> counted(1, "array"), counted(2, "batch"), counted(2, "process"), counted(2, "entry"), counted(0, "axis")
        ('1 array', '2 batches', '2 processes', '2 entries', '0 axes')
    """
    if number != 1:
        noun = re.sub("is$", "e", re.sub("(?<![aeiou])y$", "ie", re.sub("(?<=ch|ss)$", "e", noun))) + "s"
    return f"{number} {noun}"


def type_text(shape: Sequence[int], dtype: object) -> str:
    """Returns a type as messages show it: `float32[2,3]`."""
    return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"


def a(kind: type) -> str:
    """Returns `an int`, `a str`, for messages."""
    return f"a{'n' if kind.__name__[0] in 'aeiou' else ''} {kind.__name__}"


def first_of(lines: Sequence[object], indent: str = "  ") -> str:
    """Returns the first eight lines of a list, indented, one a line, and how many more there are."""
    more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
    return "\n".join(f"{indent}{line}" for line in [*lines[:8], *more])


def bar(done: int, total: int) -> str:
    """Returns a bar and a percentage of the part that is done."""
    part = done / total if total else 1.0
    return "█" * int(part * 30) + "·" * (30 - int(part * 30)) + f" {part:4.0%}"
