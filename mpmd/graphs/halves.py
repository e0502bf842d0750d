"""Divides an equation that holds others into an urgent one and the rest: backwards of checkpoints, scans, branches.

One equation computes all gradients of such a block. A schedule that splits the backward needs the gradient of the
block's input soon and those of its weights later. So the urgent equation computes the urgent results, and also returns
values for the rest: the fewest bytes (`kept.py`) with which no matrix product is done twice. The recomputation of the
forward in such a block is split off in the same way: it needs no gradient, so it can run before the gradient arrives.
Each kind of equation has a rule that opens and closes it; the equations inside are divided by the same functions.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mpmd import _jax_compat as compat
from mpmd.graphs import equations
from mpmd.graphs.kept import equations_between, fewest_bytes
from mpmd.graphs.open_loops import Carry, OpenLoop, Operand, Stack, fresh_body
from mpmd.ops.reductions import explicit_sharding
from mpmd.tracing.new_equations import Atom, Equations, trace_equations

_LAST_RESORT = 1 << 60  # bytes


@dataclasses.dataclass(frozen=True)
class KeptBytes:
    """Bytes that are held so that the rest can read a value."""

    known: Mapping[compat.Var, int]  # of some variables; any other variable costs the bytes of its type, `times` over
    times: int = 1  # how often the divided equations run, in the loops around them
    scalars: bool = True  # whether a scalar can be held; a `shard_map` cannot return one

    def of(self, atom: Atom) -> int:
        """Returns the bytes of a variable; a literal costs nothing."""
        if isinstance(atom, compat.Literal):
            return 0
        nbytes = equations.nbytes(atom.aval) * self.times
        return self.known.get(atom, nbytes if self.scalars or atom.aval.shape else _LAST_RESORT)

    def inside(self, operands: Iterable[tuple[Atom, compat.Var]], times: int = 1, scalars: bool = True) -> "KeptBytes":
        """Returns the costs for inner equations; `operands` pairs each operand with the inner argument it becomes."""
        return KeptBytes({inner: self.of(outer) for outer, inner in operands}, self.times * times, scalars)


class Halves(NamedTuple):
    """A divided equation. `rest` reads operands of the equation and results of `first`; it has no effects."""

    first: compat.JaxprEqn
    rest: compat.JaxprEqn


def halves(eqn: compat.JaxprEqn, urgent: Collection[compat.Var], costs: KeptBytes) -> Halves | None:
    """Divides an equation; returns None if its kind has no rule, or nothing heavy is left for the rest.

    Args:
      urgent: the urgent results; its effects are urgent too.
    """
    return _ruled(eqn, _Urgent(urgent), costs)


def recomputation(eqn: compat.JaxprEqn, late: Collection[compat.Var], costs: KeptBytes) -> Halves | None:
    """Splits off the part that needs no late operand; returns None if the kind has no rule, or that part is not heavy.

    Args:
      late: the operands that arrive last; effects are in the rest.
    """
    return _ruled(eqn, _Late(late), costs)


def _ruled(eqn: compat.JaxprEqn, cut: "_Urgent | _Late", costs: KeptBytes) -> Halves | None:
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, cut, costs) if rule and equations.works_hard(eqn) else None


class _Divided(NamedTuple):
    """The equations that come first, with all that they read, and the others."""

    first: list[compat.JaxprEqn]
    rest: list[compat.JaxprEqn]
    needed: Collection[Atom] = ()  # the values that the first equations read and return
    late: Collection[Atom] = ()  # for `_Late`, all values that depend on a late operand

    def makes_later(self, atom: Atom) -> bool:
        """Returns whether the rest makes a value."""
        return not isinstance(atom, compat.Literal) and (atom in self.late or any(atom in e.outvars for e in self.rest))


class _Urgent(NamedTuple):
    """The first equation computes these results."""

    results: Collection[compat.Var]

    def of_loop(self, loop: OpenLoop, costs: KeptBytes) -> tuple[list[bool], _Divided]:
        """Returns which carries the first loop has, and how the equations are divided."""
        soon = [s.inner for s in loop.stacks if s.outer in self.results]
        carried = [c.last in self.results for c in loop.carry]
        while True:
            ends = [c.after for c, is_urgent in zip(loop.carry, carried, strict=True) if is_urgent]
            divided = _divided(loop.eqns, [*ends, *soon], costs)
            more = [is_urgent or c.before in divided.needed for c, is_urgent in zip(loop.carry, carried, strict=True)]
            if more == carried:  # else another carry is urgent; their number is finite
                return carried, divided
            carried = more

    def of_call(self, eqn: compat.JaxprEqn, first: int, body: compat.Jaxpr, costs: KeptBytes) -> _Divided:
        """Divides the equations of a jaxpr that the equation calls on its operands from number `first` on."""
        pairs = zip(eqn.outvars, body.outvars, strict=True)
        return _divided(body.eqns, [inner for outer, inner in pairs if outer in self.results], costs)

    def is_worth_it(self, first: Sequence[compat.JaxprEqn], rest: Sequence[compat.JaxprEqn]) -> bool:
        """Returns whether two halves are better than one equation."""
        return any(map(equations.works_hard, rest))


class _Late(NamedTuple):
    """The first equation computes everything that needs none of these operands."""

    operands: Collection[Atom]

    def of_loop(self, loop: OpenLoop, costs: KeptBytes) -> tuple[list[bool], _Divided]:
        """Does the same as `_Urgent.of_loop`."""
        late = {x.inner for x in (*loop.consts, *loop.rows) if self._is_late(x.outer)}
        carried = [not self._is_late(c.first) for c in loop.carry]
        while True:
            more = {c.before for c, is_early in zip(loop.carry, carried, strict=True) if not is_early}
            divided = _divided_ahead(loop.eqns, late | more, costs)
            fewer = [
                is_early and not divided.makes_later(c.after) for c, is_early in zip(loop.carry, carried, strict=True)
            ]
            if fewer == carried:  # else another carry is late; their number is finite
                return carried, divided
            carried = fewer

    def of_call(self, eqn: compat.JaxprEqn, first: int, body: compat.Jaxpr, costs: KeptBytes) -> _Divided:
        """Does the same as `_Urgent.of_call`."""
        if any(map(self._is_late, eqn.invars[:first])):
            return _Divided([], list(body.eqns), late={v for e in body.eqns for v in e.outvars}.union(body.invars))
        pairs = zip(eqn.invars[first:], body.invars, strict=True)
        return _divided_ahead(body.eqns, {inner for outer, inner in pairs if self._is_late(outer)}, costs)

    def is_worth_it(self, first: Sequence[compat.JaxprEqn], rest: Sequence[compat.JaxprEqn]) -> bool:
        """Does the same as `_Urgent.is_worth_it`."""
        return any(map(equations.works_hard, first))

    def _is_late(self, atom: Atom) -> bool:
        return not isinstance(atom, compat.Literal) and atom in self.operands


def _divided_ahead(eqns: Sequence[compat.JaxprEqn], late: Collection[compat.Var], costs: KeptBytes) -> _Divided:
    """Divides equations into those that depend on nothing late, and the rest."""
    late, first, rest = set(late), [], []
    for eqn in eqns:
        reads = late.intersection(equations.variables(eqn.invars))
        if not reads and not compat.has_effects(eqn):
            first.append(eqn)
            continue
        if (pair := recomputation(eqn, reads, costs)) is not None:
            first.append(pair.first)
            eqn = pair.rest
        rest.append(eqn)
        late.update(eqn.outvars)
    return _Divided(first, rest, late=late)


def _divided(eqns: Sequence[compat.JaxprEqn], urgent: Iterable[Atom], costs: KeptBytes) -> _Divided:
    needed = set(equations.variables(urgent))
    first, rest = [], []
    for eqn in reversed(eqns):
        soon = [v for v in equations.outputs(eqn) if v in needed]
        if not soon and not compat.has_effects(eqn):
            rest.append(eqn)
            continue
        if (pair := halves(eqn, soon, costs)) is not None:
            eqn = pair.first
            rest.append(pair.rest)
        first.append(eqn)
        needed.update(equations.variables(eqn.invars))
    return _Divided(first[::-1], rest[::-1], needed)


def _rest(
    divided: _Divided, invars: Sequence[compat.Var], wanted: Sequence[Atom], costs: KeptBytes, own: Sequence[Atom] = ()
) -> tuple[list[compat.JaxprEqn], list[compat.Var]]:
    """Returns the equations that make `wanted` later, repeated cheap ones before those of the rest, and their inputs.

    Args:
      own: values that the rest has without keeping anything.
    """
    eqns = equations.live_equations(divided.rest, wanted)
    reads = [v for v in equations.free_variables(eqns, wanted) if v not in own]
    kept = fewest_bytes(invars, divided.first, reads, costs.of)
    eqns = [*equations_between(divided.first, kept, reads), *eqns]
    return eqns, [v for v in equations.free_variables(eqns, wanted) if v not in own]


# --- scans ----------------------------------------------------------------------------------------


def _scan(eqn: compat.JaxprEqn, cut: _Urgent | _Late, costs: KeptBytes) -> Halves | None:
    """Makes two scans. The first one stacks values for the second one; each keeps only the carries that it needs."""
    loop = OpenLoop.of(eqn)
    inner = costs.inside(((x.outer, x.inner) for x in (*loop.consts, *loop.rows)), eqn.params["length"])
    carried, divided = cut.of_loop(loop, inner)
    first_carry = [c for c, is_first in zip(loop.carry, carried, strict=True) if is_first]
    late_carry = [c for c in loop.carry if c not in first_carry]
    handed_on = [c.before for c in late_carry]
    later = [s for s in loop.stacks if divided.makes_later(s.inner) or s.inner in handed_on]
    carry = _needed_carries(late_carry, divided.rest, later)
    invars = [*(x.inner for x in (*loop.consts, *loop.rows)), *(c.before for c in first_carry)]
    wanted = [*(c.after for c in carry), *(s.inner for s in later)]
    late_eqns, read = _rest(divided, invars, wanted, inner, [c.before for c in carry])
    if not cut.is_worth_it(divided.first, late_eqns):
        return None
    stacks = [s for s in loop.stacks if s not in later and not isinstance(s.outer, compat.DropVar)]
    given = {x.inner for x in (*loop.consts, *loop.rows)}
    kept = [v for v in read if v not in given]
    rows = []
    for v in kept:
        handed = next((s for s in stacks if s.inner is v), None)
        if handed is None:
            handed = Stack(v, compat.Var(compat.unmapped_aval(eqn.params["length"], 0, v.aval)))
            stacks.append(handed)
        rows.append(Operand(handed.outer, v))
    first = dataclasses.replace(loop, carry=first_carry, stacks=stacks, eqns=divided.first)
    second = dataclasses.replace(loop, carry=carry, rows=[*loop.rows, *rows], stacks=later, eqns=late_eqns)
    return Halves(_closed_scan(first), _closed_scan(second))


def _needed_carries(carry: Sequence[Carry], eqns: Sequence[compat.JaxprEqn], stacks: Sequence[Stack]) -> list[Carry]:
    """Returns the carries that the results of a loop need."""
    needed = [c for c in carry if not isinstance(c.last, compat.DropVar)]
    while True:
        wanted = [*(c.after for c in needed), *(s.inner for s in stacks)]
        reads = equations.free_variables(equations.live_equations(eqns, wanted), wanted)
        more = [c for c in carry if c in needed or c.before in reads]
        if len(more) == len(needed):
            return needed
        needed = more


def _closed_scan(loop: OpenLoop) -> compat.JaxprEqn:
    """Returns the scan of these parts, without unused operands."""
    read = set(equations.free_variables(equations.live_equations(loop.eqns, loop.outs), loop.outs))
    consts, rows = ([x for x in xs if x.inner in read] for xs in (loop.consts, loop.rows))
    eqn = dataclasses.replace(loop, consts=consts, rows=rows).closed()
    return eqn.replace(effects=eqn.params["jaxpr"].effects)


# --- calls: checkpoints, branches, shard_map ------------------------------------------------------


class _Slot(NamedTuple):
    """A result of the urgent call that the rest reads."""

    outer: compat.Var
    inner: dict[int, compat.Var]  # the value in each body; not all bodies have one
    is_new: bool = True  # whether the call returns it only for the rest


def _call(eqn: compat.JaxprEqn, cut: _Urgent | _Late, costs: KeptBytes) -> Halves | None:
    """Makes two calls. The first one also returns values for the second one."""
    is_mapped, first = eqn.primitive.name == "shard_map", _num_before(eqn)
    bodies, operands = [fresh_body(closed) for closed in _bodies(eqn)], eqn.invars[first:]
    scalars = costs.scalars and not is_mapped
    inner = [costs.inside(zip(operands, body.invars, strict=True), scalars=scalars) for body in bodies]
    parts = [cut.of_call(eqn, first, body, cost) for body, cost in zip(bodies, inner, strict=True)]
    later = [
        i
        for i, v in enumerate(eqn.outvars)
        if any(p.makes_later(b.outvars[i]) for p, b in zip(parts, bodies, strict=True))
        and not isinstance(v, compat.DropVar)
    ]
    soon = [i for i, v in enumerate(eqn.outvars) if i not in later and not isinstance(v, compat.DropVar)]
    rests = [
        _rest(part, body.invars, [body.outvars[i] for i in later], cost)
        for body, part, cost in zip(bodies, parts, inner, strict=True)
    ]
    if not any(cut.is_worth_it(part.first, eqns) for part, (eqns, _) in zip(parts, rests, strict=True)):
        return None
    results = {bodies[0].outvars[i]: eqn.outvars[i] for i in soon if isinstance(bodies[0].outvars[i], compat.Var)}
    known = results if len(bodies) == 1 and not is_mapped else {}  # results of the first call in any case
    kept = [[v for v in reads if v not in b.invars] for (_, reads), b in zip(rests, bodies, strict=True)]
    slots = _slots(eqn, kept, known)
    if slots is None:
        return None
    absent = [{s.outer: _zeros(eqn, s.outer.aval) for s in slots if j not in s.inner} for j in range(len(bodies))]
    if any(z.outs[0].aval != v.aval for zeros in absent for v, z in zeros.items()):
        return None  # its type says over which devices of a `shard_map` it varies
    firsts, seconds = [], []
    for j, (body, part, (late_eqns, _)) in enumerate(zip(bodies, parts, rests, strict=True)):
        zeros = absent[j]
        eqns = [*part.first, *(e for z in zeros.values() for e in z.eqns)]
        handed = [slot.inner[j] if j in slot.inner else zeros[slot.outer].outs[0] for slot in slots if slot.is_new]
        firsts.append(_Body(body.invars, [], eqns, [*(body.outvars[i] for i in soon), *handed]))
        own = [slot.inner.get(j) or compat.Var(slot.outer.aval) for slot in slots]
        seconds.append(_Body(body.invars, own, late_eqns, [body.outvars[i] for i in later]))
    urgent = _called(eqn, firsts, [], soon, [slot.outer for slot in slots if slot.is_new])
    return Halves(urgent, _called(eqn, seconds, [slot.outer for slot in slots], later, []))


def _slots(
    eqn: compat.JaxprEqn,
    kept: Sequence[Sequence[compat.Var]],
    known: Mapping[compat.Var, compat.Var],
) -> list[_Slot] | None:
    """Returns results for the values that the bodies return; bodies share one where types agree."""
    slots: list[_Slot] = []
    for j, values in enumerate(kept):
        for v in values:
            if v in known:
                slots.append(_Slot(known[v], {j: v}, is_new=False))
                continue
            if (aval := _handed_out(eqn, v.aval)) is None:
                return None
            slot = next((s for s in slots if j not in s.inner and s.outer.aval == aval), None)
            if slot is None:
                slots.append(slot := _Slot(compat.Var(aval), {}))
            slot.inner[j] = v
    return slots


def _zeros(eqn: compat.JaxprEqn, aval: compat.Aval) -> Equations:
    """Returns zeros for a body to return where only another body has a value."""
    with compat.use_abstract_mesh(eqn.ctx.cur_abstract_mesh):
        like = compat.abstract(aval, explicit_sharding(aval))
        return trace_equations(lambda: jax.lax.full_like(like, 0))


class _Body(NamedTuple):
    """Inner equations on the arguments of their original jaxpr, and on further ones."""

    invars: Sequence[compat.Var]
    more: Sequence[compat.Var]
    eqns: Sequence[compat.JaxprEqn]
    outs: Sequence[Atom]


def _called(
    eqn: compat.JaxprEqn,
    bodies: Sequence[_Body],
    operands: Sequence[Atom],
    results: Sequence[int],
    further: Sequence[compat.Var],
) -> compat.JaxprEqn:
    """Returns the equation with other jaxprs.

    Args:
      operands: for the further arguments of the bodies.
      results: the results of the equation that the bodies return first; `further` ones follow.
    """
    first = _num_before(eqn)
    bodies = [b._replace(eqns=equations.live_equations(b.eqns, b.outs)) for b in bodies]
    reads = [set(equations.free_variables(b.eqns, b.outs)) for b in bodies]
    invars = enumerate(zip(*(b.invars for b in bodies), strict=True))
    ins = [i for i, vs in invars if any(v in read for v, read in zip(vs, reads, strict=True))]
    jaxprs = [
        compat.with_new_vars(compat.make_jaxpr([*(b.invars[i] for i in ins), *b.more], b.outs, b.eqns, "half"))
        for b in bodies
    ]
    params = _params(eqn, jaxprs, [*ins, *(None for _ in operands)], [*results, *(None for _ in further)])
    return eqn.replace(
        invars=[*eqn.invars[:first], *(eqn.invars[first + i] for i in ins), *operands],
        outvars=[*(eqn.outvars[i] for i in results), *further],
        params={**eqn.params, **params},
        effects=compat.effects_outside(eqn, frozenset().union(*(j.effects for j in jaxprs))),
    )


def _those(values: object, positions: Sequence[int | None], default: object) -> object:
    """Selects entries of a parameter that has one for each operand or result; `default` where the position is None."""
    if not isinstance(values, tuple):
        return values  # one for all
    return tuple(default if i is None else values[i] for i in positions)


def _params(
    eqn: compat.JaxprEqn,
    jaxprs: Sequence[compat.ClosedJaxpr],
    ins: Sequence[int | None],
    outs: Sequence[int | None],
) -> dict[str, object]:
    """Returns the parameters that change with the jaxprs. `ins` and `outs` have the old position of each operand and
    each result, None for a new one.
    """
    old, name, jaxpr = eqn.params, eqn.primitive.name, jaxprs[0].jaxpr
    if name == "cond":
        return {"branches": tuple(jaxprs)}
    if name == compat.CHECKPOINT:
        return {"jaxpr": jaxpr, "prevent_cse": _those(old["prevent_cse"], ins, True)}
    if name == "jit":
        return {
            "jaxpr": jaxprs[0],
            "in_shardings": _those(old["in_shardings"], ins, compat.UNSPECIFIED),
            "in_layouts": _those(old["in_layouts"], ins, None),
            "donated_invars": _those(old["donated_invars"], ins, False),
            "out_shardings": _those(old["out_shardings"], outs, compat.UNSPECIFIED),
            "out_layouts": _those(old["out_layouts"], outs, None),
        }

    def specs(key: str, positions: Sequence[int | None], atoms: Sequence[Atom]) -> tuple[object, ...]:
        pairs = zip(positions, atoms, strict=True)
        return tuple(_outside(eqn, v.aval)[0] if i is None else old[key][i] for i, v in pairs)

    in_specs, out_specs = specs("in_specs", ins, jaxpr.invars), specs("out_specs", outs, jaxpr.outvars)
    return {"jaxpr": jaxpr, "in_specs": in_specs, "out_specs": out_specs}


def _num_before(eqn: compat.JaxprEqn) -> int:
    """Returns the number of operands before those of the jaxprs: the index of a branch."""
    return int(eqn.primitive.name == "cond")


def _bodies(eqn: compat.JaxprEqn) -> Sequence[compat.ClosedJaxpr]:
    """Returns the jaxprs of which an equation runs one on its operands; none if it cannot be divided."""
    if eqn.primitive.name == "cond":
        return () if eqn.effects else eqn.params["branches"]
    return [eqn.params["jaxpr"] if eqn.primitive is compat.jit_p else compat.ClosedJaxpr(eqn.params["jaxpr"], ())]


def _handed_out(eqn: compat.JaxprEqn, aval: compat.Aval) -> compat.Aval | None:
    """Returns the type of the result that carries an inner value out; None if there is none. The values of the devices
    of a `shard_map` are concatenated along the first axis, which a scalar does not have.
    """
    if eqn.primitive.name != "shard_map":
        return aval
    return _outside(eqn, aval)[1] if aval.ndim else None


def _outside(eqn: compat.JaxprEqn, aval: compat.Aval) -> tuple[Any, Any]:
    with compat.use_abstract_mesh(eqn.ctx.cur_abstract_mesh):
        return compat.kept_in_shard_map(eqn, aval)


_RULES: dict[str, Callable[[compat.JaxprEqn, _Urgent | _Late, KeptBytes], Halves | None]] = {
    "scan": _scan,
    **dict.fromkeys(("cond", "shard_map", "jit", compat.CHECKPOINT), _call),
}
