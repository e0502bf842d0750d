"""Fingerprints by which other processes find programs: of equations, types, shardings, devices and settings.

Programs with the same fingerprint compile to the same executable. So a fingerprint covers all inputs of lowering and of
XLA. A program that contains something not fully described (a callable, a foreign kernel, a callback) has none.
"""

import enum
import functools
import hashlib
import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import compilation_cache, config, core
from jax._src.interpreters import mlir
from jax._src.literals import TypedNdArray
from jax._src.sharding_impls import UNSPECIFIED
from jax.core import ShapedArray, Tracer
from jax.experimental.layout import Layout
from jax.extend.backend import get_compile_options
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.random import threefry_prng_impl
from jax.sharding import AbstractMesh, ManualAxisType, Mesh, NamedSharding, PartitionSpec

from mpmd._jax_compat.jaxprs import CHECKPOINT, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, scan_sizes
from mpmd._jax_compat.parameters import opened

# The version of this module, and of the way a jaxpr is passed to `jax.jit`. A new version finds nothing stored before.
_FORMAT = 3

T = TypeVar("T")

_KEY_DTYPE, _KEY_IMPLEMENTATION = type(jax.random.key_dtype()), type(threefry_prng_impl)


def fingerprint(
    name: str,
    closed: ClosedJaxpr,
    mesh: Mesh,
    in_shardings: Sequence[NamedSharding | None],
    out_shardings: Sequence[NamedSharding | None],
    donate: Sequence[int],
    options: Mapping[str, object] | None,
) -> str | None:
    """Returns a hexadecimal number, the same for this program in every process; None if there is no such number.

    It depends on the kind of the devices of `mesh`, not on which of them these are. It covers the settings of the
    context, so it must be computed where the program would be lowered.
    """
    write = _Writer(mesh)
    try:
        with jax.set_mesh(mesh):
            settings = _settings(write)
        content = (
            _FORMAT, _versions(), settings, name, write.closed(closed), write.value(mesh),
            write.value((tuple(in_shardings), tuple(out_shardings))), tuple(donate), write.value(dict(options or {})),
        )  # fmt: skip
        found = hashlib.sha256(repr(content).encode())
        _add_devices(found, mesh, options)
    except (_NotDescribedError, AttributeError, TypeError, jax.errors.JaxRuntimeError):
        return None
    return found.hexdigest()


def _digest(written: object) -> str:
    return hashlib.sha256(repr(written).encode()).hexdigest()


class _NotDescribedError(Exception):
    """Something that a fingerprint cannot cover."""


@functools.cache
def _versions() -> tuple[str, ...]:
    try:
        own = importlib.metadata.version("jax-mpmd")
    except importlib.metadata.PackageNotFoundError:
        own = ""
    return jax.__version__, importlib.metadata.version("jaxlib"), own


# Settings that do not affect an executable and may differ between processes. All others are covered.
_NO_MATTER = (
    "jax_compilation_cache_", "jax_coordination_", "jax_cpu_get_", "jax_cross_host_", "jax_cuda_visible_devices",
    "jax_debug_log_modules", "jax_distributed_debug", "jax_enable_compilation_cache", "jax_enable_preemption_service",
    "jax_enable_recoverability", "jax_explain_cache_misses", "jax_log_", "jax_logging_level", "jax_num_cpu_devices",
    "jax_persistent_cache_min_", "jax_platforms", "jax_raise_persistent_cache_errors", "jax_rocm_visible_devices",
    "jax_share_binary_", "jax_traceback_", "jax_tracer_error_", "jax_transfer_guard",
)  # fmt: skip


def _settings(write: "_Writer") -> object:
    """Writes JAX's settings, unless some ask for files or a profile that only lowering or compiling produces."""
    values = jax.config.values
    # A program that is found is neither lowered nor compiled, so such files and profiles would be missing.
    if (
        values["jax_dump_ir_to"]
        or values["jax_enable_pgle"]
        or values["jax_compilation_cache_expect_pgle"]
        or values["jax_compilation_cache_include_metadata_in_key"]
    ):
        raise _NotDescribedError
    kept = {k: v for k, v in values.items() if not k.startswith(_NO_MATTER)}
    return write.value((kept, config.trace_context()))


def _add_devices(found: Any, mesh: Mesh, options: Mapping[str, Any] | None) -> None:
    """Adds XLA's version, flags and options, and the kind of devices: JAX's own key of an empty program."""
    client = mesh.devices.flat[0].client
    compile_options = get_compile_options(
        num_replicas=1, num_partitions=mesh.size, env_options_overrides=dict(options or {}), backend=client
    )
    with ir.Context():  # JAX's own loads all dialects, which takes milliseconds
        nothing = ir.Module.parse("module @nothing {}")
        key = compilation_cache.get_cache_key(nothing, mesh.devices, compile_options, client)
    found.update(key.encode())


