"""Cuts a `cond`, `scan` or `while` outside of the loops into one for each group that holds its operands.

Left whole, such an equation would run in one group and all its operands would be sent there: a `cond` around the
optimizer would put all of its state into one group. Cut, each group has one with the part of the branches (or of the
body) that concerns it, and what is sent is the predicate and what the branches themselves send.

- `cond`: each equation of each branch is pinned as if it stood in the step. Equations of one group that need no more
  transfers before them than others do become one `cond` (a part). A value that crosses inside a branch is a result of
  one part and an operand of the next; where the branch is not taken it is zeros.
- `scan` and `while`: one for each group, with the carries that this group's carries depend on, if these hold nothing
  large of another group. A short `scan` whose iterations do cross groups is unrolled.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from mpmd import _jax_compat as compat
from mpmd.arrays import keys
from mpmd.graphs import equations
from mpmd.graphs.equations import live_equations
from mpmd.ops.reductions import explicit_sharding
from mpmd.partition.pins import Groups, Pins
from mpmd.tracing.inline import inline
from mpmd.tracing.new_equations import Atom, Equations, equations_on, trace_equations

_UNROLLED = 32  # the longest scan that is unrolled
_Pinned = tuple[compat.JaxprEqn, Groups | None]
Donors = Mapping[compat.Var, compat.Var]


def pinned_parts(eqn: compat.JaxprEqn, pins: Pins, donor_of: Donors) -> Iterator[_Pinned]:
    """An equation and its pin, or the parts that it is cut into and theirs; each is recorded in `pins`.

    Args:
      eqn: an equation of the step.
      pins: where everything before it is.
      donor_of: per result of the step, the argument that it takes the place of.
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
    """Whether a scan goes over layers of one stage: marks end the stages, and one group has all that it goes over.

    Its first carry is sent there, an activation.
    """
    if eqn.primitive.name != "scan" or pins.stages is None:
        return False
    n, m = compat.scan_sizes(eqn)
    m += n
    return len(_groups_of(eqn.invars[m:], pins)) == 1 and len(_groups_of(eqn.invars[n:m], pins)) < 2


def _groups_of(atoms: Sequence[Atom], pins: Pins) -> set[Groups]:
    """Where values are, scalars left out."""
    return {
        groups for v in equations.variables(atoms) if (groups := pins.of[v]) is not None and equations.size(v.aval) > 1
    }


def _body_on(closed: compat.ClosedJaxpr, operands: Sequence[Atom]) -> Equations:
    """An inner jaxpr, flat, on given operands."""
    return equations_on(compat.ClosedJaxpr(inline(closed.jaxpr), closed.consts), operands)


# --- cond -----------------------------------------------------------------------------------------

_Part = tuple[int, Groups | None]  # how many transfers come before it, and the groups that run it


class _Branch:
    """One branch of a `cond`: its equations, and the part that each of their results belongs to."""

    def __init__(self, closed: compat.ClosedJaxpr, operands: Sequence[Atom], pins: Pins):
        body = _body_on(closed, operands)
        self.outs = body.outs
        pinned = [(e, pin) for eqn in live_equations(body.eqns, body.outs) for e, pin in pinned_parts(eqn, pins, {})]
        self.eqns = [e for e, _ in pinned]
        self.producer = {v: e for e in self.eqns for v in e.outvars}
        self.part: dict[compat.Var, _Part | None] = {}
        self._sources: dict[compat.Var, set[tuple[int, Groups]]] = {}  # the parts that must run before it is read
        for eqn, pin in pinned:
            # What no group holds is computed again by each part that reads it, from what other parts hand over.
            part = None if pin is None else (self._depth(eqn.invars, pin), pin)
            sources = self._sources_of(eqn.invars) if part is None else {part}
            self.part.update((v, part) for v in eqn.outvars)
            self._sources.update((v, sources) for v in eqn.outvars)

    def _sources_of(self, atoms: Iterable[Atom]) -> set[tuple[int, Groups]]:
        return set().union(*(self._sources.get(v, ()) for v in equations.variables(atoms)))

    def _depth(self, atoms: Iterable[Atom], groups: Groups | None) -> int:
        crossed = ((d, groups is not None and not groups <= where) for d, where in self._sources_of(atoms))
        return max((depth + crosses for depth, crosses in crossed), default=0)

    def depth_of_result(self, j: int, groups: Groups | None) -> int:
        """How many transfers it takes until a result is in `groups`, or (None) until it can be computed."""
        return self._depth([self.outs[j]], groups)

    def needed(self, part: _Part, results: Iterable[Atom]) -> list[compat.JaxprEqn]:
        """The equations of a part: its own that are read, and the ones without a part that they read."""
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
            results[max(b.depth_of_result(j, groups) for b in branches), groups].append(j)
    parts = set(results) | {p for b in branches for p in b.part.values() if p is not None}
    # A part that reads of one of its own depth runs in fewer groups than it, or (None) anywhere.
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
    """Where a result of a `cond` is: with the state that it takes the place of, or where a branch computes it."""
    donor = donor_of.get(v)
    if donor is not None and pins.of[donor] is not None:
        return pins.of[donor]
    return next((g for out in outs if isinstance(out, compat.Var) and (g := pins.of.get(out)) is not None), None)


