"""Everything that JAX does not document, in one place.

Each function here stands on a private name; the rest of the package imports from this file only, so that
a new JAX release is met by reading one screen. The speed paths (`load_on`, `put`) have a documented way of
doing the same beside them; correctness never depends on the private one.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import jax
import numpy as np
from jax._src import (
    callback,
    compilation_cache,
    compiler,
    config,
    core,
    distributed,
    dtypes,
    effects,
    source_info_util,
    stages,
    traceback_util,
    tree_util,
    xla_bridge,
)
from jax._src import mesh as mesh_internals
from jax._src import shard_map as shard_map_internals
from jax._src import sharding_impls as sharding_internals
from jax._src.api_util import InternalFloatingPointError
from jax._src.core import ClosedJaxpr, Primitive, Tracer, jaxpr_as_fun
from jax._src.export import _export as export_internals
from jax._src.interpreters import pxla
from jax._src.lax import utils as lax_internals
from jax._src.lib import _jax, xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import sdy
from jax._src.sharding_impls import UnspecifiedValue
from jax._src.state.types import AbstractRef
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p, jit_p, remat_p
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, Mesh, NamedSharding

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:  # an abstract value has whatever attributes its kind has
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
    from jax._src.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

__all__ = [
    "ClosedJaxpr",
    "DropVar",
    "InternalFloatingPointError",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Tracer",
    "Var",
    "ad",
    "batching",
    "custom_jvp_call_p",
    "custom_vjp_call_p",
    "jaxpr_as_fun",
    "jit_p",
    "mlir",
    "pe",
    "remat_p",
]  # fmt: skip

# Errors and `explain()` name the user's line, not ours.
source_info_util.register_exclusion(__file__.rsplit("/", 1)[0])
for _package in ("mpmd", "reshard", "scheduler"):
    traceback_util.register_exclusion(f"{__file__.rsplit('/', 2)[0]}/{_package}")


def api_boundary(fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, whose errors come with the user's frames alone, as `jax_traceback_filtering` says."""
    return traceback_util.api_boundary(fun)


# --- jaxprs ---------------------------------------------------------------------------------------


def new_jaxpr(like: Jaxpr, *, constvars=None, invars=None, outvars=None, eqns=None) -> Jaxpr:
    """`like` with some of its parts replaced, and its effects found again."""
    eqns = like.eqns if eqns is None else eqns
    return like.replace(
        constvars=like.constvars if constvars is None else constvars,
        invars=like.invars if invars is None else invars,
        outvars=like.outvars if outvars is None else outvars,
        eqns=eqns,
        effects=frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset(),
        debug_info=like.debug_info.with_unknown_names(),
    )


def make_jaxpr(invars, outvars, eqns, name: str) -> ClosedJaxpr:
    """A closed jaxpr from its equations; `name` is what profiles and HLO dumps show."""
    debug = core.DebugInfo("mpmd", name, None, None)
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    return ClosedJaxpr(core.Jaxpr([], list(invars), list(outvars), list(eqns), effects, debug), ())


def new_var(aval) -> Var:
    """A fresh variable."""
    return Var(aval)


def with_new_vars(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr with variables of its own."""
    env: dict[Var, Var] = {}

    def fresh(v):
        if isinstance(v, Literal):
            return v
        if v not in env:
            env[v] = DropVar(v.aval) if isinstance(v, DropVar) else Var(v.aval)
        return env[v]

    jaxpr = closed.jaxpr
    eqns = [e.replace(invars=list(map(fresh, e.invars)), outvars=list(map(fresh, e.outvars))) for e in jaxpr.eqns]
    return ClosedJaxpr(
        jaxpr.replace(invars=list(map(fresh, jaxpr.invars)), outvars=list(map(fresh, jaxpr.outvars)), eqns=eqns),
        closed.consts,
    )


def constvars_to_invars(jaxpr: Jaxpr) -> Jaxpr:
    """Constants become the first arguments."""
    return new_jaxpr(jaxpr, constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def jaxprs_in(params: dict):
    """The jaxprs among an equation's parameters, in lists and tuples too."""
    for value in params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, Jaxpr):
                yield x


