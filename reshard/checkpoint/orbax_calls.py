"""Makes Orbax's own checkpointers wait in our meetings, so that all processes learn at once that one cannot save.

Orbax itself waits at barriers of `jax.distributed`, in a computation of all devices, and for signals of the first
process that the folders exist: for 20 minutes or for ever, whatever has happened to the others.
"""

import contextlib
import functools
import itertools
import logging
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextvars import ContextVar
from typing import Any

import jax
import orbax.checkpoint as ocp

from mpmd import _jax_compat as compat
from mpmd.errors import RankLostError
from mpmd.job import joining
from reshard._orbax_compat import Store, around, future, in_v1, multihost, optional
from reshard.checkpoint.failures import known_failure
from reshard.checkpoint.meeting import as_told, meetings, said_of
from reshard.storage.finder import step_of
from reshard.storage.stored import UNFINISHED

# The number of the save that this context works for.
_number: ContextVar[str | None] = ContextVar("orbax_operation", default=None)
_numbering = threading.Lock()
# Checkpointers that may be saving in the background.
_saving: weakref.WeakSet[Any] = weakref.WeakSet()
_CLIENTS = "orbax.checkpoint._src.futures.signaling_client"
_Numbers = optional("OperationIdGenerator", "orbax.checkpoint._src.futures.synchronization")
_MOST_SAVES = 10**9  # between two losses of a rank
_WRITING_S = 10.0  # for the last piece of an interrupted save


def register() -> None:
    """Patches Orbax. If a release lacks some of the names, the others wait until Orbax's time limit."""
    for kind in (ocp.CheckpointManager, ocp.Checkpointer):
        _is_made_together(kind, "restore")
    for kind in (ocp.CheckpointManager, ocp.Checkpointer, ocp.AsyncCheckpointer):
        _is_made_together(kind, "save")
    _is_made_together(ocp.CheckpointManager, "__init__")
    around(ocp.CheckpointManager, "save")(_save_or_end)
    around(ocp.CheckpointManager, "_finalize")(_finish_or_end)
    joining.when_lost(_give_up, _read_again)
    logging.getLogger("absl").addFilter(_is_no_loss)
    _end_barriers()
    _end_threads()
    _number_in_context()
    _end_waiting_for_folders()
    around(Store, "_maybe_create_base_dir")(_create)
    _end_v1_barriers()
    _let_v1_meet()


