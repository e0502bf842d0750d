"""Names, types and layouts of the arguments of a call, and the checks on them."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.delegation import is_plain
from mpmd.arrays.layouts import fit, memory_kind, shortest
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from mpmd.arrays.specs import trimmed, without_axis
from mpmd.arrays.splits import Range
from mpmd.errors import StageError
from mpmd.ops import lists
from mpmd.pytrees import PyTree, TreeDef
from scheduler.base.texts import counted

Args = tuple[PyTree, ...]  # of a call of the step, as the user gives them
Kwargs = dict[str, PyTree]
Fixed = tuple[tuple[int | str, type, object], ...]  # static arguments: position or name, type, value

REF_ADVICE = "Pass what it holds (ref[...]) as an argument and return its new value. Refs made in the step are fine."
_NO_FUNCTION = "A pipelined step is not a JAX function: call it at the top level, and differentiate inside treduce."
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """The arguments of one call, flat."""

    num_args: int
    fixed: Fixed
    leaves: list
    tree: TreeDef
    types: tuple
    key: Hashable
    wishes: Sequence[object] = ()  # the user's sharding of each leaf, or None

    @property
    def static_positions(self) -> set[int]:
        """Positions of the static arguments."""
        return {where for where, _, _ in self.fixed if isinstance(where, int)}


@dataclasses.dataclass(frozen=True)
class Hint:
    """What is known of the layout of an argument or result before the step is placed."""

    groups: frozenset[int] | None = None
    layout: tuple[PartitionSpec, str | None] | None = None
    split_axis: int | None = None  # of a split array
    ranges: tuple[Range, ...] = ()  # for a split array, the rows that each group has


def leaf_type(x: Any, explicit: Collection[str]) -> tuple[tuple[int, ...], Any, bool, tuple]:
    """Returns the shape, the dtype, the weak type and the spec on Explicit axes of one argument."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        _check_is_array("an argument", x)
        aval = compat.shaped_array(x)
        return aval.shape, aval.dtype, aval.weak_type, ()
    sharding = getattr(x, "mpmd_sharding", None) or getattr(x, "sharding", None) if explicit else None
    spec = _only(sharding.spec, explicit) if isinstance(sharding, (NamedSharding, MpmdSharding)) else ()
    return (
        x.shape,
        jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True),
        getattr(x, "weak_type", False),
        spec,
    )


def _only(spec: Iterable[str | tuple[str, ...] | None], names: Collection[str]) -> tuple:
    """Returns the part of a spec on the axes `names`, as a tuple without trailing Nones."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return trimmed([tuple(n for n in entry if n in names) or None for entry in entries])


def traced_type(x: object, hint: Hint, mesh: Mesh, mpmd_axis: str | None) -> jax.ShapeDtypeStruct:
    """Returns the type under which an argument is traced, with a sharding if the mesh has Explicit axes."""
    shape, dtype, weak, _ = leaf_type(x, frozenset())
    explicit = set(mesh.explicit_axes)
    spec, kind = hint.layout or (PartitionSpec(), None)
    typed = PartitionSpec(*(e if e is None or len(e) > 1 else e[0] for e in _only(spec, explicit - {mpmd_axis})))
    sharding = NamedSharding(mesh.abstract_mesh, typed, memory_kind=kind) if kind or explicit else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak)


def hint_of(wish: Any, x: Any, mesh: MpmdMesh, name: str, aval: compat.Aval | None = None) -> Hint:
    """Returns the layout that the user's sharding, or else the argument `x`, implies; a result has only its `aval`."""
    if isinstance(x, MpmdArray) and wish is None and (x.committed or len(x.mpmd_idxs) == mesh.num_groups):
        wish = x.mpmd_sharding
    if wish is None and (is_plain(x) or isinstance(x, jax.ShapeDtypeStruct)):
        if isinstance(x.sharding, NamedSharding):
            return _fitting_hint(x.sharding, x.shape, mesh)
        wish = x.sharding if isinstance(x.sharding, MpmdSharding) else None
    if wish is None:
        return Hint()
    array = x if aval is None else aval
    hint = _wished(wish, mesh, name)
    _check_layout_fits(hint, array, mesh, name)
    if isinstance(wish, MpmdSharding) and wish.split_axis is not None:
        wish.check_compatible_aval(array.shape)
        ranges = wish.ranges(array.shape[wish.split_axis])
        return dataclasses.replace(hint, split_axis=wish.split_axis, ranges=ranges)
    return hint


