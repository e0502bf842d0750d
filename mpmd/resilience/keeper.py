"""The process that keeps states in memory while the ranks of its host come and go: `python keeper.py`.

The launcher starts one on each host (`--restarts`) and holds its stdin. When that ends, so does the keeper, and with
it the memory, for states lie in anonymous memory and in no file. Ranks of this host write into that memory themselves:
a Unix socket hands it to them. Ranks of other hosts send their bytes by TCP. Whoever connects proves that it has the
job's token. A record counts from its `commit` on.

What has the memory is a child of this process, for the kernel kills large processes first where memory runs out. Then
another child takes over the sockets, with empty memory: the next version lies there. All ends with this process.

It also makes a folder for compiled programs, which a process that is started again then loads. The folder goes when the
keeper ends.

It needs the standard library alone and imports nothing of this package, so that it starts in no time.
"""

import argparse
import contextlib
import hashlib
import hmac
import json
import mmap
import os
import secrets
import select
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

Message = dict[str, Any]  # of JSON
TOKEN = "MPMD_KEEPER_TOKEN"
_NONCE = 32
_LARGEST_MESSAGE = 1 << 30
_BACKLOG = 1024
_PROOF_S = 20.0  # in which who connects proves that it has the token
_PAUSE_S = 0.2
_MOST_DEATHS, _LONG_S = 3, 60.0  # children in a row that live for less: there is no room for what they are to keep

Version = tuple[int, int]  # which call of `resilient` in the program, and the step whose result it is


def send(connection: socket.socket, message: Mapping[str, object]) -> None:
    """Sends a message: its length, and JSON."""
    text = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(text)) + text)


def receive(connection: socket.socket) -> Message:
    """The next message.

    Raises:
      OSError: the connection has ended, or this is no message.
    """
    (length,) = struct.unpack("!I", exactly(connection, bytearray(4)))
    if length > _LARGEST_MESSAGE:
        raise OSError(f"a message of {length} bytes")
    try:
        return json.loads(exactly(connection, bytearray(length)))
    except ValueError as error:
        raise OSError(f"no message: {error}") from None


def ask(connection: socket.socket, what: str, **fields: object) -> Message:
    """Sends a request and returns the answer, as `answer` does."""
    send(connection, {"ask": what, **fields})
    return answer(connection)


def answer(connection: socket.socket) -> Message:
    """The answer to a request.

    Raises:
      OSError: it is an error, or none has come.
    """
    found = receive(connection)
    if "error" in found:
        raise OSError(found["error"])
    return found


def exactly(connection: socket.socket, into: Any) -> Any:
    """Fills a buffer with what comes next, and returns it."""
    view = memoryview(into)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection has ended")
        view = view[count:]
    return into


def keep_alive(connection: socket.socket) -> None:
    """Lets a connection to a host whose cable was cut end, so that what was begun for it is given up."""
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_NODELAY", 1)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def proof(token: str, nonce: bytes) -> bytes:
    """What only who knows the token can answer."""
    return hmac.digest(token.encode(), nonce, "sha256")


