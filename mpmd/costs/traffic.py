"""The bytes that the kernels of a compiled program read and write between its matrix products, from its text.

XLA fuses elementwise work into few kernels, but not into one: a softmax reads its operand for the maximum, for the sum
and for its result, and a product reads an operand that an earlier kernel has written. The equations do not show this.
"""

import dataclasses
import re
from collections.abc import Sequence

from mpmd.costs import hlo_text

_INSTRUCTION = re.compile(r"\s*(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<type>.*?) (?P<kind>[\w-]+)\((?P<rest>.*)")
_NAMES = re.compile(r"%([\w.-]+)")
# These move no data, or are counted elsewhere: products, kernels of Pallas and of libraries, collectives.
_FREE = {
    "after-all", "add-dependency", "bitcast", "call", "conditional", "constant", "custom-call", "convolution", "dot",
    "get-tuple-element", "iota", "opt-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
}  # fmt: skip
_COLLECTIVE = re.compile(r"(?:all|collective|reduce-scatter|ragged|send|recv|copy-start|copy-done|async)")
_OF_A_PART = ("dynamic-slice", "gather", "slice")  # read no more of their first operand than the size of their result


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    nbytes: int
    kind: str
    operands: tuple[str, ...]
    is_root: bool
    line: str


def traffic_of(hlo: str) -> int:
    """Returns the bytes that a device moves in a call of a program, without products, attention and Pallas kernels.
    `hlo` is as for `collectives_of`.
    """
    return sum(_moved(entry, bodies) for entry, bodies in hlo_text.modules(hlo))


def _moved(name: str, bodies: hlo_text.Bodies) -> int:
    """Returns the bytes of a computation, with the computations that it calls."""
    instructions = _instructions(bodies.get(name, ()))
    sizes = {i.name: i.nbytes for i in instructions}
    found = 0
    for i in instructions:
        if match := hlo_text.WHILE.search(i.line):
            found += hlo_text.num_trips(i.line) * _moved(match["body"], bodies)
        elif i.kind in ("call", "conditional"):
            found += max((_moved(callee, bodies) for callee in hlo_text.called_by(i.line)), default=0)
        elif i.kind == "fusion":
            (callee,) = hlo_text.called_by(i.line)
            if not any(map(hlo_text.PRODUCT.search, bodies[callee])):
                found += _of_kernel(_instructions(bodies[callee]))
        elif i.kind not in _FREE and not _COLLECTIVE.match(i.kind):
            operands = [_Instruction(name, sizes.get(name, 0), "parameter", (), False, "") for name in set(i.operands)]
            found += _of_kernel([*operands, dataclasses.replace(i, is_root=True)])
    return found


def _of_kernel(instructions: Sequence[_Instruction]) -> int:
    """Returns the bytes of one kernel: its parameters once, as far as it reads them, and its results."""
    by_name = {i.name: i for i in instructions}

    def read(name: str, nbytes: int) -> int:
        """Returns the bytes that the kernel reads of a value in memory."""
        users = [i for i in instructions if name in i.operands]
        parts = [
            read(i.name, nbytes)
            if i.kind == "bitcast"
            else i.nbytes
            if i.kind in _OF_A_PART and i.operands[0] == name
            else 0
            if i.kind == "dynamic-update-slice" and i.operands[0] == name  # written in place
            else nbytes
            for i in users
        ]
        return min(nbytes, sum(parts))

    def written(i: _Instruction) -> int:
        if i.kind == "tuple":
            return sum(written(by_name[name]) for name in i.operands)
        if i.kind == "bitcast" and i.operands[0] in by_name:
            return written(by_name[i.operands[0]])
        if i.kind == "dynamic-update-slice" and i.operands[1] in by_name:
            return by_name[i.operands[1]].nbytes
        return i.nbytes

    reads = sum(read(i.name, i.nbytes) for i in instructions if i.kind == "parameter")
    return reads + sum(written(i) for i in instructions if i.is_root)


def _instructions(lines: Sequence[str]) -> list[_Instruction]:
    found = []
    for line in lines:
        if match := _INSTRUCTION.match(line):
            operands = tuple(_NAMES.findall(match["rest"].split("), ")[0]))
            nbytes = sum(hlo_text.sizes_of(match["type"]))
            found.append(_Instruction(match["name"], nbytes, match["kind"], operands, bool(match["root"]), line))
    return found
