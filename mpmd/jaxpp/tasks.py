"""JaxPP's experimental programs of tasks and transfers: steps of `mpmd.jit` in which each value names its groups.

    from mpmd.jaxpp.experimental import mpmd

    @mpmd.mpmd(mesh, in_shardings=(on_group_0,))
    def program(x):
        y = mpmd.task(first, out_shardings=on_group_0)(x)
        y = mpmd.transfer(y, out_shardings=on_group_1).done()
        return mpmd.task(second, out_shardings=on_group_1)(y)

A value is in the groups of its sharding's mesh. Each task is one program, which equal tasks share, and a group runs its
tasks in program order (`mpmd/partition/levels.py`). Memory is reused automatically. A transfer may change the sharding,
and a value that was sent may be donated.
"""

import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.api import jit
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.delegation import is_plain
from mpmd.arrays.layouts import memory_kind
from mpmd.arrays.mesh import MpmdMesh
from mpmd.arrays.sharding import MpmdSharding
from mpmd.arrays.specs import names_of, without_axis
from mpmd.compiled import Compiled
from mpmd.jaxpp.places import JaxppMesh, to_global_jax_array
from mpmd.ops.cross_group import cross_mpmd_stack, end_task, place
from mpmd.pytrees import PyTree, TreeDef
from mpmd.tracing.arguments import broadcast, leaf_type
from scheduler.base.bounded import BoundedDict

_MOST_PROGRAMS = 4096  # by the types of arguments

__all__ = ["LoweredMpmdFun", "MpmdFunction", "MpmdMesh", "mpmd", "slice", "stack", "task", "transfer"]


@dataclasses.dataclass(frozen=True, eq=False)
class Located:
    """A value inside of a program with its place: an argument or result of a task."""

    value: jax.Array
    sharding: NamedSharding
    mpmd_mesh: MpmdMesh

    @property
    def groups(self) -> tuple[int, ...]:
        return _groups(self.mpmd_mesh, self.sharding.mesh, "a value")

    def __repr__(self) -> str:
        return f"Located({self.value}, {self.sharding.spec} in the groups {self.groups})"


def _groups(mpmd_mesh: MpmdMesh, mesh: object, what: str) -> tuple[int, ...]:
    """Returns the groups that a mesh consists of."""
    found = None
    if isinstance(mesh, Mesh) and mpmd_mesh.jax_mesh is not None and mpmd_mesh.mpmd_axis_name is not None:
        found = JaxppMesh(mpmd_mesh.jax_mesh, mpmd_mesh.mpmd_axis_name).mpmd_indices_for_mesh(mesh)
    if found is None:
        raise ValueError(
            f"The mesh of {what}, {mesh}, does not belong to the MPMD mesh {mpmd_mesh}.\n"
            "  Take one of mpmd_mesh.unstack, or mpmd_mesh.mpmd_submesh(indices).jax_mesh."
        )
    return found


def _located(value: jax.Array, sharding: NamedSharding, mpmd_mesh: MpmdMesh, what: str) -> Located:
    """Places a traced value in the groups of a sharding, and divides it there by the sharding."""
    groups = _groups(mpmd_mesh, sharding.mesh, what)
    spec = without_axis(sharding.spec, mpmd_mesh.mpmd_axis_name)
    inside = NamedSharding(mpmd_mesh.groups[groups[0]], spec, memory_kind=sharding.memory_kind)
    value = place(value, groups)
    if memory_kind(inside) != compat.memory_kind(jax.typeof(value)):
        value = jax.device_put(value, inside)
    elif inside.mesh.explicit_axes:
        value = jax.reshard(value, inside)
    else:
        value = jax.lax.with_sharding_constraint(value, inside)
    return Located(value, sharding, mpmd_mesh)


def _ended(values: Sequence[Located]) -> list[Located]:
    """Ends a task at its results."""
    return [dataclasses.replace(x, value=end_task(x.value, x.groups)) for x in values]


def _leaves(tree: PyTree, what: str) -> list[Located]:
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        if not isinstance(leaf, Located):
            raise TypeError(
                f"{what} is a {type(leaf).__name__}, not a value of the program: its arguments, and what task,"
                " transfer, stack and slice return. Compute with values inside of tasks; close over constants there."
            )
    return leaves


