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

KeyValueStore = Any  # that of `jax.distributed`, of which type checkers see nothing


def distributed_client() -> KeyValueStore | None:
    """The key-value store of `jax.distributed`, or None where it has not been initialised."""
    return distributed.global_state.client


def abandon_distributed() -> None:
    """Lets this process end without waiting for the others at JAX's last barrier."""
    client, distributed.global_state.client = distributed.global_state.client, None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # its destructor would wait, too


def forget_topology() -> None:
    """For the process that follows another process 0, which has said which devices there are: it says so anew."""
    client: Any = distributed.global_state.client
    for platform in ("cpu", "cuda", "rocm"):
        client.key_value_delete(f"{platform}:global_topology/{platform}")


def forget_collectives() -> None:
    """Collectives of this process's CPU devices meet anew, where another process had the devices before."""
    client: Any = distributed.global_state.client
    own = {str(device.id) for device in jax.local_devices()}
    for key, _ in client.key_value_dir_get_bytes("cpu:gloo/"):
        if not own.isdisjoint(key.split("/")[1].split(",")):
            client.key_value_delete(key)


def coordinator_address() -> str | None:
    """`host:port` of JAX's coordination service."""
    return distributed.global_state.coordinator_address


def start_coordination_service(
    address: str, num_processes: int, *, heartbeat_timeout_s: int, shutdown_timeout_s: int, recoverable: bool
) -> Any:
    """The service of `jax.distributed`, listening on `address`, without a client and without any backend.

    `jax.distributed.initialize` starts one in process 0 only. It serves as long as the returned object lives.

    Args:
      recoverable: it goes on without a process that has died, and takes another one under the same number.
    """
    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=heartbeat_timeout_s,
        shutdown_timeout=shutdown_timeout_s,
        recoverable=recoverable,
    )


def bind_cpu_collectives(address: str) -> None:
    """Lets gloo listen at `address`, where JAX would have it listen at whatever this host's name resolves to."""
    if (make := getattr(xla_bridge._jax, "make_gloo_tcp_collectives", None)) is not None:
        xla_bridge._jax.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


def backends_are_initialized() -> bool:
    """Whether some computation or query has made JAX choose its devices."""
    return xla_bridge.backends_are_initialized()


def observe_callbacks(observer: Callable[[Callable], contextlib.AbstractContextManager]) -> None:
    """From now on, programs that are compiled call each function of the user within `observer(function)`.

    In a release of JAX that makes callbacks in another way they are not observed: a job then does not know that a rank
    is in one.
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
    """From now on JAX's own gathers among processes ask these first, and make a collective where they return None.

    Args:
      allgather: of an array of `process_allgather`, also where that was imported by its name; it gets `tiled` too.
      broadcast: of the leaves of `broadcast_one_to_all`; whether this process is a source of them.
    """
    inner = "_handle_array_process_allgather"  # which a release of JAX may not have; the imported name is missed then
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
    return max(1, jax.config.values["jax_num_cpu_devices"], *map(int, forced[-1:]))


def has_cross_host_put() -> bool:
    """Whether `jax.device_put` takes arrays to devices of other processes as soon as both ends call it.

    On GPUs it does, through NCCL. (Elsewhere JAX numbers the calls in each process, so all processes must make them.)
    """
    is_of_one_kind = len({(d.platform, d.device_kind) for d in jax.devices()}) == 1
    device, forced_otherwise = jax.local_devices()[0], jax.config.values.get("jax_force_dcn_cross_host_transfers")
    has_it = bool(getattr(device.client, "supports_cross_host_transfers", False))
    return is_of_one_kind and device.platform == "gpu" and has_it and not forced_otherwise


def pci_bus_id(device: Device) -> str | None:
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
