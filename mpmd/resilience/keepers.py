"""The connections of a rank to keepers: to its host's keeper, which shares memory, and to other hosts' keepers."""

import contextlib
import math
import mmap
import os
import socket
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mpmd.resilience import keeper
from mpmd.resilience.keeper import Version

# A keeper has this long to answer, or to take the next bytes. A stopped keeper holds up the copies for this time.
_LIMIT_S = 20.0
_CHUNK = 4 << 20
_MOST_MAPS = 8
_FRESH_BYTES_PER_S = 2e8  # the lowest speed at which the kernel clears memory


class Address(NamedTuple):
    """The address of a keeper: `host` and `port` for everybody, `name` for its own host."""

    host: str
    port: int
    name: str


def own(environment: Mapping[str, str], host: str) -> Address | None:
    """Returns the keeper of this host; None if the launcher has started none."""
    port, name, *_ = [*environment.get("MPMD_KEEPER", "").split(":"), ""]
    return Address(host, int(port), name) if name else None


class Connection:
    """A connection to a keeper. Every failure is an OSError.

    Args:
      shares_memory: whether it is the keeper of this host.
      limit_s: the time limit for the connection to begin.
      patience_s: how long other ranks wait for this one: a keeper has less time to answer.
    """

    def __init__(
        self,
        address: Address,
        token: str,
        *,
        shares_memory: bool,
        limit_s: float | None = None,
        patience_s: float = math.inf,
    ):
        self.shares_memory = shares_memory
        self._address, self._token, self._patience_s = address, token, patience_s
        self._answer_s = min(_LIMIT_S, patience_s / 2)
        if shares_memory:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(limit_s or self._answer_s)
            self._socket.connect("\0" + address.name)
        else:
            self._socket = socket.create_connection((address.host, address.port), timeout=limit_s or self._answer_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keeper.prove(self._socket, token)
        self._socket.settimeout(self._answer_s)
        self._maps: dict[tuple[int, int], np.ndarray] = {}  # by the memory's own identity

    def records(self) -> list[dict[str, int]]:
        """Returns the keeper's list of records: owner, version and number of each."""
        return keeper.ask(self._socket, "list")["records"]

    def keep(self, attempt: int, version: Version | None) -> None:
        """Drops all records except the ones of one version and attempt; None drops all."""
        keeper.ask(self._socket, "keep", attempt=attempt, version=version)

    def begin(self, nbytes: int, below: Version) -> tuple[int, np.ndarray]:
        """Returns memory of the keeper to write into, with its number. Drops versions below `below`."""
        self._socket.settimeout(self._answer_s + nbytes / _FRESH_BYTES_PER_S)
        answer = keeper.ask(self._socket, "begin", nbytes=nbytes, below=below)
        self._socket.settimeout(self._answer_s)
        return answer["buffer"], self._mapped(nbytes)

    def commit(self, buffer: int, about: Mapping[str, int], header: str) -> None:
        """Commits the record in a buffer: it counts from now on."""
        keeper.ask(self._socket, "commit", buffer=buffer, about=about, header=with_sum(header))

    def put(self, data: np.ndarray, below: Version, about: Mapping[str, int], header: str) -> None:
        """Sends a record to the keeper of another host."""
        self._socket.settimeout(self._answer_s + data.nbytes / _FRESH_BYTES_PER_S)
        keeper.ask(self._socket, "put", nbytes=data.nbytes, below=below, about=about, header=with_sum(header))
        for start in range(0, data.nbytes, _CHUNK):
            self._socket.sendall(data.data[start : start + _CHUNK])
        keeper.answer(self._socket)
        self._socket.settimeout(self._answer_s)

    def header(self, number: int) -> str:
        """Returns the header of a record. Raises an OSError if the record is damaged or gone."""
        text = keeper.ask(self._socket, "header", number=number)["header"]
        if with_sum(text[8:]) != text:
            raise OSError("a damaged header")
        return text[8:]

    def read(self, number: int, offset: int, nbytes: int) -> np.ndarray:
        """Returns bytes of a record. From this host's keeper they are its own memory, not a copy."""
        if self.shares_memory:
            return self._mapped(keeper.ask(self._socket, "map", number=number)["nbytes"])[offset : offset + nbytes]
        keeper.ask(self._socket, "read", number=number, offset=offset, nbytes=nbytes)
        return keeper.exactly(self._socket, np.empty(nbytes, np.uint8))

    def end(self, pid: int, started: int, number: int) -> None:
        """Sends a signal to the process of the keeper's host with this pid and start (in the kernel's ticks)."""
        keeper.ask(self._socket, "end", pid=pid, started=started, number=int(number))

    def break_off(self) -> None:
        """Raises an OSError at once in another thread that waits for a keeper on another host, which may be cut off."""
        if not self.shares_memory:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def again(self, limit_s: float | None = None) -> "Connection":
        """Closes this connection; returns a new one to the keeper, or to its successor if it was killed."""
        self.close()
        return Connection(
            self._address, self._token, shares_memory=self.shares_memory, limit_s=limit_s, patience_s=self._patience_s
        )

    def close(self) -> None:
        self._socket.close()
        self._maps.clear()

    def _mapped(self, nbytes: int) -> np.ndarray:
        """Receives a descriptor and returns its memory, which is mapped once and reused."""
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise ConnectionResetError("the connection has ended")
        try:
            status = os.fstat(fds[0])
            key = status.st_dev, status.st_ino
            if key not in self._maps:
                if len(self._maps) >= _MOST_MAPS:  # the keeper may have given the memory of older ones back
                    del self._maps[next(iter(self._maps))]
                self._maps[key] = np.frombuffer(mmap.mmap(fds[0], max(1, nbytes)), np.uint8, nbytes)
            return self._maps[key]
        finally:
            os.close(fds[0])


def with_sum(header: str) -> str:
    """Returns the header with its checksum in front."""
    return f"{zlib.crc32(header.encode()):08x}{header}"
