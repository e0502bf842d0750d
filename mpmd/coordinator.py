"""JAX's coordination service as a process of its own: `python -m mpmd.coordinator PORT NUM`.

`jax.distributed.initialize` makes process 0 serve, so that the death of process 0 ends all others at once, before
they can report which process died. The launcher starts this process instead (`MPMD_SERVICE=external`), so that a
death of process 0 is as orderly as any other. It prints `ready` when it listens. It ends on SIGTERM, or when its
stdin ends because the launcher is gone. It computes nothing and touches no device.
"""

import argparse
import os
import select
import signal
import socket
import sys

from mpmd import _jax_compat as compat

# The watchdog acts long before; JAX's own timeout ends processes without a message.
_HEARTBEAT_TIMEOUT_S = 24 * 3600
# The time for which a leaving process waits for the others.
_SHUTDOWN_TIMEOUT_S = 10


def main(arguments: list[str] | None = None) -> int:
    """Serves until stdin ends or SIGTERM arrives; the exit status is 69 if the port cannot be used."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    # A signal just before a read does not interrupt the read, but the signal's byte in this socket does.
    of_signals, written = socket.socketpair()
    written.setblocking(False)
    signal.set_wakeup_fd(written.fileno())
    try:
        _check_free(options.bind, options.port)
    except OSError as error:
        print(f"port {options.port} on {options.bind} cannot be used: {error.strerror or error}", file=sys.stderr)
        return 69
    service = compat.start_coordination_service(
        f"{options.bind}:{options.port}",
        options.num_processes,
        heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
        recoverable=options.recoverable,
    )
    print("ready", flush=True)
    while select.select([sys.stdin, of_signals], [], []) and os.read(sys.stdin.fileno(), 4096):
        pass
    del service
    # Exits even if clients are still connected.
    os._exit(0)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mpmd.coordinator", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int, metavar="PORT")
    parser.add_argument("num_processes", type=int, metavar="NUM", help="how many processes the job has")
    parser.add_argument("--bind", default="[::]", metavar="ADDRESS", help="where to listen (default: everywhere)")
    parser.add_argument(
        "--recoverable", action="store_true", help="processes may die, and others come under their numbers"
    )
    options = parser.parse_args(arguments)
    if not 0 < options.port < 65536:
        parser.error(f"PORT is {options.port}, expected 1 to 65535")
    if options.num_processes < 1:
        parser.error(f"NUM is {options.num_processes}, expected 1 or more")
    return options


def _check_free(bind: str, port: int) -> None:
    """Raises OSError if another process listens: gRPC would share the port with it, and mix up two jobs."""
    host = bind.strip("[]")
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # as gRPC does
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen()


if __name__ == "__main__":
    sys.exit(main())