def called_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that a call-like equation runs just as it stands, or None for any other equation."""
    if eqn.primitive is jit_p:
        specified = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        return eqn.params["jaxpr"] if all(isinstance(s, UnspecifiedValue) for s in specified) else None
    if eqn.primitive in (custom_jvp_call_p, custom_vjp_call_p) or eqn.primitive.name in ("closed_call", "core_call"):
        inner = eqn.params.get("call_jaxpr")
        return ClosedJaxpr(inner, ()) if isinstance(inner, Jaxpr) else inner
    return None


def call(eqn: JaxprEqn, closed: ClosedJaxpr) -> JaxprEqn:
    """The equation `eqn` replaced by a call of `closed` on the same operands."""
    return eqn.replace(primitive=core.closed_call_p, params={"call_jaxpr": closed}, effects=closed.effects)


def within(eqn: JaxprEqn, outer: JaxprEqn) -> JaxprEqn:
    """`eqn` with the name stack that it has when it is inlined into `outer`."""
    stack = outer.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether the equation comes from the transposition of the outermost differentiation (a backward pass)."""
    for frame in eqn.source_info.name_stack.stack:
        name = getattr(frame, "name", "")
        if type(frame).__name__ == "Transform" and name in ("jvp", "transpose"):
            return name == "transpose"
    return False


def is_ordered(eqn: JaxprEqn) -> bool:
    """Whether the equation has an effect that must keep its order (an ordered callback)."""
    return any(effects.ordered_effects.contains(e) for e in eqn.effects)


def trace_context():
    """What else than its arguments a trace depends on: x64 mode, matmul precision and the like. Hashable."""
    return config.trace_context()


def is_profiling() -> bool:
    """Whether a profile is being taken, by `jax.profiler` or by a tool that asked its server for one."""
    return jax.profiler.TraceAnnotation.is_enabled()


def called_from(eqn: JaxprEqn, function_name: str) -> bool:
    """Whether a function of this name was on the Python stack when the equation was traced."""
    traceback = eqn.source_info.traceback
    codes, _ = traceback.raw_frames() if traceback else ([], [])
    return any(code.co_name == function_name for code in codes)


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Whether the equation was traced under a differentiation."""
    return any(getattr(frame, "name", "") in ("jvp", "transpose") for frame in eqn.source_info.name_stack.stack)


def source_line(eqn: JaxprEqn) -> str:
    """Where in the user's code the equation was written: `file:line (function)`."""
    return source_info_util.summarize(eqn.source_info)


def dce(jaxpr: Jaxpr, used_outputs) -> tuple[Jaxpr, list[bool]]:
    """Drops what no used output and no effect needs; also says which inputs are still used."""
    return pe.dce_jaxpr(jaxpr, list(used_outputs))


def zero_like(tangent) -> ad.Zero:
    """The symbolic zero of a tangent's type."""
    return ad.Zero(jax.typeof(tangent))


def shaped_array(x) -> Any:
    """The abstract value (with its sharding type) of an array or a `ShapeDtypeStruct`."""
    return core.shaped_abstractify(x)


def memory_kind(aval) -> str | None:
    """The memory kind that a type says, None for the default one."""
    return "pinned_host" if getattr(aval, "memory_space", None) == core.MemorySpace.Host else None


def def_effectful_abstract_eval(primitive: Primitive, rule):
    """`rule(*avals, **params)` returns avals and effects."""
    primitive.def_effectful_abstract_eval(rule)


# --- meshes inside a jaxpr ------------------------------------------------------------------------


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
def tracing(whole: AbstractMesh, groups: frozenset[AbstractMesh] = frozenset(), axis: str | None = None):
    """A context to trace a step, or a part of it, in: `whole` is the current mesh, whatever the caller had set.

    A group's mesh is taken for the whole one. Derivatives of `shard_map` leave the mpmd axis out, over which nothing is
    split or summed. Flax applies the names of partitioned variables if the caller had set a mesh.
    """
    _install_hooks()
    is_mesh_set = not current_mesh().empty
    with _tracing(_Tracing(whole, groups, axis, is_mesh_set)), use_abstract_mesh(whole):
        yield


def _install_hooks():
    _hook(shard_map_internals.__name__, "_shmap_checks", _shard_map_of_a_group)
    _hook(sharding_internals.__name__, "canonicalize_sharding", _sharding_of_a_group)
    _hook(core.__name__, "update_aval_with_sharding", _type_of_a_groups_array)
    _hook(lax_internals.__name__, "call_sharding_rule", _replicated_without_a_rule)
    for name in ("_all_mesh_names_except_spmd", "_all_newly_manual_mesh_names"):
        _hook(shard_map_internals.__name__, name, _without_the_axis)
    if "flax.core.meta" in sys.modules:
        _hook("flax.core.meta", "global_mesh_defined", _is_mesh_set)


