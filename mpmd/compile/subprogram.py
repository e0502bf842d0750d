"""Finds one program inside of a larger one, such as a middle stage inside of the first one.

The first stage of a model is a middle stage behind an embedding, the last one is a middle stage before a loss, and so
are their backward tasks. A program that contains another one completely is cut into that program and the rest before
and after it.

The inner program may add a gradient that a later stage sends (of an encoder's output, or a position bias) to its own
gradient. The last stage receives nothing to add: it runs the inner program with -0.0, which changes no number.
"""

import dataclasses
import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.tracing.new_equations import Atom, full_equations


class ReuseRule(NamedTuple):
    """The rule by which a program may run another one as a part.

    Attributes:
      independent: whether the part and the rest may share no value that floats are rounded with. They may share arrays
        of integers, and keys.
    """

    independent: bool
    by_leaves: bool = False  # whether the program is an update, with leaves that may be separate programs


TASKS = ReuseRule(independent=False)
UPDATES = ReuseRule(independent=True, by_leaves=True)
# The rounding of leaves that use a common scalar depends on the number of these leaves, and so on the schedule.
SEGMENTS = ReuseRule(independent=True)


@dataclasses.dataclass(frozen=True)
class Subprogram:
    """A part of a program, in the program's variables."""

    eqns: tuple[compat.JaxprEqn, ...]
    reads: tuple[compat.Var, ...]
    writes: tuple[compat.Var, ...]


@dataclasses.dataclass(frozen=True)
class Division:
    """A program in pieces."""

    pieces: tuple[Subprogram, ...]  # the pieces, in the order in which they run
    inner: int  # the position of the piece that is the program that was sought

    @property
    def is_independent(self) -> bool:
        """Whether the inner program shares no number and no floats with the other pieces."""
        inner = self.pieces[self.inner]
        others = {v for piece in self.pieces if piece is not inner for v in (*piece.reads, *piece.writes)}
        return not any(_is_rounded_with(v) for v in others.intersection((*inner.reads, *inner.writes)))


def num_equations(jaxpr: compat.Jaxpr) -> int:
    """Counts equations, including the equations of the functions that they call."""
    return sum(1 for _ in compat.all_equations(jaxpr))


