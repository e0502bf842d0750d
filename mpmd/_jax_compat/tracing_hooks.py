"""Sets the mesh under which a step is traced, and makes JAX's own functions see that mesh."""

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from jax._src import config, core
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from mpmd._jax_compat.jaxprs import ClosedJaxpr, Jaxpr
from mpmd._jax_compat.rebasing import rebase

# The settings that people change, among those that a trace depends on.
_CHANGED = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable", "jax_use_shardy_partitioner",
    "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_disable_jit", "jax_softmax_custom_jvp",
)  # fmt: skip


def trace_context() -> Hashable:
    """Returns the settings that a trace depends on besides its arguments: x64 mode, matmul precision and the like."""
    return config.trace_context()


def trace_settings() -> str:
    """Returns these settings as lines: first those that people change, by name, then all."""
    named = [f"{name} = {getattr(jax.config, name, None)}" for name in _CHANGED]
    return "\n".join([*named, f"all settings = {trace_context()}"])


def setting(name: str) -> Any:
    """Returns the value of one of JAX's settings. `jax.config.values` would look up all of them."""
    return getattr(jax.config, name)


def is_profiling() -> bool:
    """Returns whether a profile is being taken, by `jax.profiler` or by a tool through its server."""
    return jax.profiler.TraceAnnotation.is_enabled()