# --- calls inside of a program --------------------------------------------------------------------------


def task(
    fun: Callable | None = None,
    /,
    *,
    out_shardings: PyTree,
    name: str | None = None,
    in_shardings: PyTree = None,
    mesh: Mesh | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Callable:
    """Makes a function a task: its arguments and results are in the same groups.

    Args:
      fun: the task. Without it, a decorator is returned.
      out_shardings: a pytree prefix of the results, with leaves `NamedSharding`, `PartitionSpec` or None. The last two
        need a mesh: from the arguments, from another sharding, or from `mesh`.
      name: the name for profiles.
      in_shardings: the same for the arguments.
      mesh: the mesh of the group, if no argument or sharding has it.
      donate_argnums: not needed: the memory of a value after its last use is reused anyway.
    """
    if fun is None:
        return functools.partial(
            task, out_shardings=out_shardings, name=name, in_shardings=in_shardings, mesh=mesh,
            donate_argnums=donate_argnums,
        )  # fmt: skip
    title = name or getattr(fun, "__name__", type(fun).__name__)
    traced_once = jax.jit(fun)  # a task of every microbatch is traced only for the first one

    @functools.wraps(fun)
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves = _leaves((args, kwargs), f"task {title}: an argument")
        asked = _meshes_of(out_shardings)
        inner = [x.sharding.mesh for x in leaves] + _meshes_of(in_shardings) + ([mesh] if mesh is not None else [])
        meshes = inner + asked
        if not meshes:
            raise RuntimeError(
                f"task {title}: nothing says where it runs, so a PartitionSpec requires a non-empty mesh: pass mesh= or"
                " NamedShardings."
            )
        mpmd_mesh = leaves[0].mpmd_mesh if leaves else _current()
        if others := [m for m in meshes if m != meshes[0]]:
            which = "task argument shardings" if others[0] in inner else "task out_shardings"
            places = [_groups(mpmd_mesh, m, f"task {title}") for m in (meshes[0], others[0])]
            raise ValueError(
                f"task {title}: {which} must be on the same mesh; they are in the groups {places[0]} and {places[1]}."
                " Move values by transfer(x, out_shardings=...).done() first."
            )
        where = meshes[0]
        with jax.named_scope(title):
            values = jax.tree.map(lambda x: x.value, (args, kwargs))
            values = _constrained(values, in_shardings, where, mpmd_mesh, f"task {title}: in_shardings")
            outs = traced_once(*values[0], **values[1])
        flat, tree = jax.tree.flatten(outs)
        wishes = [_named(w, where) for w in broadcast(out_shardings, tree, "out_shardings")]
        values = [_located(x, s, mpmd_mesh, f"task {title}") for x, s in zip(flat, wishes, strict=True)]
        return tree.unflatten(_ended(values))

    return run


def _meshes_of(shardings: PyTree) -> list[Mesh | AbstractMesh]:
    return [s.mesh for s in jax.tree.leaves(shardings) if isinstance(s, NamedSharding)]


def _constrained(
    values: tuple[PyTree, PyTree], shardings: PyTree, mesh: Mesh | AbstractMesh, mpmd_mesh: MpmdMesh, what: str
) -> tuple[PyTree, PyTree]:
    if shardings is None:
        return values
    flat, tree = jax.tree.flatten(values[0])
    wishes = broadcast(shardings, tree, "in_shardings")
    flat = [
        x if w is None else _located(x, _named(w, mesh), mpmd_mesh, what).value
        for x, w in zip(flat, wishes, strict=True)
    ]
    return tree.unflatten(flat), values[1]


def _named(wish: NamedSharding | PartitionSpec | None, mesh: Mesh | AbstractMesh) -> NamedSharding:
    if isinstance(wish, NamedSharding):
        return wish
    return NamedSharding(mesh, PartitionSpec() if wish is None else wish)


class TransferFuture:
    """Values on their way. `done()` returns them."""

    def __init__(self, tree: PyTree):
        self._tree = tree

    def done(self) -> PyTree:
        if self._tree is None:
            raise RuntimeError("transfer: done() may only be called once. Keep what it returned.")
        tree, self._tree = self._tree, None
        return tree


def transfer(arrays: PyTree, *, out_shardings: PyTree) -> TransferFuture:
    """Sends values to the groups of the meshes in `out_shardings`, a pytree prefix of `NamedSharding`."""
    leaves = _leaves(arrays, "transfer: arrays")
    if not leaves:
        raise ValueError("transfer: no array is given.")
    tree = jax.tree.structure(arrays)
    wishes = broadcast(out_shardings, tree, "out_shardings")
    moved = [
        _located(x.value, _named(w, x.sharding.mesh), x.mpmd_mesh, "transfer")
        for x, w in zip(leaves, wishes, strict=True)
    ]
    return TransferFuture(tree.unflatten(moved))


def stack(*arrays: PyTree) -> Located:
    """Joins values of different groups along a new axis 0, or along axis 0 where their spec has the mpmd axis there.

    Each of the groups gets the whole result.
    """
    leaves = _leaves(arrays, "stack: an argument")
    if not leaves:
        raise ValueError("stack: no array is given.")
    mpmd_mesh, axis = leaves[0].mpmd_mesh, leaves[0].mpmd_mesh.mpmd_axis_name
    groups = [group for x in leaves for group in x.groups]
    if len(set(groups)) < len(groups):
        raise ValueError(f"stack: the arguments are in the groups {groups}; a duplicate MPMD index cannot be stacked.")
    if len({x.value.dtype for x in leaves}) > 1:
        raise ValueError(f"stack: the arguments need the same dtype; they are {[str(x.value.dtype) for x in leaves]}.")
    stacked = [axis in names_of(x.sharding.spec) for x in leaves]
    for x, is_stacked in zip(leaves, stacked, strict=True):
        _check_leading(x, is_stacked, "stack")
        if not is_stacked and len(x.groups) > 1:
            raise ValueError(
                f"stack: an argument is whole in each of the groups {x.groups}; do not mix replicated values of several"
                f" groups in: name {axis!r} in the spec."
            )
    rows = [end_task(x.value if one else x.value[None], x.groups) for x, one in zip(leaves, stacked, strict=True)]
    heights = [_height(row.shape[0], x.groups, "stack") for x, row in zip(leaves, rows, strict=True)]
    if len(set(heights)) > 1:
        raise ValueError(f"stack: the arguments need as many rows for each group; they have {heights}.")
    mesh = mpmd_mesh.mesh_over(groups)
    spec = without_axis(leaves[0].sharding.spec, axis)
    rest = spec[1:] if stacked[0] else spec[:]
    sharding = NamedSharding(mesh, PartitionSpec(axis, *rest), memory_kind=leaves[0].sharding.memory_kind)
    if len({row.shape for row in rows}) == 1:
        value = cross_mpmd_stack(rows).reshape(-1, *rows[0].shape[1:])
    else:
        value = jnp.concatenate([place(row, groups) for row in rows])
    return _ended([_located(value, sharding, mpmd_mesh, "stack")])[0]


def slice(array: PyTree, groups: Sequence[int | Sequence[int]]) -> tuple[Located, ...]:
    """Reverses `stack`: returns the rows of each entry of `groups` (one group or several) as a value there."""
    (x,) = _leaves(array, "slice: array")
    axis, mpmd_mesh = x.mpmd_mesh.mpmd_axis_name, x.mpmd_mesh
    wanted = [(int(g),) if isinstance(g, int) else tuple(g) for g in groups]
    flat = tuple(g for some in wanted for g in some)
    if flat != x.groups:
        raise ValueError(f"slice: groups must be those of the array, {x.groups}, in order; they are {flat}.")
    is_stacked = axis in names_of(x.sharding.spec)
    _check_leading(x, is_stacked, "slice")
    ends = list(itertools.accumulate((len(some) for some in wanted), initial=0))
    height = _height(x.value.shape[0], x.groups, "slice") if is_stacked else 0
    found = []
    for some, begin, end in zip(wanted, ends, ends[1:], strict=False):
        rows = x.value[begin * height : end * height] if is_stacked else x.value
        mesh = mpmd_mesh.mesh_over(some)
        sharding = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
        found.append(_located(rows, sharding, mpmd_mesh, "slice"))
    return tuple(_ended(found))


def _height(num_rows: int, groups: Sequence[int], what: str) -> int:
    if num_rows % len(groups):
        raise ValueError(f"{what}: {num_rows} rows cannot be divided evenly among the groups {list(groups)}.")
    return num_rows // len(groups)


def _check_leading(x: Located, is_stacked: bool, what: str) -> None:
    if is_stacked and x.sharding.spec[0] != x.mpmd_mesh.mpmd_axis_name:
        raise ValueError(
            f"{what}: {x.sharding.spec} must name {x.mpmd_mesh.mpmd_axis_name!r} alone, on the leading PartitionSpec"
            " axis (PartitionSpec axis 0)."
        )


# --- programs -------------------------------------------------------------------------------------------

_traced_on: contextvars.ContextVar[MpmdMesh | None] = contextvars.ContextVar("traced_on", default=None)


def _current() -> MpmdMesh:
    if (mpmd_mesh := _traced_on.get()) is None:
        raise ValueError("task must be called inside of a program: a function under mpmd.mpmd(mesh, in_shardings=...).")
    return mpmd_mesh


def mpmd(
    mpmd_mesh: MpmdMesh,
    *,
    in_shardings: PyTree,
    donate_argnums: int | Sequence[int] | None = None,
    infer_donation: bool = False,
) -> Callable[[Callable], "MpmdFunction"]:
    """Makes a function of tasks and transfers a program.

    Args:
      mpmd_mesh: the groups.
      in_shardings: a pytree prefix of the arguments, with leaves `NamedSharding` on the meshes of groups.
      donate_argnums: the donated arguments.
      infer_donation: not needed: memory inside of the program is reused anyway.
    """
    del infer_donation

    def decorator(fun: Callable) -> MpmdFunction:
        return MpmdFunction(fun, mpmd_mesh, in_shardings, () if donate_argnums is None else donate_argnums)

    return decorator


class MpmdFunction:
    """A program. It takes and returns arrays on the meshes of groups. Arrays of other processes have no shards here."""

    def __init__(self, fun: Callable, mpmd_mesh: MpmdMesh, in_shardings: PyTree, donate_argnums: int | Sequence[int]):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self.mpmd_mesh = mpmd_mesh
        self.in_shardings = in_shardings
        self._donated = donate_argnums
        self._outs: BoundedDict[Hashable, list[NamedSharding]] = BoundedDict(_MOST_PROGRAMS)
        self._lowered: BoundedDict[Hashable, LoweredMpmdFun] = BoundedDict(_MOST_PROGRAMS)

    def _program(self, *args: PyTree) -> PyTree:
        """Runs the program on traced values, and notes the shardings of its results."""
        flat, tree = jax.tree.flatten(args)
        for s in (ins := self._ins(tree)):
            _groups(self.mpmd_mesh, s.mesh, "mpmd in_shardings")
        placed = [Located(x, s, self.mpmd_mesh) for x, s in zip(flat, ins, strict=True)]
        token = _traced_on.set(self.mpmd_mesh)
        try:
            outs = self._fun(*tree.unflatten(placed))
        finally:
            _traced_on.reset(token)
        leaves = _leaves(outs, "a result")
        self._outs[_types(flat, tree)] = [x.sharding for x in leaves]
        return jax.tree.map(lambda x: x.value, outs)

    def _ins(self, tree: TreeDef) -> list[NamedSharding]:
        found = broadcast(self.in_shardings, tree, "in_shardings")
        for s in found:
            if not isinstance(s, NamedSharding):
                raise TypeError(f"mpmd: in_shardings has {s!r}. Pass a NamedSharding on the mesh of a group for each.")
        return found

    @compat.api_boundary
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        self._check_no_names(kwargs)
        if any(isinstance(x, compat.Tracer) for x in jax.tree.leaves(args)):
            return self._program(*args)
        return self.lower(*args)(*args)

    @compat.api_boundary
    def lower(self, *args: PyTree, **kwargs: PyTree) -> "LoweredMpmdFun":
        """Compiles the program for arguments of these shapes (`jax.ShapeDtypeStruct` is enough)."""
        self._check_no_names(kwargs)
        flat, tree = jax.tree.flatten(args)
        key = tree, tuple(leaf_type(x, frozenset())[:3] for x in flat), compat.trace_context()
        if key not in self._lowered:
            mesh, ins = self.mpmd_mesh, self._ins(tree)
            options: Any = {"mpmd_mesh": mesh, "in_shardings": tree.unflatten([_sharding(s, mesh) for s in ins])}
            shapes = tree.unflatten([_abstract(x) for x in flat])
            out_shape = jit(self._program, **options).eval_shape(*shapes)
            outs = jax.tree.unflatten(jax.tree.structure(out_shape), self._outs[_types(flat, tree)])
            wishes = jax.tree.map(lambda s: _sharding(s, mesh), outs)
            step = jit(self._program, out_shardings=wishes, donate_argnums=self._donated, **options)
            self._lowered[key] = LoweredMpmdFun(
                step.lower(*shapes).compile(),
                mesh,
                tree.unflatten(ins),
                outs,
                jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), out_shape, outs),
            )
        return self._lowered[key]

    def _check_no_names(self, kwargs: dict[str, object]) -> None:
        if kwargs:
            raise ValueError(
                f"A program takes no keyword arguments: {', '.join(kwargs)}. in_shardings has places alone."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredMpmdFun:
    """A compiled program.

    Attributes:
      compiled: the program as a step, with `.explain()`, `.program` and so on.
      in_shardings, out_shardings: the `NamedSharding` of each argument and result, on the mesh of its groups.
      out_shape: shape, dtype and sharding of the results.
    """

    compiled: Compiled
    mpmd_mesh: MpmdMesh
    in_shardings: PyTree
    out_shardings: PyTree
    out_shape: PyTree

    @property
    def used_inputs(self) -> PyTree:
        """Whether this process has a part of each argument."""
        local = set(self.mpmd_mesh.local_groups)
        return jax.tree.map(
            lambda s: not local.isdisjoint(_groups(self.mpmd_mesh, s.mesh, "an argument")), self.in_shardings
        )

    @compat.api_boundary
    def __call__(self, *args: PyTree) -> PyTree:
        given = jax.tree.map(self._taken, args, self.in_shardings)
        return jax.tree.map(self._given, self.compiled(*given), self.out_shardings)

    def _taken(self, x: object, sharding: NamedSharding) -> object:
        """Returns an argument as an `MpmdArray` if it is in its group already; else unchanged: the step moves it."""
        if not is_plain(x) or x.sharding.device_set != sharding.device_set:
            return x
        target = _sharding(sharding, self.mpmd_mesh)
        if len(target.groups) > 1:
            return x
        return MpmdArray([x] if target.local_groups else [], target, x.shape, x.dtype)

    def _given(self, x: MpmdArray, sharding: NamedSharding) -> jax.Array:
        found = to_global_jax_array(x)
        return (
            found if found.sharding == sharding or not x.is_partially_addressable else jax.device_put(found, sharding)
        )


def _sharding(sharding: NamedSharding, mpmd_mesh: MpmdMesh) -> MpmdSharding:
    """Returns the `MpmdSharding` of a sharding on the mesh of some groups."""
    groups = _groups(mpmd_mesh, sharding.mesh, "a sharding")
    spec = sharding.spec if len(groups) > 1 else without_axis(sharding.spec, mpmd_mesh.mpmd_axis_name)
    return MpmdSharding(mpmd_mesh, groups, spec, memory_kind(sharding))


def _abstract(x: object) -> jax.ShapeDtypeStruct:
    shape, dtype, is_weak = leaf_type(x, frozenset())[:3]
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak)


def _types(flat: Sequence[object], tree: TreeDef) -> Hashable:
    return tree, tuple(leaf_type(x, frozenset())[:2] for x in flat)