def _read_elsewhere(
    branch: _Branch, results: dict[_Part, list[int]], order: Sequence[_Part]
) -> dict[_Part, list[compat.Var]]:
    """Per part, the values that other parts of the branch read."""
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
    """The `cond` of one part; None if it would have no result."""
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
    reads = equations.variables([v for eqns, outs in bodies for v in (*(x for e in eqns for x in e.invars), *outs)])
    made = {v for eqns, _ in bodies for e in eqns for v in e.outvars}
    inputs = [v for v in reads if v not in made]
    closed = tuple(compat.with_new_vars(compat.make_jaxpr(inputs, outs, eqns, "branch")) for eqns, outs in bodies)
    outvars = [*(eqn.outvars[j] for j in results), *handed]
    return eqn.replace(invars=[eqn.invars[0], *inputs], outvars=outvars, params={**eqn.params, "branches": closed})


# --- scan and while -------------------------------------------------------------------------------


class _Carried:
    """The body of a `scan` or `while`: which carries and results depend on which carries, and where they are."""

    def __init__(
        self,
        body: Equations,
        ins: Sequence[tuple[compat.Var, Atom]],
        carry: Sequence[compat.Var],
        inits: Sequence[Atom],
        pins: Pins,
    ):
        self.body = body
        self.position = {v: i for i, v in enumerate(carry)}
        self.producer = {v: e for e in body.eqns for v in e.outvars}
        pins.of.update((v, self._of(outer, pins)) for v, outer in [*ins, *zip(carry, inits, strict=True)])
        # Each round finds the place of another carry, until none is found: their number falls.
        for _ in range(len(carry) + 1):
            for eqn in body.eqns:
                pins.bind(eqn, pins.pin(eqn))
            found = {v: g for v, out in zip(carry, body.outs, strict=False) if (g := self._of(out, pins)) is not None}
            new = {v: g for v, g in found.items() if pins.of[v] is None}
            if not new:
                break
            pins.of.update(new)
        self.of = {v: self._of(v, pins) for v in [*carry, *(v for e in body.eqns for v in e.outvars)]}
        self.outs = [self._of(out, pins) for out in body.outs]
        self.ins = {v: pins.of[v] for v, _ in ins}

    @staticmethod
    def _of(v: Atom, pins: Pins) -> Groups | None:
        return None if isinstance(v, compat.Literal) else pins.of.get(v)

    def closure(self, atoms: Iterable[Atom]) -> set[compat.Var]:
        """All that these values depend on, over all iterations."""
        needed: set[compat.Var] = set()
        stack = equations.variables(atoms)
        while stack:
            v = stack.pop()
            if v in needed:
                continue
            needed.add(v)
            if v in self.position:
                stack += equations.variables([self.body.outs[self.position[v]]])
            elif v in self.producer:
                stack += equations.variables(self.producer[v].invars)
        return needed

    def crosses(self, needed: Iterable[compat.Var], groups: Groups | None) -> bool:
        """Whether these values are in other groups too."""
        places = [self.ins.get(v, self.of.get(v)) for v in needed if equations.size(v.aval) > 1]
        return any(p is not None and (groups is None or not groups <= p) for p in places)


def _parts_by_group(eqn: compat.JaxprEqn, outs: Iterable[Groups | None]) -> dict[Groups | None, list[int]]:
    """Per groups, the results of a loop that somebody reads."""
    found: dict[Groups | None, list[int]] = defaultdict(list)
    for j, (v, groups) in enumerate(zip(eqn.outvars, outs, strict=True)):
        if not isinstance(v, compat.DropVar):
            found[groups].append(j)
    return found


