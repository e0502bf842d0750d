"""Jobs of real processes: each rank runs one file of `programs/`, in the environment that the launcher gives.

    with Job("training.py", "1f1b", processes=2, devices=2) as job:
        ended = job.wait(limit_s=60)

What a rank prints goes to files, so that none can block on a full pipe. Processes are ended by their process id.
"""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from forked import Forked
from ports import free_port

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = Path(__file__).parent / "programs"
VICTIM_STATUS = 75


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
      status: its exit status; minus the signal's number where one killed it.
      out, err: what it printed.
      ended_at: on `time.monotonic`'s clock.
    """

    rank: int
    pid: int
    status: int
    out: str
    err: str
    ended_at: float

    @property
    def verdict(self) -> str | None:
        """The first line `jax-mpmd: rank N: …`."""
        return next((line for line in self.err.splitlines() if line.startswith("jax-mpmd: rank ")), None)

    @property
    def table(self) -> list[str]:
        """The lines under the verdict, one for each rank after the head."""
        lines = self.err.splitlines()
        if self.verdict is None:
            return []
        rows = lines[lines.index(self.verdict) + 1 :]
        return rows[: next((i for i, row in enumerate(rows) if not row.startswith("  ")), len(rows))]

    @property
    def result(self) -> Any:
        """The last line of its output, which is JSON."""
        return json.loads(self.out.splitlines()[-1])


class Job:
    """A number of processes that run one program together.

    Args:
      program: a file of `programs/`.
      *arguments: of the program.
      processes, devices: how many, and CPU devices of each.
      external: the coordination service is a process of its own; else rank 0 serves it.
      hang_timeout_s: as `--hang-timeout` of the launcher; None leaves it to the program.
      wire: one of `programs/wires.py` that values go by between processes, instead of the devices' own.
      flight: the folder for the flight records of the ranks.
      apart: each rank sees its own processes alone, as on a machine of its own.
    """

    def __init__(
        self,
        program: str,
        *arguments: Any,
        processes: int,
        devices: int = 1,
        external: bool = True,
        hang_timeout_s: float | None = None,
        wire: str | None = None,
        flight: Path | None = None,
        apart: bool = False,
    ):
        self.num_ranks = processes
        self.folder = Path(tempfile.mkdtemp(prefix="mpmd-job-"))
        self._ended: dict[int, Ended] = {}
        self.ranks: list[subprocess.Popen | Forked] = []
        self.service: Forked | None = None
        self.port = port = free_port()
        try:
            while external and self.service is None:
                self.port = port = free_port()  # another test may have taken the last one
                self.service = _start_service(port, processes, self.folder)
            command = [str(PROGRAMS / program), *map(str, arguments)]
            for rank in range(processes):
                environment = _environment(port, processes, rank, devices, external, hang_timeout_s)
                if wire is not None:
                    environment |= {"TEST_WIRE": wire, "TEST_WIRE_PORT": str(free_port())}
                if apart:
                    environment["MPMD_LOCAL_ONLY"] = "0"
                if flight is not None:
                    environment["MPMD_FLIGHT_DIR"] = str(flight)
                with open(self._file(rank, "out"), "wb") as out, open(self._file(rank, "err"), "wb") as err:
                    start = _start_apart if apart else Forked
                    self.ranks.append(start(command, environment, out, err))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def wait(self, limit_s: float, but: int | None = None) -> list[Ended]:
        """How all ranks ended, or all `but` one.

        Raises:
          AssertionError: one has not, within the limit; it says what each printed.
        """
        ranks = [rank for rank in range(self.num_ranks) if rank != but]
        self._until(lambda: all(rank in self._ended for rank in ranks), limit_s, "the end of the ranks")
        return [self._ended[rank] for rank in ranks]

    def wait_for(self, text: str, limit_s: float, ranks: tuple[int, ...] | None = None) -> None:
        """Returns when all ranks (or these) have printed a text."""
        ranks = tuple(range(self.num_ranks)) if ranks is None else ranks
        self._until(lambda: all(text in self.output(r) for r in ranks), limit_s, f"{text!r} from ranks {ranks}")

    def output(self, rank: int, stream: str = "out") -> str:
        """What a rank has printed so far."""
        return self._file(rank, stream).read_text(errors="replace")

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        self._poll()
        return [rank for rank in range(self.num_ranks) if rank not in self._ended]

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to a rank; when."""
        self.ranks[rank].send_signal(number)
        return time.monotonic()

    def kill_service(self) -> float:
        """Ends the coordination service by force; when."""
        assert self.service is not None
        self.service.kill()
        return time.monotonic()

    def close(self) -> None:
        """Ends what is left, by process id."""
        for process in (*self.ranks, *([self.service] if self.service is not None else [])):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def report(self) -> str:
        """What every rank has printed, for a failed test."""
        parts = []
        for rank in range(self.num_ranks):
            ended = self._ended.get(rank)
            parts.append(f"--- rank {rank}: {'still runs' if ended is None else f'status {ended.status}'}")
            parts += [self.output(rank)[-2000:], self.output(rank, "err")[-5000:]]
        return "\n".join(parts)

    def _file(self, rank: int, stream: str) -> Path:
        return self.folder / f"rank-{rank}.{stream}"

    def _poll(self) -> None:
        for rank, process in enumerate(self.ranks):
            if rank not in self._ended and process.poll() is not None:
                out, err = self.output(rank), self.output(rank, "err")
                self._ended[rank] = Ended(rank, process.pid, process.returncode, out, err, time.monotonic())

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        end = time.monotonic() + limit_s
        while True:
            self._poll()
            if condition():
                return
            ended_early = len(self._ended) == self.num_ranks
            if time.monotonic() > end or ended_early:
                raise AssertionError(f"waited {limit_s} s in vain for {what}\n{self.report()}")
            time.sleep(0.02)


