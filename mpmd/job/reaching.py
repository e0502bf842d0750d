"""Checks the coordinator's address before JAX uses it: JAX's client ends the process from C++ where nobody answers."""

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

# As long as JAX's own client tries; the process that serves may start later than this one.
REACHED_S = 300.0
# After this time a process prints what it waits for.
_SAID_S = 5.0
# The exit status for a host or port that cannot be used, the same as the launcher's.
_STATUS = 69


def check_coordinator(address: str, *, serves: bool, limit_s: float = REACHED_S) -> None:
    """Returns when the coordinator answers. If this process is to serve, returns when its address can be used.

    Raises:
      ValueError: the address is not `host:port`.
      SystemExit: it cannot be reached or used; one line on stderr says why, and what to do.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"mpmd.initialize: coordinator_address={address!r}: expected host:port, such as 'node1:5000'.")
    host = host.strip("[]")
    if serves:
        _check_free(address, int(port))
        _retry(address, lambda: socket.getaddrinfo(host, int(port)), limit_s)
    else:
        _retry(address, lambda: socket.create_connection((host, int(port)), timeout=5).close(), limit_s)


def _check_free(address: str, port: int) -> None:
    """Exits if the port is in use: JAX's service would share it with the other service, and both jobs would fail."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as e:
            _leave(f"{address}: port {port} cannot be used here ({e.strerror}): take another port, or end what uses it")


def _retry(address: str, attempt: Callable[[], object], limit_s: float) -> None:
    begun, is_said = time.monotonic(), False
    while True:
        try:
            attempt()
            return
        except OSError as e:
            why = _reason(e)
        waited_s = time.monotonic() - begun
        if waited_s > limit_s:
            _leave(f"{address}: {why} (tried for {waited_s:.0f} s)")
        if waited_s > _SAID_S and not is_said:
            is_said = True
            print(f"jax-mpmd: waiting for the coordinator {address}: {why}", file=sys.stderr, flush=True)
        time.sleep(0.2)


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name of this host is not known here: check coordinator_address or MPMD_COORDINATOR, and the DNS"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there: does process 0 (or the launcher) run, and is the port the same in all processes?"
    if isinstance(error, TimeoutError):
        return "no answer: does a firewall between the hosts let this port through?"
    return f"it cannot be reached ({error.strerror or error})"


def _leave(what: str) -> NoReturn:
    with contextlib.suppress(OSError):
        print(f"jax-mpmd: coordinator {what}", file=sys.stderr, flush=True)
    raise SystemExit(_STATUS)
