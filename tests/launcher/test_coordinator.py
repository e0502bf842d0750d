"""The coordination service as a process of its own, and the launcher's script as text."""

import shutil
import signal
import socket
import subprocess

import pytest
from launching import LAUNCHER, PATIENCE_S, PYTHON, clean_environment
from ports import free_port


def start(*arguments, program: tuple = ("-m", "mpmd.coordinator")) -> subprocess.Popen:
    return subprocess.Popen(
        [PYTHON, *program, *map(str, arguments)], env=clean_environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["SIGTERM", "the end of stdin"])
def test_it_serves_until_it_is_told_to_end(how):
    port = free_port()
    with start(port, 2, "--bind", "127.0.0.1") as process:
        try:
            assert process.stdout.readline() == "ready\n"
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
            process.send_signal(signal.SIGTERM) if how == "SIGTERM" else process.stdin.close()
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.slow
def test_a_port_in_use_is_refused_where_grpc_would_share_it():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another job's service does
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for bind in ("127.0.0.1", "[::]"):
            with start(port, 2, "--bind", bind) as process:
                out, err = process.communicate(timeout=PATIENCE_S)
            message = f"port {port} on {bind} cannot be used: Address already in use\n"
            assert (process.returncode, out, err) == (69, "", message)


@pytest.mark.parametrize(
    "arguments, message",
    [((0, 2), "PORT is 0, expected 1 to 65535"), ((5000, 0), "NUM is 0, expected 1 or more")],
)
def test_wrong_arguments_are_said(arguments, message):
    with start(*arguments) as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert err.splitlines()[-1] == f"python -m mpmd.coordinator: error: {message}"


def test_it_touches_no_device():
    program = (
        "import os, sys\nfrom mpmd import _jax_compat, coordinator\n"
        "end = os._exit\n"
        "def say(status):\n    print(_jax_compat.backends_are_initialized(), flush=True)\n    end(status)\n"
        "os._exit = say\ncoordinator.main(sys.argv[1:])"
    )
    with start(free_port(), 2, program=("-c", program)) as process:
        out, err = process.communicate("", timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "ready\nFalse\n"), err


@pytest.mark.slow
def test_the_launcher_has_no_fault_that_shellcheck_finds():
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("not installed: shellcheck")
    result = subprocess.run([program, str(LAUNCHER)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")
