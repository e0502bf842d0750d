"""Finds what the updates of a step do alike: what an optimizer does with the leaves of a layer, in each group.

An update computes a few numbers (a factor that clips, a learning rate, the correction of a moment), then new leaves
from old ones, each for itself. The numbers become a program of their own. They are arguments to the rest, so that the
rounding of a leaf depends on no other leaf, and equal leaves may be compiled once.
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

_NUMBERS, _LAST = -1, -2  # labels of equations; those of leaves are counted from 0
_FEW = 1024  # elements, at most, of numbers that are packed into one array


class LeafUpdate(NamedTuple):
    """A part of an update that reads no value of another leaf.

    Attributes:
      donate: positions of what it alone reads and may take over.
      kind: equal for those that one program can do.
    """

    piece: Subprogram
    closed: compat.ClosedJaxpr
    donate: tuple[int, ...]
    kind: Hashable


class Update(NamedTuple):
    """An update, apart.

    Attributes:
      numbers: what is computed of numbers alone.
      last: numbers that are computed of several leaves.
    """

    numbers: Subprogram
    leaves: tuple[LeafUpdate, ...]
    last: Subprogram


class Instance(NamedTuple):
    """Leaves of an update that run as one program.

    Attributes:
      number: of the update.
      piece: what the program reads and writes.
      takes: per leaf, the positions of its arguments among those of the program.
    """

    number: int
    leaves: tuple[LeafUpdate, ...]
    piece: Subprogram
    takes: tuple[tuple[int, ...], ...]


def apart(jaxpr: compat.Jaxpr, spec: Callable[[compat.Var], Hashable], free: Sequence[compat.Var]) -> Update | None:
    """A program as numbers and leaves; None where leaves are computed of numbers that need several of them.

    Args:
      spec: how a variable is sharded; leaves alike agree in it.
      free: arguments whose memory may be taken over.
    """
    label: dict[compat.Var, int] = {}
    joined: list[int] = []  # of leaves that are parts of one another

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
    """Whether it computes one number of few, or packs numbers into an array."""
    sizes = [equations.size(v.aval) for v in equations.variables(eqn.invars)]
    if eqn.primitive.name == "concatenate":
        return max(sizes, default=1) == 1
    return max(sizes, default=1) <= _FEW and all(equations.size(v.aval) == 1 for v in eqn.outvars)


def _picks(eqn: compat.JaxprEqn) -> bool:
    """Whether it makes no more numbers than it reads: few, or a constant of few."""
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
    """Pieces as one, of which only `results` are read."""
    eqns = [e for piece in pieces for e in piece.eqns]
    made, wanted = [v for piece in pieces for v in piece.writes], set(equations.variables(results))
    return Subprogram(tuple(eqns), tuple(equations.free_variables(eqns)), tuple(v for v in made if v in wanted))


# --- what is alike ------------------------------------------------------------------------------


def common_leaves(
    updates: Sequence[Update], on_one_device: bool
) -> tuple[list[list[Subprogram]], list[list[Instance]]]:
    """Per update, the leaves that it has alone; and lists of instances that one program can run.

    Args:
      on_one_device: whether each runs on one. On several a further call has collectives of its own.
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
    """Leaves alike; what several leaves read is one argument where that is so in all instances."""
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
    """Leaves that make one program.

    Attributes:
      kinds: of its leaves, and how many of each.
      calls: per program, how often it runs this.
    """

    kinds: dict[Hashable, int]
    calls: tuple[int, ...]


def _units(
    left: Sequence[Counter[Hashable]], weights: Mapping[Hashable, int], only_leaves: Sequence[bool]
) -> Iterator[_Unit]:
    """What programs have in common, the most first.

    Args:
      left: for each, how many leaves of a kind it has; what is found is subtracted.
      weights: for each kind, its equations.
      only_leaves: for each, whether nothing is left to do when its leaves are done.
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
    """Equations that are not compiled, less what the calls more must save."""
    size = sum(weights[kind] * n for kind, n in unit.kinds.items())
    more = sum(unit.calls)
    for count, calls, is_all in zip(left, unit.calls, only_leaves, strict=True):
        rest = any(n > unit.kinds.get(kind, 0) * calls for kind, n in count.items())
        more -= calls > 0 and is_all and not rest  # these calls are all of its program
    return size * (sum(unit.calls) - 1) - LEAST * more


def _candidates(left: Sequence[Counter]) -> Iterator[_Unit]:
    """Kinds whose numbers in the programs stand in the same proportion, with what else there is as often."""
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
