"""Turns constants into arguments where programs are equal except for them, so that one program serves all.

For example, each layer has its own dropout mask because its key depends on a number (a counter, the hash of the layer's
name), or because its key is another row of `jax.random.split`. Such integers, and the start of such a slice, become
arguments of each call. A constant that floats are computed from stays: without it, XLA would round differently. The
rows that a `scan` reads are no such constants: the program reads them at run time, even when it is compiled alone.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from mpmd import _jax_compat as compat
from mpmd.compile.repeats import repeated_runs
from mpmd.graphs import equations
from mpmd.tracing.folding import integer_of
from mpmd.tracing.new_equations import Atom

# The kind of an equation (without its constants), and the number of one of its constants.
_Site: TypeAlias = tuple[int, int]
# Maps a constant to its replacement; None leaves the constant.
_Fill: TypeAlias = Callable[[compat.Literal], Atom | None]


class WithConstants(NamedTuple):
    """A program with constants as its first arguments, and their values."""

    closed: compat.ClosedJaxpr
    constants: tuple[np.generic, ...]


def with_constants(programs: Sequence[compat.ClosedJaxpr]) -> list[WithConstants]:
    """Returns programs with arguments for the constants that differ between otherwise equal (parts of) programs."""
    kinds: dict[Hashable, int] = {}
    outlines = [_Outline(closed.jaxpr, kinds) for closed in programs]
    sites = _differing(outlines)
    sites -= {site for outline in outlines for site in _unsafe(outline, sites)} if sites else sites
    return [
        _lifted(closed, outline, sites) if sites else WithConstants(closed, ())
        for closed, outline in zip(programs, outlines, strict=True)
    ]


class _Outline:
    """The equations of a program without their constants."""

    def __init__(self, jaxpr: compat.Jaxpr, numbers: dict[Hashable, int]):
        self.jaxpr = jaxpr
        self.kinds: list[int] = []  # per equation, equal for equations that differ only in constants
        self.constants: list[list[int]] = []  # per equation
        self.values: dict[_Site, Counter[int]] = defaultdict(Counter)  # per site, its constants, with their counts
        for eqn in jaxpr.eqns:
            found: list[int] = []

            def blank(literal: compat.Literal, found: list[int] = found) -> compat.Literal:
                found.append(int(literal.val))
                return compat.Literal(np.zeros((), literal.aval.dtype), literal.aval)

            kind = numbers.setdefault(compat.equation_key(_filled(eqn, blank)), len(numbers))
            self.kinds.append(kind)
            self.constants.append(found)
            for k, value in enumerate(found):
                self.values[kind, k][value] += 1
        self.count = Counter(self.kinds)
        self.weights = [1 + sum(1 for _ in compat.equations_inside(e)) for e in jaxpr.eqns]

    def may_hold(self, other: "_Outline") -> bool:
        """Returns whether the other program may be most of this one."""
        return 2 * other.count.total() >= self.count.total() and not other.count - self.count


def _differing(outlines: Sequence[_Outline]) -> set[_Site]:
    """Finds the sites where a program has other constants than an otherwise equal program, or part of a program."""
    found: set[_Site] = set()
    first_of: dict[Hashable, _Outline] = {}
    for outline in outlines:
        first = first_of.setdefault(frozenset(outline.count.items()), outline)
        found.update(site for site, values in outline.values.items() if values != first.values[site])
    for outer in first_of.values():
        for inner in first_of.values():
            if outer is not inner and outer.may_hold(inner):
                found.update(site for site, values in inner.values.items() if values - outer.values[site])
    wholes = list(first_of.values())
    for runs in repeated_runs([w.kinds for w in wholes], [w.weights for w in wholes]) if len(wholes) > 1 else ():
        for places in zip(*(range(run.start, run.start + run.length) for run in runs), strict=True):
            constants = [wholes[run.sequence].constants[i] for run, i in zip(runs, places, strict=True)]
            kind = wholes[runs[0].sequence].kinds[places[0]]
            found.update((kind, k) for k, values in enumerate(zip(*constants, strict=True)) if len(set(values)) > 1)
    return found


def _lifted(closed: compat.ClosedJaxpr, outline: _Outline, sites: set[_Site]) -> WithConstants:
    """Returns a program with the constants at `sites` as its first arguments."""
    arguments: list[tuple[compat.Var, compat.Literal, _Site]] = []
    eqns = list(_with_arguments(outline, sites, arguments))
    jaxpr = compat.new_jaxpr(closed.jaxpr, invars=[*(v for v, _, _ in arguments), *closed.jaxpr.invars], eqns=eqns)
    values = tuple(c.aval.dtype.type(c.val) for _, c, _ in arguments)
    return WithConstants(compat.ClosedJaxpr(jaxpr, closed.consts), values)


def _with_arguments(
    outline: _Outline, sites: set[_Site], arguments: list[tuple[compat.Var, compat.Literal, _Site]]
) -> Iterator[compat.JaxprEqn]:
    """Yields the equations of a program with variables for the constants at `sites`; appends these to `arguments`."""
    kinds = {kind for kind, _ in sites}
    for kind, eqn in zip(outline.kinds, outline.jaxpr.eqns, strict=True):
        numbers = itertools.count()

        def fill(literal: compat.Literal, kind: int = kind, numbers: Iterator[int] = numbers) -> compat.Var | None:
            site = kind, next(numbers)
            if site not in sites:
                return None
            arguments.append((compat.Var(literal.aval), literal, site))
            return arguments[-1][0]

        yield _filled(eqn, fill) if kind in kinds else eqn


# --- the constants of an equation -----------------------------------------------------------------


def _filled(eqn: compat.JaxprEqn, fill: _Fill) -> compat.JaxprEqn:
    """Returns an equation with replaced constants: integer scalars, and the start of a slice.

    For a `checkpoint`, the constants of its inner equations count too. Other equations with inner ones are unchanged.
    """
    name = eqn.primitive.name
    if eqn.effects or (name != compat.CHECKPOINT and any(True for _ in compat.jaxprs_in(eqn.params))):
        return eqn
    if name == "slice" and all(s == 1 for s in eqn.params["strides"] or ()):
        return _filled_slice(eqn, fill)
    atoms = [v if integer_of(v) is None or (found := fill(v)) is None else found for v in eqn.invars]
    eqn = eqn.replace(invars=atoms)
    return _filled_checkpoint(eqn, fill) if name == compat.CHECKPOINT else eqn


def _filled_slice(eqn: compat.JaxprEqn, fill: _Fill) -> compat.JaxprEqn:
    """Returns a slice as a dynamic slice with start operands, if a start is replaced."""
    sizes = eqn.outvars[0].aval.shape
    operand = eqn.invars[0].aval
    starts = [compat.Literal(np.int32(s), _INDEX) for s in eqn.params["start_indices"]]
    atoms = [fill(s) if n < m else None for s, n, m in zip(starts, sizes, operand.shape, strict=True)]
    if all(a is None for a in atoms):
        return eqn
    invars = [eqn.invars[0], *(s if a is None else a for s, a in zip(starts, atoms, strict=True))]
    return eqn.replace(primitive=jax.lax.dynamic_slice_p, invars=invars, params={"slice_sizes": sizes})


def _filled_checkpoint(eqn: compat.JaxprEqn, fill: _Fill) -> compat.JaxprEqn:
    """Returns a checkpoint with the replacements for constants of its inner equations as further operands."""
    more: dict[compat.Var, Atom] = {}

    def inner_fill(literal: compat.Literal) -> Atom | None:
        if (atom := fill(literal)) is None:
            return None
        more[v := compat.Var(literal.aval)] = atom
        return v

    jaxpr = eqn.params["jaxpr"]
    eqns = [_filled(e, inner_fill) for e in jaxpr.eqns]
    if not more:
        return eqn
    params = {**eqn.params, "jaxpr": compat.new_jaxpr(jaxpr, invars=[*jaxpr.invars, *more], eqns=eqns)}
    if isinstance(params["prevent_cse"], tuple):  # one for each operand
        params["prevent_cse"] += (False,) * len(more)
    return eqn.replace(invars=[*eqn.invars, *more.values()], params=params)


_INDEX = compat.shaped_array(np.int32(0))


# --- floats that are made from constants ----------------------------------------------------------

# Their last operands are the arguments of their inner equations; some have more operands before these.
_TRANSPARENT = {compat.CHECKPOINT, "jit", "closed_call", "scan", "cond"}
# These round nothing.
_MOVES = {"dynamic_slice", "slice", "squeeze", "reshape"}


def _unsafe(outline: _Outline, sites: set[_Site]) -> set[_Site]:
    """Returns the sites with constants that XLA would compute floats from."""
    arguments: list[tuple[compat.Var, compat.Literal, _Site]] = []
    eqns = list(_with_arguments(outline, sites, arguments))
    return _reach_floats(eqns, {v: {site} for v, _, site in arguments})


def _reach_floats(eqns: Sequence[compat.JaxprEqn], known: Mapping[compat.Var, set[_Site]]) -> set[_Site]:
    """Returns the sites of constants that floats are computed from.

    Args:
      known: variables that depend only on constants, with the sites of these constants.
    """
    of, found = dict(known), set[_Site]()
    for eqn in eqns:
        operands = equations.variables(eqn.invars)
        is_constant = all(v in of for v in operands) and not eqn.effects
        sites = set[_Site]().union(*(of.get(v, ()) for v in operands))
        if is_constant:
            of.update(dict.fromkeys(eqn.outvars, sites))
        if not sites:
            continue
        inner = list(compat.jaxprs_in(eqn.params))
        moves = is_constant and eqn.primitive.name in _MOVES
        makes_floats = not moves and any(jax.dtypes.issubdtype(v.aval.dtype, np.inexact) for v in eqn.outvars)
        if (makes_floats and (is_constant or not inner)) or (inner and eqn.primitive.name not in _TRANSPARENT):
            found |= sites
            continue
        for jaxpr in inner:
            arguments = list(zip(reversed(jaxpr.invars), reversed(eqn.invars), strict=False))
            if eqn.primitive.name == "scan":  # each iteration reads its row at run time, whatever the program
                arguments = arguments[len(eqn.invars) - sum(compat.scan_sizes(eqn)) :]
            constants = {v: set() if isinstance(x, compat.Literal) else of.get(x) for v, x in arguments}
            found |= _reach_floats(jaxpr.eqns, {v: known for v, known in constants.items() if known is not None})
    return found
