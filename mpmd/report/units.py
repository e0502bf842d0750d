"""Bytes and seconds as text."""


def in_bytes(n: float) -> str:
    """Bytes in decimal units.

    Examples:
      >>> in_bytes(7), in_bytes(131072), in_bytes(2.5e12)
      ('7 B', '131 KB', '2,500 GB')
    """
    for unit in ("B", "KB", "MB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB" if n < 1000 else f"{n:,.0f} GB"


def in_flops(n: float) -> str:
    """Floating-point operations in decimal units.

    Examples:
      >>> in_flops(131072), in_flops(2.15e9), in_flops(2.5e16)
      ('0.131 MFLOP', '2.15 GFLOP', '25,000 TFLOP')
    """
    n /= 1e6
    for unit in ("MFLOP", "GFLOP"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TFLOP" if n < 1000 else f"{n:,.0f} TFLOP"


def in_seconds(s: float) -> str:
    """Seconds in the unit that suits them.

    Examples:
      >>> in_seconds(2.5), in_seconds(0.0125), in_seconds(15e-6)
      ('2.5 s', '12.5 ms', '15 µs')
    """
    return f"{s:.3g} s" if s >= 1 else f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} µs"
