"""Reads jaxprs, their variables and equations, and makes new ones."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from jax._src import core, effects
from jax._src.sharding_impls import UNSPECIFIED
from jax._src.state.discharge import discharge_state
from jax._src.state.types import AbstractRef
from jax.core import ShapedArray
from jax.extend import core as documented
from jax.extend import source_info_util
from jax.extend.core import (
    ClosedJaxpr,  # since JAX 0.11 the same class as Jaxpr, which has constants then
    DebugInfo,
    Primitive,
)
from jax.extend.core.primitives import closed_call_p, custom_jvp_call_p, custom_vjp_call_p, jit_p, remat_p
from jax.interpreters import partial_eval as pe

if TYPE_CHECKING:  # an abstract value has the attributes of its kind
    Jaxpr: TypeAlias = Any
    JaxprEqn: TypeAlias = Any

    class Var:
        aval: Any

        def __init__(self, aval: Any): ...

    class DropVar(Var): ...

    class Literal:
        aval: Any
        val: Any

        def __init__(self, val: Any, aval: Any): ...
else:
    from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

Aval = ShapedArray  # the type of an array; refs and tokens have types of their own

CHECKPOINT: str = remat_p.name  # the name of `jax.checkpoint` equations, which JAX prints differently
PLAIN = {bool, int, float, complex, str, type(None)}  # as most parameters of equations are


def physical_aval(aval: Any) -> Any:
    """Returns the type of the arrays that hold an extended dtype (PRNG keys, scales of FP8); other types unchanged."""
    return core.physical_aval(aval)


def new_jaxpr(like: Jaxpr, **parts: Any) -> Jaxpr:
    """Returns `like` with other `constvars`, `invars`, `outvars` or `eqns`. Its effects are those of its equations."""
    effects = _effects(parts.get("eqns", like.eqns))
    return like.replace(**parts, effects=effects, debug_info=like.debug_info.with_unknown_names())


def make_jaxpr(
    invars: Iterable[Var], outvars: Iterable[Var | Literal], eqns: Sequence[JaxprEqn], name: str
) -> ClosedJaxpr:
    """Returns a closed jaxpr from its equations; profiles and HLO dumps show `name`."""
    debug = DebugInfo("mpmd", name, None, None)
    return ClosedJaxpr(
        documented.Jaxpr([], list[Any](invars), list[Any](outvars), list(eqns), _effects(eqns), debug), ()
    )


def renamed(v: Var | Literal, names: Mapping[Any, Var | Literal]) -> Var | Literal:
    """Returns the variable or literal that stands for `v`; `v` itself if `names` has none."""
    return v if isinstance(v, Literal) else names.get(v, v)


def renamed_equations(eqns: Iterable[JaxprEqn], names: Mapping[Any, Any]) -> list[JaxprEqn]:
    """Returns equations with variables replaced as in `names`; an operand may become a literal."""
    return [
        e.replace(invars=[renamed(v, names) for v in e.invars], outvars=[names.get(v, v) for v in e.outvars])
        for e in eqns
    ]


def _effects(eqns: Sequence[JaxprEqn]) -> frozenset[Any]:
    return frozenset().union(*(e.effects for e in eqns))


def new_vars(eqns: Iterable[JaxprEqn]) -> dict[Var, Any]:
    """Returns a new variable for each result of equations."""
    return {v: Var(v.aval) for e in eqns for v in e.outvars if not isinstance(v, DropVar)}


def with_new_vars(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same jaxpr with new variables."""
    jaxpr = closed.jaxpr
    invars = [Var(v.aval) for v in jaxpr.invars]
    names = new_vars(jaxpr.eqns) | dict(zip(jaxpr.invars, invars, strict=True))
    outvars = [renamed(v, names) for v in jaxpr.outvars]
    eqns = renamed_equations(jaxpr.eqns, names)
    return ClosedJaxpr(jaxpr.replace(invars=invars, outvars=outvars, eqns=eqns), closed.consts)


