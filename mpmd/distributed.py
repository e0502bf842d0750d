"""Several processes as one job: how they find each other, agree on what they run, and end together.

JAX's distributed runtime does the work; this adds what it lacks: the variables of our launcher, agreement on
plans before they run, and the watchdog. A process belongs to one job, as in JAX, so the job is one per process.
"""

import atexit
import contextlib
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mpmd import _jax_compat as compat
from mpmd import wires
from mpmd.errors import HangError
from mpmd.watchdog import Watchdog

_DEFAULT_HANG_TIMEOUT_S = 300.0
# JAX's own heartbeat kills without a word, so it comes last.
_HEARTBEAT_MARGIN_S = 120
# An agreement is asked for in slices of this length, so that the main thread stays interruptible.
_SLICE_MS = 1000


class Job:
    """The processes that run together, as this one sees them.

    Attributes:
      rank, num_ranks: this process, and how many there are.
      store: the key-value store that they share.
      watchdog: says what this process is at.
      address: the interface that other processes reach this one by.
    """

    def __init__(self, store: Any, hang_timeout_s: float | None, environment: Mapping[str, str]):
        self.rank, self.num_ranks = jax.process_index(), jax.process_count()
        self.store = store
        coordinator = environment.get("MPMD_COORDINATOR") or compat.coordinator_address() or ""
        self.address = "127.0.0.1" if environment.get("MPMD_LOCAL_ONLY") == "1" else _address_towards(coordinator)
        serves = self.rank == 0 and environment.get("MPMD_SERVICE") != "external"
        self.watchdog = Watchdog(
            self.rank, self.num_ranks, store, hang_timeout_s, environment.get("MPMD_STATUS_DIR"), serves
        )
        self._counts: dict[tuple[int, ...], int] = {}
        self._wire: Any = None
        self.watchdog.start()
        store.key_value_set(f"mpmd/devices/{self.rank}", wires.hardware() if compat.has_cross_host_put() else "")
        atexit.register(self.watchdog.finish)

    def exchange(self, what: str, text: str, ranks: Sequence[int]) -> dict[int, str]:
        """What each of `ranks` says here; returns when all have said it. Calls come in the same order in all of them.

        Args:
          what: what it is about, for the report when a rank does not come.
          text: what this rank says.
          ranks: those that take part, this one among them.
        """
        ranks = tuple(sorted(ranks))
        count = self._counts[ranks] = self._counts.get(ranks, 0) + 1
        folder = f"mpmd/exchange/{zlib.crc32(repr(ranks).encode()):08x}/"
        self.store.key_value_set(f"{folder}{count}/{self.rank}", text, allow_overwrite=True)
        said = {self.rank: text}
        missing = [r for r in ranks if r != self.rank]
        with self.watchdog.during("agreeing", what, missing):
            while missing:
                try:
                    said[missing[0]] = self.store.blocking_key_value_get(f"{folder}{count}/{missing[0]}", _SLICE_MS)
                    missing.pop(0)
                except jax.errors.JaxRuntimeError as e:
                    _check_deadline(e, what)
                self.watchdog.waits_for(missing)
        if count > 1:  # all have come this far, so nobody reads the one before any more
            self.store.key_value_delete(f"{folder}{count - 1}/{self.rank}")
        return dict(sorted(said.items()))

    def find(self, key: str, what: str, rank: int) -> str:
        """What a rank publishes once under a key of the store; waits for it.

        Args:
          what: what is done meanwhile, for the report when it does not come.
        """
        with self.watchdog.during("agreeing", f"{what} of rank {rank}", [rank]):
            while True:
                try:
                    return self.store.blocking_key_value_get(key, _SLICE_MS)
                except jax.errors.JaxRuntimeError as e:
                    _check_deadline(e, what)

    def new_number(self, ranks: Sequence[int], what: str) -> int:
        """A number that all of `ranks` get alike and that no other call gets."""
        lowest = min(ranks)
        mine = str(self.store.key_value_increment("mpmd/numbers", 1)) if self.rank == lowest else ""
        return int(self.exchange(what, mine, ranks)[lowest])

    @property
    def wire(self) -> Any:
        """The transport between processes, opened at its first use."""
        if self._wire is None:
            self._wire = wires.open_wire(self)
        return self._wire

    @contextlib.contextmanager
    def as_a_whole(self):
        """Around transfers that other processes make too: if this one leaves on the way, the next may meet the rest."""
        try:
            yield
        except BaseException:
            if self._wire is not None:
                self._wire.interrupt()
            raise


def _check_deadline(e: Exception, what: str) -> None:
    """An answer that does not come yet is waited for; anything else is the end."""
    if "DEADLINE" not in str(e):
        raise HangError(f"mpmd: lost the coordination service while {what}: {e}") from None


_job: Job | None = None


