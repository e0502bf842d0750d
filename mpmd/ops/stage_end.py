"""The marks with which a user says that stages end, or may end: JAX primitives that lower to an identity.

So a model with marks runs under plain `jax.jit` unchanged; `mpmd.jit` finds them in the traced step.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mpmd import _jax_compat as compat
from mpmd.arrays.delegation import is_plain

T = TypeVar("T")


class MarkId:
    """Ties a forward mark to the backward mark that its transposition makes. Compared by identity."""

    def __repr__(self):
        return "mark"


@dataclasses.dataclass(frozen=True)
class RoleEnd:
    """The role that a mark ends: its name and, once the table is known, its groups."""

    name: str
    groups: tuple[int, ...] | None = None


mark_p = compat.Primitive("mark_stage_end")
mark_p.multiple_results = True


@compat.api_boundary
def mark_stage_end(x: T, name: str | None = None) -> T:
    """Ends a pipeline stage here: returns `x`, and the code after it belongs to the next stage.

    This includes code that does not depend on `x`: a second model that starts from the data, or a block's own
    projection of a vector that all blocks read. An equation runs in another stage only if fewer bytes cross that way.
    Its gradient runs in the same stage. Outside of `mpmd.jit` a mark is the identity.

    Args:
      x: a pytree of arrays, the values that cross the boundary. Other values may cross it too (skip connections, tied
        weights, masks); `x` only says where the stage ends.
      name: of the stage that ends here, in profiles, in `explain()` and in the names of its programs.

    Returns:
      The same pytree. Use the returned values: a mark with an unused result is a `StageError`.

    Raises:
      TypeError: if `x` has no arrays, or `name` is not a string.

    Examples:
      >>> import jax.numpy as jnp, mpmd
      >>> h = jnp.tanh(jnp.ones(3))
      >>> h = mpmd.mark_stage_end(h, name="encoder")   # the next line is stage 1
      >>> y = jnp.sum(h)
    """
    return _mark(x, name, "mark_stage_end")


@compat.api_boundary
def mark_layer_end(x: T, name: str | None = None) -> T:
    """Says that a pipeline stage may end here, and returns `x`. Some of these marks of a loop become stage ends.

    With more marks than stages, `mpmd.jit` chooses the marks that make a step fastest and fit the memory of the
    devices; `treduce(..., cuts=(3, 4, 4, 1))` fixes the choice: how many layers each stage gets. In the body of a
    `lax.scan` over stacked layers, a stage may end behind each of its iterations. Outside of a loop (inference) it does
    the same as `mark_stage_end`. Outside of `mpmd.jit` it is the identity.

    Args:
      x: a pytree of arrays, as in `mark_stage_end`: the values that the next layer reads.
      name: of the stage that ends here, if one does.

    Returns:
      The same pytree. Use the returned values.

    Raises:
      TypeError: if `x` has no arrays, or `name` is not a string.

    Example:
      >>> import jax.numpy as jnp, mpmd
      >>> h = jnp.ones(3)
      >>> for w in (0.5, 2.0, 1.0):   # three layers; a schedule of two stages takes one of these marks
      ...     h = mpmd.mark_layer_end(jnp.tanh(w * h))
    """
    return _mark(x, name, "mark_layer_end", optional=True)


def end_of_role(x: T, name: str) -> T:
    """Marks the result of a role as `mark_stage_end` does."""
    return _mark(x, name, f"role {name!r}", RoleEnd(name))


def _mark(x: T, name: str | None, function: str, role: RoleEnd | None = None, optional: bool = False) -> T:
    """Makes a mark for the user's call of `function`, the name that errors show."""
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"{function}: name is of type {type(name).__name__}, {name!r:.40}, not a string."
            f" Pass all values that cross the boundary as one tuple: {function}((a, b))."
        )
    leaves, treedef = jax.tree.flatten(x)
    if not leaves:
        what = "Pass the values that the next stage uses." if role is None else "Return what others use."
        raise TypeError(f"{function}: got {treedef}, which holds no array. {what}")
    if texts := [leaf for leaf in leaves if isinstance(leaf, str)]:
        raise TypeError(
            f"{function}: the string {texts[0]!r:.40} is among the values that cross the boundary.\n"
            f"  If it is meant as the stage's name, it is an argument of its own: {function}(x, {texts[0]!r:.40})."
        )
    leaves = [leaf if is_plain(leaf) else _as_array(leaf, function) for leaf in leaves]
    outs = mark_p.bind(*leaves, id=MarkId(), kind="forward", label=name, function=function, optional=optional,
                       role=role)  # fmt: skip
    return jax.tree.unflatten(treedef, outs)


