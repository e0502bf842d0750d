"""Compiled programs: found in JAX's cache folder or compiled, loaded on other devices, and their shardings."""

import contextlib
import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np
from jax._src import config, stages
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax._src.sharding_impls import UNSPECIFIED, parse_flatten_op_sharding
from jax.core import ShapedArray
from jax.extend.backend import get_compile_options
from jax.sharding import Mesh, NamedSharding

from mpmd._jax_compat.described import is_described
from mpmd._jax_compat.fingerprints import fingerprint
from mpmd._jax_compat.jaxprs import ClosedJaxpr, shaped_array
from mpmd._jax_compat.stored_programs import Folder, entry_key

# Errors that an unknown JAX or backend may raise where its internals are used.
_OTHER_JAX = (AttributeError, TypeError, ValueError, NotImplementedError, AssertionError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass(frozen=True, eq=False)
class XlaProgram:
    """A program in the form for XLA."""

    name: str  # in profiles and dumps
    closed: ClosedJaxpr
    mesh: Mesh
    in_shardings: tuple[NamedSharding | None, ...]  # on `mesh`; None if XLA chooses
    out_shardings: tuple[NamedSharding | None, ...]  # on `mesh`; None if XLA chooses
    donate: tuple[int, ...]
    options: dict[str, object] | None  # for XLA, None for its defaults

    @functools.cached_property
    def folder(self) -> Folder | None:
        """JAX's cache folder, if there is one."""
        return Folder.of(self.mesh.devices.flat[0].client)

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """Its name in the folder; None if it is not stored. Groups in several processes compile together."""
        if self.folder is None or len({d.process_index for d in self.mesh.devices.flat}) > 1:
            return None
        shardings = self.in_shardings, self.out_shardings
        return fingerprint(self.name, self.closed, self.mesh, *shardings, self.donate, self.options)

    def stored(self) -> bytes | None:
        """Returns the serialized executable of an earlier process, or None; described devices cannot load one."""
        if is_described(self.mesh.devices.flat[0]):
            return None
        return None if self.folder is None or self.fingerprint is None else self.folder.find(self.fingerprint)

    @property
    def quick_options(self) -> dict[str, object]:
        """Further options for XLA, for programs that only fill arrays: a third of the time, the same bits.

        On CPUs, each shape is a kernel of its own and goes through all passes, which have nothing to do here.
        """
        fills = all(e.primitive.name == "broadcast_in_dim" for e in self.closed.jaxpr.eqns)
        if not fills or self.mesh.devices.flat[0].platform != "cpu":
            return {}
        return {name: value for name, value in _QUICK_OPTIONS.items() if name not in (self.options or {})}


_QUICK_OPTIONS = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}


class LoadedProgram:
    """A compiled program and, on demand, its bytes, from which it can be loaded on other devices."""

    def __init__(self, compiled: jax.stages.Compiled, serialized: bytes | None = None):
        self.compiled = _for_small_types(compiled)
        self._serialized = serialized

    def release(self) -> None:
        """Drops the bytes if they can be made again."""
        with contextlib.suppress(*_OTHER_JAX):
            if _unloaded(self.compiled).backend.platform != "cpu":
                self._serialized = None

    def load_on(self, mesh: Mesh) -> jax.stages.Compiled | None:
        """Loads the same compiled program on the devices of another mesh of the same shape, in a few milliseconds.

        Returns None if this JAX or backend cannot (the caller then compiles again, more slowly, to the same effect).
        """
        compiled = self.compiled
        try:
            unloaded = _unloaded(compiled)
            if unloaded.keepalive or unloaded.host_callbacks or unloaded.ordered_effects or unloaded.unordered_effects:
                return None
            if self._serialized is None:
                self._serialized = unloaded.backend.serialize_executable(unloaded.xla_executable)
            loaded, devices = _loaded(self._serialized, mesh)
            copy = dataclasses.replace(
                unloaded,
                xla_executable=loaded,
                device_list=devices,
                input_shardings=[_moved(s, mesh) for s in unloaded.input_shardings],
                output_shardings=[_moved(s, mesh) for s in unloaded.output_shardings],
            )
            moved = jax.stages.Compiled(
                copy.load(), compiled._params.const_args, compiled.args_info, compiled.out_tree, compiled._no_kwargs
            )
            return _for_small_types(moved)
        except _OTHER_JAX:
            return None


