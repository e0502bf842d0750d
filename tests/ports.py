"""Ports for tests that listen."""

import contextlib
import ipaddress
import os
import random
import socket
from pathlib import Path


def free_port() -> int:
    """A port of the loopback interface that nobody listens on, below those that the system gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def listening(pid: int) -> dict[int, str]:
    """The ports at which a process listens, each with its address."""
    own = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    found = {}
    for row in [r for n in ("tcp", "tcp6") for r in Path(f"/proc/{pid}/net/{n}").read_text().splitlines()[1:]]:
        _, local, _, state, *_, inode = row.split()[:10]
        if state == "0A" and inode in own:
            address, port = local.split(":")
            words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
            ip = ipaddress.ip_address(b"".join(words))
            found[int(port, 16)] = str(getattr(ip, "ipv4_mapped", None) or ip)
    return found
