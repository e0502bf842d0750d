"""The collectives that XLA put into a program: kind, bytes, devices, hosts, and repetitions in loops."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from mpmd.costs import hlo_text

# For each kind, the bytes that each device sends by ring algorithms, from the bytes of the result on one of n devices.
SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
    "ragged-all-to-all": lambda n: (n - 1) / n,
}
_NAME = re.compile(r"\s*(?:ROOT )?%(?P<name>[\w.-]+) = ")
_INSTRUCTION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(SENT)})(?P<start>-start)?\(")
# It contains the order of the devices if this differs from the order of their numbers.
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\]"
    r"(?:, device_ids=\((?:\[(?P<iota>[\d,]+)\](?:T\((?P<turned>[\d,]+)\))?|(?P<places>[\d,]+))\))?"
    r" \{(?P<axes>[^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str  # XLA's name for it
    nbytes: int  # of its result, on each device
    num_devices: int  # in each of its groups
    num_hosts: int = 1  # the number of hosts of these devices (or of link domains, if those are larger)
    times: int = 1  # how often a call of the program runs it
    is_async: bool = False  # whether other work may run meanwhile
    is_hidden: bool = False  # whether matrix products run meanwhile: XLA has put some between its start and its end


def collectives_of(hlo: str, num_devices: int, hosts: Sequence[int] | None = None) -> list[Collective]:
    """Returns the collectives of a compiled program, from its text.

    Args:
      hlo: the optimized module, as from `jax.stages.Compiled.as_text()`; several for a program that runs as several.
      num_devices: of the program, for instructions that say "all".
      hosts: the host of each device, in the program's order; None: all devices are in one.

    Raises:
      ValueError: the program is for another number of devices.
    """
    of = np.zeros(num_devices, int) if hosts is None else np.array(hosts)
    return [c for entry, bodies in hlo_text.modules(hlo) for c in _walk(entry, bodies, 1, of)]


def _walk(name: str, bodies: hlo_text.Bodies, times: int, hosts: np.ndarray) -> Iterable[Collective]:
    lines = bodies.get(name, [])
    for i, line in enumerate(lines):
        if match := _INSTRUCTION.search(line):
            members = _members(line, len(hosts))
            yield Collective(
                match["kind"],
                _nbytes(match["type"], match["kind"], bool(match["start"])),
                len(members[0]),
                _num_hosts(line, members, hosts),
                times,
                bool(match["start"]),
                bool(match["start"]) and _is_hidden(lines[i:], bodies),
            )
        elif match := hlo_text.WHILE.search(line):
            yield from _walk(match["body"], bodies, times * hlo_text.num_trips(line), hosts)
        elif " fusion(" not in line:
            for callee in hlo_text.called_by(line):
                yield from _walk(callee, bodies, times, hosts)


def _is_hidden(lines: Sequence[str], bodies: hlo_text.Bodies) -> bool:
    """Returns whether a matrix product stands between the start of a collective, the first line, and its end."""
    match = _NAME.match(lines[0])
    end = f"-done(%{match['name']})" if match else ""
    for line in lines[1:]:
        if not end or end in line:
            break
        called = hlo_text.called_by(line) + hlo_text.WHILE.findall(line)
        inside = (inner for name in called for inner in bodies.get(name, ()))
        if hlo_text.PRODUCT.search(line) or any(map(hlo_text.PRODUCT.search, inside)):
            return True
    return False


def _nbytes(text: str, kind: str, is_start: bool) -> int:
    """Returns the bytes of a type. The start of some collectives has an operand and a result: the result counts."""
    sizes = hlo_text.sizes_of(text)
    is_pair = text.startswith("(" if kind != "all-reduce" else "((")  # for all-reduce only since JAX 0.11
    if is_start and is_pair:
        sizes = sizes[len(sizes) // 2 :] if kind != "collective-permute" else sizes[1:2]
    return sum(sizes)


def _members(line: str, num_devices: int) -> Sequence[np.ndarray]:
    """Returns each group of devices that exchange, from any of XLA's notations: int arrays of program positions."""
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return list(_turned(num_devices, match[3], match[4]).reshape(int(match[1]), int(match[2])))
    if match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        members = [np.array(_numbers(group), int) for group in re.findall(r"\{([\d,]*)\}", match[1])]
        _checked(members[0], max([num_devices, *(1 + np.concatenate(members))]), num_devices)
        return members
    if match := _MESH_GROUPS.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["sizes"])}
        count = math.prod(sizes.values())
        iota = _turned(count, match["iota"] or str(count), match["turned"])
        places = np.array(_numbers(match["places"]), int) if match["places"] else iota
        grid = _checked(places, count, num_devices).reshape(tuple(sizes.values()))
        wanted = set(re.findall(r"'([^']+)'", match["axes"]))
        last = [axis for axis, name in enumerate(sizes) if name in wanted]
        moved = np.moveaxis(grid, last, range(-len(last), 0))
        return list(moved.reshape(-1, math.prod(grid.shape[axis] for axis in last)))
    return [np.arange(num_devices)]


def _turned(num_devices: int, shape: str, order: str | None) -> np.ndarray:
    """Returns the numbers of all devices as an array of this shape, with its axes in another order."""
    sizes = _numbers(shape)
    grid = _checked(np.arange(math.prod(sizes)), math.prod(sizes), num_devices).reshape(sizes)
    return grid.transpose(_numbers(order)) if order else grid


def _checked(members: np.ndarray, count: int, num_devices: int) -> np.ndarray:
    """Returns these devices after a check that the program has `count` of them."""
    if count != num_devices:
        raise ValueError(
            f"collectives_of: num_devices is {num_devices}, but a collective of the program is among {count} devices.\n"
            "  Pass the number of devices that it was compiled for: `size` of its group's mesh."
        )
    return members


def _num_hosts(line: str, members: Sequence[np.ndarray], hosts: np.ndarray) -> int:
    """Returns the largest number of hosts over which the devices of a group are spread."""
    if match := re.search(r"source_target_pairs=\{([\d,{}]*)\}", line):
        pairs = hosts[np.array(_numbers(match[1].replace("{", "").replace("}", "")), int).reshape(-1, 2)]
        return 1 + int((pairs[:, 0] != pairs[:, 1]).any())
    return max(len(np.unique(hosts[group])) for group in members)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