@compat.api_boundary
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    hang_timeout_s: float | None = _DEFAULT_HANG_TIMEOUT_S,
):
    """Makes this process one of a job: `jax.distributed.initialize`, and the watchdog.

    Call it before anything else of JAX. Under `scripts/launch_multihost.sh`, Slurm (`srun`), Open MPI or in a
    Kubernetes indexed job it needs no arguments; outside any of them it does nothing and the process is alone.
    A second call does nothing.

    While the job runs, every process publishes what it is at. When one dies, raises, leaves or stops, all others
    end with status 75 and a table whose first line names the guilty rank.

    Args:
      coordinator_address: `host:port` of process 0.
      num_processes: how many processes the job has.
      process_id: which one this is, from 0.
      hang_timeout_s: seconds that a process may wait for one that does not move; None or 0 for no limit (deaths
        are found all the same). `--hang-timeout` of the launcher goes before it.

    Raises:
      ValueError: some of the three are given and others are not to be found.
      RuntimeError: JAX has been used already, so that it is too late.
    """
    global _job
    if _job is not None:
        return
    environment = dict(os.environ)
    given = (coordinator_address, num_processes, process_id)
    if all(x is None for x in given) and "MPMD_COORDINATOR" in environment:
        given = _from_launcher(environment)
    if "MPMD_HANG_TIMEOUT_S" in environment:
        hang_timeout_s = _seconds(environment["MPMD_HANG_TIMEOUT_S"])
    _check_timeout(hang_timeout_s)
    with _threads_beside_collectives():
        if compat.distributed_client() is None and not _join(given, hang_timeout_s, environment):
            return
        num_processes = jax.process_count()  # makes the devices
    if num_processes > 1:
        store = compat.distributed_client()
        assert store is not None
        _job = Job(store, hang_timeout_s or None, environment)


@contextlib.contextmanager
def _threads_beside_collectives():
    """Lets JAX start CPU devices with two threads for each of them.

    A collective of several processes keeps a thread while it waits for the others. By default there is one for each
    device or each core, whichever is more; if collectives have all of them, a value that another process pulls is not
    sent, and that may be what it waits for. (JAX sizes its pool for the insides of large operations alike.)
    """
    name = "PJRT_NPROC"
    threads = 2 * compat.num_cpu_devices()
    if name in os.environ or "NPROC" in os.environ or threads <= len(os.sched_getaffinity(0)):
        yield
        return
    os.environ[name] = str(threads)
    try:
        yield
    finally:
        del os.environ[name]


def current() -> Job | None:
    """The job of this process; None if it is alone. Started here where the user called `jax.distributed.initialize`."""
    if _job is None and compat.distributed_client() is not None and jax.process_count() > 1:
        initialize()
    return _job


def compiling() -> contextlib.AbstractContextManager:
    """While a step is traced and compiled: the others may wait longer for this process than otherwise."""
    job = current()
    return contextlib.nullcontext() if job is None else job.watchdog.during("compiling", "compiling a step")


def _join(given, hang_timeout_s, environment) -> bool:
    """Joins the job that was named or found; False if there is none."""
    address, count, rank = given
    if all(x is None for x in given):
        if not _in_cluster(environment):
            return False
    elif any(x is None for x in given):
        raise ValueError(
            f"mpmd.initialize: coordinator_address={address!r}, num_processes={count!r}, process_id={rank!r}:"
            " give all three, or none where the launcher, Slurm, Open MPI or Kubernetes says them."
        )
    if compat.backends_are_initialized():
        raise RuntimeError(
            "mpmd.initialize: JAX has been used already. Call it first, before jax.devices(), arrays and meshes."
        )
    bind = None
    if environment.get("MPMD_SERVICE") == "external":
        bind = "127.0.0.1:0"  # the launcher serves; rank 0's own service is for nobody
    elif address is not None and environment.get("MPMD_LOCAL_ONLY") == "1":
        bind = address
    if rank == 0 and address is not None and environment.get("MPMD_SERVICE") != "external":
        _check_port(address)
    # JAX's service for preemption takes SIGTERM away from the program; the launcher needs it.
    jax.config.update("jax_enable_preemption_service", False)
    heartbeat = int(hang_timeout_s or 24 * 3600) + _HEARTBEAT_MARGIN_S
    jax.distributed.initialize(address, count, rank, coordinator_bind_address=bind, heartbeat_timeout_seconds=heartbeat)
    return True


def _check_port(address: str) -> None:
    """JAX's service would share a port that another one has, and both jobs would be lost."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as e:
            raise RuntimeError(
                f"mpmd.initialize: port {port} of coordinator_address={address!r}: {e.strerror}."
            ) from None


def _from_launcher(environment) -> tuple[str, int, int]:
    names = ("MPMD_COORDINATOR", "MPMD_NUM_PROCESSES", "MPMD_PROCESS_ID")
    missing = [n for n in names if n not in environment]
    if missing:
        raise ValueError(f"mpmd.initialize: {names[0]} is set, but {' and '.join(missing)} is not.")
    address, count, rank = (environment[n] for n in names)
    if not (count.isdigit() and rank.isdigit() and int(rank) < int(count)):
        raise ValueError(f"mpmd.initialize: {names[1]}={count!r}, {names[2]}={rank!r}: expected 0 <= id < number.")
    return address, int(count), int(rank)


def _in_cluster(environment) -> bool:
    """Whether JAX can find out by itself which process this is."""
    slurm = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"} <= set(environment)
    open_mpi = {"OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"} <= set(environment)
    kubernetes = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(environment)
    return slurm or open_mpi or kubernetes


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"mpmd.initialize: MPMD_HANG_TIMEOUT_S={text!r} is not a number of seconds.") from None


def _check_timeout(hang_timeout_s) -> None:
    if hang_timeout_s is not None and not (isinstance(hang_timeout_s, (int, float)) and hang_timeout_s >= 0):
        raise ValueError(f"mpmd.initialize: hang_timeout_s={hang_timeout_s!r}, expected seconds >= 0 or None.")


def _address_towards(coordinator: str) -> str:
    """This machine's address as the coordinator's network sees it; loopback if that is where the coordinator is."""
    host, _, port = coordinator.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host or "127.0.0.1", int(port or 1)))
            return probe.getsockname()[0]
        except (OSError, ValueError):
            return "127.0.0.1"