@dataclasses.dataclass(frozen=True)
class _Tracing:
    """The step that is being traced in this thread."""

    mesh: AbstractMesh
    others: frozenset[AbstractMesh]  # the user may name these, and means `mesh`
    axis: str | None
    is_mesh_set: bool  # by the user
    # Variables of functions of `shard_map`, and the values that they had before: JAX writes the mesh into them.
    written: list[tuple[types.CellType, object]] = dataclasses.field(default_factory=list, compare=False)

    def own_mesh(self, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        """Returns the mesh of the step instead of another one that stands for it."""
        return self.mesh if not mesh.empty and mesh.abstract_mesh in self.others else mesh

    def own_sharding(self, sharding: object) -> object:
        """Returns a sharding on the mesh of the step, if it is on another one that stands for it."""
        if isinstance(sharding, NamedSharding) and (mesh := self.own_mesh(sharding.mesh)) is not sharding.mesh:
            return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        return sharding


# Part of the keys of JAX's caches: results traced here are not reused elsewhere, nor the other way round.
_tracing = jax.make_user_context(None)


@contextlib.contextmanager
def tracing(
    mesh: AbstractMesh, others: frozenset[AbstractMesh] = frozenset(), axis: str | None = None
) -> Iterator[None]:
    """Returns a context in which to trace a step, or a part of it: `mesh` is the current mesh, whatever the caller set.

    The `others` (the whole mesh, meshes of other groups) are taken for it. Derivatives of `shard_map` leave out the
    mpmd axis, over which nothing is split or summed. Flax applies the names of partitioned variables if the caller had
    set a mesh.
    """
    _install_hooks()
    is_mesh_set = not current_mesh().empty
    step = _Tracing(mesh, others, axis, is_mesh_set)
    try:
        with _tracing(step), use_abstract_mesh(mesh):
            yield
    finally:
        for cell, value in reversed(step.written):
            cell.cell_contents = value


@contextlib.contextmanager
def lowering(mesh: AbstractMesh) -> Iterator[None]:
    """Returns a context in which to lower a program: some primitives (`custom_vmap`) trace their bodies there."""
    with _tracing(_Tracing(mesh, frozenset(), None, False)):
        yield


def _install_hooks() -> None:
    for name, wrapper in _HOOKS.items():
        place, _, function = name.rpartition(".")
        module = place if place in sys.modules else place.rpartition(".")[0]  # the place may be a class
        if module in sys.modules:
            _hook(module, place[len(module) + 1 :], function, wrapper)


@functools.cache
def _hook(module: str, owner: str, name: str, wrapper: Callable) -> None:
    """Replaces a function, wherever it was imported, by `wrapper(original, step, *args)` while a step is traced.

    The hook stays, since other threads may trace, and does nothing outside of a trace. A release without this function
    gets no hook: a step that needs it (one that names a group's mesh, say) raises JAX's own error.
    """
    place = getattr(sys.modules[module], owner, None) if owner else sys.modules[module]
    original = getattr(place, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def hooked(*args, **kwargs):
        step = _tracing.value
        return original(*args, **kwargs) if step is None else wrapper(original, step, *args, **kwargs)

    if owner:
        setattr(place, name, hooked)
        return
    package = module.partition(".")[0]
    for other in [m for key, m in list(sys.modules.items()) if key.partition(".")[0] == package]:
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, hooked)


def _own_mesh(step: _Tracing, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns the mesh of the step instead of another one that the user names, except in a context of its own."""
    return step.own_mesh(mesh) if current_mesh() == step.mesh else mesh


def _own_sharding(step: _Tracing, sharding: Any) -> Any:
    return step.own_sharding(sharding) if current_mesh() == step.mesh else sharding


def _shard_map_of_another(original: Callable, step: _Tracing, mesh: Mesh | AbstractMesh | None, *args: object):
    step.written.extend(_written_by_shard_map(sys._getframe(2)))
    return original(mesh if mesh is None else _own_mesh(step, mesh), *args)


def _written_by_shard_map(frame: types.FrameType | None) -> Iterator[tuple[types.CellType, object]]:
    """Yields the variables that a function of `shard_map` is about to overwrite with the mesh of this call, with their
    values. The function would keep that mesh, and could not be called outside of the step any more.

    The caller of its frame, which shortens tracebacks, holds the function.
    """
    holder = None if frame is None else frame.f_back
    function: Any = None if holder is None else holder.f_locals.get("fun")
    if frame is None or getattr(function, "__code__", None) is not frame.f_code:  # another JAX: they stay overwritten
        return
    for name, cell in zip(frame.f_code.co_freevars, function.__closure__ or (), strict=True):
        if name in ("mesh", "axis_names"):
            yield cell, cell.cell_contents


def _sharding_of_another(original: Callable, step: _Tracing, sharding: Any, *args: Any, **kwargs: Any):
    own = _own_sharding(step, sharding)
    return original(own if own is sharding else own.with_memory_kind(None), *args, **kwargs)


def _array_of_another(
    original: Callable, step: _Tracing, aval: object, sharding: object, *args: object, **kwargs: object
):
    """Handles the type of an array that the step closes over, such as a parameter."""
    return original(aval, _own_sharding(step, sharding), *args, **kwargs)


def _axes_of_another(original: Callable, step: _Tracing, *args: object, **kwargs: object):
    """Handles `auto_axes`, whose results have shardings."""
    return original(*args, **jax.tree.map(functools.partial(_own_sharding, step), kwargs))


def _context_of_another(original: Callable, step: _Tracing, context: Any):
    named, context.mesh = context.mesh, _own_mesh(step, context.mesh)
    try:
        return original(context)
    finally:
        context.mesh = named


def _jaxpr_of_another(original: Callable, step: _Tracing, jaxpr: Jaxpr, *args: object, **kwargs: object):
    """Handles functions that were traced outside of the step."""
    if {e.ctx.cur_abstract_mesh for e in jaxpr.eqns} & step.others - {step.mesh}:
        jaxpr = rebase(ClosedJaxpr(jaxpr, ()), step.mesh, step.mesh).jaxpr
    return original(jaxpr, *args, **kwargs)


def _replicated_without_a_rule(
    original: Callable, step: _Tracing, primitive: object, rule: object, other_rule: object, num_out: int | None,
    *avals: ShapedArray, **params: object,
):  # fmt: skip
    """Makes results of replicated operands replicated, for operations that have no rule for Explicit axes.

    An operand that was computed while the step is traced may be on the whole mesh.
    """
    shaped = [aval for aval in avals if isinstance(aval, ShapedArray)]
    if len({aval.sharding.mesh for aval in shaped if not aval.sharding.mesh.empty}) > 1 and len(shaped) == len(avals):
        avals = tuple(aval.update(sharding=step.own_sharding(aval.sharding)) for aval in shaped)
    try:
        return original(primitive, rule, other_rule, num_out, *avals, **params)
    except (NotImplementedError, core.ShardingTypeError):
        specs = [aval.sharding.spec for aval in avals]
        if any(spec.unreduced or spec.reduced or set(spec.partitions) - {None} for spec in specs):
            raise
        replicated = NamedSharding(current_mesh(), jax.sharding.PartitionSpec())
        return replicated if num_out is None else [replicated] * num_out


def _without_the_axis(original: Callable, step: _Tracing, *args: object):
    return tuple(n for n in original(*args) if n != step.axis)


def _is_mesh_set(original: Callable, step: _Tracing):
    return original() and (step.is_mesh_set or current_mesh() != step.mesh)


@contextlib.contextmanager
def _computed_outside(original: Callable, step: _Tracing):
    """Handles computations while the step is traced: the step's mesh has no devices to compute on."""
    with original(), no_mesh() if core.trace_state_clean() else jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


_HOOKS: dict[str, Callable] = {
    "jax._src.core.ensure_compile_time_eval": _computed_outside,
    "jax._src.core.eval_jaxpr": _jaxpr_of_another,
    "jax._src.mesh.use_abstract_mesh.__enter__": _context_of_another,
    "jax._src.shard_map._shmap_checks": _shard_map_of_another,
    "jax._src.sharding_impls.canonicalize_sharding": _sharding_of_another,
    "jax._src.core.update_aval_with_sharding": _array_of_another,
    "jax._src.dispatch.update_dp_aval": _array_of_another,
    "jax._src.pjit._get_new_mesh": _axes_of_another,
    "jax._src.lax.utils.call_sharding_rule": _replicated_without_a_rule,
    "jax._src.shard_map._all_mesh_names_except_spmd": _without_the_axis,
    "jax._src.shard_map._all_newly_manual_mesh_names": _without_the_axis,
    "flax.core.meta.global_mesh_defined": _is_mesh_set,
}


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Returns a context without a mesh, whatever the caller set: JAX refuses arrays that are not on all its devices."""
    with jax.set_mesh(None):  # pyright: ignore[reportArgumentType]
        yield


def current_mesh() -> AbstractMesh:
    """Returns the abstract mesh of the context."""
    return jax.sharding.get_abstract_mesh()


def sharding_here() -> NamedSharding | None:
    """Returns the sharding in the type of a computed scalar on the current mesh, if that has Explicit axes."""
    mesh = current_mesh()
    return NamedSharding(mesh, jax.sharding.PartitionSpec()) if mesh.explicit_axes else None


@contextlib.contextmanager
def use_abstract_mesh(mesh: AbstractMesh) -> Iterator[None]:
    """Returns a context in which `mesh` is the current abstract mesh, whatever the caller set."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.sharding.use_abstract_mesh(mesh):
        yield
