"""Applies the table of roles to a traced step: each mark that ends a role gets the groups of the role."""

import dataclasses

from mpmd import _jax_compat as compat
from mpmd.errors import StageError
from mpmd.ops.cross_group import place_role
from mpmd.ops.loop_primitive import treduce_p
from mpmd.ops.role import RoleTable
from mpmd.ops.stage_end import RoleEnd, mark_at, mark_p
from mpmd.tracing.new_equations import trace_equations
from mpmd.tracing.trace import Trace


def with_roles(trace: Trace, table: RoleTable) -> Trace:
    """Returns the step with groups at each end of a role, and results of roles outside of loops in the last group.

    Raises:
      StageError: a role is not in the table, or ends in a scan.
    """
    if not table:
        return trace

    def told(eqn: compat.JaxprEqn) -> compat.JaxprEqn:
        if eqn.primitive is treduce_p:
            body: compat.ClosedJaxpr = eqn.params["jaxpr"]
            jaxpr = compat.new_jaxpr(body.jaxpr, eqns=list(map(told, body.jaxpr.eqns)))
            return eqn.replace(params={**eqn.params, "jaxpr": compat.ClosedJaxpr(jaxpr, body.consts)})
        if eqn.primitive is not mark_p or (end := eqn.params["role"]) is None:
            _check_ends_no_role(eqn)
            return eqn
        if end.name not in table:
            raise StageError(
                f"{mark_at(eqn)} is not in the table: roles has"
                f" {', '.join(map(repr, table))}.\n  Add it: mpmd.jit(..., roles={{{end.name!r}: groups}})."
            )
        return eqn.replace(params={**eqn.params, "role": RoleEnd(end.name, table[end.name])})

    eqns = []
    for eqn in map(told, trace.jaxpr.eqns):
        if eqn.primitive is mark_p and eqn.params["role"] is not None and eqn.params["kind"] == "forward":
            last = eqn.params["role"].groups[-1]
            found = trace_equations(lambda *xs, last=last: [place_role(x, last) for x in xs], *eqn.invars)
            eqns += found.eqns
            eqn = eqn.replace(invars=found.outs)
        eqns.append(eqn)
    return dataclasses.replace(trace, jaxpr=compat.new_jaxpr(trace.jaxpr, eqns=eqns))


def _check_ends_no_role(eqn: compat.JaxprEqn) -> None:
    for jaxpr in compat.jaxprs_in(eqn.params):
        for inner in jaxpr.eqns:
            if inner.primitive is mark_p and inner.params["role"] is not None:
                raise StageError(
                    f"{inner.params['function']} inside {eqn.primitive.name}, at {compat.source_line(inner)}: it would"
                    " run many times.\n  Make a role of the function that calls it, around that loop."
                )
            _check_ends_no_role(inner)
