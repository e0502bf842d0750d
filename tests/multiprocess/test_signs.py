"""What kernels answer for a process, and strangers at the ports that are ours to make safe."""

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import jobs
import pytest
from ports import listening

from mpmd.job import exits, signs

STRANGERS = (
    b"", bytes(4096), b"\xff" * 64, (1 << 30).to_bytes(8, "little"), (1 << 30).to_bytes(8, "big") + b"x",
    b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100), os.urandom(5000),
)  # fmt: skip


def bother(*ports: int) -> None:
    """Sends each of `STRANGERS` to each port twice: one leaves at once, one stays until all have sent."""
    with contextlib.ExitStack() as staying:
        for port in ports:
            for i, data in enumerate(STRANGERS * 2):
                with contextlib.suppress(OSError):
                    stranger = staying.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                    stranger.sendall(data)
                    if i < len(STRANGERS):
                        stranger.close()
        time.sleep(0.2)


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
    for _ in range(10):
        time.sleep(0.05)
        assert knock.lives()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lives(knock, False)
    knock.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_door_closes_whatever_comes_and_whoever_asked_asks_again(address):
    try:
        door = signs.Door(address)
    except OSError:
        pytest.skip(f"this machine has no {address}")
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


def said(job: jobs.Job, rank: int, name: str) -> dict:
    """The line that a rank has printed with a value of this name; gloo prints lines of its own."""
    return next(json.loads(line) for line in job.output(rank).splitlines() if f'"{name}"' in line)


@pytest.mark.slow
def test_strangers_at_the_ports_of_a_job_that_trains_change_nothing_but_at_the_transfer_server(tmp_path):
    with jobs.Job("strangers.py", tmp_path, processes=2, devices=2, hang_timeout_s=60) as job:
        job.wait_for("TRAINS", 120)
        assert job.service is not None
        ports = [listening(process.pid) for process in (job.service, *job.ranks)]
        transfers = [said(job, rank, "transfers")["transfers"] for rank in range(2)]
        assert {address for found in ports for address in found.values()} == {"127.0.0.1"}
        assert [len(found) for found in ports] == [1, 5, 4]  # rank 0 has a service of its own, which nobody uses
        bother(*(port for found in ports for port in found if port not in transfers))
        (tmp_path / "check").touch()
        job.wait_for('"together": [0, 1]', 30)
        for rank in range(2):
            reached = said(job, rank, "plain")
            assert reached["value"] == pytest.approx(reached["plain"], rel=1e-5)
        # XLA's own code, as docs/multihost.md says: if this ends one day, so does the warning there.
        bother(transfers[1])
        ended = job.wait(60)
        assert [e.status for e in ended] == [jobs.VICTIM_STATUS, -signal.SIGABRT]
        assert (ended[0].verdict or "").startswith("jax-mpmd: rank 1: died: process ")