class Pattern:
    """A jaxpr, prepared to be found in others, and to find others in it.

    Args:
      numbers: numbers of the kinds of equations; one dict for all patterns that are compared.
    """

    def __init__(self, jaxpr: compat.Jaxpr, numbers: dict[Hashable, int]):
        self.jaxpr = jaxpr
        self.weights = [1 + sum(1 for _ in compat.equations_inside(e)) for e in jaxpr.eqns]
        self.size = sum(self.weights)
        self.kinds = [numbers.setdefault(compat.equation_key(e), len(numbers)) for e in jaxpr.eqns]
        self.origin = {v: (i, k) for i, e in enumerate(jaxpr.eqns) for k, v in enumerate(e.outvars)}
        made = [v for v in jaxpr.outvars if not isinstance(v, compat.Literal) and v in self.origin]
        self.can_be_cut = len(set(made)) == len(jaxpr.outvars) and not jaxpr.effects
        self._num_of_kind = Counter(self.kinds)

    @functools.cached_property
    def open_sums(self) -> dict[compat.Var, tuple[compat.Var, compat.Var]]:
        """Sums of an argument that nothing else reads and a value made here; maps each to these two."""
        num_reads = Counter(v for e in self.jaxpr.eqns for v in equations.variables(e.invars))
        arguments = {v for v in self.jaxpr.invars if num_reads[v] == 1}.difference(self.jaxpr.outvars)
        found = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name == SUM and _has_minus_zero(eqn.outvars[0].aval):
                (a, b), (out,) = eqn.invars, eqn.outvars
                for argument, made in ((a, b), (b, a)):
                    if argument in arguments and made in self.origin:
                        found[out] = argument, made
        return found

    @functools.cached_property
    def num_above(self) -> list[int]:
        """Per equation, the number of equations that it depends on."""
        above: list[int] = []  # sets of positions, as the bits of integers
        for eqn in self.jaxpr.eqns:
            found = {self.origin[v][0] for v in equations.variables(eqn.invars) if v in self.origin}
            above.append(functools.reduce(operator.or_, (above[i] | 1 << i for i in found), 0))
        return [bits.bit_count() for bits in above]

    @functools.cached_property
    def readers(self) -> list[set[int]]:
        """Per equation, the positions of the equations that read it; -1 for the caller of the program."""
        found: list[set[int]] = [set() for _ in self.kinds]
        for i, eqn in enumerate(self.jaxpr.eqns):
            for v in equations.variables(eqn.invars):
                if v in self.origin:
                    found[self.origin[v][0]].add(i)
        for v in equations.variables(self.jaxpr.outvars):
            if v in self.origin:
                found[self.origin[v][0]].add(-1)
        return found

    def cut(self, inner: "Pattern") -> Division | None:
        """Divides this program into `inner` and the rest.

        Returns None if `inner` is not found; if another equation reads a value from inside it (except keys and small
        integers, which are computed twice), or lies between its results and its arguments; and if the program returns
        an argument, or a result twice, since XLA would copy it.
        """
        if not self.can_be_cut or inner.jaxpr.effects or inner.size > self.size:
            return None
        sums = Counter(inner.kinds[inner.origin[v][0]] for v in inner.open_sums)
        if inner._num_of_kind - self._num_of_kind - sums:
            return None
        found = self._find(inner)
        return None if found is None else self._around(inner, found)

    def _find(self, inner: "Pattern") -> dict | None:
        """Maps the variables of `inner` to variables of this program.

        Given the results of `inner`, all variables that they depend on follow. For each result, from the one with the
        most equations above it, the search takes the first equation here with matching equations above it. It does not
        backtrack.
        """
        candidates = defaultdict(list)
        for kind, eqn in zip(self.kinds, self.jaxpr.eqns, strict=True):
            candidates[kind].append(eqn)
        here: dict = {}
        taken: set = set()
        results = [v for v in inner.jaxpr.outvars if not isinstance(v, compat.Literal) and v in inner.origin]
        for v in sorted(results, key=lambda v: inner.num_above[inner.origin[v][0]], reverse=True):
            made = [inner.origin[u] for u in (v, *inner.open_sums.get(v, ())[1:])]
            alike = (e.outvars[k] for position, k in made for e in candidates[inner.kinds[position]])
            if v not in here and not any(self._match(inner, v, w, here, taken) for w in alike):
                return None
        return here

    def _match(self, inner: "Pattern", v: Atom, w: Atom, here: dict[compat.Var, Atom], taken: set[Atom]) -> bool:
        """Records `w` for `v`, and likewise all variables that they depend on; records nothing after a mismatch.

        If only an open sum does not match, `w` stands for the sum with -0.0, and its argument gets a new variable.
        """
        added, now_taken = [], []
        waiting = [(v, w)]
        while waiting:
            v, w = waiting.pop()
            if isinstance(v, compat.Literal) or here.get(v) is w:
                continue  # literals are part of an equation's kind
            pairs = self._pairs(inner, v, w)
            if not pairs and v in inner.open_sums and inner.open_sums[v][0] not in here and v not in here:
                argument, made = inner.open_sums[v]
                here.update({v: w, argument: compat.Var(argument.aval)})
                added += [v, argument]
                waiting.append((made, w))
                continue
            if not pairs or any(a in here or b in taken for a, b in pairs):
                for a in added:
                    del here[a]
                taken.difference_update(now_taken)
                return False
            here.update(pairs)
            taken.update(b for _, b in pairs)
            added += [a for a, _ in pairs]
            now_taken += [b for _, b in pairs]
            if v in inner.origin:
                above = inner.jaxpr.eqns[inner.origin[v][0]].invars, self.jaxpr.eqns[self.origin[w][0]].invars
                waiting += zip(*above, strict=True)
        return True

    def _pairs(self, inner: "Pattern", v: compat.Var, w: Atom) -> list[tuple[compat.Var, Atom]]:
        """Returns the pairs that match if `v` and `w` do: all results of their equations."""
        if isinstance(w, compat.Literal):
            return []
        if v not in inner.origin:
            return [(v, w)]
        if w not in self.origin:
            return []
        (i, k), (j, m) = inner.origin[v], self.origin[w]
        if k != m or inner.kinds[i] != self.kinds[j]:
            return []
        return list(zip(inner.jaxpr.eqns[i].outvars, self.jaxpr.eqns[j].outvars, strict=True))

    def _around(self, inner: "Pattern", here: dict) -> Division | None:
        """Returns the pieces, once `inner` is found."""
        mine = {*self.origin, *self.jaxpr.invars}
        nothing = {v: here[a] for v, (a, _) in inner.open_sums.items() if a in here and here[a] not in mine}
        inside = {self.origin[w][0] for v, w in here.items() if v in inner.origin and v not in nothing}
        if len(inside) + len(nothing) != len(inner.kinds) or not here.keys() >= set(inner.jaxpr.invars):
            return None
        reads = tuple(here[v] for v in inner.jaxpr.invars)
        writes: dict[compat.Var, None] = {}
        for v in inner.jaxpr.outvars:
            is_new = not isinstance(v, compat.Literal) and v in inner.origin and here[v] not in writes
            writes[here[v] if is_new else compat.Var(v.aval)] = None

        outside = [e for i, e in enumerate(self.jaxpr.eqns) if i not in inside]
        hidden = {w for i in inside for w in self.jaxpr.eqns[i].outvars}.difference(writes)
        if not hidden.isdisjoint(self.jaxpr.outvars):
            return None
        wanted = hidden.intersection(v for e in outside for v in equations.variables(e.invars))
        copied = equations.live_equations([self.jaxpr.eqns[i] for i in sorted(inside)], wanted)
        if not all(map(_is_copied, copied)):
            return None
        names = {v: compat.Var(v.aval) for e in copied for v in e.outvars}
        outside = compat.renamed_equations([*copied, *outside], names)
        outside = [e for v in nothing.values() for e in full_equations(v, -0.0)] + outside
        needed = {id(e) for e in equations.live_equations(outside, reads)}
        before = [e for e in outside if id(e) in needed]
        if any(v in writes for e in before for v in equations.variables(e.invars)):
            return None
        after = [e for e in outside if id(e) not in needed]
        if before and not any(v in writes for e in after for v in equations.variables(e.invars)):
            before, after = outside, []
        last = _piece(after, self.jaxpr.outvars)
        first = _piece(before, (*reads, *last.reads, *self.jaxpr.outvars))
        found = Subprogram(tuple(self.jaxpr.eqns[i] for i in sorted(inside)), reads, tuple(writes))
        return Division(tuple(p for p in (first, found, last) if p.eqns), 1 if before else 0)