def constvars_to_invars(jaxpr: Jaxpr) -> Jaxpr:
    """Turns the constants of a jaxpr into its first arguments."""
    return new_jaxpr(jaxpr, constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def called_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the jaxpr that a call-like equation runs unchanged, or None for any other equation."""
    if eqn.primitive is jit_p:
        specified = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        return eqn.params["jaxpr"] if all(s is UNSPECIFIED for s in specified) else None
    if eqn.primitive in (custom_jvp_call_p, custom_vjp_call_p) or eqn.primitive.name in ("closed_call", "core_call"):
        inner = eqn.params.get("call_jaxpr")
        return ClosedJaxpr(inner, ()) if isinstance(inner, Jaxpr) else inner
    return None


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns the number of constants among the operands of a `scan` (or a `while` body), and that of its carries."""
    if "body_nconsts" in eqn.params:
        return eqn.params["body_nconsts"], len(eqn.outvars)
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since JAX 0.11
    return len(consts), len(carry)


def scan_params(eqn: JaxprEqn, body: ClosedJaxpr, num_consts: int, num_carry: int) -> dict[str, object]:
    """Returns the parameters of a `scan` (or of a `while`, except its condition) with another body."""
    if "body_nconsts" in eqn.params:
        return {**eqn.params, "body_jaxpr": body, "body_nconsts": num_consts}
    num_in, num_out = len(body.jaxpr.invars), len(body.jaxpr.outvars)
    if "num_carry" in eqn.params:
        sizes: dict[str, object] = {"num_consts": num_consts, "num_carry": num_carry}
        if "linear" in eqn.params:
            sizes["linear"] = (False,) * num_in
    else:
        ins = num_consts, num_carry, num_in - num_consts - num_carry
        sizes = {"ft_in": _flat_tree(ins), "ft_out": _flat_tree((num_carry, num_out - num_carry))}
    return {**eqn.params, **sizes, "jaxpr": body}


def _flat_tree(sizes: Sequence[int]) -> object:
    from jax._src import flattree  # pyright: ignore[reportAttributeAccessIssue]  # not in JAX 0.10

    return flattree.pack(tuple(map(flattree.nones, sizes)))


def call(eqn: JaxprEqn, closed: ClosedJaxpr) -> JaxprEqn:
    """Returns the equation `eqn` replaced by a call of `closed` on the same operands."""
    return eqn.replace(primitive=closed_call_p, params={"call_jaxpr": closed}, effects=closed.effects)


def within(eqn: JaxprEqn, outer: JaxprEqn) -> JaxprEqn:
    """Returns `eqn` with the name stack that it has when it is inlined into `outer`.

    An equation from one of JAX's functions (`jnp.where`), traced once for all its callers, takes the caller's line.
    """
    info, call = eqn.source_info, outer.source_info
    traceback = info.traceback if source_info_util.summarize(info) else call.traceback
    stack = call.name_stack + info.name_stack
    return eqn.replace(source_info=info.replace(name_stack=stack, traceback=traceback))


def is_transposed(eqn: JaxprEqn) -> bool:
    """Returns whether the equation comes from the transposition of the outermost differentiation (a backward pass)."""
    for frame in eqn.source_info.name_stack.stack:
        name = getattr(frame, "name", "")
        if type(frame).__name__ == "Transform" and name in ("jvp", "transpose"):
            return name == "transpose"
    return False


def register_dce_rule(
    primitive: Primitive, rule: Callable[[Sequence[bool], JaxprEqn], tuple[list[bool], JaxprEqn | None]]
) -> None:
    """Registers `rule(used, eqn)` for dead-code elimination: it returns the needed inputs and the rest of `eqn`."""

    def called(used: Sequence[bool], *rest: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
        return rule(used, rest[-1])  # since 0.12 JAX first passes the refs that are read later

    pe.dce_rules[primitive] = called


def without_unused(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the jaxpr without equations that no result needs; all inputs remain."""
    return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def without_unread(eqn: JaxprEqn) -> JaxprEqn:
    """Returns a `cond` without the operands that no branch reads, by JAX's rule; one with effects stays as it is."""
    if eqn.effects:
        return eqn
    variables = dict.fromkeys(v for v in eqn.invars if isinstance(v, Var))
    outvars = [v for v in eqn.outvars if not isinstance(v, DropVar)]
    pruned = without_unused(make_jaxpr(variables, outvars, [eqn], "cond").jaxpr).eqns
    return pruned[0] if pruned and len(pruned[0].invars) < len(eqn.invars) else eqn


def is_ordered(eqn: JaxprEqn) -> bool:
    """Returns whether the equation has an effect that must keep its order (an ordered callback)."""
    return any(effects.ordered_effects.contains(e) for e in eqn.effects)


def has_effects(eqn: JaxprEqn) -> bool:
    """Returns whether the equation does more than return results. Sums over mesh axes in a `shard_map` do not count."""
    return any(not isinstance(e, core.NamedAxisEffect) for e in eqn.effects)


def effects_outside(eqn: JaxprEqn, effects: Iterable[object]) -> set[object]:
    """Returns the inner effects that an equation itself has: a `shard_map` binds the names of its axes."""
    bound = eqn.params.get("newly_manual_axes", ())
    return {e for e in effects if not (isinstance(e, core.NamedAxisEffect) and e.name in bound)}


def kept_in_shard_map(eqn: JaxprEqn, aval: Any) -> tuple[Any, Any]:
    """Returns the spec and the type with which a `shard_map` returns a value of each device unchanged, under the
    current mesh. JAX returns the residuals of a differentiated `shard_map` in the same way.
    """
    mesh, check_vma = eqn.params["mesh"], eqn.params["check_vma"]
    names = tuple(n for n in mesh.axis_names if n in eqn.params["newly_manual_axes"])
    spec = aval.nospec(mesh, check_vma, names)
    return spec, core.unshard_aval(mesh, check_vma, spec, aval)


def called_from(eqn: JaxprEqn, function_name: str) -> bool:
    """Returns whether a function of this name was on the Python stack when the equation was traced."""
    traceback = eqn.source_info.traceback
    codes, _ = traceback.raw_frames() if traceback else ([], [])
    return any(code.co_name == function_name for code in codes)


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Returns whether the equation is a repetition by `jax.checkpoint` for the backward pass."""
    return any(frame.name == "rematted_computation" for frame in eqn.source_info.name_stack.stack)


def source_line(eqn: JaxprEqn) -> str:
    """Returns the equation's place, `file:line (function)`; if a library wrote it, also the line that called this."""
    written, *callers = source_info_util.summarize(eqn.source_info, _NUM_FRAMES).split("\n")[::-1]
    if not _is_installed(written):
        return written
    caller = next((c for c in callers if not _is_installed(c)), None)
    return written if caller is None else f"{written}, called from {caller}"


def users_stack(eqn: JaxprEqn) -> list[str]:
    """Returns the user's lines on the Python stack when the equation was traced, the outermost first."""
    return source_info_util.summarize(eqn.source_info, sys.maxsize).splitlines()


_NUM_FRAMES = 50


def _is_installed(place: str) -> bool:
    return "site-packages" in place or "dist-packages" in place


def written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the jaxpr with each high-level operation (JAX has them since 0.11) replaced by its parts.

    Refs that it makes (`jax.new_ref`) become the values that they hold one after the other, as in JAX's own
    compilation: then equations depend on each other only through their operands.
    """
    if closed.jaxpr.is_high:  # pyright: ignore[reportAttributeAccessIssue]
        closed = pe.lower_jaxpr2(closed)  # pyright: ignore[reportAttributeAccessIssue]
    return discharge_state(closed) if core.internal_mutable_array_effect in closed.effects else closed


def shaped_array(x: object) -> Any:
    """Returns the abstract value (with its sharding type) of an array or a `ShapeDtypeStruct`."""
    return core.shaped_abstractify(x)


def is_ref(aval: object) -> bool:
    """Returns whether this is the type of a ref, an array that equations change (`jax.new_ref`)."""
    return isinstance(aval, AbstractRef)


def memory_kind(aval: object) -> str | None:
    """Returns the memory kind in a type, None for the default one."""
    return "pinned_host" if getattr(aval, "memory_space", None) == jax.memory.Space.Host else None