def _as_array(leaf: object, function: str) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"{function}: something of type {type(leaf).__name__} is among the values that cross the boundary."
            f" Pass arrays and numbers alone. ({error})"
        ) from None


def mark_at(mark: compat.JaxprEqn) -> str:
    """Returns the user's call that made a mark, and its line."""
    return f"{mark.params['function']} at {compat.source_line(mark)}"


mark_p.def_impl(lambda *xs, **_: list(xs))
mark_p.def_abstract_eval(lambda *avals, **_: list(avals))
compat.mlir.register_lowering(mark_p, lambda ctx, *xs, **_: list(xs))
compat.batching.primitive_batchers[mark_p] = lambda xs, dims, **params: (mark_p.bind(*xs, **params), dims)


def _mark_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, kind: str, **params: object):
    outs = mark_p.bind(*primals, kind=kind, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not compat.ad.Zero and t.dtype != jax.dtypes.float0]
    tangents_out = [compat.ad.Zero(jax.typeof(t)) if type(t) is not compat.ad.Zero else t for t in tangents]
    if moving:
        marked = mark_p.bind(*(tangents[i] for i in moving), kind="tangent" if kind == "forward" else kind, **params)
        for i, t in zip(moving, marked, strict=True):
            tangents_out[i] = t
    return outs, tangents_out


def _mark_transpose(cts: Sequence[jax.Array | compat.ad.Zero], *xs: object, kind: str, **params: object):
    if all(type(ct) is compat.ad.Zero for ct in cts):
        return cts
    cts = [compat.ad.instantiate_zeros(ct) for ct in cts]
    return mark_p.bind(*cts, kind="backward" if kind == "tangent" else "tangent", **params)


compat.ad.primitive_jvps[mark_p] = _mark_jvp
compat.ad.primitive_transposes[mark_p] = _mark_transpose


def boundaries(marks: Sequence[Mapping[str, object]]) -> list[int]:
    """Returns the number of the forward mark that each mark belongs to, from the marks' parameters in program order.

    Marks from a cached inner jaxpr share an id: then backward ones pair with forward ones from the last to the first,
    the order of a backward pass. In a derivative of a derivative, each boundary has several marks of a kind in a row.
    """
    by_id: dict[object, list[int]] = defaultdict(list)
    forward = [mark["id"] for mark in marks if mark["kind"] == "forward"]
    for number, mark in enumerate(forward):
        by_id[mark].append(number)
    alike = Counter((mark["kind"], mark["id"]) for mark in marks)
    seen: Counter[tuple[object, object]] = Counter()
    found = []
    for mark in marks:
        kind, numbers = (mark["kind"], mark["id"]), by_id[mark["id"]]
        at = min(seen[kind] // max(1, alike[kind] // len(numbers)), len(numbers) - 1)
        found.append(numbers[-1 - at if mark["kind"] == "backward" else at])
        seen[kind] += 1
    return found


def without(jaxpr: compat.Jaxpr, identities: Collection[compat.Primitive]) -> compat.Jaxpr:
    """Returns `jaxpr` without the equations of the primitives `identities`, however deep. Each returns its operands."""

    def clean(x):
        if isinstance(x, compat.ClosedJaxpr):
            return compat.ClosedJaxpr(without(x.jaxpr, identities), x.consts)
        if isinstance(x, compat.Jaxpr):
            return without(x, identities)
        return x

    def cleaned(eqn: compat.JaxprEqn) -> compat.JaxprEqn | None:
        if eqn.primitive in identities:
            return None
        return eqn.replace(params={k: compat.mapped(x, clean) for k, x in eqn.params.items()})

    return with_each(jaxpr, cleaned)


def with_each(jaxpr: compat.Jaxpr, change: Callable[[compat.JaxprEqn], compat.JaxprEqn | None]) -> compat.Jaxpr:
    """Returns `jaxpr` with `change(eqn)` for each of its equations; None removes an equation that is an identity."""
    alias: dict = {}
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[compat.renamed(v, alias) for v in eqn.invars])
        if (new := change(eqn)) is None:
            alias.update(zip(eqn.outvars, eqn.invars, strict=True))
        else:
            eqns.append(new)
    return compat.new_jaxpr(jaxpr, eqns=eqns, outvars=[compat.renamed(v, alias) for v in jaxpr.outvars])
