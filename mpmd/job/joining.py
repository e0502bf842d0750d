"""How a process joins a job of several: from the launcher's variables, a cluster, or arguments.

JAX's distributed runtime does the work. This module adds the variables of our launcher, agreement on plans before they
run, and the watchdog. A process belongs to one job, as in JAX.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax

from mpmd import _jax_compat as compat
from mpmd.errors import HangError
from mpmd.job import audits, reaching, spares
from mpmd.job.gathers import Gathers
from mpmd.job.job import Job
from mpmd.job.notes import note_of_tree
from mpmd.observe import ledger, pace

_DEFAULT_HANG_TIMEOUT_S = 300.0
_PLACE = "MPMD_COORDINATOR", "MPMD_NUM_PROCESSES", "MPMD_PROCESS_ID"
_JOINED = "MPMD_JOINED"  # for the children of a rank: where, as which rank and as which process their parent joined
# JAX's own heartbeat kills without a word, so it comes last.
_HEARTBEAT_MARGIN_S = 120
_DAY_S = 24 * 3600

_job: Job | None = None
# Callbacks of other packages: after the loss of a rank, and once all have met again (the second in its successor too).
_when_lost: list[tuple[Callable[[], bool], Callable[[], None]]] = []


@compat.api_boundary
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    hang_timeout_s: float | None = _DEFAULT_HANG_TIMEOUT_S,
) -> None:
    """Joins this process to a job: calls `jax.distributed.initialize` and starts the watchdog.

    Call it before anything else of JAX. Under `scripts/launch_multihost.sh`, Slurm (`srun`), Open MPI or in a
    Kubernetes indexed job it needs no arguments. Elsewhere a call without arguments does nothing, and the process is
    alone. A second call does nothing.

    While the job runs, every process publishes its activity. When one dies, raises, leaves or stops, all others end
    with status 75 and a table. The first line of the table names the guilty rank. (In `resilient`, another process may
    take its place instead.)

    Args:
      coordinator_address: `host:port` of process 0.
      num_processes: how many processes the job has.
      process_id: the number of this process, from 0.
      hang_timeout_s: seconds that a process may wait for one that does not move; None or 0 for no limit (deaths
        are found anyway). `--hang-timeout` of the launcher takes precedence.

    Raises:
      ValueError: some of the three are given, and the others are missing.
      RuntimeError: JAX has been used already.
    """
    global _job
    if _job is not None:
        return
    environment = dict(os.environ)
    given = (coordinator_address, num_processes, process_id)
    if all(x is None for x in given) and any(name in environment for name in _PLACE):
        given = _from_launcher(environment)
        _check_is_no_child(given, environment)
    if "MPMD_HANG_TIMEOUT_S" in environment:
        hang_timeout_s = _seconds(environment["MPMD_HANG_TIMEOUT_S"])
    _check_timeout(hang_timeout_s)
    slow_factor = _slow_factor(environment)
    if (number := given[2]) is not None:
        ledger.of_process(lambda: number)
    with _threads_beside_collectives():
        if compat.distributed_client() is None and not _join(given, hang_timeout_s, environment):
            return
        try:
            num_processes = jax.process_count()  # makes the devices
        except Exception:  # there is no watchdog yet, and the others would not come to JAX's last barrier
            compat.abandon_distributed()
            raise
    if num_processes > 1:
        store = compat.distributed_client()
        assert store is not None
        _job = Job(store, hang_timeout_s or None, environment, slow_factor)
        if not compat.has_cross_host_put():
            gathers = Gathers(_job, needs_all)
            compat.gather_by(gathers.allgather, gathers.broadcast)


@contextlib.contextmanager
def _threads_beside_collectives() -> Iterator[None]:
    """Makes JAX start two threads for each CPU device.

    A collective of several processes occupies a thread while it waits for the others. By default there is one thread
    for each device or each core, whichever is more. If collectives occupy all threads, no thread sends a value that
    another process pulls, and the collectives may wait for it. (JAX's pool inside large operations gets this size too.)
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
    """Returns the job of this process; None if it is alone. Starts it where the user joined by `jax.distributed`."""
    if _job is None and compat.distributed_client() is not None and jax.process_count() > 1:
        initialize()
    return _job


def settle() -> None:
    """Returns when all calls of the processes have been compared, and all audits are done.

    Raises:
      CorruptionError: a device of this process computes other bits than others do.
      ScheduleError: some called something else, or with other values, so their values are not to be trusted.
    """
    if (job := current()) is not None:
        job.calls.settle()
    audits.settle()


def check() -> None:
    """Raises a ScheduleError if calls were found to differ, or a RankLostError if a rank was lost. Does not wait."""
    if _job is not None:
        _job.calls.check()
        _job.check()


def epoch() -> int:
    """Returns the epoch of the job: how many ranks have been lost and replaced."""
    return 0 if _job is None else _job.epoch


def is_apart() -> bool:
    """Returns whether this process takes the place of a lost one, and has not met the others yet."""
    return _job is not None and _job.is_apart


def when_lost(give_up: Callable[[], bool], begin_again: Callable[[], None]) -> None:
    """Registers callbacks of `mpmd.resilient`: after the loss of a rank, and once all, its successor too, have met."""
    _when_lost.append((give_up, begin_again))


def give_up() -> bool:
    """Ends the common background work of the processes, such as a save; returns whether there was any."""
    given_up = [ends() for ends, _ in _when_lost]
    return any(given_up)


def begin_again() -> None:
    """Calls the callbacks for the time after all have met again."""
    for _, begins in _when_lost:
        begins()


def needs_all() -> None:
    """Announces common work of all processes. Outside of `mpmd.resilient`, it rules out replacements from then on.
    Raises a HangError if this process takes the place of a lost one, and has not met the others yet.
    """
    if _job is None:
        return
    if _job.is_apart:
        raise HangError(
            "mpmd: this process takes the place of a lost one, and would wait for the others before mpmd.resilient,"
            " where they do not wait for it; the job starts over."
        )
    if not _job.activity.goes_on:
        _job.bind()


def compare(
    did: str,
    types: Mapping[str, str],
    fixed: Mapping[str, str],
    identity: int | None = None,
    ranks: Iterable[int] | None = None,
) -> None:
    """Compares a call with the same call of `ranks` (None: all). `settle` waits for the result.

    Args:
      did, types, fixed, identity: the arguments of `note_of_tree`.

    Raises:
      ScheduleError: an earlier call differs.
    """
    if (job := current()) is None:
        return
    ranks = range(job.num_ranks) if ranks is None else ranks
    job.calls.note(sorted(ranks), note_of_tree(did, job.activity.step, types, fixed, identity))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Marks the tracing and compilation of a step. Meanwhile, others may wait longer for this process."""
    job = current()
    told = contextlib.nullcontext() if job is None else job.activity.during("compiling", "compiling a step")
    with ledger.during(ledger.COMPILING), told:
        yield


def _join(
    given: tuple[str | None, int | None, int | None], hang_timeout_s: float | None, environment: dict[str, str]
) -> bool:
    """Joins the job that was named or found; returns False if there is none."""
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
    if environment.get("MPMD_LOCAL_ONLY") == "1":
        compat.bind_cpu_collectives("127.0.0.1")
    bind = None
    if environment.get("MPMD_SERVICE") == "external":
        bind = "127.0.0.1:0"  # the launcher serves; nobody uses rank 0's own service
    elif address is not None and environment.get("MPMD_LOCAL_ONLY") == "1":
        bind = address
    if address is not None:
        serves = rank == 0 and environment.get("MPMD_SERVICE") != "external"
        reaching.check_coordinator(address, serves=serves)
    # JAX's service for preemption takes SIGTERM away from the program; the launcher needs it.
    jax.config.update("jax_enable_preemption_service", False)
    _keep_programs(environment)
    # At most as often as a service of the launcher (`mpmd.coordinator`) expects a heartbeat.
    heartbeat = int(min(hang_timeout_s or _DAY_S, _DAY_S)) + _HEARTBEAT_MARGIN_S
    is_spare = False
    if count is not None and rank is not None and rank >= count:
        is_spare = True
        with ledger.during(ledger.IDLE):
            rank = spares.wait_for_place(rank, environment)
        if (account := ledger.of_process()) is not None:
            account.event(f"{ledger.TAKES}{rank}", is_recovering=True)
    jax.distributed.initialize(address, count, rank, coordinator_bind_address=bind, heartbeat_timeout_seconds=heartbeat)
    if is_spare and rank == 0:
        compat.forget_topology()
    return True


def _keep_programs(environment: Mapping[str, str]) -> None:
    """Makes JAX keep compiled programs in the folder of this host's keeper, unless the user has named another one."""
    folder = environment.get("MPMD_KEEPER", "").split(":", 2)[2:]
    if folder and os.path.isdir(folder[0]) and compat.setting("jax_compilation_cache_dir") is None:
        jax.config.update("jax_compilation_cache_dir", folder[0])


def _check_is_no_child(given: tuple[str, int, int], environment: Mapping[str, str]) -> None:
    """Refuses a child process of a rank that has the rank's environment: it would join as this rank."""
    place = f"{given[0]} {given[2]} "
    joined = environment.get(_JOINED, "")
    if joined.startswith(place) and joined != f"{place}{os.getpid()}":
        raise RuntimeError(
            f"mpmd.initialize: rank {given[2]} of this job is process {joined.removeprefix(place)} already, which has"
            f" started this one. Start it without {', '.join(_PLACE)} in its environment. Where multiprocessing starts"
            " it, put the program itself under `if __name__ == '__main__':`."
        )
    os.environ[_JOINED] = f"{place}{os.getpid()}"


def _from_launcher(environment: Mapping[str, str]) -> tuple[str, int, int]:
    if missing := [n for n in _PLACE if n not in environment]:
        known = next(n for n in _PLACE if n in environment)
        raise ValueError(f"mpmd.initialize: {known} is set, but {' and '.join(missing)} is not.")
    address, count, rank = (environment[n] for n in _PLACE)
    num_spares = environment.get(spares.NUM_SPARES, "0")
    if num_spares != "0" and environment.get("MPMD_SERVICE") != "external":
        raise ValueError("mpmd.initialize: --spares needs the launcher's coordination service: is mpmd not installed?")
    if not (count.isdigit() and rank.isdigit() and (int(rank) < int(count) or spares.NUM_SPARES in environment)):
        raise ValueError(f"mpmd.initialize: {_PLACE[1]}={count!r}, {_PLACE[2]}={rank!r}: expected 0 <= id < number.")
    return address, int(count), int(rank)


def _in_cluster(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX can find out the number of this process on its own."""
    slurm = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"} <= set(environment)
    open_mpi = {"OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"} <= set(environment)
    kubernetes = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(environment)
    return slurm or open_mpi or kubernetes


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"mpmd.initialize: MPMD_HANG_TIMEOUT_S={text!r} is not a number of seconds.") from None


def _slow_factor(environment: Mapping[str, str]) -> float | None:
    """Returns the factor of the launcher's `--replace-slow`."""
    if (text := environment.get(pace.VARIABLE)) is None:
        return None
    with contextlib.suppress(ValueError):
        if 1 < (factor := float(text)) < math.inf and environment.get(spares.NUM_SPARES, "0") != "0":
            return factor
    raise ValueError(f"mpmd.initialize: {pace.VARIABLE}={text!r}: expected a number above 1, in a job with --spares.")


def _check_timeout(hang_timeout_s: object) -> None:
    if hang_timeout_s is not None and not (isinstance(hang_timeout_s, (int, float)) and hang_timeout_s >= 0):
        raise ValueError(f"mpmd.initialize: hang_timeout_s={hang_timeout_s!r}, expected seconds >= 0 or None.")