@functools.cache
def _hook(module: str, name: str, wrapper: Callable):
    """Lets `wrapper(original, step, *args)` stand for a function, wherever it was imported, while a step is traced."""
    original = getattr(sys.modules[module], name)

    @functools.wraps(original)
    def hooked(*args, **kwargs):
        step = _tracing.value
        return original(*args, **kwargs) if step is None else wrapper(original, step, *args, **kwargs)

    package = module.partition(".")[0] + "."
    for other in [m for key, m in list(sys.modules.items()) if key.startswith(package)]:
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, hooked)


def _whole_for_group(step: _Tracing, mesh):
    is_group = not mesh.empty and mesh.abstract_mesh in step.groups and current_mesh() == step.whole
    return step.whole if is_group else mesh


def _shard_map_of_a_group(original, step: _Tracing, mesh, *args):
    return original(mesh if mesh is None else _whole_for_group(step, mesh), *args)


def _sharding_of_a_group(original, step: _Tracing, sharding, *args, **kwargs):
    if isinstance(sharding, NamedSharding) and (mesh := _whole_for_group(step, sharding.mesh)) is not sharding.mesh:
        sharding = NamedSharding(mesh, sharding.spec)
    return original(sharding, *args, **kwargs)


def _type_of_a_groups_array(original, step: _Tracing, aval, sharding, *args, **kwargs):
    """Of an array that the step closes over, for instance a parameter."""
    if isinstance(sharding, NamedSharding) and (mesh := _whole_for_group(step, sharding.mesh)) is not sharding.mesh:
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return original(aval, sharding, *args, **kwargs)


def _replicated_without_a_rule(original, step: _Tracing, primitive, rule, other_rule, num_out, *avals, **params):
    """Some operations have no rule for Explicit axes: what they make of replicated operands is replicated."""
    try:
        return original(primitive, rule, other_rule, num_out, *avals, **params)
    except (NotImplementedError, core.ShardingTypeError):
        specs = [aval.sharding.spec for aval in avals]
        if any(spec.unreduced or spec.reduced or set(spec.partitions) - {None} for spec in specs):
            raise
        replicated = NamedSharding(current_mesh(), jax.sharding.PartitionSpec())
        return replicated if num_out is None else [replicated] * num_out


def _without_the_axis(original, step: _Tracing, *args):
    return tuple(n for n in original(*args) if n != step.axis)


def _is_mesh_set(original, step: _Tracing):
    return original() and (step.is_mesh_set or current_mesh() != step.whole)


def current_mesh() -> AbstractMesh:
    """The abstract mesh of the context."""
    return mesh_internals.get_abstract_mesh()


def sharding_here() -> NamedSharding | None:
    """What the type of a computed scalar says on the current mesh, if that has Explicit axes."""
    mesh = current_mesh()
    return NamedSharding(mesh, jax.sharding.PartitionSpec()) if mesh.explicit_axes else None


def rebase(jaxpr: ClosedJaxpr, group_mesh: AbstractMesh, whole: AbstractMesh) -> ClosedJaxpr:
    """`jaxpr`, traced on the `whole` mesh, as it reads on a group's mesh.

    Every mesh in types, parameters and contexts is replaced, inside inner jaxprs too; a mesh with other
    axis names is the user's own and is left alone. Pure: nothing is traced again.
    """
    return _Rebase(group_mesh, whole).closed(jaxpr)


