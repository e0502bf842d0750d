"""Moves marks at the beginning or at the end of a function under `jax.checkpoint` out of the function.

Differentiation leaves the forward pass of such a function flat, and turns its backward pass into one equation, which
computes the function again. If a stage end is the last equation of the function, its backward mark reads operands of
that backward equation, so it can move ahead of it. A mark in the middle must stay: otherwise the stage behind it would
recompute the part before it.
"""

from collections.abc import Callable, Iterable, Sequence

from mpmd import _jax_compat as compat
from mpmd.ops.stage_end import mark_p, with_each

# Equations that may move out together with a mark, because they are cheap.
_LIGHT = frozenset(
    """add add_any sub mul neg convert_element_type reduce_precision broadcast_in_dim reshape transpose squeeze
    expand_dims copy slice concatenate pad sharding_constraint reshard pvary pcast""".split()
)


def marks_outside(eqn: compat.JaxprEqn, flat: Callable[[compat.Jaxpr], compat.Jaxpr]) -> compat.ClosedJaxpr | None:
    """Returns a checkpoint as a jaxpr with marks ahead of it and behind it; None if no mark can move out."""
    body = flat(eqn.params["jaxpr"])
    of_backward = _without_forward_marks(body) if eqn.params["differentiated"] else body
    ahead = _ahead(of_backward.eqns, of_backward.invars)
    rest = [e for e in of_backward.eqns if e not in ahead]
    behind = _behind(rest)
    if not ahead and not behind and len(rest) == len(body.eqns):
        return None
    call = _checkpoint_of(eqn, of_backward, ahead, [e for e in rest if e not in behind], behind)
    return compat.ClosedJaxpr(compat.new_jaxpr(of_backward, eqns=[*ahead, *call, *behind]), ())


def _without_forward_marks(body: compat.Jaxpr) -> compat.Jaxpr:
    """Returns a backward pass without the marks of the recomputed forward pass, which has its marks elsewhere."""
    return with_each(body, lambda e: None if e.primitive is mark_p and e.params["kind"] == "forward" else e)


def _ahead(eqns: Sequence[compat.JaxprEqn], given: Iterable[compat.Var]) -> list[compat.JaxprEqn]:
    """Returns the marks that depend only on `given` and light equations, with these equations."""
    known, free = set(given), []
    for eqn in eqns:
        if _is_movable(eqn) and _variables(eqn.invars) <= known:
            free.append(eqn)
            known.update(eqn.outvars)
    needed: set[compat.Var] = set()
    found = []
    for eqn in reversed(free):
        if eqn.primitive is mark_p or not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed |= _variables(eqn.invars)
    return found[::-1]


def _behind(eqns: Sequence[compat.JaxprEqn]) -> list[compat.JaxprEqn]:
    """Returns the marks with results that only light equations read, with these equations."""
    read_before: set[compat.Var] = set()
    free = []
    for eqn in reversed(eqns):
        if _is_movable(eqn) and read_before.isdisjoint(eqn.outvars):
            free.append(eqn)
        else:
            read_before |= _variables(eqn.invars)
    marked: set[compat.Var] = set()
    found = []
    for eqn in reversed(free):
        if eqn.primitive is mark_p or not marked.isdisjoint(_variables(eqn.invars)):
            found.append(eqn)
            marked.update(eqn.outvars)
    return found


def _checkpoint_of(
    eqn: compat.JaxprEqn,
    body: compat.Jaxpr,
    ahead: Sequence[compat.JaxprEqn],
    inside: Sequence[compat.JaxprEqn],
    behind: Sequence[compat.JaxprEqn],
) -> list[compat.JaxprEqn]:
    """Returns the checkpoint `eqn` with the equations that stay inside."""
    read_inside = {v for e in inside for v in _variables(e.invars)}
    reads = [v for v in (*body.invars, *(v for e in ahead for v in e.outvars)) if v in read_inside]
    read_outside = _variables(body.outvars).union(*(_variables(e.invars) for e in behind))
    writes = [v for e in inside for v in e.outvars if v in read_outside]
    if not inside:
        return []
    inner = compat.with_new_vars(compat.make_jaxpr(reads, writes, inside, "checkpoint")).jaxpr
    params = {**eqn.params, "jaxpr": inner}
    if isinstance(prevent := params["prevent_cse"], tuple):  # one for each operand
        of = dict(zip(body.invars, prevent, strict=True))
        params["prevent_cse"] = tuple(of.get(v, True) for v in reads)
    return [eqn.replace(invars=reads, outvars=writes, params=params, effects=inner.effects)]


def _is_movable(eqn: compat.JaxprEqn) -> bool:
    return not eqn.effects and (eqn.primitive is mark_p or eqn.primitive.name in _LIGHT)


def _variables(atoms: Iterable[compat.Var | compat.Literal]) -> set[compat.Var]:
    return {v for v in atoms if not isinstance(v, compat.Literal)}