# Parameters that the lowering of these primitives does not read.
_NOT_LOWERED = {
    CHECKPOINT: {"policy"},
    "scan": {"ft_in", "ft_out"},  # trees, of which only the sizes matter
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
}
_NOT_JAXS_OWN = {"ffi_call", "pure_callback", "io_callback", "debug_callback", "custom_partitioning", "pallas_call"}
_BY_SLOTS = (core.AxisEnv, core.JaxprEqnContext, ManualAxisType, ShapedArray, PartitionSpec)


class _Writer:
    """Writes programs as nested tuples of plain values, with a tag for each type.

    Devices of `mesh` are not named, since the program may be loaded on others.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._known: dict[int, tuple[object, str]] = {}  # by the id of an object, which the program keeps alive
        self._lowering = functools.cache(_lowering)

    def value(self, x: Any) -> object:
        """Writes any object of a program; raises _NotDescribedError if the parts are not known to describe it fully."""
        if x is None or type(x) in (bool, int, float, complex, str, bytes):
            return x
        kind = type(x)
        if kind in (tuple, list):
            return (kind.__name__, *map(self.value, x))
        if kind in _BY_SLOTS:
            return self._memoized(x, self._slots)
        if isinstance(x, ClosedJaxpr):
            return self._memoized(x, self.closed)
        if isinstance(x, Jaxpr):
            return self._memoized(x, lambda x: self.closed(ClosedJaxpr(x, ())))
        for writer in (self._array, self._type, self._place, self._collection):
            if (written := writer(x)) is not None:
                return written
        raise _NotDescribedError(f"{kind.__module__}.{kind.__qualname__}")

    def _memoized(self, x: T, write: Callable[[T], object]) -> str:
        """Writes an object that occurs often as one short text."""
        if id(x) not in self._known:
            self._known[id(x)] = x, _digest(write(x))
        return self._known[id(x)][1]

    def _slots(self, x: Any) -> object:
        names = [n for n in type(x).__slots__ if n != "__weakref__"]
        return (type(x).__name__, *((n, self.value(getattr(x, n))) for n in names if hasattr(x, n)))

    def _array(self, x: object) -> object:
        """Writes an array by its content."""
        if isinstance(x, jax.Array):
            # The content of a tracer or of another process's array is not here; a weak type is not part of the content.
            if isinstance(x, Tracer) or not x.is_fully_addressable or x.weak_type:
                raise _NotDescribedError
        elif not isinstance(x, (np.ndarray, np.generic, TypedNdArray)):
            return None
        array = np.asarray(x)
        if array.dtype.hasobject or array.dtype.names is not None:  # pointers are not content; JAX has no records
            raise _NotDescribedError
        return "array", self.value(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()

    def _type(self, x: object) -> object:
        """Writes a dtype, or an implementation of keys."""
        if isinstance(x, type) and issubclass(x, np.generic):
            return self.value(np.dtype(x))
        if isinstance(x, np.dtype):
            return "dtype", x.name, x.str
        impl = x._impl if isinstance(x, _KEY_DTYPE) else x if isinstance(x, _KEY_IMPLEMENTATION) else None
        if impl is None:
            return None
        if not all(f.__module__.startswith("jax.") for f in (impl.seed, impl.split, impl.random_bits, impl.fold_in)):
            raise _NotDescribedError
        return type(x).__name__, impl.name, impl.tag, impl.key_shape

    def _place(self, x: Any) -> object:
        """Writes meshes, shardings, devices."""
        if isinstance(x, NamedSharding):
            if x._logical_device_ids is not None:  # an order of devices other than that of the mesh
                raise _NotDescribedError
            return "NamedSharding", self.value(x.mesh), self.value(x.spec), x.memory_kind
        if isinstance(x, AbstractMesh):
            return "AbstractMesh", x.axis_names, x.axis_sizes, str(x.axis_types), str(x.abstract_device)
        if isinstance(x, Mesh):
            devices = None if x == self._mesh else tuple(map(self.value, x.devices.flat))
            return "Mesh", x.axis_names, x.devices.shape, str(x.axis_types), devices
        if isinstance(x, jax.sharding.SingleDeviceSharding):
            return "SingleDeviceSharding", tuple(map(self.value, x.device_set)), x.memory_kind
        if isinstance(x, jax.Device):
            return "Device", x.platform, x.device_kind, x.id
        return type(x).__name__ if isinstance(x, (type(UNSPECIFIED), type(Layout.AUTO))) else None

    def _collection(self, x: Any) -> object:
        """Writes sets, mappings, and JAX's own enumerations, named tuples and dataclasses."""
        kind = type(x)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind in (set, frozenset):
            return "set", *sorted(map(repr, map(self.value, x)))
        is_jaxs = kind.__module__.startswith(("jax.", "jaxlib."))
        if kind is dict or (is_jaxs and isinstance(x, Mapping)):
            return "dict", *sorted(repr((self.value(k), self.value(v))) for k, v in x.items())
        if not is_jaxs:
            return None
        if isinstance(x, enum.Enum):
            return name, x.name
        parts = opened(x)
        return None if parts is None else (name, *map(self.value, parts))

    # --- jaxprs -----------------------------------------------------------------------------------

    def closed(self, closed: ClosedJaxpr) -> str:
        """Writes a jaxpr and its constants as one short text."""
        consts = tuple(map(self.value, closed.consts))
        return _digest((consts, self._jaxpr(closed.jaxpr)))

    def _jaxpr(self, jaxpr: Jaxpr) -> object:
        numbers: dict[Var, int] = {}

        def atom(v: Var | Literal) -> object:
            if isinstance(v, Literal):
                return "literal", self.value(np.asarray(v.val)), self.value(v.aval)
            return "_" if isinstance(v, DropVar) else numbers.setdefault(v, len(numbers))

        def typed(variables: Iterable[Var]) -> object:
            return tuple((atom(v), self.value(v.aval)) for v in variables)

        head = typed((*jaxpr.constvars, *jaxpr.invars)), len(jaxpr.invars), self._effects(jaxpr.effects)
        eqns = tuple((tuple(map(atom, e.invars)), typed(e.outvars), self._equation(e)) for e in jaxpr.eqns)
        return head, eqns, tuple(map(atom, jaxpr.outvars))

    def _equation(self, eqn: JaxprEqn) -> object:
        name = eqn.primitive.name
        if name in _NOT_JAXS_OWN:  # they call the user's code, which may change under the same name
            raise _NotDescribedError
        params = {k: v for k, v in eqn.params.items() if k not in _NOT_LOWERED.get(name, ())}
        if name == "scan":  # instead of its trees, which have no text of their own
            params["sizes"] = scan_sizes(eqn)
        effects = self._effects(eqn.effects)
        return name, self._lowering(eqn.primitive), self.value(params), effects, self.value(eqn.ctx)

    def _effects(self, found: Iterable[Any]) -> object:
        if any(
            not isinstance(e, core.NamedAxisEffect) for e in found
        ):  # others (callbacks, refs) are tied to a process
            raise _NotDescribedError
        return tuple(sorted(repr(self.value(e.name)) for e in found))


