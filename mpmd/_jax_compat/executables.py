"""Compiled programs: kept in JAX's cache folder, loaded on other devices, and their shardings."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, compiler, config
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import Mesh, NamedSharding


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


def _serialized(lowered: Any, unloaded: Any) -> bytes:
    """A compiled program as bytes: those in JAX's cache folder, if there is one, or made now.

    A CPU program that came out of the folder has lost its code when it is serialized again.
    """
    client = unloaded.backend
    cache = compilation_cache._get_cache(client) if client.platform == "cpu" else None
    entry = None if cache is None else cache.get(_cache_key(lowered._lowering))
    if entry is None:
        return client.serialize_executable(unloaded.xla_executable)
    return compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(entry))[0]


def _cache_key(lowering: Any) -> str:
    """The name under which JAX keeps a program in the folder."""
    of, devices = lowering.compile_args, np.array(list(lowering._device_list))
    inferred = pxla.get_prop_to_input_output(of["in_shardings"], of["out_shardings"], len(of["ordered_effects"]))
    options = pxla.create_compile_options(
        lowering._hlo, of["tuple_args"], *inferred, of["backend"], devices, dict(lowering._compiler_options_kvs)
    )
    return compilation_cache.get_cache_key(lowering._hlo, devices, options, of["backend"])


def _moved(sharding: Any, mesh: Mesh) -> jax.sharding.Sharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jax.sharding.SingleDeviceSharding(mesh.devices.flat[0], memory_kind=sharding.memory_kind)
    raise TypeError(f"cannot move {sharding}")


def named_sharding(sharding: Any, mesh: Mesh) -> NamedSharding:
    """A `GSPMDSharding` that XLA reports, as a spec on `mesh`."""
    parsed = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(mesh.size), mesh)
    return NamedSharding(mesh, parsed[0])
