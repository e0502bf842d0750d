"""Runs the launcher as a user does, reads along, and finds (and ends) whatever it leaves behind.

Every process of a job carries a mark of its own in its environment, so that a leak is found by looking, not by trust.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "scripts" / "launch_multihost.sh"
PYTHON = sys.executable
# A loaded machine with two cores is slow; these limits say "never", not "late".
PATIENCE_S = 90.0
_MARK = "MPMD_TEST_MARK"
_INHERITED = ("JAX_", "XLA_", "MPMD_", "SLURM", "CUDA_")


def until(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Waits for a condition; fails, naming it, at the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def marked(mark: str) -> list[int]:
    """The processes that have this text in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return [pid for pid in found if alive(pid)]


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what the test runner has set for JAX, with our packages, and this Python as `python3`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return kept | {"PYTHONPATH": str(ROOT), "PATH": path} | more


class Launched:
    """A launcher that runs."""

    def __init__(self, arguments: tuple, environment: dict[str, str], prefix: tuple, cwd: Path):
        self.mark = f"{_MARK}={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        self._temporary = tempfile.TemporaryDirectory(prefix="launcher-")
        environment = environment | {name: value, "TMPDIR": self._temporary.name}
        # What runs the tests may ignore signals, and a shell cannot take notice of those that it was started with.
        words = ["env", "--default-signal", *prefix, str(LAUNCHER), *map(str, arguments)]
        self.process = subprocess.Popen(
            words, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._text: dict[str, list[bytes]] = {"out": [], "err": []}
        self._threads = [
            threading.Thread(target=self._read, args=(self.process.stdout, "out"), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, "err"), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream, name: str) -> None:
        while chunk := os.read(stream.fileno(), 65536):
            self._text[name].append(chunk)

    @property
    def out(self) -> str:
        return b"".join(self._text["out"]).decode()

    @property
    def err(self) -> str:
        return b"".join(self._text["err"]).decode()

    def wait_for_line(self, pattern: str, count: int = 1) -> list[str]:
        """The first groups of `pattern` in lines of stdout, once there are `count` of them."""
        until(
            lambda: len(self.matches(pattern)) >= count or self.process.poll() is not None, f"{pattern} in the output"
        )
        assert len(self.matches(pattern)) >= count, f"ended without {count} × {pattern}:\n{self.out}\n{self.err}"
        return self.matches(pattern)

    def matches(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.out, re.MULTILINE)

    def finish(self, limit_s: float = PATIENCE_S) -> int:
        """The exit status, when all output has come and no process is left."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher does not end:\n{self.out}\n{self.err}") from None
        for thread in self._threads:
            thread.join(limit_s)
            assert not thread.is_alive(), "somebody still holds the launcher's output"
        self.check_nothing_left()
        return status

    def check_nothing_left(self, limit_s: float = 30.0) -> None:
        """No process and no file of the job is left. (A guard may need a moment to find nothing to do.)"""
        until(lambda: not self.left(), f"the end of {[command(p) for p in self.left()]}", limit_s)
        until(lambda: not os.listdir(self._temporary.name), f"an empty {self._temporary.name}", limit_s)

    def left(self) -> list[int]:
        return [pid for pid in marked(self.mark) if pid != self.process.pid]

    def summary(self) -> list[str]:
        """The launcher's own lines on stderr, from its first line on."""
        lines = self.err.splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith("jax-mpmd: ")), len(lines))
        return lines[first:]

    def close(self) -> None:
        for pid in [*self.left(), *([self.process.pid] if self.process.poll() is None else [])]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._temporary.cleanup()


def command(pid: int) -> str:
    """A process and its command line, for messages."""
    try:
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return f"{pid}: gone"


@contextlib.contextmanager
def launch(*arguments, prefix: tuple = (), cwd: Path = ROOT, **environment: str) -> Iterator[Launched]:
    """Starts the launcher with these arguments; at the end nothing of it is left, whatever happened."""
    launched = Launched(arguments, clean_environment(**environment), prefix, cwd)
    try:
        yield launched
    finally:
        launched.close()


def run(*arguments, prefix: tuple = (), cwd: Path = ROOT, **environment: str) -> tuple[int, Launched]:
    """Runs the launcher to its end."""
    with launch(*arguments, prefix=prefix, cwd=cwd, **environment) as launched:
        return launched.finish(), launched


def shell(text: str) -> tuple[str, ...]:
    """A command after `--`: a bash script."""
    return ("--", "bash", "-c", text)


def python(text: str) -> tuple[str, ...]:
    """A command after `--`: a Python program."""
    return ("--", PYTHON, "-c", text)


def counting(num_lines: int, longest: int) -> tuple[str, ...]:
    """A command after `--`: lines of all lengths, each with the rank, its number at both ends, and filling."""
    return python(
        "import os\nr = os.environ['MPMD_PROCESS_ID']\n"
        f"for i in range({num_lines}):\n    print(r, i, r * (i % {longest}), i)\n"
    )


def torn(lines: Iterable[str], longest: int) -> list[str]:
    """Those of the lines of `counting` that are not as they were printed."""
    found = []
    for line in lines:
        match = re.match(r"\[(\d)\] \d (\d+) ", line)
        rank, i = match.groups() if match else ("", 0)
        if line != f"[{rank}] {rank} {i} {rank * (int(i) % longest)} {i}":
            found.append(line)
    return found
