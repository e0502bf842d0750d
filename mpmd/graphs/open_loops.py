"""Opens loops of JAX (`scan` and `while`) into their parts, and closes them again after a change.

Only this module knows how JAX orders the operands, results and parameters of such an equation.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from mpmd import _jax_compat as compat
from mpmd.graphs.equations import live_equations
from mpmd.ops.stage_end import mark_p
from mpmd.tracing.inline import inline
from mpmd.tracing.new_equations import Atom, Equations, equations_on


class Operand(NamedTuple):
    """An operand that iterations read: a constant, or an array of which each iteration reads one row."""

    outer: Atom
    inner: compat.Var


class Carry(NamedTuple):
    """A carry: before the loop, at the begin and at the end of an iteration, and after the loop."""

    first: Atom
    before: compat.Var
    after: Atom
    last: compat.Var


class Stack(NamedTuple):
    """A value of each iteration, and the result in which the values are stacked."""

    inner: Atom
    outer: compat.Var


@dataclasses.dataclass(frozen=True)
class OpenLoop:
    """A `scan` or `while`: its operands, carries and stacks, and the equations of an iteration."""

    eqn: compat.JaxprEqn  # the original loop, for what is not in a part (the length, the user's line)
    consts: Sequence[Operand]
    carry: Sequence[Carry]
    rows: Sequence[Operand]
    stacks: Sequence[Stack]
    eqns: Sequence[compat.JaxprEqn]
    test_consts: Sequence[Operand] = ()
    test: compat.Jaxpr | None = None  # the condition of a `while`, on `test_consts` and the original carries

    @classmethod
    def of(cls, eqn: compat.JaxprEqn) -> "OpenLoop":
        """Opens an equation, with new variables for its iterations."""
        first, (n, m) = eqn.params.get("cond_nconsts", 0), compat.scan_sizes(eqn)
        body = fresh_body(eqn.params["jaxpr" if eqn.primitive.name == "scan" else "body_jaxpr"])
        operands = [Operand(*x) for x in zip(eqn.invars[first:], body.invars, strict=True)]
        outs = list(zip(body.outvars, eqn.outvars, strict=True))
        carry = [Carry(*x, *out) for x, out in zip(operands[n : n + m], outs[:m], strict=True)]
        loop = cls(eqn, operands[:n], carry, operands[n + m :], [Stack(*out) for out in outs[m:]], body.eqns)
        if eqn.primitive.name == "scan":
            return loop
        test = fresh_body(eqn.params["cond_jaxpr"], [c.before for c in carry])
        return dataclasses.replace(loop, test=test, test_consts=list(map(Operand, eqn.invars[:first], test.invars)))

    @property
    def outs(self) -> list[Atom]:
        """The results of an iteration: carries, and values to stack."""
        return [*(c.after for c in self.carry), *(s.inner for s in self.stacks)]

    @property
    def body(self) -> compat.Jaxpr:
        """An iteration as a jaxpr, from constants, carries and rows to carries and values to stack."""
        ins = [*(x.inner for x in self.consts), *(c.before for c in self.carry), *(x.inner for x in self.rows)]
        return compat.make_jaxpr(ins, self.outs, live_equations(self.eqns, self.outs, (mark_p,)), "body").jaxpr

    def closed(self) -> compat.JaxprEqn:
        """Returns the equation of these parts."""
        operands = [*self.test_consts, *self.consts, *self.carry, *self.rows]
        params = compat.scan_params(self.eqn, _own(self.body), len(self.consts), len(self.carry))
        if self.test is not None:
            ins = [*(x.inner for x in self.test_consts), *(c.before for c in self.carry)]
            params["cond_jaxpr"] = _own(compat.new_jaxpr(self.test, invars=ins))
        outvars = [x[-1] for x in (*self.carry, *self.stacks)]
        return self.eqn.replace(invars=[x[0] for x in operands], outvars=outvars, params=params)


def _own(jaxpr: compat.Jaxpr) -> compat.ClosedJaxpr:
    return compat.with_new_vars(compat.ClosedJaxpr(jaxpr, ()))


def fresh_body(closed: compat.ClosedJaxpr, last: Sequence[compat.Var] = ()) -> compat.Jaxpr:
    """Returns an inner jaxpr, flat, with new variables but `last` as its last arguments; constants become literals."""
    own = closed.jaxpr.invars[: len(closed.jaxpr.invars) - len(last)]
    invars = [*(compat.Var(v.aval) for v in own), *last]
    eqns, outs = flat_on(closed, invars)
    return compat.make_jaxpr(invars, outs, eqns, "rows").jaxpr


def flat_on(closed: compat.ClosedJaxpr, atoms: Sequence[Atom]) -> Equations:
    """Returns the equations of an inner jaxpr, flat, on these operands."""
    return equations_on(compat.ClosedJaxpr(inline(closed.jaxpr, in_loop=True), closed.consts), atoms)