class _Buffer:
    """Memory without a name, which a process of this host can map too."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.fd = os.memfd_create("jax-mpmd")
        try:
            os.posix_fallocate(self.fd, 0, max(1, nbytes))  # fails here, not in whoever writes, where there is no room
            self.memory = mmap.mmap(self.fd, max(1, nbytes))
        except BaseException:
            os.close(self.fd)
            raise

    def free(self) -> None:
        with contextlib.suppress(BufferError):  # somebody reads it; it goes with the last reader
            self.memory.close()
        os.close(self.fd)


class _Record:
    """What one rank has committed of one version."""

    def __init__(self, about: dict[str, int], header: str, buffer: _Buffer):
        self.about, self.header, self.buffer = about, header, buffer

    @property
    def version(self) -> Version:
        return self.about["call"], self.about["step"]


class Memory:
    """The records, and the buffers that are free for the next ones."""

    def __init__(self):
        self._lock = threading.Lock()
        self._records: dict[int, _Record] = {}
        self._count = 0
        self._free: list[_Buffer] = []

    def list(self) -> list[dict[str, int]]:
        """What is known of each record without its header."""
        with self._lock:
            return [{"number": number, **record.about} for number, record in self._records.items()]

    def record(self, number: int) -> _Record:
        with self._lock:
            return self._records[number]

    def begin(self, nbytes: int, below: Version) -> _Buffer:
        """A buffer to write into. Records of versions below `below`, which is whole, are of no use any more."""
        with self._lock:
            self._drop([n for n, record in self._records.items() if record.version < below])
            for buffer in self._free:
                if buffer.nbytes == nbytes:
                    self._free.remove(buffer)
                    return buffer
            self._forget_free()
        return _Buffer(nbytes)

    def commit(self, record: _Record) -> None:
        with self._lock:
            same = ("owner", "attempt", "call", "step")
            self._drop([
                n for n, r in self._records.items() if all(r.about[name] == record.about[name] for name in same)
            ])  # fmt: skip
            self._count += 1
            self._records[self._count] = record

    def abandon(self, buffer: _Buffer) -> None:
        """A buffer whose record is not committed any more."""
        with self._lock:
            self._free.append(buffer)

    def keep(self, attempt: int, version: Version | None) -> None:
        """Drops all records but those of one version that one attempt has written; None: all."""
        with self._lock:
            wanted = (attempt, version)
            self._drop([n for n, r in self._records.items() if (r.about["attempt"], r.version) != wanted])

    def _drop(self, numbers: Iterable[int]) -> None:
        self._free += [self._records.pop(number).buffer for number in numbers]

    def _forget_free(self) -> None:
        for buffer in self._free:
            buffer.free()
        self._free.clear()


class _Connection:
    """One rank that talks to the keeper."""

    def __init__(self, connection: socket.socket, memory: Memory, token: str):
        self._connection, self._memory, self._token = connection, memory, token
        self._begun: dict[int, _Buffer] = {}

    def serve(self) -> None:
        try:
            nonce = secrets.token_bytes(_NONCE)
            self._connection.settimeout(_PROOF_S)
            self._connection.sendall(nonce)
            if not hmac.compare_digest(exactly(self._connection, bytearray(32)), proof(self._token, nonce)):
                return
            self._connection.settimeout(None)
            while True:
                message = receive(self._connection)
                try:
                    getattr(self, "_on_" + message.pop("ask"))(**message)
                except (KeyError, MemoryError) as error:
                    send(self._connection, {"error": f"{type(error).__name__}: {error}"})
        except OSError:  # it has gone
            pass
        finally:
            for buffer in self._begun.values():
                self._memory.abandon(buffer)
            self._connection.close()

    def _on_list(self) -> None:
        send(self._connection, {"records": self._memory.list()})

    def _on_keep(self, attempt: int, version: list[int] | None) -> None:
        self._memory.keep(attempt, None if version is None else (version[0], version[1]))
        send(self._connection, {})

    def _on_end(self, pid: int, started: int, number: int) -> None:
        """Sends a signal to a process of this host, if it still is the one that began then (in the kernel's ticks)."""
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            if int(fields[19]) == started:
                os.kill(pid, number)
        send(self._connection, {})

    def _on_header(self, number: int) -> None:
        send(self._connection, {"header": self._memory.record(number).header})

    def _on_read(self, number: int, offset: int, nbytes: int) -> None:
        memory = self._memory.record(number).buffer.memory
        send(self._connection, {"nbytes": nbytes})
        with memoryview(memory) as view:
            self._connection.sendall(view[offset : offset + nbytes])

    def _on_map(self, number: int) -> None:
        buffer = self._memory.record(number).buffer
        send(self._connection, {"nbytes": buffer.nbytes})
        socket.send_fds(self._connection, [b"."], [buffer.fd])

    def _on_begin(self, nbytes: int, below: list[int]) -> None:
        try:
            buffer = self._memory.begin(nbytes, (below[0], below[1]))
        except OSError as error:
            send(self._connection, {"error": f"no room for {nbytes:,} bytes: {error.strerror}"})
            return
        self._begun[buffer.fd] = buffer
        send(self._connection, {"buffer": buffer.fd})
        socket.send_fds(self._connection, [b"."], [buffer.fd])

    def _on_commit(self, buffer: int, about: dict[str, int], header: str) -> None:
        self._memory.commit(_Record(about, header, self._begun.pop(buffer)))
        send(self._connection, {})

    def _on_put(self, nbytes: int, below: list[int], about: dict[str, int], header: str) -> None:
        try:
            buffer = self._memory.begin(nbytes, (below[0], below[1]))
        except OSError as error:
            send(self._connection, {"error": f"no room for {nbytes:,} bytes: {error.strerror}"})
            raise
        self._begun[buffer.fd] = buffer
        with memoryview(buffer.memory) as view:
            exactly(self._connection, view[:nbytes])
        self._on_commit(buffer.fd, about, header)


def _accept(listener: socket.socket, memory: Memory, token: str) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # there are no descriptors left
            time.sleep(_PAUSE_S)
            continue
        if listener.family != socket.AF_UNIX:
            keep_alive(connection)
        threading.Thread(target=_Connection(connection, memory, token).serve, daemon=True).start()


def _listeners(bind: str, name: str) -> list[socket.socket]:
    here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here.bind("\0" + name)
    here.listen(_BACKLOG)
    if bind != "::":
        return [here, socket.create_server((bind, 0), backlog=_BACKLOG)]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return [here, socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)]


