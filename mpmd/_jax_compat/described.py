"""Devices that are only described: XLA compiles for them, but nothing runs on them."""

import contextlib
import importlib
import importlib.util
import os
import warnings
from typing import Any

import jax
from jax._src.lib import _jax
from jax.experimental import topologies

Device = Any  # jax.Device, which type checkers take for a variable
_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def is_described(device: Device) -> bool:
    """Returns whether a device is only described: programs can be compiled for it, but not called."""
    return isinstance(device.client, _jax.CompileOnlyPyClient)


def default_memory_kind(device: Device) -> str:
    """Returns the memory kind of arrays that ask for none. Described devices do not report theirs."""
    return "device" if is_described(device) else device.default_memory().kind


def described_options(device: Device) -> dict[str, object]:
    """Returns options with which XLA compiles for a device that is only described: it cannot try kernels there."""
    return {"xla_gpu_autotune_level": 0} if is_described(device) and device.platform == "gpu" else {}


def described_gpus(config: str, num_hosts: int, devices_per_host: int) -> list[Device]:
    """Returns descriptions of NVIDIA GPUs that need not be present.

    Args:
      config: XLA's `GpuTargetConfigProto`, as text.

    Raises:
      ModuleNotFoundError: JAX's CUDA plugin is not installed.
    """
    plugin = next((name for name in _CUDA_PLUGINS if _is_installed(name)), None)
    if plugin is None:
        raise ModuleNotFoundError("JAX's CUDA plugin is not installed.")
    jax.devices()  # before the plugin is asked, so that JAX does not look for a GPU
    # With a compilation cache folder, JAX finds its stored program, cannot load it, warns, and compiles.
    warnings.filterwarnings(
        "ignore", "Error reading persistent compilation cache entry.*must be constructed with a Client"
    )
    wanted = {"platform": "cuda", "target_config": config, "topology": f"1x{num_hosts}x{devices_per_host}"}
    try:
        return list(topologies.get_topology_desc(**wanted).devices)
    except NotImplementedError:  # without a driver, the plugin did not register itself
        with _environment(_SKIP_CHECK, "1"):
            importlib.import_module(plugin).initialize()
        return list(topologies.get_topology_desc(**wanted).devices)


def described_tpus(topology: str) -> list[Device]:
    """Returns descriptions of a TPU slice such as `v5e:2x4` that need not be present; needs libtpu."""
    return list(topologies.get_topology_desc(topology, platform="tpu").devices)


def _is_installed(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


@contextlib.contextmanager
def _environment(name: str, value: str):
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
