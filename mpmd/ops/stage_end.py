"""Where a user says that stages end, or may end: a mark is a JAX primitive that lowers to an identity.

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
    """What a mark says that ends a role: the role's name and, once the table is known, its groups."""

    name: str
    groups: tuple[int, ...] | None = None


mark_p = compat.Primitive("mark_stage_end")
mark_p.multiple_results = True


@compat.api_boundary
def mark_stage_end(x: T, name: str | None = None) -> T:
    """Ends a pipeline stage here: returns `x`, and what is written after it belongs to the next stage.

    So does what does not depend on `x`: a second model that starts from the data, or a block's own projection of a
    vector that all blocks read. An equation runs in another stage only where fewer bytes cross so. Its gradient runs
    where it runs. Outside of `mpmd.jit` a mark is the identity.

    Args:
      x: a pytree of arrays, the values that cross the boundary. Other values may cross it too (skip
        connections, tied weights, masks); what is listed here only says where the stage ends.
      name: what to call the stage that ends here, in profiles, in `explain()` and in the names of its programs.

    Returns:
      The same pytree. Use the returned values: a mark whose result nobody uses is a `StageError`.

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
    """Says that a pipeline stage may end here, and returns `x`. Of all such marks of a loop, some become stage ends.

    With more marks than stages, `mpmd.jit` chooses those that make a step fastest and fit the memory of the devices;
    `treduce(..., cuts=(3, 4, 4, 1))` says it instead: how many layers each stage gets. In the body of a `lax.scan` over
    stacked layers, a stage may end behind each of its iterations. Outside of a loop (inference) it does what
    `mark_stage_end` does. Outside of `mpmd.jit` it is the identity.

    Args:
      x: a pytree of arrays, as for `mark_stage_end`: the values that the next layer reads.
      name: what to call the stage that ends here, if one does.

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
    """`mark_stage_end` for what a role gives."""
    return _mark(x, name, f"role {name!r}", RoleEnd(name))


def _mark(x: T, name: str | None, function: str, role: RoleEnd | None = None, optional: bool = False) -> T:
    """A mark that the user has made by `function`, which is what errors call it."""
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
    """What a user wrote to make a mark, and at which line."""
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
    """For each mark, by its parameters and in the order of the text, the number of the forward mark that it belongs to.

    Marks from a cached inner jaxpr share an id: backward ones then pair with forward ones from the last to the first,
    which is the order of a backward pass. Of a derivative of derivatives each boundary has several of a kind, in a row.
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
    """`jaxpr` less the equations of the primitives `identities`, however deep, which return what they are given."""

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
    """`jaxpr` with `change(eqn)` for each of its equations; None leaves one out that returns what it is given."""
    alias: dict = {}
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[compat.renamed(v, alias) for v in eqn.invars])
        if (new := change(eqn)) is None:
            alias.update(zip(eqn.outvars, eqn.invars, strict=True))
        else:
            eqns.append(new)
    return compat.new_jaxpr(jaxpr, eqns=eqns, outvars=[compat.renamed(v, alias) for v in jaxpr.outvars])