def _keep(listeners: list[socket.socket], token: str, parent: int) -> None:
    """Keeps what it is given until the pipe of its parent ends."""
    memory = Memory()
    for listener in listeners:
        listener.listen(_BACKLOG)  # whoever asks the socket whose it is hears of this process
        threading.Thread(target=_accept, args=(listener, memory, token), daemon=True).start()
    os.read(parent, 1)


def _have_kept(listeners: list[socket.socket], token: str, silence: float | None) -> None:
    """Has a child keep what it is given, and another one if it was killed; until stdin ends, or is silent for long."""
    num_deaths = 0
    while num_deaths < _MOST_DEATHS:
        (end, until_end), (life, lives) = os.pipe(), os.pipe()
        begun = time.monotonic()
        if (child := os.fork()) == 0:
            for fd in (0, until_end, life):
                os.close(fd)
            _keep(listeners, token, end)
            os._exit(0)  # the threads have nothing to finish
        os.close(end)
        os.close(lives)
        is_over = False
        while not is_over and life not in (ready := select.select([0, life], [], [], silence)[0]):
            is_over = not ready or not os.read(0, 4096)
        os.close(until_end)
        os.close(life)
        os.waitpid(child, 0)
        if is_over:
            return
        num_deaths = num_deaths + 1 if time.monotonic() - begun < _LONG_S else 1


def main() -> None:
    """Keeps what it is given until stdin ends, or says nothing for longer than it was told to wait."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bind", default="::", metavar="ADDRESS", help="where to listen (default: everywhere)")
    parser.add_argument(
        "--silence", type=float, metavar="S", help="end after S seconds without a sign of life on stdin"
    )
    options = parser.parse_args()
    token, name = os.environ.pop(TOKEN), f"jax-mpmd-{secrets.token_hex(8)}"
    folder = os.path.join(tempfile.gettempdir(), f"jax-mpmd.{hashlib.sha256(token.encode()).hexdigest()[:16]}")
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    listeners = _listeners(options.bind, name)
    # At once: the launcher may take the half of a line for all of it.
    os.write(sys.stdout.fileno(), f"ready {listeners[1].getsockname()[1]} {name}:{folder}\n".encode())
    try:
        _have_kept(listeners, token, options.silence)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
