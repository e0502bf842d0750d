"""Fingerprints of programs that other processes find again: of equations, types, shardings, devices and settings.

Two programs with the same fingerprint compile to the same executable. So a fingerprint covers everything that lowering
and XLA read. A program with something that is not fully described (a callable, a foreign kernel, a callback) has none.
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
from jax.interpreters.mlir import make_ir_context
from jax.sharding import AbstractMesh, ManualAxisType, Mesh, NamedSharding, PartitionSpec

from mpmd._jax_compat.jaxprs import CHECKPOINT, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, scan_sizes
from mpmd._jax_compat.parameters import opened

# Of all that is below, and of how this package gives a jaxpr to `jax.jit`. With another, nothing stored is found.
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
    """A hexadecimal number that is the same for this program in every process; None if there is no such number.

    It does not depend on which devices of a kind `mesh` has. Read where the program would be lowered: it covers the
    settings of the context.
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


# Settings that change nothing about an executable and may differ between processes. All others are covered.
_NO_MATTER = (
    "jax_compilation_cache_", "jax_coordination_", "jax_cpu_get_", "jax_cross_host_", "jax_cuda_visible_devices",
    "jax_debug_log_modules", "jax_distributed_debug", "jax_enable_compilation_cache", "jax_enable_preemption_service",
    "jax_enable_recoverability", "jax_explain_cache_misses", "jax_log_", "jax_logging_level", "jax_num_cpu_devices",
    "jax_persistent_cache_min_", "jax_platforms", "jax_raise_persistent_cache_errors", "jax_rocm_visible_devices",
    "jax_share_binary_", "jax_traceback_", "jax_tracer_error_", "jax_transfer_guard",
)  # fmt: skip


def _settings(write: "_Writer") -> object:
    """JAX's settings. Some ask for what only lowering or compiling does (files to look at, a profile)."""
    values = jax.config.values
    # What is found is neither lowered nor compiled, so that their files and profiles would be missing.
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
    """XLA's version, flags and options, and the kind of devices: JAX's own key of an empty program."""
    client = mesh.devices.flat[0].client
    compile_options = get_compile_options(
        num_replicas=1, num_partitions=mesh.size, env_options_overrides=dict(options or {}), backend=client
    )
    with make_ir_context():
        nothing = ir.Module.parse("module @nothing {}")
        key = compilation_cache.get_cache_key(nothing, mesh.devices, compile_options, client)
    found.update(key.encode())


# What the lowering of these does not read.
_NOT_LOWERED = {
    CHECKPOINT: {"policy"},
    "scan": {"ft_in", "ft_out"},  # trees, of which only the sizes count
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
}
_NOT_JAXS_OWN = {"ffi_call", "pure_callback", "io_callback", "debug_callback", "custom_partitioning", "pallas_call"}
_BY_SLOTS = (core.AxisEnv, core.JaxprEqnContext, ManualAxisType, ShapedArray, PartitionSpec)


class _Writer:
    """Writes programs as nested tuples of plain values, in which every type has a tag of its own.

    Args:
      mesh: whose devices are not named: the program may be loaded on others.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._known: dict[int, tuple[object, str]] = {}  # by object, which the program keeps alive
        self._lowering = functools.cache(_lowering)

    def value(self, x: Any) -> object:
        """Anything that a program may hold.

        Raises:
          _NotDescribedError: if it is not known to be fully described by what is read of it.
        """
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
        """What occurs often, as one short text."""
        if id(x) not in self._known:
            self._known[id(x)] = x, _digest(write(x))
        return self._known[id(x)][1]

    def _slots(self, x: Any) -> object:
        names = [n for n in type(x).__slots__ if n != "__weakref__"]
        return (type(x).__name__, *((n, self.value(getattr(x, n))) for n in names if hasattr(x, n)))

    def _array(self, x: object) -> object:
        """An array by its content."""
        if isinstance(x, jax.Array):
            # The content of a tracer or of an array of other processes is not here; a weak type is more than content.
            if isinstance(x, Tracer) or not x.is_fully_addressable or x.weak_type:
                raise _NotDescribedError
        elif not isinstance(x, (np.ndarray, np.generic, TypedNdArray)):
            return None
        array = np.asarray(x)
        if array.dtype.hasobject or array.dtype.names is not None:  # pointers are no content; JAX has no records
            raise _NotDescribedError
        return "array", self.value(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()

    def _type(self, x: object) -> object:
        """A dtype, or what makes keys."""
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
        """Meshes, shardings, devices."""
        if isinstance(x, NamedSharding):
            if x._logical_device_ids is not None:  # an order of devices beside that of the mesh
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
        """Sets, mappings, and JAX's own enumerations, named tuples and dataclasses."""
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
        """A jaxpr and its constants, as one short text."""
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
        if name in _NOT_JAXS_OWN:  # what they call is the user's, and may change under the same name
            raise _NotDescribedError
        params = {k: v for k, v in eqn.params.items() if k not in _NOT_LOWERED.get(name, ())}
        if name == "scan":  # in the place of its trees, which have no text of their own
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
    """How one of JAX's own primitives is lowered: the names of the functions that do it, on each platform."""
    if primitive not in _primitives(len(sys.modules)):
        raise _NotDescribedError
    tables = {"": mlir._lowerings, **mlir._platform_specific_lowerings}
    rules = {platform: rules[primitive].rule for platform, rules in tables.items() if primitive in rules}
    return _digest(sorted((platform, _names(rule)) for platform, rule in rules.items()))


@functools.lru_cache(maxsize=1)
def _primitives(num_modules: int) -> frozenset[Primitive]:
    """The primitives that JAX's modules define, when so many modules are loaded: a module that is loaded later may
    define more, so the number of modules is the key of the cache.
    """
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("jax._src.") and m is not None]
    return frozenset(x for m in modules for x in vars(m).values() if isinstance(x, Primitive))


@functools.cache
def _names(fun: object) -> tuple[object, ...]:
    """The names of a function and of those that it was made of, all of which JAX defines."""
    inner: list[object] = []
    if isinstance(fun, functools.partial):
        inner = [fun.func, *filter(callable, (*fun.args, *fun.keywords.values()))]
    elif isinstance(fun, types.FunctionType):
        # Rules are often closures over others: a function of one name does different things with other cells.
        cells = [c.cell_contents for c in fun.__closure__ or ()]
        inner = [c for c in cells if isinstance(c, (types.FunctionType, functools.partial))]
    module = getattr(fun, "__module__", "") or ""
    if not isinstance(fun, functools.partial) and not module.startswith("jax"):
        raise _NotDescribedError
    return module, getattr(fun, "__qualname__", ""), *map(_names, inner)
