"""Cuts a `cond`, `scan` or `while` outside of the loops into one for each group that holds its operands.

As a whole, such an equation would run in one group, and all its operands would be sent there: a `cond` around the
optimizer would put all of its state into one group. After the cut, each group has its own part of the branches (or of
the body). Only the predicate, and values that cross groups inside the branches, are sent.

- `cond`: each equation of each branch is pinned as if it stood in the step. Equations of one group that depend on
  equally many transfers become one `cond` (a part). A value that crosses inside a branch is a result of one part and
  an operand of the next; where the branch is not taken, it is zeros.
- `scan` and `while`: one for each group, with the carries that this group's carries depend on, if no large one of
  these is in another group. A short `scan` with iterations that cross groups is unrolled.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.graphs import equations
from mpmd.graphs.equations import live_equations
from mpmd.graphs.open_loops import OpenLoop, flat_on
from mpmd.ops.reductions import explicit_sharding
from mpmd.partition.pins import Groups, Pins
from mpmd.tracing.new_equations import Atom, trace_equations

_UNROLLED = 32  # the longest scan that is unrolled
_Pinned = tuple[compat.JaxprEqn, Groups | None]
Donors = Mapping[compat.Var, compat.Var]


def pinned_parts(eqn: compat.JaxprEqn, pins: Pins, donor_of: Donors) -> Iterator[_Pinned]:
    """Yields an equation and its pin, or the parts that it is cut into and their pins. Records each in `pins`.

    Args:
      pins: the groups of all values before it.
      donor_of: per result of the step, the argument that it replaces.
    """
    cut = _CUTS.get(eqn.primitive.name)
    is_torn = cut is not None and not eqn.effects and len(_groups_of(eqn.invars, pins)) > 1
    is_torn = is_torn and not _is_of_one_stage(eqn, pins)
    if cut is not None and is_torn and (parts := cut(eqn, pins, donor_of)) is not None:
        yield from parts
        return
    pin = pins.pin(eqn)
    pins.bind(eqn, pin)
    yield eqn, pin


def _is_of_one_stage(eqn: compat.JaxprEqn, pins: Pins) -> bool:
    """Returns whether a scan is over layers of one stage: marks end the stages, and one group has all scanned arrays.

    Its first carry, an activation, is sent there.
    """
    if eqn.primitive.name != "scan" or pins.stages is None:
        return False
    n, m = compat.scan_sizes(eqn)
    m += n
    return len(_groups_of(eqn.invars[m:], pins)) == 1 and len(_groups_of(eqn.invars[n:m], pins)) < 2


def _groups_of(atoms: Sequence[Atom], pins: Pins) -> set[Groups]:
    """Returns the groups of values, without scalars."""
    return {
        groups for v in equations.variables(atoms) if (groups := pins.of[v]) is not None and equations.size(v.aval) > 1
    }


# --- cond -----------------------------------------------------------------------------------------

_Part = tuple[int, Groups | None]  # the number of transfers that it depends on, and the groups that run it


class _Branch:
    """One branch of a `cond`: its equations, and the part that each of their results belongs to."""

    def __init__(self, closed: compat.ClosedJaxpr, operands: Sequence[Atom], pins: Pins):
        body = flat_on(closed, operands)
        self.outs = body.outs
        pinned = [(e, pin) for eqn in live_equations(body.eqns, body.outs) for e, pin in pinned_parts(eqn, pins, {})]
        self.eqns = [e for e, _ in pinned]
        self.producer = {v: e for e in self.eqns for v in e.outvars}
        self.part: dict[compat.Var, _Part | None] = {}
        self._sources: dict[compat.Var, set[tuple[int, Groups]]] = {}  # the parts that must run before it is read
        for eqn, pin in pinned:
            # An equation that belongs to no group is repeated in each part that reads it, from results of other parts.
            part = None if pin is None else (self.depth(eqn.invars, pin), pin)
            sources = self._sources_of(eqn.invars) if part is None else {part}
            self.part.update((v, part) for v in eqn.outvars)
            self._sources.update((v, sources) for v in eqn.outvars)

    def _sources_of(self, atoms: Iterable[Atom]) -> set[tuple[int, Groups]]:
        return set().union(*(self._sources.get(v, ()) for v in equations.variables(atoms)))

    def depth(self, atoms: Iterable[Atom], groups: Groups | None) -> int:
        """Returns the number of transfers before values are in `groups`, or (None) before they can be computed."""
        crossed = ((d, groups is not None and not groups <= where) for d, where in self._sources_of(atoms))
        return max((depth + crosses for depth, crosses in crossed), default=0)

    def needed(self, part: _Part, results: Iterable[Atom]) -> list[compat.JaxprEqn]:
        """Returns the equations of a part: its own, and equations without a part that they or `results` need."""
        own = {id(e) for e in self.eqns if self.part[e.outvars[0]] == part}
        wanted = set(equations.variables(results))
        for eqn in reversed(self.eqns):
            free = self.part[eqn.outvars[0]] is None and any(v in wanted for v in eqn.outvars)
            if id(eqn) in own or free:
                own.add(id(eqn))
                wanted.update(equations.variables(eqn.invars))
        return [e for e in self.eqns if id(e) in own]


def _cut_cond(eqn: compat.JaxprEqn, pins: Pins, donor_of: Donors) -> list[_Pinned] | None:
    branches = [_Branch(closed, eqn.invars[1:], pins) for closed in eqn.params["branches"]]
    results: dict[_Part, list[int]] = defaultdict(list)
    for j, v in enumerate(eqn.outvars):
        if not isinstance(v, compat.DropVar):
            groups = _result_groups(v, [b.outs[j] for b in branches], pins, donor_of)
            results[max(b.depth([b.outs[j]], groups) for b in branches), groups].append(j)
    parts = set(results) | {p for b in branches for p in b.part.values() if p is not None}
    # A part that reads from another part of its depth runs in fewer groups than that one, or (None) anywhere.
    order = sorted(parts, key=lambda p: (p[0], -len(p[1] or ()), sorted(p[1] or ())))
    crossing = [_read_elsewhere(b, results, order) for b in branches]
    found = []
    for part in order:
        new = _part_of_cond(eqn, branches, part, results[part], [c[part] for c in crossing])
        if new is not None:
            pins.bind(new, part[1])
            found.append((new, part[1]))
    return found


def _result_groups(v: compat.Var, outs: Iterable[Atom], pins: Pins, donor_of: Donors) -> Groups | None:
    """Returns the groups of a result of a `cond`: the groups of the state that it replaces, or of a branch's result."""
    donor = donor_of.get(v)
    if donor is not None and pins.of[donor] is not None:
        return pins.of[donor]
    return next((g for out in outs if isinstance(out, compat.Var) and (g := pins.of.get(out)) is not None), None)


