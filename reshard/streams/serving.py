"""Serves the shelves to receivers of other processes: by TCP, only with the token, each part with its checksum.

The protocol is the keepers' (`mpmd/resilience/keeper.py`): JSON messages, each followed by bytes. A connection's
held versions are released when it ends, however it ends.
"""

import contextlib
import secrets
import socket
import struct
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpmd.arrays.boxes import Box
from mpmd.errors import ReshardError
from mpmd.resilience import keeper
from reshard.places import bytes_of
from reshard.streams.shelf import CLOSED, Shelf, Shelved

# The time that the other side has to answer, or to take the next bytes.
_LIMIT_S = 60.0
_CHUNK = 4 << 20
_BLOCK, _ROW = 1 << 20, 16 << 10
_FORMAT = 4  # of the protocol; changes whenever it does
_PART = struct.Struct("!QI")
_FAULT = (1 << 64) - 1  # instead of a part's size: a text follows, with its length, which says why there is no part


class SentPart(NamedTuple):
    """The unit of a read, and where it goes."""

    sender: int  # the sender's number
    leaf: int  # the tensor
    box: Box  # the box of it
    dtype: np.dtype  # the dtype that it is cast to
    target: int  # the received tensor
    wanted: Box  # the box of it that is filled
    into: Box  # the place in that box
    origin: Any  # how the axes change, if they do

    def put(self, data: np.ndarray, view: np.ndarray) -> None:
        """Puts the values into their place."""
        view[...] = data if self.origin is None else self.origin.arranged(data)


class ShelfServer:
    """A server of shelves by their names."""

    def __init__(self, host: str, port: int, token: str):
        self.token = token  # receivers that do not know the token are refused
        self._shelves: dict[str, tuple[Shelf, Sequence[str], str]] = {}
        self.bytes_sent = 0  # of tensors, to other processes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        found = self._listener.getsockname()
        self.address = f"[{host}]:{found[1]}" if ":" in host else f"{host}:{found[1]}"
        serving = self._listener, self._serve
        threading.Thread(target=keeper.serve_forever, name="mpmd-stream", args=serving, daemon=True).start()

    def serve(self, name: str, shelf: Shelf, peers: Sequence[str] = ()) -> None:
        """Lets others read a shelf; `peers` are the servers that together have the versions, if there are several."""
        self._shelves[name] = shelf, peers, secrets.token_hex(8)

    def close(self) -> None:
        """Accepts no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), contextlib.ExitStack() as at_end:
            connection.settimeout(_LIMIT_S)
            if not keeper.challenge(connection, self.token):
                keeper.send(connection, {"error": "the token is another one than the publisher's"})
                return
            keeper.send(connection, {"format": _FORMAT, "names": sorted(self._shelves)})
            shelf, peers, run = self._shelves[keeper.receive(connection)["name"]]
            keeper.send(connection, {"peers": peers, "run": run})
            near = at_end.enter_context(contextlib.closing(NearShelf(shelf)))
            while True:
                connection.settimeout(None)  # a receiver may be idle
                message = keeper.receive(connection)
                connection.settimeout(_LIMIT_S)
                ask = message["ask"]
                if ask == "versions":
                    wait_s = min(float(message["wait_s"]), _LIMIT_S / 2)
                    is_closed = shelf.is_closed  # read first: the last version may come in between
                    try:
                        found = shelf.versions(message["after"], wait_s)
                        if is_closed and not found:  # even to those who do not wait: another shelf may have its name
                            raise ReshardError(CLOSED)
                        keeper.send(connection, {"versions": found})
                    except ReshardError as error:
                        keeper.send(connection, {"closed": str(error)})
                elif ask == "hold":
                    keeper.send(connection, {"description": near.hold(message["version"])})
                elif ask == "read" and near.held is not None:
                    about = _digest(near.held.description, near.held.version)
                    for part in message["parts"]:
                        self._send(connection, near.held, about, *part)
                else:
                    return

    def _send(
        self, connection: socket.socket, shelved: Shelved, about: int, leaf: int, start: list[int], stop: list[int],
        dtype: str,
    ) -> None:  # fmt: skip
        box = Box(tuple(start), tuple(stop))
        try:
            data = bytes_of(shelved.read(leaf, box, jnp.dtype(dtype)))
        except ReshardError as error:
            text = str(error).encode()
            connection.sendall(_PART.pack(_FAULT, len(text)) + text)
            raise OSError("a part cannot be sent") from error
        connection.sendall(_PART.pack(data.nbytes, _checksum(data, _digest(leaf, box, dtype, about))))
        for first in range(0, data.nbytes, _CHUNK):
            connection.sendall(data[first : first + _CHUNK].data)
        self.bytes_sent += data.nbytes


def _digest(*what: object) -> int:
    """Begins a part's checksum with its identity: it does not fit another tensor, box, dtype or version."""
    return zlib.crc32(repr(what).encode())