class _Rebase:
    def __init__(self, group_mesh: AbstractMesh, whole: AbstractMesh):
        self.group = group_mesh
        self.names = whole.axis_names
        self.whole_types = dict(zip(whole.axis_names, whole.axis_types, strict=True))
        self.types = dict(zip(group_mesh.axis_names, group_mesh.axis_types, strict=True))
        self.vars: dict[Var, Var] = {}
        self.meshes: dict[Any, Any] = {}
        self.avals: dict[Any, Any] = {}
        self.contexts: dict[Any, Any] = {}

    def mesh(self, mesh):
        if mesh.axis_names != self.names:
            return mesh
        if mesh not in self.meshes:
            changed = {n: t for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t != self.whole_types[n]}
            types = tuple(changed.get(n, t) for n, t in self.types.items())  # Manual in shard_map, Auto in auto_axes
            self.meshes[mesh] = self.group.update(axis_types=types)
        return self.meshes[mesh]

    def aval(self, aval):
        if isinstance(aval, AbstractRef):  # in the body of a kernel
            return aval.update(inner_aval=self.aval(aval.inner_aval))
        sharding = getattr(aval, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != self.names:
            return aval
        if aval not in self.avals:
            self.avals[aval] = aval.update(sharding=self.value(sharding))
        return self.avals[aval]

    def context(self, ctx):
        mesh = ctx.cur_abstract_mesh
        if mesh.axis_names != self.names:
            return ctx
        if ctx not in self.contexts:
            meta = None if ctx.xla_metadata is None else tuple(sorted(ctx.xla_metadata.items()))
            self.contexts[ctx] = core.JaxprEqnContext._create(
                ctx.compute_type, ctx.threefry_partitionable, self.mesh(mesh), ctx.remove_size_one_mesh_axis, meta
            )
        return self.contexts[ctx]

    def value(self, x):
        if isinstance(x, NamedSharding):
            return NamedSharding(self.mesh(x.mesh), x.spec, memory_kind=x.memory_kind)
        if isinstance(x, (Mesh, AbstractMesh)):
            return self.mesh(x)
        if isinstance(x, ClosedJaxpr):
            return self.closed(x)
        if isinstance(x, Jaxpr):
            return self.jaxpr(x)
        if isinstance(x, core.ShapedArray):
            return self.aval(x)
        if type(x) in (tuple, list):
            return type(x)(self.value(y) for y in x)
        return x

    def closed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(self.jaxpr(closed.jaxpr), closed.consts)

    def var(self, v):
        if isinstance(v, Literal):
            # A constant with a type of its own carries the mesh that it was made under.
            return Literal(np.asarray(v.val, v.aval.dtype) if hasattr(v.val, "aval") else v.val, self.aval(v.aval))
        if v not in self.vars:
            aval = self.aval(v.aval)
            self.vars[v] = v if aval is v.aval else DropVar(aval) if isinstance(v, DropVar) else Var(aval)
        return self.vars[v]

    def eqn(self, eqn: JaxprEqn) -> JaxprEqn:
        params = {k: None if k == "concrete_mesh" else self.value(v) for k, v in eqn.params.items()}
        return eqn.replace(
            invars=[self.var(v) for v in eqn.invars],
            outvars=[self.var(v) for v in eqn.outvars],
            params=params,
            ctx=self.context(eqn.ctx),
        )

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(
            constvars=[self.var(v) for v in jaxpr.constvars],
            invars=[self.var(v) for v in jaxpr.invars],
            outvars=[self.var(v) for v in jaxpr.outvars],
            eqns=[self.eqn(e) for e in jaxpr.eqns],
        )


# --- compiled programs ----------------------------------------------------------------------------


def compile_one_of_many(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles; with a compilation cache folder, the program is kept there however quickly it was compiled.

    By default JAX keeps what took a second or more. A step as one program does, each of its many programs may not.
    """
    least = config.persistent_cache_min_compile_time_secs
    with least(0.0) if least.value == 1.0 else contextlib.nullcontext():
        return lowered.compile()


def load_on(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, mesh: Mesh) -> jax.stages.Compiled | None:
    """The same compiled program on the devices of another mesh of the same shape, in a few milliseconds.

    None where this JAX or this backend cannot (the caller compiles again, which is slower and gives the same).
    """
    try:
        executable: Any = compiled._executable
        unloaded = executable._unloaded_executable
        client = unloaded.backend
        if unloaded.keepalive or unloaded.host_callbacks or unloaded.ordered_effects or unloaded.unordered_effects:
            return None
        devices = tuple(mesh.devices.flat)
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array([devices]),
            backend=client,
        )
        device_list = xla_client.DeviceList(devices)
        loaded = client.deserialize_executable(_serialized(lowered, unloaded), device_list, options)
        copy = dataclasses.replace(
            unloaded,
            xla_executable=loaded,
            device_list=device_list,
            input_shardings=[_moved(s, mesh) for s in unloaded.input_shardings],
            output_shardings=[_moved(s, mesh) for s in unloaded.output_shardings],
        )
        return jax.stages.Compiled(
            copy.load(), compiled._params.const_args, compiled.args_info, compiled.out_tree, compiled._no_kwargs
        )
    except (AttributeError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def _serialized(lowered, unloaded) -> bytes:
    """A compiled program as bytes: those in JAX's cache folder, if there is one, or made now.

    A CPU program that came out of the folder has lost its code when it is serialized again.
    """
    client = unloaded.backend
    cache = compilation_cache._get_cache(client) if client.platform == "cpu" else None
    entry = None if cache is None else cache.get(_cache_key(lowered._lowering))
    if entry is None:
        return client.serialize_executable(unloaded.xla_executable)
    return compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(entry))[0]


def _cache_key(lowering) -> str:
    """The name under which JAX keeps a program in the folder."""
    of, devices = lowering.compile_args, np.array(list(lowering._device_list))
    inferred = pxla.get_prop_to_input_output(of["in_shardings"], of["out_shardings"], len(of["ordered_effects"]))
    options = pxla.create_compile_options(
        lowering._hlo, of["tuple_args"], *inferred, of["backend"], devices, dict(lowering._compiler_options_kvs)
    )
    return compilation_cache.get_cache_key(lowering._hlo, devices, options, of["backend"])


def _moved(sharding, mesh: Mesh):
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jax.sharding.SingleDeviceSharding(mesh.devices.flat[0], memory_kind=sharding.memory_kind)
    raise TypeError(f"cannot move {sharding}")


# --- keys for equal programs ----------------------------------------------------------------------


def jaxpr_key(closed: ClosedJaxpr):
    """A hashable key: equal for jaxprs that compile to the same program (names and source lines apart)."""
    return _Key().jaxpr(closed.jaxpr), tuple(map(id, closed.consts))


def equation_key(eqn: JaxprEqn):
    """A hashable key: equal for equations that do the same with operands of the same types."""
    return _Key().equation(eqn, lambda v: _Key().atom(v) if isinstance(v, Literal) else _Key().aval(v.aval))


class _Key:
    def __init__(self):
        self.numbers: dict[Var, int] = {}

    def atom(self, v):
        if isinstance(v, Literal):
            return "lit", np.asarray(v.val).tobytes(), self.aval(v.aval)
        if isinstance(v, DropVar):
            return "_"
        return self.numbers.setdefault(v, len(self.numbers))

    def aval(self, aval):
        if isinstance(aval, core.ShapedArray):
            return aval  # there is one object for all equal ones
        sharding = getattr(aval, "sharding", None)
        return (
            getattr(aval, "shape", None),
            str(getattr(aval, "dtype", aval)),
            getattr(aval, "weak_type", False),
            None if sharding is None else self.value(sharding),
            str(aval) if getattr(aval, "vma", None) or getattr(aval, "memory_space", None) is not None else None,
        )

    def value(self, x):
        if isinstance(x, ClosedJaxpr):
            return _Key().jaxpr(x.jaxpr), tuple(map(id, x.consts))
        if isinstance(x, Jaxpr):
            return _Key().jaxpr(x)
        if isinstance(x, NamedSharding):
            return self.value(x.mesh), str(x.spec), x.memory_kind
        if isinstance(x, (Mesh, AbstractMesh)):
            return tuple(x.shape.items()), tuple(map(str, x.axis_types))
        if isinstance(x, (tuple, list)):
            return tuple(self.value(y) for y in x)
        if isinstance(x, np.ndarray):
            return x.shape, str(x.dtype), x.tobytes()
        if isinstance(x, core.ShapedArray):
            return self.aval(x)
        try:
            hash(x)
        except TypeError:
            return id(x)
        return x

    def jaxpr(self, jaxpr: Jaxpr):
        head = tuple((self.atom(v), self.aval(v.aval)) for v in (*jaxpr.constvars, *jaxpr.invars))
        eqns = tuple(self.equation(eqn, self.atom) for eqn in jaxpr.eqns)
        return head, eqns, tuple(self.atom(v) for v in jaxpr.outvars)

    def equation(self, eqn: JaxprEqn, operand: Callable):
        return (
            eqn.primitive.name,
            tuple(operand(v) for v in eqn.invars),
            tuple((operand(v), self.aval(v.aval)) for v in eqn.outvars),
            tuple((k, self.value(v)) for k, v in sorted(eqn.params.items()) if k not in ("name", "debug_info")),
            eqn.ctx.compute_type,
        )


def use_mesh(mesh: Mesh):
    """A context in which `mesh` is the current mesh, whatever the caller had set."""
    return jax.set_mesh(mesh)


@contextlib.contextmanager
def use_abstract_mesh(mesh: AbstractMesh):
    """A context in which `mesh` is the current abstract mesh, whatever the caller had set."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.sharding.use_abstract_mesh(mesh):
        yield


def named_sharding(sharding, mesh: Mesh) -> NamedSharding:
    """A `GSPMDSharding` that XLA reports, as a spec on `mesh`."""
    from jax._src.sharding_impls import parse_flatten_op_sharding

    parsed = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(mesh.size), mesh)
    return NamedSharding(mesh, parsed[0])


# --- arrays ---------------------------------------------------------------------------------------


def typed_as(x, sharding: NamedSharding):
    """The type of an array of this shape, dtype and sharding."""
    return core.update_aval_with_sharding(core.ShapedArray(x.shape, x.dtype, x.weak_type), sharding)


def register_array_type(
    cls: type, read: Callable[[Any], Any], sharding: Callable[[Any], NamedSharding], mismatch: Callable[..., str]
) -> None:
    """Lets JAX's functions take objects of `cls` for the `jax.Array` that `read(x)` gives, of sharding `sharding(x)`.

    `jax.jit` sees each as a tree of one leaf, an array of that sharding. Where it finds that its arguments lie on
    different devices, `mismatch(x, devices, other_devices)` is its error. Without all this such objects still work
    wherever JAX reads `__jax_array__` (`jnp.asarray`, operators).
    """

    class Argument:
        """What `jax.jit` sees of an object."""

        __slots__ = ("of", "sharding")

        def __init__(self, of):
            self.of, self.sharding = of, sharding(of)

    def aval(argument):
        error = sys.exc_info()[1]  # JAX asks for the types once more to tell of a mismatch
        if isinstance(error, stages.DeviceAssignmentMismatchError):
            first, second = error.args[0]
            raise ValueError(mismatch(argument.of, first.da, second.da)) from None
        return typed_as(argument.of, argument.sharding)

    core.pytype_aval_mappings[cls] = lambda x: typed_as(x, sharding(x))
    dtypes.register_canonicalize_value_handler(cls, read)
    core.pytype_aval_mappings[Argument] = aval
    dtypes.register_canonicalize_value_handler(Argument, lambda argument: read(argument.of))
    tree_util.tracing_registry.register_node(cls, lambda x: ((Argument(x),), None), lambda _, leaves: leaves[0])
    tree_util.dispatch_registry.register_node(cls, lambda x: ((read(x),), None), lambda _, leaves: leaves[0])


def devices(sharding: NamedSharding) -> np.ndarray:
    """The devices of a sharding on a concrete mesh."""
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh.devices


def zero_keys(aval) -> jax.Array:
    """PRNG keys of a type, of zeros."""
    impl = aval.dtype._impl
    return jax.random.wrap_key_data(jax.numpy.zeros((*aval.shape, *impl.key_shape), np.uint32), impl=impl.name)


def key_impl(dtype) -> str:
    """The name of a PRNG key type's implementation."""
    return dtype._impl.name


def key_shape(dtype) -> tuple[int, ...]:
    """The axes that the data of one key has."""
    return dtype._impl.key_shape


def put(source: NamedSharding, target: NamedSharding) -> Callable[[jax.Array], jax.Array] | None:
    """A function that copies arrays from one mesh to another of the same shape and spec; None where it cannot.

    It does what `jax.device_put(x, target)` does there, for a fifth of its cost.
    """
    here, there = devices(source), devices(target)
    same = here.shape == there.shape and source.spec == target.spec
    copy = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)
    if not same or copy is None or source.memory_kind != target.memory_kind:
        return None
    lists, shardings = [xla_client.DeviceList(tuple(there.flat))], [target]
    semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT]
    return lambda x: copy([x], lists, shardings, semantics)[0]