def _read_elsewhere(
    branch: _Branch, results: dict[_Part, list[int]], order: Sequence[_Part]
) -> dict[_Part, list[compat.Var]]:
    """Returns, per part, the values that other parts of the branch read."""
    readers: dict[compat.Var, set[_Part]] = defaultdict(set)
    for part in order:
        outs = [branch.outs[j] for j in results[part]]
        for e in branch.needed(part, outs):
            for v in equations.variables(e.invars):
                readers[v].add(part)
        for v in equations.variables(outs):
            readers[v].add(part)
    found: dict[_Part, list[compat.Var]] = defaultdict(list)
    for v, wanted in readers.items():
        home = branch.part.get(v)
        if home is not None and wanted != {home}:
            found[home].append(v)
    return found


def _part_of_cond(
    eqn: compat.JaxprEqn,
    branches: Sequence[_Branch],
    part: _Part,
    results: Sequence[int],
    crossing: Sequence[Sequence[compat.Var]],
) -> compat.JaxprEqn | None:
    """Returns the `cond` of one part; None if it would have no result."""
    handed = [v for values in crossing for v in values]
    if not results and not handed:
        return None
    bodies = []
    for branch, own in zip(branches, crossing, strict=True):
        outs: list = [branch.outs[j] for j in results]
        eqns = branch.needed(part, outs)
        for v in handed:
            if v in own:
                outs.append(v)
            else:
                zeros, made = trace_equations(
                    lambda aval=v.aval: keys.zeros(aval.shape, aval.dtype, explicit_sharding(aval))
                )
                eqns += zeros
                outs += made
        bodies.append((eqns, outs))
    inputs = equations.variables(v for eqns, outs in bodies for v in equations.free_variables(eqns, outs))
    closed = tuple(compat.with_new_vars(compat.make_jaxpr(inputs, outs, eqns, "branch")) for eqns, outs in bodies)
    outvars = [*(eqn.outvars[j] for j in results), *handed]
    return eqn.replace(invars=[eqn.invars[0], *inputs], outvars=outvars, params={**eqn.params, "branches": closed})


# --- scan and while -------------------------------------------------------------------------------


