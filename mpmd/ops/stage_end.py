"""Where a user says that stages end: a mark is a JAX primitive that lowers to an identity.

So a model with marks runs under plain `jax.jit` unchanged; `mpmd.jit` finds them in the traced step.
"""

from collections.abc import Collection
from typing import TypeVar

import jax
import jax.numpy as jnp

from mpmd import _jax_compat as compat
from mpmd.arrays.delegation import is_plain

PyTree = TypeVar("PyTree")


class _MarkId:
    """Ties a forward mark to the backward mark that its transposition makes. Compared by identity."""

    def __repr__(self):
        return "mark"


mark_p = compat.Primitive("mark_stage_end")
mark_p.multiple_results = True


@compat.api_boundary
def mark_stage_end(x: PyTree, name: str | None = None) -> PyTree:
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
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"mark_stage_end: name is of type {type(name).__name__}, {name!r:.40}, not a string."
            " Pass all values that cross the boundary as one tuple: mark_stage_end((a, b))."
        )
    leaves, treedef = jax.tree.flatten(x)
    if not leaves:
        raise TypeError(
            f"mark_stage_end: got {treedef}, which holds no array. Pass the values that the next stage uses."
        )
    leaves = [leaf if is_plain(leaf) else jnp.asarray(leaf) for leaf in leaves]
    return jax.tree.unflatten(treedef, mark_p.bind(*leaves, id=_MarkId(), kind="forward", label=name))


mark_p.def_impl(lambda *xs, **_: list(xs))
mark_p.def_abstract_eval(lambda *avals, **_: list(avals))
compat.mlir.register_lowering(mark_p, lambda ctx, *xs, **_: list(xs))
compat.batching.primitive_batchers[mark_p] = lambda xs, dims, **params: (mark_p.bind(*xs, **params), dims)


def _mark_jvp(primals, tangents, *, id, kind, label):
    outs = mark_p.bind(*primals, id=id, kind=kind, label=label)
    moving = [i for i, t in enumerate(tangents) if type(t) is not compat.ad.Zero and t.dtype != jax.dtypes.float0]
    tangents_out = [compat.zero_like(t) if type(t) is not compat.ad.Zero else t for t in tangents]
    if moving:
        marked = mark_p.bind(*(tangents[i] for i in moving), id=id, kind="tangent", label=label)
        for i, t in zip(moving, marked, strict=True):
            tangents_out[i] = t
    return outs, tangents_out


def _mark_transpose(cts, *xs, id, kind, label):
    if all(type(ct) is compat.ad.Zero for ct in cts):
        return cts
    cts = [compat.ad.instantiate_zeros(ct) for ct in cts]
    return mark_p.bind(*cts, id=id, kind="backward" if kind == "tangent" else "tangent", label=label)


compat.ad.primitive_jvps[mark_p] = _mark_jvp
compat.ad.primitive_transposes[mark_p] = _mark_transpose


def without(jaxpr: compat.Jaxpr, identities: Collection[compat.Primitive]) -> compat.Jaxpr:
    """`jaxpr` less the equations of the primitives `identities`, however deep, which return what they are given."""
    alias: dict = {}

    def read(v):
        return v if isinstance(v, compat.Literal) else alias.get(v, v)

    def clean(x):
        if isinstance(x, compat.ClosedJaxpr):
            return compat.ClosedJaxpr(without(x.jaxpr, identities), x.consts)
        if isinstance(x, compat.Jaxpr):
            return without(x, identities)
        return type(x)(map(clean, x)) if type(x) in (tuple, list) else x

    eqns = []
    for eqn in jaxpr.eqns:
        invars = [read(v) for v in eqn.invars]
        if eqn.primitive in identities:
            alias.update(zip(eqn.outvars, invars, strict=True))
        else:
            eqns.append(eqn.replace(invars=invars, params={k: clean(x) for k, x in eqn.params.items()}))
    return compat.new_jaxpr(jaxpr, eqns=eqns, outvars=[read(v) for v in jaxpr.outvars])
