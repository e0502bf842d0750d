"""Parses the text of a compiled program: its computations, and how often each of them runs."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

# The lines of each computation of a module, by its name; "" holds the name of the computation that runs first.
Bodies = Mapping[str, Sequence[str]]

# An instruction that does a matrix product, or cuDNN's attention.
PRODUCT = re.compile(r" (?:dot|convolution)\(|custom_call_target=\"__(?:cublas|cudnn)")
WHILE = re.compile(r" while\(.*body=%(?P<body>[\w.-]+)")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_MODULE = re.compile(r"^(?=HloModule )", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation)=%([\w.-]+)|branch_computations=\{([^}]*)\}"
)
_BITS = {"pred": 8, "s4": 4, "u4": 4, "f4e2m1fn": 4}


def modules(hlo: str) -> Iterable[tuple[str, Bodies]]:
    """Returns the modules of a program that runs as several: the name of the first computation, and all of them."""
    for module in _MODULE.split(hlo):
        bodies: dict[str, list[str]] = {}
        entry, current = "", ""
        for line in module.splitlines():
            if match := _COMPUTATION.match(line):
                current = match["name"]
                bodies[current] = []
                entry = current if line.startswith("ENTRY") else entry
            elif current:
                bodies[current].append(line)
        yield entry, bodies


def num_trips(line: str) -> int:
    """Returns how often a `while` runs its body; 1 if XLA does not say."""
    trips = _TRIPS.search(line)
    return int(trips[1]) if trips else 1


def called_by(line: str) -> list[str]:
    """Returns the computations that an instruction calls, except the body of a `while`."""
    return [
        name for one, several in _CALLED.findall(line) for name in (one, *re.findall(r"%([\w.-]+)", several)) if name
    ]


def sizes_of(text: str) -> list[int]:
    """Returns the bytes of each array of a type."""
    found = []
    for dtype, shape in _ARRAY.findall(text):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype) or (int(digits[0]) if digits else 0)  # token, opaque: no memory
        found.append(math.prod(int(n) for n in shape.split(",") if n) * bits // 8)
    return found