class _Carried:
    """The iterations of a loop: the carries that each carry and result depends on, and their groups."""

    def __init__(self, loop: OpenLoop, pins: Pins):
        self.next = {c.before: c.after for c in loop.carry}
        self.producer = {v: e for e in loop.eqns for v in e.outvars}
        self.pins = pins
        outer = [*loop.consts, *loop.rows, *((c.first, c.before) for c in loop.carry)]
        pins.of.update((v, self.groups(x)) for x, v in outer)
        # Each round places another carry, or is the last.
        for _ in range(len(loop.carry) + 1):
            for eqn in loop.eqns:
                pins.bind(eqn, pins.pin(eqn))
            new = {v: self.groups(x) for v, x in self.next.items() if pins.of[v] is None}
            if not any(groups is not None for groups in new.values()):
                break
            pins.of.update(new)

    def groups(self, v: Atom) -> Groups | None:
        """Returns the groups of a value."""
        return None if isinstance(v, compat.Literal) else self.pins.of.get(v)

    def closure(self, atoms: Iterable[Atom]) -> set[compat.Var]:
        """Returns all variables that these values depend on, over all iterations."""
        needed: set[compat.Var] = set()
        stack = equations.variables(atoms)
        while stack:
            if (v := stack.pop()) not in needed:
                needed.add(v)
                reads = [self.next[v]] if v in self.next else self.producer[v].invars if v in self.producer else []
                stack += equations.variables(reads)
        return needed

    def crosses(self, needed: Iterable[compat.Var], groups: Groups | None) -> bool:
        """Returns whether any of these values, except scalars, is in other groups."""
        places = [self.groups(v) for v in needed if equations.size(v.aval) > 1]
        return any(p is not None and (groups is None or not groups <= p) for p in places)


def _cut_loop(eqn: compat.JaxprEqn, pins: Pins, donor_of: Donors) -> list[_Pinned] | None:
    loop = OpenLoop.of(eqn)
    carried = _Carried(loop, pins)
    control: set[compat.Var] = set()
    if loop.test is not None:
        if any(equations.size(c.inner.aval) > 1 for c in loop.test_consts):
            return None
        control = carried.closure(equations.free_variables(loop.test.eqns, loop.test.outvars))
    results: dict[Groups | None, dict[compat.Var, Atom]] = defaultdict(dict)  # live results
    for v, x in [*((c.last, c.after) for c in loop.carry), *((s.outer, s.inner) for s in loop.stacks)]:
        if not isinstance(v, compat.DropVar):
            results[carried.groups(x)][v] = x
    found = []
    for groups, own in results.items():
        needed = carried.closure(own.values()) | control
        if carried.crosses(needed, groups):
            is_short = eqn.primitive.name == "scan" and eqn.params["length"] <= _UNROLLED
            return _unrolled(eqn, pins, donor_of) if is_short else None
        carry = [c for c in loop.carry if c.before in needed or c.last in own]
        part = dataclasses.replace(
            loop,
            consts=[c for c in loop.consts if c.inner in needed],
            carry=[c if c.last in own else c._replace(last=compat.DropVar(c.last.aval)) for c in carry],
            rows=[r for r in loop.rows if r.inner in needed],
            stacks=[s for s in loop.stacks if s.outer in own],
        )
        found.append((part.closed(), groups))
    for new, groups in found:
        pins.bind(new, groups)
    return found


def _unrolled(eqn: compat.JaxprEqn, pins: Pins, donor_of: Donors) -> list[_Pinned]:
    """Unrolls a `scan` into equations of the step."""
    (n, m), run = compat.scan_sizes(eqn), compat.jaxpr_as_fun(eqn.params["jaxpr"])
    numbers = range(eqn.params["length"])
    wanted = [i for i, v in enumerate(eqn.outvars) if not isinstance(v, compat.DropVar)]

    def iterations(*operands: jax.Array) -> list[jax.Array]:
        consts, carry, xs = operands[:n], operands[n : n + m], operands[n + m :]
        rows: dict[int, Sequence[jax.Array]] = {}
        for i in reversed(numbers) if eqn.params["reverse"] else numbers:
            outs = run(*consts, *carry, *(jax.lax.index_in_dim(x, i, 0, keepdims=False) for x in xs))
            carry, rows[i] = outs[:m], outs[m:]
        return [jnp.copy(carry[i]) if i < m else stack(i, [rows[k][i - m] for k in numbers]) for i in wanted]

    def stack(i: int, rows: Sequence[jax.Array]) -> jax.Array:
        aval = eqn.outvars[i].aval
        return jnp.stack(rows) if rows else keys.zeros(aval.shape, aval.dtype, explicit_sharding(aval))

    eqns = trace_equations(iterations, *eqn.invars).named([eqn.outvars[i] for i in wanted])
    return [part for e in eqns for part in pinned_parts(e, pins, donor_of)]


_CUTS = {"cond": _cut_cond, "scan": _cut_loop, "while": _cut_loop}
