"""The collectives that XLA put into a program: kind, bytes, devices, and how often a loop repeats them."""

import dataclasses
import math
import re
from collections.abc import Iterable

_KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_INSTRUCTION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_MODULE = re.compile(r"^(?=HloModule )", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_WHILE = re.compile(r" while\(.*body=%(?P<body>[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation)=%([\w.-]+)|branch_computations=\{([^}]*)\}"
)
_BITS = {"pred": 8, "s4": 4, "u4": 4, "f4e2m1fn": 4}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: as XLA calls it.
      nbytes: of its result, on each device.
      num_devices: that take part in each group of it.
      times: how often a call of the program runs it.
      is_async: whether other work may go on meanwhile.
    """

    kind: str
    nbytes: int
    num_devices: int
    times: int = 1
    is_async: bool = False

    def __str__(self) -> str:
        times = f"{self.times}× " if self.times > 1 else ""
        return f"{times}{self.kind} of {self.nbytes / 1e6:.3g} MB among {self.num_devices}"


def collectives_of(hlo: str, num_devices: int) -> list[Collective]:
    """The collectives of a compiled program, from its text.

    Args:
      hlo: the optimized module, as `jax.stages.Compiled.as_text()` gives it; several where it runs as several.
      num_devices: of the program, where an instruction says "all".
    """
    return [c for module in _MODULE.split(hlo) for c in _collectives_of_module(module, num_devices)]


def _collectives_of_module(hlo: str, num_devices: int) -> Iterable[Collective]:
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = match["name"]
            bodies[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif current:
            bodies[current].append(line)
    return _walk(entry, bodies, 1, num_devices)


def _walk(name: str, bodies: dict[str, list[str]], times: int, num_devices: int) -> Iterable[Collective]:
    for line in bodies.get(name, ()):
        if match := _INSTRUCTION.search(line):
            yield Collective(
                match["kind"],
                _nbytes(match["type"], match["kind"], bool(match["start"])),
                _group_size(line, num_devices),
                times,
                bool(match["start"]),
            )
        elif match := _WHILE.search(line):
            trips = _TRIPS.search(line)
            yield from _walk(match["body"], bodies, times * (int(trips[1]) if trips else 1), num_devices)
        elif " fusion(" not in line:
            for one, several in _CALLED.findall(line):
                for callee in (one, *re.findall(r"%([\w.-]+)", several)):
                    yield from _walk(callee, bodies, times, num_devices)


def _nbytes(text: str, kind: str, is_start: bool) -> int:
    """Bytes of a type. The start of some collectives gives a pair of operand and result: the result counts."""
    sizes = []
    for dtype, shape in _ARRAY.findall(text):
        bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])  # pyright: ignore[reportOptionalSubscript]
        sizes.append(math.prod(int(n) for n in shape.split(",") if n) * bits // 8)
    is_pair = text.startswith("(" if kind != "all-reduce" else "((")  # of an all-reduce only since JAX 0.11
    if is_start and is_pair:
        sizes = sizes[len(sizes) // 2 :] if kind != "collective-permute" else sizes[1:2]
    return sum(sizes)


def _group_size(line: str, num_devices: int) -> int:
    """How many devices exchange with each other, in each of the ways in which XLA writes it."""
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", match[2]))
    return num_devices
