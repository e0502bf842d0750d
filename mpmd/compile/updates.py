"""Finds the work that the updates of a step have in common: an optimizer treats equal pytree leaves alike.

An update computes a few numbers (a clipping factor, a learning rate, the correction of a moment), then each new leaf
from its old one. The numbers become a program of their own, and arguments of the rest. So the rounding of a leaf
depends on no other leaf, and equal leaves can be compiled once.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.compile.repeats import LEAST
from mpmd.compile.subprogram import Subprogram, num_equations
from mpmd.graphs import equations
from mpmd.tracing.new_equations import Atom

_NUMBERS, _LAST = -1, -2  # labels of equations; labels of leaves count from 0
_FEW = 1024  # the most numbers that are packed into one array


class LeafUpdate(NamedTuple):
    """A part of an update that reads no value of another leaf."""

    piece: Subprogram
    closed: compat.ClosedJaxpr
    donate: tuple[int, ...]  # positions of the arguments that it may take over and that nothing else reads
    kind: Hashable  # a key, equal for leaves that one program can update


class Update(NamedTuple):
    """An update in its parts."""

    numbers: Subprogram  # the equations that depend only on numbers
    leaves: tuple[LeafUpdate, ...]  # the equations of each leaf
    last: Subprogram  # the equations of numbers that depend on several leaves


class Instance(NamedTuple):
    """Leaves of an update that run as one program."""

    number: int  # the number of the update
    leaves: tuple[LeafUpdate, ...]
    piece: Subprogram  # the variables that the program reads and writes
    takes: tuple[tuple[int, ...], ...]  # per leaf, the positions of its arguments among the arguments of the program


def apart(jaxpr: compat.Jaxpr, spec: Callable[[compat.Var], Hashable], free: Sequence[compat.Var]) -> Update | None:
    """Splits a program into numbers and leaves; None if a large value depends on numbers that need several leaves.

    Args:
      spec: returns the sharding of a variable, which is part of the kind of a leaf.
      free: arguments that the program may take over.
    """
    label: dict[compat.Var, int] = {}
    joined: list[int] = []  # union-find: per leaf, a leaf that it is joined with

    def root(n: int) -> int:
        while n >= 0 and joined[n] != n:
            n = joined[n]
        return n

    labels = []
    for eqn in jaxpr.eqns:
        operands = equations.variables(eqn.invars)
        above = {root(label[v]) for v in operands if v in label}
        leaves = sorted(n for n in above if n >= 0)
        if _LAST in above or (len(leaves) > 1 and _is_number(eqn)):
            mine = _LAST
            if any(equations.size(v.aval) > _FEW for v in eqn.outvars):
                return None
        elif not leaves and (_is_number(eqn) or (all(v in label for v in operands) and _picks(eqn))):
            mine = _NUMBERS
        else:
            mine = leaves[0] if leaves else len(joined)
            joined += [mine] if not leaves else []
            for n in leaves[1:]:
                joined[n] = mine
        label.update(dict.fromkeys(eqn.outvars, mine))
        labels.append(mine)
    return _update(jaxpr, [root(n) for n in labels], spec, set(free))


def _is_number(eqn: compat.JaxprEqn) -> bool:
    """Returns whether an equation computes one number from a few, or packs numbers into an array."""
    sizes = [equations.size(v.aval) for v in equations.variables(eqn.invars)]
    if eqn.primitive.name == "concatenate":
        return max(sizes, default=1) == 1
    return max(sizes, default=1) <= _FEW and all(equations.size(v.aval) == 1 for v in eqn.outvars)


def _picks(eqn: compat.JaxprEqn) -> bool:
    """Returns whether an equation makes no more numbers than it reads, or a small constant."""
    sizes = [equations.size(v.aval) for v in equations.variables(eqn.invars)]
    return all(equations.size(v.aval) <= max(sizes, default=_FEW) for v in eqn.outvars)


def _update(
    jaxpr: compat.Jaxpr, labels: Sequence[int], spec: Callable[[compat.Var], Hashable], free: Set[compat.Var]
) -> Update:
    eqns: dict[int, list[compat.JaxprEqn]] = defaultdict(list)
    readers: dict[compat.Var, set[int | None]] = defaultdict(set)
    for eqn, n in zip(jaxpr.eqns, labels, strict=True):
        eqns[n].append(eqn)
        for v in equations.variables(eqn.invars):
            readers[v].add(n)
    for v in equations.variables(jaxpr.outvars):
        readers[v].add(None)

    def piece(n: int) -> Subprogram:
        writes = [v for e in eqns[n] for v in equations.outputs(e) if readers[v] - {n}]
        return Subprogram(tuple(eqns[n]), tuple(equations.free_variables(eqns[n])), tuple(writes))

    def leaf(n: int) -> LeafUpdate:
        whole = piece(n)
        closed = compat.make_jaxpr(whole.reads, whole.writes, whole.eqns, "leaf")
        donate = tuple(i for i, v in enumerate(whole.reads) if v in free and readers[v] == {n})
        specs = tuple(map(spec, (*whole.reads, *whole.writes)))
        return LeafUpdate(whole, closed, donate, (compat.jaxpr_key(closed), specs, donate))

    return Update(piece(_NUMBERS), tuple(leaf(n) for n in dict.fromkeys(labels) if n >= 0), piece(_LAST))


def joined(pieces: Sequence[Subprogram], results: Iterable[Atom]) -> Subprogram:
    """Joins pieces into one, which writes only the variables among `results`."""
    eqns = [e for piece in pieces for e in piece.eqns]
    made, wanted = [v for piece in pieces for v in piece.writes], set(equations.variables(results))
    return Subprogram(tuple(eqns), tuple(equations.free_variables(eqns)), tuple(v for v in made if v in wanted))


# --- what is alike ------------------------------------------------------------------------------


def common_leaves(
    updates: Sequence[Update], on_one_device: bool
) -> tuple[list[list[Subprogram]], list[list[Instance]]]:
    """Returns, per update, the leaves that only it has; and lists of instances that one program can run.

    Args:
      on_one_device: whether each runs on one device. On several devices, a further call has its own collectives.
    """
    leaves: list[dict[Hashable, list[LeafUpdate]]] = []
    for update in updates:
        leaves.append(defaultdict(list))
        for leaf in update.leaves:
            leaves[-1][leaf.kind].append(leaf)
    weights = {kind: num_equations(found[0].closed.jaxpr) for own in leaves for kind, found in own.items()}
    common = []
    counts = [Counter(leaf.kind for leaf in update.leaves) for update in updates]
    for unit in list(_units(counts, weights, [on_one_device and not update.last.eqns for update in updates])):
        taken = [
            (number, [own[kind].pop(0) for kind, times in unit.kinds.items() for _ in range(times)])
            for number, own in enumerate(leaves)
            for _ in range(unit.calls[number])
        ]
        common.append(_instances(taken))
    return [[leaf.piece for found in own.values() for leaf in found] for own in leaves], common


def _instances(taken: Sequence[tuple[int, Sequence[LeafUpdate]]]) -> list[Instance]:
    """Returns the instances of equal leaves. A variable that several leaves read in all instances is one argument."""
    columns = list(zip(*([v for leaf in leaves for v in leaf.piece.reads] for _, leaves in taken), strict=True))
    position = {column: i for i, column in enumerate(dict.fromkeys(columns))}
    at, takes = iter(columns), []
    for leaf in taken[0][1]:
        takes.append(tuple(position[next(at)] for _ in leaf.piece.reads))
    return [
        Instance(
            number,
            tuple(leaves),
            Subprogram((), tuple(c[k] for c in position), tuple(v for leaf in leaves for v in leaf.piece.writes)),
            tuple(takes),
        )
        for k, (number, leaves) in enumerate(taken)
    ]


class _Unit(NamedTuple):
    """Leaves that make one program."""

    kinds: dict[Hashable, int]  # the number of its leaves of each kind
    calls: tuple[int, ...]  # per update, how often it calls the program


def _units(
    left: Sequence[Counter[Hashable]], weights: Mapping[Hashable, int], only_leaves: Sequence[bool]
) -> Iterator[_Unit]:
    """Yields the leaves that updates have in common, the largest saving first.

    Args:
      left: per update, how many leaves of each kind it has; the found ones are subtracted.
      weights: per kind, its equations.
      only_leaves: per update, whether its leaves are all of it.
    """
    while True:
        found = [(_saved(unit, left, weights, only_leaves), unit) for unit in _candidates(left)]
        saved, best = max(found, key=lambda f: f[0], default=(0, None))
        if best is None or saved <= 0:
            return
        yield best
        for count, calls in zip(left, best.calls, strict=True):
            count.subtract({kind: n * calls for kind, n in best.kinds.items()})


def _saved(
    unit: _Unit, left: Sequence[Counter[Hashable]], weights: Mapping[Hashable, int], only_leaves: Sequence[bool]
) -> int:
    """Returns the number of equations that need no compilation, minus the least saving that further calls must have."""
    size = sum(weights[kind] * n for kind, n in unit.kinds.items())
    more = sum(unit.calls)
    for count, calls, is_all in zip(left, unit.calls, only_leaves, strict=True):
        rest = any(n > unit.kinds.get(kind, 0) * calls for kind, n in count.items())
        more -= calls > 0 and is_all and not rest  # the program consists of these calls
    return size * (sum(unit.calls) - 1) - LEAST * more


def _candidates(left: Sequence[Counter]) -> Iterator[_Unit]:
    """Yields kinds with the same proportion between updates, together with all other kinds that are as frequent."""
    numbers = {kind: tuple(count[kind] for count in left) for count in left for kind in count}
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number in numbers.values():
        if times := math.gcd(*number):
            alike[tuple(n // times for n in number)].append(times)
    for proportion, all_times in alike.items():
        most = math.gcd(*all_times)
        for times in range(1, most + 1):
            if most % times == 0:
                calls = tuple(n * times for n in proportion)
                fits = {
                    kind: min(n // c for n, c in zip(number, calls, strict=True) if c)
                    for kind, number in numbers.items()
                }
                yield _Unit({kind: n for kind, n in fits.items() if n}, calls)
