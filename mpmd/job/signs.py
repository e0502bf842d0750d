"""Signs of life that need no lock of Python: a kernel's answers for a process, and stacks that a signal handler writes.

C code may hold Python's lock for minutes (a tokenizer, a copy, a debugger); then no thread of the process can publish
anything. Its kernel still takes connections for it, and refuses them as soon as the process is gone.
"""

import contextlib
import faulthandler
import os
import pathlib
import signal
import socket
import time

from mpmd.job import processes

# Connections that the kernel takes for a process that accepts none; one for each machine that asks.
_BACKLOG = 4096
# A machine that does not answer for 8 s cannot be reached.
_KEPT_ALIVE = (
    (socket.TCP_KEEPIDLE, 2),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 8000),
)
# A connection that has ended is made again within this time, if the process lives.
_REOPENED_S = 2.0
_SYN_SENT = 2
# No library is known to use this signal; Python and JAX use SIGTERM, SIGINT and SIGUSR1.
_STACKS_SIGNAL = signal.SIGRTMIN + 11


class Door:
    """A port of this process at which its kernel answers. The process reads nothing from it."""

    def __init__(self, address: str | None):
        self._socket: socket.socket | None = None
        self.address = ""  # `host:port`; empty where no other machine has to ask
        if address is not None:
            self._socket = socket.create_server((address, 0), family=_family(address), backlog=_BACKLOG)
            self._socket.setblocking(False)
            self.address = f"{address}:{self._socket.getsockname()[1]}"

    def clear(self) -> None:
        """Closes the connections so far, so that there is room for others."""
        for _ in range(_BACKLOG if self._socket is not None else 0):
            try:
                self._socket.accept()[0].close()  # pyright: ignore[reportOptionalMemberAccess]
            except OSError:
                return


class Knock:
    """A question to another machine's kernel whether a process lives: a connection to its door that stays open.

    `lives` does not wait for an answer, so its first calls return False.
    """

    def __init__(self, address: str):
        self._address = address
        self._socket: socket.socket | None = None
        self._lived_at = -_REOPENED_S

    def lives(self) -> bool:
        """Returns whether the kernel holds a connection for the process, or did so a moment ago."""
        if self._is_connected():
            self._lived_at = time.monotonic()
        elif not self._is_connecting():  # the process accepted it, has ended, or its machine has gone
            self.close()
            self._connect()
        return time.monotonic() - self._lived_at < _REOPENED_S

    def close(self) -> None:
        """Ends the question."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        host, _, port = self._address.rpartition(":")
        self._socket = socket.socket(_family(host))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEPT_ALIVE:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        with contextlib.suppress(OSError):  # in progress, or refused: the next call finds out
            self._socket.connect((host, int(port)))

    def _is_connected(self) -> bool:
        try:
            return self._socket is not None and bool(self._socket.getpeername() and self._socket.recv(1))
        except BlockingIOError:
            return True  # neither a byte nor the end
        except OSError:
            return False

    def _is_connecting(self) -> bool:
        if self._socket is None:
            return False
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return info[0] == _SYN_SENT


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def offer_stacks() -> int:
    """Lets others on this machine read the stacks of this process, even while its lock is held. Returns the number of
    the file in memory that has them, for `stacks_of`.
    """
    number = os.memfd_create("mpmd-stacks")
    faulthandler.register(_STACKS_SIGNAL, number, all_threads=True)
    return number


def stacks_of(pid: int, started: int, number: int) -> str:
    """Returns the stacks of a process of this machine, as `faulthandler` writes them; empty if it does not answer."""
    path = pathlib.Path(f"/proc/{pid}/fd/{number}")
    with contextlib.suppress(OSError, ValueError):
        if processes.state(pid, started) == "running" and "mpmd-stacks" in os.readlink(path):
            earlier = path.stat().st_size  # stacks that were asked for before stay in the file
            os.kill(pid, _STACKS_SIGNAL)
            for _ in range(20):
                time.sleep(0.05)
                if text := path.read_bytes()[earlier:]:
                    return text.decode(errors="replace")
    return ""
