"""Meshes of accelerators that are not present: real programs are compiled for them, and none is called."""

import importlib.util
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import Device, MpmdMesh
from mpmd.arrays.targets import Target


@compat.api_boundary
def topology_mesh(
    target: str | Target,
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    mpmd_axis_name: str,
    *,
    devices_per_host: int = 8,
    axis_types: Sequence[AxisType] | None = None,
) -> MpmdMesh:
    """Returns a mesh of absent devices: `MpmdMesh(jax.make_mesh(...), mpmd_axis_name)` of described devices.

    `mpmd.jit(step, mpmd_mesh=it).lower(*abstract).compile()` compiles the real programs for them. The result answers
    all queries, but it cannot be called. No GPU and no driver is needed, and `jax.devices()` stays the same.

    Args:
      target: `"a100"`, `"h100"`, `"h200"`, `"b200"`, `"gb200"` (with JAX's CUDA plugin, extra `topology`), `"v5e"`,
        `"v5p"` (with libtpu), or a `Target` of your own.
      axis_shapes, axis_names: of the whole mesh, as in `jax.make_mesh`. Devices are numbered in this order: devices of
        one host are neighbours on the last axes.
      mpmd_axis_name: the axis to cut along.
      devices_per_host: the number of devices of a host (a process).
      axis_types: as in `jax.make_mesh`; all Explicit by default.

    Raises:
      ValueError: unknown target, or shapes that do not fill hosts.
      ModuleNotFoundError: the compiler for the target is not installed.

    Examples:
      >>> import mpmd
      >>> mesh = mpmd.topology_mesh("h100", (16, 64), ("stage", "data"), "stage")  # doctest: +SKIP
    """
    target = Target.named(target) if isinstance(target, str) else target
    shape = tuple(axis_shapes)
    count = math.prod(shape)
    if len(shape) != len(tuple(axis_names)) or count < 1:
        raise ValueError(f"topology_mesh: axis_shapes is {shape} for the axes {tuple(axis_names)}.")
    per_host = min(devices_per_host, count)
    if devices_per_host < 1 or count % per_host:
        raise ValueError(f"topology_mesh: {count} devices do not fill hosts of {devices_per_host} (devices_per_host).")
    devices = _gpus(target, count // per_host, per_host) if target.platform == "cuda" else _tpus(target, count)
    types = tuple(axis_types or [AxisType.Explicit] * len(shape))
    mesh = MpmdMesh(Mesh(np.array(devices).reshape(shape), tuple(axis_names), axis_types=types), mpmd_axis_name)
    mesh.target = target
    return mesh


def _gpus(target: Target, num_hosts: int, devices_per_host: int) -> list[Device]:
    try:
        return compat.described_gpus(target.cuda_config(), num_hosts, devices_per_host)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"topology_mesh: {target.name} needs XLA's compiler for GPUs (no GPU, no driver):"
            " pip install -e '.[topology]' in the clone of jax-mpmd, into an environment of its own."
        ) from None


def _tpus(target: Target, count: int) -> list[Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(f"topology_mesh: {target.name} needs XLA's compiler for TPUs: pip install libtpu.")
    rows = max(d for d in range(1, math.isqrt(count) + 1) if count % d == 0)
    slice_ = f"{target.name}:{rows}x{count // rows}" + ("x1" if target.name == "v5p" else "")
    try:
        return compat.described_tpus(slice_)
    except jax.errors.JaxRuntimeError as e:
        fault = str(e).partition("\n")[0]
        raise ValueError(f"topology_mesh: libtpu knows no {slice_}; take another number of devices. {fault}") from None
