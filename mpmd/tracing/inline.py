"""Inlines the calls of a traced jaxpr, and refuses marks where nothing can be cut.

Calls that only wrap other equations (`jit`, custom derivatives after differentiation) are inlined, so that later passes
can cut between any two equations. Integers that follow from literals become literals. A mark must be where a cut is
possible: in the body of a loop, or of a `scan` over layers there, but not inside `cond`, `while`, `shard_map` or in the
middle of a `checkpoint`.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import StageError
from mpmd.ops.cross_group import place_p
from mpmd.ops.loop_primitive import scan_loop, treduce_p
from mpmd.ops.reductions import explicit_sharding
from mpmd.ops.stage_end import mark_p, without
from mpmd.tracing.checkpointed_marks import marks_outside
from mpmd.tracing.folding import folded


def inline(jaxpr: compat.Jaxpr, in_loop: bool = False) -> compat.Jaxpr:
    """Returns `jaxpr` with calls inlined, in the bodies of its loops too; refuses marks where nothing can be cut.

    Args:
      in_loop: whether this is the body of a `treduce`, where a scan over layers may hold marks.
    """
    eqns: list[compat.JaxprEqn] = []
    env: dict = {}
    _inline_into(eqns, env, jaxpr.eqns, None, in_loop)
    return compat.new_jaxpr(jaxpr, eqns=eqns, outvars=[compat.renamed(v, env) for v in jaxpr.outvars])


def _inline_into(
    out: list[compat.JaxprEqn],
    env: dict[compat.Var, compat.Var | compat.Literal],
    eqns: Iterable[compat.JaxprEqn],
    outer: compat.JaxprEqn | None,
    in_loop: bool,
) -> None:
    """Appends `eqns` to `out` under the renaming `env`. If they come from a call, `outer` is that call, and their
    variables are made anew, since one cached jaxpr may be called many times.
    """
    for eqn in eqns:
        eqn = eqn.replace(invars=[compat.renamed(v, env) for v in eqn.invars])
        if (literal := folded(eqn)) is not None:
            env[eqn.outvars[0]] = literal
            continue
        if eqn.primitive is treduce_p and eqn.params["info"].schedule is None:
            eqn = _plain_loop(eqn)
        if outer is not None:
            eqn = compat.within(eqn, outer)
        if len(eqn.invars) > 1 and eqn.primitive.name in _SEVERAL_AT_ONCE:
            _inline_into(out, env, _one_by_one(eqn), outer, in_loop)
            continue
        called = compat.called_jaxpr(eqn)
        if (
            called is None
            and eqn.primitive is compat.jit_p
            and contains(eqn.params["jaxpr"].jaxpr, (mark_p, treduce_p))
        ):
            called = eqn.params["jaxpr"]
        if eqn.primitive.name == compat.CHECKPOINT and contains(eqn.params["jaxpr"], (mark_p,)):
            called = marks_outside(eqn, functools.partial(inline, in_loop=in_loop))
        if called is not None:
            inner = dict(zip(called.jaxpr.invars, eqn.invars, strict=True))
            inner |= literals_of(called)
            _inline_into(out, inner, called.jaxpr.eqns, eqn, in_loop)
            env.update(zip(eqn.outvars, (compat.renamed(v, inner) for v in called.jaxpr.outvars), strict=True))
            continue
        if eqn.primitive is treduce_p:
            body = eqn.params["jaxpr"]
            _check_nothing_placed_inside("treduce", body.jaxpr)
            flat = compat.ClosedJaxpr(inline(body.jaxpr, in_loop=True), body.consts)
            eqn = eqn.replace(params={**eqn.params, "jaxpr": flat})
        elif eqn.primitive.name == "scan":
            _check_is_no_rest_of_a_loop(eqn)
            _check_marks_in_scan(eqn, _AROUND_A_LAYER if in_loop else _AROUND_A_LAYER - {"scan"})
        else:
            check_no_marks_inside(eqn)
            if eqn.primitive.name == "cond":  # parameters of other stages among its operands would come to its group
                eqn = compat.without_unread(eqn)
        if outer is not None:
            fresh: list = [v if isinstance(v, compat.DropVar) else compat.Var(v.aval) for v in eqn.outvars]
            env.update((v, f) for v, f in zip(eqn.outvars, fresh, strict=True) if not isinstance(v, compat.DropVar))
            eqn = eqn.replace(outvars=fresh)
        out.append(eqn)


# Equations that do the same to each operand; their operands may live in different groups.
_SEVERAL_AT_ONCE = {"device_put", "optimization_barrier"}


def _one_by_one(eqn: compat.JaxprEqn) -> Iterator[compat.JaxprEqn]:
    """Yields the equation for each of its operands alone."""
    for i, (x, y) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        params = {k: p[i : i + 1] if isinstance(p, (tuple, list)) else p for k, p in eqn.params.items()}
        yield eqn.replace(invars=[x], outvars=[y], params=params)


def _plain_loop(eqn: compat.JaxprEqn) -> compat.JaxprEqn:
    """Returns a loop without a schedule as a call of an ordinary `lax.scan`; marks in it have no effect."""
    body = compat.ClosedJaxpr(without(eqn.params["jaxpr"].jaxpr, (mark_p, place_p)), eqn.params["jaxpr"].consts)
    loop = functools.partial(scan_loop, jaxpr=body, info=eqn.params["info"])
    closed = jax.make_jaxpr(loop)(*(compat.abstract(x.aval, explicit_sharding(x.aval)) for x in eqn.invars))
    return compat.call(eqn, closed)


def contains(jaxpr: compat.Jaxpr, primitives: Collection[compat.Primitive]) -> bool:
    """Returns whether an equation of `jaxpr`, however deep, is one of `primitives`."""
    return any(e.primitive in primitives for e in compat.all_equations(jaxpr))


def literals_of(closed: compat.ClosedJaxpr) -> dict[compat.Var, compat.Literal]:
    """Maps the constant variables of a jaxpr to literals."""
    return {v: compat.Literal(c, v.aval) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}


_CALL_FOR_EACH = "\n  Where the loop is over tokens or steps, call the jitted function once for each, from Python."
_REMEDY = {
    "checkpoint": "Put one jax.checkpoint around what is before the mark and another one around what is behind it."
    " A mark at the beginning or at the end of a checkpointed function may stay in it.",
    "scan": f"Write the stages as a Python loop, and use lax.scan for the layers inside each stage.{_CALL_FOR_EACH}",
    "while": f"Write the stages as a Python loop; loops inside a stage are fine.{_CALL_FOR_EACH}",
    "cond": "Mark the stage end after the cond, so that both branches belong to one stage.",
    "shard_map": "Call shard_map once per stage, and mark the stage end outside of it.",
}


def _check_nothing_placed_inside(name: str, jaxpr: compat.Jaxpr) -> None:
    """Refuses the user's placements and pipelined loops."""
    if contains(jaxpr, (place_p,)):
        why = (
            "its stages run in the groups that the schedule gives them" if name == "treduce" else "it runs in one group"
        )
        raise StageError(
            f"place or a cross_mpmd function inside {name}, at {compat.source_line(_first(jaxpr, place_p))}: {why}.\n"
            f"  Use it outside of {name}, on values that go in or come out."
        )
    if (loop := _first(jaxpr, treduce_p, lambda e: e.params["info"].schedule is not None)) is not None:
        raise StageError(
            f"treduce inside {name}, at {compat.source_line(loop)}: the pipelined loop must stand in the step itself.\n"
            "  Move it out (a few iterations of a scan may be a Python loop), or pass schedule=None for a plain loop."
        )


