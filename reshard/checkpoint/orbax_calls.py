"""Makes Orbax's own checkpointers wait in our meetings, so that all processes are told at once when one cannot save.

Orbax waits at barriers of `jax.distributed`, in a computation of all devices, and for signals of the first process
that it has made the folders: each for 20 minutes or without end, whatever became of the others.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import jax
import orbax.checkpoint as ocp

from mpmd import _jax_compat as compat
from mpmd.job import joining
from reshard._orbax_compat import future, in_v1, multihost, optional
from reshard.checkpoint.failures import known_failure
from reshard.checkpoint.meeting import as_told, meetings, said_of

_CLIENTS = "orbax.checkpoint._src.futures.signaling_client"


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
    _end_v1_barriers()
    _let_v1_meet()


def _is_made_together(kind: Any, name: str) -> None:
    def ranks_of(self: Any, *_: Any, options: Any = None, **__: Any) -> set[int] | None:
        options = getattr(self, "_multiprocessing_options", getattr(options, "multiprocessing_options", None))
        return getattr(self, "_active_processes", None) or getattr(options, "active_processes", None)

    what, is_manager = "CheckpointManager" if name == "__init__" else name, issubclass(kind, ocp.CheckpointManager)

    def about(self: Any, place: Any = None, *_: Any, **named: Any) -> dict[str, str]:
        place = named.get("step", named.get("directory")) if place is None else place
        if name == "__init__" or place is None:
            return {}
        if is_manager:
            return {"the step": f"as {place}"} | ({"the folder": f"as {self.directory}"} if name == "save" else {})
        return {"the path": f"as {place}"} if name == "save" else {}  # what is read may have other paths elsewhere

    did = "made a CheckpointManager" if name == "__init__" else f"called Orbax's {name}"
    setattr(kind, name, _made_together(getattr(kind, name), what, ranks_of, about, did))


def _nothing(*_: Any, **__: Any) -> dict[str, str]:
    return {}


def _made_together(
    plain: Callable[..., Any],
    what: str,
    ranks_of: Callable[..., set[int] | None],
    about: Callable[..., dict[str, str]] = _nothing,
    did: str = "",
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        ranks = ranks_of(*args, **kwargs)
        if did and meetings.call is None and threading.current_thread() is threading.main_thread():
            joining.compare(did, {}, {}, ranks=ranks)  # with what the others call meanwhile, who do not come here
        with meetings.together(what, ranks, about(*args, **kwargs)), _named(what):
            return plain(*args, **kwargs)

    return call


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
    plain_begin, plain_run = getattr(kind, begin, None), getattr(kind, run, None)
    if plain_begin is None or plain_run is None:  # another release: its threads then meet the others after an error
        return

    @functools.wraps(plain_begin)
    def begin_in_call(self: Any, *args: Any, **kwargs: Any) -> None:
        self._mpmd_call = meetings.call
        plain_begin(self, *args, **kwargs)

    @functools.wraps(plain_run)
    def run_in_call(self: Any, *args: Any, **kwargs: Any) -> None:
        with meetings.behind(self._mpmd_call):
            plain_run(self, *args, **kwargs)
            if (found := getattr(self, error, None)) is not None:
                meetings.tell(found)

    setattr(kind, begin, begin_in_call)
    setattr(kind, run, run_in_call)


def _end_v1_barriers() -> None:
    client = optional("JaxDistributedSignalingClient", _CLIENTS)

    def wait_at_barrier(self: Any, key: str, *, timeout_secs: int, process_ids: Sequence[int] | None = None) -> None:
        meetings.meet(key, timeout_secs * 1000, None if process_ids is None else set(process_ids))

    if hasattr(client, "wait_at_barrier"):
        client.wait_at_barrier = wait_at_barrier


def _end_waiting_for_folders() -> None:
    """Whoever cannot make a folder says so under the signal for which the threads that write in it wait."""
    clients = [
        optional(name, _CLIENTS) for name in ("JaxDistributedSignalingClient", "ThreadSafeKeyValueSignalingClient")
    ]
    thread = getattr(future, "_SignalingThread", None)
    if thread is None or None in clients:
        return
    for client in clients:
        _raises_what_is_said(client)
    run = thread.run

    @functools.wraps(run)
    def run_and_say(self: Any) -> None:
        run(self)
        error = getattr(self, "_exception", None)
        if error is not None and not isinstance(error, CancelledError):
            self._exception = _known(error)
            _say(self._exception, self._send_signals, self._operation_id)

    thread.run = run_and_say
    _goes_on_with_call(thread, "__init__", "run", "_exception")


def _say(error: BaseException, signals: Sequence[Any], operation: str) -> None:
    for signal in signals:
        key = future.AwaitableSignalsContract.get_unique_awaitable_singal_key(signal, operation)
        future.signaling_client.get_signaling_client().key_value_set(key, said_of(error), allow_overwrite=True)


def _raises_what_is_said(client: Any) -> None:
    get = client.blocking_key_value_get

    @functools.wraps(get)
    def blocking_key_value_get(self: Any, key: str, timeout_secs: int) -> str:
        found = get(self, key, timeout_secs)
        if found.startswith("{"):
            raise as_told(found)
        return found

    client.blocking_key_value_get = blocking_key_value_get


def _let_v1_meet() -> None:
    """Orbax's v1 has functions for checkpointers, and tasks for threads; the rest is the same."""
    saving, loading, paths, context = map(
        in_v1, ("_src.saving.execution", "_src.loading.loading", "_src.path.async_utils", "_src.context.context")
    )
    for module, name, what in ((saving, "save_checkpointables_impl", "save"), (loading, "_load_impl", "restore")):
        if hasattr(module, name) and hasattr(context, "get_context"):
            ranks_of = functools.partial(_ranks_of_context, context)
            setattr(module, name, _made_together(getattr(module, name), what, ranks_of))
    response: Any = getattr(saving, "_SaveResponse", None)
    if hasattr(response, "_finalize_save"):
        response._finalize_save = _told(response._finalize_save)
    if hasattr(paths, "_create_paths"):
        paths._create_paths = _made_or_said(paths._create_paths)


def _ranks_of_context(context: Any, *_: Any, **__: Any) -> set[int] | None:
    return context.get_context().multiprocessing.active_processes


def _told(finish: Callable[[Any], Coroutine]) -> Callable[[Any], Coroutine]:
    """The task that goes on with a save when it has returned."""

    @functools.wraps(finish)
    async def finish_in_call(self: Any) -> None:
        with meetings.behind(meetings.call):
            try:
                await finish(self)
            except Exception as error:
                known = _known(error)
                meetings.tell(known)
                raise known from (None if known is error else error)

    return finish_in_call


def _made_or_said(create: Callable[..., Coroutine]) -> Callable[..., Coroutine]:
    @functools.wraps(create)
    async def create_or_say(*args: Any, operation_id: str, completion_signals: Sequence[Any], **kwargs: Any) -> None:
        try:
            await create(*args, operation_id=operation_id, completion_signals=completion_signals, **kwargs)
        except Exception as error:
            _say(_known(error), completion_signals, operation_id)
            raise

    return create_or_say
