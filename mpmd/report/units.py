"""Bytes and seconds as text."""


def in_bytes(n: float) -> str:
    """Bytes in decimal units.

    Examples:
      >>> in_bytes(7), in_bytes(131072), in_bytes(2.5e12)
      ('7 B', '131 KB', '2,500 GB')
    """
    return f"{n:.0f} B" if abs(n) < 1000 else _in(n / 1000, "KB", "MB", "GB")


def in_flops(n: float) -> str:
    """Floating-point operations in decimal units.

    Examples:
      >>> in_flops(131072), in_flops(2.15e9), in_flops(2.5e16)
      ('0.131 MFLOP', '2.15 GFLOP', '25,000 TFLOP')
    """
    return _in(n / 1e6, "MFLOP", "GFLOP", "TFLOP")


def _in(n: float, *units: str) -> str:
    """A number in the first unit that suits it; each is a thousand of the one before."""
    for unit in units[:-1]:
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} {units[-1]}" if n < 1000 else f"{n:,.0f} {units[-1]}"


def in_seconds(s: float) -> str:
    """Seconds in the unit that suits them.

    Examples:
      >>> in_seconds(2.5), in_seconds(0.0125), in_seconds(15e-6)
      ('2.5 s', '12.5 ms', '15 µs')
    """
    return f"{s:.3g} s" if s >= 1 else f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} µs"
