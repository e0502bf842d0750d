"""Enumerates the places of a loop's body where a stage may end, in program order.

A mark outside of a scan is one candidate. A scan with a mark in its body, however deep, has one candidate per
iteration: a stage may end behind each of them.
"""

import dataclasses
import functools
from collections.abc import Iterator

from mpmd import _jax_compat as compat
from mpmd.errors import StageError
from mpmd.ops.stage_end import mark_p


@dataclasses.dataclass(frozen=True, eq=False)
class Marked:
    """An equation of the body behind which (or in which) stages may end."""

    eqn: compat.JaxprEqn
    count: int  # the number of candidates: 1 for a mark, the number of iterations for a scan
    marks: tuple[compat.JaxprEqn, ...]  # the forward marks in it

    @property
    def is_scan(self) -> bool:
        """Whether the marks stand in the body of a scan."""
        return self.eqn.primitive is not mark_p


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """All places of a loop's body where a stage may end, in order."""

    marked: tuple[Marked, ...]

    @classmethod
    def of(cls, jaxpr: compat.Jaxpr) -> "Candidates":
        """Finds the candidates of a flat body. Marks of a backward pass are not among them."""
        found = []
        for eqn in jaxpr.eqns:
            if eqn.primitive is mark_p:
                if eqn.params["kind"] == "forward":
                    found.append(Marked(eqn, 1, (eqn,)))
            elif marked_kind(eqn) == "forward":
                forward = tuple(e for e in marks_in(eqn) if e.params["kind"] == "forward")
                found.append(Marked(eqn, eqn.params["length"], forward))
        return cls(tuple(found))

    def __len__(self) -> int:
        return sum(m.count for m in self.marked)

    @functools.cached_property
    def are_optional(self) -> bool:
        """Whether the candidates are layer ends, some of which become stage ends, rather than stage ends."""
        return any(mark.params["optional"] for m in self.marked for mark in m.marks)

    @property
    def scans(self) -> tuple[Marked, ...]:
        """The scans over layers."""
        return tuple(m for m in self.marked if m.is_scan)

    def check_are_of_one_kind(self) -> None:
        """Raises a StageError that names a line of each if one loop mixes stage ends and layer ends."""
        kinds: dict[bool, compat.JaxprEqn] = {}
        for m in self.marked:
            for mark in m.marks:
                if mark.params["role"] is None:
                    kinds.setdefault(mark.params["optional"], mark)
        if len(kinds) > 1:
            raise StageError(
                f"mark_stage_end at {compat.source_line(kinds[False])} and mark_layer_end at"
                f" {compat.source_line(kinds[True])} are in one loop: the first says where a stage ends, the second"
                " leaves it open.\n"
                "  Use mark_layer_end for all of them, and treduce(..., cuts=(...)) to say where stages end."
            )

    def lines(self) -> str:
        """Returns the first candidates as lines of a message."""
        lines = [f"\n    {compat.source_line(m.marks[0])}{f' ({m.count} iterations)' if m.is_scan else ''}"
                 for m in self.marked[:8]]  # fmt: skip
        more = len(self.marked) - 8
        return "".join(lines) + (f"\n    … and {more} more" if more > 0 else "")


def marks_in(eqn: compat.JaxprEqn) -> Iterator[compat.JaxprEqn]:
    """Returns the marks inside an equation, however deep."""
    return (e for e in compat.equations_inside(eqn) if e.primitive is mark_p)


def marked_kind(eqn: compat.JaxprEqn) -> str | None:
    """Returns the kind of the marks in a scan's body: `forward`, `backward` (even if a forward mark is recomputed there
    too) or `tangent`; None if there are none, or forward ones in a backward pass.
    """
    if eqn.primitive.name != "scan":
        return None
    kinds = {m.params["kind"] for m in marks_in(eqn)}
    kind = next((kind for kind in ("backward", "forward", "tangent") if kind in kinds), None)
    return None if kind == "forward" and compat.is_transposed(eqn) else kind