def _check_is_no_rest_of_a_loop(eqn: compat.JaxprEqn) -> None:
    """Refuses a `treduce` that was differentiated or batched as a whole, if it holds marks."""
    transformed = {
        "_treduce_jvp": ("differentiated", "Differentiate inside of fun: treduce(lambda x: jax.value_and_grad(loss)"),
        "_treduce_batch": ("batched by vmap", "Batch inside of fun: treduce(lambda x: jax.vmap(loss, (0, None))"),
    }
    whats = [what for rule, what in transformed.items() if compat.called_from(eqn, rule)]
    if whats and any(e.primitive is mark_p for e in compat.equations_inside(eqn)):
        what, remedy = whats[0]
        raise StageError(
            f"treduce is {what} as a whole, at {compat.source_line(eqn)}: what is left is no pipelined loop.\n"
            f"  {remedy}(params, x), xs, ...)."
        )


# Equations that may stand between a scan over layers and the marks in its body.
_AROUND_A_LAYER = {"scan", "jit", compat.CHECKPOINT, "closed_call", "custom_jvp_call", "custom_vjp_call"}


def _check_marks_in_scan(eqn: compat.JaxprEqn, around: Collection[str] = _AROUND_A_LAYER) -> None:
    """Allows marks in a scan over layers, also within a checkpoint of its body, but not in a branch.

    Args:
      around: equations that may stand around the marks; outside of loops no scan, which may be one over tokens.
    """
    for jaxpr in compat.jaxprs_in(eqn.params):
        _check_nothing_placed_inside(_name_of(eqn), jaxpr)
        for inner in jaxpr.eqns:
            if inner.primitive.name in around:
                _check_marks_in_scan(inner, around)
            else:
                check_no_marks_inside(inner)


def check_no_marks_inside(eqn: compat.JaxprEqn) -> None:
    """Raises a StageError with the user's line and a remedy for marks, loops or placements where nothing can be cut."""
    for jaxpr in compat.jaxprs_in(eqn.params):
        _check_nothing_placed_inside(_name_of(eqn), jaxpr)
        if not contains(jaxpr, (mark_p,)):
            continue
        _check_is_no_rest_of_a_loop(eqn)
        name, mark = _name_of(eqn), _first(jaxpr, mark_p)
        raise StageError(
            f"{mark.params['function']} inside {name}, at {compat.source_line(mark)}: a stage cannot end"
            f" there.\n  {_REMEDY.get(name, f'Mark the stage end outside of {name}.')}"
        )


def _name_of(eqn: compat.JaxprEqn) -> str:
    return "checkpoint" if eqn.primitive.name == compat.CHECKPOINT else str(eqn.primitive.name)


def _first(jaxpr: compat.Jaxpr, primitive: compat.Primitive, wanted: Callable = lambda eqn: True) -> Any:
    """Returns the first equation of a primitive, however deep; None if there is none."""
    return next((e for e in compat.all_equations(jaxpr) if e.primitive is primitive and wanted(e)), None)