# --- many processes -------------------------------------------------------------------------------


def distributed_client() -> Any | None:
    """The key-value store of `jax.distributed`, or None where it has not been initialised."""
    return distributed.global_state.client


def abandon_distributed() -> None:
    """Lets this process end without waiting for the others at JAX's last barrier."""
    client, distributed.global_state.client = distributed.global_state.client, None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # its destructor would wait, too


def coordinator_address() -> str | None:
    """`host:port` of JAX's coordination service."""
    return distributed.global_state.coordinator_address


def start_coordination_service(
    address: str, num_processes: int, *, heartbeat_timeout_s: int, shutdown_timeout_s: int
) -> Any:
    """The service of `jax.distributed`, listening on `address`, without a client and without any backend.

    `jax.distributed.initialize` starts one in process 0 only. It serves as long as the returned object lives.
    """
    from jax._src.lib import _jax

    return _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=heartbeat_timeout_s, shutdown_timeout=shutdown_timeout_s
    )


def backends_are_initialized() -> bool:
    """Whether some computation or query has made JAX choose its devices."""
    return xla_bridge.backends_are_initialized()


def observe_callbacks(observer: Callable[[Callable], contextlib.AbstractContextManager]) -> None:
    """From now on, programs that are compiled call each function of the user within `observer(function)`."""
    emit = callback.emit_python_callback

    @functools.wraps(emit)
    def emit_observed(ctx, function, *args, **options):
        user = _users_function(function)

        @functools.wraps(function)
        def observed(*values):
            with observer(user):
                return function(*values)

        return emit(ctx, observed, *args, **options)

    callback.emit_python_callback = emit_observed