def _cut_scan(eqn: compat.JaxprEqn, pins: Pins, donor_of: Donors) -> list[_Pinned] | None:
    n, m = compat.scan_sizes(eqn)
    closed = eqn.params["jaxpr"]
    ins: list = [compat.Var(v.aval) for v in closed.jaxpr.invars]
    carried = _Carried(
        _body_on(closed, ins),
        [(v, x) for i, (v, x) in enumerate(zip(ins, eqn.invars, strict=True)) if not n <= i < n + m],
        ins[n : n + m], eqn.invars[n : n + m], pins,
    )  # fmt: skip
    found = []
    for groups, results in _parts_by_group(eqn, carried.outs).items():
        needed = carried.closure([carried.body.outs[j] for j in results])
        if carried.crosses(needed, groups):
            return _unrolled(eqn, pins, donor_of) if eqn.params["length"] <= _UNROLLED else None
        kept = [i for i, v in enumerate(ins) if v in needed or (n <= i < n + m and i - n in results)]
        carries = [i - n for i in kept if n <= i < n + m]
        outs = [*carries, *(j for j in results if j >= m)]
        made = [carried.body.outs[j] for j in outs]
        body = compat.make_jaxpr([ins[i] for i in kept], made, live_equations(carried.body.eqns, made), "body")
        new = eqn.replace(
            invars=[eqn.invars[i] for i in kept],
            outvars=[eqn.outvars[j] if j in results else compat.DropVar(eqn.outvars[j].aval) for j in outs],
            params=compat.scan_params(eqn, compat.with_new_vars(body), sum(i < n for i in kept), len(carries)),
        )
        found.append((new, groups))
    for new, groups in found:
        pins.bind(new, groups)
    return found


def _unrolled(eqn: compat.JaxprEqn, pins: Pins, donor_of: Donors) -> list[_Pinned]:
    """The iterations of a `scan` one after the other, as equations of the step."""
    params = eqn.params
    (n, m), length = compat.scan_sizes(eqn), params["length"]
    consts, carry, xs = eqn.invars[:n], list(eqn.invars[n : n + m]), eqn.invars[n + m :]
    found: list[_Pinned] = []
    stacked: list[list] = [[None] * length for _ in eqn.outvars[m:]]

    def add(eqns: Iterable[compat.JaxprEqn]) -> None:
        for e in eqns:
            found.extend(pinned_parts(e, pins, donor_of))

    for i in range(length):
        at = length - 1 - i if params["reverse"] else i
        slices = []
        for x in xs:
            eqns, (row,) = trace_equations(lambda x, at=at: jax.lax.index_in_dim(x, at, 0, keepdims=False), x)
            add(eqns)
            slices.append(row)
        body = _body_on(params["jaxpr"], [*consts, *carry, *slices])
        add(body.eqns)
        carry = body.outs[:m]
        for rows, y in zip(stacked, body.outs[m:], strict=True):
            rows[at] = y
    results = [([c], lambda x: jnp.copy(x)) for c in carry] + [(rows, lambda *ys: jnp.stack(ys)) for rows in stacked]
    for v, (atoms, make) in zip(eqn.outvars, results, strict=True):
        if not isinstance(v, compat.DropVar):
            add(trace_equations(make, *atoms).named([v]))
    return found


def _cut_while(eqn: compat.JaxprEqn, pins: Pins, donor_of: Donors) -> list[_Pinned] | None:
    params = eqn.params
    a, b = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, inits = eqn.invars[:a], eqn.invars[a : a + b], eqn.invars[a + b :]
    ins: list = [compat.Var(v.aval) for v in params["body_jaxpr"].jaxpr.invars]
    consts, carry = ins[:b], ins[b:]
    carried = _Carried(
        _body_on(params["body_jaxpr"], ins), list(zip(consts, body_consts, strict=True)), carry, inits, pins
    )
    test_ins = [compat.Var(v.aval) for v in params["cond_jaxpr"].jaxpr.invars[:a]]
    test = _body_on(params["cond_jaxpr"], [*test_ins, *carry])
    read = equations.variables([*(v for e in test.eqns for v in e.invars), *test.outs])
    control = carried.closure([v for v in carry if v in read])
    large = [v for v in equations.variables(cond_consts) if equations.size(v.aval) > 1]
    found = []
    for groups, results in _parts_by_group(eqn, carried.outs).items():
        needed = carried.closure([carried.body.outs[j] for j in results]) | control
        if large or carried.crosses(needed, groups):
            return None
        kept = [j for j in range(len(carry)) if carry[j] in needed or j in results]
        used = [i for i in range(b) if consts[i] in needed]
        outs = [carried.body.outs[j] for j in kept]
        mine = [carry[j] for j in kept]
        body = compat.make_jaxpr(
            [*(consts[i] for i in used), *mine], outs, live_equations(carried.body.eqns, outs), "body"
        )
        condition = compat.make_jaxpr([*test_ins, *mine], test.outs, test.eqns, "condition")
        new = eqn.replace(
            invars=[*cond_consts, *(body_consts[i] for i in used), *(inits[j] for j in kept)],
            outvars=[eqn.outvars[j] if j in results else compat.DropVar(eqn.outvars[j].aval) for j in kept],
            params={
                **params,
                "body_jaxpr": compat.with_new_vars(body),
                "cond_jaxpr": compat.with_new_vars(condition),
                "body_nconsts": len(used),
            },
        )
        found.append((new, groups))
    for new, groups in found:
        pins.bind(new, groups)
    return found


_CUTS = {"cond": _cut_cond, "scan": _cut_scan, "while": _cut_while}
