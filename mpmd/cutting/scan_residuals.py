"""Makes scans over layers keep less for their backward: cheap values are computed again from others that are kept.

The gradient of a scan saves every value that its backward reads, of each layer, even `1 - y` next to `y`. A minimum
cut through the body finds the fewest bytes from which the rest can be made: the equations behind the cut move into the
backward scan. Parameters cost nothing there; matrix products and random numbers do not move.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpmd import _jax_compat as compat
from mpmd.cutting.candidates import marks_in
from mpmd.graphs import equations
from mpmd.graphs.kept import equations_between, fewest_bytes
from mpmd.graphs.open_loops import OpenLoop, Operand, Stack
from mpmd.tracing.new_equations import Atom, equations_on


def keep_less(body: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """Returns the body of a loop, in which scans with marks keep fewer bytes for their backward.

    Args:
      body: differentiated and flat; the last argument is the number of the microbatch.
    """
    replaced: dict[int, compat.JaxprEqn] = {}
    fixed = _fixed(body.jaxpr)
    for forward, backward, residuals in _pairs(body.jaxpr):
        if id(backward) not in replaced:
            pair = _ScanPair(forward, backward, residuals, fixed)
            replaced[id(forward)], replaced[id(backward)] = pair.rewritten()
    eqns = [replaced.get(id(e), e) for e in body.jaxpr.eqns]
    return compat.ClosedJaxpr(compat.new_jaxpr(body.jaxpr, eqns=eqns), body.consts)


def _fixed(jaxpr: compat.Jaxpr) -> set[compat.Var]:
    """Returns the values that are the same for all microbatches."""
    found = {*jaxpr.constvars, *jaxpr.invars[:-1]}
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(v in found for v in equations.variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _pairs(jaxpr: compat.Jaxpr) -> Iterator[tuple[compat.JaxprEqn, compat.JaxprEqn, dict[int, int]]]:
    """Yields each scan over layers with the scan of its backward, and with its residuals: the stacked outputs that only
    the backward reads, by number, each with its number among the arrays that the backward scans over.
    """
    readers: dict[compat.Var, list[tuple[compat.JaxprEqn | None, int]]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for i, v in enumerate(eqn.invars):
            if not isinstance(v, compat.Literal):
                readers[v].append((eqn, i))
    for v in equations.variables(jaxpr.outvars):
        readers[v].append((None, 0))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan" or compat.is_transposed(eqn) or not any(True for _ in marks_in(eqn)):
            continue
        found: dict[int, tuple[compat.JaxprEqn, dict[int, int]]] = {}
        for j, v in enumerate(eqn.outvars[compat.scan_sizes(eqn)[1] :]):
            if len(readers[v]) == 1 and (row := _row(*readers[v][0])) is not None:
                backward = readers[v][0][0]
                found.setdefault(id(backward), (backward, {}))[1][j] = row
        for backward, residuals in found.values():
            yield eqn, backward, residuals
            break


def _row(eqn: compat.JaxprEqn | None, operand: int) -> int | None:
    """Returns the number of an operand among the arrays that a backward scan goes over; None if it is not one."""
    if eqn is None or eqn.primitive.name != "scan" or not compat.is_transposed(eqn):
        return None
    row = operand - sum(compat.scan_sizes(eqn))
    return row if row >= 0 else None


class _ScanPair:
    """A forward and a backward scan to be rewritten."""

    def __init__(
        self,
        forward: compat.JaxprEqn,
        backward: compat.JaxprEqn,
        residuals: dict[int, int],
        fixed: set[compat.Var],
    ):
        self.forward, self.backward, self.residuals, self.fixed = forward, backward, residuals, fixed
        self.loop = OpenLoop.of(forward)
        self.length = forward.params["length"]
        self.operand = {x.inner: x.outer for x in (*self.loop.consts, *self.loop.rows)}
        self.consts = {x.inner for x in self.loop.consts}
        stacks = [s.inner for s in self.loop.stacks]
        self.wanted = {j: v for j in residuals if not isinstance(v := stacks[j], compat.Literal)}

    def rewritten(self) -> tuple[compat.JaxprEqn, compat.JaxprEqn]:
        """Returns the new scans, or the old ones if nothing less can be kept."""
        wanted = list(dict.fromkeys(self.wanted.values()))
        kept = fewest_bytes(self.loop.body.invars, self.loop.body.eqns, wanted, self._cost)
        if sum(map(self._cost, kept)) >= sum(map(self._cost, wanted)):
            return self.forward, self.backward
        stacked = {v: compat.Var(compat.unmapped_aval(self.length, 0, v.aval)) for v in kept if v not in self.operand}
        stacks = [x for j, x in enumerate(self.loop.stacks) if j not in self.wanted]
        forward = dataclasses.replace(self.loop, stacks=[*stacks, *map(Stack, stacked, stacked.values())])
        again = compat.make_jaxpr(kept, wanted, equations_between(self.loop.eqns, kept, wanted), "again")
        return forward.closed(), self._backward(kept, stacked, again)

    def _cost(self, v: compat.Var) -> int:
        """Returns the bytes of a microbatch that must be kept so that the backward can read the value."""
        atom = self.operand.get(v)
        if atom is not None and (
            isinstance(atom, compat.Literal) or atom in self.fixed or any(atom is x for x in self.backward.invars)
        ):
            return 0
        return equations.nbytes(v.aval) * (1 if v in self.consts else self.length)

    def _backward(
        self, kept: Sequence[compat.Var], stacked: dict[compat.Var, compat.Var], again: compat.ClosedJaxpr
    ) -> compat.JaxprEqn:
        loop = OpenLoop.of(self.backward)
        own = {v: Operand(stacked[v] if v in stacked else self.operand[v], compat.Var(v.aval)) for v in kept}
        prelude = equations_on(again, [x.inner for x in own.values()])
        made = dict(zip(again.jaxpr.outvars, prelude.outs, strict=True))
        gone: dict[Atom, Atom] = {loop.rows[self.residuals[j]].inner: made[v] for j, v in self.wanted.items()}
        body = loop.body
        rest = equations_on(compat.ClosedJaxpr(body, ()), [compat.renamed(v, gone) for v in body.invars])
        num_carry = len(loop.carry)
        return dataclasses.replace(
            loop,
            consts=[*loop.consts, *(x for v, x in own.items() if v in self.consts)],
            carry=[c._replace(after=x) for c, x in zip(loop.carry, rest.outs[:num_carry], strict=True)],
            rows=[
                *(x for x in loop.rows if x.inner not in gone),
                *(x for v, x in own.items() if v not in self.consts),
            ],
            stacks=[s._replace(inner=x) for s, x in zip(loop.stacks, rest.outs[num_carry:], strict=True)],
            eqns=[*prelude.eqns, *rest.eqns],
        ).closed()