def _for_small_types(compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """Lets a program take arrays of 4-bit types: JAX 0.10 refuses them, because their layouts do not name the bits."""
    executable: Any = compiled._executable
    with contextlib.suppress(*_OTHER_JAX):
        executable._xla_in_layouts = [
            None if getattr(layout, "sub_byte_element_size_in_bits", 0) else layout
            for layout in executable._xla_in_layouts
        ]
    return compiled


def compile_program(lowered: jax.stages.Lowered, program: XlaProgram) -> LoadedProgram:
    """Compiles a program; with a compilation cache folder, it is stored there however quickly it was compiled.

    By default JAX stores programs that took a second or more. A step as one program does; its many small ones may not.
    """
    least = config.persistent_cache_min_compile_time_secs
    with least(0.0) if least.value == 1.0 else contextlib.nullcontext():
        began = time.monotonic()
        compiled, options = _compiled(lowered, program.quick_options)
        seconds = time.monotonic() - began
        try:
            if program.folder is None:
                folder = Folder.read_by_jax(program.mesh.devices.flat[0].client)
                return LoadedProgram(compiled, folder and folder.executable(entry_key(lowered._lowering, options)))
            unloaded = _unloaded(compiled)
            if unloaded.keepalive or unloaded.host_callbacks:  # functions of this process, which others cannot call
                return LoadedProgram(compiled)
            known = program.fingerprint
            if known is not None and not _same(_described(program, unloaded.xla_executable), compiled):
                known = None
            # A CPU program from the folder loses its code when it is serialized again.
            return LoadedProgram(
                compiled, program.folder.keep(known, entry_key(lowered._lowering, options), compiled, seconds)
            )
        except _OTHER_JAX:
            return LoadedProgram(compiled)


def _compiled(lowered: jax.stages.Lowered, options: dict[str, Any]) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """Returns the program and the further options used to compile it: none if this XLA does not know them."""
    if options:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return lowered.compile(options), options
    return lowered.compile(), {}


def load_stored(serialized: bytes, program: XlaProgram) -> LoadedProgram | None:
    """Returns a program from the bytes of `XlaProgram.stored`, as if compiled here; None if this JAX cannot."""
    try:
        return LoadedProgram(_described(program, _loaded(serialized, program.mesh)[0]), serialized)
    except _OTHER_JAX:
        return None


def _loaded(serialized: bytes, mesh: Mesh) -> tuple[Any, Any]:
    """Returns XLA's executable on the devices of a mesh, and these devices."""
    devices = tuple(mesh.devices.flat)
    client = devices[0].client
    options = get_compile_options(
        num_replicas=1, num_partitions=len(devices), device_assignment=np.array([devices]), backend=client
    )
    device_list = xla_client.DeviceList(devices)
    return client.deserialize_executable(serialized, device_list, options), device_list


def _described(program: XlaProgram, executable: object) -> jax.stages.Compiled:
    """Returns JAX's object for an executable of XLA, made from the program alone: without lowering it."""
    devices = xla_client.DeviceList(tuple(program.mesh.devices.flat))
    ins, outs = (
        [UNSPECIFIED if s is None else s for s in shardings]
        for shardings in (program.in_shardings, program.out_shardings)
    )
    arguments = zip(program.closed.jaxpr.invars, program.in_shardings, strict=True)
    in_avals: list[ShapedArray] = [shaped_array(abstract(v.aval, s)) for v, s in arguments]
    out_avals: list[ShapedArray] = [v.aval for v in program.closed.jaxpr.outvars]
    found_ins = pxla._maybe_get_and_check_in_shardings(executable, ins, devices, in_avals, 0)
    found_outs = pxla._maybe_get_and_check_out_shardings(executable, outs, devices, out_avals, 0)
    none = [None] * len(in_avals), [None] * len(out_avals)
    in_layouts, out_layouts = pxla._get_layouts_from_executable(executable, *none, 0, in_avals, out_avals)
    dispatch_layouts = pxla.get_dispatch_layouts(in_layouts, found_ins, in_avals)
    found_outs = pxla.maybe_recover_user_shardings(found_ins, found_outs, in_avals, out_avals, None, program.mesh)
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=devices,
        backend=program.mesh.devices.flat[0].client,
        input_avals=in_avals,
        input_shardings=pxla.finalize_shardings(found_ins, devices),
        output_avals=out_avals,
        output_shardings=pxla.finalize_shardings(found_outs, devices),
        committed=True,
        name=f"jit({program.name})",
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(range(len(in_avals))),
        mut=None,
        xla_in_layouts=in_layouts,
        dispatch_in_layouts=dispatch_layouts,
        xla_out_layouts=out_layouts,
        all_args_info=None,
        pgle_profiler=None,
    )
    in_tree = jax.tree.structure((tuple(in_avals), {}))
    args_info = stages.make_args_info(in_tree, in_avals, program.donate)
    return jax.stages.Compiled(unloaded.load(), [], args_info, jax.tree.structure(out_avals), no_kwargs=False)


def _unloaded(compiled: jax.stages.Compiled) -> "pxla.UnloadedMeshExecutable":
    """Returns JAX's description of a compiled program."""
    executable: Any = compiled._executable
    return executable._unloaded_executable


def _same(described: jax.stages.Compiled, compiled: jax.stages.Compiled) -> bool:
    """Returns whether a description made from the program alone equals the one that JAX made during lowering."""
    if compiled._params.const_args or compiled._no_kwargs or described.out_tree != compiled.out_tree:
        return False
    if jax.tree.leaves(described.args_info) != jax.tree.leaves(compiled.args_info):
        return False
    ours, theirs = _unloaded(described), _unloaded(compiled)
    names = {f.name for f in dataclasses.fields(ours)} - {"all_args_info", "backend", "pgle_profiler", "xla_executable"}
    return theirs.pgle_profiler is None and all(_plain(getattr(ours, n)) == _plain(getattr(theirs, n)) for n in names)


def _plain(x: object) -> object:
    return tuple(x) if isinstance(x, (list, tuple)) else x


def abstract(aval: ShapedArray, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """Returns an argument of a program, for `jax.jit(...).lower`."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _moved(sharding: object, mesh: Mesh) -> jax.sharding.Sharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jax.sharding.SingleDeviceSharding(mesh.devices.flat[0], memory_kind=sharding.memory_kind)
    raise TypeError(f"cannot move {sharding}")


def named_sharding(sharding: jax.sharding.Sharding, mesh: Mesh) -> NamedSharding:
    """Returns a `GSPMDSharding` that XLA reports, as a spec on `mesh`."""
    parsed = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(mesh.size), mesh)
    return NamedSharding(mesh, parsed[0])
