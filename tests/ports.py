"""Ports for tests that listen."""

import random
import socket


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