def _fitting_hint(sharding: NamedSharding, shape: tuple[int, ...], mesh: MpmdMesh) -> Hint:
    """Returns the layout that an array's own sharding implies, as far as it fits the groups."""
    axes, kind = set(mesh.groups[0].axis_names) - {mesh.mpmd_axis_name}, memory_kind(sharding)
    if set(sharding.mesh.axis_names).isdisjoint(mesh.tracing_mesh().axis_names):
        return Hint()
    if not _only(sharding.spec, axes) and kind is None:
        return Hint()
    fitted = fit((sharding.spec, None), mesh.groups[0], shape)
    return Hint(None, (shortest(without_axis(fitted.spec, mesh.mpmd_axis_name)), kind))


def _check_layout_fits(hint: Hint, x: object, mesh: MpmdMesh, name: str) -> None:
    """Checks that the user's sharding has the array's rank and divides it, in every group that may hold the array."""
    assert hint.layout is not None
    spec, kind = hint.layout
    shape = tuple(getattr(x, "shape", ()))
    for group in sorted(hint.groups or [0]):
        try:
            if len(spec) > len(shape):
                raise ValueError(f"It names {len(spec)} array axes.")
            NamedSharding(mesh.groups[group], spec, memory_kind=kind).shard_shape(shape)
        except (ValueError, IndexError) as e:
            raise ValueError(
                f"mpmd.jit: the sharding {spec} of {name} does not fit its shape {shape} in group {group}.\n  {e}"
            ) from None


def _wished(wish: object, mesh: MpmdMesh, name: str) -> Hint:
    """Returns the layout that the user wants for one argument or result."""
    if isinstance(wish, MpmdSharding):
        if wish.mpmd_mesh != mesh:
            raise ValueError(
                f"mpmd.jit: {name} is of another mesh than the step's: {_meshes(wish.mpmd_mesh, mesh)}.\n"
                "  Bring a state to the step's groups first: reshard.mpmd_to_mpmd_reshard(state, shardings)."
                " Shardings are in the .input_shardings of the step, compiled for jax.ShapeDtypeStruct(shape, dtype)."
            )
        return Hint(wish.mesh_ids or frozenset([0]), (wish.spec, wish.memory_kind))
    if isinstance(wish, (NamedSharding, PartitionSpec)):
        kind = memory_kind(wish) if isinstance(wish, NamedSharding) else None
        spec = wish.spec if isinstance(wish, NamedSharding) else wish
        try:
            return Hint(None, (MpmdSharding(mesh, 0, without_axis(spec, mesh.mpmd_axis_name)).spec, kind))
        except ValueError as e:
            raise ValueError(f"mpmd.jit: the sharding of {name} is {spec}.\n  {e}") from None
    raise TypeError(
        f"mpmd.jit: the sharding of {name} is {wish!r}. Pass an MpmdSharding, NamedSharding, PartitionSpec or None."
    )


def _meshes(other: MpmdMesh, mesh: MpmdMesh) -> str:
    """Describes two meshes that differ, for messages."""
    return f"on {other}, not {mesh}" if str(other) != str(mesh) else f"on other devices in {mesh}"


