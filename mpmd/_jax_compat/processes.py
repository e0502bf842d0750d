"""Asks JAX's runtime about the job, devices and callbacks, and starts its transfer server."""

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback, distributed, xla_bridge
from jax._src.lib import _jax
from jax.experimental import multihost_utils

from mpmd._jax_compat.described import Device

KeyValueStore = Any  # that of `jax.distributed`, which has no types


def distributed_client() -> KeyValueStore | None:
    """Returns the key-value store of `jax.distributed`, or None if it has not been initialised."""
    return distributed.global_state.client


def abandon_distributed() -> None:
    """Lets this process end without waiting for the others at JAX's last barrier."""
    client, distributed.global_state.client = distributed.global_state.client, None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # its destructor would wait as well


def forget_topology() -> None:
    """Deletes the topology that an earlier process 0 has published, so that its successor can publish it again."""
    client: Any = distributed.global_state.client
    for platform in ("cpu", "cuda", "rocm"):
        client.key_value_delete(f"{platform}:global_topology/{platform}")


def forget_collectives() -> None:
    """Lets collectives of this process's CPU devices connect anew, if another process had the devices before."""
    client: Any = distributed.global_state.client
    own = {str(device.id) for device in jax.local_devices()}
    for key, _ in client.key_value_dir_get_bytes("cpu:gloo/"):
        if not own.isdisjoint(key.split("/")[1].split(",")):
            client.key_value_delete(key)


def coordinator_address() -> str | None:
    """Returns `host:port` of JAX's coordination service."""
    return distributed.global_state.coordinator_address


def start_coordination_service(
    address: str, num_processes: int, *, heartbeat_timeout_s: int, shutdown_timeout_s: int, recoverable: bool
) -> Any:
    """Starts the service of `jax.distributed`, listening on `address`, without a client and without any backend.

    `jax.distributed.initialize` starts one in process 0 only. It runs as long as the returned object lives.

    Args:
      recoverable: it continues without a process that has died, and accepts another one under the same number.
    """
    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=heartbeat_timeout_s,
        shutdown_timeout=shutdown_timeout_s,
        recoverable=recoverable,
    )


def bind_cpu_collectives(address: str) -> None:
    """Lets gloo listen at `address`; by default it listens at the address of this host's name."""
    if (make := getattr(xla_bridge._jax, "make_gloo_tcp_collectives", None)) is not None:
        xla_bridge._jax.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


def backends_are_initialized() -> bool:
    """Returns whether a computation or query has made JAX choose its devices."""
    return xla_bridge.backends_are_initialized()


def observe_callbacks(observer: Callable[[Callable], contextlib.AbstractContextManager]) -> None:
    """Makes programs that are compiled from now on call each function of the user within `observer(function)`.

    In a release of JAX that makes callbacks in another way they are not observed: then a job does not know when a rank
    is in a callback.
    """
    emit = getattr(callback, "emit_python_callback", None)
    if emit is None:
        return

    @functools.wraps(emit)
    def emit_observed(ctx, function, *args, **options):
        user = _users_function(function)

        @functools.wraps(function)
        def observed(*values):
            with observer(user):
                return function(*values)

        return emit(ctx, observed, *args, **options)

    callback.emit_python_callback = emit_observed


def gather_by(
    allgather: Callable[[object, bool], np.ndarray | None],
    broadcast: Callable[[Sequence[object], bool], Sequence[np.ndarray] | None],
) -> None:
    """Makes JAX's own gathers among processes call these functions first; a collective runs if they return None.

    Args:
      allgather: takes an array of `process_allgather`, even if that was imported by its name, and `tiled`.
      broadcast: takes the leaves of `broadcast_one_to_all`, and whether this process is their source.
    """
    inner = "_handle_array_process_allgather"  # a release of JAX may lack it; then imported names are missed
    name = inner if hasattr(multihost_utils, inner) else "process_allgather"
    gather_all = getattr(multihost_utils, name)

    @functools.wraps(gather_all)
    def gathered(inp, tiled=False):
        leaves, structure = jax.tree.flatten(inp)
        found = [allgather(x, tiled) for x in leaves]
        if any(x is None for x in found):
            return gather_all(inp, tiled)
        return jax.tree.unflatten(structure, found)

    setattr(multihost_utils, name, gathered)
    plain = multihost_utils.broadcast_one_to_all

    @functools.wraps(plain)
    def broadcast_from_one(in_tree, is_source=None):
        leaves, structure = jax.tree.flatten(in_tree)
        found = broadcast(leaves, jax.process_index() == 0 if is_source is None else bool(is_source))
        return plain(in_tree, is_source) if found is None else jax.tree.unflatten(structure, found)

    multihost_utils.broadcast_one_to_all = broadcast_from_one


def _users_function(function: Any) -> Callable:
    """Returns the user's function inside JAX's wrappers."""
    while True:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if hasattr(function, "callback_func"):
            function = function.callback_func
        elif "callback" in names and function.__module__.startswith("jax."):
            function = (function.__closure__ or ())[names.index("callback")].cell_contents
        else:
            return function


def num_cpu_devices() -> int:
    """Returns the number of CPU devices that JAX is asked to make in this process."""
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(1, jax.config.values["jax_num_cpu_devices"], *map(int, forced[-1:]))


def has_cross_host_put() -> bool:
    """Returns whether `jax.device_put` moves arrays to devices of other processes as soon as both ends call it.

    On GPUs it does, through NCCL. (Elsewhere JAX numbers the calls in each process, so all processes must make them.)
    """
    is_of_one_kind = len({(d.platform, d.device_kind) for d in jax.devices()}) == 1
    device, forced_otherwise = jax.local_devices()[0], jax.config.values.get("jax_force_dcn_cross_host_transfers")
    has_it = bool(getattr(device.client, "supports_cross_host_transfers", False))
    return is_of_one_kind and device.platform == "gpu" and has_it and not forced_otherwise


def pci_bus_id(device: Device) -> str | None:
    """Returns the PCI address of a CUDA device, by which NCCL tells a host's GPUs apart; None if it is not known."""
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
    """Starts a server of `jax.experimental.transfer` on a local address; two transports are the fastest."""
    from jax.experimental import transfer

    client = jax.local_devices()[0].client
    own = f"[{address}]:0" if ":" in address else f"{address}:0"
    return transfer.start_transfer_server(client, own, [own] * num_transports)
