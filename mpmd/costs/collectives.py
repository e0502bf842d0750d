"""The collectives that XLA put into a program: kind, bytes, devices, hosts, and how often a loop repeats them."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_NAME = re.compile(r"\s*(?:ROOT )?%(?P<name>[\w.-]+) = ")
_INSTRUCTION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_MODULE = re.compile(r"^(?=HloModule )", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_WHILE = re.compile(r" while\(.*body=%(?P<body>[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation)=%([\w.-]+)|branch_computations=\{([^}]*)\}"
)
# An order of the devices stands in it where it is not that of their numbers.
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\]"
    r"(?:, device_ids=\((?:\[(?P<iota>[\d,]+)\](?:T\((?P<turned>[\d,]+)\))?|(?P<places>[\d,]+))\))?"
    r" \{(?P<axes>[^}]*)\}"
)
_PRODUCT = re.compile(r" (?:dot|convolution)\(|custom_call_target=\"__(?:cublas|cudnn)")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "f4e2m1fn": 4}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: as XLA calls it.
      nbytes: of its result, on each device.
      num_devices: that take part in each group of it.
      num_hosts: in which these devices are (or domains of links, where those are larger).
      times: how often a call of the program runs it.
      is_async: whether other work may go on meanwhile.
      is_hidden: whether matrix products do: XLA has put some between its start and its end.
    """

    kind: str
    nbytes: int
    num_devices: int
    num_hosts: int = 1
    times: int = 1
    is_async: bool = False
    is_hidden: bool = False

    def __str__(self) -> str:
        times = f"{self.times}× " if self.times > 1 else ""
        hosts = f" in {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        return f"{times}{self.kind} of {self.nbytes / 1e6:.3g} MB among {self.num_devices}{hosts}"


def collectives_of(hlo: str, num_devices: int, num_near: int | None = None) -> list[Collective]:
    """The collectives of a compiled program, from its text.

    Args:
      hlo: the optimized module, as `jax.stages.Compiled.as_text()` gives it; several where it runs as several.
      num_devices: of the program, where an instruction says "all".
      num_near: how many neighbours, in the order of the program's devices, are one host; None: all.
    """
    near = num_near or num_devices
    return [c for module in _MODULE.split(hlo) for c in _collectives_of_module(module, num_devices, near)]


def _collectives_of_module(hlo: str, num_devices: int, num_near: int) -> Iterable[Collective]:
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = match["name"]
            bodies[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif current:
            bodies[current].append(line)
    return _walk(entry, bodies, 1, num_devices, num_near)


def _walk(name: str, bodies: dict[str, list[str]], times: int, num_devices: int, num_near: int) -> Iterable[Collective]:
    lines = bodies.get(name, [])
    for i, line in enumerate(lines):
        if match := _INSTRUCTION.search(line):
            members = _members(line, num_devices)
            yield Collective(
                match["kind"],
                _nbytes(match["type"], match["kind"], bool(match["start"])),
                len(members),
                _num_hosts(line, members, num_near),
                times,
                bool(match["start"]),
                bool(match["start"]) and _is_hidden(lines[i:], bodies),
            )
        elif match := _WHILE.search(line):
            trips = _TRIPS.search(line)
            yield from _walk(match["body"], bodies, times * (int(trips[1]) if trips else 1), num_devices, num_near)
        elif " fusion(" not in line:
            for one, several in _CALLED.findall(line):
                for callee in (one, *re.findall(r"%([\w.-]+)", several)):
                    yield from _walk(callee, bodies, times, num_devices, num_near)


def _is_hidden(lines: Sequence[str], bodies: Mapping[str, Sequence[str]]) -> bool:
    """Whether a matrix product stands between the start of a collective, the first line, and its end."""
    match = _NAME.match(lines[0])
    end = f"-done(%{match['name']})" if match else ""
    for line in lines[1:]:
        if not end or end in line:
            break
        called = [one for one, _ in _CALLED.findall(line) if one]
        called += _WHILE.findall(line)
        if _PRODUCT.search(line) or any(_PRODUCT.search(inner) for name in called for inner in bodies.get(name, ())):
            return True
    return False


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


def _members(line: str, num_devices: int) -> np.ndarray:
    """The devices of one of the groups that exchange with each other, in each of the ways in which XLA writes it.

    Shape (devices,), int: their places in the program.
    """
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _turned(num_devices, match[3], match[4]).reshape(int(match[1]), int(match[2]))[0]
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return np.array(_numbers(match[1]), int)
    if match := _MESH_GROUPS.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["sizes"])}
        iota = _turned(num_devices, match["iota"] or str(num_devices), match["turned"])
        places = np.array(_numbers(match["places"]), int) if match["places"] else iota
        grid = places.reshape(tuple(sizes.values()))
        wanted = set(re.findall(r"'([^']+)'", match["axes"]))
        return grid[tuple(slice(None) if name in wanted else 0 for name in sizes)].reshape(-1)
    return np.arange(num_devices)


def _turned(num_devices: int, shape: str, order: str | None) -> np.ndarray:
    """The numbers of all devices as an array of this shape, its axes in another order."""
    grid = np.arange(num_devices).reshape(_numbers(shape))
    return grid.transpose(_numbers(order)) if order else grid


def _num_hosts(line: str, members: np.ndarray, num_near: int) -> int:
    if match := re.search(r"source_target_pairs=\{([\d,{}]*)\}", line):
        pairs = np.array(_numbers(match[1].replace("{", "").replace("}", "")), int).reshape(-1, 2) // num_near
        return 1 + int((pairs[:, 0] != pairs[:, 1]).any())
    return len(np.unique(members // num_near))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
