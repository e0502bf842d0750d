"""The user's statements about groups: where a value goes (`place`), and values that several groups add up or stack.

`mpmd.jit` finds where everything runs without help; these functions are for a step that wants to choose. Like marks,
they are primitives that lower to plain JAX, so a step that uses them has the same results under `jax.jit`.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mpmd import _jax_compat as compat
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.delegation import is_plain
from mpmd.errors import StageError
from mpmd.ops.reductions import result_types
from mpmd.pytrees import PyTree

Groups = frozenset[int]
T = TypeVar("T")

# --- place ----------------------------------------------------------------------------------------

place_p = compat.Primitive("place")
place_p.def_impl(lambda x, **_: x)
place_p.def_abstract_eval(lambda aval, **_: aval)
compat.mlir.register_lowering(place_p, lambda ctx, x, **_: [x])
compat.batching.primitive_batchers[place_p] = lambda xs, dims, **params: (place_p.bind(*xs, **params), dims[0])
compat.ad.primitive_jvps[place_p] = lambda primals, tangents, **params: (
    place_p.bind(*primals, **params),
    tangents[0],  # gradients go where their parameters are
)


@compat.api_boundary
def place(x: T, group: int | Iterable[int]) -> T:
    """Puts values into a group, or a copy into each of several.

    Use it outside of the loops: for a metric that one process logs, a statistic that all groups read, or an update that
    should run elsewhere than its operands. Computations on placed values run where these are. A value from another
    group is sent once per target group. State that replaces an argument of the step returns to the groups of the
    argument in any case.

    Under `jax.jit`, and on plain arrays, it is the identity.

    Args:
      x: a pytree of arrays.
      group: the index of a group, or several of them.

    Returns:
      The same pytree.

    Raises:
      StageError: no such group, or the call is in a place where groups cannot be chosen (inside a `treduce` loop,
        because its schedule places its stages, or inside `scan`, `cond` and the like).

    Examples:
      >>> import jax, jax.numpy as jnp, mpmd
      >>> mesh = mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])] * 2)
      >>> step = mpmd.jit(lambda x: mpmd.place(2 * x, 1), mpmd_mesh=mesh)
      >>> step(jnp.ones(3)).mpmd_idxs
      (1,)
    """
    groups = _groups(group)
    return jax.tree.map(lambda leaf: place_p.bind(_array(leaf, "place"), groups=groups), x)


def end_task(x: jax.Array, group: Iterable[int]) -> jax.Array:
    """Ends a task with its result `x`: the equations back to the end of the previous task run as one program.

    A step with such ends keeps the order of its tasks in each group (`mpmd/partition/levels.py`). Else like `place`.
    """
    return place_p.bind(x, groups=_groups(group), ends_task=True)


def place_role(x: jax.Array, group: int) -> jax.Array:
    """Places the result of a role in the role's last group. The inputs of the role are not placed: they are where the
    stage that reads them is (`mpmd/partition/stage_text.py`), except in a step with loops, which has no such stages.
    """
    return place_p.bind(x, groups=_groups(group), of_role=True)


def _groups(group: int | Iterable[int]) -> Groups:
    if isinstance(group, (int, np.integer)) and not isinstance(group, bool):
        return frozenset([int(group)])
    several: Any = group
    try:
        groups = frozenset(int(g) for g in several)
    except (TypeError, ValueError):
        groups = frozenset()
    if not groups:
        raise StageError(f"place: group is {group!r}. Pass the index of a group, or several: place(x, {{0, 3}}).")
    return groups


def _array(leaf: ArrayLike, name: str) -> jax.Array:
    if isinstance(leaf, MpmdArray):
        raise StageError(
            f"{name}: got an MpmdArray, so it was called outside of the step.\n"
            "  Call it inside the function that mpmd.jit compiles; to move an array between groups use"
            " reshard.mpmd_to_mpmd_reshard."
        )
    return leaf if is_plain(leaf) else jnp.asarray(leaf)


# --- all_reduce and stack -------------------------------------------------------------------------

across_p = compat.Primitive("across")

# Parts of up to this many bytes are sent to every group (one hop); larger ones are combined in one group, then sent.
SMALL = 1 << 16


def _combine(*parts: jax.Array, kind: str):
    if kind == "stack":
        return jnp.stack(parts)
    total = parts[0]
    for part in parts[1:]:
        total = total + part if total.dtype != np.bool_ else total | part
    return total


def _across_abstract_eval(*avals: compat.Aval, kind: str):
    return result_types(functools.partial(_combine, kind=kind), *avals)[0]


def _across_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, kind: str):
    tangents = [jnp.zeros_like(p) if type(t) is compat.ad.Zero else t for p, t in zip(primals, tangents, strict=True)]
    return across_p.bind(*primals, kind=kind), _combine(*tangents, kind=kind)


def _across_batch(parts: Sequence[jax.Array], dims: Sequence[int | None], *, kind: str):
    return jax.vmap(lambda *xs: _combine(*xs, kind=kind), in_axes=list(dims))(*parts), 0


across_p.def_impl(lambda *parts, kind: jax.jit(lambda *xs: _combine(*xs, kind=kind))(*parts))
across_p.def_abstract_eval(_across_abstract_eval)
compat.mlir.register_lowering(across_p, compat.mlir.lower_fun(_combine, multiple_results=False))
compat.ad.primitive_jvps[across_p] = _across_jvp
compat.batching.primitive_batchers[across_p] = _across_batch


@compat.api_boundary
def cross_mpmd_all_reduce(x: PyTree, *more: PyTree) -> PyTree:
    """Returns the sum of values that live in different groups, in all groups.

    Use it after the loop for quantities of which each stage has a part, such as the squared norm of the gradients.
    `mpmd.jit` places a plain sum too (in the group with most of the bytes); this function puts the result into every
    group. Each group sends parts of up to 64 KB to all others, which is one hop; larger parts are added in the group
    that has most of them, and the sum is sent from there. Parts are added in the order given, so all groups have the
    same bits. Under `jax.jit`, and on plain arrays, it is a plain sum.

    Args:
      x: the parts: a list, tuple or dict of them, each an array or a pytree of arrays, all alike in structure,
        shapes and dtypes. Parts can also be separate arguments, `cross_mpmd_all_reduce(a, b, c)`. A single array is
        its own sum: it is copied to all groups.

    Returns:
      The sum, in the form of one part (for booleans: whether any is True).

    Raises:
      StageError: the parts differ in structure, shape or dtype, or the call is where `place` may not be.

    Examples:
      >>> import jax.numpy as jnp, mpmd
      >>> gradients = [jnp.ones(3), jnp.ones(4)]                        # of two stages
      >>> float(mpmd.cross_mpmd_all_reduce([jnp.vdot(g, g) for g in gradients]))
      7.0
    """
    return _everywhere("cross_mpmd_all_reduce", "sum", (x, *more))


@compat.api_boundary
def cross_mpmd_stack(x: PyTree, *more: PyTree) -> PyTree:
    """Returns values that live in different groups, stacked along a new axis 0, in all groups.

    For instance the norm of each stage's gradients, for a log or for a rule that compares stages. Under `jax.jit`, and
    on plain arrays, it is `jnp.stack`. Otherwise like `cross_mpmd_all_reduce`.

    Args:
      x: the parts, as in `cross_mpmd_all_reduce`.

    Returns:
      The stack, in the form of one part with a new axis 0; the length of this axis is the number of parts.

    Raises:
      StageError: as in `cross_mpmd_all_reduce`.

    Examples:
      >>> import jax.numpy as jnp, mpmd
      >>> mpmd.cross_mpmd_stack([jnp.float32(1), jnp.float32(2)])
      Array([1., 2.], dtype=float32)
    """
    return _everywhere("cross_mpmd_stack", "stack", (x, *more))


def _everywhere(name: str, kind: str, args: tuple[PyTree, ...]) -> PyTree:
    parts = _parts(args)
    if not parts:
        raise StageError(f"{name}: no parts were given. Pass a list of values, one of each group that has one.")
    parts = [jax.tree.map(lambda leaf: _array(leaf, name), part) for part in parts]
    _check_alike(name, parts)
    combined = jax.tree.map(
        lambda *xs: xs[0] if kind == "sum" and len(xs) == 1 else across_p.bind(*xs, kind=kind), *parts
    )
    return jax.tree.map(lambda leaf: place_p.bind(leaf, groups=None), combined)


def _parts(args: tuple[PyTree, ...]) -> list[PyTree]:
    if len(args) != 1:
        return list(args)
    x = args[0]
    if isinstance(x, dict):
        return list(x.values())
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _check_alike(name: str, parts: list[object]) -> None:
    def kind(part):
        return jax.tree.structure(part), [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(part)]

    first = kind(parts[0])
    for i, part in enumerate(parts):
        if kind(part) != first:
            raise StageError(
                f"{name}: part {i} is {_shown(part)}, but part 0 is {_shown(parts[0])}.\n"
                "  All parts need the same structure, shapes and dtypes."
            )


def _shown(part: object) -> str:
    return str(jax.tree.map(lambda x: jax.typeof(x).str_short(short_dtypes=True), part)).replace("'", "")