def _users_function(function: Callable) -> Callable:
    """The function that JAX's own ones are wrapped around."""
    while True:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if hasattr(function, "callback_func"):
            function = function.callback_func
        elif "callback" in names and function.__module__.startswith("jax."):
            function = (function.__closure__ or ())[names.index("callback")].cell_contents
        else:
            return function


def num_cpu_devices() -> int:
    """How many CPU devices JAX is asked to make in this process."""
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(1, xla_bridge.num_cpu_devices.value, *map(int, forced[-1:]))


def has_cross_host_put() -> bool:
    """Whether `jax.device_put` takes arrays to devices of other processes as soon as both ends call it.

    On GPUs it does, through NCCL. (Elsewhere JAX numbers the calls in each process, so all processes must make them.)
    """
    is_of_one_kind = len({(d.platform, d.device_kind) for d in jax.devices()}) == 1
    device, forced_otherwise = jax.local_devices()[0], xla_bridge.FORCE_DCN_CROSS_HOST_TRANSFERS.value
    has_it = bool(getattr(device.client, "supports_cross_host_transfers", False))
    return is_of_one_kind and device.platform == "gpu" and has_it and not forced_otherwise


def pci_bus_id(device: Any) -> str | None:
    """Where a CUDA device of this process is in its host, by which NCCL tells GPUs apart; None if nobody says."""
    number, text = ctypes.c_int(), ctypes.create_string_buffer(32)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        ordinal = int(device.local_hardware_id)
    except (OSError, TypeError):
        return None
    if cuda.cuDeviceGet(ctypes.byref(number), ordinal) or cuda.cuDeviceGetPCIBusId(text, len(text), number):
        return None
    return text.value.decode()