SUM = "add_any"


def _has_minus_zero(aval: compat.Aval) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, np.floating) and aval.dtype.itemsize > 1


def _is_rounded_with(v: compat.Var) -> bool:
    """Returns whether floats may be computed from a variable: a number or floats, unlike a key or indices."""
    dtype: DTypeLike = v.aval.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    return equations.size(v.aval) == 1 or jax.dtypes.issubdtype(dtype, np.inexact)


def _is_copied(eqn: compat.JaxprEqn) -> bool:
    """Returns whether the equations around the inner program may repeat this one: it makes a few integers or keys, or
    passes on a literal.
    """
    given = eqn.primitive.name in _GIVING and all(isinstance(v, compat.Literal) for v in eqn.invars)
    exact = given or not any(jax.dtypes.issubdtype(v.aval.dtype, np.inexact) for v in eqn.outvars)
    return exact and not equations.is_heavy(eqn) and sum(equations.size(v.aval) for v in eqn.outvars) <= _MAX_COPIED


_MAX_COPIED = 1024
_GIVING = frozenset(("broadcast_in_dim", "reshard"))


def _piece(eqns: Sequence[compat.JaxprEqn], wanted: Sequence[Atom]) -> Subprogram:
    """Makes a subprogram of equations: it reads their free variables, and writes the wanted ones of their results."""
    made = {v for e in eqns for v in equations.outputs(e)}
    writes = dict.fromkeys(v for v in wanted if v in made)
    return Subprogram(tuple(eqns), tuple(equations.free_variables(eqns)), tuple(writes))
