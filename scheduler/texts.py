"""Tables as text."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Lines of aligned columns.

    Args:
        rows: The cells of each line.
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