def results(program: str, *arguments: Any, processes: int, limit_s: float = 300, **options: Any) -> list[Any]:
    """Runs a program to its end; what each rank printed last, as JSON."""
    with Job(program, *arguments, processes=processes, **options) as job:
        ended = job.wait(limit_s)
        assert [e.status for e in ended] == [0] * processes, job.report()
        return [e.result for e in ended]


def is_free(port: int) -> bool:
    """Whether one can listen on a port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _start_apart(words: list[str], environment: dict[str, str], out: Any, err: Any) -> subprocess.Popen:
    """A process that sees no others but its own."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *words]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def _start_service(port: int, processes: int, folder: Path) -> Forked | None:
    """The coordination service, listening until it is ended; None if somebody else listens on that port."""
    words = [ROOT / "mpmd" / "coordinator.py", port, processes, "--bind", "127.0.0.1"]
    read, write = os.pipe()
    with open(read, "rb") as said, open(write, "wb") as out, open(folder / "service.err", "wb") as err:
        service = Forked(words, _kept() | {"PYTHONPATH": str(ROOT)}, out, err, waits=True)
        out.close()
        first = said.readline()
    if first != b"ready\n":
        service.kill()
        service.wait()
        text = (folder / "service.err").read_text()
        if "already in use" in text:
            return None
        raise AssertionError(f"the coordination service did not start: {first!r}\n{text}")
    return service


def _environment(port: int, processes: int, rank: int, devices: int, external: bool, hang_timeout_s) -> dict[str, str]:
    environment = _kept() | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{PROGRAMS}",
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "MPMD_COORDINATOR": f"127.0.0.1:{port}",
        "MPMD_NUM_PROCESSES": str(processes),
        "MPMD_PROCESS_ID": str(rank),
        "MPMD_LOCAL_ID": str(rank),
        "MPMD_LOCAL_ONLY": "1",
    }
    if external:
        environment["MPMD_SERVICE"] = "external"
    if hang_timeout_s is not None:
        environment["MPMD_HANG_TIMEOUT_S"] = str(hang_timeout_s)
    return environment


def _kept() -> dict[str, str]:
    """This process's environment without what another test or job has set."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "MPMD_"))}
