"""Processes of this Python that begin where JAX and the packages are imported already.

A rank of a test takes over a second of a processor to import them, and a test has up to six ranks. So one process
imports them once, and each rank is its fork: it gets its own words, environment and files, runs its program as
`__main__`, and ends as any Python does. It differs in nothing that the packages look at; a test of the start itself
starts a Python of its own.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What most programs of the tests import.
_IMPORTED = "jax jax.numpy jax.experimental.transfer numpy optax mpmd reshard reshard.checkpoint scheduler".split()


class Forked:
    """A process, with what tests use of `subprocess.Popen`.

    Args:
      words: the program's file and its arguments.
      environment: all of it; `JAX_PLATFORMS` is "cpu".
      stdout, stderr: files that are open for writing.
      waits: its stdin ends with this process, or when `stdin` is closed; else it is empty.
    """

    def __init__(
        self, words: Iterable[Any], environment: dict[str, str], stdout: Any, stderr: Any, waits: bool = False
    ):
        self.returncode: int | None = None
        request = {"words": [str(word) for word in words], "environment": environment}
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        if not waits:
            self.stdin.close()
        with open(read, "rb") as stdin:
            self.pid = _origin().asked(request, [stdin.fileno(), stdout.fileno(), stderr.fileno()])

    def poll(self) -> int | None:
        """The exit status, minus the signal's number where one killed it; None while it runs."""
        if self.returncode is None:
            self.returncode = _origin().asked({"status": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, when it has ended; TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Origin:
    """The process that others are forked from, as this process sees it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "MPMD_"))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def asked(self, request: dict, files: Iterable[int] = ()) -> Any:
        """The answer to a request; the files go with it."""
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], list(files))
            answer = self._channel.recv(1 << 16)
        assert answer, f"the origin of the ranks has ended: {self._process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


_the_origin: _Origin | None = None


def _origin() -> _Origin:
    global _the_origin
    if _the_origin is None:
        _the_origin = _Origin()
    return _the_origin


def _serve(channel: socket.socket) -> tuple[dict, list[int]]:
    """Answers until the other side is gone; returns in each child, with what it was asked for and its files."""
    while True:
        message, files, *_ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "status" in request:
            pid, status = os.waitpid(request["status"], os.WNOHANG)
            channel.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
        elif pid := os.fork():
            channel.send(json.dumps(pid).encode())
            for file in files:
                os.close(file)
        else:
            channel.close()
            return request, files


def _become(request: dict, files: list[int]) -> str:
    """Takes the words, environment and files of a request; the program's file."""
    import jax

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.clear()
    os.environ.update(request["environment"])
    # What JAX reads when it is imported.
    jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", "-1")))
    sys.argv = request["words"]
    sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    return sys.argv[0]


if __name__ == "__main__":
    for name in _IMPORTED:
        __import__(name)
    with warnings.catch_warnings():
        # JAX warns of threads; nothing has started any that a fork would miss.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        __file__ = _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    exec(compile(Path(__file__).read_bytes(), __file__, "exec"))
