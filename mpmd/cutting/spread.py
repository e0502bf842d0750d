"""Finds which values of a step are cut into rows: those that are cut somewhere, and all values that follow from it.

If a chain of scans reads or makes a value piece by piece, then the values that it is computed from, and those computed
from it, are cut too: forward and backward through each equation that can be done piece by piece (`axis_rules`), into
the bodies of loops and branches and out of them. Nothing is changed here.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.cutting.pieces import Rows, join_rows_p, split_rows_p
from mpmd.cutting.sliced_stacks import sliced_stacks
from mpmd.graphs.axis_rules import Factor, factors
from mpmd.graphs.open_loops import OpenLoop, fresh_body
from mpmd.ops.loop_primitive import treduce_p
from mpmd.ops.reductions import Concat
from mpmd.ops.stage_end import mark_p
from mpmd.tracing.new_equations import Atom


class Link(NamedTuple):
    """Two values that are cut alike. The second's axis is `moved(the first's axis)`, or None if it has no such axis."""

    first: Atom
    second: Atom
    moved: Callable[[int], int | None] = lambda axis: axis
    back: Callable[[int], int | None] = lambda axis: axis


@dataclasses.dataclass(eq=False)
class Opened:
    """An equation with inner jaxprs, on variables of their own, and the values that are cut alike."""

    inner: tuple[compat.Jaxpr, ...]
    links: tuple[Link, ...]
    loop: OpenLoop | None = None  # for a `scan` or `while`


class Spread:
    """The cut of each variable that is cut into rows."""

    def __init__(self) -> None:
        self.rows: dict[compat.Var, Rows] = {}
        self.opened: dict[int, Opened] = {}  # the inner jaxprs of each equation (by its id) that is cut inside
        self.chopped: dict[int, Rows] = {}  # the cut of each `scan` (by its id) that is done as several shorter ones
        self._kept: list[object] = []  # keeps equations alive: ids are unique only among live objects
        self._factors: dict[int, list[Factor]] = {}
        self.uncut: set[Atom] = set()
        """Values that stay whole: a microbatch of a list is no array when a call cuts its arguments."""
        self._has_grown = False

    def add(self, atom: Atom, rows: Rows | None) -> None:
        """Cuts a variable, unless it is cut already or cannot be."""
        if rows is None or isinstance(atom, (compat.Literal, compat.DropVar)):
            return
        if atom in self.rows or atom in self.uncut:
            return
        if rows.fits(atom.aval):
            self.rows[atom] = rows
            self._has_grown = True

    def of(self, atom: Atom) -> Rows | None:
        """Returns the cut of an atom, None if it is whole."""
        return None if isinstance(atom, compat.Literal) else self.rows.get(atom)

    def run(self, eqns: Sequence[compat.JaxprEqn], alike: Iterable[tuple[Atom, Atom]] = ()) -> None:
        """Follows the equations forward and backward until nothing more is cut; `alike` are pairs that are cut alike.

        This ends: every round but the last cuts a whole variable.
        """
        links = [Link(a, b) for a, b in alike]
        self._seed(eqns)
        self._has_grown = True
        while self._has_grown:
            self._has_grown = False
            for link in links:
                self._follow(link)
            self._through_all(eqns)

    def _through_all(self, eqns: Sequence[compat.JaxprEqn]) -> None:
        for eqn in (*eqns, *reversed(eqns)):
            self._through(eqn)

    def _seed(self, eqns: Sequence[compat.JaxprEqn]) -> None:
        """Cuts the operands of cuts, the results of joins, and stacks that several stages slice; in loops too."""
        for eqn in eqns:
            if eqn.primitive is split_rows_p:
                self.add(eqn.invars[0], eqn.params["rows"])
            elif eqn.primitive is join_rows_p:
                self.add(eqn.outvars[0], eqn.params["rows"])
            elif eqn.primitive is treduce_p:
                self._seed(self._open(eqn).inner[0].eqns)
        for v, rows in sliced_stacks(eqns):
            self.add(v, rows)

    def _through(self, eqn: compat.JaxprEqn) -> None:
        """Passes cuts on between the operands and results of an equation."""
        name = eqn.primitive.name
        is_open = eqn.primitive is treduce_p or id(eqn) in self.opened
        if not is_open and not any(self.of(v) for v in (*eqn.invars, *eqn.outvars)):
            return
        if name == "scan" and self._chop(eqn):
            return
        if eqn.primitive is mark_p:
            for v, out in zip(eqn.invars, eqn.outvars, strict=True):
                self._follow(Link(v, out))
        elif is_open or (name in _LINKS and not eqn.effects):
            self._inside(self._open(eqn))
        else:
            self._by_factor(eqn)
            if name == "reshape":
                self._by_reshape(eqn)

    def _by_reshape(self, eqn: compat.JaxprEqn) -> None:
        """Cuts layers through a reshape that merges their axis with another one, as Muon merges layers and experts."""
        if eqn.params["dimensions"] is not None:  # order="F"
            return
        for v, other in itertools.permutations((eqn.invars[0], eqn.outvars[0])):
            if (rows := self.of(v)) is not None:
                self.add(other, rows.reshaped(v.aval.shape, other.aval.shape))

    def _by_factor(self, eqn: compat.JaxprEqn) -> None:
        for factor in self.factors(eqn):
            atoms = zip((*eqn.invars, *eqn.outvars), (*factor.ins, *factor.outs), strict=True)
            pairs = [(v, axis) for v, axis in atoms if axis is not None]
            cut = next((r for v, a in pairs if (r := self.of(v)) and r.axis == a), None)
            if cut is not None:
                for v, axis in pairs:
                    self.add(v, cut.on(axis))

    def factors(self, eqn: compat.JaxprEqn) -> list[Factor]:
        """Returns the factors of an equation, found once."""
        if id(eqn) not in self._factors:
            self._kept.append(eqn)
            self._factors[id(eqn)] = factors(eqn)
        return self._factors[id(eqn)]

    def _chop(self, eqn: compat.JaxprEqn) -> bool:
        """Marks a scan to be done as several ones if it goes over rows that are cut; returns whether it does."""
        start, end = sum(compat.scan_sizes(eqn)), compat.scan_sizes(eqn)[1]
        scanned = [*eqn.invars[start:], *eqn.outvars[end:]]
        found = next((r for v in scanned if (r := self.of(v)) and r.axis == 0), None)
        if found is None:
            return False
        self._kept.append(eqn)
        self.chopped.setdefault(id(eqn), found)
        for v in scanned:
            self.add(v, found)
        return True

    def _open(self, eqn: compat.JaxprEqn) -> Opened:
        if id(eqn) not in self.opened:
            self._kept.append(eqn)
            opened = self.opened[id(eqn)] = _LINKS[eqn.primitive.name](eqn)
            if eqn.primitive is treduce_p:
                inner = zip(eqn.invars, opened.inner[0].invars, strict=False)
                self.uncut.update(x for v, x in inner if isinstance(v, compat.Var) and v in self.uncut)
        return self.opened[id(eqn)]

    def _inside(self, opened: Opened) -> None:
        for link in opened.links:
            self._follow(link)
        for jaxpr in opened.inner:
            self._through_all(jaxpr.eqns)
        for link in opened.links:
            self._follow(link)

    def _follow(self, link: Link) -> None:
        if (r := self.of(link.first)) and (axis := link.moved(r.axis)) is not None:
            self.add(link.second, r.on(axis))
        if (r := self.of(link.second)) and (axis := link.back(r.axis)) is not None:
            self.add(link.first, r.on(axis))


# --- inside equations -----------------------------------------------------------------------------


def _open_loop(eqn: compat.JaxprEqn) -> Opened:
    """Links the operands of a microbatch loop to its body, and its results according to their reductions."""
    jaxpr: compat.Jaxpr = compat.with_new_vars(eqn.params["jaxpr"]).jaxpr
    links = _alike(eqn.invars, jaxpr.invars[:-1])
    for inner, operation, v in zip(jaxpr.outvars, eqn.params["info"].operations, eqn.outvars, strict=True):
        if operation.is_elementwise:
            links.append(Link(inner, v))
        elif type(operation) is Concat:
            links.append(Link(inner, v, *_around(range(inner.aval.ndim + 1)[operation.axis])))
    return Opened((jaxpr,), tuple(links))


def _alike(first: Sequence[Atom], second: Sequence[Atom], *moved: Callable[[int], int | None]) -> list[Link]:
    return [Link(a, b, *moved) for a, b in zip(first, second, strict=True)]


def _around(new: int) -> tuple[Callable[[int], int | None], Callable[[int], int | None]]:
    """Returns maps between axes without and with a new axis."""
    return (
        lambda axis: axis + (axis >= new),
        lambda axis: None if axis == new else axis - (axis > new),
    )


def _open_scan_or_while(eqn: compat.JaxprEqn) -> Opened:
    loop = OpenLoop.of(eqn)
    links = [Link(*x) for x in (*loop.test_consts, *loop.consts)]
    for c in loop.carry:
        links += [Link(c.first, c.before), Link(c.last, c.after), Link(c.before, c.after), Link(c.after, c.last)]
    links += [Link(x.inner, x.outer, *_around(0)) for x in (*loop.rows, *loop.stacks)]
    inner = (loop.body,) if loop.test is None else (loop.body, loop.test)
    return Opened(inner, tuple(links), loop)


def _open_calls(eqn: compat.JaxprEqn, operands: Sequence[Atom], called: Sequence[compat.ClosedJaxpr]) -> Opened:
    """Opens jaxprs that take the same operands and return the results of the equation."""
    inner = tuple(map(fresh_body, called))
    links = [x for j in inner for x in (*_alike(operands, j.invars), *_alike(j.outvars, eqn.outvars))]
    return Opened(inner, tuple(links))


_LINKS: dict[str, Callable[[compat.JaxprEqn], Opened]] = {
    "treduce": _open_loop,
    "scan": _open_scan_or_while,
    "while": _open_scan_or_while,
    "cond": lambda eqn: _open_calls(eqn, eqn.invars[1:], eqn.params["branches"]),
    compat.CHECKPOINT: lambda eqn: _open_calls(eqn, eqn.invars, [compat.ClosedJaxpr(eqn.params["jaxpr"], ())]),
}
