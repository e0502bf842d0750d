"""The process that keeps states in memory while the ranks of its host come and go: `python keeper.py`.

The launcher starts one on each host (`--restarts`) and holds its stdin. When stdin ends, the keeper ends. Its memory is
freed then, because states lie in anonymous memory and not in files. Ranks of this host get that memory through a Unix
socket and write into it. Ranks of other hosts send their bytes by TCP. A client proves that it has the job's token. A
record counts from its `commit` on.

A child of this process holds the memory, because the kernel kills large processes first when memory runs out. Then
another child takes over the sockets, with empty memory for the next version. The child ends with this process.

The keeper also makes a folder for compiled programs, which a restarted process loads, and removes it at its end.

It needs only the standard library and imports nothing of this package, so that it starts quickly.
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
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Message = dict[str, Any]  # of JSON
TOKEN = "MPMD_KEEPER_TOKEN"
_NO_ROOM = "no room for"  # begins the answer of a keeper without memory for a record
_NONCE = 32  # bytes; its answer is as long
_LARGEST_MESSAGE = 1 << 30
_BACKLOG = 1024
_PROOF_S = 20.0  # limit for the proof of a client that it has the token
_PAUSE_S = 0.2
_MOST_DEATHS, _LONG_S = 3, 60.0  # after this many children in a row that lived shorter, there is no room for states

Version = tuple[int, int]  # the number of the call of `resilient` in the program, and the step that made the state


class NoRoomError(OSError):
    """A keeper's host has no memory for a record now."""


def send(connection: socket.socket, message: Mapping[str, object]) -> None:
    """Sends a message: its length, and JSON."""
    text = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(text)) + text)


def receive(connection: socket.socket) -> Message:
    """Returns the next message.

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
    """Sends a request and returns the answer. Raises like `answer`."""
    send(connection, {"ask": what, **fields})
    return answer(connection)


def answer(connection: socket.socket) -> Message:
    """Returns the answer to a request.

    Raises:
      NoRoomError: the keeper's host has no memory for a record now.
      OSError: the answer is another error, or none has come.
    """
    found = receive(connection)
    if "error" in found:
        raise (NoRoomError if found["error"].startswith(_NO_ROOM) else OSError)(found["error"])
    return found


def exactly(connection: socket.socket, into: Any) -> Any:
    """Fills a buffer with the next bytes, and returns it."""
    view = memoryview(into)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection has ended")
        view = view[count:]
    return into


def keep_alive(connection: socket.socket) -> None:
    """Makes a connection fail when the other host is cut off, so that its unfinished records are abandoned."""
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_NODELAY", 1)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def challenge(connection: socket.socket, token: str) -> bool:
    """Sends a nonce; returns whether the answer proves that the other side has the token."""
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(nonce)
    return hmac.compare_digest(exactly(connection, bytearray(_NONCE)), hmac.digest(token.encode(), nonce, "sha256"))


def prove(connection: socket.socket, token: str) -> None:
    """Answers the other side's challenge."""
    connection.sendall(hmac.digest(token.encode(), exactly(connection, bytearray(_NONCE)), "sha256"))