def _lowering(primitive: Primitive) -> str:
    """Returns how one of JAX's own primitives is lowered: the names of its lowering functions, on each platform."""
    if primitive not in _primitives(len(sys.modules)):
        raise _NotDescribedError
    tables = {"": mlir._lowerings, **mlir._platform_specific_lowerings}
    rules = {platform: rules[primitive].rule for platform, rules in tables.items() if primitive in rules}
    return _digest(sorted((platform, _names(rule)) for platform, rule in rules.items()))


@functools.lru_cache(maxsize=1)
def _primitives(num_modules: int) -> frozenset[Primitive]:
    """Returns the primitives that JAX's modules define. Modules that are loaded later may define more, so the number of
    loaded modules is the key of the cache.
    """
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("jax._src.") and m is not None]
    return frozenset(x for m in modules for x in vars(m).values() if isinstance(x, Primitive))


@functools.cache
def _names(fun: object) -> tuple[object, ...]:
    """Returns the names of a function and of the functions that it was made from, all of which JAX defines."""
    inner: list[object] = []
    if isinstance(fun, functools.partial):
        inner = [fun.func, *filter(callable, (*fun.args, *fun.keywords.values()))]
    elif isinstance(fun, types.FunctionType):
        # Rules are often closures over others: functions of one name behave differently with other cells.
        cells = [c.cell_contents for c in fun.__closure__ or ()]
        inner = [c for c in cells if isinstance(c, (types.FunctionType, functools.partial))]
    module = getattr(fun, "__module__", "") or ""
    if not isinstance(fun, functools.partial) and not module.startswith("jax"):
        raise _NotDescribedError
    return module, getattr(fun, "__qualname__", ""), *map(_names, inner)