def broadcast(
    shardings: PyTree, tree: TreeDef, what: str, skip: Collection[int] = (), total: int | None = None
) -> list[Any]:
    """Returns a flat list with one sharding per leaf of `tree`, from a pytree prefix."""
    if shardings is None:
        return [None] * tree.num_leaves
    if skip and isinstance(shardings, (tuple, list)) and len(shardings) == total:
        shardings = tuple(s for i, s in enumerate(shardings) if i not in skip)

    def is_leaf(x):
        return x is None or isinstance(x, (MpmdSharding, jax.sharding.Sharding, PartitionSpec))

    if isinstance(shardings, list):
        shardings = tuple(shardings) if what == "in_shardings" else shardings
    full = jax.tree.unflatten(tree, range(tree.num_leaves))
    flat: list = [None] * tree.num_leaves

    def fill(wish, part):
        for i in jax.tree.leaves(part):
            flat[i] = None if wish is unsaid else wish

    unsaid = object()  # an object, so that JAX's message about a difference treats None as a leaf
    shardings = jax.tree.map(lambda x: unsaid if x is None else x, shardings, is_leaf=is_leaf)
    try:
        jax.tree.map(fill, shardings, full, is_leaf=is_leaf)
    except ValueError as e:
        has_list = lists.numbers(tree)
        raise ValueError(
            f"mpmd.jit: {what} is not a prefix of the step's"
            f" {'arguments' if what == 'in_shardings' else 'result'}.\n  {e}"
            + ("\n  A list of microbatches has one entry, for all arrays in it." if has_list else "")
        ) from None
    return flat


def argument_names(fun: Callable, call: CallArguments) -> list[str]:
    """Returns names such as `state['w']` rather than `args[0]['w']`, as far as the step's signature names arguments."""
    args, kwargs = jax.tree.unflatten(call.tree, range(call.tree.num_leaves))
    positional = [p.name for p in _parameters(fun) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positions = [i for i in range(call.num_args) if i not in call.static_positions]
    roots = [positional[i] if i < len(positional) else f"args[{i}]" for i in positions]
    return [
        root + jax.tree_util.keystr(path)
        for root, arg in [*zip(roots, args, strict=True), *sorted(kwargs.items())]
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]
    ]


