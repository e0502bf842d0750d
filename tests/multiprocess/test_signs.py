"""What kernels answer for a process, and strangers at the ports that are ours to make safe."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import jobs
import pytest
from ports import free_port

from mpmd.job import exits, signs

STRANGERS = (
    b"", bytes(4096), b"\xff" * 64, (1 << 30).to_bytes(8, "little"), (1 << 30).to_bytes(8, "big") + b"x",
    b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100), os.urandom(5000),
)  # fmt: skip


def bother(port: int) -> None:
    """Sends each of `STRANGERS`, and leaves at once, or after a moment."""
    for data in STRANGERS:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(data)
            stranger.settimeout(0.1)
            stranger.recv(1000)


def lives(knock: signs.Knock, expected: bool, limit_s: float = 20.0) -> bool:
    """Whether the answer becomes the expected one."""
    end = time.monotonic() + limit_s
    while knock.lives() != expected and time.monotonic() < end:
        time.sleep(0.05)
    return knock.lives() == expected


def test_a_kernel_answers_for_a_process_as_long_as_it_is_there():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            door = signs.Door("127.0.0.1")
            os.write(writer, door.address.encode())
            signal.pause()
        finally:
            os._exit(1)
    address = os.read(reader, 100).decode()
    knock = signs.Knock(address)
    assert lives(knock, True)
    os.kill(pid, signal.SIGSTOP)
    bother(int(address.rpartition(":")[2]))
    for _ in range(30):
        time.sleep(0.1)
        assert knock.lives()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lives(knock, False)
    knock.close()


def test_a_door_closes_whatever_comes_and_whoever_asked_asks_again():
    door = signs.Door("127.0.0.1")
    knock = signs.Knock(door.address)
    for _ in range(3):
        assert lives(knock, True)
        bother(int(door.address.rpartition(":")[2]))
        door.clear()
        assert knock.lives()
    assert signs.Door(None).address == ""


def test_the_line_of_another_process_is_read_from_its_stacks():
    text = (
        'Thread 0x00007f (most recent call first):\n  File "/home/me/other.py", line 1 in f\n\n'
        f'Current thread 0x00007e (most recent call first):\n  File "{Path(signal.__file__)}", line 9 in pause\n'
        '  File "/home/me/data.py", line 12 in load\n  File "/home/me/train.py", line 3 in main\n'
    )
    assert exits.line_of(text) == "/home/me/data.py:12 in load"
    assert exits.line_of("") == ""


@pytest.mark.slow
def test_strangers_do_not_end_the_coordination_service(tmp_path):
    service = None
    while service is None:
        service = jobs._start_service(port := free_port(), 2, tmp_path / "err")
    try:
        for _ in range(5):
            bother(port)
        assert service.poll() is None
    finally:
        service.kill()
        service.communicate()
