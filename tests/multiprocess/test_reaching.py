"""A coordinator that cannot be reached is one line, in time; without the check JAX aborts from C++ with a stack."""

import re
import socket

import pytest
from ports import free_port

import mpmd
from mpmd.job import joining, reaching


def one_line(capsys, address, **options) -> str:
    with pytest.raises(SystemExit) as left:
        reaching.check_coordinator(address, **{"serves": False, "limit_s": 0.3} | options)
    assert left.value.code == 69
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_address_that_cannot_be_used_is_one_line_that_says_what_to_do(capsys):
    name = "no-such-host.invalid:5000"
    for serves in (False, True):
        line = one_line(capsys, name, serves=serves)
        assert re.fullmatch(
            rf"jax-mpmd: coordinator {name}: the name of this host is not known .* \(tried for \d+ s\)", line
        )
    port = free_port()
    assert one_line(capsys, f"127.0.0.1:{port}").startswith(
        f"jax-mpmd: coordinator 127.0.0.1:{port}: nobody listens there"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        reaching.check_coordinator(f"127.0.0.1:{taken}", serves=False)
        assert one_line(capsys, f"127.0.0.1:{taken}", serves=True) == (
            f"jax-mpmd: coordinator 127.0.0.1:{taken}: port {taken} cannot be used here (Address already in use):"
            " take another port, or end what uses it"
        )
    reaching.check_coordinator(f"[::1]:{port}", serves=True)
    for address in ("node1", "node1:", ":5000", "node1:99999"):
        with pytest.raises(ValueError, match="expected host:port, such as 'node1:5000'"):
            reaching.check_coordinator(address, serves=False)


def test_a_taken_port_ends_initialize_with_one_line(capsys, monkeypatch):
    monkeypatch.setattr(joining.compat, "backends_are_initialized", lambda: False)  # as in a process that begins
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SystemExit) as left:
            mpmd.initialize(f"127.0.0.1:{port}", 2, 0)
    assert left.value.code == 69
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jax-mpmd: coordinator 127.0.0.1:{port}: port {port} cannot be used here")
