"""Makes Orbax's own checkpointers wait in our meetings, so that all processes are told at once when one cannot save.

Orbax waits at barriers of `jax.distributed`, in a computation of all devices, and for signals of the first process
that it has made the folders: each for 20 minutes or without end, whatever became of the others.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import jax
import orbax.checkpoint as ocp

from mpmd import _jax_compat as compat
from reshard._orbax_compat import future, multihost, optional
from reshard.checkpoint.failures import known_failure
from reshard.checkpoint.meeting import as_told, meetings, said_of


def register() -> None:
    """Patches Orbax; with a release that lacks some of the names, the others wait until Orbax's time limit."""
    for kind in (ocp.CheckpointManager, ocp.Checkpointer):
        _is_made_together(kind, "restore")
    for kind in (ocp.CheckpointManager, ocp.Checkpointer, ocp.AsyncCheckpointer):
        _is_made_together(kind, "save")
    _is_made_together(ocp.CheckpointManager, "__init__")
    _end_after_failed_call()
    _end_barriers()
    _end_threads()
    _end_waiting_for_folders()


def _is_made_together(kind: Any, name: str) -> None:
    plain = getattr(kind, name)
    what = "CheckpointManager" if name == "__init__" else name

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = getattr(self, "_multiprocessing_options", None)
        ranks = getattr(self, "_active_processes", None) or getattr(options, "active_processes", None)
        with meetings.together(what, ranks), _named(what):
            return plain(self, *args, **kwargs)

    setattr(kind, name, call)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if what == "save" and (known := _known(error)) is not error:
            raise known from error
        raise


def _known(error: BaseException) -> BaseException:
    """The error of a save as the user is to see it, if it names a file and is known."""
    if isinstance(error, OSError) and error.filename is not None and not str(error.strerror).startswith("save:"):
        return known_failure(error, error.filename) or error
    return error


def _end_after_failed_call() -> None:
    """The thread that was to finish a save that failed ends with it; else the next save would raise its error."""
    save = ocp.CheckpointManager.save

    @functools.wraps(save)
    def save_or_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = set(self.all_steps())
        try:
            return save(self, *args, **kwargs)
        except Exception:
            with contextlib.suppress(Exception):
                getattr(self._checkpointer, "wait_until_finished", int)()
            # The step is neither listed nor being saved.
            with contextlib.suppress(AttributeError):
                self._checkpoints.delete_if(lambda info: info.step not in before)
                self._save_progress_tracker._value = False
            raise

    ocp.CheckpointManager.save = save_or_end


def _end_barriers() -> None:
    barrier_of = getattr(multihost, "get_barrier_sync_fn", None)
    wait = getattr(multihost, "sync_global_processes", None)
    skips = getattr(multihost, "should_skip_process_sync", None)
    if barrier_of is None or wait is None or skips is None:
        return

    @functools.wraps(barrier_of)
    def get_barrier_sync_fn(*, processes: set[int] | None = None) -> Callable[..., None]:
        barrier = barrier_of(processes=processes)  # checks `processes`
        if skips(processes):
            return barrier
        return lambda *, key, timeout_ms: meetings.meet(key, timeout_ms, processes)

    @functools.wraps(wait)
    def sync_global_processes(name: str, *, processes: set[int] | None = None, **kwargs: Any) -> None:
        if processes is None and compat.distributed_client() is not None:  # else a computation of all devices
            processes = set(range(jax.process_count()))
        wait(name, processes=processes, **kwargs)

    multihost.get_barrier_sync_fn = get_barrier_sync_fn
    multihost.sync_global_processes = sync_global_processes


def _end_threads() -> None:
    """Threads that finish a save when it has returned tell each other, instead of first meeting after an error."""
    writes = optional("_AsyncManager", "orbax.checkpoint._src.checkpointers.async_checkpointer")
    finishes = optional("_FinalizeThread", "orbax.checkpoint.checkpoint_manager")
    state = optional("MultihostSynchronizedValue", "orbax.checkpoint._src.futures.synchronization")
    if writes is not None:
        _goes_on_with_call(writes, "start_async_commit", "_thread_func", "_exception")
    if finishes is not None:
        _goes_on_with_call(finishes, "__init__", "run", "exception")
    if state is None:
        return
    meet = state.set

    @functools.wraps(meet)
    def meet_unless_failed(self: Any, value: Any) -> None:
        error = sys.exc_info()[1] if meetings.is_behind else None  # a caller may have an error of its own in hand
        if error is None:
            meet(self, value)
        else:
            meetings.tell(error)
            self._value = value

    state.set = meet_unless_failed


def _goes_on_with_call(kind: Any, begin: str, run: str, error: str) -> None:
    """`run` is the thread's function, begun in the call; it leaves its error in an attribute."""
    plain_begin, plain_run = getattr(kind, begin), getattr(kind, run)

    @functools.wraps(plain_begin)
    def begin_in_call(self: Any, *args: Any, **kwargs: Any) -> None:
        self._mpmd_call = meetings.call
        plain_begin(self, *args, **kwargs)

    @functools.wraps(plain_run)
    def run_in_call(self: Any, *args: Any, **kwargs: Any) -> None:
        with meetings.behind(self._mpmd_call):
            plain_run(self, *args, **kwargs)
            if (found := getattr(self, error)) is not None:
                meetings.tell(found)

    setattr(kind, begin, begin_in_call)
    setattr(kind, run, run_in_call)


def _end_waiting_for_folders() -> None:
    """A thread that cannot make a folder says so under the signal for which the threads that write in it wait."""
    kind, wait = getattr(future, "_SignalingThread", None), getattr(future, "wait_for_signals", None)
    if kind is None or wait is None:
        return
    run = kind.run

    def key_and_store(signal: Any, operation: str) -> tuple[str, Any]:
        key = future.AwaitableSignalsContract.get_unique_awaitable_singal_key(signal, operation)
        return key, future.signaling_client.get_signaling_client()

    @functools.wraps(run)
    def run_and_say(self: Any) -> None:
        run(self)
        error = self._exception
        if error is None or isinstance(error, CancelledError):
            return
        self._exception = _known(error)
        for signal in self._send_signals:
            key, store = key_and_store(signal, self._operation_id)
            store.key_value_set(key, said_of(self._exception), allow_overwrite=True)

    @functools.wraps(wait)
    def wait_for_signals(receive_signals: Sequence[Any], *, operation_id: str, **kwargs: Any) -> None:
        wait(receive_signals, operation_id=operation_id, **kwargs)
        for signal in receive_signals:
            key, store = key_and_store(signal, operation_id)
            if (said := store.key_value_try_get(key) or "").startswith("{"):
                raise as_told(said)

    kind.run = run_and_say
    future.wait_for_signals = wait_for_signals