def start_transfer_server(address: str, num_transports: int = 2) -> Any:
    """A server of `jax.experimental.transfer` on a local address; two transports are the fastest."""
    from jax.experimental import transfer

    client = jax.local_devices()[0].client
    return transfer.start_transfer_server(client, f"{address}:0", [f"{address}:0"] * num_transports)


# --- foreign programs -----------------------------------------------------------------------------


def exported_stablehlo(program: str | bytes) -> jax.export.Exported:
    """A StableHLO module (text, MLIR bytecode or a portable artifact) as an `Exported` without derivatives.

    Shardings of its arguments and results are kept: Shardy ones as `NamedSharding`s on the module's own mesh, and
    `mhlo.sharding` as they are.

    Raises:
      ValueError: it is not one StableHLO module with one entry function on arrays of fixed shapes.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        module = _parsed(program)
        functions: list[Any] = [op for op in module.body.operations if op.operation.name == "func.func"]
        main = [f for f in functions if f.sym_name.value == "main"] or [f for f in functions if not _is_private(f)]
        if len(main) != 1:
            raise ValueError(f"it has {len(main)} public functions and none that is called main; one entry is needed")
        name = main[0].sym_name.value
        symbols = ir.SymbolTable(module.operation)
        if name != "main":
            symbols.set_symbol_name(main[0], "main")
            for op in functions:
                symbols.replace_all_symbol_uses(name, "main", op)
        in_avals = tuple(_array_type(t, f"argument {i}") for i, t in enumerate(main[0].type.inputs))
        out_avals = tuple(_array_type(t, f"result {i}") for i, t in enumerate(main[0].type.results))
        meshes: list[Any] = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
        read = [_shardings(main[0], which, avals, symbols) for which, avals in (("arg", in_avals), ("res", out_avals))]
        (in_named, in_hlo), (out_named, out_hlo) = read
        count = module.operation.attributes.get("mhlo.num_partitions")
        devices = ir.IntegerAttr(count).value if count is not None else 1
        sizes = [int(np.prod([a.size for a in _axes(m.mesh)])) for m in meshes]
        return jax.export.Exported(
            fun_name=name, in_tree=jax.tree.structure(((0,) * len(in_avals), {})), in_avals=in_avals,
            out_tree=jax.tree.structure((0,) * len(out_avals)), out_avals=out_avals,
            _has_named_shardings=bool(meshes), _in_named_shardings=in_named, _out_named_shardings=out_named,
            in_shardings_hlo=in_hlo, out_shardings_hlo=out_hlo, nr_devices=max([devices, *sizes]),
            platforms=(jax.default_backend(),), ordered_effects=(), unordered_effects=(),
            disabled_safety_checks=(jax.export.DisabledSafetyCheck.platform(),),
            mlir_module_serialized=export_internals._module_to_bytecode(module),
            calling_convention_version=jax.export.maximum_supported_calling_convention_version,
            module_kept_var_idx=tuple(range(len(in_avals))), uses_global_constants=False, _get_vjp=None,
        )  # fmt: skip


def _parsed(program: str | bytes):
    try:
        if isinstance(program, bytes):
            try:
                return _jax.mlir.deserialize_portable_artifact(program)
            except Exception:  # no artifact with a version: plain bytecode, or text
                pass
        return ir.Module.parse(program)
    except Exception as e:  # the bindings' own error type
        raise ValueError(f"it cannot be parsed: {str(e).strip().splitlines()[-1]}") from None


def _is_private(function) -> bool:
    visibility = function.operation.attributes.get("sym_visibility")
    return visibility is not None and ir.StringAttr(visibility).value == "private"


def _array_type(t, what: str):
    if not isinstance(t, ir.RankedTensorType):
        raise ValueError(f"{what} is {t}, not an array")
    t = ir.RankedTensorType(t)
    if not t.has_static_shape:
        raise ValueError(f"{what} is {t}, whose shape is not fixed")
    dtypes_by_type = {str(mlir.dtype_to_ir_type(np.dtype(d))): np.dtype(d) for d in _DTYPES}
    if str(t.element_type) not in dtypes_by_type:
        raise ValueError(f"{what} has elements of type {t.element_type}, which JAX has not")
    return core.ShapedArray(tuple(t.shape), dtypes_by_type[str(t.element_type)])


_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", jax.numpy.bfloat16, jax.numpy.float8_e4m3fn, jax.numpy.float8_e5m2, jax.numpy.int4,
    jax.numpy.uint4,
)  # fmt: skip


def _shardings(main, which: str, avals, symbols):
    """The shardings that a function's arguments or results are annotated with: (Shardy ones, HLO ones)."""
    attributes = main.operation.attributes.get("arg_attrs" if which == "arg" else "res_attrs")
    named: list = [None] * len(avals)
    hlo: list = [None] * len(avals)
    for i, entry in enumerate(ir.ArrayAttr(attributes) if attributes is not None else ()):
        found = ir.DictAttr(entry)
        if "sdy.sharding" in found:
            named[i] = _named_sharding(sdy.TensorShardingAttr(found["sdy.sharding"]), symbols)
        elif "mhlo.sharding" in found:
            hlo[i] = xla_client.HloSharding.from_string(ir.StringAttr(found["mhlo.sharding"]).value)
    return tuple(named), tuple(hlo)


def _axes(mesh) -> list:
    return [sdy.MeshAxisAttr(a) for a in sdy.MeshAttr(mesh).axes]


def _named_sharding(attribute, symbols) -> NamedSharding:
    reference = attribute.mesh_or_ref
    if isinstance(reference, ir.FlatSymbolRefAttr):
        reference = symbols[reference.value].mesh
    axes = _axes(reference)
    mesh = AbstractMesh(tuple(a.size for a in axes), tuple(a.name for a in axes))
    entries = []
    for dimension in map(sdy.DimensionShardingAttr, attribute.dimension_shardings):
        refs = [sdy.AxisRefAttr(a) for a in dimension.axes]
        entries.append(tuple(a.name for a in refs) or None)
    return NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))


def exported_specs(exported: jax.export.Exported) -> tuple[jax.sharding.PartitionSpec | None, ...]:
    """The specs in which an exported program gives its results, where it says so."""
    return tuple(s if s is None else s.spec for s in exported._out_named_shardings)