def _is_made_together(kind: type, name: str) -> None:
    def ranks_of(self: object, *_: object, options: object = None, **__: object) -> set[int] | None:
        options = getattr(self, "_multiprocessing_options", getattr(options, "multiprocessing_options", None))
        return getattr(self, "_active_processes", None) or getattr(options, "active_processes", None)

    what, is_manager = "CheckpointManager" if name == "__init__" else name, issubclass(kind, ocp.CheckpointManager)

    def about(self: Any, place: Any = None, *_: Any, **named: Any) -> dict[str, str]:
        place = named.get("step", named.get("directory")) if place is None else place
        if name == "__init__" or place is None:
            return {}
        if is_manager:
            return {"the step": f"as {place}"} | ({"the folder": f"as {self.directory}"} if name == "save" else {})
        return {"the path": f"as {place}"} if name == "save" else {}  # restored paths may differ between processes

    did = "made a CheckpointManager" if name == "__init__" else f"called Orbax's {name}"

    @around(kind, name)
    def call(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranks = ranks_of(*args, **kwargs)
        if meetings.call is None and threading.current_thread() is threading.main_thread():
            joining.compare(did, {}, {}, ranks=ranks)  # with the calls of other processes that do not come here
        if what != "restore":
            _saving.add(args[0])
        with meetings.together(what, ranks, about(*args, **kwargs)), _named(what):
            return plain(*args, **kwargs)


def _is_no_loss(record: logging.LogRecord) -> bool:
    """Returns whether a log record is not about a save that the loss of a rank interrupted (reported elsewhere)."""
    error = record.exc_info and record.exc_info[1]
    return not isinstance(error, RankLostError) and RankLostError.__name__ not in str(error)


def _give_up() -> bool:
    """Ends the threads and errors of saves that the loss of a rank has interrupted; returns whether there were any."""
    was_saving = False
    for saving in list(_saving):
        try:
            getattr(saving, "wait_until_finished", int)()
        except Exception:
            was_saving = True
        with contextlib.suppress(AttributeError):
            saving._save_progress_tracker._value = False
    _end_writing()
    return was_saving


def _end_writing() -> None:
    """Waits until no thread of a save writes any more: Orbax joins one after the other, and none after an error.

    A file written later would lie in the folder of the next save.
    """
    end = time.monotonic() + _WRITING_S
    for thread in threading.enumerate():
        if isinstance(thread, getattr(future, "_SignalingThread", ())):
            threading.Thread.join(thread, max(0.0, end - time.monotonic()))


def _read_again() -> None:
    """Reads again from the folder which steps exist, as a replacement process does; renumbers the saves.

    From here on all processes number their saves alike, and use no old number: a replacement has made none of those
    saves. An interrupted save's signal still has its old number: others would write before the folder is made anew.
    """
    if hasattr(_Numbers, "_operation_id_counter"):
        _Numbers._operation_id_counter = itertools.count(joining.epoch() * _MOST_SAVES)
    for saving in list(_saving):
        if isinstance(saving, ocp.CheckpointManager):
            saving.reload()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if what == "save" and (known := _known(error)) is not error:
            raise known from error
        raise


def _known(error: BaseException) -> BaseException:
    """Returns the error of a save as the user is to see it, if it names a file and is known."""
    if isinstance(error, OSError) and error.filename is not None and not str(error.strerror).startswith("save:"):
        return known_failure(error, error.filename) or error
    return error


def _save_or_end(save: Callable[..., bool], self: ocp.CheckpointManager, *args: Any, **kwargs: Any) -> bool:
    """Saves. After a failure, ends the thread that was to finish the save; else the next save would raise its error."""
    try:
        return save(self, *args, **kwargs)
    except Exception:
        with contextlib.suppress(Exception):
            getattr(self._checkpointer, "wait_until_finished", int)()
        with contextlib.suppress(AttributeError):
            self._save_progress_tracker._value = False
        _list_again(self, args[0] if args else kwargs["step"])
        raise


def _finish_or_end(finish: Callable[..., None], self: ocp.CheckpointManager, step: int, *args: Any) -> None:
    """Finishes a save, often in the background. After a failure, lists again the steps that exist."""
    try:
        finish(self, step, *args)
    except Exception:
        _list_again(self, step)
        raise


def _list_again(manager: Any, failed: int) -> None:
    """Reads again which steps exist, and removes what a failed save has left in the first process's folder.

    Before a save has succeeded, Orbax takes the steps that it would replace off its list: it would neither restore nor
    remove them any more.
    """
    with contextlib.suppress(Exception):
        manager.reload()
        is_first = manager._multiprocessing_options.primary_host in (None, jax.process_index())
        for left in manager.directory.glob(f"*{UNFINISHED}*") if is_first else ():
            if step_of(left.name.partition(UNFINISHED)[0]) == failed:
                shutil.rmtree(str(left), ignore_errors=True)


def _end_barriers() -> None:
    skips = getattr(multihost, "should_skip_process_sync", None)
    if skips is None:
        return

    @around(multihost, "get_barrier_sync_fn")
    def get_barrier_sync_fn(barrier_of: Callable, *, processes: set[int] | None = None) -> Callable[..., None]:
        barrier = barrier_of(processes=processes)  # checks `processes`
        if skips(processes):
            return barrier
        return lambda *, key, timeout_ms: meetings.meet(key, timeout_ms, processes)

    @around(multihost, "sync_global_processes")
    def sync_global_processes(
        wait: Callable, name: str, *, processes: set[int] | None = None, **kwargs: object
    ) -> None:
        if processes is None and compat.distributed_client() is not None:  # else a computation of all devices
            processes = set(range(jax.process_count()))
        wait(name, processes=processes, **kwargs)


def _end_threads() -> None:
    """Makes threads that finish a returned save report errors to each other, instead of first meeting after one."""
    writes = optional("_AsyncManager", "orbax.checkpoint._src.checkpointers.async_checkpointer")
    finishes = optional("_FinalizeThread", "orbax.checkpoint.checkpoint_manager")
    state = optional("MultihostSynchronizedValue", "orbax.checkpoint._src.futures.synchronization")
    if writes is not None:
        _goes_on_with_call(writes, "start_async_commit", "_thread_func", "_exception")
    if finishes is not None:
        _goes_on_with_call(finishes, "__init__", "run", "exception")

    @around(state, "set")
    def meet_unless_failed(meet: Any, self: Any, value: Any) -> None:
        error = sys.exc_info()[1] if meetings.is_behind else None  # a caller may be handling an error of its own
        if error is None:
            meet(self, value)
        else:
            meetings.tell(error)
            self._value = value


def _goes_on_with_call(kind: type, begin: str, run: str, error: str) -> None:
    """Makes a thread continue the call in which it was begun. `run` is its function; an attribute holds its error."""
    if not (hasattr(kind, begin) and hasattr(kind, run)):  # another release: its threads meet the others after an error
        return

    @around(kind, begin)
    def begin_in_call(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        self._mpmd_call = meetings.call
        plain(self, *args, **kwargs)

    @around(kind, run)
    def run_in_call(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        with meetings.behind(self._mpmd_call):
            plain(self, *args, **kwargs)
            if (found := getattr(self, error, None)) is not None:
                meetings.tell(found)


def _end_v1_barriers() -> None:
    @around(optional("JaxDistributedSignalingClient", _CLIENTS), "wait_at_barrier")
    def wait_at_barrier(
        _: object, self: object, key: str, *, timeout_secs: int, process_ids: Sequence[int] | None = None
    ) -> None:
        meetings.meet(key, timeout_secs * 1000, None if process_ids is None else set(process_ids))


async def _create(create_or_wait: Callable[..., Coroutine], self: Any, base_dir: Any) -> None:
    """Makes the folder of the metadata in each process: waiting for the first one would hide the loss of a process."""
    base_dir.mkdir(parents=True, exist_ok=True)
    await create_or_wait(self, base_dir)


def _number_in_context() -> None:
    """Keeps the number of a save in its context. Orbax keeps the newest one of the process: of two threads that save at
    once, one would wait for the signals of the other, for ever.
    """

    @around(_Numbers, "next_operation_id")
    def next_operation_id(following: Callable[[], int]) -> int:
        with _numbering:
            number = following()
        _number.set(str(number))
        return number

    @around(_Numbers, "get_current_operation_id")
    def get_current_operation_id(newest: Callable[[], str]) -> str:
        return _number.get() or newest()


def _end_waiting_for_folders() -> None:
    """Reports a folder that cannot be made under the signal that the threads writing into it wait for."""
    clients = [
        optional(name, _CLIENTS) for name in ("JaxDistributedSignalingClient", "ThreadSafeKeyValueSignalingClient")
    ]
    thread = getattr(future, "_SignalingThread", None)
    if thread is None or None in clients:
        return
    for client in clients:
        around(client, "blocking_key_value_get")(_found_or_raised)

    @around(thread, "run")
    def run_and_say(run: Any, self: Any) -> None:
        _number.set(getattr(self, "_operation_id", None))
        run(self)
        error = getattr(self, "_exception", None)
        if error is not None and not isinstance(error, CancelledError):
            self._exception = _known(error)
            _say(self._exception, self._send_signals, self._operation_id)

    _goes_on_with_call(thread, "__init__", "run", "_exception")


def _say(error: BaseException, signals: Sequence[Any], operation: str) -> None:
    for signal in signals:
        key = future.AwaitableSignalsContract.get_unique_awaitable_singal_key(signal, operation)
        future.signaling_client.get_signaling_client().key_value_set(key, said_of(error), allow_overwrite=True)


def _found_or_raised(get: Callable[..., str], self: object, key: str, timeout_secs: int) -> str:
    end = time.monotonic() + timeout_secs
    while True:
        try:
            found = get(self, key, min(1, timeout_secs))
            break
        except (jax.errors.JaxRuntimeError, TimeoutError):
            joining.check()  # the process that was to send it may be lost
            if time.monotonic() > end:
                raise
    if found.startswith("{"):
        raise as_told(found)
    return found


def _let_v1_meet() -> None:
    """Patches Orbax's v1 alike: it has functions instead of checkpointers, and tasks instead of threads."""
    saving, loading, paths, context = map(
        in_v1, ("_src.saving.execution", "_src.loading.loading", "_src.path.async_utils", "_src.context.context")
    )
    for module, name, what in ((saving, "save_checkpointables_impl", "save"), (loading, "_load_impl", "restore")):
        if hasattr(context, "get_context"):
            around(module, name)(functools.partial(_meeting, context, what))
    around(getattr(saving, "_SaveResponse", None), "_finalize_save")(_finish_in_call)
    around(paths, "_create_paths")(_create_or_say)


def _meeting(context: Any, what: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    ranks = context.get_context().multiprocessing.active_processes
    with meetings.together(what, ranks), _named(what):
        return plain(*args, **kwargs)


async def _finish_in_call(finish: Callable[[object], Coroutine], self: object) -> None:
    """Runs the task that continues a save after it has returned."""
    with meetings.behind(meetings.call):
        try:
            await finish(self)
        except Exception as error:
            known = _known(error)
            meetings.tell(known)
            raise known from (None if known is error else error)


async def _create_or_say(
    create: Callable[..., Coroutine], *args: Any, operation_id: str, completion_signals: Sequence[Any], **kwargs: Any
) -> None:
    try:
        await create(*args, operation_id=operation_id, completion_signals=completion_signals, **kwargs)
    except Exception as error:
        _say(_known(error), completion_signals, operation_id)
        raise