def _checksum(data: np.ndarray, begun: int) -> int:
    """Returns the checksum of bytes: the CRC-32 of the sums of each block's columns, of 64 bits each.

    It differs if one word does, and takes a third of the time of a CRC of all bytes, which was nearly half of the
    processor time of a stream.
    """
    total = begun
    for first in range(0, data.nbytes, _BLOCK):  # a block stays in the cache
        block = data[first : first + _BLOCK]
        rows = block.nbytes // _ROW
        columns = block[: rows * _ROW].view(np.uint64).reshape(rows, _ROW // 8)
        total = zlib.crc32(block[rows * _ROW :].data, zlib.crc32(columns.sum(axis=0).data, total))
    return total


class NearShelf:
    """A shelf of this process, as a receiver sees it."""

    run, bytes_received = "", 0

    def __init__(self, shelf: Shelf):
        self._shelf = shelf
        self.held: Shelved | None = None  # the version that it holds

    def versions(self, after: int, wait_s: float) -> list[int]:
        return self._shelf.versions(after, wait_s)

    def hold(self, version: int | None) -> str | None:
        shelved = self._shelf.hold(version)
        if self.held is not None:  # after that: it may be the same version
            self._shelf.release(self.held.version)
        self.held = shelved
        return None if shelved is None else shelved.description

    @property
    def boxes(self) -> dict[int, list[Box]]:
        """The boxes that lie here, for each tensor."""
        assert self.held is not None
        return {leaf: [box for box, _ in values] for leaf, values in self.held.values.items()}

    def read(self, parts: Sequence[tuple[SentPart, np.ndarray]]) -> None:
        assert self.held is not None
        for part, view in parts:
            part.put(self.held.read(part.leaf, part.box, part.dtype), view)

    def close(self) -> None:
        self.hold(None)


class FarShelf:
    """A shelf of another process. All its failures are OSErrors.

    Args:
        address: `host:port` of the process's `ShelfServer`.
        name: the shelf's name; None for the only one.
    """

    def __init__(self, address: str, name: str | None, token: str):
        host, _, port = address.rpartition(":")
        self.bytes_received = self._about = 0
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=_LIMIT_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keeper.prove(self._socket, token)
            hello = keeper.answer(self._socket)
            if hello.get("format") != _FORMAT:
                raise OSError("it is another version of jax-mpmd: publish and subscribe with the same one")
            if name not in hello["names"] and not (name is None and len(hello["names"]) == 1):
                names = " and ".join(hello["names"])
                ask = f"{names} is published there; ask for one of them, as {address}/NAME"
                raise OSError(ask if names else "nothing is published there yet")
            self.name = name or hello["names"][0]
            keeper.send(self._socket, {"name": self.name})
            told = keeper.answer(self._socket)
            self.peers: list[str] = told["peers"]  # empty if this one has the versions whole
            self.run: str = told["run"]  # changes when the process is restarted, or its shelf replaced
        except BaseException:
            self._socket.close()
            raise

    def versions(self, after: int, wait_s: float) -> list[int]:
        """Returns the versions after `after`; waits up to `wait_s` for one. Raises a ReshardError if none will come."""
        found = keeper.ask(self._socket, "versions", after=after, wait_s=wait_s)
        if "closed" in found:
            raise ReshardError(found["closed"])
        return found["versions"]

    def hold(self, version: int | None) -> str | None:
        """Holds a version and no other; returns its description, None if it is gone. None as the version holds none."""
        description = keeper.ask(self._socket, "hold", version=version)["description"]
        self._about = _digest(description, version)
        return description

    def read(self, parts: Sequence[tuple[SentPart, np.ndarray]]) -> None:
        """Reads parts of the held version into their places. Raises a ReshardError if values do not fit the dtype."""
        asked = [(part.leaf, part.box.start, part.box.stop, part.dtype.name) for part, _ in parts]
        keeper.send(self._socket, {"ask": "read", "parts": asked})
        for part, view in parts:
            is_direct = part.origin is None and view.flags.c_contiguous
            data = view if is_direct else np.empty(part.box.shape, part.dtype)
            nbytes, sum = _PART.unpack(keeper.exactly(self._socket, bytearray(_PART.size)))
            if nbytes == _FAULT:
                raise ReshardError(keeper.exactly(self._socket, bytearray(sum)).decode())
            if nbytes != data.nbytes:
                raise OSError(f"{nbytes} bytes came for {data.nbytes}")
            begun = _digest(part.leaf, part.box, part.dtype.name, self._about)
            if _checksum(keeper.exactly(self._socket, bytes_of(data)), begun) != sum:
                raise OSError("a part was damaged on the way")
            if not is_direct:
                part.put(data, view)
            self.bytes_received += nbytes

    def close(self) -> None:
        self._socket.close()
