"""Spare processes: one waits, with JAX imported, until a process is lost. Then the spare becomes the lost rank.

The launcher starts more processes than there are ranks (`--spares`). It writes which spare becomes which rank into a
file that the processes of each host read. Only then does a spare join JAX's coordination service, as that rank, and
make its devices. So every process keeps its devices and meshes, and nobody waits for a spare that does not come. The
launcher starts another process where the lost one was: a new spare, or the lost rank itself where no spare waits.
"""

import contextlib
import os
import pathlib
import signal
import socket
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

NUM_SPARES = "MPMD_NUM_SPARES"  # set where the launcher replaces lost ranks; 0 if no spare waits
SPARE = "MPMD_SPARE"  # the number of a process that has become a rank
# Ends a process with slow or faulty devices. The launcher starts no other process with these devices.
UNFIT = signal.SIGRTMAX
_POLL_S = 0.05


class Taken(NamedTuple):
    """A rank that was lost, and the number of the spare that has become this rank."""

    rank: int
    spare: int


class Register:
    """The launcher's list of lost ranks."""

    def __init__(self, environment: Mapping[str, str]):
        self.replaces = NUM_SPARES in environment  # whether others take the places of lost ranks
        self._folder = pathlib.Path(environment.get("MPMD_STATUS_DIR", ""))

    def read(self) -> list[Taken]:
        """Returns all losses, the earliest first; a line that is being written does not count yet."""
        *lines, _ = self._text("taken").split("\n")
        return [Taken(*map(int, line.split())) for line in lines]

    @property
    def num_left(self) -> int:
        """How many spares wait."""
        return len(self._text("spares").split())

    def _text(self, name: str) -> str:
        if self.replaces:
            with contextlib.suppress(OSError):
                return (self._folder / name).read_text()
        return ""


def wait_for_place(number: int, environment: dict[str, str]) -> int:
    """Waits as a spare until it has to replace a lost rank. Returns the rank."""
    register = Register(environment)
    while not (mine := [taken.rank for taken in register.read() if taken.spare == number]):
        time.sleep(_POLL_S)
    environment[SPARE] = str(number)
    environment["MPMD_PROCESS_ID"] = os.environ["MPMD_PROCESS_ID"] = str(mine[0])
    return mine[0]


def sever(own: str, others: Collection[str]) -> None:
    """Ends all TCP connections of this process that others have made to its address `own`, or that it has to `others`.

    Reads of these connections fail at once, here and at the other end. (A transfer of JAX has no time limit, and JAX
    has no way to end it.)
    """
    ports = {int(address.rpartition(":")[2]) for address in others}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                    continue
                peer = connection.getpeername()[1]  # fails for a socket that listens, which is left alone
                if peer in ports or connection.getsockname()[1] == int(own.rpartition(":")[2]):
                    connection.shutdown(socket.SHUT_RDWR)
