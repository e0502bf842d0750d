"""Sets the mesh under which a step is traced, and how JAX's own functions see it."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from jax._src import config, core
from jax._src import mesh as mesh_internals
from jax.sharding import AbstractMesh, NamedSharding


def trace_context() -> Hashable:
    """The settings that a trace depends on beside its arguments: x64 mode, matmul precision and the like."""
    return config.trace_context()


def setting(name: str) -> Any:
    """The value of one of JAX's settings. `jax.config.values`, which says it too, asks for all of them."""
    return getattr(jax.config, name)


def is_profiling() -> bool:
    """Whether a profile is being taken, by `jax.profiler` or by a tool that asked its server for one."""
    return jax.profiler.TraceAnnotation.is_enabled()


@dataclasses.dataclass(frozen=True)
class _Tracing:
    """The step that is being traced in this thread."""

    whole: AbstractMesh
    groups: frozenset[AbstractMesh]
    axis: str | None
    is_mesh_set: bool  # by the user


# Part of the keys of JAX's caches: what is traced here is not reused elsewhere, nor the other way round.
_tracing = jax.make_user_context(None)


@contextlib.contextmanager
def tracing(
    whole: AbstractMesh, groups: frozenset[AbstractMesh] = frozenset(), axis: str | None = None
) -> Iterator[None]:
    """A context to trace a step, or a part of it, in: `whole` is the current mesh, whatever the caller had set.

    A group's mesh is taken for the whole one. Derivatives of `shard_map` leave the mpmd axis out, over which nothing is
    split or summed. Flax applies the names of partitioned variables if the caller had set a mesh.
    """
    _install_hooks()
    is_mesh_set = not current_mesh().empty
    with _tracing(_Tracing(whole, groups, axis, is_mesh_set)), use_abstract_mesh(whole):
        yield


def _install_hooks() -> None:
    for name, wrapper in _HOOKS.items():
        module, _, function = name.rpartition(".")
        if module in sys.modules:
            _hook(module, function, wrapper)


@functools.cache
def _hook(module: str, name: str, wrapper: Callable) -> None:
    """Lets `wrapper(original, step, *args)` stand for a function, wherever it was imported, while a step is traced.

    It stays, since other threads may trace, and does nothing outside of a trace. In a release without such a function
    nothing is done: a step that needs it (one that names a group's mesh, say) gets JAX's own error.
    """
    original = getattr(sys.modules[module], name, None)
    if original is None:
        return

    @functools.wraps(original)
    def hooked(*args, **kwargs):
        step = _tracing.value
        return original(*args, **kwargs) if step is None else wrapper(original, step, *args, **kwargs)

    package = module.partition(".")[0]
    for other in [m for key, m in list(sys.modules.items()) if key.partition(".")[0] == package]:
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, hooked)


def _whole_for_group(step: _Tracing, mesh: Any) -> Any:
    is_group = not mesh.empty and mesh.abstract_mesh in step.groups and current_mesh() == step.whole
    return step.whole if is_group else mesh


def _shard_map_of_a_group(original: Any, step: _Tracing, mesh: Any, *args: Any):
    return original(mesh if mesh is None else _whole_for_group(step, mesh), *args)


def _sharding_of_a_group(original: Any, step: _Tracing, sharding: Any, *args: Any, **kwargs: Any):
    if isinstance(sharding, NamedSharding) and (mesh := _whole_for_group(step, sharding.mesh)) is not sharding.mesh:
        sharding = NamedSharding(mesh, sharding.spec)
    return original(sharding, *args, **kwargs)


def _type_of_a_groups_array(original: Any, step: _Tracing, aval: Any, sharding: Any, *args: Any, **kwargs: Any):
    """For the type of an array that the step closes over, such as a parameter."""
    if isinstance(sharding, NamedSharding) and (mesh := _whole_for_group(step, sharding.mesh)) is not sharding.mesh:
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return original(aval, sharding, *args, **kwargs)


def _replicated_without_a_rule(
    original: Any, step: _Tracing, primitive: Any, rule: Any, other_rule: Any, num_out: Any, *avals: Any, **params: Any
):
    """Some operations have no rule for Explicit axes: what they make of replicated operands is replicated."""
    try:
        return original(primitive, rule, other_rule, num_out, *avals, **params)
    except (NotImplementedError, core.ShardingTypeError):
        specs = [aval.sharding.spec for aval in avals]
        if any(spec.unreduced or spec.reduced or set(spec.partitions) - {None} for spec in specs):
            raise
        replicated = NamedSharding(current_mesh(), jax.sharding.PartitionSpec())
        return replicated if num_out is None else [replicated] * num_out


def _without_the_axis(original: Any, step: _Tracing, *args: Any):
    return tuple(n for n in original(*args) if n != step.axis)


def _is_mesh_set(original: Any, step: _Tracing):
    return original() and (step.is_mesh_set or current_mesh() != step.whole)


@contextlib.contextmanager
def _computed_without_a_mesh(original: Any, step: _Tracing):
    """What is computed while the step is traced: the abstract mesh of the whole has no devices to compute on."""
    with original(), _no_abstract_mesh() if mesh_internals.get_concrete_mesh().empty else contextlib.nullcontext():
        yield


_HOOKS: dict[str, Callable] = {
    "jax._src.core.ensure_compile_time_eval": _computed_without_a_mesh,
    "jax._src.shard_map._shmap_checks": _shard_map_of_a_group,
    "jax._src.sharding_impls.canonicalize_sharding": _sharding_of_a_group,
    "jax._src.core.update_aval_with_sharding": _type_of_a_groups_array,
    "jax._src.dispatch.update_dp_aval": _type_of_a_groups_array,
    "jax._src.lax.utils.call_sharding_rule": _replicated_without_a_rule,
    "jax._src.shard_map._all_mesh_names_except_spmd": _without_the_axis,
    "jax._src.shard_map._all_newly_manual_mesh_names": _without_the_axis,
    "flax.core.meta.global_mesh_defined": _is_mesh_set,
}


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """A context without a mesh, whatever the caller had set: JAX refuses arrays that are not on all of its devices."""
    with jax.set_mesh(None):  # pyright: ignore[reportArgumentType]
        yield


def current_mesh() -> AbstractMesh:
    """The abstract mesh of the context."""
    return jax.sharding.get_abstract_mesh()


def sharding_here() -> NamedSharding | None:
    """What the type of a computed scalar says on the current mesh, if that has Explicit axes."""
    mesh = current_mesh()
    return NamedSharding(mesh, jax.sharding.PartitionSpec()) if mesh.explicit_axes else None


@contextlib.contextmanager
def use_abstract_mesh(mesh: AbstractMesh) -> Iterator[None]:
    """A context in which `mesh` is the current abstract mesh, whatever the caller had set."""
    with _no_abstract_mesh(), jax.sharding.use_abstract_mesh(mesh):
        yield


def _no_abstract_mesh() -> Any:
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