def serve_forever(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Serves each connection in a thread of its own, until the listener is closed."""
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
            if listener.family != socket.AF_UNIX:
                keep_alive(connection)
        except OSError:  # it is closed, or there are no descriptors left
            time.sleep(_PAUSE_S)
            continue
        name = threading.current_thread().name
        threading.Thread(target=serve, args=(connection,), name=name, daemon=True).start()


class _Buffer:
    """Memory without a name, which a process of this host can map too."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.fd = os.memfd_create("jax-mpmd")
        try:
            os.posix_fallocate(self.fd, 0, max(1, nbytes))  # without room it fails here, and not in the writer
            self.memory = mmap.mmap(self.fd, max(1, nbytes))
        except BaseException:
            os.close(self.fd)
            raise

    def free(self) -> None:
        with contextlib.suppress(BufferError):  # somebody still reads it; the last reader frees it
            self.memory.close()
        os.close(self.fd)


class _Record:
    """The part of a version that one rank has committed."""

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
        """Returns the fields of each record, without its header."""
        with self._lock:
            return [{"number": number, **record.about} for number, record in self._records.items()]

    def record(self, number: int) -> _Record:
        with self._lock:
            return self._records[number]

    def begin(self, nbytes: int, below: Version) -> _Buffer:
        """Returns a buffer to write into. Drops records of versions below `below`, which is whole."""
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
        """Takes back a buffer without a committed record."""
        with self._lock:
            self._free.append(buffer)

    def keep(self, attempt: int, version: Version | None) -> None:
        """Drops all records except the ones of one version and attempt; None drops all."""
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
            self._connection.settimeout(_PROOF_S)
            if not challenge(self._connection, self._token):
                return
            self._connection.settimeout(None)
            while True:
                message = receive(self._connection)
                try:
                    getattr(self, "_on_" + message.pop("ask"))(**message)
                except (KeyError, MemoryError) as error:
                    send(self._connection, {"error": f"{type(error).__name__}: {error}"})
        except OSError:  # the rank has gone
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
        """Sends a signal to a process of this host, if the process with this pid has this start (in kernel ticks)."""
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

    def _new_buffer(self, nbytes: int, below: list[int]) -> _Buffer | None:
        """Returns a buffer and tells the rank its number, or tells it that there is no room and returns None."""
        try:
            buffer = self._memory.begin(nbytes, (below[0], below[1]))
        except OSError as error:
            send(self._connection, {"error": f"{_NO_ROOM} {nbytes:,} bytes: {error.strerror}"})
            return None
        self._begun[buffer.fd] = buffer
        send(self._connection, {"buffer": buffer.fd})
        return buffer

    def _on_begin(self, nbytes: int, below: list[int]) -> None:
        if (buffer := self._new_buffer(nbytes, below)) is not None:
            socket.send_fds(self._connection, [b"."], [buffer.fd])

    def _on_commit(self, buffer: int, about: dict[str, int], header: str) -> None:
        self._memory.commit(_Record(about, header, self._begun.pop(buffer)))
        send(self._connection, {})

    def _on_put(self, nbytes: int, below: list[int], about: dict[str, int], header: str) -> None:
        if (buffer := self._new_buffer(nbytes, below)) is None:
            return
        with memoryview(buffer.memory) as view:
            exactly(self._connection, view[:nbytes])
        self._on_commit(buffer.fd, about, header)


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
    """Keeps records until the pipe of the parent ends."""
    memory = Memory()

    def serve(connection: socket.socket) -> None:
        _Connection(connection, memory, token).serve()

    for listener in listeners:
        listener.listen(_BACKLOG)  # makes this process the owner of the socket, as its peers see it
        threading.Thread(target=serve_forever, args=(listener, serve), daemon=True).start()
    os.read(parent, 1)


def _have_kept(listeners: list[socket.socket], token: str, silence: float | None) -> None:
    """Runs a child that keeps records, and another one if it was killed, until stdin ends or is silent for long."""
    num_deaths = 0
    while num_deaths < _MOST_DEATHS:
        (end, until_end), (life, lives) = os.pipe(), os.pipe()
        begun = time.monotonic()
        if (child := os.fork()) == 0:
            for fd in (0, until_end, life):
                os.close(fd)
            _keep(listeners, token, end)
            os._exit(0)  # without a wait for the threads
        os.close(end)
        os.close(lives)
        is_over = False
        while not is_over and life not in (ready := select.select([0, life], [], [], silence)[0]):
            is_over = not ready or not os.read(0, 4096)
        os.close(until_end)
        os.close(life)
        _wait_or_kill(child)
        if is_over:
            return
        num_deaths = num_deaths + 1 if time.monotonic() - begun < _LONG_S else 1


def _wait_or_kill(child: int) -> None:
    """Waits for a child that is to end; kills it after a second, since it may be stopped."""
    end = time.monotonic() + 1.0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.01)


def main() -> None:
    """Keeps records until stdin ends, or is silent for longer than `--silence`."""
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
    # In one write: the launcher may take half of a line for the whole.
    os.write(sys.stdout.fileno(), f"ready {listeners[1].getsockname()[1]} {name}:{folder}\n".encode())
    try:
        _have_kept(listeners, token, options.silence)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