def fixed_ways(fun: Callable, call: CallArguments) -> dict[str, str]:
    """Describes the static arguments of a call, by name, and lists the arguments given by keyword."""
    names = [p.name for p in _parameters(fun) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    found = {}
    for where, _, value in call.fixed:
        is_named = isinstance(where, str) or where < len(names)
        name = (where if isinstance(where, str) else names[where]) if is_named else f"args[{where}]"
        found[name] = f"as {_ADDRESS.sub('0x', repr(value))}"
    keywords = jax.tree.unflatten(call.tree, range(call.tree.num_leaves))[1]
    return found | {"keyword arguments": f"({', '.join(sorted(keywords))})" if keywords else "(none)"}


def _parameters(fun: Callable) -> list[inspect.Parameter]:
    """Returns the parameters of a function, as far as its signature is known."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return []


def check_is_outside() -> None:
    """Raises a StageError if another function is being traced: a step cannot be compiled inside one."""
    if not compat.trace_state_clean():
        raise StageError(
            "mpmd.jit: the step was called inside jax.jit, jax.lax.scan or another function that JAX traces.\n"
            f"  {_NO_FUNCTION}"
        )


def fault_with_name(fault: Exception, leaves: Iterable[object], names: Iterable[str]) -> Exception:
    """Returns the error of `leaf_type` with the name of the argument that causes it."""
    for name, x in zip(names, leaves, strict=True):
        try:
            leaf_type(x, ())
        except type(fault):
            return type(fault)(f"mpmd.jit: {name}: {fault}")
    return fault


def check_leaves(leaves: Iterable[object], names: Iterable[str]) -> None:
    """Checks that every argument is an array or a number, and that none is being traced."""
    for x, name in zip(leaves, names, strict=True):
        if isinstance(x, compat.Tracer):
            raise StageError(
                f"mpmd.jit: {name} is being traced, so the step was called inside jax.jit, jax.grad or jax.vmap.\n"
                f"  {_NO_FUNCTION}"
            )
        _check_is_array(name, x)


def _check_is_array(name: str, x: object) -> None:
    if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex, np.generic)):
        state = "  If it is a state, register its class: jax.tree_util.register_dataclass.\n"
        raise TypeError(
            f"mpmd.jit: {name} is of type {type(x).__name__}, {x!r:.40}, not an array.\n"
            f"{state if dataclasses.is_dataclass(x) else ''}"
            "  Leave it out, or make it an argument of its own and name that in static_argnames if it is part of the"
            " program."
        )
    if compat.is_ref(getattr(x, "aval", None)):
        raise TypeError(f"mpmd.jit: {name} is a ref.\n  {REF_ADVICE}")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"mpmd.jit: {name} is a masked array, which JAX has none of. Pass {name}.filled(value).")
    if not isinstance(x, (np.ndarray, np.generic)) or x.dtype == jax.dtypes.float0:
        return
    of_numpy_alone = x.dtype.kind in "OSUMm" or x.dtype.type in (np.longdouble, np.clongdouble) or not x.dtype.isnative
    if of_numpy_alone or x.dtype.fields is not None:
        raise TypeError(
            f"mpmd.jit: {name} is a numpy array of dtype {x.dtype}, which JAX has no arrays of.\n"
            "  Make it an array of numbers or booleans, or leave it out."
        )


def named_positions(
    fun: Callable, argnums: int | Iterable[int], argnames: str | Iterable[str], what: str
) -> tuple[frozenset[int], frozenset[str]]:
    """Returns the positions and the names of arguments given by number (negative ones count from the end) or by name.

    Raises:
      TypeError: a number is not an int.
      ValueError: the step has no such argument.
    """
    numbers = tuple(argnums) if isinstance(argnums, Iterable) else (argnums,)
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    if wrong := [i for i in numbers if isinstance(i, bool) or not isinstance(i, (int, np.integer))]:
        raise TypeError(
            f"mpmd.jit: {what}_argnums has {wrong[0]!r}. Pass positions, as in {what}_argnums=(0,); names go into"
            f" {what}_argnames."
        )
    parameters = _parameters(fun)
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positions = {i + len(plain) if i < 0 else i for i in numbers}
    many = not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if wrong := [i for i in numbers if i < -len(plain) or (i >= len(plain) and not many)]:
        raise ValueError(
            f"mpmd.jit: {what}_argnums has {wrong[0]}, but the step takes {counted(len(plain), 'positional argument')}."
        )
    by_name = {p.name: i for i, p in enumerate(plain) if p.kind is not p.POSITIONAL_ONLY}
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    any_keyword = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
    if unknown := [n for n in names if n not in by_name and n not in keywords and not any_keyword]:
        raise ValueError(
            f"mpmd.jit: {what}_argnames has {unknown[0]!r}, but the step's arguments are"
            f" {', '.join([*by_name, *sorted(keywords)])}."
        )
    named = {n for n, i in by_name.items() if i in positions}
    return frozenset(positions | {by_name[n] for n in names if n in by_name}), frozenset(named.union(names))


def check_static(fixed: Fixed) -> None:
    """Checks that static arguments are hashable, since they are part of the program's key."""
    for where, kind, value in fixed:
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"mpmd.jit: static argument {where!r} is a {kind.__name__}, which cannot be hashed."
            ) from None


def donated_leaves(call: CallArguments, positions: Collection[int], names: Collection[str]) -> frozenset[int]:
    """Returns flat positions of donated arguments, given by position or name. Lists of microbatches are not donated."""
    args, kwargs = jax.tree.unflatten(call.tree, range(call.tree.num_leaves))
    given = [i for i in range(call.num_args) if i not in call.static_positions]
    donated = [arg for i, arg in zip(given, args, strict=True) if i in positions]
    donated += [arg for name, arg in kwargs.items() if name in names]
    leaves = jax.tree.leaves(donated, is_leaf=lambda x: isinstance(x, lists.Microbatches))
    return frozenset(i for i in leaves if isinstance(i, int))


def short_type(x: object) -> str:
    """Returns a type as messages show it: `float32[2,3]`."""
    shape, dtype, *_ = leaf_type(x, frozenset())
    return f"{dtype}[{','.join(map(str, shape))}]"
